"""Pretraining on hidden tokens: which are hidden, what a run leaves, and what training takes from it and refuses."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import same
from torch import Tensor

from examples.common import runs
from examples.lra import figures, report
from examples.lra import train as trainer
from examples.lra.__main__ import main
from examples.lra.data import listops
from examples.lra.data.batches import Batch
from examples.lra.data.tasks import TASKS, data_folder
from examples.lra.model import MASK, Classifier, Reconstructor, hide
from examples.lra.settings import (
    NAMES,
    PRESETS,
    SETTINGS,
    Plan,
    Settings,
    parse,
    parse_pretrain,
    preset_settings,
    resolve,
)
from sbm_pyg import FullAttention

MODEL = "--layers 1 --channels 16 --head-channels 8 --ffn-channels 16 --num-clusters 8 --batch-size 8 --clip-norm 1"
TINY = f"{MODEL} --steps 9 --validate-every 5 --log-every 3 --save-every 2 --preset modern-laptop --accelerator cpu"

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot_curves", lambda *arguments: None)
    monkeypatch.setattr(figures, "draw", lambda *arguments: None)


@pytest.fixture(scope="module")
def pretrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pretrained"
    call("pretrain", data, folder)
    return folder


def call(command: str, data: Path, folder: Path, *options: str) -> None:
    main([command, *TINY.split(), "--data", str(data), "--output", str(folder), *options])


def state(folder: Path, name: str = "best.ckpt") -> dict[str, Any]:
    saved = runs.read_checkpoint(folder / name)
    return {part: saved[part] for part in ("model", "optimizer", "rate", "best", "step")}


def encoder(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.startswith("model.encoder.")}


# ------------------------------------------------------------------ which tokens are hidden


def ragged(lengths: list[int], first: int = 0) -> Batch:
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(1, 20, (int(ptr[-1]),), generator=torch.Generator().manual_seed(first))
    return Batch(tokens, ptr, torch.zeros(len(lengths)), torch.arange(first, first + len(lengths)))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_tokens_are_hidden_independently_with_one_probability(ratio: float) -> None:
    batch = ragged([20_000, 20_000])
    hidden = hide(batch, ratio, seed=5)
    is_hidden = hidden.tokens == MASK
    assert torch.equal(hidden.labels, batch.tokens[is_hidden])
    assert torch.equal(hidden.tokens[~is_hidden], batch.tokens[~is_hidden])
    first, second = is_hidden.double().view(2, -1)
    deviation = (ratio * (1 - ratio) / 20_000) ** 0.5
    for rate in (first.mean(), second.mean()):
        assert abs(rate.item() - ratio) < 5 * deviation
    for one, other in ((first, second), (first[1:], first[:-1])):  # of two sequences, and of neighbors
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 5 / 20_000**0.5


def test_hidden_tokens_are_those_of_the_example_in_any_batch() -> None:
    batch = ragged([30, 7, 50])
    whole = hide(batch, 0.3, seed=1)
    assert torch.equal(whole.examples, batch.examples)
    for number, (start, end) in enumerate(zip(batch.ptr[:-1].tolist(), batch.ptr[1:].tolist(), strict=True)):
        examples = batch.examples[number : number + 1]
        alone = Batch(batch.tokens[start:end], torch.tensor([0, end - start]), torch.zeros(1), examples)
        assert torch.equal(hide(alone, 0.3, seed=1).tokens, whole.tokens[start:end])
    assert not torch.equal(hide(batch, 0.3, seed=2).tokens, whole.tokens)


def test_every_sequence_has_a_hidden_token() -> None:
    hidden = hide(ragged([1, 2, 3] * 20), 0.01, seed=0)
    counts = torch.stack([(part == MASK).sum() for part in hidden.tokens.split(hidden.ptr.diff().tolist())])
    assert counts.min() == 1
    assert len(hidden.labels) == counts.sum()


def test_sequences_of_pairs_follow_one_another() -> None:
    first, second = ragged([4, 9], 0), ragged([3, 5], 2)
    positions = tuple(torch.arange(len(side.tokens)) for side in (first, second))
    examples = torch.tensor([3, 8])
    pair = Batch((first.tokens, second.tokens), (first.ptr, second.ptr), torch.zeros(2), examples, positions)
    hidden = hide(pair, 0.5, seed=0)
    assert hidden.ptr.tolist() == [0, 4, 13, 16, 21]
    assert hidden.examples.tolist() == [6, 16, 7, 17]
    assert torch.equal(hidden.positions, torch.cat(positions))
    is_hidden = hidden.tokens == MASK
    assert torch.equal(hidden.labels, torch.cat([first.tokens, second.tokens])[is_hidden])
    small: dict[str, Any] = {"layers": 1, "channels": 16, "head_channels": 8, "ffn_channels": 16, "max_length": 9}
    settings = dataclasses.replace(preset_settings("retrieval", "laptop", is_pretraining=True), **small)
    model = Reconstructor(TASKS["retrieval"], settings)
    logits, trace = model.classify(hidden._replace(positions=None), seed=0)
    assert logits.shape == (len(hidden.labels), 257)
    assert trace.density.shape == (1, 4, 2)


def test_what_can_be_read_from_other_tokens_is_learned() -> None:
    """Sequences of one token each, which attention has to read elsewhere."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"layers": 1, "channels": 32, "head_channels": 16, "ffn_channels": 32}
    model = Reconstructor(
        TASKS["listops"], dataclasses.replace(preset_settings("listops", "modern-laptop", True), **small)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    correct = []
    for step in range(60):
        ptr = torch.arange(17) * 8
        batch = Batch(torch.randint(1, 16, (16,)).repeat_interleave(8), ptr, torch.zeros(16), torch.arange(16))
        hidden = hide(batch, 0.5, seed=step)
        logits, _ = model.classify(hidden, seed=0)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, hidden.labels).backward()
        optimizer.step()
        correct.append((logits.argmax(-1) == hidden.labels).double().mean().item())
    assert sum(correct[:5]) / 5 < 0.5
    assert min(correct[-5:]) > 0.9


# ------------------------------------------------------------------ runs


def test_a_run_of_pretraining_leaves_a_dense_encoder(pretrained: Path) -> None:
    names = [".lock", "best.ckpt", "curves.png", "last.ckpt", "results.json", "settings.json", "train.csv", "val.csv"]
    assert sorted(path.name for path in pretrained.iterdir()) == names
    plan = Plan.read(pretrained / SETTINGS)
    assert (plan.is_pretraining, plan.settings.attention, plan.settings.positions) == (True, "full", "rotary")
    results = json.loads((pretrained / "results.json").read_text())
    # About 15 % of the tokens of 30 trees, and one of each at least.
    assert 30 < results["test"]["examples"] < 0.3 * 30 * 24
    assert 1 / 15 < results["test"]["majority"] < 1
    weights = state(pretrained)["model"]
    assert not any("source" in name or "classifier" in name for name in weights)


def test_pretraining_resumes_with_the_same_bits(
    pretrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plots: None
) -> None:
    folder, parts = tmp_path / "run", trainer.Data.parts

    class Crash(BaseException):
        pass

    def doomed(self: trainer.Data, step: int) -> list[list[int]]:
        if step == 7:
            raise Crash
        return parts(self, step)

    monkeypatch.setattr(trainer.Data, "parts", doomed)
    with pytest.raises(Crash):
        call("pretrain", data, folder)
    monkeypatch.setattr(trainer.Data, "parts", parts)
    main(["pretrain", "--output", str(folder), "--resume", "--accelerator", "cpu"])
    assert all(same(state(folder, name), state(pretrained, name)) for name in ("last.ckpt", "best.ckpt"))


@pytest.mark.parametrize("attention", ["full", "sbm", "top_k", "window --target-density 0"])
def test_training_begins_with_the_encoder(pretrained: Path, data: Path, attention: str) -> None:
    words = [*TINY.split(), "--data", str(data), "--pretrained", str(pretrained), "--attention", *attention.split()]
    plan = dataclasses.replace(resolve(parse(words))[1], fingerprint=Plan.read(pretrained / SETTINGS).fingerprint)
    module = trainer.make_model(plan)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    about = trainer.read_encoder(plan, module)
    assert "of 9, 15% of the tokens hidden, " in about
    saved, after = encoder(state(pretrained)["model"]), module.state_dict()
    assert saved.keys() == {name for name in encoder(after) if ".source." not in name}
    assert all(torch.equal(after[name], value) for name, value in saved.items())
    assert all(torch.equal(after[name], before[name]) for name in after if name not in saved)
    assert not torch.equal(after["model.encoder.token.weight"], before["model.encoder.token.weight"])


def test_a_run_says_what_it_began_with_and_needs_it_until_its_first_checkpoint(
    pretrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plots: None, capsys: Any
) -> None:
    begin, folder, parts = tmp_path / "begin", tmp_path / "run", trainer.Data.parts
    shutil.copytree(pretrained, begin)
    doom = 1

    class Crash(BaseException):
        pass

    def doomed(self: trainer.Data, step: int) -> list[list[int]]:
        if step == doom:
            raise Crash
        return parts(self, step)

    resume = ["train", "--output", str(folder), "--resume", "--accelerator", "cpu"]
    monkeypatch.setattr(trainer.Data, "parts", doomed)
    with pytest.raises(Crash):
        call("train", data, folder, "--pretrained", str(begin), "--attention", "full")
    assert not (folder / "last.ckpt").exists()
    state_of_other = runs.read_checkpoint(begin / "best.ckpt") | {"seconds": -1.0}
    content = (begin / "best.ckpt").read_bytes()
    runs.write_checkpoint(begin / "best.ckpt", state_of_other)
    with pytest.raises(SystemExit):
        main(resume)
    assert "Expected 'pretrained' to be what the run was started with, step" in capsys.readouterr().err
    (begin / "best.ckpt").write_bytes(content)
    doom = 5
    with pytest.raises(Crash):
        main(resume)
    shutil.rmtree(begin)
    monkeypatch.setattr(trainer.Data, "parts", parts)
    main(resume)
    other = tmp_path / "undisturbed"
    call("train", data, other, "--pretrained", str(pretrained), "--attention", "full")
    assert all(same(state(folder, name), state(other, name)) for name in ("last.ckpt", "best.ckpt"))
    pipeline = json.loads((folder / "results.json").read_text())["pipeline"]
    assert pipeline["pretrained"] == Plan.read(folder / SETTINGS).beginning != ""
    scratch = tmp_path / "scratch"
    call("train", data, scratch, "--attention", "full")
    assert not same(state(scratch), state(other))
    assert "pretrained" not in json.loads((scratch / "results.json").read_text())["pipeline"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pretrained missing", "Expected 'pretrained' to be a folder with settings.json and best.ckpt (got missing)"),
        ("--pretrained classifier", "Expected 'pretrained' to be a run of `pretrain` (got one of `train`)"),
        ("--pretrained given --channels 8", "Expected 'pretrained' to have the sizes and positions of this run (got one with channels = 16)"),
        ("--pretrained given --layers 2", "(got one with layers = 1)"),
        ("--pretrained given --positions random", "(got one with positions = rotary)"),
        ("--pretrained given --data other", "Expected 'pretrained' to be of the examples of this run (got others in given)"),
        ("--positions rotary-grid", "Expected 'positions' to be random or rotary for listops (got rotary-grid)"),
        ("--positions grid", "Expected 'positions' to be random or rotary for listops (got grid)"),
        ("--attention linear --positions rotary", "Expected 'positions' to be random or grid for 'linear' attention (got rotary)"),
        ("--output given --resume", "Expected 'output' to be a run of `train` (got one of `pretrain`)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(
    options: str, said: str, pretrained: Path, data: Path, untrained: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given").symlink_to(pretrained)
    untrained(tmp_path / "classifier", data)
    law = listops.Parameters(train=20, val=10, test=10, max_depth=2, max_args=30, min_length=8, max_length=24)
    listops.generate(tmp_path / "other", law, seed=1, progress=False)
    begin = [] if "--resume" in options else [*TINY.split(), "--data", str(data), "--output", "new"]
    with pytest.raises(SystemExit) as stop:
        main(["train", *begin, *options.split()])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("new").exists()


def test_an_encoder_with_a_bias_begins_no_other_attention(
    pretrained: Path, data: Path, tmp_path: Path, no_plots: None
) -> None:
    call("pretrain", data, tmp_path / "bias", "--attention", "dcmm")
    words = [*TINY.split(), "--data", str(data), "--pretrained", str(tmp_path / "bias"), "--attention"]
    for attention in ("dcmm", "full"):
        plan = dataclasses.replace(
            resolve(parse([*words, attention]))[1], fingerprint=Plan.read(pretrained / SETTINGS).fingerprint
        )
        if attention == "dcmm":
            assert "checksum" in trainer.read_encoder(plan, trainer.make_model(plan))
        else:
            with pytest.raises(ValueError, match=r"an attention that 'full' can begin with \(got dcmm\)"):
                trainer.read_encoder(plan, trainer.make_model(plan))


def test_an_encoder_of_another_task_is_refused(pretrained: Path) -> None:
    plan = Plan(
        task="text", preset="laptop", settings=preset_settings("text", "laptop"), directory=".",
        pretrained=str(pretrained),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Expected 'pretrained' to be of text \(got one of listops\)"):
        trainer.read_encoder(plan, trainer.make_model(plan))


def test_a_run_of_pretraining_is_not_opened_for_its_graphs(pretrained: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected .run. to be one of `train` \(got one of `pretrain`\)"):
        trainer.open_run(pretrained)
    for words in ("--export x", "--minutes 3", "--pretrained x"):  # pretraining has none of them
        with pytest.raises(SystemExit):
            parse_pretrain(words.split())


# ------------------------------------------------------------------ presets and models


def test_presets_share_generated_data_and_differ_as_they_say() -> None:
    for task, presets in PRESETS.items():
        assert tuple(presets) == NAMES
        for like, name in (("laptop", "modern-laptop"), ("paper", "modern")):
            assert presets[name].data == presets[like].data
            if presets[name].data is not None:
                folders = [
                    data_folder(Plan(task=task, preset=one, settings=presets[one].settings, directory="."))
                    for one in (like, name)
                ]
                assert folders[0] == folders[1]
        for name in NAMES:
            pretraining, settings = preset_settings(task, name, is_pretraining=True), preset_settings(task, name)
            assert (pretraining.attention, pretraining.target_density) == ("full", 0.0)
            assert settings.mask_ratio == (0.5 if TASKS[task].side else 0.15)
            for field in ("layers", "channels", "heads", "head_channels", "ffn_channels", "max_length", "positions"):
                assert getattr(pretraining, field) == getattr(settings, field)
        laptop, modern = (dataclasses.asdict(presets[name].settings) for name in ("laptop", "modern-laptop"))
        changed = {name for name in laptop if laptop[name] != modern[name]}
        assert {"positions", "target_density"} <= changed
        assert not changed & {"steps", "batch_size", "learning_rate", "channels", "layers", "max_length", "dropout"}


@pytest.mark.parametrize("attention", ["sbm", "full", "window", "linear", "top_k"])
def test_presets_with_a_target_density_give_every_attention(attention: str) -> None:
    settings = resolve(parse(["--preset", "modern-laptop", "--attention", attention]))[1].settings
    assert settings.target_density == (0.05 if attention in ("sbm", "top_k") else 0.0)
    assert settings.positions == ("random" if attention == "linear" else "rotary")
    priced = resolve(parse(["--preset", "modern-laptop", "--density-weight", "0.1"]))[1].settings
    assert (priced.density_weight, priced.target_density) == (0.1, 0.0)


@pytest.mark.parametrize(("task", "positions"), [("listops", "rotary"), ("image", "rotary"), ("image", "rotary-grid")])
def test_rotary_positions_take_the_place_of_embeddings(task: str, positions: str) -> None:
    def model(**changes: Any) -> Classifier:
        small: dict[str, Any] = {"layers": 1, "channels": 16, "head_channels": 8, "ffn_channels": 16}
        return Classifier(
            TASKS[task], dataclasses.replace(preset_settings(task, "modern-laptop", True), **small, **changes)
        )

    encoder = model(positions=positions).model.encoder
    attention = encoder.layers[0].attention
    assert isinstance(attention, FullAttention)
    assert encoder.position is None
    assert attention.rotary is not None
    assert attention.rotary.grid_width == (32 if positions == "rotary-grid" else None)
    other = model(positions="random").model.encoder
    assert other.position is not None
    assert other.layers[0].attention.rotary is None


def test_a_table_pretrains_once_for_all_methods_of_a_task_and_seed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, Settings, str | None]] = []

    def run(args: Any) -> None:
        folder, plan = resolve(args)
        calls.append((folder.relative_to(tmp_path), plan.settings, plan.pretrained))
        folder.mkdir(parents=True)
        plan.write(folder / SETTINGS)
        if plan.is_pretraining:
            runs.write_record(folder / "results.json", {})

    monkeypatch.setattr("examples.lra.table.trainer.run", run)
    monkeypatch.setattr("examples.lra.table.write_report", lambda folder: None)
    words = f"table --preset modern-laptop --methods full window --seeds 0 1 --data listops={data} --steps 5"
    main([*words.split(), "--output", str(tmp_path), "--pretrain", "7", "--", "--channels", "16"])
    names = [str(folder) for folder, _, _ in calls]
    assert names[:2] == ["pretraining/listops-0", "pretraining/listops-1"]
    assert names[2:] == [f"runs/listops-{method}-{seed}" for seed in (0, 1) for method in ("full", "window")]
    for folder, settings, begin in calls:
        is_first = str(folder).startswith("pretraining")
        assert (settings.steps, settings.channels) == (7 if is_first else 5, 16)
        assert settings.seed == int(str(folder)[-1])
        assert begin == (None if is_first else str(tmp_path / f"pretraining/listops-{settings.seed}"))
