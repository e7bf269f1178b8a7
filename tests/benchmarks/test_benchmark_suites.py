"""The benchmarks: every peer is right, wrong ones are rejected, and a run leaves rows, tables and plots."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as program
from examples.benchmarks import kernels, measure, report, samplers
from examples.benchmarks.kernels import Case, Rejected
from sbm_pyg import SBMHead

CASE = Case(tokens=70, blocks=4, density=0.2, seed=1, channels=8)
RUNS = {
    "kernels": ["ours", "sdpa-masked", "pyg-tuned", "wrong"],
    "samplers": ["bernoulli", "dense", "wrong"],
    "layers": ["sbm", "dense", "wrong"],
    "growth": ["sampling", "layer"],
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=RUNS)
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[str], str, Path]:
    """A quick run of one suite: its name, its command, what it printed and its folder."""
    folder = tmp_path_factory.mktemp("run")
    words = [request.param, "--quick", "--output", str(folder), "--peers", *RUNS[request.param]]
    words += ["--tokens", "64", "128"] if request.param == "growth" else []
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-m", "examples.benchmarks", *words]
    root = Path(program.__file__).parents[2]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # as this process has: a row is of a number of threads
    done = subprocess.run(command, cwd=root, env=one, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return request.param, words, done.stdout, folder


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ the peers


@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if name not in program.EXTRA])
def test_attention_peers_are_right(name: str) -> None:
    work = kernels.KERNELS[name].build(CASE)
    assert 0 <= work.check() < kernels.TOLERANCE
    assert len({call() for call in work.calls.values()}) == 1  # all stages work on the same edges


@pytest.mark.parametrize("name", [name for name in samplers.SAMPLERS if name != "wrong"])
def test_samplers_are_right(name: str) -> None:
    work = samplers.SAMPLERS[name].build(CASE)
    assert 0 <= work.check() < samplers.DEVIATIONS
    assert work.facts["density"] == pytest.approx(work.facts["expected_density"], rel=0.2)
    assert work.calls["sample"]() > 0


@pytest.mark.parametrize(
    ("suite", "name"), [("layers", "sbm"), ("layers", "dense"), ("growth", "sampling"), ("growth", "layer")]
)
def test_layers_are_right(suite: str, name: str) -> None:
    work = measure.SUITES[suite][name].build(CASE)
    assert work.check() < samplers.DEVIATIONS
    assert work.calls["step"]() > 0


def test_wrong_results_are_rejected() -> None:
    with pytest.raises(Rejected, match="its output is off by"):
        kernels.KERNELS["wrong"].build(CASE).check()
    with pytest.raises(Rejected, match=r"its density is off by \d+\.\d standard deviations"):
        samplers.SAMPLERS["wrong"].build(dataclasses.replace(CASE, tokens=400)).check()
    with pytest.raises(Rejected, match="its output is off by"):
        samplers.LAYERS["wrong"].build(CASE).check()


def test_a_wrong_gradient_alone_is_rejected() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, 1.0, 1.001])
    assert kernels.compare({"output": (good, good)}) == 0
    with pytest.raises(Rejected, match="its key gradient is off by 1"):
        kernels.compare({"output": (good, good), "key gradient": (bad, good)})
    with pytest.raises(Rejected, match="nan"):
        kernels.compare({"output": (good * torch.nan, good)})


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.25, 0.6])
def test_density_can_be_set(density: float) -> None:
    torch.manual_seed(0)
    head = SBMHead(32, 2, 128)
    samplers.set_density(head, density)
    sbm = head(torch.randn(2, 100, 32), torch.randn(2, 100, 32))
    assert sbm.expected_density().flatten().tolist() == pytest.approx([density, density], rel=0.05)


# ------------------------------------------------------------------ a run


@pytest.mark.slow
def test_a_quick_run_measures_what_is_right(outcome: tuple[str, list[str], str, Path]) -> None:
    suite, _, shown, folder = outcome
    rows = read(folder)
    good = [row for row in rows if row["peer"] != "wrong"]
    assert {row["peer"] for row in rows} == set(RUNS[suite])
    for row in good:
        assert row["status"] == ""
        assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert row["repeats"] > 0
        assert row["ns_per_edge"] == pytest.approx(1e6 * row["median_ms"] / row["edges"], rel=1e-3)
        assert row["peak_mib"] >= 0
        assert row["process_mib"] > 20
        assert row["label"] in shown
        assert {"cpu", "cores", "threads", "torch", "torch-geometric", "numba", "commit", "date", "run"} <= row.keys()
    for row in rows:
        if row["peer"] == "wrong":
            assert row["status"].startswith("REJECTED")
            assert row["median_ms"] is None
            assert row["status"] in shown
    assert report.TITLES[suite] in shown


@pytest.mark.slow
def test_the_same_command_measures_nothing_twice(
    outcome: tuple[str, list[str], str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, words, shown, folder = outcome
    before = (folder / "rows.jsonl").read_text()
    monkeypatch.setattr(measure, "Worker", None)
    assert program.main(words) == 0
    assert capsys.readouterr().out == shown
    assert program.main(["report", str(folder / "rows.jsonl")]) == 0
    assert capsys.readouterr().out == shown
    assert (folder / "rows.jsonl").read_text() == before


def made(**changes: Any) -> dict[str, Any]:
    """A row that was never measured."""
    row = measure._row("kernels", "5 %", "ours", CASE, "step", measure.machine() | {"run": "a"})
    times = {"median_ms": 2.0, "q1_ms": 1.0, "q3_ms": 3.0, "ns_per_edge": 5.0, "edges_per_s": 2e8, "edges": 100}
    return {**row, **times, "peak_mib": 1.0, "bytes_per_edge": 3.0, "process_mib": 30.0, "error": 1e-7, **changes}


def test_ratios_are_against_the_same_table_and_run() -> None:
    rows = [
        made(),
        made(peer="pyg", median_ms=50.0),
        made(group="1 %", median_ms=1.0),
        made(peer="pyg", group="1 %", median_ms=None),
        made(peer="csr", group="1 %", median_ms=3.0),
        made(peer="pyg", run="b"),
    ]
    assert [report.ratio(row, rows) for row in rows] == [1, 25, 1, None, 3, None]
    grown = [
        made(suite="growth", peer="layer", tokens=tokens, ns_per_edge=time) for tokens, time in ((64, 5.0), (128, 10.0))
    ]
    assert [report.ratio(row, grown) for row in grown] == [1, 2]


def test_plots_need_two_points(tmp_path: Path) -> None:
    rows = [made(stage=stage, density=density) for stage in ("forward", "step") for density in (0.05, 0.1)]
    rows += [made(suite="layers", stage="step", blocks=4)]
    rows += [made(suite="growth", peer="layer", tokens=tokens) for tokens in (64, 128)]
    assert {path.name for path in report.plot(rows, tmp_path)} == {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"kernels_n70.png", "growth.png"}


def test_parser_and_suites_know_the_same_peers() -> None:
    assert {suite: tuple(peers) for suite, peers in measure.SUITES.items()} == program.PEERS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("speed", "invalid choice: 'speed'"),
        ("kernels --peers nobody", "invalid choice: 'nobody'"),
        ("kernels --tokens 0", "Expected 'tokens', 'densities', 'blocks' and 'seconds' above 0"),
        ("kernels --densities 90", "densities of at most 60 percent"),
        ("kernels --fast", "unrecognized arguments: --fast"),
        ("report nowhere", "Expected 'rows' to be files of measurements (got nowhere). Measure first."),
        ("learning run --only nothing", "Expected 'only' to name runs of 'run' (got ['nothing'])"),
    ],
)
def test_bad_command_lines(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_over_its_cap_is_stopped() -> None:
    """In a process of its own: the answer in time, no answer, and nothing left behind."""
    worker = measure.Worker("samplers", "dense", dataclasses.replace(CASE, tokens=1500), threads=1, memory=2**36)
    try:
        error, facts = worker.ask(120, measure._check)
        assert error < samplers.DEVIATIONS
        assert facts["density"] == pytest.approx(CASE.density, rel=0.1)
        with pytest.raises(measure.Failed, match=r"over the cap \(0 s\)"):
            worker.ask(0.01, measure._time, "sample", 1000, False)
    finally:
        worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process, 0)


def test_slow_peers_are_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """One call takes an hour, and the second stage never answers."""

        def __init__(self, *_: object) -> None:
            pass

        def ask(self, cap: float, what: object, *arguments: object) -> Any:
            if what is measure._check:
                return 0.0, {}
            if arguments[0] == "step":
                raise measure.Failed("over the cap (35 s)")
            return 3600.0, 1000, 0, 0

        def stop(self) -> None:
            pass

    monkeypatch.setattr(measure, "Worker", Slow)
    rows = measure.measure("kernels", "N = 70", [("pyg", CASE)], 15.0, measure.machine())
    assert [row["status"] for row in rows] == ["over the cap (15 s): one call took 3.6e+03 s", "over the cap (35 s)"]
    assert all(row["median_ms"] is None for row in rows)
    assert "over the cap" in report.as_markdown(rows)
