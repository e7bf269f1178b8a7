"""The training loop of the programs: parts of a batch, signals, the best state, and one message for what diverges."""

import dataclasses
import os
import signal
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import same
from torch import Tensor

from examples.common.fit import Signals, fit, give_memory_back, make_fabric
from examples.common.runs import SEAL, RunError, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True)
class Run:
    steps: int = 6
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    evaluations: int = 3


def train(
    path: Path, act: Callable[[int], None] = lambda step: None, parts: int = 0, run: Run | None = None,
    dropout: float = 0.5, **options: Any,
) -> torch.nn.Module:  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))

    def compute(part: Tensor) -> Tensor:
        return (model(part) - 1).square().mean()

    def losses(step: int) -> Any:
        act(step)
        batch = DATA[8 * step :][:8]
        return [partial(compute, part) for part in batch.chunk(parts)] if parts else compute(batch)

    fit(
        model, None, run or Run(), path, losses, lambda: [{"error": float((model(DATA) - 1).square().mean())}],
        **options,
    )  # fmt: skip
    return model


def test_a_batch_in_parts_has_the_gradient_of_the_whole(tmp_path: Path) -> None:
    models = [
        train(tmp_path / f"{parts}.pt", parts=parts, run=Run(steps=1, evaluations=1), dropout=0) for parts in (0, 1, 4)
    ]
    whole, one, four = ([parameter.grad for parameter in model.parameters()] for model in models)
    assert same(whole, one)
    torch.testing.assert_close(four, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_costs_no_bit(number: int, tmp_path: Path) -> None:
    path, before = tmp_path / "run.pt", signal.getsignal(number)
    whole = train(tmp_path / "whole.pt")
    with pytest.raises(SystemExit) as stop:
        train(path, lambda step: os.kill(os.getpid(), number) if step == 2 else None)
    assert stop.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert read_checkpoint(path)["step"] == 3
    torch.rand(3)
    assert same(train(path).state_dict(), whole.state_dict())


def test_the_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    signals = Signals()
    signals.receive(signal.SIGTERM, None)
    assert (signals.number, codes) == (signal.SIGTERM, [])
    signals.receive(signal.SIGINT, None)
    assert codes == [130]


def test_the_best_state_is_whole_and_training_can_go_on_from_it(tmp_path: Path) -> None:
    path, best = tmp_path / "run.pt", tmp_path / "best.pt"
    model = train(path, score=lambda row: row["step"] == 4, best_path=best, measure_first=True)
    assert [row["step"] for row in read_checkpoint(path)["rows"]] == [0, 2, 4, 6]
    assert read_checkpoint(best)["step"] == 4
    os.replace(best, path)
    assert same(train(path, measure_first=True).state_dict(), model.state_dict())


def test_checkpoints_come_every_so_many_steps(tmp_path: Path) -> None:
    def end(step: int) -> None:
        if step == 5:
            raise KeyError

    with pytest.raises(KeyError):
        train(tmp_path / "run.pt", end, run=Run(evaluations=1), save_every=3)
    assert read_checkpoint(tmp_path / "run.pt")["step"] == 3


def test_mixed_precision_computes_in_16_bits(tmp_path: Path) -> None:
    dtypes = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: dtypes.append(out.dtype))
    try:
        train(tmp_path / "run.pt", run=Run(steps=1, evaluations=1), fabric=make_fabric("cpu", "bf16-mixed"))
    finally:
        hook.remove()
    assert {*dtypes} == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in read_checkpoint(tmp_path / "run.pt")["model"].values())


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_run_that_diverges_ends_with_one_message_and_finite_checkpoints(save_every: int, tmp_path: Path) -> None:
    run = Run(learning_rate=1e30)
    with pytest.raises(RunError, match=r"to stay finite \(got NaN or inf at step \d of run\): training has diverged"):
        train(tmp_path / "run.pt", run=run, save_every=save_every, clip_norm=0.0)
    if (tmp_path / "run.pt").exists():
        assert all(value.isfinite().all() for value in read_checkpoint(tmp_path / "run.pt")["model"].values())


def test_a_checkpoint_is_an_archive_that_ends_in_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write_checkpoint(path, {"weights": torch.arange(300.0)})
    with zipfile.ZipFile(path) as archive:
        assert archive.comment.startswith(b"sha256:")
    for saved in (torch.load(path, weights_only=True), read_checkpoint(path)):
        assert torch.equal(saved["weights"], torch.arange(300.0))
    content = path.read_bytes()
    for place in [*range(0, len(content), 97), *range(len(content) - SEAL - 24, len(content))]:
        for damaged in (content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], content[:place]):
            path.write_bytes(damaged)
            with pytest.raises(RunError, match=r"run.pt' to be as it was written"):
                read_checkpoint(path)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc of Linux")
def test_memory_between_what_lives_on_goes_back() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(2**14) for _ in range(4000)]  # 64 KiB each, 250 MiB
    before = held()
    blocks = blocks[::50]
    give_memory_back()
    assert before - held() > 150 * 2**20
    assert all(bool((block == 1).all()) for block in blocks)
