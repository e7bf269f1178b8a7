"""Hamiltonian paths against Held-Karp, conditions against brute force, statistics against networkx."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numba
import numba.core.event
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.csgraph
import scipy.sparse.linalg
import scipy.stats
import torch
from problems import GRAPHS, brute_force, held_karp, on_threads, random_graph, refuses

from sbm_pyg import SBM, AttentionGraph, analysis, sample_edges
from sbm_pyg.analysis import (
    Certificate,
    HamiltonianPath,
    communities_of,
    conditions,
    expected_graph,
    graph_statistics,
    hamiltonian,
    hamiltonian_path,
    is_hamiltonian_path,
    lemma2,
    spread_steps,
    to_networkx,
)
from sbm_pyg.analysis.walks import match
from sbm_pyg.ops import checks
from sbm_pyg.sources import patterns

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------- Hamiltonian paths


def digraph(arcs: np.ndarray) -> AttentionGraph:
    """The graph with an edge from i to j where ``arcs[i, j]``."""
    return AttentionGraph.from_dense(torch.from_numpy(np.ascontiguousarray(arcs.T)))


def assert_certified(certificate: Certificate, graph: AttentionGraph) -> None:
    """Checks a certificate with networkx alone."""
    arcs = graph.to_networkx()
    arcs.remove_edges_from([*nx.selfloop_edges(arcs)])
    tokens, others = set(certificate.tokens), set(certificate.others)
    if certificate.kind in ("sources", "sinks"):
        assert len(tokens) == 2
        assert all(
            (arcs.in_degree if certificate.kind == "sources" else arcs.out_degree)(token) == 0 for token in tokens
        )
    elif certificate.kind == "incomparable":
        a, b = certificate.tokens
        assert not nx.has_path(arcs, a, b)
        assert not nx.has_path(arcs, b, a)
    elif certificate.kind in ("predecessors", "separator"):
        components = nx.condensation(arcs)
        rank = {component: place for place, component in enumerate(nx.topological_sort(components))}
        of = {token: rank[component] for token, component in components.graph["mapping"].items()}
        arcs.remove_edges_from([(a, b) for a, b in arcs.edges if of[b] - of[a] > 1])
        if certificate.kind == "predecessors":
            assert {a for token in tokens for a in arcs.predecessors(token)} <= others
            assert len(others) <= len(tokens) - 2
        else:
            arcs.remove_nodes_from(tokens)
            parts = [*nx.weakly_connected_components(arcs)]
            assert len(parts) >= len(others) >= 3
            assert all(len(part & others) <= 1 for part in parts)
    else:
        assert certificate.kind == "search"


def random_digraphs(count: int, seed: int) -> Iterable[np.ndarray]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        n = int(random.integers(4, 10))
        yield random.random((n, n)) < random.uniform(0.1, 0.6)


@pytest.mark.slow
def test_held_karp_agrees_on_1000_digraphs_and_none_is_unknown() -> None:
    methods: Counter[tuple[str, str]] = Counter()
    for arcs in random_digraphs(1000, seed=1):
        graph = digraph(arcs)
        answer = hamiltonian_path(graph)
        assert answer.status == ("FOUND" if held_karp(arcs) else "ABSENT")
        if answer.path is not None:
            assert sorted(answer.path) == [*range(len(arcs))]
            assert all(arcs[a, b] for a, b in itertools.pairwise(answer.path))
            assert answer.certificate is None
        else:
            assert answer.certificate is not None
            assert_certified(answer.certificate, graph)
        methods[answer.status, "" if answer.certificate is None else answer.certificate.kind] += 1
    assert len(methods) == 7, methods  # found, and all six kinds of certificate


def test_the_only_path_of_a_graph_without_cycles_needs_no_search() -> None:
    order = np.random.default_rng(0).permutation(8)
    arcs = np.zeros((8, 8), dtype=bool)
    arcs[np.ix_(order, order)] = np.triu(np.ones((8, 8), dtype=bool), 1)
    answer = hamiltonian_path(digraph(arcs))
    assert (answer.status, answer.method) == ("FOUND", "components")
    assert answer.path == tuple(order)


@pytest.mark.slow
def test_exact_search_alone_agrees_with_held_karp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_construct", "_matching", "_separator"):
        monkeypatch.setattr(hamiltonian, name, lambda *given: None)
    methods: Counter[tuple[str, str]] = Counter()
    for arcs in random_digraphs(400, seed=2):
        answer = hamiltonian_path(digraph(arcs))
        assert answer.status == ("FOUND" if held_karp(arcs) else "ABSENT")
        methods[answer.status, answer.method] += 1
    assert methods["FOUND", "OR-tools"] > 20
    assert methods["ABSENT", "OR-tools"] > 5


def planted(n: int, degree: float, seed: int) -> AttentionGraph:
    """A random graph with a Hamiltonian path through tokens in random order."""
    random = np.random.default_rng(seed)
    arcs = random.random((n, n)) < (degree - 1) / n
    order = random.permutation(n)
    arcs[order[:-1], order[1:]] = True
    return digraph(arcs)


@pytest.mark.parametrize("degree", [pytest.param(12, marks=pytest.mark.slow), 6, 3])
def test_planted_paths_are_found(degree: float, record_property: Any) -> None:
    hamiltonian_path(planted(64, 12, seed=0))  # compiles
    for seed in range(3):
        graph = planted(2048, degree, seed)
        answer = hamiltonian_path(graph)
        assert answer.status == "FOUND"
        assert answer.path is not None
        assert is_hamiltonian_path(graph, answer.path)
        record_property("seconds", answer.seconds)
        print(f"N = 2048, mean degree {degree}: {answer.seconds:.3f} s")


@pytest.mark.parametrize(("kind", "axis"), [("sources", 0), ("sinks", 1)])
def test_a_certificate_names_two_of_many_tokens_without_edges(kind: str, axis: int) -> None:
    mask = torch.ones(1, 6, 6, dtype=torch.bool).index_fill(axis + 1, torch.tensor([1, 3, 4]), False)
    certificate = hamiltonian_path(AttentionGraph.from_dense(mask)).certificate
    assert certificate is not None
    assert (certificate.kind, certificate.tokens) == (kind, (1, 3))


def test_two_tokens_between_the_first_and_the_last_are_incomparable() -> None:
    arcs = np.zeros((5, 5), bool)
    arcs[[0, 1, 1, 2, 3], [1, 2, 3, 4, 4]] = True
    graph = digraph(arcs)
    certificate = hamiltonian_path(graph).certificate
    assert certificate is not None
    assert (certificate.kind, {*certificate.tokens}) == ("incomparable", {2, 3})
    assert_certified(certificate, graph)


def test_a_disconnected_graph_is_absent_with_a_certificate() -> None:
    halves = [random_graph(1, 1024, 1024, 12 / 1024, seed) | patterns.window(1024, 1) for seed in (0, 1)]
    graph = AttentionGraph.from_edge_index(AttentionGraph.concatenate(halves).edge_index, 2048, 2048)
    answer = hamiltonian_path(graph)
    assert answer.status == "ABSENT"
    assert answer.certificate is not None
    assert answer.certificate.kind == "incomparable"
    assert_certified(answer.certificate, graph)
    print(f"N = 2048, disconnected: {answer.seconds:.3f} s")


def star(leaves: int, length: int) -> AttentionGraph:
    """Chains of tokens that meet in token 0, edges both ways."""
    ends = [
        (0 if place == 0 else 1 + leaf * length + place - 1, 1 + leaf * length + place)
        for leaf in range(leaves)
        for place in range(length)
    ]
    edges = torch.tensor(ends).T
    return AttentionGraph.from_edge_index(torch.cat([edges, edges.flip(0)], 1))


NAMED: dict[str, tuple[AttentionGraph, str]] = {
    "one token": (GRAPHS["one edge"], "FOUND"),
    "one token without an edge": (AttentionGraph.from_dense(torch.zeros(1, 1)), "FOUND"),
    "two tokens, no edge": (AttentionGraph.from_dense(torch.eye(2)), "ABSENT"),
    "two tokens, back": (AttentionGraph.from_dense(torch.tensor([[0, 1], [0, 0]])), "FOUND"),
    "full": (patterns.full(30), "FOUND"),
    "causal": (patterns.window(30, 30, is_causal=True), "FOUND"),
    "two heads, even and odd": (
        AttentionGraph.from_dense(
            torch.stack([torch.diag((torch.arange(9) % 2 == head).float(), -1) for head in (0, 1)])
        ),
        "FOUND",
    ),
    "two ends that must be ends": (  # a source, a clique, a sink
        AttentionGraph.from_edge_index(
            torch.cat([patterns.full(20).edge_index, torch.tensor([[20, 7], [3, 21]])], 1), 22, 22
        ),
        "FOUND",
    ),
    "three chains that meet": (star(3, 2), "ABSENT"),
    "relays without blocks": (patterns.relay_keys(20, 3) | patterns.relay_queries(20, 3), "ABSENT"),
    "shuffled blocks and relays": (
        AttentionGraph.from_edge_index(
            torch.randperm(200, generator=torch.Generator().manual_seed(0))[
                (
                    patterns.block_diagonal(200, 8) | patterns.relay_keys(200, 8) | patterns.relay_queries(200, 8)
                ).edge_index
            ]
        ),
        "FOUND",
    ),
    "shuffled window": (
        AttentionGraph.from_edge_index(
            torch.randperm(500, generator=torch.Generator().manual_seed(0))[patterns.window(500, 3).edge_index]
        ),
        "FOUND",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_graphs(name: str) -> None:
    graph, status = NAMED[name]
    answer = hamiltonian_path(graph)
    assert answer.status == status
    if answer.path is not None:
        assert is_hamiltonian_path(graph, answer.path)
    else:
        assert answer.certificate is not None
        assert_certified(answer.certificate, graph)
    assert str(answer).startswith(status)


def lattice(rows: int, columns: int, without: tuple[tuple[int, int], ...] = ()) -> AttentionGraph:
    """A grid, edges both ways, its tokens in random order."""
    grid = nx.grid_2d_graph(rows, columns)
    grid.remove_nodes_from(without)
    order = np.random.default_rng(0).permutation(len(grid)).tolist()
    return AttentionGraph.from_networkx(nx.relabel_nodes(grid, dict(zip(grid, order, strict=True))))


def test_matchings_equal_enumeration() -> None:
    """A matching is as large as Hall's theorem allows: all tokens, less those of a set that are more than its keys."""
    certified = 0
    for arcs in random_digraphs(200, seed=3):
        n, graph = len(arcs), digraph(arcs)
        keys = [sum(1 << int(i) for i in np.flatnonzero(row)) for row in arcs.T]
        reach = [0] * (1 << n)  # all keys of a set of queries
        for some in range(1, 1 << n):
            reach[some] = reach[some & (some - 1)] | keys[(some & -some).bit_length() - 1]
        largest = n - max(some.bit_count() - reach[some].bit_count() for some in range(1 << n))
        mate, follower = np.empty((2, n), np.int32)
        match(graph.rowptr.numpy(), graph.col.numpy(), mate, follower)
        queries = np.flatnonzero(mate >= 0)
        assert len(queries) == largest == (follower >= 0).sum()
        assert arcs[mate[queries], queries].all()
        assert (follower[mate[queries]] == queries).all()
        certificate = hamiltonian._matching(n, graph.col.numpy(), graph.edge_index[1].numpy())
        assert (certificate is None) == (largest >= n - 1)
        if certificate is not None:
            certified += 1
            assert set(np.flatnonzero(arcs[:, certificate.tokens].any(1)).tolist()) <= {*certificate.others}
            assert len(certificate.others) <= len(certificate.tokens) - 2
    assert certified > 20


@pytest.mark.parametrize("shape", [(100, 100), (101, 101), (2, 5000), (1, 10000)], ids=str)
def test_matchings_of_shuffled_lattices_take_few_phases(shape: tuple[int, int]) -> None:
    """scipy's algorithm takes minutes for 100 x 100 tokens. Hopcroft and Karp's bound is 2 sqrt(n) + 1 phases."""
    graph = lattice(*shape)
    n = graph.num_queries
    mate, follower = np.empty((2, n), np.int32)
    assert match(graph.rowptr.numpy(), graph.col.numpy(), mate, follower) <= 2 * math.isqrt(n) + 1
    assert (mate < 0).sum() == n % 2


def test_a_lattice_with_two_tokens_too_many_of_a_color_is_absent() -> None:
    graph = lattice(31, 31, without=((4, 3),))
    answer = hamiltonian_path(graph)
    assert answer.certificate is not None
    assert (answer.certificate.kind, len(answer.certificate.tokens)) == ("predecessors", 481)
    assert_certified(answer.certificate, graph)


def test_a_shuffled_lattice_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scipy's assignment begins with, the first arc of each row, is a matching; from others it takes minutes."""
    assign, given = scipy.sparse.csgraph.min_weight_full_bipartite_matching, []

    def watched(weights: Any) -> Any:
        given.append(weights)
        return assign(weights)

    monkeypatch.setattr(scipy.sparse.csgraph, "min_weight_full_bipartite_matching", watched)
    answer = hamiltonian_path(lattice(100, 100), time_limit=0.2)
    assert answer.status == "UNKNOWN"
    assert given
    for one in given:
        assert len(np.unique(one.indices[one.indptr[:-1]])) == one.shape[0] == 10001


def test_assignments_are_those_of_scipy() -> None:
    random = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        weights = scipy.sparse.random_array((8, 8), density=0.4, format="csr", rng=random)
        try:
            wanted = scipy.sparse.csgraph.min_weight_full_bipartite_matching(weights)[1].tolist()
        except ValueError:
            assert hamiltonian._assignment(weights) is None
        else:
            found += 1
            follow = hamiltonian._assignment(weights)
            assert follow is not None
            assert follow.tolist() == wanted
    assert 20 < found < 180


def test_same_seed_gives_the_same_path() -> None:
    graph = planted(300, 8, seed=0)
    assert (
        hamiltonian_path(graph, seed=5).path
        == hamiltonian_path(graph, seed=5).path
        != hamiltonian_path(graph, seed=6).path
    )


def test_unknown_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hamiltonian, "_construct", lambda *given: None)
    graph = planted(512, 8, seed=0)
    answer = hamiltonian_path(graph, time_limit=0.03)
    assert (answer.status, answer.path, answer.certificate) == ("UNKNOWN", None, None)
    assert "the construction failed, and " in str(answer)
    answer = hamiltonian_path(graph, time_limit=0.09)
    assert answer.status == "UNKNOWN"
    assert str(answer).endswith("neither the construction nor OR-tools finished")
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    answer = hamiltonian_path(graph)
    assert answer.status == "UNKNOWN"
    assert str(answer).endswith("an exact search needs OR-tools: " + checks.install("analysis"))


EIGHT = [
    [2, 4, 5, 0, 4, 1, 3, 6, 0, 2, 3, 4, 1, 6],
    [0, 2, 2, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7],
]  # tokens that only an exhaustive search decides


def test_an_import_does_not_take_the_time_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens that only an exhaustive search decides, in a process that takes 100 s to import OR-tools."""
    now, get = [0.0], builtins.__import__

    def slow(name: str, *given: Any, **options: Any) -> Any:
        now[0] += 100 * name.startswith("ortools.sat")
        return get(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", slow)
    monkeypatch.setattr(hamiltonian, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    answer = hamiltonian_path(AttentionGraph.from_edge_index(torch.tensor(EIGHT)), time_limit=1.0)
    assert (answer.status, answer.method) == ("ABSENT", "OR-tools")
    assert answer.seconds >= 100


def test_a_compilation_does_not_take_the_time_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eight tokens again, where one kernel takes 100 s to compile; and steps within a tenth of a second, with a kernel that is compiled anew."""
    now, kernel = [0.0], hamiltonian.parts_without

    def compiles(*given: Any) -> None:
        with numba.core.event.trigger_event("numba:compile", data={"dispatcher": None}):
            now[0] += 100
        kernel(*given)

    with monkeypatch.context() as patched:
        patched.setattr(hamiltonian, "parts_without", compiles)
        patched.setattr(hamiltonian, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        patched.setattr(numba.core.event, "timer", lambda: now[0])
        answer = hamiltonian_path(AttentionGraph.from_edge_index(torch.tensor(EIGHT)), time_limit=1.0)
    assert (answer.status, answer.method) == ("ABSENT", "OR-tools")
    assert answer.seconds < 1

    step: Any = conditions.spread_step
    monkeypatch.setattr(conditions, "spread_step", numba.njit(step.py_func))
    start = time.perf_counter()
    assert spread_steps([patterns.window(40, 1)], time_limit=0.1) == 39
    assert time.perf_counter() - start > 0.1  # or this shows nothing


def test_truth_is_the_answer_and_an_error_where_there_is_none() -> None:
    assert hamiltonian_path(patterns.full(3))
    assert not hamiltonian_path(star(3, 2))
    assert analysis.universality(patterns.full(3))
    assert not analysis.universality(star(3, 2), self_loops=True)
    unknown = HamiltonianPath("UNKNOWN", None, None, "nothing", 0.0)
    with pytest.raises(
        ValueError, match=r"Expected 'status' to be 'FOUND' or 'ABSENT' .* \(got 'UNKNOWN'\)\. Read `.status`, or raise"
    ):
        bool(unknown)
    report = dataclasses.replace(analysis.universality(patterns.full(3)), hamiltonian=unknown)
    with pytest.raises(
        ValueError,
        match=r"Expected 'holds' to be True or False .* \(got None\)\. Read `.holds`, or raise `time_limit`\.",
    ):
        bool(report)
    assert not dataclasses.replace(report, s=math.inf)  # one condition that fails is enough


@pytest.mark.slow
def test_without_scipy_each_function_that_needs_it_says_so() -> None:
    """In a process of its own, where no module has imported it before."""
    code = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "scipy":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
import torch
from sbm_pyg import AttentionGraph, SBM, analysis
graph = AttentionGraph.from_edge_index(torch.tensor([[0, 1, 0, 2, 3, 0], [1, 0, 2, 0, 0, 3]]))
sbm = SBM(torch.ones(1, 4, 1), torch.ones(1, 4, 1), torch.ones(1, 1, 1))
for call in (
    lambda: analysis.graph_statistics(graph), lambda: analysis.graph_statistics(graph, spectral_gap=False),
    lambda: analysis.hamiltonian_path(graph), lambda: analysis.universality(graph), lambda: analysis.universality(sbm),
    lambda: analysis.spread_steps([graph]), lambda: analysis.lemma2(6, 2).s(),
):
    try:
        call()
    except ImportError as error:
        print(error)
analysis.to_networkx(graph, sbm=sbm), analysis.expected_graph(sbm), analysis.is_hamiltonian_path(graph, [0, 1, 2, 3]), analysis.lemma2(6, 2)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500)
    line = f"Expected 'scipy' to be installed (it is not). Run {checks.install('analysis')}."
    assert found.stdout.splitlines() == [line] * 7


def test_a_wrong_path_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hamiltonian, "_construct", lambda n, *given: np.arange(n))
    refuses(lambda: hamiltonian_path(planted(50, 6, seed=0)), "is invalid. Please report this graph", AssertionError)


def test_is_hamiltonian_path() -> None:
    graph = AttentionGraph.from_edge_index(torch.tensor([[0, 2, 1], [2, 1, 3]]))
    assert is_hamiltonian_path(graph, [0, 2, 1, 3])
    for wrong in ([3, 1, 2, 0], [0, 2, 1], [0, 2, 1, 1], [0, 1, 2, 3], [0, 2, 1, 4], []):
        assert not is_hamiltonian_path(graph, wrong)
    with pytest.raises(
        TypeError, match=r"Expected 'path' to be integers \(got float64\)\. Pass the numbers of the tokens\."
    ):
        is_hamiltonian_path(graph, [0.4, 2.5, 1.0, 3.9])  # type: ignore[list-item]


# ------------------------------------------------------------------------------------------------------ universality


@pytest.mark.parametrize(("n", "num_clusters"), [(16, 4), (64, 8), (1000, 7)])
def test_lemma2_s_equals_brute_force_in_all_orders(n: int, num_clusters: int) -> None:
    lemma = lemma2(n, num_clusters)
    masks = [graph.to_dense()[0] for graph in lemma.graphs]
    for order in itertools.permutations((1, 2, 3)):
        assert lemma.s(order) == brute_force([masks[number - 1] for number in order])
    assert (lemma.s((1, 2, 3)), lemma.s((1, 3, 2))) == (5, 3)


@pytest.mark.slow
def test_lemma2_holds_for_all_small_sizes() -> None:
    for n in range(1, 25):
        for num_clusters in range(1, n + 1):
            lemma = lemma2(n, num_clusters)
            for sbm, graph in zip(lemma.sbms, lemma.graphs, strict=True):
                assert expected_graph(sbm) | patterns.self_loops(n) == graph
                assert set(sbm.edge_prob_dense().flatten().tolist()) <= {0.0, 1.0}
            assert is_hamiltonian_path(lemma.graphs[0] | lemma.graphs[1] | lemma.graphs[2], lemma.path)
            # The law of docs/analysis.md: in the order of the paper, s depends on how many communities have no relay.
            block, relays = [r * num_clusters // n for r in range(n)], range(n - num_clusters, n)
            without = num_clusters - len({block[r] for r in relays})
            only_relays = block.index(block[relays[0]]) == relays[0]  # in the communities that have any
            assert lemma.s() == (1 if num_clusters == 1 else {0: 2, 1: 3 if only_relays else 4}.get(without, 5))
            assert lemma.s((1, 3, 2)) in (1, 2, 3)


def test_s_is_finite_just_where_the_union_is_strongly_connected() -> None:
    random = np.random.default_rng(0)
    outcomes: Counter[bool] = Counter()
    for _ in range(400):
        n, count = int(random.integers(2, 10)), int(random.integers(1, 4))
        masks = [
            torch.from_numpy(random.random((n, n)) < random.uniform(0.02, 0.3)) | torch.eye(n, dtype=torch.bool)
            for _ in range(count)
        ]
        graphs = [AttentionGraph.from_dense(mask) for mask in masks]
        s = spread_steps(graphs)
        union = AttentionGraph.from_dense(torch.stack(masks).any(0))
        assert s is not None
        assert s == brute_force(masks)
        assert (s < math.inf) == nx.is_strongly_connected(union.to_networkx())
        if s < math.inf:
            assert s <= count * (n - 1) + 1
        outcomes[s < math.inf] += 1
    assert min(outcomes.values()) > 50


def test_s_without_self_loops_equals_brute_force() -> None:
    random = np.random.default_rng(1)
    finite = endless = 0
    for _ in range(300):
        n, count = int(random.integers(2, 7)), int(random.integers(1, 4))
        masks = [torch.from_numpy(random.random((n, n)) < random.uniform(0.2, 0.6)) for _ in range(count)]
        s = spread_steps([AttentionGraph.from_dense(mask) for mask in masks])
        assert s == brute_force(masks)
        finite, endless = finite + (s < math.inf), endless + (s == math.inf)
    assert min(finite, endless) > 50
    turn = AttentionGraph.from_dense(
        torch.eye(5).roll(1, 0)
    )  # strongly connected, and yet what is known only moves round
    assert spread_steps([turn]) == math.inf
    assert "the spread of information repeats without reaching all tokens" in str(analysis.universality([turn]))


@pytest.mark.parametrize("threads", [1, 2])
def test_long_ways_take_many_steps(threads: int) -> None:
    with on_threads(threads):
        assert spread_steps([patterns.window(1000, 1)]) == 999
        assert spread_steps([patterns.self_loops(300), patterns.window(300, 2)]) == 2 * 150
        clique_and_path = AttentionGraph.from_edge_index(
            torch.cat([patterns.full(200).edge_index, patterns.window(300, 1).edge_index], 1)
        )
        assert spread_steps([clique_and_path]) == 101
        assert spread_steps([patterns.window(1500, 40)]) == 38  # large enough for threads to share a step


def test_spread_gives_up_in_time() -> None:
    assert spread_steps([patterns.window(3000, 1)], time_limit=1e-4) is None
    report = analysis.universality([patterns.window(3000, 1)], time_limit=1e-3)
    assert report.s is None
    assert report.holds is None
    assert report.hamiltonian_status == "FOUND"
    assert "UNDECIDED" in str(report)
    assert "not known within the time limit" in str(report)


def test_report_gives_evidence_for_each_condition() -> None:
    lemma = lemma2(64, 8)
    report = analysis.universality(lemma.graphs)
    assert report.holds is True
    assert report.missing_self_loops == ((), (), ())
    assert report.hamiltonian_path is not None
    assert (report.hamiltonian_status, report.s, report.strongly_connected, report.unreached) == (
        "FOUND", 5, True, None,
    )  # fmt: skip
    page = str(report)
    for words in (
        "3 patterns over 64 tokens: HOLDS", "1. every token attends to itself                            yes", "FOUND",
        "after s = 5 steps", "union strongly connected                                 yes",
    ):  # fmt: skip
        assert words in page

    arcs = torch.eye(6, dtype=torch.bool)
    arcs[4, 4] = False
    arcs[:3, :3] = arcs[3:, 2:] = True
    arcs[4, 4] = False
    report = analysis.universality(AttentionGraph.from_dense(arcs))
    assert report.holds is False
    assert report.missing_self_loops == ((4,),)
    assert report.strongly_connected is False
    assert report.s == math.inf
    assert report.unreached is not None
    assert not nx.has_path(AttentionGraph.from_dense(arcs).to_networkx(), *report.unreached)
    assert f"nothing of token {report.unreached[0]} reaches token {report.unreached[1]}" in str(report)
    assert "pattern 1: 4" in str(report)


def test_absent_path_alone_makes_it_fail() -> None:
    report = analysis.universality([star(3, 1)], self_loops=True)
    assert (report.holds, report.hamiltonian_status, report.strongly_connected) == (False, "ABSENT", True)
    assert report.s == 2
    assert "with self-loops added" in str(report)
    assert "can follow only" in str(report)


def test_expectations_are_judged_by_their_threshold() -> None:
    lemma = lemma2(30, 5)
    sbms = [SBM(0.6 * sbm.query_membership, sbm.key_membership, sbm.block_matrix) for sbm in lemma.sbms]
    assert analysis.universality(sbms, self_loops=True).s == lemma.s()
    assert "expected edges, p > 0.5" in str(analysis.universality(sbms))
    assert analysis.universality(sbms, threshold=0.61, self_loops=True).s == math.inf
    assert analysis.universality([*sbms]).source == "expected edges, p > 0.5"
    assert analysis.universality([*lemma.graphs]).source == "given graphs"
    mixed = analysis.universality([sbms[0], lemma.graphs[1], lemma.graphs[2]])
    assert mixed.source == "given graphs and expected edges, p > 0.5"
    assert analysis.universality(sbms[0], threshold=0.0).edges == (180,)


def test_heads_of_a_graph_count_as_one_pattern() -> None:
    lemma = lemma2(20, 4)
    stacked = AttentionGraph.from_dense(torch.cat([graph.to_dense() for graph in lemma.graphs]))
    report = analysis.universality(stacked)
    assert report.s == 2
    assert report.edges == ((lemma.graphs[0] | lemma.graphs[1] | lemma.graphs[2]).num_edges,)
    assert analysis.universality([stacked.head(head) for head in range(3)]).s == lemma.s()


def test_expected_graph_of_ragged_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, block = (torch.rand(2, size, 3, generator=generator) for size in (9, 7, 3))
    sbm = SBM(query, key, block / 3, torch.tensor([0, 4, 9]), torch.tensor([0, 5, 7]))
    graph = expected_graph(sbm, 0.4).validate()
    for sequence in range(2):
        assert torch.equal(graph.to_dense(sequence), sbm.edge_prob_dense(sequence) > 0.4)
    assert 0 < graph.num_edges < 60


def test_the_expected_graph_of_a_strict_model_has_earlier_keys_alone() -> None:
    member, ptr = torch.ones(2, 5, 1), torch.tensor([0, 2, 5])
    causal = SBM(member, member, torch.full((2, 1, 1), 0.9), ptr, is_causal=True)
    for sbm, edges in ((causal, 2 * (3 + 6)), (causal.strict(), 2 * (1 + 3))):
        graph = expected_graph(sbm).validate()
        assert graph.num_edges == edges
        for sequence in range(2):
            assert torch.equal(graph.to_dense(sequence), sbm.edge_prob_dense(sequence) > 0.5)


# -------------------------------------------------------------------------------------------------------- statistics


STATISTICS = {
    "one head": (random_graph(1, 40, 40, 0.08, 1), None), "heads and sequences": (random_graph(2, 25, 25, 0.1, 2, sequences=3), None),
    "ragged": (GRAPHS["ragged"], None), "sparse": (random_graph(2, 30, 30, 0.03, 3), None),
    "dense": (random_graph(1, 60, 60, 0.5, 4), None), "no edges": (AttentionGraph.from_dense(torch.zeros(2, 3, 3)), None),
    "one token": (GRAPHS["one edge"], None), "bipartite": (GRAPHS["bipartite"], None),
    "bipartite in full": (GRAPHS["rows around a vector"], None),
    "square, taken as bipartite": (random_graph(2, 20, 20, 0.15, 5, sequences=2), True),
    "larger": (random_graph(1, 400, 400, 0.02, 6), None), "long": (patterns.window(600, 1), None),
    "path of blocks": (patterns.block_diagonal(90, 6) | patterns.window(90, 1), None),
}  # fmt: skip


def networkx_statistics(graph: nx.DiGraph, communities: list[set]) -> dict[str, float]:
    """The same numbers by networkx's own functions."""
    edges, nodes = graph.number_of_edges(), graph.number_of_nodes()
    spectrum = np.sort(nx.normalized_laplacian_spectrum(graph.to_undirected()).real)
    strong = [*nx.strongly_connected_components(graph)]
    return {
        "self_loops": nx.number_of_selfloops(graph) / nodes, "reciprocity": nx.overall_reciprocity(graph) if edges else math.nan,
        "weak_components": nx.number_weakly_connected_components(graph), "strong_components": len(strong),
        "largest_strong": max(map(len, strong)) / nodes, "spectral_gap": float(spectrum[1]) if nodes > 1 else math.nan,
        "modularity": nx.community.modularity(graph, communities) if edges else math.nan,
    }  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_equal_those_of_networkx(name: str) -> None:
    graph, bipartite = STATISTICS[name]
    generator = torch.Generator().manual_seed(7)
    split = bipartite or graph.num_queries != graph.num_keys
    query = torch.randint(3, (graph.heads, graph.num_queries), generator=generator)
    key = torch.randint(3, (graph.heads, graph.num_keys), generator=generator) if split else query
    found = graph_statistics(graph, communities=(query, key) if split else query, bipartite=bipartite)
    assert torch.equal(found.density, graph.density)
    assert torch.equal(found.in_degree, graph.degree)
    for sequence in range(graph.num_sequences):
        one = graph.sequence(sequence)
        first, first_key = int(graph.query_ptr[sequence]), int(graph.key_ptr[sequence])
        for head in range(graph.heads):
            peer = to_networkx(graph, sequence, head, view="bipartite" if split else "tokens")
            queries = [("query", i) if split else i for i in range(one.num_queries)]
            keys = [("key", j) if split else j for j in range(one.num_keys)]
            assert found.in_degree[head, first : first + len(queries)].tolist() == [
                peer.in_degree(node) for node in queries
            ]
            assert found.out_degree[head, first_key : first_key + len(keys)].tolist() == [
                peer.out_degree(node) for node in keys
            ]
            assert found.empty_queries[sequence, head] == np.mean([peer.in_degree(node) == 0 for node in queries])
            assert found.unread_keys[sequence, head] == np.mean([peer.out_degree(node) == 0 for node in keys])
            communities = [
                {node for place, node in enumerate(queries) if query[head, first + place] == block}
                | (
                    {node for place, node in enumerate(keys) if key[head, first_key + place] == block}
                    if split
                    else set()
                )
                for block in range(3)
            ]
            for statistic, value in networkx_statistics(peer, communities).items():
                mine = getattr(found, statistic)[sequence, head].item()
                assert mine == pytest.approx(value, abs=1e-7, nan_ok=True), (statistic, sequence, head)
            least, most = found.diameter_least[sequence, head].item(), found.diameter_most[sequence, head].item()
            if nx.is_strongly_connected(peer):
                assert least <= nx.diameter(peer) <= most <= 2 * nx.diameter(peer)
            else:
                assert least == most == math.inf


NARROW = {
    "window": (patterns.window(1500, 8), True), "causal window": (patterns.window(1500, 8, is_causal=True), True),
    "path": (patterns.window(1500, 1), True), "shuffled grid, long": (lattice(6, 250), True),
    "random": (random_graph(1, 1500, 1500, 0.01, 1), False),
    "window with few far edges": (patterns.window(1500, 4) | random_graph(1, 1500, 1500, 0.001, 2), False),
    "random, with a long tail": (
        AttentionGraph.from_edge_index(
            torch.cat(
                [random_graph(1, 1000, 1000, 0.01, 3).edge_index,
                 torch.stack([torch.arange(999, 1199), torch.arange(1000, 1200)])],
                1,
            )
        ),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_gaps_of_narrow_graphs_take_no_iterations_in_vain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One factorisation in narrow graphs, products alone in others; their gap is that of dense arithmetic."""
    solve, ways = scipy.sparse.linalg.eigsh, []

    def watched(matrix: Any, **options: Any) -> Any:
        ways.append("sigma" in options)
        return solve(matrix, **options)

    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", watched)
    graph, narrow = NARROW[name]
    found = float(graph_statistics(graph).spectral_gap)
    assert ways == [True] if narrow else not any(ways)
    both = graph.to_scipy(0).toarray()
    both = (both | both.T).astype(np.float64)
    scale = both.sum(0) ** -0.5
    spectrum = scipy.linalg.eigvalsh(scale[:, None] * both * scale, subset_by_index=[len(both) - 2, len(both) - 2])
    assert found == pytest.approx(1 - float(spectrum[0]), abs=1e-9 if narrow else 1e-7)


def test_the_gap_of_a_long_path_keeps_its_digits() -> None:
    """That of a path of n tokens is 1 - cos(pi / (n - 1))."""
    n = 20000
    found = float(graph_statistics(lattice(1, n)).spectral_gap)
    assert found == pytest.approx(2 * math.sin(math.pi / (n - 1) / 2) ** 2, rel=1e-6)


def test_statistics_of_a_model_use_its_own_communities() -> None:
    member = torch.eye(4).repeat_interleave(30, 0)[None]
    sbm = SBM(member, member, (0.5 * torch.eye(4) + 0.02)[None])
    graph = sample_edges(sbm, seed=0)
    query, key = communities_of(sbm)
    assert torch.equal(query, torch.arange(4).repeat_interleave(30)[None])
    found = graph_statistics(graph, communities=sbm, spectral_gap=False)
    assert torch.equal(found.modularity, graph_statistics(graph, communities=(query, key)).modularity)
    assert found.modularity > 0.5
    assert found.spectral_gap.isnan().all()
    assert graph_statistics(graph).modularity.isnan().all()


def test_statistics_as_rows_and_table() -> None:
    found = graph_statistics(random_graph(2, 10, 10, 0.4, sequences=8), spectral_gap=False)
    rows = found.rows()
    assert len(rows) == 16
    assert [row["sequence"] for row in rows[:4]] == [0, 0, 1, 1]
    assert rows[3]["density"] == found.density[1, 1]
    table = str(found)
    assert "strong components" in table
    assert "spectral gap" not in table  # it was left out
    assert "... and 4 more" in table


def test_communities_may_have_any_numbers() -> None:
    graph = random_graph(2, 30, 30, 0.2, 3)
    communities = torch.randint(3, (2, 30), generator=torch.Generator().manual_seed(0))
    wanted = graph_statistics(graph, communities=communities, spectral_gap=False).modularity
    found = graph_statistics(
        graph, communities=torch.tensor([2**62, -7, 2**40])[communities], spectral_gap=False
    ).modularity
    assert torch.equal(found, wanted)


# ---------------------------------------------------------------------------------------------------------- networkx


def test_networkx_views_carry_probabilities_and_communities() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, block = (torch.rand(2, size, 3, generator=generator) for size in (9, 9, 3))
    ptr = torch.tensor([0, 4, 9])
    sbm = SBM(query, key, block / 9, ptr, ptr)
    graph = expected_graph(sbm, 0.1)
    for sequence in (0, 1, -1):
        chance = sbm.edge_prob_dense(sequence)
        tokens = to_networkx(graph, sequence, 1, sbm=sbm)
        for a, b, p in tokens.edges.data("probability"):
            assert p == pytest.approx(float(chance[1, b, a]), abs=1e-6)
        first = int(ptr[sequence if sequence >= 0 else 1])
        assert [tokens.nodes[i]["community"] for i in tokens] == query[1, first : first + len(tokens)].argmax(
            -1
        ).tolist()
        split = to_networkx(graph, sequence, 0, view="bipartite", sbm=sbm)
        assert split.nodes["key", 1]["community"] == int(key[0, first + 1].argmax())
        assert split.number_of_edges() == int((chance[0] > 0.1).sum())
        every = to_networkx(graph, sequence, "all", sbm=sbm)
        assert every.number_of_edges() == int((chance > 0.1).sum())
        for a, b, head, p in every.edges.data("probability", keys=True):
            assert p == pytest.approx(float(chance[head, b, a]), abs=1e-6)


def test_probabilities_of_a_view_are_cut_at_1() -> None:
    member = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]])
    sbm = SBM(member, member, torch.tensor([[[1.5, 0.2], [0.2, 0.9]]]))  # as at a target density
    found = dict(to_networkx(expected_graph(sbm), sbm=sbm).edges).items()
    assert {pair: round(each["probability"], 6) for pair, each in found} == {
        (0, 0): 1.0, (1, 1): 0.9, (2, 0): 0.85, (0, 2): 0.85, (2, 1): 0.55, (1, 2): 0.55, (2, 2): 0.7,
    }  # fmt: skip


def test_a_bipartite_view_has_the_probabilities_of_its_queries() -> None:
    """Numbers of keys do not find them, if sequences have other numbers of keys than of queries."""
    random = torch.Generator().manual_seed(0)
    query, key, block = (torch.rand(1, size, 3, generator=random) for size in (5, 9, 3))
    sbm = SBM(query, key, block / 9, torch.tensor([0, 2, 5]), torch.tensor([0, 5, 9]))
    graph = expected_graph(sbm, 0.1)
    for sequence in (0, 1):
        chance = sbm.edge_prob_dense(sequence)[0]
        view = to_networkx(graph, sequence, 0, view="bipartite", sbm=sbm)
        assert view.number_of_edges() == int((chance > 0.1).sum()) > 0
        for (_, j), (_, i), p in view.edges.data("probability"):
            assert p == pytest.approx(float(chance[i, j]), abs=1e-6)


def test_what_analysis_lists_from_other_modules_is_theirs() -> None:
    for module in (hamiltonian, conditions):
        for name in module.__all__:
            assert getattr(analysis, name) is getattr(module, name)
            assert name in analysis.__all__


# --------------------------------------------------------------------------------------------------------------- errors


def ring(n: int) -> AttentionGraph:
    return AttentionGraph.from_edge_index(torch.stack([torch.arange(n), torch.arange(n).roll(1)]))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: hamiltonian_path(nx.Graph()), TypeError,
     r"Expected 'graph' to be an AttentionGraph \(got Graph\). Build one with `AttentionGraph.from_edge_index`."),
    (lambda: hamiltonian_path(GRAPHS["ragged"]), ValueError,
     r"Expected 'graph' to be one sequence \(got 3\). Take one with `graph.sequence\(b\)`."),
    (lambda: hamiltonian_path(GRAPHS["bipartite"]), ValueError,
     r"Expected 'graph' to have the same tokens as queries and keys \(got N = 7, M = 11\). Paths need one set of tokens."),
    (lambda: hamiltonian_path(patterns.full(3), time_limit=0), ValueError,
     r"Expected 'time_limit' to be a positive number of seconds \(got 0\). The default is 10."),
    (lambda: analysis.universality([]), ValueError,
     r"Expected 'patterns' over the same tokens \(got \[\] tokens\). Pass one or more patterns of one sequence."),
    (lambda: spread_steps([patterns.full(3), patterns.full(4)]), ValueError,
     r"Expected 'patterns' over the same tokens \(got \[3, 4\] tokens\)."),
    (lambda: analysis.universality(GRAPHS["ragged"]), ValueError, r"Expected 'patterns' to be one sequence \(got 3\)."),
    (lambda: analysis.universality(lemma2(4, 2).sbms, threshold=1), ValueError,
     r"Expected 'threshold' in \[0, 1\) \(got 1\). An edge counts if its probability is above it."),
    (lambda: lemma2(4, 5), ValueError, r"Expected 'num_clusters' in 1..n = 1..4 \(got 5\). A community needs a token."),
    (lambda: lemma2(10**7, 2), ValueError,
     r"Expected 'n' to ask for no more than memory holds \(got 800,\d{3},\d{3},\d{3},\d{3} bytes of models and graphs"),
    (lambda: lemma2(4.5, 2), TypeError, r"Expected 'n' to be an int \(got float\). It is the number of tokens."),  # type: ignore[arg-type]
    (lambda: analysis.universality(5), TypeError, r"Expected 'patterns' to be a list of graphs \(got int\). Pass \[graph\] for one."),  # type: ignore[arg-type]
    (lambda: spread_steps([ring(3 * 10**6)]), ValueError,
     r"Expected 'patterns' to ask for no more than memory holds \(got 281,250,000,000 words"),
    (lambda: lemma2(4, 2).s((0, 1, 2)), ValueError,
     r"Expected 'order' to be a permutation of 1, 2, 3 \(got \(0, 1, 2\)\). The paper has \(1, 2, 3\)."),
    (lambda: graph_statistics(GRAPHS["bipartite"], bipartite=False), ValueError,
     r"Expected 'bipartite' to be True if sequences have different numbers of queries and keys \(got N = 7, M = 11\)."),
    (lambda: graph_statistics(GRAPHS["bipartite"], communities=torch.zeros(3, 7, dtype=torch.long)), ValueError,
     r"Expected 'communities' of the keys to be \[3, 11\] \(got \[3, 7\]\). They number the community of each token"),
    (lambda: to_networkx(patterns.full(3), view="multigraph"), ValueError,
     r"Expected 'view' to be 'tokens' or 'bipartite' \(got 'multigraph'\). Pass head='all' for all heads at once."),
    (lambda: to_networkx(GRAPHS["bipartite"], 0, 0), ValueError,
     r"Expected 'bipartite' to be True or None if queries and keys differ in number \(got False, 7 and 11\)."),
    (lambda: graph_statistics(torch.eye(3)), TypeError, r"Expected 'graph' to be an AttentionGraph \(got Tensor\)."),  # type: ignore[arg-type]
    (lambda: communities_of(torch.eye(3)), TypeError, r"Expected 'sbm' to be an SBM \(got Tensor\)."),  # type: ignore[arg-type]
    *((lambda wrong=wrong: graph_statistics(GRAPHS["bipartite"], communities=wrong), TypeError,
       r"Expected 'communities' to be an SBM, a tensor of integers or a pair of those \(got ")
      for wrong in (torch.zeros(3, 7), "blocks", (torch.zeros(3, 7, dtype=torch.long),))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_errors_name_the_argument(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse.csgraph", None)
    refuses(lambda: graph_statistics(patterns.full(3)), "Expected 'scipy' to be installed", ImportError)
