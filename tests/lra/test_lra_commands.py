"""Command lines of the examples: read at once, and refused in one line that names the option, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.lra import settings
from examples.lra.__main__ import COMMANDS, main

ROOT = Path(settings.__file__).parents[2]
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m examples.lra {command or '[-h]'} ")


def test_the_door_is_that_of_the_trainer(tmp_path: Path) -> None:
    """From anywhere, though the folder of the package beside it has its name."""
    command = [sys.executable, str(ROOT / "examples" / "lra.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m examples.lra train ")
    assert "--density-weight" in done.stdout


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
    ("train --attention window --target-density 0.1", "Expected 'target-density' to be 0 for 'window' attention"),
    ("train --data missing", "Expected 'missing' to hold ListOps (got no such folder)"),
    ("train --data file", "Expected 'file' to hold ListOps (got a file)"),
    ("train --data loop", "argument --data: Expected a path that the file system can have"),
    ("train --task text", "Expected 'data' to be a folder of text"),
    ("train --output file/x", "Expected 'output' to be a folder that can be made"),
    ("train --output full", "Expected 'output' to be a new or empty folder"),
    ("train --output /proc/x", "Expected 'output' to be a folder that can be written"),
    ("train --output missing --resume", "Expected 'output' to be the folder of a run to resume"),
    (
        "train --output " + "x" * 300,
        "argument --output: Expected a path that the file system can have (got 'File name too long' for ",
    ),
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
    ("prepare --data data --prepared file", "to be a place for prepared data"),
    ("prepare --data empty", "Expected 'empty' to hold ListOps"),
    ("prepare --data data --split none", "Expected 'split' of listops to be one of release (got 'none')"),
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
