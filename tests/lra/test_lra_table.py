"""Many runs of the trainer: that nothing runs twice, that stopped runs go on, and what the tables say. And what runs cost."""

from __future__ import annotations

import contextlib
import csv
import doctest
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cost_lra
import lra_checkpoints
import lra_tables as tables
import pytest
import reproduce_lra
import torch
from lra_tasks import TASKS, Settings, splits_digest

import lra

TINY = ["--validate-every", "2", "--log-every", "1", "--batch-size", "8", "--num-blocks", "4", "--channels", "8", "--head-channels", "4"]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def results(accuracy: float, density: float = 1.0, speed: float = 100.0) -> dict[str, Any]:
    """As the trainer writes them."""
    test = {"accuracy": accuracy, "interval_95": [0.0, 1.0], "loss": 1.0, "examples": 10, "majority": 0.2}
    densities = {name: [[density, density], [density, 0.0]] for name in ("first", "last", "tested")}
    known = {"test": test, "best": {"accuracy": 0.5, "step": 2}, "density": densities, "tokens_per_second": speed}
    return {**known, "peak_memory_bytes": 2**20, "peak_memory_of": "process", "parameters": 7, "device": "cpu"}


def record(method: str, seed: int, accuracy: float, task: str = "listops", **more: float) -> dict[str, Any]:
    attention = method.partition(":")[0]
    known = {"task": task, "method": method, "attention": attention, "seed": seed, "steps": 5, "seconds": 60.0}
    return {**known, "results": results(accuracy, **more)}


def test_doctests() -> None:
    for module in (reproduce_lra, tables):
        assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.slow
def test_two_methods_to_the_tables_and_no_run_twice(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--methods", "sbm:exploration=0.02", "linear", "--data", f"listops={data}", "--accelerator", "cpu", "--threads", "1"]
    words += ["--steps", "4", "--output", str(tmp_path)]
    reproduce_lra.main([*words, "--", *TINY])
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    for line in ("| linear, published | 37.46 ± 0.57 |", "Budget: 4 steps; preset `laptop`", "| sbm:exploration=0.02 | "):
        assert line in text
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["steps"]) for row in rows] == [("sbm:exploration=0.02", "4"), ("linear", "4")]
    assert float(rows[0]["density_layer0"]) < 1
    assert rows[1]["density_layer0"] == ""
    settings = json.loads((tmp_path / "runs" / "listops-sbm_exploration=0.02-0" / "settings.json").read_text())["settings"]
    assert settings["exploration"] == 0.02

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    index = (tmp_path / "index.json").read_text()
    reproduce_lra.main([*words, "--", *TINY])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    assert (tmp_path / "index.json").read_text() == index
    with pytest.raises(SystemExit):
        reproduce_lra.main([*words, "--", *TINY, "--learning-rate", "0.5"])
    assert "to have learning-rate = 0.002, as it was started with (got 0.5)" in capsys.readouterr().err
    (tmp_path / "report.md").unlink()
    reproduce_lra.main(["report", "--output", str(tmp_path)])
    assert (tmp_path / "report.md").read_text() == text


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
    wanted.write_text(json.dumps(reproduce_lra.Plan("listops", "sbm", 0, ["--preset", "laptop"], None).settle()))
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.replace("WANTED", repr(str(wanted))).replace("RESULTS", repr(results(0.3))))
    monkeypatch.setattr(lra, "__file__", str(script))


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_goes_on_and_the_signal_is_the_status(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words = ["run", "--methods", "sbm", "--seeds", "0", "1", "--output", str(tmp_path / "all")]
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
        reproduce_lra.main(words)
    thread.join()
    assert status.value.code == 128 + number
    assert signal.getsignal(number) is handler
    assert not (tmp_path / "all" / "report.md").exists()
    reproduce_lra.main([*words, "--", "--workers", "2"])
    again = json.loads((tmp_path / "all" / "runs" / "listops-sbm-1" / "arguments.json").read_text())
    assert "--resume" in again
    assert again[again.index("--workers") + 1] == "2"  # what is not a setting is not in the folder of the run
    assert (tmp_path / "all" / "report.md").read_text().startswith("# Long Range Arena\n\n2 runs")
    assert json.loads((tmp_path / "all" / "index.json").read_text())["runs"]["listops-sbm-1"]["seconds"] > 0


def test_a_closed_terminal_is_ignored_below_nohup(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with reproduce_lra.Runner(reproduce_lra.Index(tmp_path)) as runner:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == runner.stop


@pytest.mark.slow
@pytest.mark.usefixtures("trainer")
def test_a_killed_call_leaves_a_trainer_at_work_and_no_wrong_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--seeds", "1", "--output", str(folder)]
    program = "import sys, lra, reproduce_lra; lra.__file__ = sys.argv[1]; reproduce_lra.main(sys.argv[2:])"
    asleep = folder / "runs" / "listops-sbm-1" / "asleep"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", program, lra.__file__, *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process,
    ):
        try:
            while process.poll() is None and not asleep.exists():
                time.sleep(0.05)
            index = (folder / "index.json").read_text()
            with pytest.raises(SystemExit):
                reproduce_lra.main(words)
            assert f"a folder in which no other `run` is at work (got {folder}). Wait for it" in capsys.readouterr().err
        finally:
            process.kill()
    with pytest.raises(SystemExit):
        reproduce_lra.main(words)
    assert f"(got {asleep.parent}, in which a process is still training). Wait for it or stop it." in capsys.readouterr().err
    assert (folder / "index.json").read_text() == index
    os.kill(int(asleep.read_text()), signal.SIGKILL)
    reproduce_lra.main(words)
    assert "| sbm | 800 in – |" in (folder / "report.md").read_text()
    with (folder / "runs.csv").open() as file:
        assert [row["wall_seconds"] for row in csv.DictReader(file)] == [""]


def test_below_nohup_the_terminal_may_be_closed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with reproduce_lra.Runner(reproduce_lra.Index(tmp_path)):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("trainer")
def test_a_run_that_another_process_began_meanwhile_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, held = tmp_path / "all" / "runs" / "listops-sbm-0", contextlib.ExitStack()

    def call(*words: Any) -> int:
        folder.mkdir(parents=True)
        held.enter_context(lra_checkpoints.hold(folder))
        return 2

    monkeypatch.setattr(reproduce_lra.Runner, "call", call)
    with held, pytest.raises(SystemExit, match="2"):
        reproduce_lra.main(["run", "--methods", "sbm", "--seeds", "0", "3", "--output", str(tmp_path / "all")])
    assert f"(got {folder}, in which a process is still training)" in capsys.readouterr().err


@pytest.mark.usefixtures("trainer")
def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--methods", "sbm", "--seeds", "2", "0", "--output", str(tmp_path / "all")]
    with pytest.raises(SystemExit, match="1"):
        reproduce_lra.main(words)
    assert "listops-sbm-2 failed; see" in capsys.readouterr().err
    assert "1 runs" in (tmp_path / "all" / "report.md").read_text()


@pytest.mark.usefixtures("trainer")
def test_runs_that_are_averaged_have_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--output", str(folder), "--seeds"]
    reproduce_lra.main([*words, "0", "3"])
    for more, difference in (
        (["--", "--channels", "16"], "channels = 64, as listops-sbm-0 with which it is averaged (got 16)"),
        (["--steps", "6"], "steps = 800, as listops-sbm-0 with which it is averaged (got 6)"),
        (["--minutes", "5"], "minutes = None, as listops-sbm-0 with which it is averaged (got 5.0)"),
    ):
        with pytest.raises(SystemExit):
            reproduce_lra.main([*words, "4", *more])
        assert f"Expected listops-sbm-4 to have {difference}. Give the same arguments as then, or" in capsys.readouterr().err
        assert not (folder / "runs" / "listops-sbm-4").exists()

    path = folder / "runs" / "listops-sbm-3" / "settings.json"
    plan = json.loads(path.read_text())
    plan["settings"]["steps"] = 600
    path.write_text(json.dumps(plan))
    index = json.loads((folder / "index.json").read_text())
    with pytest.raises(SystemExit):
        reproduce_lra.main(["report", "--output", str(folder)])
    assert "to have the same steps, 800 as listops-sbm-0 (got 600 in listops-sbm-3)" in capsys.readouterr().err
    for run in index["runs"].values():  # that were planned from a time, as the index of older ones says in words
        del run["minutes"]
    (folder / "index.json").write_text(json.dumps({**index, "budget": "Budget: 7.5 minutes of training"}))
    reproduce_lra.main(["report", "--output", str(folder)])
    assert "2 runs, at most 2 of a kind. Budget: 7.5 minutes of training and validation, planned in" in capsys.readouterr().out


@pytest.mark.usefixtures("trainer")
def test_the_budget_in_the_report_is_that_of_its_runs(tmp_path: Path) -> None:
    def line() -> str:
        return (tmp_path / "all" / "report.md").read_text().splitlines()[2]

    words = ["run", "--output", str(tmp_path / "all"), "--methods"]
    reproduce_lra.main([*words, "sbm"])
    assert line() == "1 runs, at most 1 of a kind. Budget: 800 steps; preset `laptop`."
    plan = json.loads((tmp_path / "wanted.json").read_text())
    plan["settings"] |= {"attention": "linear", "steps": 600, "channels": 32, "heads": 4}
    (tmp_path / "wanted.json").write_text(json.dumps(plan))
    reproduce_lra.main([*words, "linear", "--steps", "600", "--", "--channels", "32", "--heads", "4"])
    assert line() == "2 runs, at most 1 of a kind. Budget: 800 steps or 600 steps; preset `laptop`."
    path = tmp_path / "all" / "runs" / "listops-sbm-0" / "settings.json"
    plan = json.loads(path.read_text())
    plan["settings"] |= {"channels": 32, "heads": 1}
    path.write_text(json.dumps(plan))
    reproduce_lra.main(["report", "--output", str(tmp_path / "all")])
    assert line() == "2 runs, at most 1 of a kind. Budget: 800 steps or 600 steps; preset `laptop`, --channels 32."


@pytest.mark.usefixtures("trainer")
def test_a_setting_that_an_older_program_did_not_have_is_at_its_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--output", str(folder), "--seeds"]
    reproduce_lra.main([*words, "0", "3"])
    plans = {seed: json.loads((folder / "runs" / f"listops-sbm-{seed}" / "settings.json").read_text()) for seed in (0, 3)}
    del plans[0]["settings"]["test_graphs"]
    (folder / "runs" / "listops-sbm-0" / "settings.json").write_text(json.dumps(plans[0]))
    for seed, told in ((0, "as it was started with"), (4, "as listops-sbm-0 with which it is averaged")):
        with pytest.raises(SystemExit):
            reproduce_lra.main([*words, str(seed), "--", "--test-graphs", "2"])
        assert f"Expected listops-sbm-{seed} to have test-graphs = 1, {told} (got 2)" in capsys.readouterr().err
    reproduce_lra.main([*words, "0", "3"])
    plans[3]["settings"]["test_graphs"] = 2
    (folder / "runs" / "listops-sbm-3" / "settings.json").write_text(json.dumps(plans[3]))
    with pytest.raises(SystemExit):
        reproduce_lra.main(["report", "--output", str(folder)])
    assert "to have the same test-graphs, 1 as listops-sbm-0 (got 2 in listops-sbm-3)" in capsys.readouterr().err


@pytest.mark.usefixtures("trainer")
def test_a_lost_index_is_made_again_without_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--output", str(folder), "--seeds", "0", "3"]
    reproduce_lra.main(words)
    before = json.loads((folder / "index.json").read_text())["runs"]
    (folder / "index.json").unlink()
    (folder / "report.md").unlink()
    with pytest.raises(SystemExit):
        reproduce_lra.main(["report", "--output", str(folder)])
    assert "index.json to know the finished runs (got none of them). Give the command that made them" in capsys.readouterr().err
    reproduce_lra.main(words)
    after = json.loads((folder / "index.json").read_text())["runs"]
    assert after == {name: {**run, "seconds": None} for name, run in before.items()}
    assert "| sbm | 800 in – |" in (folder / "report.md").read_text()
    with (folder / "runs.csv").open() as file:
        assert [row["wall_seconds"] for row in csv.DictReader(file)] == ["", ""]


@pytest.mark.usefixtures("trainer")
def test_a_folder_of_data_has_several_names(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("lo", "other", "deeper/lo"):
        shutil.copytree(data, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    plan = reproduce_lra.Plan("listops", "sbm", 0, ["--preset", "laptop"], Path("lo"))
    (tmp_path / "wanted.json").write_text(json.dumps(plan.settle()))
    words = ["run", "--methods", "sbm", "--output", "all", "--data"]
    reproduce_lra.main([*words, "listops=lo"])
    reproduce_lra.main([*words, f"listops={tmp_path / 'lo'}"])
    monkeypatch.chdir(tmp_path / "deeper")  # where the run was not started
    words[words.index("all")] = str(tmp_path / "all")
    reproduce_lra.main([*words, "listops=../lo"])
    for other in ("listops=../other", "listops=lo"):
        with pytest.raises(SystemExit):
            reproduce_lra.main([*words, other])


@pytest.mark.usefixtures("trainer")
def test_data_are_what_their_fingerprint_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("here", "there"):
        shutil.copytree(data, tmp_path / folder / "lo")
    monkeypatch.chdir(tmp_path / "here")
    words = ["run", "--methods", "sbm", "--output", str(tmp_path / "all"), "--data", "listops=lo", "--seeds"]
    wanted = reproduce_lra.Plan("listops", "sbm", 0, ["--preset", "laptop"], Path("lo")).settle()

    def fingerprint() -> str:
        return splits_digest(TASKS["listops"].load(Settings(**wanted["settings"]), Path("lo")))

    wanted["fingerprint"] = first = fingerprint()
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    reproduce_lra.main([*words, "0"])
    monkeypatch.chdir(tmp_path / "there")
    reproduce_lra.main([*words, "0", "3"])

    train = tmp_path / "there" / "lo" / "basic_train.tsv"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[:-1]))
    other = fingerprint()
    for seed, told in ((0, "as it was started with"), (4, "as listops-sbm-0 with which it is averaged")):
        with pytest.raises(SystemExit):
            reproduce_lra.main([*words, str(seed)])
        assert f"listops-sbm-{seed} to have fingerprint of the data = {first!r}, {told} (got {other!r})" in capsys.readouterr().err
    path = tmp_path / "all" / "runs" / "listops-sbm-3" / "settings.json"
    path.write_text(path.read_text().replace(first, other))
    with pytest.raises(SystemExit):
        reproduce_lra.main(["report", "--output", str(tmp_path / "all")])
    assert f"to have the same fingerprint of the data, {first!r} as listops-sbm-0 (got {other!r} in" in capsys.readouterr().err


def test_a_start_that_came_to_nothing_does_not_bind_the_budget(tmp_path: Path) -> None:
    index, plan = reproduce_lra.Index(tmp_path), reproduce_lra.Plan("listops", "sbm", 0, [], None)
    assert [index.record(plan, minutes)["minutes"] for minutes in (5.0, None)] == [5.0, None]


def test_times_that_are_not_known_are_no_zeros() -> None:
    lost = {**record("sbm", 0, 0.3), "seconds": 0.0}
    assert "| sbm | 5 in – |" in tables.report([lost], "")
    assert "| sbm | 5 in 1.0 |" in tables.report([lost, record("sbm", 1, 0.3)], "")
    assert tables.run_rows([lost])[0]["wall_seconds"] == ""
    assert tables.cell_rows([lost])[0]["wall_seconds"] == ""


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("name", ["index.json", "runs/listops-sbm-0/results.json", "runs/listops-sbm-0/settings.json"])
def test_files_that_were_cut_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--output", str(folder)]
    reproduce_lra.main(words)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    for again in (words, ["report", "--output", str(folder)]):
        with pytest.raises(SystemExit):
            reproduce_lra.main(again)
        message = "to be as it was written (got: " if name.endswith("settings.json") else "to be whole JSON (got "
        assert f"Expected {folder / name} {message}" in capsys.readouterr().err
    if not name.endswith("settings.json"):  # the way out that is named
        (folder / name).unlink()
        reproduce_lra.main(words)


MEASURE = """
import json, pathlib, sys
with pathlib.Path(CALLS).open("a") as file:
    print(json.dumps(sys.argv), file=file)
result = pathlib.Path(sys.argv[sys.argv.index("--result") + 1])
result.write_text(json.dumps({"seconds_per_step": 1.0, "seconds_per_validation": 1.0}))
"""


@pytest.mark.usefixtures("trainer")
def test_steps_are_timed_on_the_machine_that_trains_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, script, folder = tmp_path / "calls", tmp_path / "measure.py", tmp_path / "all"
    script.write_text(MEASURE.replace("CALLS", repr(str(calls))))
    monkeypatch.setattr(reproduce_lra, "__file__", str(script))
    words = ["run", "--methods", "sbm", "--minutes", "5", "--output", str(folder), "--accelerator", "cpu", "--threads"]
    for threads, seeds in (("1", ["0"]), ("1", ["3"]), ("2", ["2"])):  # 2 fails until it is resumed
        with contextlib.suppress(SystemExit):
            reproduce_lra.main([*words, threads, "--seeds", *seeds])
    measured = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [line[line.index("--threads") + 1] for line in measured] == ["1", "2"]
    assert all(line[line.index("--accelerator") + 1] == "cpu" for line in measured)

    (folder / "index.json").unlink()
    reproduce_lra.main([*words, "3", "--seeds", "0", "2", "3"])
    assert len(calls.read_text().splitlines()) == 2
    resumed = json.loads((folder / "runs" / "listops-sbm-2" / "arguments.json").read_text())
    assert resumed[resumed.index("--steps") + 1] == "800"  # as it was started with, here by the trainer that pretends


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_folder(below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "afile"
    file.touch()
    for program, words in ((reproduce_lra, ["run"]), (reproduce_lra, ["report"]), (cost_lra, [])):
        with pytest.raises(SystemExit):
            program.main([*words, "--output", str(file / below)])
        assert f"Expected 'output' to be a folder (got {file / below}, but {file} is a file)" in capsys.readouterr().err


@pytest.mark.usefixtures("trainer")
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "all"
    words = ["run", "--methods", "sbm", "--output", str(folder)]
    reproduce_lra.main(words)
    write_text = Path.write_text

    def refuse(path: Path, *args: Any) -> int:
        if path.parent == folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return write_text(path, *args)

    monkeypatch.setattr(Path, "write_text", refuse)
    for again in ([*words, "--seeds", "3"], ["report", "--output", str(folder)]):
        with pytest.raises(SystemExit):
            reproduce_lra.main(again)
        assert f"to be a folder that can be written (got 'Read-only file system' for {folder})" in capsys.readouterr().err
    assert not (folder / "runs" / "listops-sbm-3").exists()
    if Path("/proc/self").exists():  # where nobody can make a folder
        with pytest.raises(SystemExit):
            reproduce_lra.main(["run", "--methods", "sbm", "--output", "/proc/sbm/all"])
        assert "Expected 'output' to be a folder that can be written (got " in capsys.readouterr().err


def test_measured_steps_fit_the_minutes(data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), "--accelerator", "cpu", *TINY, "--output", str(tmp_path / "absent")]
    timing = reproduce_lra.measure([*words, "--accumulate", "2"])
    assert 0 < timing["seconds_per_step"] < 10
    assert 0 < timing["seconds_per_validation"] < 60
    assert not (tmp_path / "absent").exists()
    for minutes, every in ((1, 100), (7.5, 100), (60, 100), (1, 1), (1, 7)):
        steps = reproduce_lra.plan_steps(timing, minutes, every)
        used, more = (
            count * timing["seconds_per_step"] + (1 + math.ceil(count / every)) * timing["seconds_per_validation"]
            for count in (steps, steps + 1)
        )
        assert used <= 60 * minutes < more
    with pytest.raises(ValueError, match=r"Expected 'minutes' to be enough for two steps and their validations, 0.4 \(got 0.3\)"):
        reproduce_lra.plan_steps({"seconds_per_step": 1.0, "seconds_per_validation": 10.0}, 0.3, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--methods", "sbm", "sbm"], "Expected 'tasks', 'methods' and 'seeds' to be distinct"),
        (["run", "--methods", "sbm:window"], "Expected 'methods' to be names like sbm or sbm:density-weight=0.1"),
        (["run", "--methods", "sbn"], "invalid choice: 'sbn'"),
        (["run", "--data", "listops"], "expected TASK=DIR"),
        (["run", "--minutes", "0"], "Expected 'minutes' to be positive and finite (got 0.0)"),
        (["run", "--minutes", "inf"], "Expected 'minutes' to be positive and finite (got inf)"),
        (["report"], "Expected 'output' to hold finished runs"),
        (["report", "--", "--seed", "1"], "Expected nothing after '--'"),
        (["run", "--", "--seed", "5"], "Expected no 'seed' in the arguments after '--' (got 5). Name it with --seeds."),
        (["run", "--", "--seed=5"], "Expected no 'seed' in the arguments after '--' (got 5)"),
        (["run", "--", "--see", "5"], "Expected no 'seed' in the arguments after '--' (got 5)"),
        (["run", "--", "--task", "listops"], "Expected no 'task' in the arguments"),
        (["run", "--", "--attention", "full"], "Expected no 'attention' in the arguments"),
        (["run", "--", "--outp", "zzz"], "Expected no 'output' in the arguments after '--' (got zzz)"),
        (["run", "--", "--resume"], "Expected no 'resume' in the arguments"),
        (["run", "--", "--resume-from", "last"], "Expected no 'resume-from' in the arguments"),
        (["run", "--", "--data=zzz"], "(got zzz). Give --data TASK=DIR."),
        (["run", "--minutes", "1", "--", "--devices", "2"], "Expected no 'devices' in the arguments"),
        (["run", "--minutes", "1", "--", "--steps", "2"], "Expected no 'steps' in the arguments after '--' (got 2). Its steps are planned"),
        (
            ["run", "--steps", "2", "--", "--step", "6"],
            "Expected no 'steps' in the arguments after '--' (got 6). Give it once, before '--'.",
        ),
        (["run", "--threads", "1", "--", "--threads", "2"], "Expected no 'threads' in the arguments after '--' (got 2). Give it once"),
        (["run", "--methods", "sbm:seed=5"], "Expected no 'seed' in the settings of 'sbm:seed=5' (got 5)"),
    ],
)
def test_errors(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--output", str(tmp_path / "all")]
    with pytest.raises(SystemExit):
        reproduce_lra.main([words[0], *place, *words[1:]])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_tables_have_means_deviations_and_relative_costs(tmp_path: Path) -> None:
    runs = [record("sbm", 0, 0.30, density=0.2, speed=300.0), record("sbm", 1, 0.40, density=0.4, speed=100.0), record("full", 0, 0.5)]
    runs += [record("full", 0, 0.6, task="text")]
    sbm, full, text = tables.cell_rows(runs)
    assert (sbm["accuracy"], sbm["runs"], sbm["published_accuracy"]) == (pytest.approx(35), 2, 37.45)
    assert sbm["accuracy_deviation"] == pytest.approx(50**0.5)
    assert (sbm["tokens_per_second_relative_to_full"], full["tokens_per_second_relative_to_full"]) == (2, 1)
    assert (sbm["density_layer0"], sbm["density_layer1"]) == (pytest.approx(30), pytest.approx(15))
    assert (text["task"], text["published_accuracy"], text["accuracy_deviation"]) == ("text", 64.93, "")
    assert "density_layer0" not in full
    words = tables.report(runs, "Budget: none.")
    for line in (
        "| sbm | 35.00 ± 7.07 | – | – |",
        "| full | 50.00 | 60.00 | 55.00 |",
        "| majority class | 20.00 | 20.00 |  |",
        "| full, published | 37.22 ± 0.52 | 64.93 ± 0.46 | 51.08 |",
        "| sbm | 30.00 / 15.00 | – |",
        "| sbm | 200 (2.00) | – |",
    ):
        assert line in words
    assert tables.plot_layer_densities(tmp_path / "density.png", runs)
    assert (tmp_path / "density.png").read_bytes().startswith(b"\x89PNG")
    assert not tables.plot_layer_densities(tmp_path / "none.png", runs[2:])


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
        assert sum(mean for mean, _ in tables.PUBLISHED[method]) / 5 == pytest.approx(average, abs=0.006)


@pytest.mark.parametrize("method", ["full", "window", "sbm:initial-density=0.05", "linear"])
def test_costs_are_measured_after_the_gate(method: str) -> None:
    length, batch = 40, 2
    row = cost_lra.measure(TASKS["listops"], method, "laptop", length, batch, 1)
    assert all(row[name] >= 0 for name in cost_lra.MEASURES)
    assert 0 < row["forward_flops"] < row["step_flops"]
    assert row["forward_seconds"] > 0
    if method == "full":  # 2 layers, 2 heads of 32 channels, width 64, hidden 128, 10 classes
        tokens, wide = batch * length, 2 * 64
        by_hand = 2 * (4 * batch * 64 * length**2 + tokens * (4 * 64 * wide + 2 * 128 * wide)) + batch * (128 * wide + 2 * 128 * 10)
        assert row["forward_flops"] == by_hand
        assert row["density"] is None
    if method.startswith("sbm"):
        assert row["density"] == pytest.approx(0.05, abs=0.02)
        assert 0 < row["forward_sampling_flops"] < row["forward_flops"]
    words = cost_lra.report([row])
    assert "## listops, 2 x 40 tokens\n\n| method | density |" in words
    last = cost_lra.report([{**row, "forward_bytes": 0, "step_bytes": 2**20}]).splitlines()[-1].split(" | ")
    assert [words.split()[0] for words in last[5:7]] == ["–", "1"]  # what is hidden below an earlier peak is not nothing


def test_the_gate_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lra.Classifier(TASKS["listops"], TASKS["listops"].presets["laptop"].settings)
    cost_lra.gate(module, TASKS["listops"], torch.device("cpu"))
    classify = module.classify
    monkeypatch.setattr(module, "classify", lambda batch, seed: (classify(batch, seed)[0] / 0, None))
    with pytest.raises(ValueError, match=r"Expected 'sbm' to give finite logits \[3, 10\]"):
        cost_lra.gate(module, TASKS["listops"], torch.device("cpu"))
    monkeypatch.setattr(module, "classify", lambda batch, seed: (classify(batch, seed)[0] * len(batch.labels), None))
    with pytest.raises(ValueError, match=r"Expected 'sbm' alone to give the same \(got a difference of"):
        cost_lra.gate(module, TASKS["listops"], torch.device("cpu"))
