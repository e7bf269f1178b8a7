"""Learned graphs for layers of PyG: what they get, gradients by enumeration of all graphs, candidates, and refusals."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from problems import draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import ARMAConv, ChebConv, GCNConv, GINEConv, GraphConv, SAGEConv, Sequential, SGConv, TAGConv
from torch_geometric.nn.models import GCN
from torch_geometric.utils import add_self_loops, scatter

import sbm_pyg
from sbm_pyg import (
    AttentionGraph,
    Choice,
    EdgeProbability,
    GraphSource,
    LearnedGraph,
    LearnedSource,
    SBMHead,
    SBMSource,
    Sparsifier,
    Tokens,
)
from sbm_pyg.layers import learned_graph
from sbm_pyg.layers.learned_graph import edge_weights
from sbm_pyg.sources import patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
GUIDE = Path(sbm_pyg.__file__).parents[1] / "docs" / "guides" / "learned_graph.md"

pytestmark = pytest.mark.usefixtures("one_thread")


class Pairs(EdgeProbability):
    """A number for each pair of positions, ``[n, n]`` for all graphs of n nodes, or ``[B, n, n]``."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def on(self, graph: AttentionGraph) -> Tensor:
        (key, query), n = graph.edge_index, self.p.size(-1)
        return self.p.expand(graph.num_sequences, n, n)[query // n, query % n, key % n]

    def expected_density(self) -> Tensor:
        return self.p.mean((-1, -2)).view(-1, 1)


class PairSource(LearnedSource):
    """A parameter for each pair of positions."""

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__()
        self.logit = nn.Parameter(draw(seed, n, n))

    def predict(self, tokens: Tokens) -> Pairs:
        return Pairs(self.logit.sigmoid())

    def choose(self, tokens: Tokens) -> Choice:
        p, random = self.predict(tokens), torch.Generator().manual_seed(tokens.seed)
        batch, n = tokens.query_ptr.numel() - 1, len(self.logit)
        return Choice(AttentionGraph.from_dense(torch.rand(batch, 1, n, n, generator=random) < p.p.detach()), p)


def block_source(channels: int = 8, **options: Any) -> SBMSource:
    torch.manual_seed(0)
    return SBMSource(SBMHead(channels, num_clusters=4), **options)


def clusters(learned: LearnedGraph) -> Any:
    """A parameter of its block model."""
    return cast(Any, learned.source).head.clusters


def edges_of(graph: AttentionGraph) -> set[tuple[int, int]]:
    return set(map(tuple, graph.edge_index.T.tolist()))


# ------------------------------------------------------------------ what a layer gets


def test_edges_come_first_with_weight_1_and_then_probes_with_weight_0() -> None:
    learned, x = LearnedGraph(block_source(), probes=3), draw(1, 40, 8).float()
    edge_index, edge_weight, graph, choice = learned(x, seed=5, return_graph=True, return_choice=True)
    edges = graph.num_edges
    assert choice.graph is graph
    assert torch.equal(edge_index[:, :edges], graph.edge_index)
    assert edge_weight.dtype == x.dtype
    assert torch.equal(edge_weight, (torch.arange(edge_index.size(1)) < edges).float())
    assert 40 < edge_index.size(1) - edges <= 3 * 40
    assert bool((edge_index[0] != edge_index[1]).all())
    assert len(set(map(tuple, edge_index.T.tolist()))) == edge_index.size(1)


@pytest.mark.parametrize("candidates", [False, True])
def test_the_number_of_probes_goes_from_none_to_all_other_pairs(candidates: bool) -> None:
    x, pairs = draw(1, 20, 8).float(), patterns.full(20)
    pairs = pairs.select(pairs.lag != 0)
    for probes in (0.0, math.inf):
        learned = LearnedGraph(block_source(), probes=probes)
        edge_index, _, graph = learned(x, candidates=pairs if candidates else None, seed=1, return_graph=True)
        assert edge_index.size(1) == (graph.num_edges if probes == 0 else 20 * 19)
        assert 0 < graph.num_edges < 20 * 19


@pytest.mark.parametrize("calls", ["evaluation", "no gradients", "a frozen source"])
def test_no_probes_where_nothing_learns(calls: str) -> None:
    learned, x = LearnedGraph(block_source()), draw(1, 40, 8).float()
    _, weight, graph = learned(x, seed=5, return_graph=True)
    assert len(weight) > graph.num_edges
    if calls == "evaluation":
        learned.eval()
    if calls == "a frozen source":
        learned.requires_grad_(False)
    with torch.set_grad_enabled(calls != "no gradients"):
        edge_index, weight, other = learned(x, seed=5, return_graph=True)
    assert other == graph
    assert torch.equal(edge_index, graph.edge_index)
    assert torch.equal(weight, torch.ones(graph.num_edges))
    assert not weight.requires_grad


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GraphConv": GraphConv, "GCNConv": GCNConv, "TAGConv": lambda i, o: TAGConv(i, o, K=2), "ARMAConv": ARMAConv,
    "ChebConv": lambda i, o: ChebConv(i, o, K=3), "SGConv": lambda i, o: SGConv(i, o, K=2),
    "GCN": lambda i, o: GCN(i, 6, num_layers=3, out_channels=o, norm="layer_norm", jk="cat"),
    "Sequential": lambda i, o: Sequential("x, e, w", [
        (GraphConv(i, 6), "x, e, w -> x"), nn.ReLU(), (GraphConv(6, o), "x, e, w -> x")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_probes_change_no_output_and_train_the_source(name: str) -> None:
    torch.manual_seed(0)
    layer, learned, x = LAYERS[name](8, 3).double(), LearnedGraph(block_source().double()), draw(1, 30, 8)
    edge_index, weight, graph = learned(x, seed=1, return_graph=True)
    out = layer(x, edge_index, weight)
    alone = layer(x, graph.edge_index, x.new_ones(graph.num_edges))
    torch.testing.assert_close(out, alone, rtol=1e-10, atol=1e-12)
    out.square().mean().backward()
    grads = [cast(Tensor, p.grad) for p in learned.source.parameters()]
    assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)


def test_gradients_of_weights_are_differences_of_losses() -> None:
    torch.manual_seed(0)
    conv, learned, x = GraphConv(8, 3).double(), LearnedGraph(block_source().double()), draw(1, 20, 8)
    edge_index, weight, graph = learned(x, seed=1, return_graph=True)
    coefficient = draw(2, 20, 3)

    def loss(pairs: Tensor, weight: Tensor | None) -> Tensor:
        return (conv(x, pairs, weight) * coefficient).sum()

    (found,) = torch.autograd.grad(loss(edge_index, weight), weight)
    for number in range(edge_index.size(1)):
        pair, edges = edge_index[:, number : number + 1], graph.edge_index
        others = edges[:, (edges != pair).any(0)]
        wanted = loss(torch.cat([others, pair], 1), None) - loss(others, None)
        torch.testing.assert_close(found[number], wanted, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------ against the gradient of the expected loss


PAIRS = torch.tensor([[1, 2, 0, 1], [0, 0, 1, 2]])  # sources and targets among three nodes
STAR = torch.tensor([[1, 2, 3, 4, 5, 6], [0] * 6])  # six sources of one target
P = torch.tensor([0.1, 0.3, 0.6, 0.9], dtype=torch.float64)
P_STAR = torch.tensor([0.1, 0.3, 0.4, 0.5, 0.6, 0.9], dtype=torch.float64)


def subsets(pairs: Tensor) -> Tensor:
    """All sets of P pairs, ``[2^P, P]``."""
    return torch.tensor([*product([False, True], repeat=pairs.size(1))])


def chances(p: Tensor) -> Tensor:
    """Probability of each set of pairs, ``[2^P]``."""
    sets = torch.tensor([*product([False, True], repeat=len(p))])
    return torch.where(sets, p, 1 - p).prod(1)


def graph_of(masks: Tensor, pairs: Tensor) -> AttentionGraph:
    """The pairs of each mask, ``[B, P]``, over n nodes each."""
    n = 1 + int(pairs.max())
    dense = torch.zeros(len(masks), 1, n, n, dtype=torch.bool)
    dense[:, 0, pairs[1], pairs[0]] = masks
    return AttentionGraph.from_dense(dense)


def enumerate_gradients(
    layer: Layer, loss: Callable[[Tensor], Tensor], p: Tensor, eta: float = 0.3, exploration: float = 0.0,
    pairs: Tensor = PAIRS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Expected estimate of the gradient to p over all graphs and all sets of probes, and the true gradient, ``[P]``."""
    sets, n = subsets(pairs), 1 + int(pairs.max())
    count, x = len(sets), draw(3, n, 4)
    drawn, probed = sets.repeat_interleave(count, 0), sets.repeat(count, 1)
    law = (p + exploration).clamp(max=1)
    weight = (chances(law)[:, None] * chances(torch.full_like(p, eta))).flatten()
    table = torch.zeros(count**2, n, n, dtype=p.dtype)
    table[:, pairs[1], pairs[0]] = p
    table.requires_grad_()
    graph, probes = graph_of(drawn, pairs), graph_of(probed & ~drawn, pairs)
    chance = torch.full((n * count**2,), eta, dtype=p.dtype)
    both = Pairs(table).on(graph), Pairs(table).on(probes)
    edge_weight = edge_weights(graph, probes, both, chance, exploration=exploration)
    out = layer(x.repeat(count**2, 1), torch.cat([graph.edge_index, probes.edge_index], 1), edge_weight)
    (found,) = torch.autograd.grad(loss(out.view(count**2, n, -1)).sum(), table)
    mean = (weight[:, None] * found[:, pairs[1], pairs[0]]).sum(0)
    every = graph_of(sets, pairs)
    with torch.no_grad():
        out = layer(x.repeat(count, 1), every.edge_index, x.new_ones(every.num_edges))
    law = law.clone().requires_grad_()
    (true,) = torch.autograd.grad((chances(law) * loss(out.view(count, n, -1))).sum(), law)
    return mean, true * (p + exploration < 1)


def linear(out: Tensor) -> Tensor:
    return (out * draw(4, *out.shape[1:])).sum((1, 2))


def squared(out: Tensor) -> Tensor:
    return (out - draw(5, *out.shape[1:])).square().sum((1, 2))


def stack(*layers: Any, between: Callable[[Tensor], Tensor] = lambda x: x) -> Layer:
    def run(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x = layer(x if number == 0 else between(x), edge_index, weight)
        return x

    return run


def weighted_mean(conv: GraphConv) -> Layer:
    """The mean of the neighbors, as a sum with weights: the way out of the guide."""

    def run(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        total = scatter(weight, edge_index[1], dim_size=len(x))
        return conv(x, edge_index, weight / total.where(total > 0, 1.0)[edge_index[1]])

    return run


def with_loops(layer: Layer) -> Layer:
    """A layer over self-loops, too, which have weight 1."""
    return lambda x, edge_index, weight: layer(x, *add_self_loops(edge_index, weight, 1.0, len(x)))


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make().double()


SUM, SECOND = made(lambda: GraphConv(4, 4)), made(lambda: GraphConv(4, 4))


@pytest.mark.parametrize(
    ("eta", "exploration"), [(0.3, 0.0), (1.0, 0.0), (0.3, 0.05), (0.3, 0.2), (0.0, 0.0), (0.0, 0.2)]
)
@pytest.mark.parametrize("layer", [SUM, stack(SUM, SECOND)], ids=["one layer", "two layers"])
def test_sums_are_unbiased_for_a_linear_loss(layer: Layer, eta: float, exploration: float) -> None:
    """Two linear layers too: a path of two edges has each edge once, as there are no self-loops."""
    mean, true = enumerate_gradients(layer, linear, P, eta, exploration)
    assert float(true.abs().max()) > 0.1
    torch.testing.assert_close(mean, true, rtol=1e-10, atol=1e-12)


def test_a_squared_loss_is_unbiased_where_edges_and_probes_count_one_half_each() -> None:
    """The mean of the slopes at both ends is the difference of a quadratic function."""
    for p, unbiased in (([0.2, 0.3, 0.4, 0.5], True), ([0.05, 0.3, 0.4, 0.8], False)):
        mean, true = enumerate_gradients(SUM, squared, torch.tensor(p, dtype=torch.float64), eta=1 / 6)
        error = float((mean - true).norm() / true.norm())
        assert (error < 1e-10) if unbiased else (error > 1e-3)


BIAS: dict[str, Layer] = {
    "`GraphConv`": SUM,
    "`GraphConv`, ReLU, `GraphConv`": stack(SUM, SECOND, between=torch.relu),
    "`GCNConv`": made(lambda: GCNConv(4, 4)),
    "`TAGConv(K=2)` with self-loops": with_loops(made(lambda: TAGConv(4, 4, K=2))),
    "`ARMAConv` with self-loops": with_loops(made(lambda: ARMAConv(4, 4, act=None))),
    "`TAGConv(K=2)`": made(lambda: TAGConv(4, 4, K=2)),
    "`ChebConv(K=3)`": made(lambda: ChebConv(4, 4, K=3)),
    "mean, by weights over their sum": weighted_mean(SUM),
    "`GraphConv(aggr=\"mean\")`": made(lambda: GraphConv(4, 4, aggr="mean")),
    "`GraphConv(aggr=\"max\")`": made(lambda: GraphConv(4, 4, aggr="max")),
}  # fmt: skip


def biases(layer: Layer) -> list[float]:
    """Bias relative to the true gradient: of three nodes and of a star, for a linear and a squared loss."""
    found = (
        enumerate_gradients(layer, loss, p, pairs=pairs)
        for pairs, p in ((PAIRS, P), (STAR, P_STAR))
        for loss in (linear, squared)
    )
    return [float((mean - true).norm() / true.norm()) for mean, true in found]


@pytest.mark.parametrize("name", BIAS)
def test_the_guide_has_the_bias_of_each_layer(name: str) -> None:
    (row,) = (line for line in GUIDE.read_text().splitlines() if line.startswith(f"| {name} |"))
    written = [float(cell) for cell in row.split("|")[2:-1]]
    assert written == pytest.approx(biases(BIAS[name]), abs=0.006)


@pytest.mark.parametrize("make", [GCNConv, TAGConv, ARMAConv, lambda i, o: ChebConv(i, o, K=3)])
def test_nodes_without_edges_send_finite_gradients(make: Any) -> None:
    """Normalized degrees have no slope at 0, so a probe of such a node counts only with self-loops."""
    p = torch.full((2,), 0.5, requires_grad=True)
    graph, probes = (AttentionGraph.from_edge_index(torch.tensor(pairs), 4) for pairs in ([[0], [1]], [[1], [3]]))
    weight = edge_weights(graph, probes, (p[:1], p[1:]), torch.full((4,), 0.5))
    pairs = torch.cat([graph.edge_index, probes.edge_index], 1)
    out = made(lambda: make(4, 4)).float()(draw(1, 4, 4).float(), pairs, weight)
    (grad,) = torch.autograd.grad(linear(out[None]).sum(), p)
    assert bool(grad.isfinite().all())
    assert bool(grad[1]) == (make is GCNConv)


# ------------------------------------------------------------------ batches and seeds


@pytest.mark.parametrize("kind", ["block model", "indexer", "candidates"])
def test_a_batch_equals_its_graphs(kind: str) -> None:
    """Edges, probes and gradients, with the number of each graph in the data set."""
    torch.manual_seed(0)
    source = IndexerSource(Indexer(8), select="bernoulli", target_density=0.3) if kind == "indexer" else block_source()
    learned, conv = LearnedGraph(source.double(), probes=2.5), GraphConv(8, 3).double()
    lengths, ids = [5, 1, 12], torch.tensor([7, 3, 11])
    ptr = torch.tensor([0, 5, 6, 18])
    x = draw(1, 18, 8)
    ring = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in lengths]
    among = torch.cat([each + start for each, start in zip(ring, ptr, strict=False)], 1)

    def run(x: Tensor, among: Tensor, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        options |= {"candidates": among} if kind == "candidates" else {}
        edge_index, weight = learned(x, seed=4, **options)
        loss = conv(x, edge_index, weight).square().sum()
        return edge_index, weight, [*torch.autograd.grad(loss, [*learned.parameters()], allow_unused=True)]

    whole = run(x, among, ptr=ptr, sequence_ids=ids)
    by_batch = run(x, among, batch=torch.repeat_interleave(ptr.diff()), sequence_ids=ids)
    assert torch.equal(whole[0], by_batch[0])
    parts = [
        run(x[start : start + n], ring[number], sequence_ids=ids[number : number + 1])
        for number, (n, start) in enumerate(zip(lengths, ptr.tolist(), strict=False))
    ]
    for value in (0, 1):  # probes, and edges
        mine = whole[0][:, whole[1] == value]
        theirs = torch.cat([part[0][:, part[1] == value] + start for part, start in zip(parts, ptr, strict=False)], 1)
        assert torch.equal(mine, theirs)
    for total, *each in zip(whole[2], *(part[2] for part in parts), strict=True):
        if total is not None:
            torch.testing.assert_close(total, torch.stack(each).sum(0), rtol=1e-9, atol=1e-11)
    assert sum(total is not None and bool(total.any()) for total in whole[2]) >= 3


@pytest.mark.parametrize("candidates", [False, True])
def test_seeds_fix_edges_and_probes(candidates: bool) -> None:
    learned, x = LearnedGraph(block_source()), draw(1, 40, 8).float()
    given = {"candidates": patterns.window(40, 6)} if candidates else {}
    first, second, other = (learned(x, seed=seed, **given) for seed in (3, 3, 4))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(learned(x, **given)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert drawn[0].shape != drawn[2].shape or not torch.equal(drawn[0], drawn[2])


def test_gradients_scale_with_the_loss_and_survive_checkpointing() -> None:
    learned, conv, x = LearnedGraph(block_source()), GraphConv(8, 3), draw(1, 30, 8).float()

    def out(x: Tensor) -> Tensor:
        return conv(x, *learned(x, seed=2))

    losses = [factor * out(x).square().mean() for factor in (1, 8)]
    losses.append(checkpoint(out, x, use_reentrant=False).square().mean())
    found = [torch.autograd.grad(loss, clusters(learned))[0] for loss in losses]
    assert torch.equal(8 * found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_autocast_trains_the_source_as_full_precision_does() -> None:
    learned, conv, x = LearnedGraph(block_source()), GraphConv(8, 3), draw(1, 30, 8).float()
    found = []
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            edge_index, weight = learned(x, keep=patterns.window(30, 1), candidates=patterns.full(30), seed=2)
            loss = conv(x, edge_index, weight).square().mean()
        assert weight.dtype == torch.float32
        found.append(torch.autograd.grad(loss, clusters(learned))[0].flatten())
    assert float(torch.cosine_similarity(found[0], found[1], dim=0)) > 0.9


# ------------------------------------------------------------------ existing edges


def test_kept_edges_are_always_there_and_send_no_gradient() -> None:
    source = PairSource(6)
    learned, conv, x = LearnedGraph(source, probes=math.inf), GraphConv(4, 3).double(), draw(1, 6, 4)
    ring = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 5]])  # the last is a self-loop
    found = []
    for seed in range(30):
        edge_index, weight, choice = learned(x, keep=ring, seed=seed, return_choice=True)
        assert bool(choice.graph.contains(ring).all())
        assert edges_of(choice.graph.select(choice.forced)) == set(map(tuple, ring.T.tolist()))
        found.append(choice.graph.num_edges)
        conv(x, edge_index, weight).square().sum().backward()
    assert min(found) < max(found)
    grad = source.logit.grad
    assert grad is not None
    kept = torch.eye(6, dtype=torch.bool)
    kept[ring[1], ring[0]] = True
    assert not bool(grad[kept].any())
    assert bool((grad[~kept] != 0).all())


@pytest.mark.parametrize("form", ["edge_index", "graph", "sparse"])
def test_candidates_limit_edges_and_probes(form: str) -> None:
    learned, x = LearnedGraph(PairSource(8), probes=1.5), draw(1, 8, 4)
    among = AttentionGraph.from_edge_index(torch.tensor([[1, 2, 5, 0, 3, 7, 4, 6], [0, 0, 0, 1, 2, 2, 3, 7]]), 8)
    given: Any = among
    if form == "edge_index":
        given = among.edge_index[:, torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    if form == "sparse":
        given = torch.sparse_coo_tensor(among.edge_index.flip(0), torch.ones(8), (8, 8), check_invariants=True)
    seen, probed = set(), set()
    for seed in range(60):
        edge_index, weight, graph = learned(x, candidates=given, seed=seed, return_graph=True)
        seen |= edges_of(graph)
        probed |= set(map(tuple, edge_index[:, weight == 0].T.tolist()))
        weight.sum().backward()
    assert seen == probed == edges_of(among)


def test_rewiring_keeps_edges_and_adds_candidates() -> None:
    learned, x = LearnedGraph(PairSource(6)), draw(1, 6, 4)
    kept, among = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 3, 0], [2, 4, 1]])
    seen = set()
    for seed in range(40):
        edge_index, weight, choice = learned(x, keep=kept, candidates=among, seed=seed, return_choice=True)
        assert {(0, 1), (1, 2)} <= edges_of(choice.graph)
        seen |= set(map(tuple, edge_index.T.tolist()))
        weight.sum().backward()
    assert seen == {(0, 1), (1, 2), (0, 2), (3, 4)}
    grad = cast(PairSource, learned.source).logit.grad
    assert grad is not None
    assert [tuple(pair) for pair in grad.nonzero().tolist()] == [(2, 0), (4, 3)]  # targets and sources


def test_candidates_are_drawn_independently_with_their_probabilities() -> None:
    """Chi-square over the 16 graphs, and the frequency of probes; a transposed law fails."""
    count = 20000
    source = PairSource(3)
    learned, x = LearnedGraph(source, probes=0.6), draw(1, 3 * count, 2)
    ptr = torch.arange(count + 1) * 3
    among = (PAIRS + ptr[:-1, None, None]).permute(1, 0, 2).flatten(1)
    edge_index, weight = learned(x, candidates=among, ptr=ptr, seed=1)

    def masks(edges: Tensor) -> Tensor:
        dense = torch.zeros(count, 3, 3, dtype=torch.bool)
        dense[edges[1] // 3, edges[1] % 3, edges[0] % 3] = True
        return dense[:, PAIRS[1], PAIRS[0]]

    p = source.logit.detach().sigmoid()
    drawn = (masks(edge_index[:, weight == 1]) * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    statistics = []
    for law in (p, p.T):
        expected = count * chances(law[PAIRS[1], PAIRS[0]])
        statistics.append(float(((drawn - expected) ** 2 / expected).sum()))
    assert statistics[0] < 61 < statistics[1]  # quantile 1 - 1e-6... of chi-square with 15 degrees of freedom
    absent = ~masks(edge_index[:, weight == 1])
    frequency = (masks(edge_index[:, weight == 0]) & absent).sum(0) / absent.sum(0)
    eta = torch.tensor([0.3, 0.3, 0.6, 0.6])
    assert bool(((frequency - eta).abs() < 5 * (eta * (1 - eta) / absent.sum(0)).sqrt()).all())


def test_one_candidate_has_its_probability_as_density() -> None:
    learned, x, ptr = LearnedGraph(PairSource(6).double()), draw(1, 6, 8), torch.tensor([0, 4, 6])
    among = AttentionGraph.from_edge_index(torch.tensor([[0, 1, 5], [2, 3, 4]]), 6, 6, query_ptr=ptr)
    _, _, choice = learned(x, candidates=among, ptr=ptr, seed=0, return_choice=True)
    p = choice.probability.on(among)
    torch.testing.assert_close(choice.probability.expected_density()[:, 0], torch.stack([p[:2].mean(), p[2]]))


@pytest.mark.parametrize("kind", ["block model", "indexer", "own"])
def test_a_target_density_is_one_of_the_candidates(kind: str) -> None:
    torch.manual_seed(0)
    sources: dict[str, LearnedSource] = {
        "block model": block_source(), "indexer": IndexerSource(Indexer(8), select="bernoulli", target_density=0.5), "own": PairSource(50),
    }  # fmt: skip
    learned = LearnedGraph(sources[kind].double())
    sources[kind].target_density = 0.25
    among = patterns.window(50, 10)
    _, _, choice = learned(draw(1, 50, 8), candidates=among, seed=0, return_choice=True)
    torch.testing.assert_close(choice.probability.expected_density(), torch.full((1, 1), 0.25, dtype=torch.float64))
    torch.testing.assert_close(choice.probability.on(among).mean(), torch.tensor(0.25, dtype=torch.float64))
    outside = patterns.full(50).select(~among.contains(patterns.full(50).edge_index))
    assert not bool(choice.probability.on(outside).any())
    assert choice.exploration == 0.25**2
    assert 0.15 < choice.graph.num_edges / among.num_edges < 0.42  # 0.25 plus exploration, 900 candidates


OPTIONS: dict[str, dict[str, Any]] = {
    "twice as many drawn": {"target_density": 0.3, "candidates": 2.0},
    "all drawn": {"target_density": 0.3, "candidates": 4.0}, "drawn without a density": {"candidates": 2.0},
    "budget": {"budget": 5.0}, "budget of what is kept": {"budget": 5.0, "candidates": 2.0, "target_density": 0.5},
    "window": {"target_density": 0.1, "window": 3}, "self-loops": {"target_density": 0.1, "window": 0},
    "no exploration": {"target_density": 0.3, "exploration": 0.0}, "detached": {"target_density": 0.3, "detach": True},
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_source_mean_the_same_among_candidates(name: str, training: bool) -> None:
    """With all pairs as candidates, a call has as many edges as without, and as many are forced."""
    learned, x = LearnedGraph(block_source(**OPTIONS[name])).train(training), draw(1, 100, 8).float().requires_grad_()
    others = patterns.full(100).select(patterns.full(100).lag != 0)
    found = []
    for given in (None, others):
        calls = [copy.deepcopy(learned)(x, candidates=given, seed=seed, return_choice=True)[2] for seed in range(8)]
        forced = [0 if choice.forced is None else int(choice.forced.sum()) for choice in calls]
        reaches = (
            torch.autograd.grad(calls[0].probability.on(calls[0].graph).sum(), x, allow_unused=True)[0] is not None
        )
        found.append((sum(choice.graph.num_edges for choice in calls), forced, calls[0].exploration, reaches))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.04)
    assert found[0][1:] == found[1][1:]


def test_ranks_among_candidates_are_those_of_the_source() -> None:
    learned, x = LearnedGraph(IndexerSource(Indexer(8), k=3).double()).eval(), draw(1, 40, 8)
    among = patterns.window(40, 6)
    graph, choice = learned(x, candidates=among, return_graph=True, return_choice=True)[2:]
    scores = choice.probability.probability.score(patterns.full(40)).view(40, 40)
    scores = scores.masked_fill(~among.to_dense()[0], -math.inf)
    wanted = torch.zeros(40, 40, dtype=torch.bool).scatter_(
        1, scores.argsort(dim=1, descending=True, stable=True)[:, :3], True
    )  # often 0: the lower key wins
    assert torch.equal(graph.to_dense()[0], wanted)
    assert not choice.independent
    with pytest.raises(ValueError, match="select='bernoulli'"):
        learned.train()(x, candidates=among)


def test_a_price_on_edges_thins_a_graph() -> None:
    source = PairSource(12)
    learned, x, ring = LearnedGraph(source), draw(1, 12, 4), patterns.window(12, 2)
    optimizer = torch.optim.Adam(learned.parameters(), 0.1)
    prices = []
    for seed in range(30):
        _, weight, choice = learned(x, candidates=ring, seed=seed, return_choice=True)
        loss = choice.probability.expected_density().mean()
        prices.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss + 0 * weight.sum()).backward()
        optimizer.step()
    assert prices[-1] < 0.3 * prices[0]
    outside = ~patterns.full(12).to_dense()[0] | ~ring.to_dense()[0]
    assert source.logit.grad is not None
    assert not bool(source.logit.grad[outside].any())


# ------------------------------------------------------------------ sources, the sparsifier, and state


@pytest.mark.parametrize("window", [0, 2])
def test_forced_edges_of_a_source_stay_and_its_self_loops_do_not(window: int) -> None:
    """Layers such as GCNConv add self-loops themselves."""
    learned, x = LearnedGraph(block_source(window=window)), draw(1, 20, 8).float()
    _, _, choice = learned(x, seed=0, return_choice=True)
    near = patterns.window(20, window)
    assert choice.graph.select(choice.forced) == near.select(near.lag != 0)
    assert not (choice.graph.lag == 0).any()
    loops = patterns.self_loops(20).edge_index
    assert learned(x, keep=loops, seed=0, return_graph=True)[2].contains(loops).all()


class Plain(GraphSource):
    """A source that is no LearnedSource: one probability for all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tokens) -> Choice:
        n = tokens.num_queries
        p = Pairs(self.logit.sigmoid().expand(n, n))
        random = torch.Generator().manual_seed(tokens.seed)
        return Choice(AttentionGraph.from_dense(torch.rand(n, n, generator=random) < p.p.detach()), p)


def test_a_source_of_ones_own_learns() -> None:
    """The slope of the expected degree, 15 p, with p = 1/2."""
    source = Plain()
    learned = LearnedGraph(source)
    for seed in range(20):
        edge_index, weight = learned(torch.ones(16, 1), seed=seed)
        scatter(weight, edge_index[1], dim_size=16).mean().backward()
    assert source.logit.grad is not None
    assert float(source.logit.grad) / 20 == pytest.approx(15 / 4, rel=0.1)


def test_a_sparsifier_starts_with_all_candidates() -> None:
    learned, conv, x = LearnedGraph(block_source()), GraphConv(8, 3), draw(1, 20, 8).float()
    model = nn.ModuleList([learned, conv])
    sparsifier = Sparsifier(model, density=0.2, total_steps=10, dense_part=0.5, trial_interval=5)
    among = patterns.window(20, 4)
    counts = []
    for given in (None, among):
        edge_index, weight, choice = learned(x, candidates=given, return_choice=True)
        assert choice.probability is None
        assert bool((weight == 1).all())
        counts.append(edge_index.size(1))
    assert counts == [20 * 19, among.num_edges]
    assert float((learned.eval()(x, candidates=among)[1] == 1).sum()) / among.num_edges < 0.5
    learned.train()
    densities = []
    for _ in range(10):
        edge_index, weight = learned(x, candidates=among)
        densities.append(float((weight == 1).sum()) / among.num_edges)
        loss = conv(x, edge_index, weight).square().mean()
        model.zero_grad()
        loss.backward()
        trained = bool(clusters(learned).grad.any())
        assert trained == (sparsifier.next_density < 1)
        sparsifier.step(loss)
    assert [density == 1 for density in densities] == [True] * 4 + [False] * 6
    assert max(densities[5:]) < 0.5
    assert float(sbm_pyg.auxiliary_loss(model)) == 0


def test_copies_state_and_repr() -> None:
    learned, x = LearnedGraph(block_source(target_density=0.3), probes=2), draw(1, 20, 8).float()
    learned(x, seed=0)
    for other in (copy.deepcopy(learned), pickle.loads(pickle.dumps(learned))):
        assert torch.equal(other.eval()(x, seed=1)[0], learned.eval()(x, seed=1)[0])
        learned.train()
    fresh = LearnedGraph(block_source(target_density=0.5))
    fresh.reset_parameters()
    fresh.load_state_dict(learned.state_dict())
    assert torch.equal(fresh.eval()(x, seed=1)[0], learned.eval()(x, seed=1)[0])
    assert repr(learned).startswith("LearnedGraph(\n  probes=2\n  (source): SBMSource(")


# ------------------------------------------------------------------ layers without weights, and refusals


def test_a_layer_that_ignores_weights_is_noticed() -> None:
    learned, x = LearnedGraph(block_source()), draw(1, 20, 8).float()
    sage, conv = SAGEConv(8, 3), GraphConv(8, 3)

    def train(calls: int, layer: Callable[..., Tensor], use: bool) -> None:
        for _ in range(calls):
            edge_index, weight = learned(x)
            (layer(x, edge_index, weight) if use else layer(x, edge_index)).square().mean().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(learned_graph.PATIENCE - 1, sage, False)
        assert clusters(learned).grad is None
        train(1, conv, True)
        assert clusters(learned).grad is not None
        train(learned_graph.PATIENCE, sage, False)
        learned.eval()
        train(2, sage, False)
        learned.train()
    with pytest.warns(UserWarning, match=r"reach 'edge_weight' \(got none in 16 training calls\)"):
        train(1, sage, False)
    train(2, sage, False)  # once


def test_a_hook_weighs_the_messages_of_a_layer_without_weights() -> None:
    """The way out of the guide for layers that sum messages."""
    torch.manual_seed(0)
    conv = GINEConv(nn.Linear(8, 3), edge_dim=2).double()
    learned, x = LearnedGraph(block_source().double()), draw(1, 20, 8)
    edge_index, weight, graph = learned(x, seed=0, return_graph=True)
    attr = draw(2, edge_index.size(1), 2)
    hook = conv.register_message_forward_hook(lambda module, inputs, message: weight[:, None] * message)
    out = conv(x, edge_index, attr)
    hook.remove()
    torch.testing.assert_close(out, conv(x, graph.edge_index, attr[: graph.num_edges]))
    out.square().mean().backward()
    assert bool(clusters(learned).grad.any())


X8 = torch.ones(6, 8)


def test_channels_make_a_source() -> None:
    learned, x = LearnedGraph(8, heads=1, probes=2), draw(1, 100, 8).float()
    source = cast(SBMSource, learned.source)
    assert (source.target_density, learned.probes) == (0.1, 2)
    assert 500 < learned(x, seed=0, return_graph=True)[2].num_edges < 1500


def test_evaluation_repeats_without_a_seed() -> None:
    learned, x = LearnedGraph(block_source()).eval(), draw(1, 40, 8).float()
    for given in (None, patterns.window(40, 6)):
        first, second, zero = (learned(x, candidates=given, seed=seed)[0] for seed in (None, None, 0))
        assert torch.equal(first, second)
        assert torch.equal(first, zero)
        learned.eval_seed = None
        assert not torch.equal(learned(x, candidates=given)[0], learned(x, candidates=given)[0])
        learned.eval_seed = 0
    learned.train()
    assert not torch.equal(learned(x)[0], learned(x)[0])


@pytest.mark.parametrize("density", [None, 1.0, 0.3])
@pytest.mark.parametrize("candidates", [False, True])
def test_each_parameter_has_a_gradient_in_each_phase(density: float | None, candidates: bool) -> None:
    """Which DistributedDataParallel requires; a parameter without an effect has zeros."""
    sources = block_source(), IndexerSource(Indexer(8), select="bernoulli"), PairSource(20)
    x, among = draw(1, 20, 8).float(), patterns.window(20, 4)
    for source in sources:
        learned, conv = LearnedGraph(source), GraphConv(8, 3)
        if density is not None:
            source.target_density = density
        if isinstance(source, PairSource) and density == 0.3 and not candidates:
            continue  # it draws without a density
        edge_index, weight = learned(x, candidates=among if candidates else None)
        conv(x, edge_index, weight).square().mean().backward()
        for name, parameter in learned.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert bool(parameter.grad.any()) == (density != 1) or name.endswith("bias"), name


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no source": (lambda: LearnedGraph(SBMHead(8)), TypeError, "'source' to be a GraphSource, or the number of channels (got SBMHead)"),  # type: ignore[arg-type]
    "probes": (lambda: LearnedGraph(block_source(), probes=-1), ValueError, "'probes' in [0, inf] (got -1)"),
    "heads": (lambda: LearnedGraph(SBMSource(SBMHead(8, 2))), ValueError, "'source' with one head, as a convolution has one graph (got 2)"),
    "channels and heads": (lambda: LearnedGraph(16, heads=4), ValueError, "'source' with one head, as a convolution has one graph (got 4)"),
    "no channels": (lambda: LearnedGraph(0), ValueError, "'channels'"),
    "index heads": (lambda: LearnedGraph(IndexerSource(Indexer(8, 2), select="bernoulli")), ValueError, "with one head"),
    "blocks": (lambda: LearnedGraph(block_source(block_size=4)), ValueError, "'source' with block_size=1 (got 4)"),
    "fastrg": (lambda: LearnedGraph(block_source(method="fastrg")), ValueError, "method='bernoulli' (got 'fastrg')"),
    "features": (lambda: LearnedGraph(block_source())(torch.ones(6)), ValueError, "'x' to be [N, C] = [any, any] (got [6])"),
    "integers": (lambda: LearnedGraph(block_source())(X8.long()), TypeError, "'x' to be a floating tensor"),
    "no tensor": (lambda: LearnedGraph(block_source())([1.0]), TypeError, "'x' to be a tensor (got list)"),
    "offsets": (lambda: LearnedGraph(block_source())(X8, ptr=torch.tensor([0, 4])), ValueError, "'ptr' to run from 0 to 6"),
    "both": (lambda: LearnedGraph(block_source())(X8, ptr=torch.tensor([0, 6]), batch=torch.zeros(6).long()), ValueError, "'ptr' or 'batch' (got both)"),
    "between graphs": (lambda: LearnedGraph(block_source())(X8, keep=torch.tensor([[0], [5]]), ptr=torch.tensor([0, 3, 6])), ValueError, "keys of the sequence of their query"),
    "candidates between graphs": (lambda: LearnedGraph(block_source())(X8, candidates=torch.tensor([[0], [5]]), ptr=torch.tensor([0, 3, 6])), ValueError, "keys of the sequence of their query"),
    "a node that is not there": (lambda: LearnedGraph(block_source())(X8, keep=torch.tensor([[0], [6]])), ValueError, "'keep' to be edges between the nodes of 'x'. Expected 'edge_index[1]' in 0..5"),
    "candidates of heads": (lambda: LearnedGraph(block_source())(X8, candidates=patterns.full(6, heads=2)), ValueError, "'candidates' to be edges between the nodes of 'x'. Expected 'graph' to have 1 head (got 2)"),
    "no probabilities": (lambda: LearnedGraph(selectors.SelectorSource(selectors.top_k, k=2))(X8), ValueError, "with probabilities (got SelectorSource"),
    "ranks": (lambda: LearnedGraph(IndexerSource(Indexer(8), select="top_k", k=2))(X8), ValueError, "select='bernoulli'"),
    "ranks before graphs are sparse": (lambda: LearnedGraph(IndexerSource(Indexer(8)))(X8), ValueError, "select='bernoulli'"),
    "own heads": (lambda: LearnedGraph(Two())(X8), ValueError, "2 heads and blocks of 1"),
    "candidates of a plain source": (lambda: LearnedGraph(Plain())(X8, candidates=patterns.full(6)), TypeError, "LearnedSource with 'candidates' (got Plain)"),
    "flag": (lambda: LearnedGraph(block_source())(X8, return_graph=1), TypeError, "'return_graph' to be a bool"),
}  # fmt: skip


class Two(GraphSource):
    """A source whose choice has two heads."""

    def forward(self, tokens: Tokens) -> Choice:
        n = tokens.num_queries
        return Choice(patterns.full(n, heads=2), Pairs(torch.full((n, n), 0.5)))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument_and_the_way_out(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)) as error:
        call()
    assert re.match(r"Expected .*\(got [\s\S]*\)", str(error.value))


def test_ranks_may_be_evaluated() -> None:
    learned = LearnedGraph(IndexerSource(Indexer(8), select="top_k", k=2)).eval()
    assert learned(draw(1, 10, 8).float())[0].size(1) <= 20
