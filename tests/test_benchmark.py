"""The benchmark: every peer is right, wrong ones are rejected, and a run leaves tables, rows, plots and a page."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark
import benchmark_peers as peers
import benchmark_samplers as samplers
from benchmark_peers import Case, Rejected
from benchmark_report import TITLES, tables
from benchmark_worker import Failed, Worker
from sbm_pyg import SBMHead

SCRIPT = Path(benchmark.__file__)
SUITES = ("attention", "sampling", "layer", "growth")
CHOSEN = ["ours", "sdpa-masked", "pyg-tuned", "bernoulli", "networkx", "sbm", "sampling", "layer", "dense"]
CASE = Case(tokens=70, heads=2, channels=8, blocks=4, density=0.2, seed=1)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    prepared = dataclasses.replace(CASE, file=tmp_path_factory.mktemp("benchmark") / "case.pt")
    peers.prepare_attention(prepared)
    return prepared


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """All suites in one quick run, which starts its processes once."""
    folder = tmp_path_factory.mktemp("run")
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning",
        str(SCRIPT),
        *SUITES,
        "--quick",
        "--wrong",
        "--threads",
        "1",
        "--peers",
        *CHOSEN,
    ]
    command += ["--growth-tokens", "64", "128", "--repeats", "2"]
    command += ["--json", str(folder / "rows.jsonl"), "--plots", str(folder / "plots"), "--markdown", str(folder / "page.md")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300), folder


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ the peers


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", [name for name, peer in peers.ATTENTION.items() if not peer.compiled])
def test_attention_peers_are_right(name: str, case: Case) -> None:
    if name == "dgl":
        pytest.importorskip("dgl", exc_type=ImportError)
    work = peers.ATTENTION[name].build(case)
    assert 0 <= work.check() < peers.TOLERANCE
    assert len({call() for call in work.calls.values()}) == 1  # all stages work on the same edges


@pytest.mark.parametrize("name", samplers.SAMPLING)
def test_samplers_are_right(name: str) -> None:
    if name == "igraph":
        pytest.importorskip("igraph")
    work = samplers.SAMPLING[name].build(CASE)
    assert 0 <= work.check() < samplers.DEVIATIONS
    assert work.facts["density"] == pytest.approx(work.facts["expected_density"], rel=0.2)
    assert work.calls["sample"]() > 0


@pytest.mark.parametrize("peer", [*samplers.LAYER.values(), *samplers.GROWTH.values()], ids=lambda peer: peer.label)
def test_layers_are_right(peer: peers.Peer) -> None:
    work = peer.build(CASE)
    assert work.check() < samplers.DEVIATIONS
    assert work.calls["step"]() > 0


def test_wrong_results_are_rejected(case: Case) -> None:
    with pytest.raises(Rejected, match="its output is off by"):
        peers.WRONG_ATTENTION.build(case).check()
    with pytest.raises(Rejected, match=r"its density is off by \d+\.\d standard deviations"):
        samplers.WRONG_SAMPLER.build(dataclasses.replace(CASE, tokens=400)).check()
    with pytest.raises(Rejected, match="its output is off by"):
        samplers.WRONG_LAYER.build(CASE).check()


def test_a_wrong_gradient_alone_is_rejected() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, 1.0, 1.001])
    assert peers.compare({"output": (good, good)}) == 0
    with pytest.raises(Rejected, match="its key gradient is off by 1"):
        peers.compare({"output": (good, good), "key gradient": (bad, good)})
    with pytest.raises(Rejected, match="nan"):
        peers.compare({"output": (good * torch.nan, good)})


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.25, 0.6])
def test_density_can_be_set(density: float) -> None:
    torch.manual_seed(0)
    head = SBMHead(32, 2, 128)
    samplers.set_density(head, density)
    sbm = head(torch.randn(2, 100, 32), torch.randn(2, 100, 32))
    assert sbm.expected_density().flatten().tolist() == pytest.approx([density, density], rel=0.05)


# ------------------------------------------------------------------ a run


def test_quick_run_ends_well(outcome: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    process, _ = outcome
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert "Warning" not in process.stderr


@pytest.mark.parametrize("suite", SUITES)
def test_quick_run_measures(suite: str, outcome: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    process, folder = outcome
    rows = [row for row in read(folder) if row["suite"] == suite]
    good, wrong = [row for row in rows if row["peer"] != "wrong"], [row for row in rows if row["peer"] == "wrong"]
    names = {"attention": CHOSEN[:3], "sampling": ["bernoulli", "dense", "networkx"], "layer": ["sbm", "dense"]}
    assert {row["peer"] for row in good} == set(names.get(suite, ["sampling", "layer", "dense"]))
    for row in good:
        assert row["status"] == ""
        assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert row["repeats"] == 2
        assert row["edges"] > 0
        assert row["ratio"] > 0
        assert row["ns_per_edge"] == pytest.approx(1e6 * row["median_ms"] / row["edges"], rel=1e-3)
        assert row["peak_mib"] >= 0
        assert row["process_mib"] > 20
        assert {"cpu", "cores", "threads", "torch", "torch_geometric", "numba", "commit", "date", "host"} <= row.keys()
    assert wrong
    for row in wrong:
        assert row["status"].startswith("REJECTED")
        assert row["median_ms"] is None
    title = next(iter(tables(rows)))[0]
    assert title in process.stdout
    assert process.stdout.count("REJECTED") >= 4


def test_quick_run_draws_and_writes(outcome: tuple[subprocess.CompletedProcess[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    process, folder = outcome
    assert [path.name for path in (folder / "plots").iterdir()] == ["growth_over_tokens.png"]  # of the others there is one point
    page = (folder / "page.md").read_text()
    assert all(page.count(f"## {TITLES[suite]}\n") == 1 for suite in SUITES)
    widths = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert len(widths) > 18
    assert benchmark.main(["--replay", str(folder / "rows.jsonl")]) == 0
    replayed = capsys.readouterr().out
    assert all(line in process.stdout for line in replayed.splitlines() if "sbm_pyg" in line)


def test_plots_have_a_line_for_each_peer(outcome: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path) -> None:
    rows = read(outcome[1])
    denser = [{**row, "density": 2 * row["density"]} for row in rows]
    longer = [{**row, "tokens": 2 * row["tokens"]} for row in rows + denser if row["suite"] != "growth"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + denser + longer))
    assert benchmark.main(["--replay", str(tmp_path / "rows.jsonl"), "--plots", str(tmp_path / "plots")]) == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    crossed = {f"{suite}_over_{axis}.png" for suite in ("attention", "sampling_k8", "layer") for axis in ("density", "tokens")}
    assert drawn == {*crossed, "growth_over_tokens.png"}


def test_ratios_are_against_the_same_table() -> None:
    shared = {"suite": "attention", "run": "a", "stage": "step", "ns_per_edge": 1.0, "ratio": None}
    rows = [
        {**shared, "peer": peer, "group": group, "median_ms": time}
        for peer, group, time in (
            ("ours", "5 %", 2.0),
            ("pyg", "5 %", 50.0),
            ("ours", "1 %", 1.0),
            ("pyg", "1 %", None),
            ("csr", "1 %", 3.0),
        )
    ]
    benchmark.add_ratios(rows)
    assert [row["ratio"] for row in rows] == [1, 25, 1, None, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "speed"], "expected SUITE to be one of attention, sampling, layer, growth (got speed)"),
        (["--peers", "nobody"], "expected --peers among"),
        (["--tokens", "0"], "expected --tokens to be positive (got [0])"),
        (["--densities", "90"], "expected --densities of at most 60 percent (got 90)"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert message in capsys.readouterr().err


def test_a_worker_over_its_cap_is_stopped() -> None:
    """In a process of its own: the answer in time, no answer, and nothing left behind."""
    worker = Worker("sampling", "dense", dataclasses.replace(CASE, tokens=1500), {}, threads=1, memory=100)
    try:
        error, facts = worker.ask(120, "check")
        assert error < samplers.DEVIATIONS
        assert facts["density"] == pytest.approx(CASE.density, rel=0.1)
        with pytest.raises(Failed, match=r"over the cap \(0 s\)"):
            worker.ask(0.01, "time", "sample", 1000, False)
    finally:
        worker.stop()
    assert not worker.process.is_alive()
    with pytest.raises(Failed, match="died"):
        worker.ask(1, "check")


def test_slow_peers_are_not_tried_at_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Worker):
        """One call takes an hour, and the second stage never answers."""

        def __init__(self, *_: object) -> None:
            self.alive = True

        def ask(self, cap: float, what: str, *arguments: object) -> Any:
            if what == "check":
                return 0.0, {}
            if arguments[0] == "step":
                raise Failed("over the cap (35 s)")
            return 3600.0, 1000, 0, 0

        def stop(self) -> None:
            self.alive = False

    monkeypatch.setattr(benchmark, "Worker", Slow)
    bench = benchmark.Bench(benchmark.parse(["--no-compile"]), {})
    monkeypatch.setattr(bench, "_prepare", lambda entry: "")
    for tokens in (100, 200):
        case = dataclasses.replace(CASE, tokens=tokens)
        bench.run([benchmark.Entry("attention", "pyg", case, f"N = {tokens}"), benchmark.Entry("layer", "sbm", case, f"N = {tokens}")])
    statuses = [(row["peer"], row["stage"], row["status"]) for row in bench.rows]
    assert statuses[:3] == [
        ("pyg", "forward", "over the cap (15 s): one call took 3.6e+03 s"),
        ("pyg", "step", "over the cap (35 s)"),
        ("sbm", "step", "over the cap (35 s)"),
    ]
    assert {status for _, _, status in statuses[3:]} == {"skipped: too much at a smaller size"}
    assert all(row["median_ms"] is None for row in bench.rows)
    assert "over the cap" in benchmark.as_text(*next(iter(tables(bench.rows))))
