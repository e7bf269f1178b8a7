"""Runs that are stopped, killed, damaged and shared: they end with what one process ends with that nothing happened to."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.lra import checkpoints, processes, report
from examples.lra import train as trainer
from examples.lra.__main__ import main
from examples.lra.checkpoints import claim
from examples.lra.data.prepare import load
from examples.lra.data.tasks import TASKS
from examples.lra.model import Classifier
from examples.lra.settings import SETTINGS, parse, resolve
from examples.lra.train import Data, hint
from sbm_pyg import AttentionGraph, patterns

ROOT = Path(report.__file__).parents[2]
TINY = "--steps 9 --validate-every 5 --log-every 3 --save-every 2 --layers 1 --batch-size 8 --accumulate 2 --num-blocks 8 --channels 16"
TINY += " --head-channels 8 --ffn-channels 16 --dropout 0.1 --attention-dropout 0.1 --clip-norm 1 --accelerator cpu"

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plot_curves", "plot_densities", "plot_masks"):
        monkeypatch.setattr(report, name, lambda *arguments: None)


def train(data: Path, folder: Path, *options: str) -> None:
    main(["train", *TINY.split(), "--data", str(data), "--output", str(folder), *options])


def resume(folder: Path, *options: str) -> None:
    main(["train", "--output", str(folder), "--accelerator", "cpu", *(options or ("--resume",))])


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(data, folder)
    return folder


def state(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "global_step")
    saved = checkpoints.read_checkpoint(folder / name)
    return {part: saved[part] for part in parts}


def same(one: Any, other: Any) -> bool:
    """Says whether two nests of dictionaries, lists, tensors and numbers are equal in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def rows(folder: Path) -> list[dict[str, str]]:
    files = ("train.csv", "val.csv")
    return [{**row, "tokens_per_second": ""} for name in files for row in report.read_rows(folder / name)]


def assert_same_end(folder: Path, whole: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        assert same(state(folder, name), state(whole, name)), name
    assert rows(folder) == rows(whole)
    assert (
        json.loads((folder / "results.json").read_text())["test"]
        == json.loads((whole / "results.json").read_text())["test"]
    )


class Crash(BaseException):
    """Ends a run as abruptly as can be done within a process."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans something for the moment before a part of a step is computed; once."""
    original = Classifier.training_step

    def plan(step: int, part: int, action: Callable[[], None]) -> None:
        def doomed(self: Classifier, batch: Any, batch_idx: int) -> Any:
            if (self.global_step, batch_idx % self.settings.accumulate) == (step, part):
                monkeypatch.setattr(Classifier, "training_step", original)
                action()
            return original(self, batch, batch_idx)

        monkeypatch.setattr(Classifier, "training_step", doomed)

    return plan


def crash() -> None:
    raise Crash


@pytest.mark.parametrize(("step", "part", "saved"), [(1, 1, None), (3, 0, 2), (4, 1, 4), (5, 0, 5), (8, 1, 8)])
def test_a_crash_at_any_step_costs_the_steps_since_the_last_checkpoint(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None], step: int, part: int, saved: int | None
) -> None:
    folder = tmp_path / "run"
    at(step, part, crash)
    with pytest.raises(Crash):
        train(data, folder)
    start = checkpoints.newest(folder)
    assert (start and checkpoints.read_checkpoint(start)["global_step"]) == saved
    resume(folder)
    assert_same_end(folder, whole)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_crash_at_any_moment_of_saving_leaves_a_checkpoint(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Callable[..., None], function: str
) -> None:
    folder = tmp_path / "run"
    original, calls = getattr(os, function), itertools.count()

    def doomed(*arguments: Any) -> None:
        if next(calls) == 1:  # of two renames the second
            raise Crash
        original(*arguments)

    at(3, 0, lambda: monkeypatch.setattr(os, function, doomed))
    with pytest.raises(Crash):
        train(data, folder)
    monkeypatch.setattr(os, function, original)
    start = checkpoints.newest(folder)
    assert start is not None
    assert start.name == ("last.ckpt" if function == "fsync" else "previous.ckpt")
    resume(folder)
    assert_same_end(folder, whole)


@pytest.mark.parametrize(
    ("number", "code", "step", "part"),
    [(signal.SIGINT, 130, 2, 0), (signal.SIGTERM, 143, 6, 1), (signal.SIGTERM, 143, 4, 1)],
)
def test_a_signal_ends_the_run_after_its_step(
    data: Path,
    whole: Path,
    tmp_path: Path,
    at: Callable[..., None],
    capsys: pytest.CaptureFixture,
    number: int,
    code: int,
    step: int,
    part: int,
) -> None:
    folder, before = tmp_path / "run", signal.getsignal(number)
    at(step, part, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as stop:
        train(data, folder)
    assert stop.value.code == code
    assert signal.getsignal(number) is before
    assert f"--output {folder} --resume" in capsys.readouterr().out
    assert state(folder)["global_step"] == step + 1
    resume(folder)
    assert_same_end(folder, whole)


def test_the_hint_repeats_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/lra.py"])
    words = ["--prepared", "a b", "--accelerator", "cpu", "--threads", "1", "--export", "models/it's"]
    command = shlex.split(hint(parse([*words, "--steps", "9"]), tmp_path / "a run"))
    assert command[:5] == ["python", "examples/lra.py", "--output", str(tmp_path / "a run"), "--resume"]
    assert sorted(command[5:]) == sorted(words)
    assert hint(parse([]), Path("run")) == "python examples/lra.py --output run --resume"
    monkeypatch.setattr(sys, "argv", ["examples/lra/__main__.py", "train"])
    assert hint(parse([]), Path("run")) == "python -m examples.lra train --output run --resume"
    monkeypatch.setattr(processes, "count", lambda: 2)
    assert hint(parse([]), Path("run")).startswith(
        "torchrun --nnodes 1 --nproc-per-node 2 -m examples.lra train --output run"
    )


def test_a_run_goes_on_in_as_many_processes_as_it_was_started_with(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plan = json.loads((whole / SETTINGS).read_text())
    assert plan["processes"] == 1
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / SETTINGS).write_text(json.dumps({**plan, "processes": 2}))
    with pytest.raises(SystemExit):
        resume(tmp_path / "run")
    assert "Expected as many processes as the run to resume has, 2 (got 1)" in capsys.readouterr().err


def test_time_is_a_budget_of_one_process(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse(["--minutes", "1", "--data", str(data), "--output", str(tmp_path / "run")])
    trainer.check(given, *resolve(given))
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(ValueError, match=r"Expected one process with 'minutes' \(got 2\)"):
        trainer.check(given, *resolve(given))


@pytest.mark.slow
def test_as_many_steps_are_taken_as_fit_into_a_time(data: Path, tmp_path: Path) -> None:
    words = TINY.replace("--steps 9 ", "").split()
    main(["train", *words, "--minutes", "0.1", "--data", str(data), "--output", str(tmp_path / "run")])
    plan = json.loads((tmp_path / "run" / SETTINGS).read_text())
    assert plan["minutes"] == 0.1
    assert report.read_curves(tmp_path / "run" / "train.csv")[-1]["step"] == plan["settings"]["steps"]
    assert 1 < json.loads((tmp_path / "run" / "results.json").read_text())["seconds"] < 60
    resume(tmp_path / "run", "--resume", "--minutes", "0.1")


def test_a_run_with_relative_places_is_resumed_from_anywhere(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    train(Path(data.name), tmp_path / "run", "--steps", "2", "--prepared", "arrays")
    monkeypatch.chdir(tmp_path)
    resume(tmp_path / "run")
    assert not (tmp_path / "arrays").exists()


def test_mixed_precision_resumes_too(data: Path, tmp_path: Path, at: Callable[..., None]) -> None:
    train(data, tmp_path / "whole", "--precision", "bf16-mixed")
    at(3, 1, crash)
    with pytest.raises(Crash):
        train(data, tmp_path / "run", "--precision", "bf16-mixed")
    resume(tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_the_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    signals = checkpoints.Signals()
    signals.patient = True
    signals.receive(signal.SIGTERM, None)
    assert signals.agreed()
    assert codes == []
    signals.receive(signal.SIGINT, None)
    assert codes == [130]


def test_a_signal_outside_of_training_exits(data: Path) -> None:
    with checkpoints.Signals(), pytest.raises(SystemExit) as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.value.code == 130


def test_a_checkpoint_is_an_archive_that_ends_in_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    checkpoints.write_checkpoint(path, {"weights": torch.arange(300.0)})
    with zipfile.ZipFile(path) as archive:
        assert archive.comment.startswith(b"sha256:")
    for saved in (torch.load(path, weights_only=True), checkpoints.read_checkpoint(path)):
        assert torch.equal(saved["weights"], torch.arange(300.0))
    content = path.read_bytes()
    for place in [*range(0, len(content), 41), *range(len(content) - checkpoints.SEAL - 24, len(content))]:
        for damaged in (content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], content[:place]):
            path.write_bytes(damaged)
            with pytest.raises(checkpoints.CheckpointError, match=r"last.ckpt to be as it was written"):
                checkpoints.read_checkpoint(path)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_goes_on(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    at(7, 0, crash)
    with pytest.raises(Crash):
        train(data, folder)
    content = bytearray((folder / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 16
    (folder / "last.ckpt").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        resume(folder)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"Expected {folder / 'last.ckpt'} to be as it was written" in said
    assert "--resume-from previous" in said
    resume(folder, "--resume-from", "previous")
    assert (folder / "damaged-last.ckpt").read_bytes() == content
    assert_same_end(folder, whole)


def test_there_may_be_no_previous_checkpoint(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    with pytest.raises(checkpoints.CheckpointError, match=r"Expected 'resume-from' to be 'last' \(got 'previous', but"):
        checkpoints.newest(tmp_path, "previous")
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(checkpoints.CheckpointError, match="There is none before it: start a new run"):
        checkpoints.newest(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None]
) -> None:
    folder = tmp_path / "run"
    draft = folder / "last.ckpt.partial"
    at(5, 0, lambda: draft.symlink_to("/dev/full"))
    with pytest.raises(SystemExit) as stop:
        train(data, folder)
    words = str(stop.value.code)
    assert "Expected 'output' to have room for last.ckpt, " in words
    assert f" bytes (got 'No space left on device' in {folder}, where " in words
    assert not draft.is_symlink()
    assert state(folder)["global_step"] == 5
    resume(folder)
    assert_same_end(folder, whole)


def test_a_full_disk_is_found_behind_other_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "train.csv")
    assert (
        checkpoints.failure(full)
        == "Expected 'output' to have room (got 'No space left on device' at train.csv). Make room and resume."
    )
    other = RuntimeError("while tearing down")
    other.__context__ = checkpoints.CheckpointError("words")
    assert checkpoints.failure(other) == "words"
    assert checkpoints.failure(OSError(errno.EACCES, "not allowed")) is None


def test_a_folder_has_one_process_at_a_time(whole: Path, capsys: pytest.CaptureFixture) -> None:
    with checkpoints.hold(whole):
        with pytest.raises(SystemExit):
            resume(whole)
        assert "Expected 'output' to be a folder in which no other process is at work" in capsys.readouterr().err
    with checkpoints.hold(whole):
        pass


@pytest.mark.parametrize("finished", [False, True])
def test_two_processes_that_settled_on_one_folder_do_not_share_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = parse([*TINY.split(), "--data", str(data)])
    named = parse([*TINY.split(), "--data", str(data), "--output", "runs/listops-laptop-1"])
    (folder, plan), (same, _) = resolve(mine), resolve(named)
    assert folder == same
    folder, lock = claim(folder, plan, new=True, move=True)
    if finished:
        lock.close()
    with pytest.raises(
        checkpoints.CheckpointError, match="begun meanwhile" if finished else "no other process is at work"
    ):
        claim(same, plan, new=True, move=False)
    other, second = claim(same, plan, new=True, move=True)
    assert (str(folder), str(other)) == ("runs/listops-laptop-1", "runs/listops-laptop-2")
    lock.close()
    second.close()
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / checkpoints.LOCK).touch()  # by a process that was refused, or killed at once
    resolve(parse(["--output", "left"]))


@pytest.mark.parametrize("options", [["--attention", "full"], [], ["--log-every", "1", "--attention", "full"]])
def test_a_diverged_run_ends_with_one_message_and_finite_checkpoints(
    data: Path, tmp_path: Path, options: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train(data, tmp_path / "run", "--learning-rate", "1e30", "--clip-norm", "0", "--accumulate", "1", *options)
    words = str(stop.value.code)
    assert "to stay finite (got NaN or inf at step " in words
    assert "lower --learning-rate" in words
    assert not (tmp_path / "run" / "results.json").exists()
    start = checkpoints.newest(tmp_path / "run")
    assert start is None or all(
        value.isfinite().all() for value in checkpoints.read_checkpoint(start)["state_dict"].values()
    )


def test_patience_ends_a_run_and_survives_a_crash(
    data: Path, tmp_path: Path, at: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    options = ["--learning-rate", "0", "--steps", "30", "--validate-every", "2", "--patience", "2"]
    train(data, tmp_path / "whole", *options)
    assert state(tmp_path / "whole")["callbacks"]["Checkpoints"]["stale"] == 2
    assert [row["step"] for row in report.read_curves(tmp_path / "whole" / "val.csv")] == [0, 2, 4, 6]
    assert "Stopped early at step 6" in capsys.readouterr().err
    at(5, 0, crash)
    with pytest.raises(Crash):
        train(data, tmp_path / "run", *options)
    resume(tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    resume(tmp_path / "run")  # only reports again
    assert state(tmp_path / "run")["global_step"] == 6


def test_the_gradient_of_all_parts_is_clipped(data: Path, tmp_path: Path) -> None:
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    handle = register_optimizer_step_post_hook(note)
    try:
        train(data, tmp_path / "free", "--steps", "3", "--clip-norm", "0")
        train(data, tmp_path / "clipped", "--steps", "3", "--clip-norm", "0.01")
    finally:
        handle.remove()
    assert min(norms[:3]) > 0.02
    assert norms[3:] == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.fixture
def loaders(data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Data]:
    task = TASKS["listops"]
    splits = load(task, data, max_length=128)
    settings = dataclasses.replace(
        task.presets["laptop"].settings, batch_size=12, steps=30, warmup=0, validate_every=7, save_every=4
    )

    def make(rank: int = 0, count: int = 1, done: int = 0, workers: int = 0, **options: Any) -> Data:
        monkeypatch.setattr(processes, "rank", lambda: rank)
        monkeypatch.setattr(processes, "count", lambda: count)
        made = Data(splits, dataclasses.replace(settings, **options), workers)
        made.trainer = cast(Trainer, SimpleNamespace(global_step=done))
        return made

    return make


def order(made: Data) -> list[list[int]]:
    return [batch.examples.tolist() for batch in made.train_dataloader()]


def test_the_order_of_examples_depends_on_seed_and_step_alone(loaders: Callable[..., Data]) -> None:
    plain: list[list[int]] = []
    ends = [4, 7, 8, 12, 14, 16, 20, 21, 24, 28, 30]  # of what lies between checkpoints
    for done, end in zip([0, *ends], ends, strict=False):
        batches = order(loaders(done=done))
        assert len(batches) == end - done
        plain += batches
    buckets = loaders().buckets
    assert plain == [batch.tolist() for epoch in range(8) for batch in buckets.epoch(epoch)][:30]
    for epoch in range(7):  # four batches each
        assert len(set(itertools.chain(*plain[4 * epoch : 4 * epoch + 4]))) == 48
    assert order(loaders(workers=2)) == order(loaders(save_every=100))[:4] == plain[:4]
    parts = order(loaders(accumulate=4))
    shared = [order(loaders(rank=rank, count=2, accumulate=2)) for rank in range(2)]
    assert [part for pair in zip(*shared, strict=True) for part in pair] == parts
    assert [list(itertools.chain(*parts[4 * step : 4 * step + 4])) for step in range(4)] == plain[:4]
    assert order(loaders(seed=1)) != plain[:4]


@pytest.mark.parametrize("count", [1, 2, 4, 20])
def test_processes_evaluate_every_example_once(loaders: Callable[..., Data], count: int) -> None:
    seen: list[int] = []
    for rank in range(count):
        mine = [batch.examples.tolist() for batch in loaders(rank=rank, count=count, batch_size=20).val_dataloader()]
        assert mine
        seen += itertools.chain(*mine)
    assert sorted(seen) == list(range(20))


def test_some_examples_at_equal_distances_stand_for_all(loaders: Callable[..., Data]) -> None:
    lengths = loaders().splits["val"].lengths
    batches = [batch.examples.tolist() for batch in loaders(evaluate=5).val_dataloader()]
    assert sorted(itertools.chain(*batches)) == [0, 4, 8, 12, 16]
    found = lengths[list(itertools.chain(*batches))].tolist()
    assert found == sorted(found)
    assert sorted(
        itertools.chain(*(batch.examples.tolist() for batch in loaders(evaluate=50).val_dataloader()))
    ) == list(range(20))
    with pytest.raises(ValueError, match="Expected at most as many processes as 'val' has examples \\(got 6\\)"):
        loaders(count=6, evaluate=5)


def test_the_majority_class_is_that_of_the_examples_that_count(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", "--evaluate", "4", "--steps", "2")
    test = json.loads((tmp_path / "run" / "results.json").read_text())["test"]
    labels = load(TASKS["listops"], data, max_length=24)["test"].labels
    counts = np.unique(labels[[0, 7, 15, 22]], return_counts=True)[1]
    assert (test["examples"], test["majority"]) == (4, counts.max() / 4)
    assert test["majority"] != np.bincount(labels).max() / len(labels)


def test_processes_need_equal_parts_and_an_example_each(loaders: Callable[..., Data]) -> None:
    with pytest.raises(
        ValueError, match="Expected processes times 'accumulate' to divide 'batch-size' = 12 \\(got 8\\)"
    ):
        loaders(count=4, accumulate=2)
    with pytest.raises(ValueError, match="Expected at most as many processes as 'val' has examples \\(got 21\\)"):
        loaders(count=21, batch_size=21)


STOPPED = """
import os, signal, sys
from examples.lra.__main__ import main
from examples.lra.model import Classifier
step = Classifier.training_step
def doomed(self, batch, batch_idx):
    if self.global_step == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)  # the other process only hears of it
    return step(self, batch, batch_idx)
if "--resume" not in sys.argv:
    Classifier.training_step = doomed
main(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_two_processes_end_with_what_one_ends_with(data: Path, whole: Path, tmp_path: Path) -> None:
    """The parts of a batch are the same, whether accumulated or shared; halving is exact, so the weights agree in every bit.

    Evaluation cuts other batches, so that sums of losses are rounded otherwise: 1e-6 relative is ten times what float32 does to a mean.
    """
    script, folder = tmp_path / "stopped.py", tmp_path / "run"
    script.write_text(STOPPED)

    def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
            *words,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)

    done = torchrun(*TINY.split(), "--accumulate", "1", "--data", str(data), "--output", str(folder))
    assert "exitcode  : 143" in done.stderr
    assert done.stdout.count("Go on with: torchrun --nnodes 1 --nproc-per-node 2 ") == 1
    assert state(folder)["global_step"] == 7
    done = torchrun("--output", str(folder), "--resume", "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    one, two = state(whole), state(folder)
    for key, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][key], value, rtol=0, atol=0)
    assert same(one["optimizer_states"], two["optimizer_states"])
    for phase in ("train", "val"):
        for expected, row in zip(*(report.read_curves(run / f"{phase}.csv") for run in (whole, folder)), strict=True):
            assert {**row, "tokens_per_second": 0} == pytest.approx({**expected, "tokens_per_second": 0}, rel=1e-6)
    results = [json.loads((run / "results.json").read_text())["test"] for run in (whole, folder)]
    assert results[1] == {name: pytest.approx(value, rel=1e-6) for name, value in results[0].items()}


def test_a_head_that_loses_its_edges_is_told_once() -> None:
    guard, ptr = report.Guard(), torch.tensor([0, 40])
    few, alone = patterns.window(40, 0, heads=2), patterns.full(40, heads=2)
    trace = SimpleNamespace(graphs=(alone, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.check(trace, 1)
        guard.check(SimpleNamespace(graphs=(few,)), 2)  # a fortieth of the pairs, and no query without an edge
    empty = AttentionGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 40, query_ptr=ptr, key_ptr=ptr)
    with pytest.warns(
        UserWarning,
        match=r"Step 3: layer 1, head 0 has a density of 0.00% and leaves 100% of its queries without any edge",
    ):
        guard.check(SimpleNamespace(graphs=(alone, empty)), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.check(SimpleNamespace(graphs=(alone, empty)), 4)


# ------------------------------------------------------------------ memory and subnormal numbers


def test_memory_goes_back_when_a_process_holds_several_times_what_a_step_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = trainer.Memory(slack=2.0)
    held: list[int] = []
    given: list[int] = []
    monkeypatch.setattr(trainer, "held_bytes", lambda: held[-1])
    keeper.give_back = lambda rest: given.append(held[-1])
    for size in (100, 150, 201, 120, 230, 241, 90, 242):
        held.append(size)
        keeper.on_train_batch_end(cast(Any, None), cast(Any, None), None, None, 0)
    assert given == [201, 241, 242]  # more than twice 100; then a step took 120, and later ones no more
    keeper.give_back = None  # another C library
    keeper.on_train_batch_end(cast(Any, None), cast(Any, None), None, None, 0)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs the GNU C library"
)
def test_memory_between_what_lives_on_goes_back() -> None:
    blocks = [torch.ones(2**14) for _ in range(4000)]  # 64 KiB each, 250 MiB
    before = trainer.held_bytes()
    blocks = blocks[::50]
    keeper = trainer.Memory(slack=0.0)
    keeper.on_train_batch_end(cast(Any, None), cast(Any, None), None, None, 0)
    assert before - trainer.held_bytes() > 150 * 2**20
    assert all(bool((block == 1).all()) for block in blocks)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot flush subnormal numbers")
def test_subnormal_numbers_are_zero_during_a_run_and_not_after(
    data: Path, tmp_path: Path, at: Callable[..., None]
) -> None:
    tiny, found = torch.full((8,), 1e-39), []

    def look() -> None:
        found.append(int((tiny * 0.5).view(torch.int32).any()))
        crash()

    at(1, 0, look)
    with pytest.raises(Crash):
        train(data, tmp_path / "run")
    assert found == [0]
    assert (tiny * 0.5).view(torch.int32).any()
