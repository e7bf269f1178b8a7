"""The slices of a GPU's benchmark, tried on the CPU with tiny sizes."""

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import gpu
from examples.common.runs import write_record

WORDS = ["--device", "cpu", "--dtype", "float32", "--tokens", "64", "--densities", "12.5", "50", "--degrees", "16"]
WORDS += ["--block-size", "8", "--seconds", "0.02", "--peers", "sdpa", "edges", "blocks", "sparse", "dense", "sampling"]


def measured(folder: Path, *more: str) -> list[dict[str, Any]]:
    gpu.main([*WORDS, "--output", str(folder), *more])
    return gpu.read(folder / "results.jsonl")


def test_a_slice_measures_once_and_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(tmp_path, "--only", "attention", "layers")
    assert "Nothing is left" in capsys.readouterr().out
    assert not [row for row in rows if "remark" in row and "timed once" not in row["remark"]]
    found = {(row["item"]["kind"], row["item"]["peer"], row["item"]["density"]) for row in rows}
    assert {("attention", "sdpa", 0.0), ("attention", "edges", 0.25), ("layers", "dense", 0.0)} < found
    assert len(rows) == len(found) == 1 + 3 * 3 + 1 + 2 * 3
    for row in rows:
        assert row["forward_ms"] > 0
        assert (row["step_ms"] > 0) if row["item"]["peer"] != "sampling" else ("step_ms" not in row)
    edges = {row["item"]["density"]: row["edges"] for row in rows if row["item"]["peer"] == "edges"}
    assert edges == {0.125: 2 * 64 * 8, 0.25: 2 * 64 * 16, 0.5: 2 * 64 * 32}
    assert measured(tmp_path, "--only", "attention", "layers") == rows
    gpu.main(["--markdown", "--output", str(tmp_path)])
    page = capsys.readouterr().out
    assert "## Attention, step, N = 64" in page
    assert "| blocks | 50 |" in page


def test_a_peer_that_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu.BUILD["edges"]

    def wrong(inputs: gpu.Inputs) -> gpu.Forward:
        inputs.scale *= 2
        forward = right(inputs)
        inputs.scale /= 2
        return lambda *leaves: forward(leaves[0] * 2, *leaves[1:])

    gpu._check.cache_clear()
    monkeypatch.setitem(gpu.BUILD, "edges", wrong)
    for row in measured(tmp_path, "--only", "attention", "--peers", "edges"):
        assert "Expected results within 2e-05 of plain torch" in row["remark"]
        assert "step_ms" not in row
    gpu._check.cache_clear()


def test_a_peer_may_fail_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton does where a kernel asks for more than there is, with an error of its own."""

    class OutOfResources(Exception):
        pass

    def fail(inputs: gpu.Inputs) -> gpu.Forward:
        raise OutOfResources("shared memory")

    gpu._check.cache_clear()
    monkeypatch.setitem(gpu.BUILD, "edges", fail)
    rows = measured(tmp_path, "--only", "attention", "--peers", "edges", "sdpa")
    assert [row.get("remark") for row in rows] == [None, *["OutOfResources: shared memory"] * 3]


def test_what_slices_are_killed_at_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(item: gpu.Item, given: argparse.Namespace) -> dict[str, Any]:
        raise KeyboardInterrupt

    words = ("--only", "layers", "--peers", "dense")
    with monkeypatch.context() as patch:
        patch.setitem(gpu.MEASURE, "layers", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                measured(tmp_path, *words)
    (row,) = measured(tmp_path, *words)
    assert row["remark"] == "two slices were killed at it"


def test_what_matters_is_measured_first() -> None:
    """Contract, operations, layers and the block kernel at two sizes, then CUDA graphs, which only a GPU has."""
    items = [*gpu.items(gpu.parse(["--device", "cuda:0"]))]
    first = items[: next(number for number, item in enumerate(items) if item.tokens == 1024)]
    assert [item.kind for item in first[:4]] == ["contract"] * 2 + ["operations"] * 2
    timed = {(item.peer, item.tokens) for item in first[4:]}
    layers = {(name, tokens) for name in gpu.FIRST_LAYERS for tokens in (4096, 16384)}
    captured = {(f"{name}{gpu.GRAPH}", tokens) for name, tokens in layers}
    assert timed == layers | captured | {("sdpa", 4096), ("sdpa", 16384)}
    assert [item for item in first if item.kind == "attention" and item.peer == "blocks"]
    assert len(items) == len(set(items))
    assert not [item for item in gpu.items(gpu.parse(["--device", "cpu"])) if item.peer.endswith(gpu.GRAPH)]


def test_trained_layers_and_operations_are_measured(tmp_path: Path) -> None:
    peers = ("recall-2", "recall-2-dense")
    rows = measured(tmp_path, "--only", "operations", "layers", "--peers", *peers)
    counts = [row for row in rows if row["item"]["kind"] == "operations"]
    assert [row["item"]["density"] for row in counts] == [0.05, 1.0]
    assert all(row["forward"] > row["backward"] > 0 for row in counts)
    assert [row["item"]["peer"] for row in rows[2:]] == [*peers]
    assert all(row["forward_ms"] > 0 and row["step_ms"] > 0 for row in rows[2:])


def test_a_slice_that_is_over_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(tmp_path, "--only", "layers", "--minutes", "1e-9") == []
    assert "7 items are left" in capsys.readouterr().out


def test_a_line_that_a_kill_has_cut_is_measured_again(tmp_path: Path) -> None:
    words = ("--only", "layers", "--peers", "dense")
    (row,) = measured(tmp_path, *words)
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-9] + "\n")
    assert gpu.read(path) == []
    (again,) = measured(tmp_path, *words)
    assert again["item"] == row["item"]


def test_listops_goes_on_in_the_next_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slice ends before the trainer does; the second resumes its run, and keeps its results."""
    commands: list[list[str]] = []

    def trainer(command: list[str], timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--output") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "settings.json").write_text("{}")
        if len(commands) == 1:
            raise subprocess.TimeoutExpired(command, timeout)
        write_record(folder / "results.json", {"test": 0.37})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu.subprocess, "run", trainer)
    words = ("--only", "listops", "--steps", "5")
    assert measured(tmp_path, *words) == []
    (row,) = measured(tmp_path, *words)
    assert row["test"] == 0.37
    first, second = commands
    assert first[-6:] == ["--preset", "paper", "--accelerator", "cpu", "--steps", "5"]
    assert second[-1] == "--resume"


def test_tests_tell_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pytest-xdist, where it is installed, and without."""
    given = argparse.Namespace(output=tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for outcome in (True, False):
        if not outcome:
            monkeypatch.setattr(gpu, "find_spec", lambda name: None)
        file = tmp_path / f"test_{outcome}.py"
        file.write_text(f"def test_it() -> None:\n    assert {outcome}\n")
        found = gpu.measure_tests(gpu.Item("tests", str(file)), given)
        assert found is not None
        assert found["passed"] is outcome
        assert len(found["failed"]) == (not outcome)


def test_a_contract_that_takes_long_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text("import time\n\n\ndef test_it() -> None:\n    time.sleep(100)\n")
    found = gpu.measure_tests(gpu.Item("contract", str(file)), argparse.Namespace(output=tmp_path), limit=1.0)
    assert not found["passed"]


def test_where_curves_meet() -> None:
    assert gpu.even({0.01: 1.0, 0.04: 4.0}, 2.0) == pytest.approx(0.02)
    assert gpu.even({0.01: 1.0, 0.04: 4.0}, 5.0) is None
    assert gpu.even({0.01: 1.0}, 1.0) is None
