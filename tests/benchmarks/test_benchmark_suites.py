"""The benchmarks: every peer is right, wrong ones are rejected, and a run leaves rows and tables."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as program
from examples.benchmarks import graphs, kernels, measure, report, samplers, sources, steps, trained
from examples.benchmarks.kernels import Case
from examples.common import attention, gate
from examples.common.gate import Rejected
from examples.common.tables import read
from sbm_pyg import AttentionGraph, FullAttention, Tokens, patterns
from sbm_pyg.ops import tiles

CASE = Case(tokens=70, blocks=4, density=0.2, seed=1, channels=8)
RUNS = {
    "kernels": ["ours", "sdpa-masked", "wrong"], "samplers": ["bernoulli", "dense", "wrong"],
    "layers": ["sbm", "dense", "wrong"], "growth": ["sampling", "layer", "recall-1"],
    "lengths": ["default", "dense"], "trained": [*trained.PEERS], "steps": [*steps.STEPS], "sources": [*sources.LAWS],
    "graph": [*graphs.ONE], "graphs": [*graphs.BATCH], "features": ["ours", "pyg"],
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=RUNS)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], Path]:
    """A tiny run of one suite: its name, its command and its folder."""
    folder = tmp_path_factory.mktemp("run")
    words = [
        request.param,
        "--output",
        str(folder),
        "--seconds",
        "9",
        "--peers",
        *RUNS[request.param],
        "--tokens",
        "64",
    ]
    if request.param == "trained":
        words += ["128", "--layers", "recall-1"]
    elif request.param in ("growth", "sources"):
        words += ["128"]
    elif request.param in ("kernels", "samplers", "layers", "lengths", "steps"):
        words += ["--densities", "10", "20"]
    if request.param in ("samplers", "layers", "growth", "lengths"):
        words += ["--blocks", "8"]
    assert program.main(words) == 0
    return request.param, words, folder


# ------------------------------------------------------------------ the peers


@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if name not in program.EXTRA])
def test_attention_peers_are_right(name: str) -> None:
    work = kernels.KERNELS[name].build(CASE)
    assert 0 <= work.check() < gate.TOLERANCE
    assert len({call() for call in work.calls.values()}) == 1  # all stages work on the same edges


@pytest.mark.parametrize("name", [name for name in samplers.SAMPLERS if name != "wrong"])
def test_samplers_are_right(name: str) -> None:
    work = samplers.SAMPLERS[name].build(CASE)
    assert 0 <= work.check() < samplers.DEVIATIONS
    assert work.facts["sampled"] == pytest.approx(work.facts["expected"], rel=0.2)
    assert work.calls["sample"]() > 0


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("layers", "sbm"),
        ("layers", "dense"),
        ("lengths", "default"),
        ("lengths", "indexer-2x8"),
        ("lengths", "dense"),
        ("growth", "sampling"),
        ("growth", "layer"),
        ("growth", "recall-2"),
        ("graph", "learned"),
        ("features", "ours"),
        *(("trained", name) for name in trained.PEERS),
    ],
)  # fmt: skip
def test_layers_are_right(suite: str, name: str) -> None:
    work = measure.SUITES[suite][name].build(dataclasses.replace(CASE, layer="recall-2"))
    assert work.check() < samplers.DEVIATIONS
    assert all(call() > 0 for call in work.calls.values())


def test_wrong_results_are_rejected() -> None:
    with pytest.raises(Rejected, match="its output is off by"):
        kernels.KERNELS["wrong"].build(CASE).check()
    with pytest.raises(Rejected, match=r"its density is off by \d+\.\d standard deviations"):
        samplers.SAMPLERS["wrong"].build(dataclasses.replace(CASE, tokens=400)).check()
    with pytest.raises(Rejected, match="its output is off by"):
        samplers.LAYERS["wrong"].build(CASE).check()


def test_a_source_that_depends_on_its_parts_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tokens: Tokens) -> AttentionGraph:
        return patterns.window(tokens.num_queries, 1 + (tiles.SCORES_PER_TILE["cpu"] < 2**20))

    monkeypatch.setattr(sources, "sources", lambda n: {"lsh": wrong})
    with pytest.raises(Rejected, match="it makes other graphs with fewer rows at a time"):
        sources.SOURCES["lsh"].build(CASE).check()
    assert tiles.SCORES_PER_TILE["cpu"] > 2**20


def test_a_step_that_is_not_dense_at_a_density_of_1_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FullAttention", lambda *sizes, is_causal: FullAttention(*sizes))
    with pytest.raises(Rejected, match="its loss with dense attention is off by"):
        steps.STEPS["top-k"].build(CASE).check()


def test_graphs_of_a_batch_grow_by_equal_factors() -> None:
    sizes = graphs.sizes_of(10_000)
    assert (len(sizes), sizes[0], sizes[-1]) == (graphs.GRAPHS, graphs.LEAST, 10_000)
    assert all(1.1 < after / before < 1.2 for before, after in itertools.pairwise(sizes))


def test_a_wrong_gradient_alone_is_rejected() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, 1.0, 1.001])
    assert gate.compare({"output": (good, good)}) == 0
    with pytest.raises(Rejected, match="its key gradient is off by 1"):
        gate.compare({"output": (good, good), "key gradient": (bad, good)})
    with pytest.raises(Rejected, match="nan"):
        gate.compare({"output": (good * torch.nan, good)})
    nothing = torch.zeros(3)  # as from a graph without edges
    assert gate.compare({"output": (nothing, nothing)}) == 0
    with pytest.raises(Rejected, match="its output is off by 1"):
        gate.compare({"output": (good, nothing)})


# ------------------------------------------------------------------ a run


def test_a_run_measures_what_is_right(outcome: tuple[str, list[str], Path]) -> None:
    suite, _, folder = outcome
    rows = read(folder / "rows.csv")
    assert {row["peer"] for row in rows} == set(RUNS[suite])
    for row in rows:
        if row["peer"] == "wrong":
            assert row["status"].startswith("REJECTED")
            assert row["median_ms"] != row["median_ms"]
        else:
            assert row["status"] != row["status"]  # empty
            assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
            assert row["ns_per_edge"] == pytest.approx(1e6 * row["median_ms"] / row["edges"], rel=1e-3)
        assert all(name in row["machine"] for name in ("commit", "cores", "threads", "torch", "PyG", "numba"))


def test_the_same_command_measures_nothing_twice(
    outcome: tuple[str, list[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, words, folder = outcome
    before = (folder / "rows.csv").read_text()
    monkeypatch.setattr(measure, "measure", None)
    assert program.main(words) == 0
    shown = capsys.readouterr().out
    assert report.TITLES[suite] in shown
    assert ("| recall-1, N = 64 |" in shown) == (suite == "trained")
    assert ("its time grows as N^" in shown) == (suite in report.GROWN)
    assert all(row["label"] in shown for row in read(folder / "rows.csv"))
    assert ("REJECTED" in shown) == ("wrong" in RUNS[suite])
    assert program.main(["report", "--output", str(folder)]) == 0
    assert capsys.readouterr().out == shown
    assert (folder / "rows.csv").read_text() == before


def made(**changes: Any) -> dict[str, Any]:
    """A row that was never measured."""
    row = {"suite": "kernels", "group": "5 %", "peer": "ours", "stage": "step", "run": "a", "tokens": 70}
    return {**row, "median_ms": 2.0, "ns_per_edge": 5.0, **changes}


def test_ratios_are_against_the_same_table_and_run() -> None:
    rows = [
        made(), made(peer="pyg", median_ms=50.0), made(group="1 %", median_ms=1.0), made(peer="csr", group="1 %", median_ms=3.0),
        made(peer="pyg", run="b"), made(peer="pyg", group="1 %", median_ms=math.nan),
    ]  # fmt: skip
    assert [report.ratio(row, rows) for row in rows[:4]] == [1, 25, 1, 3]
    assert all(math.isnan(report.ratio(row, rows)) for row in rows[4:])
    grown = [
        made(suite="growth", peer="layer", tokens=tokens, ns_per_edge=time) for tokens, time in ((64, 5.0), (128, 10.0))
    ]
    assert [report.ratio(row, grown) for row in grown] == [1, 2]
    causal = [made(suite="trained", peer=peer, median_ms=ms) for peer, ms in (("fresh", 3.0), ("dense", 6.0))]
    every = [{**row, "peer": f"{row['peer']}-all", "median_ms": 2 * row["median_ms"] ** 2} for row in causal]
    assert [report.ratio(row, causal + every) for row in causal + every] == [0.5, 1, 0.25, 1]


def test_the_power_by_which_a_time_grows() -> None:
    rows = [made(label="a", tokens=2**n, median_ms=3.0 * 2 ** (1.5 * n)) for n in range(4)]
    rows += [made(label="b", tokens=n, median_ms=math.nan) for n in (1, 2)]
    assert report._exponents(rows) == ["* a: its time grows as N^1.50."]


def test_a_trained_layer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its edges against their probabilities, and its outputs against those over the same edges."""
    case = dataclasses.replace(CASE, tokens=512, layer="recall-1")
    right = trained._mask

    def more(graph: Any, rows: Any, kept: Any = None) -> Any:
        mask = right(graph, rows, kept)
        return mask if kept is not None else mask | (torch.rand(mask.shape) < 0.1)

    with monkeypatch.context() as patch:
        patch.setattr(trained, "_mask", more)
        with pytest.raises(Rejected, match="its density is off by"):
            trained.PEERS["trained"].build(case).check()
    conv, x = trained.take("recall-1", 512)
    with monkeypatch.context() as patch:
        attend = conv.attend
        patch.setattr(conv, "attend", lambda query, *rest, **options: attend(1.01 * query, *rest, **options))
        with pytest.raises(Rejected, match="its output is off by"):
            trained._check_rows(conv, x, {})


def test_suites_have_titles() -> None:
    assert measure.SUITES.keys() == measure.STAGES.keys() == report.TITLES.keys()


def test_slow_and_broken_peers_are_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> kernels.Work:
        raise RuntimeError("no such operation")

    monkeypatch.setitem(kernels.KERNELS, "pyg", kernels.Peer("broken", broken))
    rows = measure.measure("kernels", "N = 70", ["ours", "pyg"], CASE, 1e-9)
    assert rows[0]["status"].startswith("over the cap (1e-09 s): one call took ")
    assert rows[2]["status"] == "failed: RuntimeError: no such operation"
    assert all(row["median_ms"] == "" for row in rows)


def test_one_command_measures_all_tables_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def note(options: Any) -> list[Any]:
        asked.append(options)
        return []

    monkeypatch.setattr(program, "measure_all", note)
    assert program.main(["all", "--seconds", "2", "--output", str(tmp_path)]) == 0
    assert [options.suite for options in asked] == [*program.PAGE]
    assert {(options.seconds, options.output) for options in asked} == {(2.0, tmp_path)}
    suites = {options.suite: options for options in asked}
    assert suites["lengths"].blocks == [64, 32]
    assert suites["lengths"].tokens == [256, 512, 1024, 4096]
    assert suites["trained"].layers == [*report.TRAINED]
