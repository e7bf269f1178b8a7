"""What methods cost before training, steps that fit into a time, and steps of several runs timed side by side."""

import csv
import dataclasses
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.common.gate import Rejected
from examples.lra import cost
from examples.lra.__main__ import main
from examples.lra.baselines import BASELINES, LinearAttention
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.model import Classifier
from examples.lra.settings import METHODS, PRESETS, Plan

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
    turns = "sbm linear full linear full sbm full sbm linear sbm linear full"
    assert [row["run"] for row in rows] == turns.split()
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


def test_runs_that_take_other_examples_are_refused(
    untrained: Callable[..., Path], runs: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = untrained(tmp_path / "short", data, attention="linear", layers=1, batch_size=8, max_length=12)
    with pytest.raises(SystemExit):
        main(["cost", "--runs", runs[2], str(short), "--output", str(tmp_path / "out")])
    assert f"Expected 'runs' that take examples in one form (got {short}, which differs" in capsys.readouterr().err


def test_planned_steps_fit_the_minutes(data: Path) -> None:
    small = {
        "validate_every": 2, "batch_size": 8, "num_clusters": 4, "channels": 8, "head_channels": 4, "accumulate": 2,
    }  # fmt: skip
    settings = dataclasses.replace(PRESETS["listops"]["laptop"].settings, **small)  # type: ignore[arg-type]
    plan = Plan(task="listops", preset="laptop", data=str(data), settings=settings, directory="", minutes=0.1)
    planned = cost.planned(plan, open_data(plan)[0], "cpu").settings
    assert planned.steps >= 2
    assert planned.warmup == settings.warmup * planned.steps // settings.steps
    for minutes, every in ((1, 100), (7.5, 100), (60, 100), (1, 1), (1, 7)):
        steps = cost.plan_steps(0.02, 0.3, minutes, every)
        used, more = (count * 0.02 + (1 + math.ceil(count / every)) * 0.3 for count in (steps, steps + 1))
        assert used <= 60 * minutes < more
    with pytest.raises(ValueError, match=r"to be enough for two steps and their validations \(got 0.3\)"):
        cost.plan_steps(1.0, 10.0, 0.3, 100)


@pytest.mark.parametrize("method", ["full", "window", "sbm:initial-density=0.05", "linear"])
def test_costs_are_measured_after_the_gate(method: str) -> None:
    length, batch = 40, 2
    row = cost.measure(TASKS["listops"], method, "laptop", length, batch, 1)
    assert all(row[f"{part}_{name}"] >= 0 for part in ("forward", "step") for name, _ in cost.UNITS.values())
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
    memory = [words.split()[0] for words in last[5:7]]
    assert memory == ["–", "1"]  # what is hidden below an earlier peak is not nothing


@pytest.mark.parametrize("method", METHODS)
def test_the_gate_rejects_attention_that_mixes_sequences_or_is_off_by_a_thousandth(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Classifier(TASKS["listops"], cost.settings_of("listops", method, "laptop"))
    cost.gate(module)
    attention: Any = module.model.encoder.layers[0].attention
    forward = attention.forward

    def mixed(x: torch.Tensor, **options: Any) -> Any:
        return forward(x + 1e-3 * x.mean(0), **options)

    def scaled(x: torch.Tensor, **options: Any) -> Any:
        out, choice = forward(x, **options)
        return 1.001 * out, choice

    wrong = [mixed] if method in BASELINES else [mixed, scaled]  # a baseline is compared with itself
    for replacement in wrong:
        monkeypatch.setattr(attention, "forward", replacement)
        with pytest.raises(Rejected, match=f"its attention '{method}' is off by"):
            cost.gate(module)


def test_a_method_that_fails_the_gate_is_named_and_not_measured(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def padded(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, seed: int) -> Any:
        return attend(self, query, key, value, torch.ones_like(mask), seed)  # as if padding were tokens

    attend = LinearAttention.attend
    monkeypatch.setattr(LinearAttention, "attend", padded)
    monkeypatch.setattr(cost, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    words = "cost --tasks listops --methods linear window --preset laptop --length 32 --repeats 1 --output"
    for command in ([*words.split(), str(tmp_path)], ["cost", "--runs", *runs, "--output", str(tmp_path / "runs")]):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert "attention 'linear' is off by" in str(stop.value.code)  # a text: the exit code is 1
    assert re.findall(r"^\| (\w+) \|", capsys.readouterr().out, re.MULTILINE) == ["method", "window"]
    assert [path.name.split("-")[1] for path in (tmp_path / "rows").iterdir()] == ["window"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_rows_of_methods_are_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "cost --tasks listops --methods linear --preset laptop --repeats 1"
    words = [*options.split(), "--output", str(tmp_path)]
    main(words)
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "cost.md").read_text().strip()
    assert "| linear | – |" in text
    monkeypatch.setattr(cost, "ProcessPoolExecutor", None)
    main(words)
    assert capsys.readouterr().out == text
