"""Gradients to edge probabilities: closed forms, enumeration of all graphs, and what the layer makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from problems import GRAPHS, draw, on_threads, random_graph, reference_attention, refuses, same
from torch import Tensor

from sbm_pyg import (
    SBM,
    ALiBi,
    AttentionConv,
    AttentionGraph,
    Choice,
    EdgeProbability,
    GraphSource,
    SBMAttentionConv,
    SBMHead,
    Tokens,
    make_attention,
    ops,
    sample_edges,
)  # fmt: skip
from sbm_pyg.ops import schemas
from sbm_pyg.ops.reference import effects as reference_effects
from sbm_pyg.ops.reference import systematic as reference_systematic
from sbm_pyg.sources import patterns
from sbm_pyg.training.estimators import Local, Mask
from sbm_pyg.training.gradients import (
    attach_local_expectation,
    concrete_bias,
    distillation,
    draw_probes,
    relaxed_bias,
    score_function,
    straight_through,
)


def effect_arguments(
    graph: AttentionGraph, channels: int, values: int, biased: bool, dtype: torch.dtype = torch.float64
) -> tuple:
    heads, n, m = graph.heads, graph.num_queries, graph.num_keys
    probes = random_graph(heads, n, m, 0.4, seed=9)
    biases = [draw(5 + i, g.num_edges, dtype=dtype) if biased else None for i, g in enumerate((graph, probes))]
    plain = (
        draw(1, heads, n, values, dtype=dtype),
        draw(2, heads, n, channels, dtype=dtype),
        draw(3, heads, m, channels, dtype=dtype),
    )
    value = draw(4, heads, m, values, dtype=dtype)
    return (*plain, value, graph.rowptr, graph.col, biases[0], probes.rowptr, probes.col, biases[1], 0.7)


def effect(op: Any, *given: Any) -> Any:
    """Effects by the op, or by its reference, without a model unless it is given."""
    return op.edge_effect(*given, *(None, None, None, 0.0)[len(given) - 11 :])


# ------------------------------------------------------------------ the effect of an edge


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("channels", [(1, 3), (32, 32), (16, 48)])
def test_effect_equals_the_reference(name: str, biased: bool, channels: tuple[int, int]) -> None:
    arguments = effect_arguments(GRAPHS[name], *channels, biased)
    torch.testing.assert_close(
        effect(schemas, *arguments), effect(reference_effects, *arguments), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", ["one edge", "no edges", "bipartite", "one row has all edges"])
@pytest.mark.parametrize("op", [schemas, reference_effects])
def test_effect_is_the_difference_of_two_losses(name: str, op: Any) -> None:
    """For a loss that is linear in the output: attention with the edge less attention without it, by recomputing both."""
    graph = GRAPHS[name]
    arguments = effect_arguments(graph, 4, 3, False)
    grad_out, query, key, value = arguments[:4]
    probes = AttentionGraph(arguments[7], arguments[8], graph.num_queries, graph.num_keys, graph.heads)
    mask = graph.to_dense().view(graph.heads, graph.num_queries, graph.num_keys) > 0

    def loss(present: Tensor) -> Tensor:
        out = reference_attention(query, key, value, AttentionGraph.from_dense(present), None, None, 0.7, "score")
        return (out * grad_out).sum()

    for effects, edges in zip(effect(op, *arguments), (graph, probes), strict=True):
        for number, (head, row, token) in enumerate(
            zip(edges.edge_head, edges.edge_index[1], edges.edge_index[0], strict=True)
        ):
            if edges is probes and mask[head, row, token]:
                assert effects[number] == 0
                continue
            with_it, without = mask.clone(), mask.clone()
            with_it[head, row, token], without[head, row, token] = True, False
            torch.testing.assert_close(effects[number], loss(with_it) - loss(without), rtol=1e-9, atol=1e-11)


def test_effect_of_an_edge_that_dominates_its_row_is_accurate_in_float32() -> None:
    """1 - P is 1e-9 here; a sum from which it is subtracted would hold nothing of the rest."""
    mask = torch.ones(1, 5)
    graph = AttentionGraph.from_dense(mask)
    key = torch.tensor([0.0, 21.0, 0.3, -0.2, 0.1], dtype=torch.float64)[None, :, None]
    query, value, grad_out = torch.ones(1, 1, 1, dtype=torch.float64), draw(1, 1, 5, 8), draw(2, 1, 1, 8)
    nothing = AttentionGraph.from_dense(torch.zeros(1, 5))
    plain: Any = (grad_out, query, key, value)
    rest: Any = (graph.rowptr, graph.col, None, nothing.rowptr, nothing.col, None, 1.0)
    exact = effect(reference_effects, *plain, *rest)[0]
    for op in (schemas, reference_effects):
        got = effect(op, *(x.float() for x in plain), *rest)[0]
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=0)


def test_effect_knows_infinite_scores_and_ignores_tokens_that_nothing_touches() -> None:
    graph = AttentionGraph.from_dense(torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0]]))
    probes = AttentionGraph.from_dense(torch.tensor([[0.0, 0, 1, 0], [0, 1, 1, 0]]))
    query, key, value = draw(1, 1, 2, 4), draw(2, 1, 4, 4), draw(3, 1, 4, 4)
    key[:, 3], value[:, 3] = math.nan, math.nan
    bias = torch.tensor([0.0, -math.inf, 0.0], dtype=torch.float64)
    probe_bias = torch.tensor([0.0, -math.inf, 0.0], dtype=torch.float64)
    arguments = (
        draw(4, 1, 2, 4), query, key, value, graph.rowptr, graph.col, bias, probes.rowptr, probes.col, probe_bias, 1.0,
    )  # fmt: skip
    for got, want in zip(effect(schemas, *arguments), effect(reference_effects, *arguments), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert effect(schemas, *arguments)[0][1] == 0
    assert effect(schemas, *arguments)[1][1] == 0


def test_effect_does_not_depend_on_threads_or_offsets_dtype() -> None:
    graph = random_graph(3, 200, 300, 0.3)
    arguments = effect_arguments(graph, 32, 32, False, torch.float32)
    results = []
    for threads in (1, 2):
        with on_threads(threads):
            results.append(effect(schemas, *arguments))
    narrow = list(arguments)
    narrow[5], narrow[8] = graph.col.int(), arguments[8].int()
    results.append(effect(schemas, *narrow))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    ("blocks", "exploration", "op"), [(3, 0.0, schemas), (48, 0.05, schemas), (3, 0.05, reference_effects)]
)
def test_effects_count_by_the_chance_to_see_them(name: str, blocks: int, exploration: float, op: Any) -> None:
    """One half of the estimate from the side with the edge and one from that without, within the bounds of the docstring."""
    graph, eta = GRAPHS[name], 0.2
    plain = effect_arguments(graph, 4, 3, False)
    rate, member = (
        draw(6, graph.heads, graph.num_queries, blocks).abs(),
        draw(7, graph.heads, graph.num_keys, blocks).abs(),
    )
    rate = rate / (rate @ member.mT).amax().clamp(min=1)  # from far below the chance of a probe up to 1
    chance = torch.full((graph.num_queries,), eta, dtype=torch.float64)
    probes = AttentionGraph(plain[7], plain[8], graph.num_queries, graph.num_keys, graph.heads)
    got = effect(op, *plain, rate, member, chance, exploration)
    for edges, alone, counted in zip((graph, probes), effect(op, *plain), got, strict=True):
        explored = (rate @ member.mT)[edges.edge_head, edges.edge_index[1], edges.edge_index[0]] + exploration
        p = explored.clamp(max=1)
        alpha = torch.minimum(torch.tensor(0.5), p / (p + eta - p * eta)).maximum(p)  # share of the side with the edge
        factor = alpha / p if edges is graph else torch.where(p < 1, (1 - alpha) / (1 - p), 1) / eta
        factor = torch.where(explored > 1 + 1e-5, 0, factor)
        torch.testing.assert_close(counted, alone * factor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("exploration", "probing"), [(0.0, False), (0.1, True)])
def test_weighing_effects_equals_the_reference(
    name: str, dtype: torch.dtype, exploration: float, probing: bool
) -> None:
    """Probabilities that are given, from none to more than 1; some queries have no probes, some edges are forced."""
    graph = GRAPHS[name]
    prob, effect = draw(1, graph.num_edges, dtype=dtype).abs(), draw(2, graph.num_edges)
    prob[1::5], effect = 0, effect if dtype == torch.float64 else effect.float()
    chance = torch.tensor([0.2, 0, 1, 0.01], dtype=effect.dtype).repeat(graph.num_queries)[: graph.num_queries]
    for forced in (None, draw(3, graph.num_edges) > 0.5):
        given = effect, prob, graph.rowptr, chance, forced, exploration, probing
        got, want = schemas.weigh_effect(*given), reference_effects.weigh_effect(*given)
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want, equal_nan=True)
        assert forced is None or not bool(got[forced].any())
        assert forced is not None or graph.num_edges < 2 or bool(got.any())


@pytest.mark.parametrize("op", [schemas, reference_effects])
def test_a_probe_that_cannot_be_counts_nothing(op: Any) -> None:
    """Every other query has a chance of 0, and probes all the same: its edges then stand for both sides."""
    graph = GRAPHS["bipartite"]
    plain = effect_arguments(graph, 4, 3, False)
    rate = torch.full((graph.heads, graph.num_queries, 1), 0.25, dtype=torch.float64)
    member = torch.ones(graph.heads, graph.num_keys, 1, dtype=torch.float64)
    chance = 0.2 * (torch.arange(graph.num_queries) % 2).double()
    probes = AttentionGraph(plain[7], plain[8], graph.num_queries, graph.num_keys, graph.heads)
    alone, counted = effect(op, *plain), effect(op, *plain, rate, member, chance, 0.0)
    none = [chance[edges.edge_index[1]] == 0 for edges in (graph, probes)]
    assert all(bool(each.any()) and not bool(each.all()) for each in none)
    torch.testing.assert_close(counted[0][none[0]], 4 * alone[0][none[0]])
    assert not bool(counted[1][none[1]].any())
    assert bool(torch.cat(counted).isfinite().all())
    assert bool(counted[1].any())


# ------------------------------------------------------------------ against the gradient of the expected loss, by enumeration


def probabilities(p: Tensor) -> SBM:
    """A model with these probabilities ``[N, M]``, whose gradient to its memberships is that to p."""
    m = p.size(1)
    return SBM(p[None], torch.eye(m, dtype=p.dtype)[None], torch.eye(m, dtype=p.dtype)[None])


class OneQuery:
    """One query, four keys, a linear loss: 16 graphs."""

    def __init__(self) -> None:
        self.query, self.key, self.value, self.weight = (
            draw(1, 1, 1, 3), draw(2, 1, 4, 3), draw(3, 1, 4, 3), draw(4, 1, 1, 3),
        )  # fmt: skip
        self.p = torch.tensor([[0.1, 0.3, 0.6, 0.9]], dtype=torch.float64)
        self.graphs = [AttentionGraph.from_dense(torch.tensor([bits])) for bits in product([0.0, 1.0], repeat=4)]

    def out(self, graph: AttentionGraph, gate: Tensor | None = None, form: str = "score") -> Tensor:
        return ops.edge_attention(self.query, self.key, self.value, graph.rows, gate, 0.5, form)[0]

    def loss(self, graph: AttentionGraph) -> Tensor:
        return (self.out(graph) * self.weight).sum()

    def chances(self, p: Tensor) -> Tensor:
        masks = torch.stack([graph.to_dense().view(4) for graph in self.graphs]).to(p.dtype)
        return (masks * p + (1 - masks) * (1 - p)).prod(1)

    def true_gradient(self) -> Tensor:
        p = self.p.clone().requires_grad_()
        losses = torch.stack([self.loss(graph) for graph in self.graphs])
        return torch.autograd.grad((self.chances(p) * losses).sum(), p)[0]


@pytest.mark.parametrize(
    ("eta", "exploration"), [(0.3, 0.0), (1.0, 0.0), (0.3, 0.05), (0.3, 0.2), (0.0, 0.0), (0.0, 0.2)]
)
def test_local_expectation_is_unbiased_for_a_linear_loss(eta: float, exploration: float) -> None:
    case = OneQuery()
    chance = torch.tensor([eta], dtype=torch.float64)
    drawn = case.chances((case.p + exploration).clamp(max=1))
    probed = case.chances(torch.full((4,), eta, dtype=torch.float64))
    mean = torch.zeros_like(case.p)
    for graph, weight in zip(case.graphs, drawn, strict=True):
        for probes, probe_weight in zip(case.graphs, probed, strict=True):
            p = case.p.clone().requires_grad_()
            out = attach_local_expectation(
                case.out(graph), case.query, case.key, case.value, probabilities(p), graph, probes, chance, scale=0.5, exploration=exploration
            )  # fmt: skip
            assert torch.equal(out, case.out(graph))
            if weight * probe_weight > 0:
                mean += weight * probe_weight * torch.autograd.grad((out * case.weight).sum(), p)[0]
    moved = OneQuery()
    moved.p = (case.p + exploration).clamp(max=1)
    exact = moved.true_gradient() * (case.p + exploration < 1)  # what is certain stays so
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-12)


def test_score_function_is_unbiased() -> None:
    case = OneQuery()
    mean = torch.zeros_like(case.p)
    for graph, weight in zip(case.graphs, case.chances(case.p), strict=True):
        p = case.p.clone().requires_grad_()
        term = score_function(probabilities(p), graph, case.loss(graph)[None])
        assert float(term.detach()) == 0
        mean += weight * torch.autograd.grad(term, p)[0]
    torch.testing.assert_close(mean, case.true_gradient(), rtol=1e-4, atol=1e-6)  # probabilities are cut at 1e-6


def test_score_function_takes_the_mean_of_the_others_as_baseline() -> None:
    """By hand for three sequences of one query and one key, with and without the edge."""
    ptr, p = torch.arange(4), torch.tensor([0.25, 0.5, 0.8], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 3, 1, dtype=torch.float64)
    sbm = SBM(p[None, :, None], one, one[:, :1], ptr, ptr)
    graph = AttentionGraph.from_edge_index(torch.tensor([[0, 2], [0, 2]]), 3, 3, query_ptr=ptr, key_ptr=ptr)
    term = score_function(sbm, graph, torch.tensor([1.0, 5.0, 12.0], dtype=torch.float64))
    found = torch.autograd.grad(term, p)[0]
    advantage = [1 - (5 + 12) / 2, 5 - (1 + 12) / 2, 12 - (1 + 5) / 2]
    wanted = [advantage[0] / 0.25, -advantage[1] / 0.5, advantage[2] / 0.8]
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=0
    )  # probabilities are cut at 1e-6


@pytest.mark.parametrize("form", ["score", "weight"])
def test_gates_are_biased(form: str) -> None:
    """The control: what passes for the local expectation gradient fails for eq. 9 and for the released form."""
    case = OneQuery()
    mean = torch.zeros_like(case.p)
    for graph, weight in zip(case.graphs, case.chances(case.p), strict=True):
        p = case.p.clone().requires_grad_()
        out = case.out(graph, straight_through(probabilities(p), graph), form)
        mean += weight * torch.autograd.grad((out * case.weight).sum(), p)[0]
    true = case.true_gradient()
    assert float((mean - true).norm() / true.norm()) > 0.3


def test_relaxation_is_softmax_of_scores_and_log_probabilities() -> None:
    case = OneQuery()
    p = case.p.clone().requires_grad_()
    everything = case.graphs[-1]
    bias = relaxed_bias(probabilities(p), everything)
    out = ops.edge_attention(case.query, case.key, case.value, everything.rows._replace(bias=bias), None, 0.5)[0]
    other = case.p.clone().requires_grad_()
    meant = ((case.query[0] @ case.key[0].T * 0.5) + other.log()).softmax(-1) @ case.value[0]
    torch.testing.assert_close(out[0], meant)
    grads = [torch.autograd.grad((x * case.weight[0]).sum(), leaf)[0] for x, leaf in ((out[0], p), (meant, other))]
    torch.testing.assert_close(*grads)


def test_concrete_coins_harden_to_bernoulli() -> None:
    p = torch.full((40, 50), 0.3, dtype=torch.float64)
    everything = AttentionGraph.from_dense(torch.ones(40, 50))
    sbm = SBM(p[None, :, :1], torch.ones(1, 50, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64))
    hard = concrete_bias(sbm, everything, 1e-3, seed=1).exp()
    assert float(((hard < 0.01) | (hard > 0.99)).double().mean()) > 0.98
    assert abs(float(hard.mean()) - 0.3) < 5 * math.sqrt(0.21 / 2000)
    assert torch.equal(hard, concrete_bias(sbm, everything, 1e-3, seed=1).exp())
    assert not torch.equal(hard, concrete_bias(sbm, everything, 1e-3, seed=2).exp())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 1e-7, 0.5, 1.0, 1.5])
def test_logarithms_of_probabilities_have_slopes_in_every_type(p: float, dtype: torch.dtype) -> None:
    everything, query = patterns.full(4), torch.arange(-4.0, 4).view(1, 4, 2) / 4
    rules: list[Callable[[SBM, Tensor], Tensor]] = [
        lambda sbm, x: relaxed_bias(sbm, everything), lambda sbm, x: concrete_bias(sbm, everything, 0.5, seed=0),
        lambda sbm, x: distillation(x, x, sbm, everything), lambda sbm, x: score_function(sbm, everything, torch.ones(1, dtype=x.dtype)),
    ]  # fmt: skip

    def values(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        for rule in rules:
            rate = torch.full((1, 4, 1), p, dtype=dtype, requires_grad=True)
            sbm = SBM(rate, torch.ones(1, 4, 1, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype))
            value = rule(sbm, query.to(dtype))
            yield value.detach(), torch.autograd.grad(value.sum(), rate)[0]

    for at, ((value, slope), (meant, _)) in enumerate(zip(values(dtype), values(torch.float64), strict=True)):
        assert slope.isfinite().all()
        assert value.isfinite().all()
        if p > 1e-6 and at != 1:  # coins draw other numbers in other types
            torch.testing.assert_close(value.double(), meant, rtol=0.01, atol=1e-5)


# ------------------------------------------------------------------ probes


def test_probes_are_uniform_independent_of_the_graph_and_their_own_batch() -> None:
    p = torch.full((1, 4000, 1), 0.05)
    sbm = SBM(p, torch.ones(1, 4000, 1), torch.ones(1, 1, 1), torch.tensor([0, 1000, 4000]))
    probes, chance = draw_probes(sample_edges(sbm, seed=0), 50.0, seed=3)
    assert chance[0] == 50 / 1000
    assert chance[-1] == pytest.approx(50 / 3000)
    assert bool((probes.degree == 50).all())
    graph = sample_edges(sbm, seed=3)
    both = graph.num_edges + probes.num_edges - graph.union(probes)[0].num_edges
    expected = 1000**2 * 0.05 * 0.05 + 3000**2 * 0.05 * 50 / 3000
    assert abs(both - expected) < 5 * math.sqrt(expected)
    alone = SBM(p[:, 1000:], torch.ones(1, 3000, 1), torch.ones(1, 1, 1))
    same, _ = draw_probes(sample_edges(alone, seed=0), 50.0, seed=3, sequence_ids=torch.tensor([1]))
    assert torch.equal(same.col, probes.col[probes.rowptr[1000] :] - (0 if int(probes.col[-1]) < 3000 else 1000))


@pytest.mark.parametrize("per_query", [0.4, 1.0, 3.0, 16.0, 39.0])
def test_every_key_is_a_probe_as_often(per_query: float) -> None:
    """Whether or not the distance between keys is a whole number."""
    rows, keys = 20000, 40
    none = AttentionGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), rows, keys, heads=2)
    probes, chance = draw_probes(none, per_query, seed=1)
    seen = torch.stack([probes.head(head).col.bincount(minlength=keys) for head in range(2)]).double()
    expected = rows * per_query / keys
    assert float(chance[0]) == pytest.approx(per_query / keys)
    assert float((seen - expected).abs().max()) < 5 * math.sqrt(expected * (1 - per_query / keys))
    assert not torch.equal(probes.head(0).col[:50], probes.head(1).col[:50])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("per_query", [0.0, 0.3, 2.5, 16.0, math.inf])
def test_systematic_samples_are_those_of_the_reference(per_query: float, dtype: torch.dtype) -> None:
    query_ptr, key_ptr = torch.tensor([0, 3, 40, 240]), torch.tensor([0, 1, 5, 96])
    chance = torch.repeat_interleave((per_query / key_ptr.diff()).clamp(max=1).to(dtype), query_ptr.diff())
    arguments: Any = (chance, query_ptr, key_ptr, torch.tensor([7, 2**32 - 1, 0]), 3, 2**63 - 5, False)
    for each in ((*arguments[:-1], True), arguments):
        assert same(schemas.sample_systematic(*each), reference_systematic.sample_systematic(*each))
    rowptr, col = schemas.sample_systematic(*arguments)
    graph = AttentionGraph(rowptr, col, 240, 96, 3, query_ptr, key_ptr)  # sorted, without repeats
    expected = chance.double() * torch.repeat_interleave(key_ptr.diff(), query_ptr.diff())
    assert bool(((graph.degree - expected).abs() < 1).all())
    assert abs(float((graph.degree - expected).mean())) < 5 * 0.5 / math.sqrt(3 * 240)


def test_systematic_samples_of_some_heads_are_those_of_all() -> None:
    ptr, ids = torch.tensor([0, 3, 40]), torch.tensor([7, 2**32 - 1])
    chance = torch.full((40,), 0.3)
    for sample in (schemas.sample_systematic, reference_systematic.sample_systematic):
        rowptr, col = sample(chance, ptr, ptr, ids, 3, 5, True)
        rows = rowptr[40:]
        found = sample(chance, ptr, ptr, ids + (1 << 32), 2, 5, True)
        assert same(found, (rows - rows[0], col[rows[0] :]))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"out": torch.ones(2, 5, 3)}, r"Expected 'out' to be \[H, N, C'\] = \[2, 5, 4\]"),
     ({"out": None}, "Expected 'out' to be a tensor"),
     ({"query": torch.ones(1, 5, 4)}, r"Expected 'key' to be \[H, M, C\] = \[1, any, 4\]"),
     ({"value": torch.ones(2, 5, 4).long()}, "Expected 'value' to be a floating tensor"),
     ({"value": torch.ones(2, 5, 4).double()}, "to be of one dtype"),
     ({"probe_bias": torch.ones(7)}, r"Expected 'probe_bias' to be \[E'\] = \[10\]"),
     ({"forced": torch.ones(50)}, "Expected 'forced' to be bool"),
     ({"prob": torch.ones(7)}, r"Expected 'prob' to be \[E\] = \[50\]"),
     ({"chance": torch.ones(4)}, r"Expected 'chance' to be \[N\] = \[5\]"),
     ({"weight": math.inf}, r"Expected 'weight' in \(-inf, inf\)")],
)  # fmt: skip
def test_the_local_expectation_refuses_what_its_kernels_would_misread(change: dict[str, Any], message: str) -> None:
    x, graph, probes = torch.ones(2, 5, 4), patterns.full(5, heads=2), patterns.window(5, 0, heads=2)  # 50 and 10 edges
    sbm = SBM(torch.full((2, 5, 1), 0.1), torch.ones(2, 5, 1))
    given: dict[str, Any] = {"out": x, "query": x, "key": x, "value": x, "probability": sbm, "graph": graph}
    given |= {"probes": probes, "chance": torch.ones(5)}
    attach_local_expectation(**given)
    with pytest.raises((TypeError, ValueError), match=message):
        attach_local_expectation(**given | change)


class Wrong(EdgeProbability):
    """Probabilities of an edge too many, and factors of a token too many."""

    def __init__(self, by_factors: bool) -> None:
        self.by_factors = by_factors

    def on(self, graph: AttentionGraph) -> Tensor:
        return torch.full((graph.num_edges + 1,), 0.5, requires_grad=True)

    def expected_density(self) -> Tensor:
        return torch.full((1, 2), 0.5)

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        return (torch.ones(2, 6, 3), torch.ones(2, 5, 3)) if self.by_factors else None


@pytest.mark.parametrize(
    ("estimator", "by_factors", "message"),
    [("mask", False, r"Expected 'gate' to be \[E\] = \[50\] \(got \[51\]\)"),
     ("relaxed", False, r"Expected 'bias' to be \[E\] = \[50\] \(got \[51\]\)"),
     ("imitate", False, r"Expected 'log_p' to be \[E\] = \[50\] \(got \[51\]\)"),
     ("local", False, r"Expected 'prob' to be \[E\] = \[10\] \(got \[11\]\)"),
     ("local", True, r"Expected 'factors' of Wrong to be \[H, N, K\] and \[H, M, K\] .* \(got \[2, 6, 3\]")],
)  # fmt: skip
def test_numbers_of_a_source_of_ones_own_are_checked_before_kernels(
    estimator: str, by_factors: bool, message: str
) -> None:
    class Source(GraphSource):
        def forward(self, tokens: Tokens) -> Choice:
            return Choice(patterns.full(5, heads=2), Wrong(by_factors))

    conv = AttentionConv(3, 4, 2, Source(), estimator=estimator)
    with pytest.raises(ValueError, match=message):
        conv(torch.ones(5, 3), seed=0)


def test_refused_arguments_of_estimators() -> None:
    ptr = torch.tensor([0, 3, 5])
    sbm = SBM(torch.full((1, 5, 1), 0.1), torch.ones(1, 5, 1), torch.ones(1, 1, 1), ptr)
    graph, (probes, chance) = (
        sample_edges(sbm, exploration=0.5, seed=0),
        draw_probes(sample_edges(sbm, seed=0), 2.0, seed=0),
    )
    x, foreign = torch.ones(1, 5, 4), patterns.full(5)
    longer = patterns.full(9)
    loss = torch.ones(2)

    def expect(model: Any = sbm, edges: Any = graph, tried: Any = probes, eta: Any = chance, **options: Any) -> Any:
        return attach_local_expectation(x, x, x, x, model, edges, tried, eta, **options)

    (
        expect(), straight_through(sbm, graph), relaxed_bias(sbm, graph), concrete_bias(sbm, graph, 0.5, seed=0),
        score_function(sbm, graph, loss),
    )  # fmt: skip
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: expect(model=None), TypeError, r"Expected 'probability' to be an EdgeProbability \(got NoneType\)"),
        (lambda: expect(edges=longer), ValueError,
         r"Expected 'graph' with \(heads, queries, keys\) = \(1, 5, 5\) \(got \(1, 9, 9\)\)"),
        (lambda: expect(edges=foreign), ValueError, "Expected 'graph' over the sequences of this SBM"),
        (lambda: expect(tried=foreign), ValueError, "Expected 'probes' over the sequences of this SBM"),
        (lambda: expect(eta=chance + 1), ValueError, r"Expected 'chance' in \[0, 1\]"),
        (lambda: expect(forced=chance), ValueError, r"Expected 'forced' to be \[E\]"),
        (lambda: straight_through(sbm, foreign), ValueError, "Expected 'graph' over the sequences of this SBM"),
        (lambda: score_function(sbm, graph, loss.to("meta")), ValueError, "Expected 'loss' on cpu, as 'graph' is"),
        (lambda: relaxed_bias(cast(Any, graph), graph), TypeError,
         r"Expected 'probability' to be an EdgeProbability \(got AttentionGraph\)"),
        (lambda: concrete_bias(sbm, graph, 0.0, seed=0), ValueError,
         r"Expected 'temperature' in \(0, inf\) \(got 0.0\)"),
        (lambda: score_function(sbm, graph, loss.mean()), ValueError,
         r"Expected 'loss' to be \[B\] = \[2\] \(got \[\]\)"),
        (lambda: score_function(sbm, graph, loss[:1]), ValueError,
         r"Expected 'loss' to be \[B\] = \[2\] \(got \[1\]\)"),
        (lambda: score_function(sbm, foreign, loss), ValueError, "Expected 'graph' over the sequences of this SBM"),
        (lambda: make_attention("sbm", 6, 4, 2, num_clusters=3, probes=-1), ValueError, "Expected 'probes' in "),
    ]  # fmt: skip
    for action, error, message in cases:
        with pytest.raises(error, match=message):
            action()


def test_more_pairs_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.checks, "available", lambda device: 2**30)
    ones = torch.ones(1, 60_000, 1)
    sbm = SBM(ones / 60_000, ones, ones[:, :1])
    message = r"Expected 'per_query' to ask for no more than memory holds \(got 3,600,000,000 probes, 26.8 GiB of 1.0 GiB\). .*fewer heads"
    with pytest.raises(ValueError, match=message):
        draw_probes(sample_edges(sbm, seed=0), math.inf, seed=0)
    with pytest.raises(ValueError, match=r"Expected 'sbm' to ask for no more than memory holds"):
        SBMAttentionConv(4, 4, num_clusters=2, estimator="relaxed")(torch.ones(60_000, 4), seed=0)
    with pytest.raises(
        ValueError, match=r"Expected 'graph' to ask for no more than memory holds \(got 3,600,000,000 pairs"
    ):
        score_function(sbm, sample_edges(sbm, seed=0), torch.ones(1))
    assert draw_probes(sample_edges(sbm, seed=0), 16.0, seed=0)[0].num_edges == pytest.approx(960_000, rel=0.01)
    few, short = (
        patterns.window(6000, 500),
        SBM(sbm.query_membership[:, :6000], sbm.key_membership[:, :6000], sbm.block_matrix),
    )
    monkeypatch.setattr(ops.checks, "available", lambda device: 2**26)
    for bias in (lambda: relaxed_bias(short, few), lambda: concrete_bias(short, few, 0.5, seed=0)):
        refuses(bias, "Expected 'graph' to ask for no more than memory holds (got 5,755,500 edges")


def test_infinitely_many_probes_are_all_pairs() -> None:
    sbm = SBM(
        torch.full((2, 3, 1), 0.1), torch.ones(2, 5, 1), torch.ones(2, 1, 1), torch.tensor([0, 1, 3]),
        torch.tensor([0, 3, 5]),
    )  # fmt: skip
    probes, chance = draw_probes(sample_edges(sbm, seed=0), math.inf, seed=0)
    assert probes.num_edges == 2 * (1 * 3 + 2 * 2)
    assert torch.equal(chance, torch.ones(3))


# ------------------------------------------------------------------ the layer


def gradient(conv: SBMAttentionConv) -> Any:
    """Of the cluster embeddings, or None."""
    return cast(Any, conv.source).head.clusters.grad


def test_estimators_differ_in_the_gradient_to_the_model_alone() -> None:
    x, ptr = draw(1, 30, 16, dtype=torch.float32), torch.tensor([0, 12, 30])
    outs, own, other = [], [], []
    for estimator in ("local", "mask", "paper", "none"):
        torch.manual_seed(0)
        conv = make_attention("sbm", 16, 8, 2, num_clusters=8, estimator=estimator, exploration=0.01)
        out = conv(x, ptr=ptr, seed=1)
        out.square().sum().backward()
        outs.append(out.detach())
        own.append(gradient(conv))
        other.append(conv.lin_value.weight.grad)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert all(torch.equal(other[0], grad) for grad in other[1:])
    assert own[3] is None
    assert not torch.allclose(own[0], own[1])
    assert not torch.allclose(own[1], own[2])


def test_the_layer_looks_at_all_pairs_with_enough_probes() -> None:
    """Then each pair's probability gets its exact effect: compared with the closed form, through the model's own autograd."""
    torch.manual_seed(0)
    conv = make_attention(
        "sbm", 6, 4, 2, num_clusters=3, estimator=Local(math.inf, rows=1), exploration=0.0, window=None
    ).double()
    x = draw(1, 7, 6)
    out, choice = conv(x, seed=1, return_choice=True)
    graph, sbm = choice.graph, choice.probability
    weight = draw(2, *out.shape)
    got = torch.autograd.grad(
        (out * weight).sum(), [conv.source.head.clusters, conv.source.head.mlp[0].weight], retain_graph=True
    )
    query, key, value = (
        lin(x).view(-1, 2, 4).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    everything = AttentionGraph.from_dense(torch.ones(2, 7, 7))
    effects = effect(
        reference_effects, weight.view(7, 2, 4).transpose(0, 1), query, key, value, graph.rowptr, graph.col, None,
        everything.rowptr, everything.col, None, 0.5,
    )  # fmt: skip
    g = torch.zeros(14, 7, dtype=torch.float64)
    g[everything.edge_row, everything.col.long()] = effects[1]
    g[graph.edge_row, graph.col.long()] += effects[0]
    p = torch.stack([sbm.rate[h] @ sbm.key_membership[h].T for h in range(2)])
    want = torch.autograd.grad(
        (p * g.view(2, 7, 7).detach()).sum(), [conv.source.head.clusters, conv.source.head.mlp[0].weight]
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_forced_edges_send_no_gradient() -> None:
    torch.manual_seed(0)
    x = draw(1, 5, 6, dtype=torch.float32)
    conv = SBMAttentionConv(6, 4, 1, 3, window=5)  # every pair is forced
    conv(x, seed=1).square().sum().backward()
    assert float(gradient(conv).abs().max()) == 0
    free = SBMAttentionConv(6, 4, 1, 3, estimator=Local(rows=1))
    free(x, seed=1).square().sum().backward()
    assert float(gradient(free).abs().max()) > 0


@pytest.mark.parametrize("estimator", ["relaxed", "concrete"])
def test_relaxations_train_on_all_pairs_and_evaluate_on_a_sample(estimator: str) -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(6, 4, 2, 3, estimator=estimator)
    x, ptr = draw(1, 9, 6, dtype=torch.float32), torch.tensor([0, 4, 9])
    out, graph = conv(x, ptr=ptr, seed=1, return_graph=True)
    assert graph.num_edges == 2 * (16 + 25)
    out.square().sum().backward()
    assert float(gradient(conv).abs().max()) > 0
    conv.eval()
    assert conv(x, ptr=ptr, seed=1, return_graph=True)[1].num_edges < 82


def test_local_expectation_runs_under_a_score_bias() -> None:
    torch.manual_seed(0)

    def far(query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        return -(graph.edge_index[0] - graph.edge_index[1]).abs().to(query.dtype)

    conv = SBMAttentionConv(6, 4, 2, 3, score_bias=far)
    conv(draw(1, 9, 6, dtype=torch.float32), seed=1).square().sum().backward()
    assert float(gradient(conv).abs().max()) > 0


def test_the_number_of_probes_may_change_between_steps() -> None:
    """A layer whose number is changed does what one does that had it from the start."""
    grads = []
    for first in (2.0, 30.0):
        torch.manual_seed(0)
        conv = make_attention("sbm", 6, 4, num_clusters=3, probes=first)
        for probes in (first, 30.0):
            cast(Local, conv.estimator).probes = probes
            conv.zero_grad()
            conv(draw(1, 40, 6, dtype=torch.float32), seed=1).square().sum().backward()
            grads.append(cast(Any, conv.source).head.clusters.grad.clone())
    assert torch.equal(grads[1], grads[3])
    assert not torch.equal(grads[0], grads[1])


def test_the_default_follows_the_normalizer() -> None:
    assert isinstance(SBMAttentionConv(6, 4).estimator, Local)
    assert type(SBMAttentionConv(6, 4, normalizer="sparsemax").estimator) is Mask


# ------------------------------------------------------------------ parameterisations


@pytest.mark.parametrize("parameterization", ["paper", "mixed"])
@pytest.mark.parametrize("density", [0.05, 0.25, 0.7])
@pytest.mark.parametrize("blocks", [1, 2, 4, 16, 128])
def test_initial_density_is_what_was_asked_for(parameterization: str, density: float, blocks: int) -> None:
    torch.manual_seed(0)
    head = SBMHead(32, 2, blocks, parameterization=parameterization, initial_density=density)
    found = (
        head(Tokens(draw(1, 2, 64, 32, dtype=torch.float32), draw(2, 2, 64, 32, dtype=torch.float32)))
        .expected_density()
        .detach()
    )
    assert float(found.mean()) == pytest.approx(
        density, rel=0.15 if blocks > 4 else 0.3
    )  # few blocks: few random affinities
    if parameterization == "mixed":
        torch.testing.assert_close(head.block.detach().sigmoid().mean(-1), torch.full((2, blocks), density))


def test_assortative_probability_is_that_of_the_same_block() -> None:
    torch.manual_seed(0)
    head = SBMHead(8, 1, 4, parameterization="assortative", temperature=0.2, cluster_init="orthogonal")
    query, key = draw(1, 1, 5, 8, dtype=torch.float32), draw(2, 1, 5, 8, dtype=torch.float32)
    sbm = head(Tokens(query, key))
    torch.testing.assert_close(sbm.query_membership.sum(-1), torch.ones(1, 5))
    torch.testing.assert_close(sbm.edge_prob_dense()[0], sbm.query_membership[0] @ sbm.key_membership[0].T)
    assert float(sbm.edge_prob_dense().detach().max()) <= 1


def test_tied_memberships_are_those_of_the_queries() -> None:
    head = SBMHead(8, 1, 4, parameterization="assortative", tied=True)
    query = draw(1, 1, 5, 8, dtype=torch.float32)
    sbm = head(Tokens(query, draw(2, 1, 5, 8, dtype=torch.float32), bipartite=False))
    assert torch.equal(sbm.query_membership, sbm.key_membership)
    for keys in (5, 6):  # other tokens, even if they are as many
        refuses(partial(head, Tokens(query, draw(2, 1, keys, 8, dtype=torch.float32))), "with tied memberships")
    conv, x = make_attention("sbm", 8, 4, 2, num_clusters=3, tied=True), torch.randn(6, 8)
    assert conv(x).shape == (6, 8)
    refuses(lambda: conv((x, x.clone())), "Use tied=False")


@pytest.mark.parametrize("part", [0.1, 0.25, 0.9])
def test_queries_are_chosen_with_their_probability(part: float) -> None:
    """Singly, in pairs of neighbors, in pairs of sequences, and over seeds; within five standard deviations."""
    ptr, ids, seeds = torch.arange(51) * 4_000, torch.arange(50), (1, 2**62 + 12345)
    drawn = [schemas.sample_queries(ptr, ids, 200_000, part, seed) for seed in seeds]
    for found, seed in zip(drawn, seeds, strict=True):
        assert torch.equal(found, reference_systematic.sample_queries(ptr, ids, 200_000, part, seed))
    first, second = (found.view(50, 4_000).double() for found in drawn)
    both = {
        "one": first, "neighbors": first[:, 1:] * first[:, :-1], "sequences": first[1:] * first[:-1],
        "distant": first[:, 64:] * first[:, :-64], "seeds": first * second,
    }  # fmt: skip
    for name, found in both.items():
        chance = part if name == "one" else part**2
        assert abs(float(found.mean()) - chance) < 5 * (chance * (1 - chance) / found.numel()) ** 0.5, name
    by_row = first.mean(0)
    assert float((by_row - part).square().mean()) == pytest.approx(part * (1 - part) / 50, rel=0.1)
    alone = schemas.sample_queries(torch.tensor([0, 3, 3_000]), torch.tensor([99, 7 + (5 << 32)]), 3_000, part, 1)
    assert torch.equal(alone[3:], first[7, :2_997].bool())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("window", [None, 2])
def test_a_part_of_the_queries_has_the_gradient_of_all(is_causal: bool, block_size: int, window: int | None) -> None:
    """Of those that are taken the gradient is that of all, divided by the part; of others it is zero."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"is_causal": is_causal, "block_size": block_size, "window": window}
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, score_bias=ALiBi(2), **options).double()
    x, ptr, ids = draw(1, 90, 6), torch.tensor([0, 50, 90]), torch.tensor([7, 3])
    grads, outs = [], []
    for rows in (1.0, 0.25):
        conv.estimator = Local(3.0, rows)
        out, choice = conv(x, ptr=ptr, seed=1, sequence_ids=ids, return_choice=True)
        assert isinstance(choice.probability, SBM)
        grads.append(torch.autograd.grad(out.sin().sum(), choice.probability.rate)[0])
        outs.append(out)
    assert torch.equal(*outs)
    taken = grads[1].abs().sum((0, 2)) > 0
    assert 0 < taken.sum() < 0.6 * taken.numel()
    torch.testing.assert_close(grads[1][:, taken], 4 * grads[0][:, taken], rtol=1e-9, atol=1e-12)
    # alone, a sequence has the same queries taken
    conv.estimator = Local(3.0, 0.25)
    alone, choice = conv(x[50:], seed=1, sequence_ids=ids[1:], return_choice=True)
    assert isinstance(choice.probability, SBM)
    grad = torch.autograd.grad(alone.sin().sum(), choice.probability.rate)[0]
    torch.testing.assert_close(grad, grads[1][:, -grad.size(1) :], rtol=1e-9, atol=1e-12)
