"""Learned sources: target densities, distillation, and dense attention, in which they begin."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from problems import draw, refuses
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    BlockGraph,
    Choice,
    DCMMBias,
    EdgeProbability,
    LearnedSource,
    SBMAttentionConv,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    Tokens,
    auxiliary_loss,
    make_attention,
    sample_edges,
)
from sbm_pyg.graphs.ragged import offsets
from sbm_pyg.layers.attention import Returns
from sbm_pyg.ops import checks
from sbm_pyg.sources import patterns
from sbm_pyg.sources.dense import DenseChoice, attend_densely, sample_rows
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.learned import sample_sequences
from sbm_pyg.sources.selectors import TopKSource
from sbm_pyg.training.estimators import Distill, Imitate, Local
from sbm_pyg.training.gradients import distillation, row_distillation


def model(is_causal: bool = False, dtype: torch.dtype = torch.float64) -> SBM:
    y, z, s = (draw(seed, 2, size, 3, dtype=dtype).sigmoid() for seed, size in ((1, 20), (2, 20), (3, 3)))
    return SBM(y, z, s / 3, torch.tensor([0, 8, 20]), is_causal=is_causal)


# ------------------------------------------------------------------ target densities


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
def test_each_query_expects_its_part_of_the_keys(density: float, is_causal: bool) -> None:
    shared = model(is_causal).with_density(density)
    keys = torch.tensor([8.0] * 8 + [12.0] * 12, dtype=torch.float64)
    if is_causal:
        keys = torch.cat([torch.arange(1.0, 9), torch.arange(1.0, 13)]).double()
    wanted = (density * keys).clamp(min=1).expand(2, -1)
    torch.testing.assert_close(shared.expected_degree(), wanted)
    assert shared.is_causal is is_causal
    before, after = model(is_causal).edge_prob_dense(1), shared.edge_prob_dense(1)
    torch.testing.assert_close(after / after.sum(2, keepdim=True), before / before.sum(2, keepdim=True))


def test_keys_compete_for_a_density() -> None:
    y, z, s = (draw(seed, 1, size, 3).sigmoid().requires_grad_() for seed, size in ((1, 4), (2, 5), (3, 3)))
    p = SBM(y, z, s).with_density(0.3).edge_prob_dense()[0]
    (grad,) = torch.autograd.grad(p[2].sum(), z)
    assert grad.abs().max() < 1e-12  # whatever a key gains, others lose
    assert torch.autograd.gradcheck(lambda *parts: SBM(*parts).with_density(0.3).edge_prob_dense(), (y, z, s))


def test_a_layer_with_a_target_density_samples_so_many_edges() -> None:
    torch.manual_seed(0)
    head = {"parameterization": "overlapping"}
    conv = make_attention("sbm", 8, 8, 2, num_clusters=8, target_density=0.1, exploration=0.0, **head)
    out, choice = conv(torch.randn(400, 8), seed=1, return_choice=True)
    assert float(choice.probability.expected_density().detach().mean()) == pytest.approx(0.1, rel=1e-5)
    assert float(choice.graph.density.mean()) == pytest.approx(0.1, rel=0.03)
    out.square().sum().backward()
    assert cast(Any, conv.source).head.clusters.grad is not None
    cast(SBMSource, conv.source).target_density = None
    assert float(conv(torch.randn(400, 8), seed=1, return_graph=True)[1].density.mean()) > 0.2


class Steady(torch.nn.Module):
    """Two heads whose memberships are what it is given, whatever the tokens hold."""

    heads = 2

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.y, self.z = (torch.nn.Parameter(draw(seed + side, 2, 20, 3).sigmoid()) for side in range(2))

    def forward(self, tokens: Tokens) -> SBM:
        block = torch.eye(3, dtype=torch.float64).expand(2, -1, -1)
        return SBM(self.y, self.z, block, tokens.query_ptr, tokens.key_ptr)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pairs_of_a_head_compete_for_its_density(is_causal: bool) -> None:
    x, ptr = draw(1, 2, 20, 4), torch.tensor([0, 8, 20])
    head = Steady(1)
    source = SBMSource(head, target_density=0.3)

    def call(seed: int) -> SBM:
        return cast(SBM, source(Tokens(x, query_ptr=ptr, is_causal=is_causal, seed=seed)).probability)

    plain = head(Tokens(x, query_ptr=ptr))
    plain = plain.causal() if is_causal else plain
    alone = plain.with_density(0.3)
    torch.testing.assert_close(call(1).rate, alone.rate)  # no mean is known yet
    torch.testing.assert_close(call(1).rate, alone.rate)  # and the same call sees the same
    mean = torch.stack([plain.edge_prob_dense(sequence).sum((1, 2)) for sequence in range(2)]).sum(0)
    mean = mean / (8 * 9 / 2 + 12 * 13 / 2 if is_causal else 8 * 8 + 12 * 12)
    shared = call(2)
    torch.testing.assert_close(shared.rate, plain.rate * (0.3 / mean)[:, None, None], rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(shared.expected_edges()[1, 0], head.z)
    assert float(grad.abs().max()) < 1e-10  # whatever a pair gains, others lose
    weight = draw(9, 2, 12, 12)
    (got,) = torch.autograd.grad((call(2).edge_prob_dense(1) * weight).sum(), head.z)
    again = head(Tokens(x, query_ptr=ptr))
    again = again.causal() if is_causal else again
    level = again.expected_edges()[1] * (mean / again.expected_edges()[1]).detach()  # the mean of the sequence
    p = again.edge_prob_dense(1) * 0.3 / level[:, None, None]
    (wanted,) = torch.autograd.grad((p * weight).sum(), head.z)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)

    with torch.no_grad():
        head.y.mul_(2)
    torch.testing.assert_close(call(3).rate, 2 * shared.rate, rtol=1e-5, atol=0)  # the mean follows later
    assert torch.equal(call(3).rate, call(3).rate)
    torch.testing.assert_close(call(4).rate, 2 * shared.rate / 1.1, rtol=1e-5, atol=0)
    source.eval()
    fixed = call(5)
    torch.testing.assert_close(fixed.rate, 2 * shared.rate / 1.1, rtol=1e-5, atol=0)
    assert torch.equal(call(6).rate, fixed.rate)
    source.train()
    whole, parts = copy.deepcopy(source), copy.deepcopy(source)
    for part in (slice(0, 8), slice(8, 20)):  # as when gradients are accumulated
        offsets = torch.tensor([0, part.stop - part.start])
        parts.head.forward = lambda *_, part=part, offsets=offsets: SBM(
            head.y[:, part], head.z[:, part], torch.eye(3, dtype=torch.float64).expand(2, -1, -1), offsets, offsets
        )
        parts(Tokens(x[:, part], is_causal=is_causal, seed=7))
    whole(Tokens(x, query_ptr=ptr, is_causal=is_causal, seed=7))
    torch.testing.assert_close(parts.seen, whole.seen)
    other = SBMSource(Steady(1), target_density=0.3)
    other.load_state_dict(source.state_dict())
    rate = cast(SBM, other.eval()(Tokens(x, query_ptr=ptr, is_causal=is_causal, seed=9)).probability).rate
    assert torch.equal(rate, fixed.rate)
    source.reset_parameters()
    assert not any(buffer.any() for buffer in source.buffers())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("density", "candidates", "drawn"), [(0.1, 4.0, 0.4), (0.3, 4.0, 1.0), (None, 3.0, None)])
def test_each_query_keeps_the_candidates_of_the_largest_scores(
    density: float | None, candidates: float, drawn: float | None, is_causal: bool
) -> None:
    head, ptr = SBMHead(4, 2, 3, initial_density=0.5), torch.tensor([0, 8, 20])
    query, key = (draw(seed, 2, 20, 4).float().round() for seed in (1, 2))  # with ties
    tokens = Tokens(query, key, ptr, ptr, bipartite=True, is_causal=is_causal, seed=3)
    every = SBMSource(head, target_density=drawn if drawn != 1 else 0.999999).eval()(tokens).graph
    source = SBMSource(head, target_density=density, candidates=candidates).eval()
    choice = source(tokens)
    score = (query @ key.mT).flatten(0, 1)[every.edge_row, every.col.long()]
    kept = torch.zeros(every.num_edges, dtype=torch.bool)
    share = 1 / candidates if density is None else max(1 / candidates, density)
    for row, (first, last) in enumerate(pairwise(every.rowptr.tolist())):
        best = sorted(range(first, last), key=lambda edge: (-float(score[edge]), edge))
        place, size = (row % 20, 8) if row % 20 < 8 else (row % 20 - 8, 12)
        least = (density or 0) * (place + 1 if is_causal else size)
        kept[best[: max(1, round(max((last - first) * share, least)))]] = True
    assert torch.equal(choice.graph.col, every.select(kept).col)
    assert torch.equal(choice.graph.rowptr, every.select(kept).rowptr)
    assert 0 < choice.graph.num_edges < every.num_edges
    assert choice.independent
    windowed = SBMSource(head, target_density=density, candidates=candidates, window=1).eval()(
        replace(tokens, bipartite=False)
    )
    near = patterns.window(None, 1, ptr=ptr, is_causal=is_causal)
    assert torch.equal(windowed.graph.to_dense(0), (choice.graph | near).to_dense(0))


def test_candidates_of_one_keep_all_that_is_drawn() -> None:
    tokens = Tokens(draw(1, 2, 20, 4).float(), seed=3)
    head = SBMHead(4, 2, 3)
    graphs = [
        source(tokens).graph
        for source in (SBMSource(head, target_density=0.3), SBMSource(head, target_density=0.3, candidates=1))
    ]
    assert torch.equal(graphs[0].col, graphs[1].col)
    for density, candidates, exploration in ((0.1, 4.0, 0.16), (0.5, 4.0, 1.0), (0.1, 1.0, 0.01), (None, 4.0, 0.0)):
        source = SBMSource(head, target_density=density, candidates=candidates)
        assert source(tokens).exploration == pytest.approx(exploration)
        assert SBMSource(head, target_density=density, exploration=0.3, candidates=2)(tokens).exploration == 0.3
        assert source.eval()(tokens).exploration == 0
    assert "candidates=2.5" in repr(SBMSource(head, candidates=2.5))
    refuses(lambda: SBMSource(head, candidates=0.5), "Expected 'candidates' in [1, inf) (got 0.5)")
    with pytest.raises(ValueError, match=r"Expected 'candidates' to be 1 with blocks of tokens \(got 2 with block"):
        SBMSource(head, candidates=2, block_size=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_source_has_the_mean_and_the_gradients_of_an_eager_one() -> None:
    query, ptr, weight = draw(1, 2, 20, 4).float(), torch.tensor([0, 8, 20]), draw(2, 2, 20, 3).float()
    torch.manual_seed(0)
    eager = SBMSource(SBMHead(4, 2, 3, parameterization="overlapping"), target_density=0.3)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other)
    for seed in (1, 2, 2, 3):
        rates = []
        for source in (eager, compiled):
            rates.append(cast(SBM, source(Tokens(query, query_ptr=ptr, seed=seed)).probability).query_membership)
            (rates[-1] * weight).sum().backward()
        torch.testing.assert_close(*rates)
        torch.testing.assert_close(eager.running_mean, other.running_mean)
        for one, two in zip(eager.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_a_target_density_needs_the_number_of_heads() -> None:
    x, ptr = draw(1, 2, 20, 4), torch.tensor([0, 20])
    head = torch.nn.Module()
    head.forward = Steady(1).forward
    with pytest.raises(
        ValueError, match="Expected 'head' with an attribute `heads` that counts those of its models, 2"
    ):
        SBMSource(head, target_density=0.3)(Tokens(x, query_ptr=ptr))


def test_a_density_of_next_to_nothing_stays_finite() -> None:
    """Keys that all say no: probabilities in proportion, but no more than a thousand times what they were."""
    y, z = torch.ones(1, 4, 1), torch.tensor([1e-20, 3e-20, 0.0, 0.0]).view(1, 4, 1).requires_grad_()
    p = SBM(y, z, torch.ones(1, 1, 1)).with_density(0.5).edge_prob_dense()[0]
    torch.testing.assert_close(p[0], torch.tensor([5e-18, 1.5e-17, 0.0, 0.0]))
    (grad,) = torch.autograd.grad(p.sum(), z)
    assert grad.isfinite().all()


@pytest.mark.parametrize("wrong", [0.0, 1.5, math.nan, -1])
def test_a_density_is_a_part_of_the_pairs(wrong: float) -> None:
    for call in (lambda: model().with_density(wrong), lambda: SBMSource(SBMHead(4), target_density=wrong)):
        with pytest.raises(ValueError, match=r"Expected '(density|target_density)' in \(0, 1\] \(got"):
            call()


# ------------------------------------------------------------------ memberships that overlap


def test_keys_of_overlapping_blocks_may_be_in_none() -> None:
    torch.manual_seed(0)
    head = SBMHead(6, heads=2, num_clusters=300, cluster_init="kaiming", initial_density=0.4, temperature=0.5)
    query, key = draw(1, 2, 9, 6, dtype=torch.float32), draw(2, 2, 7, 6, dtype=torch.float32)
    sbm = head(Tokens(query, key))
    torch.testing.assert_close(sbm.query_membership.sum(2), torch.ones(2, 9))
    by_hand = (head.mlp(key) @ head.clusters.mT / 0.5 + math.log(0.4 / 0.6)).sigmoid()
    torch.testing.assert_close(sbm.key_membership, by_hand)
    assert torch.equal(sbm.block_matrix, torch.eye(300).expand(2, -1, -1))
    assert float(sbm.expected_density().mean().detach()) == pytest.approx(0.4, abs=0.02)
    assert sbm.edge_prob_dense().max() <= 1
    watched = head.mlp.register_forward_hook(lambda *_: None)  # then each layer is called
    torch.testing.assert_close(head(Tokens(query, key)).rate, sbm.rate)
    watched.remove()
    tied = SBMHead(6, heads=2, num_clusters=4, parameterization="overlapping", tied=True)
    both = tied(Tokens(query, key.new_zeros(2, 9, 6), bipartite=False))
    assert not torch.equal(both.query_membership, both.key_membership)


# ------------------------------------------------------------------ distillation


@pytest.mark.parametrize("is_causal", [False, True])
def test_distillation_is_the_cross_entropy_over_all_keys(is_causal: bool) -> None:
    sbm, query, key = model(is_causal), draw(4, 2, 20, 5), draw(5, 2, 20, 5)
    graph = sample_edges(sbm, seed=1)
    bias = draw(6, graph.num_edges)
    got = distillation(query, key, sbm, graph, bias=bias, scale=0.7)
    p = torch.zeros(2, 20, 20, dtype=torch.float64)
    p[:, :8, :8], p[:, 8:, 8:] = sbm.edge_prob_dense(0), sbm.edge_prob_dense(1)
    logit = torch.full((2, 20, 20), -math.inf, dtype=torch.float64)
    place = (graph.edge_head, graph.edge_index[1], graph.edge_index[0])
    logit[place] = ((query @ key.mT) * 0.7)[place] + bias
    weight = logit.softmax(2).nan_to_num(0)
    share = (p / p.sum(2, keepdim=True)).clamp(min=1e-300).log()
    each = (weight * share).sum((0, 2))  # [N]
    torch.testing.assert_close(got, -(each[:8].mean() + each[8:].mean()) / 4)


def test_distillation_over_selected_keys_asks_for_no_degrees_and_leaves_others_alone() -> None:
    """Of blocks, too, whose keys are blocks."""
    query, key = draw(1, 1, 8, 2), draw(2, 1, 8, 2)
    tokens = AttentionGraph.from_dense(torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]]))
    for graph in (tokens, BlockGraph(tokens, 2)):

        class Table(EdgeProbability):
            """A number for each pair, whatever they add up to."""

            p = draw(3, 4, 4).exp().requires_grad_()

            def on(self, graph: AttentionGraph) -> Tensor:
                key, query = graph.edge_index
                return self.p[query, key]

            def expected_density(self) -> Tensor:
                raise AssertionError

        table, size = Table(), graph.num_queries
        loss = distillation(query[:, :size], key[:, :size], table, graph, over="selected")
        weight = (
            (query[0, :size] @ key[0, :size].T).masked_fill(~graph.to_dense()[0], -torch.inf).softmax(1).nan_to_num()
        )
        weight = weight.view(4, size // 4, 4, size // 4).sum((1, 3))
        kept = tokens.to_dense()[0]
        share = (table.p / (table.p * kept).sum(1, keepdim=True).clamp(min=1e-9)).log()
        torch.testing.assert_close(loss, -(weight * share)[kept].sum() / size)
        (grad,) = torch.autograd.grad(loss, table.p)
        assert bool(grad[0, :2].all())
        assert not grad[~kept].any()
    refuses(lambda: distillation(query, key, table, graph, over="some"), "Expected 'over' to be one of")
    refuses(lambda: Imitate(over="some"), "Expected 'over' to be one of")


def test_distillation_leaves_out_queries_whose_edges_are_forbidden() -> None:
    sbm, query, key = model(), draw(4, 2, 20, 5), draw(5, 2, 20, 5)
    graph = sample_edges(sbm, seed=1)
    forbidden = torch.where(graph.edge_index[1] % 2 == 0, -math.inf, 0.0).double()
    got = distillation(query, key, sbm, graph, bias=forbidden)
    torch.testing.assert_close(got, distillation(query, key, sbm, graph.select(forbidden == 0)))


def test_distillation_is_least_where_probabilities_follow_the_weights() -> None:
    query, key = draw(1, 1, 6, 4), draw(2, 1, 6, 4)
    weight = (query @ key.mT).softmax(2)
    eye, full = torch.eye(6, dtype=torch.float64)[None], patterns.full(6)
    best = SBM((weight * 0.4).requires_grad_(), eye, eye)
    loss = distillation(query, key, best, full)
    entropy = -(weight * weight.log()).sum() / 6
    torch.testing.assert_close(loss, entropy)
    (grad,) = torch.autograd.grad(loss, best.query_membership)
    assert grad.abs().max() < 1e-12
    for seed in range(3):
        other = SBM((weight * draw(seed, 1, 6, 6).exp()), eye, eye)
        assert distillation(query, key, other, full) > loss


def test_distill_adds_its_loss_to_the_gradient_and_nothing_to_the_output() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 8)
    layers = [SBMAttentionConv(8, 8, 2, num_clusters=4, estimator=each) for each in (Local(), Distill(0.7))]
    layers[1].load_state_dict(layers[0].state_dict())
    outs = [layer(x, seed=1) for layer in layers]
    assert torch.equal(*outs)
    for layer, out in zip(layers, outs, strict=True):
        (out.square().sum() + auxiliary_loss(layer)).backward()
    grads = [cast(Any, layer.source).head.clusters.grad for layer in layers]
    layer = layers[0]
    layer.zero_grad()
    query, key = (lin(x).view(30, 2, 8).transpose(0, 1) for lin in (layer.lin_query, layer.lin_key))
    few: dict[str, Any] = {"scale": layer.scale, "rows": 0.25, "part": 1 / 16}
    (
        0.7 * row_distillation(cast(SBMSource, layer.source), Tokens(query, key, bipartite=False, seed=1), **few)
    ).backward()
    assert layer.lin_query.weight.grad is None  # trains the source alone
    torch.testing.assert_close(
        grads[1], cast(Tensor, grads[0]) + cast(Tensor, cast(Any, layer.source).head.clusters.grad)
    )
    layers[1].eval()
    layers[1].zero_grad()
    layers[1](x, seed=1).square().sum().backward()
    layers[0].zero_grad()
    layers[0].eval()(x, seed=1).square().sum().backward()
    torch.testing.assert_close(
        *(cast(Any, layer.source).head.clusters.grad for layer in layers)
    )  # nothing in evaluation


def test_distill_asks_for_degrees() -> None:
    class Half(EdgeProbability):
        def on(self, graph: AttentionGraph) -> Tensor:
            return torch.full((graph.num_edges,), 0.5)

        def expected_density(self) -> Tensor:
            return torch.full((1, 1), 0.5)

    with pytest.raises(NotImplementedError, match=r"Expected 'probability' to have an `expected_degree` \(got Half"):
        distillation(draw(1, 1, 4, 2), draw(2, 1, 4, 2), Half(), patterns.full(4))
    refuses(lambda: Distill(-1), "Expected 'weight' in [0, inf) (got -1")
    assert AttentionConv(4, 4, estimator="distill").estimator.__class__ is Distill
    assert cast(Any, make_attention("sbm", 4, 4, estimator="distill", probes=3).estimator).probes == 3


# ------------------------------------------------------------------ training and evaluation


def test_exploration_is_the_square_of_the_target_density_in_training() -> None:
    head = SBMHead(4, 2, 3, parameterization="overlapping")
    x, ptr = draw(1, 2, 60, 4, dtype=torch.float32), torch.tensor([0, 60])

    def density(seed: int = 0, training: bool = True, **options: Any) -> float:
        source = SBMSource(head, **options).train(training)
        return float(source(Tokens(x, query_ptr=ptr, seed=seed)).graph.density.mean())

    few = density(target_density=0.5, exploration=0.0)
    assert density(target_density=0.5) == density(target_density=0.5, exploration=0.25) > few + 0.1
    assert density(target_density=0.5, training=False) == few
    assert density() == density(exploration=0.0)


def test_a_call_that_is_computed_again_sees_the_mean_of_its_time() -> None:
    """As activation checkpointing does in the backward pass, when other calls have moved the mean."""
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        layer: Any = SBMAttentionConv(4, 4, num_clusters=3, target_density=0.4)
        for step in range(2):
            x = draw(step, 60, 4, dtype=torch.float32).requires_grad_()
            y = x
            for number in range(2):  # twice the same layer
                call = partial(layer, seed=2 * step + number)
                y = call(y) if reentrant is None else checkpoint(call, y, use_reentrant=reentrant)
            y.square().sum().backward()
            found.append([y.detach(), cast(Tensor, x.grad), *(each.clone() for each in layer.buffers())])
    for step in (0, 1):
        for again in (found[2 + step], found[4 + step]):
            for one, other in zip(again, found[step], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("density", [0, 7.0, -1.0, math.nan, "a"])
def test_a_target_density_that_is_none(density: Any) -> None:
    for source in (SBMSource(SBMHead(4, num_clusters=3)), IndexerSource(Indexer(4), select="bernoulli")):
        with pytest.raises((TypeError, ValueError), match="Expected 'target_density'"):
            source.target_density = density
        assert source.target_density is None


def test_ranks_with_a_number_of_keys_take_the_larger_number_under_a_target_density() -> None:
    tokens = Tokens(torch.randn(1, 9, 4))
    for source in (IndexerSource(Indexer(4), select="top_k", k=3), TopKSource(3)):
        assert source.target_density is None
        for density, keys in ((None, 3), (0.5, 5), (0.1, 3), (1.0, 9)):
            source.target_density = density
            assert source(tokens).graph.num_edges == 9 * keys
            if isinstance(source, IndexerSource):
                assert (
                    source.predict(tokens)
                    .expected_degree()
                    .allclose(torch.tensor({None: 3.0, 0.5: 4.5, 0.1: 3.0, 1.0: 9.0}[density]))
                )


def test_ranks_without_a_number_of_keys_have_a_target_density() -> None:
    for source in (IndexerSource(Indexer(4)), TopKSource(target_density=0.5)):
        usual = source.target_density
        with pytest.raises(ValueError, match=r"Expected 'target_density' to be a number .* \(got None\)"):
            source.target_density = None
        assert source.target_density == usual


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("estimator", ["distill", "local"])
def test_a_detached_model_leaves_queries_and_keys_to_attention(estimator: str, block_size: int) -> None:
    """What learns queries and keys is what would over a given graph; what learns the model is what it was."""
    x, ptr, grads = 3 * draw(1, 20, 8).float(), torch.tensor([0, 8, 20]), []
    for detach in (False, True):
        torch.manual_seed(0)
        options = {"num_clusters": 4, "estimator": estimator, "window": 1, "block_size": block_size, "detach": detach}
        layer = make_attention("sbm", 8, 4, 2, **cast(Any, options))
        out, graph = layer(x, ptr=ptr, seed=3, return_graph=True)
        (out.square().sum() + auxiliary_loss(layer)).backward()
        grads.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    given = torch.autograd.grad(layer(x, graph).square().sum(), [layer.lin_query.weight, layer.lin_key.weight])
    for name, wanted in zip(("lin_query.weight", "lin_key.weight"), given, strict=True):
        torch.testing.assert_close(grads[1][name], wanted)
        assert (grads[0][name] - wanted).norm() > 1e-4 * wanted.norm()
    for name in (name for name in grads[0] if name.startswith("source")):
        torch.testing.assert_close(grads[0][name], grads[1][name])


# ------------------------------------------------------------------ dense attention


def by_hand(query: Tensor, key: Tensor, value: Tensor, ptrs: tuple[Tensor, Tensor], is_causal: bool) -> Tensor:
    """Attention of each sequence by its definition."""
    outs = []
    for (first, last), (start, end) in zip(*(pairwise(ptr.tolist()) for ptr in ptrs), strict=True):
        scores = query[:, first:last] @ key[:, start:end].mT * query.size(2) ** -0.5
        if is_causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        outs.append(scores.softmax(-1) @ value[:, start:end])
    return torch.cat(outs, 1)


@pytest.mark.parametrize("few", [0, 2**20])  # pairs of padding: groups of similar length, or one group
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([20], [20]), ([5, 5, 5], [5, 5, 5]), ([1, 9, 3, 30], None), ([4, 4], [7, 7]), ([3, 9, 2], [8, 1, 5])],
)
def test_dense_attention_of_ragged_sequences(
    queries: list[int], keys: list[int] | None, is_causal: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbm_pyg.ops.segments.FEW_PAIRS", few)
    query_ptr = offsets(torch.tensor(queries))
    key_ptr = query_ptr if keys is None else offsets(torch.tensor(keys))
    parts = [draw(seed, 2, int(ptr[-1]), 4) for seed, ptr in ((1, query_ptr), (2, key_ptr), (3, key_ptr))]
    parts = [part.requires_grad_() for part in parts]
    query, key, value = parts
    out = attend_densely(query, key, value, query_ptr, key_ptr, is_causal=is_causal)
    wanted = by_hand(query, key, value, (query_ptr, key_ptr), is_causal)
    torch.testing.assert_close(out, wanted)
    grad = draw(4, *out.shape)
    for got, right in zip(*(torch.autograd.grad(each, parts, grad) for each in (out, wanted)), strict=True):
        torch.testing.assert_close(got, right)


class Similarity(EdgeProbability):
    """The probabilities of a source of a user: each pair by itself, without factors and degrees."""

    def __init__(self, tokens: Tokens, weight: Tensor) -> None:
        self.query, self.key = tokens.query @ weight, tokens.key

    def on(self, graph: AttentionGraph) -> Tensor:
        key, query = graph.edge_index
        return (self.query[graph.edge_head, query] * self.key[graph.edge_head, key]).sum(-1).sigmoid()

    def expected_density(self) -> Tensor:
        raise AssertionError


class Table(LearnedSource):
    """A source of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.1 * torch.eye(4).expand(2, 4, 4).clone())
        self.target_density = 1.0

    def predict(self, tokens: Tokens) -> Similarity:
        return Similarity(tokens, self.weight)

    def choose(self, tokens: Tokens) -> Choice:
        raise AssertionError


OVERLAPPING: dict[str, Any] = {"parameterization": "overlapping", "cluster_init": "orthogonal"}
SOURCES: dict[str, Callable[[], Any]] = {
    "sbm": lambda: SBMSource(SBMHead(4, 2, 8, **OVERLAPPING), target_density=1.0),
    "degrees": lambda: SBMSource(SBMHead(4, 2, 8, degree_corrected=True, **OVERLAPPING), target_density=1.0),
    "window": lambda: SBMSource(SBMHead(4, 2, 8, **OVERLAPPING), target_density=1.0, window=2),
    "blocks": lambda: SBMSource(SBMHead(4, 2, 8, **OVERLAPPING), target_density=1.0, block_size=3),
    "bernoulli": lambda: IndexerSource(Indexer(4, 2), select="bernoulli", target_density=1.0),
    "user's own": lambda: Table(),
    "top_k": lambda: IndexerSource(Indexer(4, 2), select="top_k", target_density=1.0),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_a_target_density_of_1_is_dense_attention_and_trains_the_source(name: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    estimator = "imitate" if name == "top_k" else "distill"
    conv = AttentionConv(8, 4, 2, SOURCES[name](), estimator=estimator, is_causal=is_causal).double()
    x, ptr = draw(1, 33, 8), torch.tensor([0, 9, 14, 30, 33])
    full = patterns.full(33, is_causal=is_causal, ptr=ptr)
    out, choice = conv(x, ptr=ptr, seed=1, return_choice=True)
    torch.testing.assert_close(out, conv(x, full))
    assert "graph" not in vars(choice)  # no edge was stored
    assert choice.density.equal(torch.ones(4, 2).double())
    assert choice.graph.num_edges == 2 * full.num_edges
    (out.square().sum() + auxiliary_loss(conv)).backward()
    for seed in range(4):  # other rows, since a row with one key teaches nothing
        (0 * conv(x, ptr=ptr, seed=seed).sum() + auxiliary_loss(conv)).backward()
    trained = [parameter.grad for parameter in conv.source.parameters() if parameter.grad is not None]
    assert any(bool(grad.any()) for grad in trained)
    wanted = torch.autograd.grad(conv(x, full).square().sum(), conv.lin_query.weight)[0]
    torch.testing.assert_close(conv.lin_query.weight.grad, wanted)  # the source is detached
    assert torch.equal(conv.eval()(x, ptr=ptr), out)


@pytest.mark.parametrize("name", SOURCES)
def test_probabilities_come_closer_to_attention_while_it_is_dense(name: str) -> None:
    """By the loss over all rows, on tokens that attend to those of their kind, at any distance."""
    torch.manual_seed(0)
    source = SOURCES[name]()
    kind = torch.randint(4, (60,)).repeat_interleave(source.block_size)
    key = (4 * torch.eye(4)[kind]).expand(2, -1, -1).contiguous()
    tokens = Tokens(key, key.clone(), torch.tensor([0, 60 * source.block_size]))
    every = partial(row_distillation, source, tokens, rows=math.inf, part=1.0)
    before = float(every().detach())
    optimizer = torch.optim.Adam(source.parameters(), 0.02)
    for step in range(60):
        loss = row_distillation(source, replace(tokens, seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(every().detach()) < 0.85 * before


@pytest.mark.parametrize("num_sinks", [0, 3])
def test_row_distillation_is_the_cross_entropy_of_sampled_rows(num_sinks: int) -> None:
    """Window, sinks and self-loops are left out; with all rows it is the mean over them."""
    head = Steady(1)
    source = SBMSource(head, window=1, num_sinks=num_sinks)
    query, key = draw(1, 2, 20, 4), draw(2, 2, 20, 4)
    ptr = torch.tensor([0, 8, 20])
    loss = row_distillation(source, Tokens(query, key, ptr, bipartite=False), rows=math.inf, part=1.0)
    total = torch.zeros((), dtype=torch.float64)
    for first, last in ((0, 8), (8, 20)):
        part = slice(first, last)
        weight = (query[:, part] @ key[:, part].mT).softmax(-1)
        far = (torch.arange(last - first)[:, None] - torch.arange(last - first)).abs() > 1
        far &= torch.arange(last - first) >= num_sinks
        p = (head.y[:, part] @ head.z[:, part].mT) * far
        total = total - (weight * far * (p / p.sum(-1, keepdim=True)).clamp(min=1e-300).log()).sum()
    torch.testing.assert_close(loss, total / 40)
    sampled = [row_distillation(source, Tokens(query, key, ptr, bipartite=False, seed=s), part=1.0) for s in range(400)]
    spread = torch.stack(sampled).std() / 20
    assert abs(torch.stack(sampled).mean() - loss) < 5 * spread + 0.05  # fewer rows of longer sequences, so not exact


def test_distillation_refuses_tokens_and_numbers_that_are_not_of_its_graph() -> None:
    source, tokens, graph = SBMSource(Steady(1)), Tokens(draw(1, 2, 20, 4)), patterns.full(20, heads=2)
    sbm = SBM(torch.full((2, 20, 1), 0.1), torch.ones(2, 20, 1))
    x = torch.ones(2, 20, 4)
    for call, message in (
        (lambda: row_distillation(source, tokens, scored=Tokens(draw(1, 2, 19, 4))), "Expected 'scored' of 2 heads"),
        (lambda: row_distillation(source, tokens, score_bias=lambda *_: torch.ones(3)), "Expected 'score_bias' to be "),
        (lambda: distillation(x[:, :19], x, sbm, graph), r"Expected 'query' to be \[H, N, C\] = \[2, 20, any\]"),
        (lambda: distillation(x, x[:, :19], sbm, graph), r"Expected 'key' to be \[H, M, C\] = \[2, 20, any\]"),
        (lambda: distillation(x, x, sbm, graph, bias=torch.ones(3)), r"Expected 'bias' to be \[E\] = \[800\]"),
        (lambda: distillation(x, x, sbm, graph, scale=math.nan), "Expected 'scale' in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("block_size", [1, 3])
def test_rows_are_taken_from_sequences_that_have_a_choice_of_keys(block_size: int) -> None:
    """A single token, or block, has attention weight 1, from which nothing is learned."""
    lengths = [block_size, block_size, 2 * block_size, 1, block_size, 5 * block_size, 1, block_size]
    ptr = offsets(torch.tensor(lengths))
    tokens = Tokens(draw(1, 2, sum(lengths), 4, dtype=torch.float32), query_ptr=ptr)
    source = SBMSource(SBMHead(4, 2, 3), block_size=block_size)
    for seed in range(10):
        few = sample_sequences(replace(tokens, seed=seed), 0.25, block_size)
        assert sorted(few.query_ptr.diff().tolist()) == [2 * block_size, 5 * block_size]
        assert sample_sequences(replace(tokens, seed=seed), 0.5, block_size).query_ptr.numel() == 5
        source.zero_grad()
        row_distillation(source, replace(tokens, seed=seed)).backward()
        assert all(bool(each.grad.any()) for each in source.head.parameters())  # type: ignore[union-attr]


def test_rows_are_sampled_within_each_sequence() -> None:
    tokens = Tokens(draw(1, 2, 116, 4), query_ptr=torch.tensor([0, 16, 116]), is_causal=True, seed=3)
    graph = sample_rows(tokens, 1.0)
    rows = graph.rowptr.diff().view(2, -1)
    assert torch.equal(rows[0], rows[1])
    assert ((rows[0, :16] > 0).sum(), (rows[0, 16:] > 0).sum()) == (4, 10)
    whole = rows[0] > 0
    assert torch.equal(rows[0][whole], tokens.allowed_keys[whole])
    few = sample_sequences(replace(tokens, seed=1), 0.5)
    assert few.query_ptr.numel() == 2
    assert few.key is few.query
    assert few.num_queries in (16, 100)
    assert sample_sequences(tokens, 1.0) is tokens


def test_rows_of_blocks_attend_to_all_keys_of_their_sequence() -> None:
    ptrs = torch.tensor([0, 3, 7]), torch.tensor([0, 8, 12])
    tokens = Tokens(draw(1, 2, 7, 2), draw(2, 2, 12, 2), *ptrs, bipartite=True, seed=0)
    graph = sample_rows(tokens, math.inf, block_size=2)
    assert graph.block_size == 2
    assert [graph.to_dense(sequence).shape for sequence in (0, 1)] == [(2, 3, 8), (2, 4, 4)]
    assert all(bool(graph.to_dense(sequence).all()) for sequence in (0, 1))


def test_sampled_rows_have_the_keys_of_their_sequence() -> None:
    """Also if sequences have other numbers of keys than of queries."""
    ptr, key_ptr = torch.tensor([0, 2, 7]), torch.tensor([0, 6, 9])
    tokens = Tokens(draw(1, 2, 7, 4), draw(2, 2, 9, 4), ptr, key_ptr, seed=0)
    every = sample_rows(tokens, math.inf)
    assert [every.sequence(number).density.tolist() for number in (0, 1)] == [[[1.0, 1.0]]] * 2
    few = sample_rows(tokens, 0.5).degree
    assert few.shape == (2, 7)
    assert [(few[0, part] > 0).sum().item() for part in (slice(2), slice(2, 7))] == [1, 2]


@pytest.mark.parametrize("change", ["score_bias", "entmax15", "edge_filter", "weights"])
def test_options_that_the_dense_kernel_lacks_store_the_full_graph(change: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"score_bias": DCMMBias(4, 2, 3)} if change == "score_bias" else {}
    options |= {"normalizer": change, "estimator": "mask"} if change == "entmax15" else {}
    conv = AttentionConv(8, 4, 2, SOURCES["sbm"](), **options)
    query, key, value = (draw(seed, 2, 12, 4).float().requires_grad_() for seed in (1, 2, 3))
    call: dict[str, Any] = {"edge_filter": lambda graph: graph.col % 2 == 0} if change == "edge_filter" else {}
    call |= {"returns": Returns(attention_weights=True)} if change == "weights" else {}
    out, given = (conv.attend(query, key, value, graph, seed=0, **call) for graph in (None, patterns.full(12)))
    out, given = (each[0] if change == "weights" else each for each in (out, given))
    torch.testing.assert_close(out, given)
    assert auxiliary_loss(conv).requires_grad  # and the source learns


def test_a_dense_choice_that_is_changed_is_stored() -> None:
    tokens = Tokens(draw(1, 2, 5, 3))
    choice = DenseChoice(tokens)
    assert choice.causal().graph.is_causal
    assert choice.select(torch.arange(50) % 2 == 0).graph.num_edges == 25
    assert choice.force(patterns.window(5, 1)) is choice
    assert choice.expand(2) is choice
    assert DenseChoice(Tokens(draw(1, 1, 5, 3))).expand(2).graph.heads == 2


def test_a_trace_of_dense_layers_has_density_1() -> None:
    encoder = SequenceEncoder(9, 8, attention_options={"num_clusters": 4, "target_density": 1.0})
    trace = encoder(torch.randint(9, (60,)), return_trace=True)[1]
    assert trace.density.eq(1).all()
    assert trace.expected_density.eq(1).all()
    assert not any("graph" in vars(choice) for choice in trace.choices)


def test_all_pairs_that_memory_does_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = DenseChoice(Tokens(draw(1, 2, 3000, 3)))
    monkeypatch.setattr(checks, "available", lambda device: 2**20)
    refuses(lambda: choice.stored(), "Expected 'graph' to ask for no more than memory holds (got 18,000,000 ")


def warnings_of(options: dict[str, Any], lengths: list[int], **more: Any) -> list[str]:
    """Warnings of a dense call of a layer, and of two at its target density."""
    torch.manual_seed(0)
    make: Any = TopKSource if "k" in options else partial(SBMSource, SBMHead(4, 2, num_clusters=3))
    source, ptr = make(**options), torch.tensor([0, *lengths]).cumsum(0)
    conv, x = AttentionConv(8, 4, 2, source, **more), torch.randn(int(ptr[-1]), 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for density in (1.0, *2 * [options["target_density"]]):
            source.target_density = density
            conv(x, ptr=ptr)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("options", "lengths", "layer", "keys"),
    [
        ({"target_density": 0.05}, [16, 16], {}, "1.8 keys in the mean, of 16.0"),
        ({"target_density": 0.05, "window": None}, [16], {}, "0.8 keys"),
        ({"target_density": 0.05}, [10, 30], {}, "2.2 keys in the mean, of 25.0"),
        ({"target_density": 0.05}, [64], {"is_causal": True}, "2.6 keys in the mean, of 32.5"),
        ({"target_density": 0.05, "window": 1}, [16, 16], {"is_causal": True}, "2.4 keys"),
        ({"target_density": 0.05, "k": 2}, [16], {}, "2.0 keys"),
        ({"target_density": 0.05, "k": 4}, [16], {}, None),
        ({"target_density": 0.05, "window": 2}, [16], {}, None),
        ({"target_density": 0.05, "num_sinks": 2}, [16, 16], {"is_causal": True}, "3.4 keys"),
        ({"target_density": 0.05, "num_sinks": 4}, [16], {}, None),
        ({"target_density": 0.05}, [64], {}, None),
        ({"target_density": 0.9}, [3], {}, None),  # 2.7 of 3, and the token itself
    ],
)
def test_a_density_that_leaves_few_keys_warns_once(
    options: dict[str, Any], lengths: list[int], layer: dict[str, Any], keys: str | None
) -> None:
    found = warnings_of(options, lengths, **layer)
    assert len(found) == (keys is not None)
    if keys is not None:
        assert f"A target density of 0.05 leaves a query {keys}" in found[0]


def test_the_density_follows_probabilities_that_fall_fast() -> None:
    source, query = SBMSource(SBMHead(4, 2, 3), target_density=0.2), draw(1, 2, 300, 4).float()
    source(Tokens(query, seed=0))
    source(Tokens(query, seed=1))  # the mean takes a step into account at the next
    with torch.no_grad():
        source.running_mean.mul_(100)  # as if probabilities were a hundredth of those of the last step
    for seed in (2, 3):
        graph = source(Tokens(query, seed=seed)).graph
    assert (graph.density > 0.09).all()
