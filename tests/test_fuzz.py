"""The fuzz drivers in short, in long with ``pytest -m long``, and that they know every public name and can tell right from wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz_files
import pytest
from calls import EXEMPT, public_names, recorded
from fuzz import faults, judge, named, run, share
from fuzz_cases import Case, Wrong, expect, valid
from fuzz_layers import TABLE, _recorded_case
from problems import random_graph

from sbm_pyg import AttentionGraph

DRIVER = Path(__file__).with_name("fuzz.py")
DRIVER_OF_FILES = Path(__file__).with_name("fuzz_files.py")


def fuzz(calls: int, folder: Path, seed: int = 0, driver: Path = DRIVER) -> tuple[list[dict[str, Any]], str]:
    """Verdicts of that many calls, in a process of their own, and what it says about them.

    The driver forks, so its process must be new: a pool of threads, as other tests may have started here, does not outlive a fork.
    """
    verdicts = folder / "verdicts.json"
    command = [
        sys.executable, "-W", "ignore", str(driver), "--calls", str(calls), "--seed", str(seed), "--json",
        str(verdicts),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdicts.is_file(), done.stderr
    return json.loads(verdicts.read_text()), done.stdout


def check(calls: int, folder: Path) -> None:
    verdicts, said = fuzz(calls, folder)
    assert len(verdicts) == calls
    without, refusals = share(verdicts)
    assert not faults(verdicts), said
    assert 200 * without < refusals, said


@pytest.mark.slow
def test_some_calls(tmp_path: Path) -> None:
    """Each public name once: a round begins with all of them."""
    check(len(TABLE), tmp_path)


@pytest.mark.long
def test_twenty_thousand_calls(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "long" not in request.config.option.markexpr:  # another `-m` has taken the place of the default
        pytest.skip("it takes many minutes: ask for it with `pytest -m long`")
    check(20_000, tmp_path)


@pytest.mark.slow
def test_every_public_name_is_called() -> None:
    """By a case of random arguments, or by an example of a docstring or of ``calls.LINES``."""
    by_hand = {name for name, (_, make) in TABLE.items() if getattr(make, "func", None) is not _recorded_case}
    assert {*public_names()} - by_hand == recorded().keys() - by_hand | EXEMPT.keys()
    assert not by_hand & EXEMPT.keys()


@pytest.mark.parametrize(
    ("message", "has"),
    [
        ("Expected 'heads' to be at least 1 (got 0).", True),
        ("Expected 'heads[0]' to be an int (got 'x').", True),
        ("Expected heads to be at least 1.", False),
        ("Expected 'num_heads' to be at least 1.", False),
        ("Expected 'rowptr' to have more heads than 'col'.", False),  # the words between two quotations are not quoted
    ],
)
def test_a_name_counts_in_quotes_alone(message: str, has: bool) -> None:
    assert named(message, ["heads"]) is has


def test_oracles_know_a_graph_that_is_not_valid() -> None:
    graph = random_graph(2, 5, 5, 0.6)
    valid(graph)
    broken = object.__new__(AttentionGraph)
    for name in ("rowptr", "num_queries", "num_keys", "heads", "query_ptr", "key_ptr"):
        object.__setattr__(broken, name, getattr(graph, name))
    object.__setattr__(broken, "col", graph.col.flip(0))
    with pytest.raises(Wrong, match="unsorted"):
        valid(broken)


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def spin() -> None:
    while True:
        pass


def lie() -> int:
    return 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "verdict"), [(crash, "crash"), (spin, "hang"), (lie, "wrong"), (lambda: 3, "returned")]
)
def test_the_driver_sees_crashes_hangs_and_wrong_results(
    call: Any, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    monkeypatch.setitem(TABLE, "only", (1, lambda draw: Case(call, {}, lambda result: expect(result == 3, "not 3"))))
    for name in [*TABLE]:
        if name != "only":
            monkeypatch.delitem(TABLE, name)
    found = run([0, 1], seed=0, jobs=1, limit=1.0, memory=64.0)
    assert [each["verdict"] for each in found] == [verdict] * 2
    assert bool(faults(found)) is (verdict != "returned")


@pytest.mark.slow
def test_a_call_is_a_function_of_its_number() -> None:
    first, again = ({**judge(3, 11), "seconds": 0} for _ in range(2))
    assert first == again


# ------------------------------------------------------------------ files


@pytest.mark.slow
def test_some_damaged_files(tmp_path: Path) -> None:
    verdicts, report = fuzz(225, tmp_path, driver=DRIVER_OF_FILES)
    assert len(verdicts) == 225
    assert not fuzz_files.faults(verdicts), report
    for name in fuzz_files.READERS:
        of_reader = [call["verdict"] for call in verdicts if call["reader"] == name]
        assert 0 < of_reader.count("refused") <= 15


@pytest.mark.long
def test_twenty_thousand_damaged_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "long" not in request.config.option.markexpr:
        pytest.skip("it takes many minutes: ask for it with `pytest -m long`")
    verdicts, report = fuzz(20_000, tmp_path, 1, DRIVER_OF_FILES)
    assert not fuzz_files.faults(verdicts), report


def write(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(1000))


def error(folder: Path) -> None:
    raise KeyError(folder)


def unclear(folder: Path) -> None:
    raise ValueError("truncated")


def careless(folder: Path) -> bytes:
    return (folder / "file").read_bytes()


def invalid(folder: Path) -> None:
    fuzz_files.expect(False, "label")


def greedy(folder: Path) -> None:
    bytearray(2**28).find(b"x")


@pytest.mark.parametrize(
    ("read", "verdict"),
    [(lambda folder: crash(), "crash"), (lambda folder: spin(), "hang"), (error, "error"), (unclear, "unclear"),
     (careless, "changed"), (invalid, "wrong"), (greedy, "memory"), (lambda folder: None, "read")],
)  # fmt: skip
def test_the_driver_of_files_sees_each_fault(read: Any, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_files, "LIMIT", 0.5)
    monkeypatch.setattr(fuzz_files, "MEMORY", 100)
    ready = True

    def whole(folder: Path) -> Any:
        nonlocal ready
        first, ready = ready, False  # the first call reads valid files
        return careless(folder) if first else read(folder)

    monkeypatch.setattr(fuzz_files, "READERS", {"only": fuzz_files.Reader(write, whole, guarded=True)})
    found = [*fuzz_files.run([0, 1], 5, ["only"])]
    assert len(found) == 2
    assert verdict in [each["verdict"] for each in found]
    assert bool(fuzz_files.faults(found)) is (verdict != "read")
