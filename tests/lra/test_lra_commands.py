"""Command lines of the examples: read at once, and refused in one line that names the option, before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import analyse_graphs
import lra_baselines
import lra_settings
import lra_tasks
import pytest
import reproduce_lra

import benchmark
import lra
from benchmark_worker import SUITES
from sbm_pyg import estimators, sbm

EXAMPLES = Path(lra.__file__).parent
# The recipe of 94 lines that imports the package alone shows no settings worth a split of its imports.
PROGRAMS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if "argparse.ArgumentParser" in path.read_text() and path.stem != "transformer_encoder"
)
FORBID = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "lightning", "matplotlib", "numba", "scipy", "sbm_pyg"), None)
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LONG = "x" * 300

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def without_torch(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process in which torch cannot be imported."""
    command = [sys.executable, "-c", FORBID, str(EXAMPLES), str(EXAMPLES / program), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_does_not_wait_for_torch(program: str) -> None:
    done = without_torch(program, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {program} ")


def test_the_programs_are_found_and_the_guard_works(tmp_path: Path) -> None:
    assert len(PROGRAMS) == 12
    assert {"lra.py", "lra_tasks.py", "analyse_graphs.py", "reproduce_lra.py", "sampled_mask.py"} <= set(PROGRAMS)
    (tmp_path / "slow.py").write_text("import torch\n")
    assert "ModuleNotFoundError: import of torch halted" in without_torch(str(tmp_path / "slow.py")).stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("lra.py", "--output", LONG), "--output"),
        (("lra.py", "--output", f"new/{LONG}"), "--output"),
        (("lra.py", "--output", "x/" * 2500), "--output"),
        (("lra.py", "--resume", "--output", LONG), "--output"),
        (("lra.py", "--data", LONG), "--data"),
        (("lra.py", "--export", LONG), "--export"),
        (("reproduce_lra.py", "run", "--data", f"listops={LONG}", "--output", "table"), "--data"),
        (("reproduce_lra.py", "report", "--output", LONG), "--output"),
        (("lra_tasks.py", "generate", "--out", LONG), "--out"),
        (("analyse_graphs.py", "--run", LONG), "--run"),
        (("cost_lra.py", "--output", LONG), "--output"),
        (("time_runs.py", LONG), "RUN"),
    ],
)
def test_paths_that_cannot_be_are_named_before_torch_is_imported(words: tuple[str, ...], option: str) -> None:
    done = without_torch(*words)
    assert done.returncode == 2, done.stderr
    error = done.stderr.splitlines()[-1]
    assert f"error: argument {option}: Expected a path that the file system can have (got 'File name too long' for " in error


def test_what_parsers_know_is_what_the_modules_with_torch_have() -> None:
    assert tuple(lra_baselines.BASELINES) == lra_settings.BASELINES
    assert (estimators.ESTIMATORS, sbm.CLUSTERS, sbm.PARAMETERIZATIONS) == (
        lra_settings.ESTIMATORS,
        lra_settings.CLUSTERS,
        lra_settings.PARAMETERIZATIONS,
    )
    assert all(set(presets) == set(lra_settings.NAMES) for presets in lra_settings.PRESETS.values())
    assert {suite: tuple(peers) for suite, peers in SUITES.items()} == benchmark.PEERS


@pytest.fixture
def place(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file, a folder that is full, one that is empty, a link to itself, two damaged runs, and data."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    for name in ("full", "empty", "damaged", "strange"):
        Path(name).mkdir()
    Path("full", "thing").write_text("x")
    Path("loop").symlink_to("loop")
    Path("damaged", "settings.json").write_text("{nonsense")
    Path("strange", "settings.json").write_text(
        json.dumps({"task": "listops", "preset": "laptop", "data": None, "settings": {"layers": "three"}})
    )
    Path("data").symlink_to(data)
    return tmp_path


HOSTILE: list[tuple[Callable[..., object], str, str]] = [
    (lra.main, "--task nothing", "argument --task: invalid choice"),
    (lra.main, "--steps -3", "Expected 'steps' to be at least 1 (got -3)"),
    (lra.main, "--learning-rate nan", "Expected 'learning-rate' to be at least 0.0 (got nan)"),
    (lra.main, "--weight-decay inf", "Expected 'weight-decay' to be finite (got inf)"),
    (lra.main, "--density-floor 0.5", "Expected 'density-floor' to be 0"),
    (lra.main, "--data missing", "Expected 'missing' to hold ListOps (got no such folder)"),
    (lra.main, "--data file", "Expected 'file' to hold ListOps (got a file)"),
    (lra.main, "--data loop", "argument --data: Expected a path that the file system can have"),
    (lra.main, "--task text", "Expected 'data' to be a folder of text"),
    (lra.main, "--output file/x", "Expected 'output' to be a folder that can be made"),
    (lra.main, "--output full", "Expected 'output' to be a new or empty folder"),
    (lra.main, "--output /proc/x", "Expected 'output' to be a folder that can be written"),
    (lra.main, "--output missing --resume", "Expected 'output' to be the folder of a run to resume"),
    (lra.main, "--output damaged --resume", "Expected damaged/settings.json to be as it was written"),
    (lra.main, "--output strange --resume", "Expected strange/settings.json to be as it was written"),
    (lra.main, "--prepared file", "Expected 'prepared' to be a folder that can be made"),
    (lra.main, "--export full", "Expected 'export' to be a new or empty folder"),
    (lra.main, "--export file/y", "Expected 'export' to be a folder that can be made"),
    (lra.main, "--threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    (lra.main, "--workers -1", "Expected 'workers' to be at least 0 (got -1)"),
    (lra.main, "--devices 0", "Expected 'devices' to be at least 1 (got 0)"),
    (lra.main, "--accelerator mps", "Expected 'accelerator' to be one of which there is one"),
    (lra.main, "--heads 2147483648", "'heads'"),
    (lra.main, "--layers 1000000000", "'layers'"),
    (lra.main, "--max-length 2147483648", "'max-length' to give a model that fits into"),
    (lra.main, "--attention linformer --linformer-rank 1000000000", "to give a model that fits into"),
    (lra_tasks.main, "generate --out file/x", "to be a place for generated data"),
    (lra_tasks.main, "generate --out full", "to be new, empty or the data set asked for"),
    (lra_tasks.main, "generate --out /proc/x", "to be a place for generated data"),  # where a lock would be waited for without end
    (lra_tasks.main, "generate --out new --train -5", "Expected 'train' to be at least 1 (got -5)"),
    (lra_tasks.main, "generate --out new --operator-probability nan", "Expected 'operator_probability' to be in (0, 1] (got nan)"),
    (lra_tasks.main, "prepare --data data --out file", "to be a place for prepared data"),
    (lra_tasks.main, "describe --data empty", "Expected 'empty' to hold ListOps"),
    (lra_tasks.main, "describe --data data --max-length -4", "Expected 'max-length' to be at least 1 (got -4)"),
    (lra_tasks.main, "describe --data data --split none", "Expected 'split' of listops to be one of release (got 'none')"),
    (analyse_graphs.main, "--run missing", "Expected 'run' to be a folder with settings.json"),
    (analyse_graphs.main, "--run damaged --checkpoint settings.json", "Expected damaged/settings.json to be as it was written"),
    (analyse_graphs.main, f"--run damaged --checkpoint {LONG}", "Expected 'run' to be a folder with settings.json and xxx"),
    (analyse_graphs.main, "--run damaged --out file/x", "Expected 'out' to be a file in a folder that is there"),
    (analyse_graphs.main, "--run damaged --threshold nan", "Expected 'threshold' to be at least 0 and below 1 (got nan)"),
    (
        analyse_graphs.main,
        "--run damaged --time-limit inf",
        "Expected 'time-limit' to be a positive and finite number of seconds (got inf)",
    ),
    (analyse_graphs.main, "--run damaged --examples -1", "Expected 'examples' to be at least 1 (got -1)"),
    (reproduce_lra.main, "run --output file/x", "Expected 'output' to be a folder (got file/x"),
    (reproduce_lra.main, "run --output new --threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    (reproduce_lra.main, "run --output new --data listops=missing", "Expected 'missing' to hold ListOps"),
    (reproduce_lra.main, "run --output new --tasks text", "Expected 'data' to be a folder of text"),
    (reproduce_lra.main, "run --output new --accelerator mps", "Expected 'accelerator' to be one of which there is one"),
    (reproduce_lra.main, "run --output new --methods sbm:heads=2147483648", "'heads'"),
    (reproduce_lra.main, "run --output new --minutes nan", "Expected 'minutes' to be positive and finite (got nan)"),
    (reproduce_lra.main, "measure --result file/x -- --data data", "Expected 'result' to be a folder that can be made"),
    (reproduce_lra.main, "report --output empty", "Expected 'output' to hold finished runs"),
]


@pytest.mark.parametrize(("main", "line", "said"), HOSTILE, ids=[f"{main.__module__} {line[:60]}" for main, line, _ in HOSTILE])
def test_bad_command_lines_end_in_an_error_that_names_the_option(
    main: Callable[..., object], line: str, said: str, place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing done: no data generated, none prepared, no folder made."""
    if "mps" in line:
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    if "/proc" in line and not Path("/proc/self").exists():
        pytest.skip("no /proc, a folder in which nobody can write")
    before = {path: path.lstat().st_mtime_ns for path in place.rglob("*")}
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if "error: " in text]
    assert len(errors) == 1
    assert said in errors[0]
    assert {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.name.endswith(".lock")} == before
