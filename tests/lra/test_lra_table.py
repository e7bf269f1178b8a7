"""Many runs of the trainer: that nothing runs twice, that stopped runs go on, and what the tables say."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import doctest
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from examples.lra import checkpoints, cost, report, table
from examples.lra.__main__ import main
from examples.lra.data import files, listops, readers
from examples.lra.data.tasks import open_data
from examples.lra.settings import Plan
from examples.lra.table import Run

TINY = [
    "--validate-every",
    "2",
    "--log-every",
    "1",
    "--batch-size",
    "8",
    "--num-blocks",
    "4",
    "--channels",
    "8",
    "--head-channels",
    "4",
]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def results(accuracy: float, density: float = 1.0, speed: float = 100.0) -> dict[str, Any]:
    """As the trainer writes them."""
    test = {"accuracy": accuracy, "interval_95": [0.0, 1.0], "loss": 1.0, "examples": 10, "majority": 0.2}
    densities = {name: [[density, density], [density, 0.0]] for name in ("first", "last", "tested")}
    known = {"test": test, "best": {"accuracy": 0.5, "step": 2}, "density": densities, "tokens_per_second": speed}
    return {
        **known,
        "seconds": 60.0,
        "peak_memory_bytes": 2**20,
        "peak_memory_of": "process",
        "parameters": 7,
        "device": "cpu",
    }


def record(method: str, seed: int, accuracy: float, task: str = "listops", **more: float) -> dict[str, Any]:
    attention = method.partition(":")[0]
    known = {"task": task, "method": method, "attention": attention, "seed": seed, "steps": 5}
    return {**known, "results": results(accuracy, **more)}


def test_doctests() -> None:
    for module in (cost, files, listops, readers, report):
        found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert found.failed == 0
        assert found.attempted > 0


@pytest.mark.slow
def test_two_methods_to_the_tables_and_no_run_twice(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "table",
        "--methods",
        "sbm:exploration=0.02",
        "linear",
        "--data",
        f"listops={data}",
        "--accelerator",
        "cpu",
        "--threads",
        "1",
    ]
    words += ["--steps", "4", "--output", str(tmp_path)]
    main([*words, "--", *TINY])
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
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
    settings = json.loads((tmp_path / "runs" / "listops-sbm+exploration=0.02-0" / "settings.json").read_text())[
        "settings"
    ]
    assert settings["exploration"] == 0.02

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    main([*words, "--", *TINY])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    with pytest.raises(SystemExit):
        main([*words, "--", *TINY, "--learning-rate", "0.5"])
    assert "to have learning-rate = 0.002, as it was started with (got 0.5)" in capsys.readouterr().err
    (tmp_path / "report.md").unlink()
    main(["table", "--report", "--output", str(tmp_path)])
    assert (tmp_path / "report.md").read_text() == text


FINGERPRINT = "of all data"
TRAINER = """
import fcntl, json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
if "--resume" not in sys.argv:
    folder.mkdir(parents=True)
    plan = json.loads(pathlib.Path(WANTED).read_text())
    plan["settings"]["seed"] = int(sys.argv[sys.argv.index("--seed") + 1])
    (folder / "settings.json").write_text(json.dumps(plan))
    if plan["settings"]["seed"] == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        lock = (folder / ".lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "asleep.partial").write_text(str(os.getpid()))
        (folder / "asleep.partial").rename(folder / "asleep")
        time.sleep(60)
    if plan["settings"]["seed"] == 2:
        sys.exit(1)
(folder / "arguments.json").write_text(json.dumps(sys.argv))
(folder / "results.json").write_text(json.dumps(RESULTS))
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that finishes at once, but sleeps with seed 1 and fails with seed 2, until it is resumed."""
    wanted = tmp_path / "wanted.json"
    dataclasses.replace(Run.of("listops", "sbm", 0, ["--preset", "laptop"]).plan, fingerprint=FINGERPRINT).write(wanted)
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.replace("WANTED", repr(str(wanted))).replace("RESULTS", repr(results(0.3))))
    monkeypatch.setattr(table, "DOOR", script)
    monkeypatch.setattr(table, "open_data", lambda plan: ({}, FINGERPRINT))


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_goes_on_and_the_signal_is_the_status(
    number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = ["table", "--methods", "sbm", "--seeds", "0", "1", "--output", str(tmp_path / "all")]
    before = signal.signal(number, signal.SIG_DFL)  # below nohup, tests would ignore it, and so would the program
    request.addfinalizer(lambda: signal.signal(number, before))
    handler = signal.getsignal(number)

    def stop() -> None:
        while not (tmp_path / "all" / "runs" / "listops-sbm-1" / "asleep").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as status:
        main(words)
    thread.join()
    assert status.value.code == 128 + number
    assert signal.getsignal(number) is handler
    assert not (tmp_path / "all" / "report.md").exists()
    main([*words, "--", "--workers", "2"])
    again = json.loads((tmp_path / "all" / "runs" / "listops-sbm-1" / "arguments.json").read_text())
    assert "--resume" in again
    assert again[again.index("--workers") + 1] == "2"  # what is not a setting is not in the folder of the run
    assert (tmp_path / "all" / "report.md").read_text().startswith("# Long Range Arena\n\n2 runs")


def test_a_closed_terminal_is_ignored_below_nohup(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with table.Runner(tmp_path) as runner:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == runner.stop


@pytest.mark.slow
@pytest.mark.usefixtures("trainer")
def test_a_killed_call_leaves_a_trainer_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["table", "--methods", "sbm", "--seeds", "1", "--output", str(folder)]
    program = "import sys; from examples.lra import table; from examples.lra.__main__ import main; table.DOOR = sys.argv[1]; main(sys.argv[2:])"
    asleep = folder / "runs" / "listops-sbm-1" / "asleep"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", program, str(table.DOOR), *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process,
    ):
        try:
            while process.poll() is None and not asleep.exists():
                time.sleep(0.05)
            with pytest.raises(SystemExit):
                main(words)
            assert (
                f"a folder in which no other process is at work (got {folder}). Wait for it" in capsys.readouterr().err
            )
        finally:
            process.kill()
    with pytest.raises(SystemExit):
        main(words)
    assert (
        f"in which no other process is at work (got {asleep.parent}). Wait for it or stop it" in capsys.readouterr().err
    )
    os.kill(int(asleep.read_text()), signal.SIGKILL)
    main(words)
    assert "| sbm | 800 in 1.0 |" in (folder / "report.md").read_text()


def test_below_nohup_the_terminal_may_be_closed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with table.Runner(tmp_path):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("trainer")
def test_a_run_that_another_process_began_meanwhile_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, held = tmp_path / "all" / "runs" / "listops-sbm-0", contextlib.ExitStack()

    class Popen:
        def __init__(self, *_: Any, **__: Any) -> None:
            folder.mkdir(parents=True)
            held.enter_context(checkpoints.hold(folder))

        def wait(self, timeout: float) -> int:
            return 2

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with held, pytest.raises(SystemExit, match="2"):
        main(["table", "--methods", "sbm", "--seeds", "0", "3", "--output", str(tmp_path / "all")])
    assert f"in which no other process is at work (got {folder})" in capsys.readouterr().err


@pytest.mark.usefixtures("trainer")
def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["table", "--methods", "sbm", "--seeds", "2", "0", "--output", str(tmp_path / "all")]
    with pytest.raises(SystemExit, match="1"):
        main(words)
    assert "listops-sbm-2 failed; see" in capsys.readouterr().err
    assert "1 runs" in (tmp_path / "all" / "report.md").read_text()


@pytest.mark.usefixtures("trainer")
def test_runs_that_are_averaged_have_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["table", "--methods", "sbm", "--output", str(folder), "--seeds"]
    main([*words, "0", "3"])
    for more, difference in (
        (["--", "--channels", "16"], "channels = 64, as listops-sbm-0 with which it is averaged (got 16)"),
        (["--steps", "6"], "steps = 800, as listops-sbm-0 with which it is averaged (got 6)"),
        (["--minutes", "5"], "minutes = None, as listops-sbm-0 with which it is averaged (got 5.0)"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "4", *more])
        assert (
            f"Expected listops-sbm-4 to have {difference}. Give the same arguments as then, or"
            in capsys.readouterr().err
        )
        assert not (folder / "runs" / "listops-sbm-4").exists()

    path = folder / "runs" / "listops-sbm-3" / "settings.json"
    plan = Plan.read(path)
    dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, steps=600)).write(path)
    with pytest.raises(SystemExit):
        main(["table", "--report", "--output", str(folder)])
    assert "to have the same steps, 800 as listops-sbm-0 (got 600 in listops-sbm-3)" in capsys.readouterr().err
    for seed, steps in ((0, 800), (3, 600)):  # that were planned from a time
        planned = dataclasses.replace(
            plan, minutes=7.5, settings=dataclasses.replace(plan.settings, seed=seed, steps=steps)
        )
        planned.write(folder / "runs" / f"listops-sbm-{seed}" / "settings.json")
    main(["table", "--report", "--output", str(folder)])
    assert (
        "2 runs, at most 2 of a kind. Budget: 7.5 minutes of training and validation, planned in"
        in capsys.readouterr().out
    )
    main([*words, "0", "3", "--minutes", "7.5"])  # whatever steps they have
    assert "2 runs" in capsys.readouterr().out


@pytest.mark.usefixtures("trainer")
def test_the_budget_in_the_report_is_that_of_its_runs(tmp_path: Path) -> None:
    def line() -> str:
        return (tmp_path / "all" / "report.md").read_text().splitlines()[2]

    words = ["table", "--output", str(tmp_path / "all"), "--methods"]
    main([*words, "sbm"])
    assert line() == "1 runs, at most 1 of a kind. Budget: 800 steps; preset `laptop`."
    plan = json.loads((tmp_path / "wanted.json").read_text())
    plan["settings"] |= {"attention": "linear", "steps": 600, "channels": 32, "heads": 4}
    (tmp_path / "wanted.json").write_text(json.dumps(plan))
    main([*words, "linear", "--steps", "600", "--", "--channels", "32", "--heads", "4"])
    assert line() == "2 runs, at most 1 of a kind. Budget: 600 steps or 800 steps; preset `laptop`."
    path = tmp_path / "all" / "runs" / "listops-sbm-0" / "settings.json"
    plan = json.loads(path.read_text())
    plan["settings"] |= {"channels": 32, "heads": 1}
    path.write_text(json.dumps(plan))
    main(["table", "--report", "--output", str(tmp_path / "all")])
    assert line() == "2 runs, at most 1 of a kind. Budget: 600 steps or 800 steps; preset `laptop`, --channels 32."


@pytest.mark.usefixtures("trainer")
def test_data_are_what_their_fingerprint_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the folder is called, and wherever the program is called."""
    for folder in ("here", "there"):
        shutil.copytree(data, tmp_path / folder / "lo")
    monkeypatch.setattr(table, "open_data", open_data)
    monkeypatch.chdir(tmp_path / "here")
    words = ["table", "--methods", "sbm", "--output", str(tmp_path / "all"), "--data", "listops=lo", "--seeds"]
    wanted = Run.of("listops", "sbm", 0, ["--preset", "laptop"], Path("lo")).plan
    first = open_data(wanted)[1]
    dataclasses.replace(wanted, fingerprint=first).write(tmp_path / "wanted.json")
    main([*words, "0"])
    monkeypatch.chdir(tmp_path / "there")
    main([*words, "0", "3"])

    train = tmp_path / "there" / "lo" / "basic_train.tsv"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[:-1]))
    other = open_data(dataclasses.replace(wanted, directory=str(tmp_path / "there")))[1]
    for seed, told in ((0, "as it was started with"), (4, "as listops-sbm-0 with which it is averaged")):
        with pytest.raises(SystemExit):
            main([*words, str(seed)])
        assert (
            f"listops-sbm-{seed} to have fingerprint of the data = {first!r}, {told} (got {other!r})"
            in capsys.readouterr().err
        )
    path = tmp_path / "all" / "runs" / "listops-sbm-3" / "settings.json"
    path.write_text(path.read_text().replace(first, other))
    with pytest.raises(SystemExit):
        main(["table", "--report", "--output", str(tmp_path / "all")])
    assert (
        f"to have the same fingerprint of the data, {first!r} as listops-sbm-0 (got {other!r} in"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("name", ["runs/listops-sbm-0/results.json", "runs/listops-sbm-0/settings.json"])
def test_files_that_were_cut_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["table", "--methods", "sbm", "--output", str(folder)]
    main(words)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    for again in (words, ["table", "--report", "--output", str(folder)]):
        with pytest.raises(SystemExit):
            main(again)
        message = (
            "to be as it was written (got: "
            if name.endswith("settings.json")
            else "to be whole JSON with test, best, density (got "
        )
        assert f"Expected {folder / name} {message}" in capsys.readouterr().err
    if not name.endswith("settings.json"):  # the way out that is named
        (folder / name).unlink()
        main(words)


@pytest.mark.usefixtures("trainer")
def test_minutes_are_given_to_the_trainer_which_plans_the_steps(tmp_path: Path) -> None:
    wanted = Plan.read(tmp_path / "wanted.json")
    dataclasses.replace(wanted, minutes=5.0).write(tmp_path / "wanted.json")
    main(
        [
            "table",
            "--methods",
            "sbm",
            "--minutes",
            "5",
            "--output",
            str(tmp_path / "all"),
            "--accelerator",
            "cpu",
            "--threads",
            "1",
        ]
    )
    given = json.loads((tmp_path / "all" / "runs" / "listops-sbm-0" / "arguments.json").read_text())
    assert given[given.index("--minutes") + 1] == "5.0"
    assert given[given.index("--threads") + 1] == "1"
    assert "--steps" not in given


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_folder(below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "afile"
    file.touch()
    for words in (["table"], ["table", "--report"], ["cost"]):
        with pytest.raises(SystemExit):
            main([*words, "--output", str(file / below)])
        assert (
            f"Expected 'output' to be a folder that can be made (got {file / below}, but {file} is a file)"
            in capsys.readouterr().err
        )


@pytest.mark.usefixtures("trainer")
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "all"
    words = ["table", "--methods", "sbm", "--output", str(folder)]
    main(words)
    write_text = Path.write_text

    def refuse(path: Path, *args: Any) -> int:
        if path.parent == folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return write_text(path, *args)

    told = f"to be a folder that can be written (got 'Read-only file system' for {folder})"
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(SystemExit):
        main(["table", "--report", "--output", str(folder)])
    assert told in capsys.readouterr().err

    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(SystemExit):
        main([*words, "--seeds", "3"])
    assert told in capsys.readouterr().err
    monkeypatch.undo()
    assert not (folder / "runs" / "listops-sbm-3").exists()
    if Path("/proc/self").exists():  # where nobody can make a folder
        with pytest.raises(SystemExit):
            main(["table", "--methods", "sbm", "--output", "/proc/sbm/all"])
        assert "Expected 'output' to be a folder that can be written (got " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "sbm", "sbm"], "Expected 'tasks', 'methods' and 'seeds' to be distinct"),
        (["--methods", "sbm:window"], "Expected 'methods' to be names like sbm or sbm:density-weight=0.1"),
        (["--methods", "sbn"], "invalid choice: 'sbn'"),
        (["--data", "listops"], "expected TASK=DIR"),
        (["--minutes", "0"], "Expected 'minutes' to be positive and finite (got 0.0)"),
        (["--minutes", "inf"], "Expected 'minutes' to be positive and finite (got inf)"),
        (["--report"], "Expected 'output' to hold finished runs"),
        (["--report", "--", "--seed", "1"], "Expected nothing after '--'"),
        (["--", "--seed", "5"], "Expected no 'seed' in the arguments after '--' (got 5). Name it with --seeds."),
        (["--", "--seed=5"], "Expected no 'seed' in the arguments after '--' (got 5)"),
        (["--", "--see", "5"], "Expected no 'seed' in the arguments after '--' (got 5)"),
        (["--", "--task", "listops"], "Expected no 'task' in the arguments"),
        (["--", "--attention", "full"], "Expected no 'attention' in the arguments"),
        (["--", "--outp", "zzz"], "Expected no 'output' in the arguments after '--' (got zzz)"),
        (["--", "--resume"], "Expected no 'resume' in the arguments"),
        (["--", "--resume-from", "last"], "Expected no 'resume-from' in the arguments"),
        (["--", "--data=zzz"], "(got zzz). Give --data TASK=DIR."),
        (["--", "--minutes", "2"], "Expected no 'minutes' in the arguments after '--' (got 2.0). Give it once"),
        (["--minutes", "1", "--", "--steps", "2"], "Expected no 'steps' in the arguments after '--' (got 2)."),
        (["--minutes", "1", "--steps", "2"], "Expected no 'steps' beside 'minutes' (got 2). Steps are planned"),
        (
            ["--steps", "2", "--", "--step", "6"],
            "Expected no 'steps' in the arguments after '--' (got 6). Give it once, before '--'.",
        ),
        (
            ["--threads", "1", "--", "--threads", "2"],
            "Expected no 'threads' in the arguments after '--' (got 2). Give it once",
        ),
        (["--methods", "sbm:seed=5"], "Expected no 'seed' in the settings of 'sbm:seed=5' (got 5)"),
    ],
)
def test_errors(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["table", "--output", str(tmp_path / "all"), *words])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_tables_have_means_deviations_and_relative_costs(tmp_path: Path) -> None:
    runs = [
        record("sbm", 0, 0.30, density=0.2, speed=300.0),
        record("sbm", 1, 0.40, density=0.4, speed=100.0),
        record("full", 0, 0.5),
    ]
    runs += [record("full", 0, 0.6, task="text")]
    sbm, full, text = table.cell_rows(runs)
    assert (sbm["accuracy"], sbm["runs"], sbm["published_accuracy"]) == (pytest.approx(35), 2, 37.45)
    assert sbm["accuracy_deviation"] == pytest.approx(50**0.5)
    assert (sbm["tokens_per_second_relative_to_full"], full["tokens_per_second_relative_to_full"]) == (2, 1)
    assert (sbm["density_layer0"], sbm["density_layer1"]) == (pytest.approx(30), pytest.approx(15))
    assert (text["task"], text["published_accuracy"], text["accuracy_deviation"]) == ("text", 64.93, "")
    assert "density_layer0" not in full
    words = table.report(runs, "Budget: none.")
    for line in (
        "| sbm | 35.00 ± 7.07 | – | – |",
        "| full | 50.00 | 60.00 | 55.00 |",
        "| majority class | 20.00 | 20.00 |  |",
        "| full, published | 37.22 ± 0.52 | 64.93 ± 0.46 | 51.08 |",
        "| sbm | 30.00 / 15.00 | – |",
        "| sbm | 200 (2.00) | – |",
    ):
        assert line in words
    assert table.plot_densities(tmp_path / "density.png", runs)
    assert (tmp_path / "density.png").read_bytes().startswith(b"\x89PNG")
    assert not table.plot_densities(tmp_path / "none.png", runs[2:])


def test_published_averages_are_those_of_the_paper() -> None:
    averages = {
        "full": 59.27,
        "linear": 59.31,
        "reformer": 55.76,
        "performer": 54.57,
        "linformer": 55.99,
        "nystromformer": 59.41,
        "sbm": 59.93,
    }
    for method, average in averages.items():
        assert sum(mean for mean, _ in table.PUBLISHED[method]) / 5 == pytest.approx(average, abs=0.006)
