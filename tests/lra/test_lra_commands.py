"""Command lines of the examples: read at once, and refused in one line that names the option, before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.lra import baselines, settings
from examples.lra.__main__ import COMMANDS, main
from sbm_pyg import estimators, sbm

ROOT = Path(settings.__file__).parents[2]
FORBID = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "lightning", "matplotlib", "numba", "scipy", "sbm_pyg"), None)
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
LONG = "x" * 300

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


def without_torch(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process in which torch cannot be imported."""
    command = [sys.executable, "-c", FORBID, str(ROOT), program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_does_not_wait_for_torch(command: str) -> None:
    done = without_torch("examples.lra", *command.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m examples.lra {command or '[-h]'} ")


def test_the_door_is_that_of_the_trainer(tmp_path: Path) -> None:
    """From anywhere, though the folder of the package beside it has its name."""
    command = [sys.executable, str(ROOT / "examples" / "lra.py"), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == without_torch("examples.lra", "train", "--help").stdout
    assert "--density-weight" in done.stdout


def test_the_guard_works(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import torch\n")
    assert "ModuleNotFoundError: import of torch halted" in without_torch(str(tmp_path / "slow.py")).stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "--output", LONG), "--output"),
        (("train", "--output", f"new/{LONG}"), "--output"),
        (("train", "--output", "x/" * 2500), "--output"),
        (("train", "--resume", "--output", LONG), "--output"),
        (("train", "--data", LONG), "--data"),
        (("train", "--export", LONG), "--export"),
        (("table", "--data", f"listops={LONG}", "--output", "table"), "--data"),
        (("table", "--report", "--output", LONG), "--output"),
        (("prepare", "--generate", "--data", LONG), "--data"),
        (("graphs", "--run", LONG), "--run"),
        (("cost", "--output", LONG), "--output"),
        (("cost", "--output", "out", "--runs", LONG), "--runs"),
    ],
    ids=[f"path{number}" for number in range(12)],
)
def test_paths_that_cannot_be_are_named_before_torch_is_imported(words: tuple[str, ...], option: str) -> None:
    done = without_torch("examples.lra", *words)
    assert done.returncode == 2, done.stderr
    error = done.stderr.splitlines()[-1]
    assert (
        f"error: argument {option}: Expected a path that the file system can have (got 'File name too long' for "
        in error
    )


def test_what_parsers_know_is_what_the_modules_with_torch_have() -> None:
    assert tuple(baselines.BASELINES) == settings.BASELINES
    assert {*estimators.ESTIMATORS} == {*settings.ESTIMATORS}
    assert (sbm.CLUSTER_INITS, sbm.PARAMETERIZATIONS) == (settings.CLUSTER_INITS, settings.PARAMETERIZATIONS)
    assert all(set(presets) == set(settings.NAMES) for presets in settings.PRESETS.values())


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
        json.dumps({"task": "listops", "preset": "laptop", "directory": "", "settings": {"layers": "three"}})
    )
    Path("data").symlink_to(data)
    return tmp_path


HOSTILE: list[tuple[str, str]] = [
    ("train --task nothing", "argument --task: invalid choice"),
    ("train --steps -3", "Expected 'steps' to be at least 1 (got -3)"),
    ("train --learning-rate nan", "Expected 'learning-rate' to be at least 0.0 (got nan)"),
    ("train --weight-decay inf", "Expected 'weight-decay' to be finite (got inf)"),
    ("train --density-floor 0.5", "Expected 'density-floor' to be 0"),
    ("train --data missing", "Expected 'missing' to hold ListOps (got no such folder)"),
    ("train --data file", "Expected 'file' to hold ListOps (got a file)"),
    ("train --data loop", "argument --data: Expected a path that the file system can have"),
    ("train --task text", "Expected 'data' to be a folder of text"),
    ("train --output file/x", "Expected 'output' to be a folder that can be made"),
    ("train --output full", "Expected 'output' to be a new or empty folder"),
    ("train --output /proc/x", "Expected 'output' to be a folder that can be written"),
    ("train --output missing --resume", "Expected 'output' to be the folder of a run to resume"),
    ("train --output damaged --resume", "Expected damaged/settings.json to be as it was written"),
    ("train --output strange --resume", "Expected strange/settings.json to be as it was written"),
    ("train --prepared file", "Expected 'prepared' to be a folder that can be made"),
    ("train --export full", "Expected 'export' to be a new or empty folder"),
    ("train --export file/y", "Expected 'export' to be a folder that can be made"),
    ("train --threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    ("train --workers -1", "Expected 'workers' to be at least 0 (got -1)"),
    ("train --minutes nan", "Expected 'minutes' to be positive and finite (got nan)"),
    ("train --accelerator mps", "Expected 'accelerator' to be one of which there is one"),
    ("train --heads 2147483648", "'heads'"),
    ("train --layers 1000000000", "'layers'"),
    ("train --max-length 2147483648", "'max-length' to give a model that fits into"),
    ("train --attention linformer --linformer-rank 1000000000", "to give a model that fits into"),
    ("prepare --generate --data file/x", "to be a place for generated data"),
    ("prepare --generate --data full", "to be the manifest of generated data (got no such file)"),
    (
        "prepare --generate --data /proc/x",
        "to be a place for generated data",
    ),  # where a lock would be waited for without end
    ("prepare --generate --data new --train -5", "Expected 'train' to be at least 1 (got -5)"),
    (
        "prepare --generate --data new --operator-probability nan",
        "Expected 'operator_probability' to be in (0, 1] (got nan)",
    ),
    ("prepare --data data --prepared file", "to be a place for prepared data"),
    ("prepare --data empty", "Expected 'empty' to hold ListOps"),
    ("prepare --data data --split none", "Expected 'split' of listops to be one of release (got 'none')"),
    ("graphs --run missing", "Expected 'run' to be a folder with settings.json"),
    ("graphs --run damaged --checkpoint settings.json", "Expected damaged/settings.json to be as it was written"),
    (f"graphs --run damaged --checkpoint {LONG}", "Expected 'run' to be a folder with settings.json and xxx"),
    ("graphs --run damaged --out file/x", "Expected 'out' to be a file in a folder that is there"),
    ("graphs --run damaged --threshold nan", "Expected 'threshold' to be at least 0 and below 1 (got nan)"),
    (
        "graphs --run damaged --time-limit inf",
        "Expected 'time-limit' to be a positive and finite number of seconds (got inf)",
    ),
    ("graphs --run damaged --examples -1", "Expected 'examples' to be at least 1 (got -1)"),
    ("table --output file/x", "Expected 'output' to be a folder that can be made (got file/x"),
    ("table --output new --threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    ("table --output new --data listops=missing", "Expected 'missing' to hold ListOps"),
    ("table --output new --tasks text", "Expected 'data' to be a folder of text"),
    ("table --output new --accelerator mps", "Expected 'accelerator' to be one of which there is one"),
    ("table --output new --methods sbm:heads=2147483648", "'heads'"),
    ("table --output new --minutes nan", "Expected 'minutes' to be positive and finite (got nan)"),
    ("table --report --output empty", "Expected 'output' to hold finished runs"),
]


@pytest.mark.parametrize(("line", "said"), HOSTILE, ids=[line[:60] for line, _ in HOSTILE])
def test_bad_command_lines_end_in_an_error_that_names_the_option(
    line: str, said: str, place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
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
