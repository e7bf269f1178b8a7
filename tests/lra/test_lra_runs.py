"""The trainer: what a run leaves, what survives stops, kills and damage, what decides its numbers, and what it refuses."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems import same

from examples.common import runs
from examples.common.fit import make_fabric
from examples.lra import figures, report
from examples.lra import train as trainer
from examples.lra.__main__ import main
from examples.lra.data.prepare import load
from examples.lra.data.tasks import TASKS
from examples.lra.model import Classifier
from examples.lra.settings import PRESETS, SETTINGS, SOURCES, Settings
from examples.lra.train import Data
from sbm_pyg import SequenceClassifier

ROOT = Path(report.__file__).parents[2]
FILES = [
    ".lock", "best.ckpt", "curves.png", "density.png", "last.ckpt", "mask-layer0-head0.png", "mask-layer0-head1.png",
]  # fmt: skip
FILES += ["results.json", "settings.json", "train.csv", "val.csv"]
TINY = "--steps 9 --validate-every 5 --log-every 3 --save-every 2 --layers 1 --batch-size 8 --accumulate 2 --num-clusters 8 --channels 16"
TINY += " --head-channels 8 --ffn-channels 16 --dropout 0.1 --attention-dropout 0.1 --clip-norm 1 --accelerator cpu"

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plot_curves", lambda *arguments: None)
    monkeypatch.setattr(figures, "plot_densities", lambda *_: SimpleNamespace(savefig=lambda *a, **o: None))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch, no_curves: None) -> None:
    monkeypatch.setattr(figures, "draw", lambda *arguments: None)


quick = pytest.mark.usefixtures("no_plots")


def train(data: Path, folder: Path, *options: str) -> dict[str, Any]:
    main(["train", *TINY.split(), "--data", str(data), "--output", str(folder), *options])
    return results(folder)


def resume(folder: Path, *options: str) -> None:
    main(["train", "--output", str(folder), "--accelerator", "cpu", "--resume", *options])


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(data, folder)
    return folder


def curve(folder: Path, phase: str) -> list[dict[str, float]]:
    """The rows of a curve, without what depends on the machine."""
    rows = runs.read_checkpoint(folder / "last.ckpt")["recorder"]["rows"][phase]
    lines = (folder / f"{phase}.csv").read_text().splitlines()
    assert lines == [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def state(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    saved = runs.read_checkpoint(folder / name)
    return {part: saved[part] for part in ("model", "optimizer", "rate", "best", "step")}


def assert_same_end(folder: Path, whole: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        assert same(state(folder, name), state(whole, name)), name
    for phase in ("train", "val"):
        assert curve(folder, phase) == curve(whole, phase)
    assert results(folder)["test"] == results(whole)["test"]


class Crash(BaseException):
    """Ends a run as abruptly as can be done within a process."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans something for the moment before a part of a step is computed; once."""
    original = trainer.random_word

    def plan(step: int, part: int, action: Callable[[], None]) -> None:
        def doomed(*key: int) -> int:
            if key[1:] == (0, 2 * step + part):  # the seed of dropout
                monkeypatch.setattr(trainer, "random_word", original)
                action()
            return original(*key)

        monkeypatch.setattr(trainer, "random_word", doomed)

    return plan


def crash() -> None:
    raise Crash


# ------------------------------------------------------------------ what a run leaves


def test_a_run_leaves_settings_curves_checkpoints_results_and_plots(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == FILES
    settings = json.loads((whole / SETTINGS).read_text())["settings"]
    assert (settings["steps"], settings["warmup"]) == (9, 1)  # keeps its share of the steps
    assert [row["step"] for row in curve(whole, "train")] == [3, 5, 6, 9]
    assert [row["step"] for row in curve(whole, "val")] == [0, 5, 9]
    assert curve(whole, "val")[0].keys() == {"step", "loss", "accuracy", "density_layer0_head0", "density_layer0_head1"}


def test_results_hold_what_the_table_shows(whole: Path) -> None:
    found = results(whole)
    low, high = found["test"]["interval_95"]
    assert 0 <= low <= found["test"]["accuracy"] <= high <= 1
    assert found["test"]["examples"] == 30
    for moment in ("first", "last", "tested"):
        assert torch.tensor(found["density"][moment]).shape == (1, 2)
    assert found["tokens_per_second"] > 0
    assert found["peak_memory_bytes"] > 2**20
    table = report.results_table(found)
    assert f"test accuracy      {found['test']['accuracy']:.2%}" in table
    assert "layer 0, head 1" in table


def test_best_checkpoint_reproduces_its_validation_accuracy_in_any_batches(whole: Path, data: Path) -> None:
    module = Classifier(TASKS["listops"], Settings(**json.loads((whole / SETTINGS).read_text())["settings"]))
    module.load_state_dict(state(whole, "best.ckpt")["model"])
    module.eval()
    best = results(whole)["best"]
    logged = {row["step"]: row for row in curve(whole, "val")}[best["step"]]
    assert logged["accuracy"] == best["accuracy"] == max(row["accuracy"] for row in curve(whole, "val")[1:])
    split = load(TASKS["listops"], data, max_length=128)["val"]
    curves = trainer.Curves(module, whole, make_fabric("cpu"))
    for size in (1, 7, 20):
        for start in range(0, len(split), size):
            batch = split.__getitems__(list(range(start, min(start + size, len(split)))))
            with torch.no_grad():
                logits, trace = module.classify(batch, seed=0)
            curves.add(batch, logits, torch.nn.functional.cross_entropy(logits, batch.labels), trace)
        row = curves.finish()
        assert row["accuracy"] == best["accuracy"]
        assert row["loss"] == pytest.approx(logged["loss"], rel=1e-5)
        density = logged["density_layer0_head1"]
        assert row["density_layer0_head1"] == pytest.approx(density, rel=1e-9)  # the very same graphs


def test_testing_averages_probabilities_over_graphs(whole: Path, data: Path) -> None:
    settings = Settings(**json.loads((whole / SETTINGS).read_text())["settings"])
    module = Classifier(TASKS["listops"], dataclasses.replace(settings, test_graphs=3)).eval()
    batch = load(TASKS["listops"], data, max_length=128)["test"].__getitems__(list(range(9)))
    with torch.no_grad():
        logits = [module.classify(batch, seed=settings.seed + graph)[0] for graph in range(3)]
        assert not torch.equal(logits[0], logits[1])
        assert torch.equal(module.average(batch, 1)[0], logits[0])
        mean = torch.stack(logits).softmax(-1).mean(0)
        torch.testing.assert_close(module.average(batch, 3)[0].exp(), mean)


@quick
def test_a_finished_run_reports_again_and_exports(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir() if path.name != ".lock"}
    export, found = tmp_path / "models" / "listops", results(whole)
    resume(whole, "--export", str(export))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert report.results_table(found) in capsys.readouterr().out
    card = (export / "README.md").read_text()
    assert "Trained on listops (tokeniser: " in card  # what a reader of the number must know
    assert all(f"{name}: {words}" in card for name, words in found["pipeline"].items())
    numbers = {"test accuracy": found["test"]["accuracy"], "validation accuracy": found["best"]["accuracy"]}
    numbers |= {
        f"density of layer {layer}": sum(heads) / len(heads) for layer, heads in enumerate(found["density"]["tested"])
    }
    assert all(f"* {name}: {value:.6g}\n" in card for name, value in numbers.items())
    model, best = SequenceClassifier.from_pretrained(export), state(whole, "best.ckpt")["model"]
    assert best.keys() == {f"model.{key}" for key in model.state_dict()}
    assert all(torch.equal(value, best[f"model.{key}"]) for key, value in model.state_dict().items())
    batch = load(TASKS["listops"], data, max_length=128)["test"].__getitems__(list(range(30)))
    logits = model(batch.tokens, batch.ptr, seed=0, sequence_ids=batch.examples)
    assert (logits.argmax(-1) == batch.labels).double().mean().item() == pytest.approx(found["test"]["accuracy"])


# ------------------------------------------------------------------ stops, kills and damage


KILLED = """
import os, signal, sys
from examples.lra.__main__ import main
from examples.lra.train import Data
parts = Data.parts
def doomed(self, step):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return parts(self, step)
Data.parts = doomed
main(["train", *sys.argv[1:]])
"""


@quick
@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(whole: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, *TINY.split(), "--data", str(data), "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["step"] for row in curve(folder, "train")] == [3, 5]
    assert not (folder / "results.json").exists()
    resume(folder)
    assert_same_end(folder, whole)


@quick
@pytest.mark.parametrize(("step", "part", "saved"), [(1, 1, None), (4, 1, 4), (8, 1, 8)])
def test_a_crash_at_any_step_costs_the_steps_since_the_last_checkpoint(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None], step: int, part: int, saved: int | None
) -> None:
    folder = tmp_path / "run"
    at(step, part, crash)
    with pytest.raises(Crash):
        train(data, folder)
    assert (state(folder)["step"] if (folder / "last.ckpt").exists() else None) == saved
    resume(folder)
    assert_same_end(folder, whole)


@quick
def test_a_crash_between_training_and_test_costs_the_test(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(report, "peak_memory", crash)
        with pytest.raises(Crash):
            train(data, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_end(tmp_path / "run", whole)


@quick
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_crash_while_saving_leaves_the_checkpoint_before_it(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Callable[..., None], function: str
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        at(3, 0, lambda: patch.setattr(os, function, lambda *arguments: crash()))
        with pytest.raises(Crash):
            train(data, folder)
    assert state(folder)["step"] == 2
    resume(folder)
    assert_same_end(folder, whole)


@quick
@pytest.mark.parametrize(("number", "code", "step", "part"), [(signal.SIGINT, 130, 2, 0), (signal.SIGTERM, 143, 4, 1)])
def test_a_signal_ends_the_run_after_its_step(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None], capsys: pytest.CaptureFixture, number: int,
    code: int, step: int, part: int,
) -> None:  # fmt: skip
    folder, before = tmp_path / "run", signal.getsignal(number)
    at(step, part, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as stop:
        train(data, folder)
    assert stop.value.code == code
    assert signal.getsignal(number) is before
    assert f"--output {folder} --resume" in capsys.readouterr().out
    assert state(folder)["step"] == step + 1
    resume(folder)
    assert_same_end(folder, whole)


@quick
def test_a_damaged_checkpoint_is_named_and_the_best_one_goes_on(
    data: Path, whole: Path, tmp_path: Path, at: Callable[..., None]
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
    assert f"Expected '{folder / 'last.ckpt'}' to be as it was written" in str(stop.value.code)
    assert "copy best.ckpt to last.ckpt and resume" in str(stop.value.code)
    shutil.copy(folder / "best.ckpt", folder / "last.ckpt")
    resume(folder)
    assert_same_end(folder, whole)


def test_a_folder_has_one_process_at_a_time(whole: Path, capsys: pytest.CaptureFixture) -> None:
    with runs.hold(whole):
        with pytest.raises(SystemExit):
            resume(whole)
        assert "Expected 'output' to be a folder in which no other process is at work" in capsys.readouterr().err
    with runs.hold(whole):
        pass


# ------------------------------------------------------------------ what decides the numbers


STOPPED = """
import os, signal, sys
from examples.lra.__main__ import main
from examples.lra.train import Data
parts = Data.parts
def doomed(self, step):
    if step == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)  # the other process only hears of it
    return parts(self, step)
if "--resume" not in sys.argv:
    Data.parts = doomed
main(["train", *sys.argv[1:]])
"""


@quick
@pytest.mark.slow
def test_two_processes_stop_together_and_end_with_what_one_ends_with(data: Path, whole: Path, tmp_path: Path) -> None:
    """The parts of a batch are the same, accumulated or shared, and halving is exact: the weights agree in every bit.

    Sums over examples come in another order, in float64, of losses in float32 of other batches: 1e-6 relative.
    """
    script, folder = tmp_path / "stopped.py", tmp_path / "run"
    script.write_text(STOPPED)

    def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run([*launch, *words], env=environment, capture_output=True, text=True, check=False)

    stopped = torchrun(*TINY.split(), "--accumulate", "1", "--data", str(data), "--output", str(folder))
    assert "exitcode  : 143" in stopped.stderr
    assert stopped.stdout.count("Go on with: torchrun --nproc-per-node 2 -m examples.lra train --output") == 1
    assert state(folder)["step"] == 7
    done = torchrun("--output", str(folder), "--accelerator", "cpu", "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    one, two = state(whole), state(folder)
    for part in ("model", "optimizer", "rate", "step"):
        assert same(one[part], two[part]), part
    for phase in ("train", "val"):
        for expected, row in zip(curve(whole, phase), curve(folder, phase), strict=True):
            assert row == pytest.approx(expected, rel=1e-6)
    expected, found = results(whole)["test"], results(folder)["test"]
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


@quick
@pytest.mark.slow
def test_as_many_steps_are_taken_as_fit_into_a_time(data: Path, tmp_path: Path) -> None:
    words = TINY.replace("--steps 9 ", "").split()
    main(["train", *words, "--minutes", "0.05", "--data", str(data), "--output", str(tmp_path / "run")])
    plan = json.loads((tmp_path / "run" / SETTINGS).read_text())
    assert plan["minutes"] == 0.05
    assert curve(tmp_path / "run", "train")[-1]["step"] == plan["settings"]["steps"]
    assert 1 < results(tmp_path / "run")["seconds"] < 60
    resume(tmp_path / "run", "--minutes", "0.05")


@quick
def test_a_run_with_relative_places_is_resumed_from_anywhere(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    train(Path(data.name), tmp_path / "run", "--steps", "2", "--prepared", "arrays")
    monkeypatch.chdir(tmp_path)
    resume(tmp_path / "run")
    assert not (tmp_path / "arrays").exists()


@quick
def test_graphs_become_sparse_as_planned_and_a_crash_changes_no_bit(
    data: Path, tmp_path: Path, at: Callable[..., None]
) -> None:
    options = ["--target-density", "0.2", "--parameterization", "overlapping", "--save-every", "1"]
    density = train(data, tmp_path / "whole", *options)["density"]
    dense = {row["step"]: row["density_layer0_head0"] == 1 for row in curve(tmp_path / "whole", "val")}
    assert dense == {0: False, 5: False, 9: False}  # evaluation has the target density in each phase
    assert any(row["density_layer0_head0"] == 1 for row in curve(tmp_path / "whole", "train"))
    assert results(tmp_path / "whole")["best"]["step"] in (5, 9)
    assert 0.1 < density["tested"][0][0] < 0.3
    at(4, 1, crash)
    with pytest.raises(Crash):
        train(data, tmp_path / "broken", *options)
    resume(tmp_path / "broken")
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


@quick
def test_accumulating_changes_neither_graphs_nor_gradients(data: Path, tmp_path: Path) -> None:
    for parts in ("1", "4"):
        dry = ("--dropout", "0", "--attention-dropout", "0", "--steps", "3")
        train(data, tmp_path / parts, "--accumulate", parts, *dry)
    for phase in ("train", "val"):
        for one, other in zip(*(curve(tmp_path / parts, phase) for parts in ("1", "4")), strict=True):
            assert one == pytest.approx(other, rel=1e-4)
            assert one["density_layer0_head0"] == pytest.approx(other["density_layer0_head0"], rel=1e-6)
    expected = state(tmp_path / "4")["model"]
    for key, value in state(tmp_path / "1")["model"].items():
        rtol = 1e-5 if key.endswith(".seen") else 0.0  # a sum over all pairs
        torch.testing.assert_close(value, expected[key], rtol=rtol, atol=2e-4)


@quick
def test_regulariser_lowers_the_density(data: Path, tmp_path: Path) -> None:
    options = "--density-weight 10 --estimator none --steps 12 --learning-rate 0.02"
    density = train(data, tmp_path / "run", *options.split())["density"]
    first, last = (torch.tensor(density[moment]) for moment in ("first", "last"))
    assert (last < first - 0.02).all()


@pytest.mark.parametrize("attention", ["full", "dcmm", "sbm --block-size 4", *SOURCES[1:]])
def test_every_attention_trains(data: Path, tmp_path: Path, attention: str, no_curves: None) -> None:
    options = f"--attention {attention} --window 3 --steps 2 --precision bf16-mixed --test-graphs 2"
    density = train(data, tmp_path / "run", *options.split())["density"]
    every = ("full", "dcmm", "block_top_k")  # four blocks of 16 tokens are these lists
    assert (density["tested"][0][0] == 1.0) == (attention in every)
    assert (tmp_path / "run" / "mask-layer0-head1.png").exists() == (attention != "full")


def test_settings_reach_the_model() -> None:
    """Degrees of a block model, the density of an indexer, blocks of a bias."""
    laptop = PRESETS["listops"]["laptop"].settings

    def attention(**chosen: Any) -> Any:
        return Classifier(TASKS["listops"], dataclasses.replace(laptop, **chosen)).model.encoder.layers[0].attention

    assert attention(degree_corrected=1).source.head.degree_corrected
    assert not attention().source.head.degree_corrected
    indexer = attention(attention="indexer", target_density=0.2, estimator="distill", density_weight=0.0)
    assert indexer.source.target_density == 0.2
    assert type(indexer.estimator).__name__ == "Distill"
    assert attention(attention="dcmm", num_clusters=7, density_weight=0.0).score_bias.num_clusters == 7


@pytest.fixture
def loaders(data: Path) -> Callable[..., Data]:
    task = TASKS["listops"]
    splits = load(task, data, max_length=128)
    laptop = dataclasses.replace(PRESETS[task.name]["laptop"].settings, batch_size=12, steps=30, warmup=0)

    def make(rank: int = 0, count: int = 1, **options: Any) -> Data:
        return Data(splits, dataclasses.replace(laptop, **options), rank, count)

    return make


def order(made: Data) -> list[list[int]]:
    return [part for step in range(30) for part in made.parts(step)]


def test_the_order_of_examples_depends_on_seed_and_step_alone(loaders: Callable[..., Data]) -> None:
    plain, buckets = order(loaders()), loaders().buckets
    assert plain == [batch.tolist() for epoch in range(8) for batch in buckets.epoch(epoch)][:30]
    assert loaders().parts(17) == [plain[17]]  # whatever came before
    for epoch in range(7):  # four batches each
        assert len(set(itertools.chain(*plain[4 * epoch : 4 * epoch + 4]))) == 48
    assert order(loaders(seed=1)) != plain
    for options in ({"accumulate": 4}, {"accumulate": 2, "count": 2}, {"accumulate": 2, "count": 2, "rank": 1}):
        parts = order(loaders(**options))
        assert [list(itertools.chain(*parts[4 * step : 4 * step + 4])) for step in range(30)] == plain


def test_processes_share_every_evaluation(loaders: Callable[..., Data]) -> None:
    shares = [loaders(accumulate=2, rank=rank, count=3) for rank in range(3)]
    for split, count in (("val", 20), ("test", 30)):
        examples = [example for made in shares for batch in made.batches(split) for example in batch]
        assert sorted(examples) == [*range(count)]
    for wrong in ({"count": 4, "accumulate": 2}, {"count": 21, "batch_size": 42}):
        with pytest.raises(ValueError, match="Expected 'nproc-per-node' to be at most 20"):
            loaders(**wrong)


def test_some_examples_at_equal_distances_stand_for_all(loaders: Callable[..., Data]) -> None:
    def evaluated(count: int) -> list[int]:
        return [*itertools.chain(*loaders(evaluate=count).batches("val"))]

    lengths = loaders().splits["val"].lengths
    assert sorted(evaluated(5)) == [0, 4, 8, 12, 16]
    assert lengths[evaluated(5)].tolist() == sorted(lengths[evaluated(5)].tolist())
    assert sorted(evaluated(0)) == sorted(evaluated(50)) == list(range(20))


@quick
def test_the_majority_class_is_that_of_the_examples_that_count(data: Path, tmp_path: Path) -> None:
    test = train(data, tmp_path / "run", "--evaluate", "4", "--steps", "2")["test"]
    labels = load(TASKS["listops"], data, max_length=24)["test"].labels
    counts = np.unique(labels[[0, 7, 15, 22]], return_counts=True)[1]
    assert (test["examples"], test["majority"]) == (4, counts.max() / 4)
    assert test["majority"] != np.bincount(labels).max() / len(labels)


def test_a_head_that_loses_its_edges_is_told_once(tmp_path: Path) -> None:
    module = Classifier(TASKS["listops"], PRESETS["listops"]["laptop"].settings)
    curves, row = trainer.Curves(module, tmp_path, make_fabric("cpu")), {"loss": 0.0, "density_layer0_head1": 0.02}
    with pytest.warns(UserWarning, match=r"Step 0: density_layer1_head0 is 0.05%, an empty head"):
        curves.warn({**row, "density_layer1_head0": 0.0005})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves.warn({**row, "density_layer1_head0": 0.0})


# ------------------------------------------------------------------ what is refused and told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature 0 --parameterization mixed", "temperature"),
        ("--initial-density 0", "initial_density"),
        ("--warmup 9", "Expected 'warmup' to be below 'steps' = 9 (got 9)"),
        ("--accumulate 3", "Expected 'accumulate' to be a divisor of 'batch-size' = 8 (got 3)"),
        ("--attention full --density-weight 1", "Expected 'density-weight' to be 0 for 'full' attention (got 1.0)"),
        ("--batch-size 64", "Expected 'batch-size' to be at most the number of examples, 50 (got 64)"),
    ],
)
def test_settings_that_cannot_be_are_told_before_anything_is_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        train(data, tmp_path / "run", *options.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings_or_data(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def refuse(*options: str) -> str:
        with pytest.raises(SystemExit):
            main(["train", "--output", str(whole), *options])
        return capsys.readouterr().err

    assert f"to be a new or empty folder (got {whole}, which has content). Choose another one, or add" in refuse()
    assert "Expected 'seed' to be 0 as in the run to resume (got 3)" in refuse("--resume", "--seed", "3")
    other = tmp_path / "listops"
    law = ["--train", "50", "--val", "20", "--test", "30", "--seed", "9"]
    main(["prepare", "--generate", "--data", str(other), "--preset", "laptop", *law])
    capsys.readouterr()
    assert "Expected 'data' to be what the run was started with" in refuse("--resume", "--data", str(other))
    assert "to hold ListOps (got no such folder)" in refuse("--resume", "--data", str(tmp_path / "nowhere"))
