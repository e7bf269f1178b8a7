"""Steps of several runs, timed side by side."""

from __future__ import annotations

import csv
import errno
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cost_lra
import pytest
import time_runs
import torch
from lra_tasks import TASKS

import lra

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture(scope="module")
def runs(untrained: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent, options = tmp_path_factory.mktemp("runs"), {"layers": 1, "batch_size": 8, "clip_norm": 1.0}
    return [str(untrained(parent / attention, data, attention=attention, **options)) for attention in ("full", "sbm", "linear")]


def test_all_runs_take_the_same_batches_and_learn_nothing(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[lra.Classifier, list[torch.Tensor]]] = []
    original: Any = time_runs.timed_step

    def watched(module: lra.Classifier, *rest: object) -> dict[str, float]:
        if all(module is not known for known, _ in kept):
            kept.append((module, [parameter.detach().clone() for parameter in module.parameters()]))
        return original(module, *rest)

    monkeypatch.setattr(time_runs, "timed_step", watched)
    time_runs.main([*runs, "--steps", "4", "--output", str(tmp_path / "out")])
    with (tmp_path / "out" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [
        "sbm",
        "linear",
        "full",
        "linear",
        "full",
        "sbm",
        "full",
        "sbm",
        "linear",
        "sbm",
        "linear",
        "full",
    ]
    for batch in "1234":
        assert len({row["tokens"] for row in rows if row["batch"] == batch}) == 1
    assert len({row["tokens"] for row in rows}) > 1
    for row in rows:
        assert float(row["step"]) == pytest.approx(sum(float(row[part]) for part in time_runs.PARTS))
        assert min(float(row[part]) for part in time_runs.PARTS) > 0
        assert (float(row["density"]) == 1) == (row["run"] == "full" or row["run"] == "linear")
    assert len(kept) == 3
    for module, before in kept:
        assert all(torch.equal(one, two) for one, two in zip(module.parameters(), before, strict=True))
        assert all(parameter.grad is not None for parameter in module.parameters())
    table = (tmp_path / "out" / "time.md").read_text()
    assert table in capsys.readouterr().out
    assert re.findall(r"^\| (full|sbm|linear) ", table, re.MULTILINE) == ["full", "sbm", "linear"]
    assert "1.00 (1.00–1.00) |" in table


def test_a_step_has_the_precision_and_the_parts_of_the_run(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layers": 1, "batch_size": 8, "precision": "bf16-mixed", "accumulate": 4}
    low = untrained(tmp_path / "low", data, attention="linear", **options)
    seen: list[tuple[torch.dtype, int]] = []
    original: Any = lra.Classifier.classify

    def classify(module: lra.Classifier, batch: Any, seed: int) -> Any:
        logits, trace = original(module, batch, seed)
        if module.training:
            seen.append((logits.dtype, len(batch.labels)))
        return logits, trace

    monkeypatch.setattr(lra.Classifier, "classify", classify)
    rows = time_runs.measure([Path(runs[2]), low], "best.ckpt", None, 1)
    assert [row["run"] for row in rows] == ["low", "linear"]
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert rows[0]["density"] == rows[1]["density"] == 1
    parts, whole = [(torch.bfloat16, 2)] * 4, [(torch.float32, 8)]
    assert seen == [*whole, *parts, *parts, *whole]


def test_ratios_are_of_the_same_batch() -> None:
    """The second run is twice as fast on each batch, though the batches differ by more."""
    rows = [
        {
            "run": name,
            "place": place,
            "batch": batch,
            "tokens": 100,
            "step": batch / factor,
            "density": 1.0,
            **dict.fromkeys(time_runs.PARTS, 0.1),
        }
        for place, (name, factor) in enumerate((("slow", 1), ("quick", 2)))
        for batch in (1, 10, 100)
    ]
    assert "2.00 (2.00–2.00)" in time_runs.report(rows).splitlines()[-1]


def test_runs_of_two_tasks_are_refused(runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = time_runs.open_run

    def opened(folder: Path, *rest: Any, **options: Any) -> Any:
        task, *others = original(folder, *rest, **options)
        return TASKS["text"] if folder.name == "sbm" else task, *others

    monkeypatch.setattr(time_runs, "open_run", opened)
    with pytest.raises(SystemExit):
        time_runs.main(runs)
    assert "Expected 'runs' of one task, listops as the first (got text in " in capsys.readouterr().err


def test_refusals(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = tmp_path / "young"  # stopped before its first checkpoint
    young.mkdir()
    shutil.copy(Path(runs[0]) / "settings.json", young)
    for arguments, words in (
        ([runs[0], runs[0]], "Expected 'runs' whose folders have different names"),
        ([*runs, "--steps", "0"], "Expected 'steps' to be at least 1 (got 0)"),
        ([str(tmp_path / "absent")], "Expected 'run' to be a folder with settings.json and best.ckpt"),
        ([str(young)], "Expected 'run' to be a folder with settings.json and best.ckpt"),
    ):
        with pytest.raises(SystemExit):
            time_runs.main(arguments)
        assert words in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "file", tmp_path / "new" / "folder"
    file.touch()
    costs = ["--tasks", "listops", "--methods", "full", "--preset", "laptop"]
    monkeypatch.setattr(time_runs, "measure", None)
    monkeypatch.setattr(subprocess, "run", None)

    def refuse(program: Any, arguments: list[str], output: Path) -> str:
        with pytest.raises(SystemExit) as stop:
            program.main([*arguments, "--output", str(output)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert f"Expected 'output' to be a folder that can be written (got 'Not a directory' for {file})" in refuse(time_runs, runs, file)

    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    for program, arguments in ((time_runs, runs), (cost_lra, costs)):
        said = refuse(program, arguments, folder)
        assert f"Expected 'output' to be a folder that can be written (got 'Read-only file system' for {tmp_path})" in said
    assert not folder.parent.exists()


def test_short_runs_pass_the_gate_too(untrained: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    for attention in ("full", "sbm", "linformer", "nystromformer", "reformer"):
        run = untrained(tmp_path / attention, data, attention=attention, layers=1, batch_size=8, max_length=12)
        assert {row["run"] for row in time_runs.measure([run], "best.ckpt", None, 1)} == {attention}


def test_the_number_of_batches_is_that_of_those_timed(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    time_runs.main([runs[2], "--steps", "20"])  # 50 examples by 8: there are 6 whole batches
    assert "\n5 batches, 1 thread(s)" in "\n" + capsys.readouterr().out
    large = untrained(tmp_path / "large", data, attention="linear", layers=1, batch_size=50)
    with pytest.raises(SystemExit):
        time_runs.main([str(large)])
    assert "Expected 'data' of at least two training batches (got 1)" in capsys.readouterr().err


def test_runs_that_take_other_examples_are_refused(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = untrained(tmp_path / "short", data, attention="linear", layers=1, batch_size=8, max_length=12)
    with pytest.raises(SystemExit):
        time_runs.main([runs[2], str(short)])
    error = capsys.readouterr().err
    assert "in one form, length: sequences cut to 128 tokens, never padded, as the first (got 'sequences cut to 12 tokens" in error
