"""Command lines of the examples: read at once, and refused in one line that names the option, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.lra import baselines, settings
from examples.lra.__main__ import COMMANDS, main
from sbm_pyg import estimators
from sbm_pyg.sources import sbm

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


@pytest.mark.parametrize("words", ["train --output", "table --report --output", "prepare --data", "graphs --run"])
def test_paths_that_cannot_be_are_named_before_torch_is_imported(words: str) -> None:
    done = without_torch("examples.lra", *words.split(), LONG)
    assert done.returncode == 2, done.stderr
    option = (
        f"argument {words.split()[-1]}: Expected a path that the file system can have (got 'File name too long' for "
    )
    assert option in done.stderr.splitlines()[-1]


def test_what_parsers_know_is_what_the_modules_with_torch_have() -> None:
    assert tuple(baselines.BASELINES) == settings.BASELINES
    assert {*estimators.ESTIMATORS} == {*settings.ESTIMATORS}
    assert (sbm.CLUSTER_INITS, sbm.PARAMETERIZATIONS) == (settings.CLUSTER_INITS, settings.PARAMETERIZATIONS)
    assert all(set(presets) == set(settings.NAMES) for presets in settings.PRESETS.values())


@pytest.fixture
def place(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file, a folder that is full, one that is empty, a link to itself, and data."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    for name in ("full", "empty"):
        Path(name).mkdir()
    Path("full", "thing").write_text("x")
    Path("loop").symlink_to("loop")
    Path("data").symlink_to(data)
    return tmp_path


HOSTILE: list[tuple[str, str]] = [
    ("train --task nothing", "argument --task: invalid choice"),
    ("train --steps -3", "Expected 'steps' to be at least 1 (got -3)"),
    ("train --weight-decay inf", "Expected 'weight-decay' to be at least 0.0 (got inf)"),
    ("train --threads 0", "Expected 'threads' to be at least 1 (got 0)"),
    ("train --attention window --target-density 0.1", "Expected 'target-density' to be 0 for 'window' attention"),
    ("train --data missing", "Expected 'missing' to hold ListOps (got no such folder)"),
    ("train --data file", "Expected 'file' to hold ListOps (got a file)"),
    ("train --data loop", "argument --data: Expected a path that the file system can have"),
    ("train --task text", "Expected 'data' to be a folder of text"),
    ("train --output file/x", "Expected 'output' to be a folder that can be made"),
    ("train --output full", "Expected 'output' to be a new or empty folder"),
    ("train --output /proc/x", "Expected 'output' to be a folder that can be written"),
    ("train --output missing --resume", "Expected 'output' to be the folder of a run to resume"),
    ("train --export full", "Expected 'export' to be a new or empty folder"),
    ("train --minutes nan", "Expected 'minutes' to be positive and finite, without 'steps' (got nan)"),
    (
        "train --accelerator mps",
        "Expected 'accelerator' to be one that this machine has, for each process (got 'mps': ",
    ),
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
    (
        "prepare --generate --task pathfinder --data new --per-folder 0",
        "Expected 'per_folder' to be at least 1 (got 0)",
    ),
    ("graphs --run missing", "Expected 'run' to be a folder with settings.json"),
    ("graphs --run missing --time-limit 0", "Expected 'time-limit' to be above 0 (got 0.0)"),
    ("graphs --run missing --time-limit nan", "Expected 'time-limit' to be above 0 (got nan)"),
    ("table --output file/x", "Expected 'output' to be a folder that can be made (got file/x"),
    ("table --output new --minutes nan", "Expected 'minutes' to be positive and finite, without 'steps' (got nan)"),
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
