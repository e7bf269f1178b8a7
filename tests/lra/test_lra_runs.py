"""The trainer of the examples: results, resuming, accumulation, errors."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from scipy.stats import binomtest

from examples.lra import report
from examples.lra import train as trainer
from examples.lra.__main__ import main
from examples.lra.data.prepare import load
from examples.lra.data.tasks import TASKS
from examples.lra.model import Classifier
from examples.lra.settings import Settings
from examples.lra.train import Data
from sbm_pyg import SequenceClassifier

ROOT = Path(report.__file__).parents[2]
FILES = [
    ".lock",
    "best.ckpt",
    "curves.png",
    "density.png",
    "last.ckpt",
    "masks.png",
    "previous.ckpt",
    "results.json",
    "settings.json",
    "tensorboard",
    "train.csv",
    "val.csv",
]
TINY = [
    "--steps",
    "7",
    "--validate-every",
    "3",
    "--log-every",
    "2",
    "--batch-size",
    "8",
    "--num-blocks",
    "8",
    "--channels",
    "16",
]
TINY += ["--head-channels", "8", "--ffn-channels", "16", "--accelerator", "cpu"]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def train(data: Path, folder: Path, *options: str) -> dict:
    main(["train", *TINY, "--data", str(data), "--output", str(folder), *options])
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout that went through."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(data, folder, "--dropout", "0.1", "--attention-dropout", "0.1")
    return folder


def weights(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    return torch.load(folder / name, weights_only=True)["state_dict"]


def curves(folder: Path) -> list[dict[str, float]]:
    rows = [row for phase in ("train", "val") for row in report.read_curves(folder / f"{phase}.csv")]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def test_a_run_leaves_settings_curves_checkpoints_results_and_plots(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == FILES
    settings = json.loads((run / "settings.json").read_text())
    assert settings["settings"]["steps"] == 7
    assert settings["settings"]["warmup"] == 0  # keeps its share of the steps
    assert [row["step"] for row in report.read_curves(run / "train.csv")] == [2, 3, 4, 6, 7]
    assert [row["step"] for row in report.read_curves(run / "val.csv")] == [0, 3, 6, 7]
    assert {"loss", "accuracy", "density_layer0_head0", "density_layer1_head1"} <= report.read_curves(run / "val.csv")[
        0
    ].keys()
    assert list((run / "tensorboard").glob("events*"))


def test_results_hold_what_the_table_shows(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    low, high = results["test"]["interval_95"]
    assert 0 <= low <= results["test"]["accuracy"] <= high <= 1
    assert results["test"]["examples"] == 30
    for moment in ("first", "last", "tested"):
        assert torch.tensor(results["density"][moment]).shape == (2, 2)
    assert results["tokens_per_second"] > 0
    assert results["peak_memory_bytes"] > 2**20
    table = report.results_table(results)
    assert f"test accuracy      {results['test']['accuracy']:.2%}" in table
    assert "layer 1, head 1" in table


def test_best_checkpoint_reproduces_its_validation_accuracy_in_any_batches(run: Path, data: Path) -> None:
    plan = json.loads((run / "settings.json").read_text())
    module = Classifier(TASKS["listops"], Settings(**plan["settings"]))
    module.load_state_dict(weights(run, "best.ckpt"))
    module.eval()
    best = json.loads((run / "results.json").read_text())["best"]
    logged = {row["step"]: row for row in report.read_curves(run / "val.csv")}[best["step"]]
    assert (
        logged["accuracy"]
        == best["accuracy"]
        == max(row["accuracy"] for row in report.read_curves(run / "val.csv")[1:])
    )
    split = load(TASKS["listops"], data, max_length=128)["val"]
    for size in (1, 7, 20):
        for start in range(0, len(split), size):
            with torch.no_grad():
                module.validation_step(split.__getitems__(list(range(start, min(start + size, len(split))))), 0)
        row = module.finish_row()
        assert row["accuracy"] == best["accuracy"]
        assert row["loss"] == pytest.approx(logged["loss"], rel=1e-5)
        assert row["density_layer0_head1"] == pytest.approx(
            logged["density_layer0_head1"], rel=1e-9
        )  # the very same graphs


def test_testing_averages_probabilities_over_graphs(run: Path, data: Path) -> None:
    settings = Settings(**json.loads((run / "settings.json").read_text())["settings"])
    module = Classifier(TASKS["listops"], dataclasses.replace(settings, test_graphs=3)).eval()
    batch = load(TASKS["listops"], data, max_length=128)["test"].__getitems__(list(range(9)))
    with torch.no_grad():
        logits = [module.classify(batch, seed=settings.seed + graph)[0] for graph in range(3)]
        assert not torch.equal(logits[0], logits[1])
        assert torch.equal(module.average(batch, 1)[0], logits[0])
        mean = torch.stack(logits).softmax(-1).mean(0)
        torch.testing.assert_close(module.average(batch, 3)[0].exp(), mean)
        module.test_step(batch, 0)
    row = module.finish_row()
    assert row["loss"] == pytest.approx(float(torch.nn.functional.nll_loss(mean.log(), batch.labels)), rel=1e-5)
    assert row["accuracy"] == float((mean.argmax(-1) == batch.labels).float().mean())


def test_masks_have_names_at_their_axes_and_a_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    mask = np.eye(3)[None].repeat(2, 0) > 0
    report.plot_masks(tmp_path / "masks.png", [mask, mask], [0.5 * mask, None], ["[MAX", "1", "]"])
    (figure,) = drawn
    *panels, bar, other = figure.axes
    assert len(panels) == 8
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in panels} == {("key (token)", "query (token)")}
    assert bar.get_ylabel() == other.get_ylabel() == "probability of an edge"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["edge", "no edge"]
    assert [text.get_text() for text in panels[0].get_xticklabels()] == ["[MAX", "1", "]"]


KILLED = """
import os, signal, sys
from examples.lra.__main__ import main
from examples.lra.model import Classifier
step = Classifier.training_step
def doomed(self, batch, batch_idx):
    if self.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, batch_idx)
Classifier.training_step = doomed
main(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(run: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    options = [*TINY, "--dropout", "0.1", "--attention-dropout", "0.1", "--data", str(data), "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["step"] for row in report.read_curves(folder / "train.csv")] == [
        2,
        3,
        4,
    ]  # step 4 came after the checkpoint
    assert not (folder / "results.json").exists()
    main(["train", "--output", str(folder), "--resume", "--accelerator", "cpu"])
    for name in ("last.ckpt", "best.ckpt"):
        resumed = weights(folder, name)
        assert all(torch.equal(value, resumed[key]) for key, value in weights(run, name).items())
    assert curves(folder) == curves(run)
    assert (
        json.loads((folder / "results.json").read_text())["test"]
        == json.loads((run / "results.json").read_text())["test"]
    )


def test_resuming_a_finished_run_only_reports_again(run: Path, capsys: pytest.CaptureFixture) -> None:
    before, results = weights(run), json.loads((run / "results.json").read_text())
    for peak in (2**50, 1):  # of the training, which was more than the test alone needs, or less
        (run / "results.json").write_text(json.dumps({**results, "peak_memory_bytes": peak}))
        main(["train", "--output", str(run), "--resume", "--accelerator", "cpu"])
        again = json.loads((run / "results.json").read_text())
        assert again["tokens_per_second"] == results["tokens_per_second"]
        assert again["peak_memory_bytes"] == peak if peak > 1 else again["peak_memory_bytes"] > 2**20
    assert all(torch.equal(value, before[key]) for key, value in weights(run).items())
    assert json.loads((run / "results.json").read_text())["test"] == results["test"]
    assert "test accuracy" in capsys.readouterr().out


def test_a_trained_model_is_exported_with_task_metric_and_density(run: Path, data: Path, tmp_path: Path) -> None:
    export = tmp_path / "models" / "listops"
    main(["train", "--output", str(run), "--resume", "--accelerator", "cpu", "--export", str(export)])
    results, config = json.loads((run / "results.json").read_text()), json.loads((export / "config.json").read_text())
    metric = {"test accuracy": results["test"]["accuracy"], "validation accuracy": results["best"]["accuracy"]}
    told = config["trained"].pop("task")
    assert told.startswith("listops (tokeniser: ")  # what a reader of the number must know
    assert all(f"{name}: {words}" in told for name, words in results["pipeline"].items())
    assert config["trained"] == {"metric": metric, "density": results["density"]["tested"]}
    model = SequenceClassifier.from_pretrained(export)
    best = weights(run, "best.ckpt")
    assert best.keys() == {f"model.{key}" for key in model.state_dict()}
    assert all(torch.equal(value, best[f"model.{key}"]) for key, value in model.state_dict().items())
    split = load(TASKS["listops"], data, max_length=128)["test"]
    batch = split.__getitems__(list(range(30)))
    assert isinstance(batch.ptr, torch.Tensor)
    logits = model(batch.tokens, batch.ptr, seed=0, sequence_ids=batch.examples)
    assert (logits.argmax(-1) == batch.labels).double().mean().item() == pytest.approx(results["test"]["accuracy"])


def test_an_export_never_replaces_anything(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with pytest.raises(SystemExit):
        train(data, tmp_path / "run", "--export", str(tmp_path / "kept"))
    assert "Expected 'export' to be a new or empty folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_export_is_tried_before_training(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(trainer, "train", None)
    for export, words in (
        (
            tmp_path / "new" / "model",
            f"'export' to be a folder that can be written (got 'Read-only file system' for {tmp_path})",
        ),
        (run, f"Expected 'export' to be a folder without that of the run, {run} (got {run})"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["train", "--output", str(run), "--resume", "--accelerator", "cpu", "--export", str(export)])
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("attention", ["sbm", "bigbird"])
def test_accumulating_changes_neither_graphs_nor_gradients(data: Path, tmp_path: Path, attention: str) -> None:
    for parts in ("1", "4"):
        train(
            data,
            tmp_path / parts,
            "--attention",
            attention,
            "--steps",
            "3",
            "--accumulate",
            parts,
            "--precision",
            "32-true",
        )
    whole, parted = (curves(tmp_path / parts) for parts in ("1", "4"))
    for one, other in zip(whole, parted, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert whole[0]["density_layer0_head0"] == pytest.approx(parted[0]["density_layer0_head0"], rel=1e-12)
    expected = weights(tmp_path / "4")
    for key, value in weights(tmp_path / "1").items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=2e-4)


def test_rounds_go_on_through_the_data(data: Path) -> None:
    settings = TASKS["listops"].presets["laptop"].settings
    splits = load(TASKS["listops"], data, max_length=128)
    rounds = Data(
        splits, dataclasses.replace(settings, batch_size=10, steps=8, warmup=0, validate_every=5, accumulate=2)
    )
    seen = []
    for done, batches in [(0, 10), (5, 6)]:
        rounds.trainer = cast(Trainer, SimpleNamespace(global_step=done))
        seen.append([batch.examples for batch in rounds.train_dataloader()])
        assert len(seen[-1]) == batches
    assert sorted(torch.cat(seen[0]).tolist()) == list(range(50))  # one pass over the data
    assert len(torch.cat(seen[1]).unique()) == 30
    assert [part.tolist() for part in seen[0][:6]] != [part.tolist() for part in seen[1]]


def test_seed_decides(data: Path, tmp_path: Path, run: Path) -> None:
    train(data, tmp_path / "same", "--dropout", "0.1", "--attention-dropout", "0.1")
    assert curves(tmp_path / "same") == curves(run)
    train(data, tmp_path / "other", "--dropout", "0.1", "--attention-dropout", "0.1", "--seed", "1")
    assert curves(tmp_path / "other") != curves(run)


def test_regulariser_lowers_the_density(data: Path, tmp_path: Path) -> None:
    results = train(
        data,
        tmp_path / "run",
        "--density-weight",
        "10",
        "--estimator",
        "none",
        "--steps",
        "12",
        "--learning-rate",
        "0.02",
    )
    first, last = (torch.tensor(results["density"][moment]) for moment in ("first", "last"))
    assert (last < first - 0.02).all()


@pytest.mark.parametrize("attention", ["full", "window", "bigbird"])
def test_every_attention_trains(data: Path, tmp_path: Path, attention: str) -> None:
    results = train(
        data, tmp_path / "run", "--attention", attention, "--window", "3", "--steps", "2", "--precision", "bf16-mixed"
    )
    assert (results["density"]["tested"][0][0] == 1.0) == (attention == "full")
    assert (tmp_path / "run" / "masks.png").exists() == (attention != "full")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "Expected 'steps' to be at least 1 (got 0)"),
        (["--dropout", "1.5"], "Expected 'dropout' to be at least 0.0 and at most 0.99 (got 1.5)"),
        (["--learning-rate", "nan"], "Expected 'learning-rate' to be at least 0.0 (got nan)"),
        (["--learning-rate", "inf"], "Expected 'learning-rate' to be finite (got inf)"),
        (["--weight-decay", "inf"], "Expected 'weight-decay' to be finite (got inf)"),
        (["--temperature", "0", "--parameterization", "mixed"], "temperature"),
        (["--initial-density", "0"], "density"),
        (["--export", "{data}/listops/afile/x"], "Expected 'export' to be a folder that can be made"),
        (
            ["--export", "{data}/run"],
            "Expected 'export' to be a folder without that of the run, {folder} (got {folder})",
        ),
        (
            ["--export", "{data}/listops/..", "--output", "{data}/run"],
            "to be a folder without that of the run, {folder} (got ",
        ),
        (["--output", "{data}/listops/afile/x"], "Expected 'output' to be a folder that can be made"),
        (["--threads", "0"], "Expected 'threads' to be at least 1 (got 0)"),
        (["--warmup", "7"], "Expected 'warmup' to be below 'steps' = 7 (got 7)"),
        (["--accumulate", "3"], "Expected 'accumulate' to divide 'batch-size' = 8 (got 3)"),
        (
            ["--attention", "full", "--density-weight", "1"],
            "Expected 'density-weight' to be 0 for attention 'full' (got 1.0)",
        ),
        (["--batch-size", "64"], "Expected 'batch-size' to be at most the number of examples, 50 (got 64)"),
        (["--attention", "none"], "argument --attention: invalid choice: 'none'"),
        (["--resume"], "Expected 'output' to be the folder of a run to resume (got {folder})"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], message: str
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "listops").mkdir()
    (tmp_path / "listops" / "afile").touch()
    with pytest.raises(SystemExit) as stop:
        train(data, folder, *(option.format(data=tmp_path) for option in options))
    assert stop.value.code == 2
    assert message.format(folder=folder) in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
def test_an_absent_accelerator_is_told_before_anything_is_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        train(data, tmp_path / "run", "--accelerator", accelerator)
    assert stop.value.code == 2
    assert (
        f"for each process (got '{accelerator}', of which this machine has 0). Leave it out for what there is."
        in capsys.readouterr().err
    )
    train(data, tmp_path / "run", "--steps", "1")  # the same command, corrected


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings_or_data(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def refuse(*options: str) -> str:
        with pytest.raises(SystemExit):
            main(["train", "--output", str(run), *options])
        return capsys.readouterr().err

    assert (
        f"to be a new or empty folder (got {run}, which has content). Choose another one, or add --resume." in refuse()
    )
    assert "Expected 'seed' to be 0 as in the run to resume (got 3)" in refuse("--resume", "--seed", "3")
    other = tmp_path / "listops"
    law = ["--train", "50", "--val", "20", "--test", "30", "--seed", "9"]
    main(["prepare", "--generate", "--data", str(other), "--preset", "laptop", *law])
    capsys.readouterr()
    assert "Expected 'data' to be what the run was started with" in refuse("--resume", "--data", str(other))
    assert "to hold ListOps (got no such folder)" in refuse("--resume", "--data", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("settings.json", lambda text: text[: len(text) // 2]),
        ("settings.json", lambda text: text.replace('"layers"', '"lairs"')),
        ("settings.json", lambda text: text.replace('"task"', '"tusk"')),
        ("train.csv", lambda text: text.replace("0.", "x.", 3)),
        ("train.csv", lambda text: ""),
        ("train.csv", None),
        ("val.csv", None),
        ("best.ckpt", None),
    ],
)
def test_a_damaged_or_missing_file_of_a_run_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str, change: Callable[[str], str] | None
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(SystemExit) as stop:
        main(["train", "--output", str(folder), "--resume", "--accelerator", "cpu"])
    assert stop.value.code == 2
    assert f"Expected {folder / name} to be " in capsys.readouterr().err


def test_curves_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    report.CurveLogger(tmp_path, step=2)
    report.CurveLogger(tmp_path)
    assert (tmp_path / "notes.csv").read_text() == "a,b\n1,2\n"


def test_a_missing_package_and_a_full_disk_are_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "linformer", None)
    with pytest.raises(SystemExit):
        train(data, tmp_path / "run", "--attention", "linformer")
    assert "Expected 'linformer' to be installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("examples.lra.settings.write_text", full)
    with pytest.raises(SystemExit) as stop:
        train(data, tmp_path / "run")
    assert stop.value.code == 2
    assert "to be a folder that can be written (got 'No space left on device' for" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--task", "pathfinder"], ["--task=text"]])
def test_help_shows_the_values_of_the_task(
    words: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["train", *words, "--help"])
    task = words[-1].rpartition("=")[2] if words else "listops"
    shown = capsys.readouterr().out
    steps = [TASKS[task].presets[name].settings.steps for name in ("laptop", "paper")]
    assert f"values are those of laptop | paper for {task}" in shown
    assert f"optimiser steps ({steps[0]} | {steps[1]})" in shown


def test_truncation_is_reported(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(data, tmp_path / "run", "--steps", "1", "--max-length", "10")
    assert "of 50 sequences to 10 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("correct", "count"), [(0, 5), (8, 10), (1480, 2000), (30, 30)])
def test_interval_is_that_of_wilson(correct: int, count: int) -> None:
    expected = binomtest(correct, count).proportion_ci(method="wilson")
    assert report.wilson_interval(correct, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_curves_forget_what_a_checkpoint_does_not_know(tmp_path: Path) -> None:
    logger = report.CurveLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": step / 3}, step=step)
    with (tmp_path / "train.csv").open("a") as file:
        file.write("4")  # a row that was never finished
    report.CurveLogger(tmp_path, step=2)
    assert report.read_curves(tmp_path / "train.csv") == [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 2 / 3}]
    report.CurveLogger(tmp_path)
    assert not (tmp_path / "train.csv").exists()
