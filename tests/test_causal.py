"""Causal graphs: no row depends on a later token, laws are exact over the pairs that are left, and densities count those."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from problems import LAW_CASES, NAMED, copies, pair_counts, small_sbms
from scipy import stats
from test_sampling import chi_square, joint_law
from test_sampling import way as way
from torch import Tensor

from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    DCMMBias,
    GraphSource,
    SBMAttentionConv,
    SBMGraph,
    SBMHead,
    SBMMultiheadAttention,
    SBMSource,
    SequenceEncoder,
    auxiliary_loss,
    ops,
    sample_edges,
)
from sbm_pyg.sources import patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer
from sbm_pyg.sparsefinder import Projection, SparsefinderSource
from sbm_pyg.sparsefinder.predictors import distance
from sbm_pyg.training.estimators import ESTIMATORS
from sbm_pyg.training.gradients import attach_local_expectation, draw_probes, score_function

FALSE_ALARM = 1e-6
PTR = torch.tensor([0, 5, 24, 25])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def allowed(query_ptr: Tensor, key_ptr: Tensor) -> Tensor:
    """Pairs that causality allows, ``[N, M]`` bool, by their definition."""
    mask = torch.zeros(int(query_ptr[-1]), int(key_ptr[-1]), dtype=torch.bool)
    for b in range(query_ptr.numel() - 1):
        rows, columns = slice(*query_ptr[b : b + 2].tolist()), slice(*key_ptr[b : b + 2].tolist())
        mask[rows, columns] = True
        mask[rows, columns] = mask[rows, columns].tril()
    return mask


def uneven(heads: int, lengths: tuple[int, ...], key_lengths: tuple[int, ...], blocks: int, seed: int) -> SBM:
    """Rows of very different degrees, with some memberships of zero."""
    random = torch.Generator().manual_seed(seed)
    y = torch.rand(heads, sum(lengths), blocks, generator=random) ** 4
    z = torch.rand(heads, sum(key_lengths), blocks, generator=random)
    z = z * (torch.rand(z.shape, generator=random) < 0.6)
    query_ptr, key_ptr = (torch.tensor([0, *each]).cumsum(0) for each in (lengths, key_lengths))
    s = 2 * torch.rand(heads, blocks, blocks, generator=random) / blocks**2
    return SBM(y, z, s, query_ptr, key_ptr, is_causal=True)


# ------------------------------------------------------------------ laws


@LAW_CASES
def test_the_joint_law_over_all_graphs(name: str, exploration: float, way: str) -> None:
    """Chi-square over the 64 (or fewer) graphs that are allowed; a later pair must never be an edge."""
    sbm, count = small_sbms()[name], 60_000
    n, m = sbm.num_queries, sbm.num_keys
    many = copies(replace(sbm, is_causal=True), count)
    graph = sample_edges(many, exploration=exploration, seed=0).validate()
    sequence = graph.edge_row // n
    bit = (graph.edge_row % n) * m + graph.col - sequence * m
    found = torch.zeros(count, dtype=torch.int64).index_add(0, sequence, 1 << bit)
    law = joint_law((sbm.edge_prob_dense()[0].double() + exploration).tril())
    assert not torch.bincount(found, minlength=law.numel())[law == 0].any()
    assert chi_square(found, law) > FALSE_ALARM
    without = SBM(many.query_membership, many.key_membership, many.block_matrix, many.query_ptr, many.key_ptr)
    assert sample_edges(without, exploration=exploration, seed=0).later.any() == (n > 0 and m > 1)  # the control


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
def test_marginals_of_a_larger_model(method: str, way: str) -> None:
    sbm, draws = uneven(2, (40, 30), (30, 50), 6, 1), 400
    mask = allowed(sbm.query_ptr, sbm.key_ptr)
    p = (sbm.rate @ sbm.key_membership.mT).double() * mask
    p = p if method == "bernoulli" else -torch.expm1(-p)
    counts = pair_counts(sample_edges(copies(sbm, draws), method=method, seed=0), *p.shape[1:])
    assert not counts[:, ~mask].any()
    likely = p > 0.02
    z = (counts / draws - p)[likely] / (p * (1 - p) / draws)[likely].sqrt()
    assert FALSE_ALARM < stats.chi2.sf(float((z**2).sum()), z.numel()) < 1 - FALSE_ALARM


def test_probes_are_equally_likely_among_the_keys_that_are_allowed() -> None:
    graph, draws = patterns.self_loops(None, ptr=PTR, is_causal=True), 2000
    probes, chance = draw_probes(AttentionGraph.concatenate([graph] * draws), 3.0, seed=0)
    assert probes.is_causal
    counts, chance, mask = pair_counts(probes, 25, 25)[0], chance[:25], allowed(PTR, PTR)
    torch.testing.assert_close(chance, (3 / mask.sum(1)).clamp(max=1).float())
    assert not counts[~mask].any()
    p = chance.double()[:, None].expand_as(counts)[mask]
    z = (counts[mask] / draws - p) / (p * (1 - p) / draws).clamp(min=1e-30).sqrt()
    assert z.abs().max() < 5.5
    everything, _ = draw_probes(graph, math.inf, seed=0)
    assert everything == patterns.full(None, ptr=PTR, is_causal=True)
    assert torch.equal(everything.to_dense(1)[0].bool(), mask[5:24, 5:24])


# ------------------------------------------------------------------ what a row depends on


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
def test_no_row_of_a_sample_depends_on_later_memberships(method: str, way: str) -> None:
    """Changed, and grown to the largest there are; and left out, together with their tokens."""
    sbm = uneven(2, (150,), (150,), 8, 3)
    graph = sample_edges(sbm, method=method, seed=7)
    for cut in (1, 64, 65, 149):
        y, z = sbm.query_membership.clone(), sbm.key_membership.clone()
        y[:, cut:] = 1
        z[:, cut:] = 1
        changed = sample_edges(SBM(y, z, sbm.block_matrix, is_causal=True), method=method, clamp=True, seed=7)
        short = sample_edges(
            SBM(sbm.query_membership[:, :cut], sbm.key_membership[:, :cut], sbm.block_matrix, is_causal=True),
            method=method, seed=7,
        )  # fmt: skip
        for head in range(2):
            whole, other, part = (each.head(head).to_dense()[0] for each in (graph, changed, short))
            assert torch.equal(whole[:cut], other[:cut])
            assert torch.equal(whole[:cut, :cut], part)
    noncausal = SBM(sbm.query_membership, sbm.key_membership, sbm.block_matrix)
    longer = sample_edges(SBM(y, z, sbm.block_matrix), method=method, clamp=True, seed=7).head(0).to_dense()[0]
    assert not torch.equal(sample_edges(noncausal, method=method, seed=7).head(0).to_dense()[0][:cut], longer[:cut])


def sources(channels: int, heads: int) -> dict[str, Any]:
    return {
        "sbm": SBMSource(SBMHead(channels, heads, 5, initial_density=0.5), window=1),
        "sbm, budget": SBMSource(SBMHead(channels, heads, 5, initial_density=0.5), budget=2.0, exploration=0.1),
        "sbm, candidates": SBMSource(SBMHead(channels, heads, 5, initial_density=0.5), candidates=2.0),
        "sbm, fastrg": SBMSource(SBMHead(channels, heads, 5, parameterization="mixed"), method="fastrg"),
        "sbm, degrees": SBMSource(SBMHead(channels, heads, 5, degree_corrected=True)),
        "full": patterns.PatternSource(patterns.full),
        "window": patterns.PatternSource(patterns.window, size=2),
        "random": patterns.PatternSource(patterns.random, num_keys_per_query=3, heads=heads),
        "bigbird": patterns.PatternSource(patterns.bigbird, size=1, num_global=1, num_random=2, heads=heads),
        "top_k": selectors.TopKSource(target_density=0.2),
        "block_top_k": selectors.SelectorSource(selectors.block_top_k, k=2, block_size=2),
        "lsh": selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=2, rounds=2),
        "routing": selectors.RoutingSource(channels, heads, 3).eval(),
        "sparsefinder": SparsefinderSource(Projection(channels, heads, 2), distance, threshold=0.5, window=1),
        "indexer, competing": IndexerSource(Indexer(channels, heads), select="bernoulli", target_density=0.4),
        "indexer, apart": IndexerSource(Indexer(channels, heads), select="bernoulli", exploration=0.1, window=1),
        "indexer, ranks": IndexerSource(KeyScorer(channels, heads), select="top_k", k=3),
        "a pattern that knows nothing of it": patterns.PatternSource(lambda n, ptr: patterns.window(n, 2, ptr=ptr)),
    }


LAYERS = [
    (source, estimator, normalizer)
    for source in sources(4, 2)
    for estimator in (ESTIMATORS if source.startswith(("sbm", "indexer")) else ("none",))
    for normalizer in ("softmax", "entmax15", "sparsemax")
    if (normalizer == "softmax" or estimator in ("mask", "paper", "none"))
    and not (source in ("sbm, fastrg", "indexer, ranks") and estimator in ("local", "distill"))
]
PLAIN = (
    ("none", "softmax"),
    ("mask", "sparsemax"),
)  # what depends on the place of a cut is the source and the normalizer


@pytest.mark.parametrize(
    ("cut", "source", "estimator", "normalizer"),  # a cut in the second of three sequences
    [(14, *layer) for layer in LAYERS] + [(cut, *layer) for cut in (6, 23) for layer in LAYERS if layer[1:] in PLAIN],
)
def test_nothing_of_a_layer_depends_on_a_later_token(cut: int, source: str, estimator: str, normalizer: str) -> None:
    """Outputs, edges, probabilities and prices of earlier tokens stay to the last bit, and no gradient goes back; nor do they depend on how
    many tokens there are.
    """
    torch.manual_seed(0)
    chooser = cast(GraphSource, sources(4, 2)[source])
    bias = DCMMBias(4, 2, 3) if source in ("full", "sbm, degrees") else None
    conv = AttentionConv(6, 4, 2, chooser, estimator=estimator, normalizer=normalizer, score_bias=bias, is_causal=True)
    x = draw(1, 25, 6)
    changed, seen = x.clone(), torch.ones(25, dtype=torch.bool)
    changed[cut:24] += 3 * draw(2, 24 - cut, 6)
    seen[cut:24] = False
    outs, graphs, prices = [], [], []
    for tokens in (x, changed):
        out, choice = conv(tokens, ptr=PTR, seed=3, return_choice=True)
        outs.append(out[seen])
        graphs.append(choice.graph.to_dense(1)[:, : cut - 5])
        if choice.probability is not None:
            prices.append(choice.probability.expected_degree()[:, seen])
        assert choice.graph.is_causal
        assert not choice.graph.later.any()
    assert torch.equal(*outs)
    assert torch.equal(*graphs)
    assert len(prices) in (0, 2)
    assert not prices or torch.equal(*prices)
    tokens = x.clone().requires_grad_()
    out, choice = conv(tokens, ptr=PTR, seed=3, return_choice=True)
    loss = out[:cut].square().sum()
    auxiliary_loss(conv)  # is over the rows of all tokens, and left out here
    if choice.probability is not None:
        loss = loss + choice.probability.expected_degree()[:, :cut].sum()
    (grad,) = torch.autograd.grad(loss, tokens)
    assert grad[:cut].any()
    assert not grad[cut:].any()
    if estimator != "concrete":  # whose noise is drawn for all pairs at once
        torch.testing.assert_close(conv(x[:cut], ptr=torch.tensor([0, 5, cut]), seed=3), out[:cut])


def test_the_control_without_causality_sees_later_tokens() -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(6, 4, 2, num_clusters=5)
    x = draw(1, 25, 6)
    changed = x.clone()
    changed[14:24] += 1
    assert not torch.equal(conv(x, ptr=PTR, seed=3)[:14], conv(changed, ptr=PTR, seed=3)[:14])


@pytest.mark.parametrize("attention", NAMED)
def test_no_token_of_an_encoder_depends_on_a_later_one(attention: str) -> None:
    torch.manual_seed(0)
    named: dict[str, Any] = {"attention": attention, "attention_options": NAMED[attention]}
    model = SequenceEncoder(11, 8, num_layers=2, dropout=0.0, is_causal=True, **named).eval()
    tokens = torch.randint(11, (25,))
    changed = tokens.clone()
    changed[14:24] = (tokens[14:24] + 1) % 11
    seen = torch.ones(25, dtype=torch.bool)
    seen[14:24] = False
    (out, trace), other = model(tokens, PTR, seed=1, return_trace=True), model(changed, PTR, seed=1)
    torch.testing.assert_close(out[seen], other[seen], rtol=0, atol=0 if attention != "full" else 1e-6)
    assert not torch.equal(out[~seen], other[~seen])
    assert all(graph is None or graph.is_causal for graph in trace.graphs)
    assert trace.density.max() <= 1


def test_full_attention_is_the_layer_over_all_earlier_pairs() -> None:
    torch.manual_seed(0)
    full = SequenceEncoder(11, 8, num_layers=1, dropout=0.0, attention="full", is_causal=True)
    torch.manual_seed(0)
    ours = SequenceEncoder(
        11, 8, num_layers=1, dropout=0.0, is_causal=True,
        attention="window", attention_options={"size": 30},
    )  # fmt: skip
    ours.load_state_dict(full.state_dict())
    tokens = torch.randint(11, (25,))
    torch.testing.assert_close(full(tokens, PTR), ours(tokens, PTR))
    trace = ours(tokens, PTR, return_trace=True)[1]
    assert torch.equal(trace.density, torch.ones_like(trace.density))


def test_multihead_attention_samples_earlier_pairs_alone() -> None:
    torch.manual_seed(0)
    layer = SBMMultiheadAttention(8, 2, batch_first=True, num_clusters=4)
    x = draw(1, 2, 9, 8)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    changed = x.clone()
    changed[:, 5:] += 1
    found = [layer(each, each, each, padding, is_causal=True, seed=3, return_graph=True) for each in (x, changed)]
    assert torch.equal(found[0][0][:, :5], found[1][0][:, :5])
    assert all(graph.is_causal for *_, graph in found)
    assert torch.equal(found[0][2].to_dense(1)[:, :5], found[1][2].to_dense(1)[:, :5])


# ------------------------------------------------------------------ numbers


def test_densities_and_degrees_count_pairs_that_are_allowed() -> None:
    sbm = uneven(2, (7, 12, 3), (12, 7, 3), 5, 2)
    mask = allowed(sbm.query_ptr, sbm.key_ptr)
    p = (sbm.rate @ sbm.key_membership.mT) * mask
    torch.testing.assert_close(sbm.expected_degree(), p.sum(2))
    ends = zip(sbm.query_ptr.tolist(), sbm.query_ptr.tolist()[1:], strict=False)
    by_hand = torch.stack([p[:, start:end].sum((1, 2)) for start, end in ends])
    torch.testing.assert_close(sbm.expected_edges(), by_hand)
    pairs = torch.tensor([28, 7 * 8 // 2 + 5 * 7, 6])
    torch.testing.assert_close(sbm.expected_density(), by_hand / pairs[:, None])
    for b in range(3):
        rows = slice(*sbm.query_ptr[b : b + 2].tolist())
        columns = slice(*sbm.key_ptr[b : b + 2].tolist())
        torch.testing.assert_close(sbm.edge_prob_dense(b), p[:, rows, columns])
    graph = sample_edges(sbm, seed=1)
    assert torch.equal(graph.pairs_per_sequence, pairs)
    torch.testing.assert_close(graph.density, graph.edges_per_sequence / pairs[:, None].double())
    limited = sbm.limit(1.5)
    torch.testing.assert_close(limited.expected_degree(), sbm.expected_degree().clamp(max=1.5))
    free = SBM(sbm.query_membership, sbm.key_membership, sbm.block_matrix, sbm.query_ptr, sbm.key_ptr)
    assert (free.expected_degree() > sbm.expected_degree() + 1e-6).any()
    assert free.causal().is_causal
    assert torch.equal(free.causal().expected_degree(), sbm.expected_degree())
    assert sbm.causal() is sbm


def test_expected_density_has_the_gradient_of_its_pairs() -> None:
    wide = uneven(2, (4, 6), (4, 6), 3, 4)

    def density(y: Tensor, z: Tensor, s: Tensor) -> Tensor:
        return SBM(y, z, s, wide.query_ptr, wide.key_ptr, is_causal=True).expected_density()

    parts = (wide.query_membership, wide.key_membership, wide.block_matrix)
    assert torch.autograd.gradcheck(density, tuple(x.double().requires_grad_() for x in parts))


def test_the_local_expectation_gradient_is_unbiased_over_earlier_pairs() -> None:
    """Two tokens, so three pairs in each of two heads: all 64 graphs by enumeration, all pairs as probes."""
    y, z, s = (draw(seed, 2, 2, 2, dtype=torch.float64).sigmoid() * 0.7 for seed in (1, 2, 3))
    query, key, value, weight = (draw(seed, 2, 2, 3, dtype=torch.float64) for seed in (4, 5, 6, 7))
    parts = [x.requires_grad_() for x in (y, z, s)]
    sbm = SBM(*parts, is_causal=True)
    cells = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])  # head, query, key
    mean, exact = [torch.zeros_like(x) for x in parts], torch.zeros((), dtype=torch.float64)
    for bits in product([0.0, 1.0], repeat=6):
        mask = torch.zeros(2, 2, 2, dtype=torch.float64)
        mask[tuple(cells.T)] = torch.tensor(bits, dtype=torch.float64)
        graph = AttentionGraph.from_dense(mask).causal()
        prob = torch.cat([sbm.edge_prob_dense()[h, i, j][None] for h, i, j in cells.tolist()])
        bit = torch.tensor(bits, dtype=torch.float64)
        share = (bit * prob + (1 - bit) * (1 - prob)).prod()
        out = ops.edge_attention(query, key, value, graph.rows)[0]
        exact = exact + share * (out * weight).sum()
        probes, chance = draw_probes(graph, math.inf, seed=0)
        assert probes.num_edges == 6
        got = attach_local_expectation(out, query, key, value, sbm, graph, probes, chance)
        for total, grad in zip(mean, torch.autograd.grad((got * weight).sum(), parts, retain_graph=True), strict=True):
            total += share.detach() * grad
    torch.testing.assert_close(mean, torch.autograd.grad(exact, parts), rtol=1e-10, atol=1e-12)


def test_the_score_function_knows_which_pairs_were_absent() -> None:
    sbm = uneven(1, (4,), (4,), 2, 5)
    z = sbm.key_membership.double().requires_grad_()
    causal = SBM(sbm.query_membership.double(), z, sbm.block_matrix.double(), is_causal=True)
    graph = sample_edges(causal, seed=1)
    p, mask = causal.edge_prob_dense()[0], graph.to_dense()[0].bool()
    absent = allowed(graph.query_ptr, graph.key_ptr) & ~mask
    log_prob = p[mask].log().sum() + (-p[absent]).log1p().sum()
    (meant,) = torch.autograd.grad(2.5 * log_prob, z, retain_graph=True)
    (got,) = torch.autograd.grad(score_function(causal, graph, torch.tensor([2.5], dtype=torch.float64)), z)
    torch.testing.assert_close(got, meant)


# ------------------------------------------------------------------ graphs


def test_a_causal_graph_stays_one() -> None:
    graph = patterns.window(None, 3, ptr=PTR).causal()
    assert graph == patterns.window(None, 3, is_causal=True, ptr=PTR)
    assert graph.causal() is graph
    assert "causal" in repr(graph)
    assert graph.expand(2).is_causal
    assert graph.head(0).is_causal
    assert graph.to("cpu").is_causal
    assert graph.sequence(1) == patterns.window(19, 3, is_causal=True)
    assert graph.sequence(1).is_causal
    assert AttentionGraph(graph.rowptr, graph.col, 25, 25, 1, PTR, PTR, is_causal=True) == graph
    full = patterns.full(4)
    with pytest.raises(ValueError, match=r"no key later than its query with is_causal=True \(got key 1 of query 0\)"):
        AttentionGraph(full.rowptr, full.col, 4, 4, is_causal=True)
    with pytest.raises(TypeError, match=r"Expected 'is_causal' to be a bool \(got int\)"):
        AttentionGraph(full.rowptr, full.col, 4, 4, is_causal=cast(Any, 1))


def test_causal_random_keys_are_uniform_among_earlier_ones() -> None:
    graph = patterns.random(40, 3, is_causal=True, heads=500, seed=0).validate()
    assert torch.equal(graph.degree[0], (torch.arange(40) + 1).clamp(max=3))
    counts = graph.to_dense()[:, 20].double().sum(0)
    assert not counts[21:].any()
    expected = 500 * 3 / 21
    assert stats.chi2.sf(float(((counts[:21] - expected) ** 2 / (expected * 18 / 21)).sum()), 20) > FALSE_ALARM
    shorter = patterns.random(30, 3, is_causal=True, heads=500, seed=0)
    assert torch.equal(graph.to_dense()[:, :30, :30], shorter.to_dense())


def test_a_given_graph_loses_its_later_edges() -> None:
    torch.manual_seed(0)
    conv, x = AttentionConv(6, 4, 2, is_causal=True), draw(1, 25, 6)
    out, graph = conv(x, patterns.full(None, ptr=PTR), return_graph=True)
    assert graph == patterns.full(None, ptr=PTR, heads=2, is_causal=True)
    assert torch.equal(graph.density, torch.ones(3, 2, dtype=torch.float64))
    assert torch.equal(out, conv(x, graph))


def test_a_causal_model_refuses_a_graph_with_later_edges() -> None:
    sbm = uneven(1, (5,), (5,), 2, 0)
    for call in (sbm.on, sbm.gate):
        with pytest.raises(ValueError, match=r"Expected 'graph' to be causal, as this SBM is"):
            call(patterns.full(5))
    assert sbm.on(patterns.full(5).causal()).shape == (15,)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="Expected no 'is_causal' with a factory"):
        SequenceEncoder(5, 8, attention=lambda *sizes: AttentionConv(*sizes), is_causal=True)
    with pytest.raises(TypeError, match=r"Expected 'is_causal' to be a bool \(got str\)"):
        SequenceEncoder(5, 8, is_causal=cast(Any, "yes"))
    with pytest.raises(ValueError, match=r"Expected 'attention_options' of 'sbm' to be known \(got \['is_causal'\]\)"):
        SequenceEncoder(5, 8, attention_options={"is_causal": True})


def test_the_transform_samples_causal_edges() -> None:
    from torch_geometric.data import Data

    member = draw(1, 9, 2, 3).sigmoid()
    data = Data(query_membership=member, key_membership=member, block_matrix=torch.eye(3).repeat(2, 1, 1) / 2)
    key, query = SBMGraph(is_causal=True, clamp=True, seed=1)(data).edge_index
    assert key.numel() > 20
    assert bool((key <= query).all())
