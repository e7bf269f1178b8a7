"""The repeated-token task, the study of what learns, and the numbers of docs/learning_appendix.md in its tidy tables."""

import argparse
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import repeated_tokens as task
from examples.benchmarks import learning as study
from examples.benchmarks.gradients import gradient_errors
from examples.common.tables import read

TINY = task.Settings(tokens=12, batch_size=4, steps=6, num_clusters=4, evaluate_every=3)
DOCS = Path(study.__file__).parents[2] / "docs"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_labels_say_which_numbers_occur_again() -> None:
    numbers, labels, ptr = task.make_batch(50, 20, 1)
    assert numbers.min() >= 0
    assert numbers.max() < 20
    assert ptr.tolist() == [*range(0, 1001, 20)]
    for row, label in zip(numbers.tolist(), labels.tolist(), strict=True):
        assert label == [float(row.count(number) > 1) for number in row]
    assert torch.equal(task.make_batch(50, 20, 1)[0], numbers)
    assert not torch.equal(task.make_batch(50, 20, 2)[0], numbers)


@pytest.mark.parametrize("estimator", ["local", "mask", "paper", "relaxed", "concrete", "score-function", "none"])
def test_every_estimator_trains_and_moves_the_model_unless_it_is_none(estimator: str, tmp_path: Path) -> None:
    settings = replace(TINY, estimator=estimator)
    before = task.make_model(settings).state_dict()["encoder.layers.0.attention.source.head.clusters"].clone()
    rows = task.train(tmp_path / "sbm.ckpt", settings)
    assert [row["step"] for row in rows] == [3, 6]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    after = torch.load(tmp_path / "sbm.ckpt", weights_only=True)["model"][
        "encoder.layers.0.attention.source.head.clusters"
    ]
    assert torch.equal(before, after) == (estimator == "none")


def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(TINY, **task.SPARSE)
    whole = task.train(tmp_path / "whole.ckpt", settings)
    original, count = task.step_loss, 0

    def doomed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(task, "step_loss", doomed)
    with pytest.raises(KeyboardInterrupt):
        task.train(tmp_path / "cut.ckpt", settings)
    monkeypatch.undo()
    resumed = task.train(tmp_path / "cut.ckpt", settings)
    assert [{**row, "seconds": 0} for row in resumed] == [{**row, "seconds": 0} for row in whole]
    states = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["model"] for name in ("whole", "cut")]
    assert all(torch.equal(one, two) for one, two in zip(states[0].values(), states[1].values(), strict=True))
    with pytest.raises(ValueError, match=r"to be of the settings of this run \(got other seed\)"):
        task.train(tmp_path / "cut.ckpt", replace(settings, seed=1))


@pytest.mark.slow
def test_the_recipe_writes_curves_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--steps", "4", "--output", str(tmp_path / "run")]
    task.main(words)
    curves = json.loads((tmp_path / "run" / "curves.json").read_text())
    assert {name: [row["step"] for row in rows] for name, rows in curves.items()} == {"full": [4], "sbm": [4]}
    assert curves["full"][-1]["density"] == 1
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000
    assert "sbm  step     4: loss" in capsys.readouterr().out
    task.main(words)
    assert json.loads((tmp_path / "run" / "curves.json").read_text()) == curves
    with pytest.raises(SystemExit):
        task.main([*words, "--seed", "1"])
    assert "(got other seed). Take another --output" in " ".join(capsys.readouterr().err.split())


def test_the_sparse_settings_are_those_of_the_study() -> None:
    assert replace(task.QUICK, **task.SPARSE) == replace(task.QUICK, **study.RUNS["local, long, assortative, 0.1"])


def given(folder: Path, *words: str) -> argparse.Namespace:
    places = ["--folder", str(folder / "tables"), "--work", str(folder / "work")]
    for name in ("tables", "work"):
        (folder / name).mkdir(exist_ok=True)
    return study.command.read([*words, *places])


def test_a_study_runs_what_is_missing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "QUICK", TINY)
    monkeypatch.setattr(study, "RUNS", {"full": {"attention": "full"}, "local": {}})
    study.run(given(tmp_path, "--seeds", "1"))
    study.run(given(tmp_path, "--seeds", "2"))
    table = (tmp_path / "tables" / "repeated_tokens.csv").read_text()
    rows = read(tmp_path / "tables" / "repeated_tokens.csv")
    found = [
        ("full", 0, 3), ("full", 0, 6), ("local", 0, 3), ("local", 0, 6), ("full", 1, 3), ("full", 1, 6), ("local", 1, 3),
        ("local", 1, 6),
    ]  # fmt: skip
    assert [(row["run"], row["seed"], row["step"]) for row in rows] == found
    assert table.partition("\n")[0] == (DOCS / "learning" / "repeated_tokens.csv").read_text().partition("\n")[0]
    study.run(given(tmp_path, "--seeds", "2"))
    assert (tmp_path / "tables" / "repeated_tokens.csv").read_text() == table
    assert "| full | 2 |" in study.report_tokens(rows)


def test_a_run_that_the_study_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.command.read(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_report_on_listops_pairs_seeds_with_full_attention() -> None:
    def test(method: str, seed: int, accuracy: float, density: float) -> dict[str, Any]:
        densities = {"density_layer0": density, "density_layer1": density}
        return {"method": method, "seed": seed, "test_accuracy": accuracy, **densities}

    rows = [test("full", 0, 0.74, math.nan), test("full", 1, 0.76, math.nan)]
    rows += [test("sbm", seed, accuracy, 0.2) for seed, accuracy in enumerate((0.75, 0.78, 0.1))]
    table = study.report_listops(rows)
    # Differences of 1 and 2 points: mean 1.5, standard error 0.5, and 12.706 is the 97.5 % point of Student's t with one degree of freedom.
    assert "| sbm | 2 | 76.50 (75.00 to 78.00) | +1.50 ± 6.35 | 20.0 (20.0 to 20.0) |" in table
    assert "| full | 2 | 75.00 (74.00 to 76.00) | +0.00 ± 0.00 |  |" in table


def test_enumeration_finds_the_score_function_unbiased_and_eq_9_no_better_than_a_coin() -> None:
    found = {row["estimator"]: row for row in gradient_errors(0.25, 1.0, chance=0.25, cases=40, keys=6)}
    assert found["score function"]["bias"] < 1e-9
    assert found["score function"]["signs"] == pytest.approx(1)
    assert 0.35 < found["paper"]["signs"] < 0.65
    assert found["local"]["signs"] > 0.9
    assert found["local"]["bias"] < found["mask"]["bias"]
    assert found["local"]["deviation"] < found["local, non-edges over their chance"]["deviation"]


# ------------------------------------------------------------------ the published numbers


def test_the_tables_of_the_page_follow_from_the_tidy_tables() -> None:
    """Every line that the report makes of the three studies stands on the page, and no line of their tables stands there without."""
    page = (DOCS / "learning_appendix.md").read_text().splitlines()
    tables = {name: read(DOCS / "learning" / f"{name}.csv") for name in ("gradients", "repeated_tokens", "listops")}
    made = [
        study.report_gradients(tables["gradients"]),
        study.report_tokens(tables["repeated_tokens"]),
        study.report_listops(tables["listops"]),
    ]
    lines = "\n\n".join(made).splitlines()
    assert len(lines) > 100
    assert [line for line in lines if line not in page] == []
    for head in (line for line in lines if line.startswith(("| p |", "| run |", "| method |"))):
        start = page.index(head)
        assert set(page[start : page.index("", start)]) <= set(lines)


def test_single_runs_and_the_hour_are_as_published() -> None:
    folder = DOCS / "learning"
    last = {row["run"]: row for row in read(folder / "repeated_tokens.csv") if row["seed"] == 0}
    assert (last["literal, full"]["step"], round(100 * last["literal, full"]["accuracy"], 2)) == (1300, 99.76)
    assert (round(100 * last["literal, local"]["accuracy"], 2), round(100 * last["literal, local"]["density"], 1)) == (
        99.19,
        98.0,
    )
    assert round(100 * last["256 tokens, local"]["accuracy"], 2) == 99.70
    assert round(100 * last["256 tokens, sparse, balance heuristic"]["density"], 1) == 11.1
    hour, times = (read(folder / f"{name}.csv") for name in ("listops_hour", "listops_hour_times"))
    tests = {row["run"]: round(100 * row["accuracy"], 2) for row in hour if row["split"] == "test"}
    assert tests == {"full": 37.45, "sbm": 37.4, "sbm, 0.5 above 2 %": 37.6, "linear": 38.15, "linformer": 37.8}
    step = {(row["run"], row["batch"]): row["step"] for row in times if row["round"] == 3}
    ratios = torch.tensor([step["full", batch] / step["sbm, 0.5 above 2 %", batch] for batch in range(1, 31)])
    assert [round(float(q), 2) for q in ratios.double().quantile(torch.tensor([0.25, 0.5, 0.75]).double())] == [
        1.21,
        1.34,
        1.59,
    ]


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    for table in (DOCS / "learning").glob("*.csv"):
        shutil.copy(table, tmp_path)
    study.draw(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in (DOCS / "learning").glob("*.png")}
