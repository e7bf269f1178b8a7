"""Many runs of the trainer: that nothing runs twice, that stopped runs go on, and what the tables say."""

import argparse
import csv
import dataclasses
import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.common import attention, command, hybrid, pictures, releases
from examples.common.runs import write_record
from examples.lra import cost, settings, table
from examples.lra.__main__ import main
from examples.lra.data import listops, readers
from examples.lra.settings import Plan, parse, resolve

TINY = [
    "--validate-every", "2", "--log-every", "1", "--batch-size", "8", "--num-clusters", "4", "--channels", "8",
    "--head-channels", "4",
]  # fmt: skip

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def results(accuracy: float, density: float = 1.0, speed: float = 100.0) -> dict[str, Any]:
    """As the trainer writes them."""
    test = {"accuracy": accuracy, "interval_95": [0.0, 1.0], "loss": 1.0, "examples": 10, "majority": 0.2}
    densities = {name: [[density, density], [density, 0.0]] for name in ("first", "last", "tested")}
    known = {"test": test, "best": {"accuracy": 0.5, "step": 2}, "density": densities, "tokens_per_second": speed}
    memory = {"peak_memory_bytes": 2**20, "peak_memory_of": "process"}
    return {**known, **memory, "seconds": 60.0, "parameters": 7, "device": "cpu"}


def plan(*words: str) -> Plan:
    return resolve(parse(["--preset", "laptop", *words]))[1]


def record(method: str, seed: int, accuracy: float, task: str = "listops", **more: float) -> dict[str, Any]:
    known = {"name": f"{task}-{method}-{seed}", "task": task, "method": method, "seed": seed}
    return {**known, "plan": plan("--task", task, "--steps", "5"), "results": results(accuracy, **more)}


def test_doctests() -> None:
    for module in (attention, command, cost, hybrid, listops, pictures, readers, releases, settings):
        found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert found.failed == 0
        assert found.attempted > 0


@pytest.mark.slow
def test_two_methods_to_the_tables_and_no_run_twice(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"table --methods sbm:exploration=0.02 linear --data listops={data} --accelerator cpu --threads 1 --steps 4"
    command = [*words.split(), "--output", str(tmp_path), "--", *TINY]
    main(command)
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.strip().endswith(text.strip())
    for line in (
        "| linear, published | 37.46 ± 0.57 |",
        "Budget: 4 steps; preset `laptop`",
        "| sbm:exploration=0.02 | ",
    ):
        assert line in text
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["steps"]) for row in rows] == [("linear", "4"), ("sbm:exploration=0.02", "4")]
    assert float(rows[1]["density_layer0"]) < 1
    assert rows[0]["density_layer0"] == ""
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert Plan.read(tmp_path / "runs/listops-sbm+exploration=0.02-0/settings.json").settings.exploration == 0.02

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    main(command)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    with pytest.raises(SystemExit):
        main([*command, "--learning-rate", "0.5"])
    assert "Expected 'learning-rate' to be 0.002 as in the run to resume (got 0.5)" in capsys.readouterr().err
    (tmp_path / "report.md").unlink()
    main(["table", "--report", "--output", str(tmp_path)])
    assert (tmp_path / "report.md").read_text() == text


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Calls `table` with a trainer that finishes at once, but is stopped with seed 1 and fails with seed 2, until it is resumed."""

    def run(given: argparse.Namespace) -> None:
        folder, plan = resolve(given)
        if "resume" not in given:
            folder.mkdir(parents=True)
            plan.write(folder / "settings.json")
            if plan.settings.seed in (1, 2):
                raise SystemExit({1: 143, 2: "It has diverged."}[plan.settings.seed])
        (folder / "given.json").write_text(json.dumps(vars(given), default=str))
        write_record(folder / "results.json", results(0.3))

    monkeypatch.setattr(table.trainer, "run", run)

    def call(words: str) -> Path:
        main(["table", "--output", str(tmp_path / "all"), *words.split()])
        return tmp_path / "all"

    return call


def test_a_stopped_run_goes_on_and_the_signal_is_the_status(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        make("--methods sbm --seeds 0 1 3")
    assert status.value.code == 143
    assert "Go on with the same command" in capsys.readouterr().err
    assert not (tmp_path / "all" / "report.md").exists()
    make("--methods sbm --seeds 0 1")
    assert "resume" in json.loads((tmp_path / "all" / "runs" / "listops-sbm-1" / "given.json").read_text())
    assert (tmp_path / "all" / "report.md").read_text().startswith("# Long Range Arena\n\n2 runs")


def test_a_failed_run_does_not_stop_the_others(make: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="These runs failed: listops-sbm-2"):
        make("--methods sbm --seeds 2 0")
    assert "1 runs" in (tmp_path / "all" / "report.md").read_text()
    make("--methods sbm --seeds 2 0")  # tries it again
    assert "2 runs" in (tmp_path / "all" / "report.md").read_text()


def test_runs_that_are_averaged_have_the_same_settings(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("--methods sbm --seeds 0 3")
    for more, found in (
        ("-- --channels 16", "channels = 64 as listops-sbm-0, with which it is averaged (got 16)"),
        ("--steps 6", "steps = 800 as listops-sbm-0, with which it is averaged (got 6)"),
        ("--minutes 5", "minutes = None as listops-sbm-0, with which it is averaged (got 5.0)"),
    ):
        with pytest.raises(SystemExit):
            make(f"--methods sbm --seeds 4 {more}")
        assert f"Expected listops-sbm-4 to have {found}. Give the same arguments" in capsys.readouterr().err
        assert not (folder / "runs" / "listops-sbm-4").exists()

    def rewrite(seed: int, steps: int, **changes: Any) -> None:
        path = folder / "runs" / f"listops-sbm-{seed}" / "settings.json"
        old = Plan.read(path)
        dataclasses.replace(old, settings=dataclasses.replace(old.settings, steps=steps), **changes).write(path)

    rewrite(0, 800, fingerprint="of the data")
    rewrite(3, 800, fingerprint="of others")
    with pytest.raises(SystemExit):
        make("--report")
    assert "listops-sbm-3 to have data = 'of the data' as listops-sbm-0" in capsys.readouterr().err
    rewrite(0, 800, minutes=7.5)  # from which steps were planned
    rewrite(3, 600, minutes=7.5, fingerprint="of the data")
    make("--report")
    assert "2 runs, at most 2 of a kind. Budget: 7.5 minutes of training and validation" in capsys.readouterr().out
    make("--methods sbm --seeds 0 3 --minutes 7.5")  # whatever steps they have
    assert "2 runs" in capsys.readouterr().out


def test_the_budget_and_threads_are_given_to_the_trainer(make: Callable[..., Path]) -> None:
    folder = make("--methods sbm --minutes 5 --accelerator cpu --threads 1")
    given = json.loads((folder / "runs" / "listops-sbm-0" / "given.json").read_text())
    assert (given["minutes"], given["threads"], given["accelerator"]) == (5.0, 1, "cpu")
    assert "steps" not in given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods sbm:window", "Expected 'methods' to be names like sbm or sbm:density-weight=0.1"),
        ("--methods sbn", "Expected 'methods' among full, dcmm, linear"),
        ("--data listops", "expected TASK=DIR"),
        ("--minutes 0", "Expected 'minutes' to be positive and finite, without 'steps' (got 0.0)"),
        ("--minutes 1 --steps 2", "Expected 'minutes' to be positive and finite, without 'steps' (got 1.0)"),
        ("--report", "Expected 'output' to hold finished runs"),
        ("-- --seed 5", "Expected no 'seed' in the arguments after '--'"),
        ("-- --see 5", "Expected no 'seed' in the arguments after '--'"),
        ("--seeds 0 1 --methods sbm:seed=4", "Expected no 'seed' in the settings of 'sbm:seed=4' (got 4)"),
        ("--methods full sbm:output=elsewhere", "Expected no 'output' in the settings of 'sbm:output=elsewhere'"),
        ("-- --attention full", "Expected no 'attention' in the arguments after '--'"),
        ("-- --resume", "Expected no 'resume' in the arguments after '--'"),
        ("--steps 2 -- --step 6", "Expected no 'steps' in the arguments after '--'"),
        ("--threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    ],
)
def test_errors(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["table", "--output", str(tmp_path / "all"), *words.split()])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_tables_have_means_deviations_and_relative_costs() -> None:
    runs = [record("sbm", 0, 0.30, density=0.2, speed=300.0), record("sbm", 1, 0.40, density=0.4, speed=100.0)]
    runs += [record("full", 0, 0.5), record("full", 0, 0.6, task="text")]
    sbm, full, text = table.cell_rows(runs)
    assert (sbm["accuracy"], sbm["runs"], sbm["published_accuracy"]) == (pytest.approx(35), 2, 37.45)
    assert sbm["accuracy_deviation"] == pytest.approx(50**0.5)
    assert (sbm["tokens_per_second_relative_to_full"], full["tokens_per_second_relative_to_full"]) == (2, 1)
    assert (sbm["density_layer0"], sbm["density_layer1"]) == (pytest.approx(30), pytest.approx(15))
    assert (text["task"], text["published_accuracy"], text["accuracy_deviation"]) == ("text", 64.93, "")
    assert "density_layer0" not in full
    words = table.report(runs)
    for line in (
        "| sbm | 35.00 ± 7.07 | – | – |",
        "| full | 50.00 | 60.00 | 55.00 |",
        "| majority class | 20.00 | 20.00 |  |",
        "| full, published | 37.22 ± 0.52 | 64.93 ± 0.46 | 51.08 |",
        "| sbm | 30.00 / 15.00 | – |",
        "| sbm | 200 (2.00) | – |",
    ):
        assert line in words


def test_published_averages_are_those_of_the_paper() -> None:
    sums = {method: sum(mean for mean, _ in numbers) for method, numbers in table.PUBLISHED.items()}
    averages = {"full": 59.27, "linear": 59.31, "reformer": 55.76, "performer": 54.57}
    averages |= {"linformer": 55.99, "nystromformer": 59.41, "sbm": 59.93}
    assert {method: total / 5 for method, total in sums.items()} == pytest.approx(averages, abs=0.006)
