"""What methods cost before training, steps that fit into a time, and steps of several runs timed side by side."""

from __future__ import annotations

import csv
import dataclasses
import errno
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.lra import cost
from examples.lra.__main__ import main
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.model import Classifier
from examples.lra.settings import Plan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture(scope="module")
def runs(untrained: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent, options = tmp_path_factory.mktemp("runs"), {"layers": 1, "batch_size": 8, "clip_norm": 1.0}
    return [
        str(untrained(parent / attention, data, attention=attention, **options))
        for attention in ("full", "sbm", "linear")
    ]


def test_all_runs_take_the_same_batches_and_learn_nothing(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Classifier, list[torch.Tensor]]] = []
    original: Any = cost.timed_step

    def watched(module: Classifier, *rest: object) -> dict[str, float]:
        if all(module is not known for known, _ in kept):
            kept.append((module, [parameter.detach().clone() for parameter in module.parameters()]))
        return original(module, *rest)

    monkeypatch.setattr(cost, "timed_step", watched)
    main(["cost", "--runs", *runs, "--repeats", "4", "--output", str(tmp_path / "out")])
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
        assert float(row["step"]) == pytest.approx(sum(float(row[part]) for part in cost.PARTS))
        assert min(float(row[part]) for part in cost.PARTS) > 0
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
    original: Any = Classifier.classify

    def classify(module: Classifier, batch: Any, seed: int) -> Any:
        logits, trace = original(module, batch, seed)
        if module.training:
            seen.append((logits.dtype, len(batch.labels)))
        return logits, trace

    monkeypatch.setattr(Classifier, "classify", classify)
    rows = cost.compare([Path(runs[2]), low], None, 1)
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
            **dict.fromkeys(cost.PARTS, 0.1),
        }
        for place, (name, factor) in enumerate((("slow", 1), ("quick", 2)))
        for batch in (1, 10, 100)
    ]
    assert "2.00 (2.00–2.00)" in cost.comparison(rows).splitlines()[-1]


def test_runs_of_two_tasks_are_refused(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = cost.open_run

    def opened(folder: Path, **options: Any) -> Any:
        plan, *others = original(folder, **options)
        return dataclasses.replace(plan, task="text") if folder.name == "sbm" else plan, *others

    monkeypatch.setattr(cost, "open_run", opened)
    monkeypatch.setattr(TASKS["text"].__class__, "pipeline", lambda *_: {})
    with pytest.raises(SystemExit):
        main(["cost", "--runs", *runs, "--output", str(tmp_path)])
    assert (
        "Expected 'runs' that take examples in one form, task: listops, as the first (got 'text' in "
        in capsys.readouterr().err
    )


def test_refusals(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = tmp_path / "young"  # stopped before its first checkpoint
    young.mkdir()
    shutil.copy(Path(runs[0]) / "settings.json", young)
    for arguments, words in (
        ([runs[0], runs[0]], "Expected 'runs' whose folders have different names"),
        ([*runs, "--repeats", "0"], "Expected 'repeats' to be at least 1 (got 0)"),
        ([str(tmp_path / "absent")], "Expected 'run' to be a folder with settings.json and best.ckpt"),
        ([str(young)], "Expected 'run' to be a folder with settings.json and best.ckpt"),
    ):
        with pytest.raises(SystemExit):
            main(["cost", "--runs", *arguments, "--output", str(tmp_path / "out")])
        assert words in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "file", tmp_path / "new" / "folder"
    file.touch()
    monkeypatch.setattr(cost, "compare", None)
    monkeypatch.setattr(cost, "ProcessPoolExecutor", None)

    def refuse(arguments: list[str], output: Path) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["cost", *arguments, "--output", str(output)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    timed, costs = ["--runs", *runs], ["--tasks", "listops", "--methods", "full", "--preset", "laptop"]
    assert f"Expected 'output' to be a folder that can be made (got {file}, but {file} is a file)" in refuse(
        timed, file
    )

    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    for arguments in (timed, costs):
        said = refuse(arguments, folder)
        assert (
            f"Expected 'output' to be a folder that can be written (got 'Read-only file system' for {tmp_path})" in said
        )
    assert not folder.parent.exists()


def test_short_runs_pass_the_gate_too(untrained: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    for attention in ("full", "sbm", "linformer", "nystromformer", "reformer"):
        run = untrained(tmp_path / attention, data, attention=attention, layers=1, batch_size=8, max_length=12)
        assert {row["run"] for row in cost.compare([run], None, 1)} == {attention}


def test_the_number_of_batches_is_that_of_those_timed(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cost", "--output", str(tmp_path / "out"), "--runs"]
    main([*words, runs[2], "--repeats", "20"])  # 50 examples by 8: there are 6 whole batches
    assert "\n5 batches, 1 thread(s)" in "\n" + capsys.readouterr().out
    large = untrained(tmp_path / "large", data, attention="linear", layers=1, batch_size=50)
    with pytest.raises(SystemExit):
        main([*words, str(large)])
    assert "Expected 'data' of at least two training batches (got 1)" in capsys.readouterr().err


def test_runs_that_take_other_examples_are_refused(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = untrained(tmp_path / "short", data, attention="linear", layers=1, batch_size=8, max_length=12)
    with pytest.raises(SystemExit):
        main(["cost", "--runs", runs[2], str(short), "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert (
        "in one form, length: sequences cut to 128 tokens, never padded, as the first (got 'sequences cut to 12 tokens"
        in error
    )


def test_measured_steps_fit_the_minutes(data: Path) -> None:
    small: dict[str, Any] = {
        "validate_every": 2,
        "batch_size": 8,
        "num_blocks": 4,
        "channels": 8,
        "head_channels": 4,
        "accumulate": 2,
    }
    settings = dataclasses.replace(TASKS["listops"].presets["laptop"].settings, **small)
    plan = Plan(task="listops", preset="laptop", data=str(data), settings=settings, directory="", minutes=0.1)
    splits, _ = open_data(plan)
    step, validation = cost.seconds_of(plan, splits, "cpu")
    assert 0 < step < 10
    assert 0 < validation < 60
    planned = cost.planned(plan, splits, "cpu").settings
    assert planned.steps >= 2
    assert planned.warmup == settings.warmup * planned.steps // settings.steps
    for minutes, every in ((1, 100), (7.5, 100), (60, 100), (1, 1), (1, 7)):
        steps = cost.plan_steps(step, validation, minutes, every)
        used, more = (count * step + (1 + math.ceil(count / every)) * validation for count in (steps, steps + 1))
        assert used <= 60 * minutes < more
    with pytest.raises(
        ValueError, match=r"Expected 'minutes' to be enough for two steps and their validations, 0.4 \(got 0.3\)"
    ):
        cost.plan_steps(1.0, 10.0, 0.3, 100)


@pytest.mark.parametrize("method", ["full", "window", "sbm:initial-density=0.05", "linear"])
def test_costs_are_measured_after_the_gate(method: str) -> None:
    length, batch = 40, 2
    row = cost.measure(TASKS["listops"], method, "laptop", length, batch, 1)
    assert all(row[name] >= 0 for name in cost.MEASURES)
    assert 0 < row["forward_flops"] < row["step_flops"]
    assert row["forward_seconds"] > 0
    if method == "full":  # 2 layers, 2 heads of 32 channels, width 64, hidden 128, 10 classes
        tokens, wide = batch * length, 2 * 64
        by_hand = 2 * (4 * batch * 64 * length**2 + tokens * (4 * 64 * wide + 2 * 128 * wide)) + batch * (
            128 * wide + 2 * 128 * 10
        )
        assert row["forward_flops"] == by_hand
        assert row["density"] is None
    if method.startswith("sbm"):
        assert row["density"] == pytest.approx(0.05, abs=0.02)
        assert 0 < row["forward_sampling_flops"] < row["forward_flops"]
    words = cost.report([row])
    assert "## listops, 2 x 40 tokens\n\n| method | density |" in words
    last = cost.report([{**row, "forward_bytes": 0, "step_bytes": 2**20}]).splitlines()[-1].split(" | ")
    assert [words.split()[0] for words in last[5:7]] == [
        "–",
        "1",
    ]  # what is hidden below an earlier peak is not nothing


def test_the_gate_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier(TASKS["listops"], TASKS["listops"].presets["laptop"].settings)
    cost.gate(module, TASKS["listops"], torch.device("cpu"))
    classify = module.classify
    monkeypatch.setattr(module, "classify", lambda batch, seed: (classify(batch, seed)[0] / 0, None))
    with pytest.raises(ValueError, match=r"Expected 'sbm' to give finite logits \[3, 10\]"):
        cost.gate(module, TASKS["listops"], torch.device("cpu"))
    monkeypatch.setattr(module, "classify", lambda batch, seed: (classify(batch, seed)[0] * len(batch.labels), None))
    with pytest.raises(ValueError, match=r"Expected 'sbm' alone to give the same \(got a difference of"):
        cost.gate(module, TASKS["listops"], torch.device("cpu"))


@pytest.mark.slow
def test_rows_of_methods_are_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "cost",
        "--tasks",
        "listops",
        "--methods",
        "linear",
        "--preset",
        "laptop",
        "--repeats",
        "1",
        "--output",
        str(tmp_path),
    ]
    main(words)
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "cost.md").read_text().strip()
    assert "| linear | – |" in text
    monkeypatch.setattr(cost, "ProcessPoolExecutor", None)
    main(words)
    assert capsys.readouterr().out == text
    next((tmp_path / "rows").iterdir()).write_text("{")
    with pytest.raises(SystemExit):
        main(words)
    assert "which makes it again" in capsys.readouterr().err
