"""The samplers follow their laws: joint, marginal, and whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from problems import LAW_CASES, copies, on_threads, pair_counts, pointer, refuses, same, small_sbms
from scipy import stats
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from sbm_pyg import SBM, AttentionGraph, SBMGraph, SBMHead, Tokens, ops, sample_edges
from sbm_pyg.graphs.ragged import draw_seed
from sbm_pyg.ops.cpu import random_simd, simd
from sbm_pyg.ops.cpu.threads import numba_kernel
from sbm_pyg.ops.reference import sampling as reference_sampling
from sbm_pyg.ops.reference import systematic as reference_systematic

FALSE_ALARM = 1e-6


@pytest.fixture(params=["proposals", "gaps", "coins"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to sample a row: small cases would always take the coins. Fastrg has no gaps, and takes the coins for them."""
    monkeypatch.setattr(reference_sampling, "PROPOSAL_COST", 0.0 if request.param == "proposals" else math.inf)
    monkeypatch.setattr(reference_sampling, "GAP_COST", 0.0 if request.param == "gaps" else math.inf)
    return request.param


def stacked(sbm: SBM, draws: int) -> SBM:
    """One long sequence of queries, in which the queries of ``sbm`` come ``draws`` times: as many independent graphs in one call."""
    return SBM(sbm.query_membership.repeat(1, draws, 1), sbm.key_membership, sbm.block_matrix)


def graph_numbers(graph: AttentionGraph, queries: int) -> Tensor:
    """Each consecutive group of queries as one graph, numbered by its bits."""
    bit = (graph.edge_row % queries) * graph.num_keys + graph.col
    return torch.zeros(graph.num_queries // queries, dtype=torch.int64).index_add(
        0, graph.edge_row // queries, 1 << bit
    )


def joint_law(prob: Tensor) -> Tensor:
    """Probability of each of the 2^(n m) graphs with independent edges."""
    flat = prob.double().flatten()
    bits = (torch.arange(2 ** flat.numel())[:, None] >> torch.arange(flat.numel())) & 1
    return torch.where(bits == 1, flat, 1 - flat).prod(1)


def chi_square(numbers: Tensor, law: Tensor) -> float:
    """p-value of the counts under the law; graphs that are expected less than 10 times share one cell."""
    observed = torch.bincount(numbers, minlength=law.numel()).double()
    expected = law * numbers.numel()
    rare = expected < 10
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    return float(stats.chi2.sf(statistic, int(used.sum()) - 1))


# ------------------------------------------------------------------ joint laws


@LAW_CASES
def test_bernoulli_has_the_joint_law(name: str, exploration: float, way: str) -> None:
    """Chi-square over all 512 (or 256) graphs, a million draws."""
    sbm = small_sbms()[name]
    draws = 1_000_000
    graph = sample_edges(stacked(sbm, draws), exploration=exploration, seed=11)
    law = joint_law(sbm.edge_prob_dense()[0] + exploration)
    assert chi_square(graph_numbers(graph, sbm.num_queries), law) > FALSE_ALARM


@pytest.mark.parametrize("name", ["3 x 3, off-diagonal", "2 x 4"])
def test_fastrg_has_the_law_of_algorithm_1(name: str, way: str) -> None:
    """Repeats count once, so an edge has probability 1 - exp(-p), not p: the second half is the negative control."""
    sbm = small_sbms()[name]
    graph = sample_edges(stacked(sbm, 300_000), method="fastrg", seed=12)
    numbers = graph_numbers(graph, sbm.num_queries)
    prob = sbm.edge_prob_dense()[0].double()
    assert chi_square(numbers, joint_law(1 - torch.exp(-prob))) > FALSE_ALARM
    assert chi_square(numbers, joint_law(prob)) < FALSE_ALARM


def algorithm_1(sbm: SBM, generator: torch.Generator) -> AttentionGraph:
    """The paper's pseudo-code, literally, for one head of one sequence."""
    y, z, s = sbm.query_membership[0], sbm.key_membership[0], sbm.block_matrix[0]
    weight = y.sum(0)[:, None] * s * z.sum(0)
    edges = int(torch.poisson(weight.sum(), generator=generator))
    if edges == 0:
        return AttentionGraph.from_dense(torch.zeros(len(y), len(z)))
    pair = torch.multinomial(weight.flatten(), edges, replacement=True, generator=generator)
    u, v = pair // s.size(1), pair % s.size(1)
    i = torch.cat([torch.multinomial(y[:, b], 1, generator=generator) for b in u])
    j = torch.cat([torch.multinomial(z[:, b], 1, generator=generator) for b in v])
    return AttentionGraph.from_edge_index(torch.stack([j, i]), len(y), len(z))


@pytest.mark.slow
def test_fastrg_agrees_with_the_pseudo_code() -> None:
    sbm = small_sbms()["2 x 4"]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.cat([graph_numbers(algorithm_1(sbm, generator), 2) for _ in range(4000)])
    assert chi_square(numbers, joint_law(1 - torch.exp(-sbm.edge_prob_dense()[0].double()))) > FALSE_ALARM


def test_the_joint_test_sees_a_transposed_block_matrix(way: str) -> None:
    """Negative control: the fault of the authors' fastRG has nearly right marginals and a wrong joint law."""
    sbm = small_sbms()["3 x 3, off-diagonal"]
    wrong = SBM(sbm.query_membership, sbm.key_membership, sbm.block_matrix.mT)
    numbers = graph_numbers(sample_edges(stacked(wrong, 100_000), seed=13), 3)
    assert chi_square(numbers, joint_law(sbm.edge_prob_dense()[0])) < FALSE_ALARM


def test_the_joint_test_has_power() -> None:
    """A relative error of 2 % in one probability is seen in a million draws."""
    sbm = small_sbms()["3 x 3, diagonal"]
    prob = sbm.edge_prob_dense()[0].clone()
    numbers = graph_numbers(sample_edges(stacked(sbm, 1_000_000), seed=14), 3)
    assert chi_square(numbers, joint_law(prob)) > FALSE_ALARM
    prob[1, 1] *= 1.02
    assert chi_square(numbers, joint_law(prob)) < FALSE_ALARM


def test_products_of_groups_have_the_joint_law(way: str) -> None:
    """A head with groups makes a block model like any other; one of its groups alone has another law."""
    torch.manual_seed(2)
    options: dict[str, Any] = {
        "parameterization": "overlapping", "initial_density": 0.3, "temperature": 0.3, "groups": 2,
    }  # fmt: skip
    head = SBMHead(4, 1, 4, "orthogonal", **options).requires_grad_(False)
    query, key = torch.randn(2, 1, 3, 4)
    member = [(head.mlp(x) @ head.clusters[0].T / 0.3).view(3, 2, 2) for x in (query[0], key[0])]
    factors = torch.einsum("ngk,mgk->gnm", member[0].softmax(2), (member[1] + head.shift).sigmoid())
    numbers = graph_numbers(sample_edges(stacked(head(Tokens(query, key)), 300_000), seed=18), 3)
    assert chi_square(numbers, joint_law(factors.prod(0))) > FALSE_ALARM
    assert chi_square(numbers, joint_law(factors[0])) < FALSE_ALARM


def test_sequences_heads_and_seeds_are_independent() -> None:
    """Joint law over the graphs of two heads, of two sequences, and of two seeds, each taken as one bigger graph."""
    sbm = small_sbms()["2 x 4"]
    single = SBM(sbm.query_membership[:, :1], sbm.key_membership, sbm.block_matrix)
    law = joint_law(single.edge_prob_dense()[0].expand(2, -1))
    draws = 200_000
    heads = stacked(
        SBM(*(x.repeat(2, 1, 1) for x in (single.query_membership, single.key_membership, single.block_matrix))), draws
    )
    first, second = (graph_numbers(sample_edges(heads, seed=15).head(head), 1) for head in range(2))
    assert chi_square(first + 16 * second, law) > FALSE_ALARM
    graphs = [graph_numbers(sample_edges(stacked(single, draws), seed=seed), 1) for seed in (16, 17)]
    assert chi_square(graphs[0] + 16 * graphs[1], law) > FALSE_ALARM
    sequence_ids = [
        graph_numbers(sample_edges(stacked(single, draws), seed=16, sequence_ids=torch.tensor([n])), 1)
        for n in (0, 2**32 - 1)
    ]
    assert chi_square(sequence_ids[0] + 16 * sequence_ids[1], law) > FALSE_ALARM


# ------------------------------------------------------------------ larger models


def larger_sbm(
    heads: int = 2, queries: int = 60, keys: int = 80, blocks: int = 5, seed: int = 0, sequences: int = 1
) -> SBM:
    generator = torch.Generator().manual_seed(seed)
    y, z, s = (
        torch.rand(*shape, generator=generator)
        for shape in ((heads, sequences * queries, blocks), (heads, sequences * keys, blocks), (heads, blocks, blocks))
    )
    s = s / s.sum((1, 2), keepdim=True)
    steps = torch.arange(sequences + 1)
    return SBM(y, z, s, steps * queries, steps * keys)


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
def test_marginals_and_degrees_of_a_larger_model(method: str, way: str) -> None:
    """Pair frequencies by chi-square; the variance of degrees is that of independent edges."""
    sbm = larger_sbm()
    prob = sbm.edge_prob_dense().double()
    prob = prob if method == "bernoulli" else 1 - torch.exp(-prob)
    draws = 400
    graph = sample_edges(copies(sbm, draws), method=method, seed=0)
    key, query = graph.edge_index
    samples = torch.zeros(draws, *prob.shape, dtype=torch.float64)
    samples[query // 60, graph.edge_head, query % 60, key % 80] = 1
    z = (samples.mean(0) - prob) / (prob * (1 - prob) / draws).sqrt()
    statistic = float((z**2).sum())
    assert FALSE_ALARM < stats.chi2.sf(statistic, z.numel()) < 1 - FALSE_ALARM
    spread = samples.sum(-1).var(0, correction=1) / (prob * (1 - prob)).sum(-1)
    assert float(spread.mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / (draws - 1) / spread.numel()))


def test_degrees_follow_those_of_the_head(way: str) -> None:
    """With one block p is the product of two degrees; in- and out-degrees of a hundred draws against their law."""
    torch.manual_seed(1)
    head = SBMHead(8, 2, 1, parameterization="assortative", degree_corrected=True).requires_grad_(False)
    head.degree_weight.normal_()
    query, key, draws = torch.randn(2, 40, 8), torch.randn(2, 60, 8), 100
    sbm = head(Tokens(query, key))
    theta, eta = head.degrees(query, key)
    prob = (theta[:, :, None] * eta[:, None]).double()
    assert theta.amax() > 4 * theta.amin()
    assert eta.amax() > 4 * eta.amin()
    total = pair_counts(sample_edges(copies(sbm, draws), seed=0), 40, 60)
    for axis in (1, 2):
        z = (total.sum(axis) - draws * prob.sum(axis)) / (draws * prob * (1 - prob)).sum(axis).sqrt()
        assert FALSE_ALARM < stats.chi2.sf(float((z**2).sum()), z.numel()) < 1 - FALSE_ALARM
    wrong = prob.mean(2, keepdim=True).expand_as(prob)  # without degrees of keys
    z = (total.sum(1) - draws * wrong.sum(1)) / (draws * wrong * (1 - wrong)).sum(1).sqrt()
    assert stats.chi2.sf(float((z**2).sum()), z.numel()) < FALSE_ALARM


@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_and_numba_choose_the_same_edges(is_causal: bool, way: str) -> None:
    """Memberships in sixteenths make every probability exact in any order of summation, so the edges must agree to the last one."""
    generator = torch.Generator().manual_seed(5)
    for heads, blocks, keys in ((2, 6, 70), (1, 33, 300), (2, 129, 90)):
        queries = keys if is_causal else 25
        y = torch.randint(0, 17, (heads, queries, blocks), generator=generator) / 16 / 64
        z = torch.randint(0, 17, (heads, keys, blocks), generator=generator) / 16
        y[:, ::2] /= blocks
        ptr = torch.tensor([0, 10, queries]), torch.tensor([0, 30, keys])
        for method, exploration, seed in (("bernoulli", 0.0, 1), ("bernoulli", 0.0625, 2**63 - 1), ("fastrg", 0.0, 3)):
            arguments = (y, z, *ptr, torch.tensor([3, 2**32 - 1]), seed, method, exploration, True, is_causal)
            assert same(ops.sample_sbm(*arguments), reference_sampling.sample_sbm(*arguments))


def random_model(case: int) -> tuple[Any, ...]:
    """Arguments of ``sample_sbm``: soft or hard memberships, many or few edges, sequences of any lengths, 0 among them."""
    generator = torch.Generator().manual_seed(case)
    blocks = int(torch.randint(1, 9, (), generator=generator))
    query_ptr, key_ptr = (
        pointer(torch.randint(0, most, (3,), generator=generator).tolist()) for most in (8, (400, 60)[case // 3 % 2])
    )
    rate, member = (torch.rand(2, int(ptr[-1]), blocks, generator=generator) for ptr in (query_ptr, key_ptr))
    rate *= (0.02, 0.2, 1.5)[case % 3] / blocks
    if case % 4 > 1:  # bounds far above most probabilities
        member = (member > 0.95).float()
        rate = (rate == rate.amax(2, keepdim=True)) * rate * blocks
    elif case % 4 == 1:  # and near to all of them
        member = (member + 7) / 8
    dtype = (torch.float32, torch.float32, torch.bfloat16, torch.float64)[case % 8 // 2]
    method, exploration = ("fastrg" if case % 5 == 4 else "bernoulli"), (0.0, 0.0, 0.01)[case // 2 % 3]
    ids = torch.tensor([case, 2**32 - 1, 5 + (3 << 32)])
    law = (case << 55, method, exploration, case % 3 == 2, case % 7 > 4)
    return rate.to(dtype), member.to(dtype), query_ptr, key_ptr, ids, *law


def test_the_loop_over_rows_and_the_kernel_draw_the_same_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 120 small models, each type with each size and law, whose rows go all three ways."""
    plan_rows, ways, edges = reference_sampling.plan_rows, [], 0

    def recorded(*arguments: Any) -> reference_sampling.Plan:
        plan = plan_rows(*arguments)
        ways.extend([int(plan.way)] if plan.way.dim() == 0 else [])
        return plan

    monkeypatch.setattr(reference_sampling, "plan_rows", recorded)
    for case in range(120):
        arguments = random_model(case)
        graph = reference_sampling.sample_sbm(*arguments)
        assert same(ops.sample_sbm(*arguments), graph), case
        edges += graph[1].numel()
    assert min(ways.count(way) for way in range(3)) > 150
    assert edges > 10_000


# mypy takes the first argument of an intrinsic for one that the caller gives
quick_gaps, exact_gaps, at = (cast("Any", each) for each in (random_simd.quick_gaps16, random_simd.gaps16, simd.at))


@numba_kernel
def gaps_of(words: Any, spread: float, end: int, sure: Any, quick: Any, exact: Any) -> None:
    """Positions of all groups of sixteen from -1 on, in float32 and in float64; ``sure`` is what float32 returns."""
    for group in range(sure.size):
        sure[group] = quick_gaps(words, 32 * group, spread, -1, end, at(quick, 16 * group))
        exact_gaps(words, 32 * group, spread, -1, end, at(exact, 16 * group))


@pytest.mark.parametrize("end", [50, 2**22])
@pytest.mark.parametrize(("spread", "most"), [(0.2, 4e-3), (14.3, 5e-3), (1e3, 4e-2), (1e6, 1.0), (math.inf, 1.0)])
def test_positions_in_float32_are_those_in_float64_or_not_sure(spread: float, most: float, end: int) -> None:
    groups = 100_000
    words = np.random.default_rng(0).integers(0, 2**32, (groups, 2, 16), np.uint32)
    extremes = np.array([0, 1, 2, 3, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 129], np.uint32)
    words[:8, 0] = extremes[:, None]
    words[8:80, 0] >>= (
        np.arange(32, dtype=np.uint32).repeat(36).reshape(72, 16)
    )  # small ones, of which float32 knows little
    sure, (quick, exact) = np.empty(groups, np.int64), np.zeros((2, groups, 16), np.int32)
    gaps_of(words.ravel(), spread, end, sure, quick.ravel(), exact.ravel())
    known = sure >= 0
    np.testing.assert_array_equal(quick[known], exact[known])
    np.testing.assert_array_equal(sure[known], exact[known, 15])
    assert 1 - known[80:].mean() <= (most if end > 50 else 1)
    if end > 50 and spread < 1e6:
        assert len(np.unique(exact[:, 0])) > 1


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
@pytest.mark.parametrize("draw", [ops.sample_sbm, reference_sampling.sample_sbm], ids=["numba", "reference"])
def test_some_heads_alone_draw_the_edges_of_these_heads(draw: Any, method: str) -> None:
    """The number of the first head is in the upper half of the sequence numbers."""
    generator = torch.Generator().manual_seed(5)
    y = torch.rand(4, 90, 6, generator=generator, dtype=torch.float64) / 6
    y[:, ::3] /= 40  # rows by gaps, proposals and pairs
    y[:, 1::3, 2:] = 0
    z = torch.rand(4, 300, 6, generator=generator, dtype=torch.float64)
    z[:, :, 0] *= torch.rand(300, generator=generator) < 0.02
    ptr, ids = (torch.tensor([0, 40, 90]), torch.tensor([0, 100, 300])), torch.tensor([3, 2**32 - 1])
    more = (8, method, 0.001, True, False)
    rowptr, col = draw(y, z, *ptr, ids, *more)
    rows = rowptr[90 : 3 * 90 + 1]
    found = draw(y[1:3], z[1:3], *ptr, ids + (1 << 32), *more)
    assert same(found, (rows - rows[0], col[rows[0] : rows[-1]]))
    assert not same(draw(y[1:3], z[1:3], *ptr, ids, *more), found)


def test_rates_and_memberships_of_any_layout_draw_the_same_edges(way: str) -> None:
    """Also where rows are views into columns of another tensor."""
    generator = torch.Generator().manual_seed(0)
    rate, member = (torch.rand(1, 5, 200, generator=generator).mul(0.3).mT for _ in range(2))
    ptr, ids = torch.tensor([0, 80, 200]), torch.arange(2)
    found = ops.sample_sbm(rate, member, ptr, ptr, ids, 1, "bernoulli")
    plain = ops.sample_sbm(rate.contiguous(), member.contiguous(), ptr, ptr, ids, 1, "bernoulli")
    assert all(map(torch.equal, found, plain))


def test_the_rows_mix_all_ways() -> None:
    """Dense and sparse queries in one graph, as large as the default thresholds need; marginals by degree."""
    keys, blocks = 4000, 40
    member = torch.eye(blocks).repeat_interleave(keys // blocks, 0)
    even, odd = (
        torch.ones(1, blocks),
        torch.eye(blocks)[:1],
    )  # a query that takes all blocks alike, and one that takes the first alone
    rate = torch.cat([0.001 * even, 0.9 * even, 0.6 * odd, 0.004 * even, 0.01 * odd]).repeat(80, 1)
    prob = rate[:, 0] * torch.tensor([1, 1, 1 / blocks, 1, 1 / blocks]).repeat(80)
    way = reference_sampling.plan_rows(prob.double() * keys, rate.amax(1).double(), keys, "bernoulli").way
    names = [
        reference_sampling.GAPS, reference_sampling.PAIRS, reference_sampling.PAIRS, reference_sampling.GAPS,
        reference_sampling.PROPOSALS,
    ]  # fmt: skip
    assert way.tolist() == names * 80
    sbm = SBM(rate[None], member[None], torch.eye(blocks)[None])
    degree = sample_edges(sbm, seed=3).validate().degree[0].double()
    dense = sbm.edge_prob_dense()[0].double()
    z = (degree - dense.sum(1)) / (dense * (1 - dense)).sum(1).sqrt()
    assert stats.chi2.sf(float((z**2).sum()), z.numel()) > FALSE_ALARM


# ------------------------------------------------------------------ what the edges depend on, and what not


def test_the_same_edges_for_any_number_of_threads_and_any_batch() -> None:
    sbm = larger_sbm(queries=300, keys=300, sequences=3, seed=2)
    graphs = []
    for threads in (1, 2):
        with on_threads(threads):
            graphs.append(sample_edges(sbm, seed=7, sequence_ids=torch.tensor([4, 9, 1])))
    assert graphs[0] == graphs[1]
    for sequence, stream in enumerate([4, 9, 1]):
        rows = slice(300 * sequence, 300 * (sequence + 1))
        alone = SBM(sbm.query_membership[:, rows], sbm.key_membership[:, rows], sbm.block_matrix)
        assert sample_edges(alone, seed=7, sequence_ids=torch.tensor([stream])) == graphs[0].sequence(sequence)
    assert sample_edges(sbm, seed=7) != sample_edges(sbm, seed=8)


def test_seed_and_generator() -> None:
    sbm = larger_sbm()
    assert sample_edges(sbm, generator=torch.Generator().manual_seed(1)) == sample_edges(
        sbm, generator=torch.Generator().manual_seed(1)
    )
    state = torch.get_rng_state()
    sample_edges(sbm, seed=1)
    sample_edges(sbm, generator=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    first = sample_edges(sbm)
    torch.manual_seed(3)
    assert sample_edges(sbm) == first
    assert draw_seed(5) == 5
    number: Any = np.uint8(7)
    assert sample_edges(sbm, seed=number) == sample_edges(sbm, seed=7)
    for seed in (-(2**63), 2**63 - 1):
        assert draw_seed(seed) == seed
        sample_edges(sbm, seed=seed)


def test_streams_may_be_int32() -> None:
    sbm = larger_sbm(sequences=2)
    sequence_ids = torch.tensor([3, 2**31 - 1])
    assert sample_edges(sbm, seed=0, sequence_ids=sequence_ids.int()) == sample_edges(
        sbm, seed=0, sequence_ids=sequence_ids
    )


def test_extremes() -> None:
    ones = torch.ones(1, 40, 1)
    full = sample_edges(SBM(ones, ones, ones[:, :1]), seed=0)
    assert full.num_edges == 1600
    empty = sample_edges(SBM(0 * ones, ones, ones[:, :1]), seed=0)
    assert empty.num_edges == 0
    assert sample_edges(SBM(0 * ones, ones, ones[:, :1]), exploration=1.0, seed=0).num_edges == 1600
    tiny = sample_edges(SBM(torch.full((1, 3, 1), 1e-30), torch.ones(1, 100_000, 1), ones[:, :1]), seed=0)
    assert tiny.num_edges == 0


@pytest.mark.parametrize("budget", [0.5, 3.0, 1000.0])
def test_budget_bounds_the_expected_degree_of_each_query(budget: float) -> None:
    sbm = larger_sbm(queries=500)
    limited = sbm.limit(budget)
    assert float(limited.expected_degree().max()) <= budget * (1 + 1e-5)
    free = sbm.expected_degree() <= budget
    assert torch.allclose(limited.expected_degree()[free], sbm.expected_degree()[free])
    graph = sample_edges(sbm, budget=budget, seed=1)
    expected = float(limited.expected_edges().sum())
    assert graph.num_edges == pytest.approx(expected, abs=6 * math.sqrt(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_budget_in_low_precision(dtype: torch.dtype) -> None:
    sbm = larger_sbm(queries=500)
    low = SBM(sbm.query_membership.to(dtype), sbm.key_membership.to(dtype), sbm.block_matrix.to(dtype))
    limited = low.limit(3.0)
    assert limited.query_membership.dtype == dtype
    assert float(limited.expected_degree().max()) <= 3 * 1.02
    assert sample_edges(low, budget=3.0, seed=1) == sample_edges(limited, seed=1)


def test_linear_memory() -> None:
    """A graph whose dense form would take 40 GB is sampled in a moment, about 10 edges a query."""
    tokens = 200_000
    memberships = torch.full((1, tokens, 2), 0.5)
    sbm = SBM(memberships, memberships, torch.full((1, 2, 2), 10 / tokens))
    graph = sample_edges(sbm, seed=0)
    assert graph.num_edges == pytest.approx(10 * tokens, rel=0.01)


# ------------------------------------------------------------------ memberships of any size


def sizes_sbm(query: float, key: float, dtype: torch.dtype) -> SBM:
    """Off-diagonal model of 200 times 300 tokens in two sequences, whose probabilities are those of sizes 1 and 1 times ``query * key``."""
    sbm = larger_sbm(heads=1, queries=100, keys=150, blocks=3, sequences=2)
    y, z = (x.double() + 0.1 for x in (sbm.query_membership, sbm.key_membership))
    return SBM((y * query).to(dtype), (z * key).to(dtype), sbm.block_matrix.to(dtype), sbm.query_ptr, sbm.key_ptr)


@pytest.mark.parametrize(
    ("query", "key", "dtype"),
    [(1e-45, 1e44, torch.float64), (1e44, 1e-45, torch.float64), (1e39, 1e-40, torch.float64),
     (1e-150, 3e149, torch.float64), (1e37, 2e-38, torch.float32), (2e-38, 1e37, torch.float32),
     (1e30, 2e-31, torch.float32)],
)  # fmt: skip
def test_memberships_of_any_size_have_their_law(query: float, key: float, dtype: torch.dtype, way: str) -> None:
    """Pair frequencies by chi-square against probabilities that float64 gives exactly enough."""
    sbm = sizes_sbm(query, key, dtype)
    draws, queries, keys = 200, 100, 150
    y, z = sbm.query_membership.double().view(2, queries, -1), sbm.key_membership.double().view(2, keys, -1)
    prob = y @ sbm.block_matrix.double() @ z.mT
    assert float(prob.min()) > 0
    assert float(prob.max()) < 1
    repeated = (
        sbm.query_membership.view(2, queries, -1).repeat(1, draws, 1).view(1, 2 * draws * queries, -1)
    )  # each sequence as many times
    graph = sample_edges(
        SBM(repeated, sbm.key_membership, sbm.block_matrix, draws * sbm.query_ptr, sbm.key_ptr), seed=0
    )
    counts = torch.stack([graph.to_dense(b).view(draws, queries, keys).sum(0) for b in range(2)]).double()
    error = (counts / draws - prob) / (prob * (1 - prob) / draws).sqrt()
    assert FALSE_ALARM < stats.chi2.sf(float((error**2).sum()), error.numel()) < 1 - FALSE_ALARM


def test_sequences_are_rescaled_apart() -> None:
    """What is large in one sequence is small in the other; where nothing is rescaled, both would be lost."""
    size = torch.tensor([1e-44, 1e44], dtype=torch.float64).repeat_interleave(40)[None, :, None]
    ptr = torch.tensor([0, 40, 80])
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    graph = sample_edges(SBM(1 / size, size, ones, ptr, ptr), seed=0)
    assert graph.edges_per_sequence.tolist() == [[1600], [1600]]
    assert sample_edges(SBM(0.5 / size, size, ones, ptr, ptr), method="fastrg", seed=0, budget=10.0).num_edges < 1200


def test_blocks_without_members_and_tiny_memberships_are_no_edges() -> None:
    wide = torch.tensor([1e40, 0.0, 1e-300], dtype=torch.float64).expand(1, 50, 3)
    key = torch.tensor([1e-41, 1e30, 1e-300], dtype=torch.float64).expand(1, 60, 3)
    graph = sample_edges(SBM(wide, key, torch.eye(3, dtype=torch.float64)[None]), seed=0)
    assert graph.num_edges == pytest.approx(300, abs=6 * math.sqrt(300))


@pytest.mark.parametrize(
    ("query", "key", "options", "message"),
    [
        (1e200, 1e100, {}, r"Expected 'query_membership' of a size whose products float64 holds \(got 1e\+200\)"),
        (1e-300, 1e300, {}, r"Expected 'key_membership' of a size whose products float64 holds \(got 1e\+300\)"),
        (1e20, 1e5, {"clamp": True},
         r"Expected 'sbm' with probabilities below 2\*\*60, even where they are cut at 1 \(got up to 1\.311e\+25\)"),
        (1e20, 1e5, {"method": "fastrg"}, r"Expected 'sbm' with probabilities below 2\*\*60"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_rescaled_are_refused(
    query: float, key: float, options: dict[str, Any], message: str
) -> None:
    ones = torch.ones(1, 4, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        sample_edges(SBM(query * ones, key * ones, ones[:, :1]), seed=0, **options)


# ------------------------------------------------------------------ memory


def test_more_edges_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.checks, "available", lambda device: 2**30)
    ones = torch.ones(1, 200_000, 1)
    full = SBM(ones, ones, ones[:, :1])
    message = r"Expected 'sbm' to ask for no more than memory holds \(got 40,000,000,000 edges, 335.3 GiB of 1.0 GiB\). Pass `budget=`"
    with pytest.raises(ValueError, match=message):
        sample_edges(full, seed=0)
    with pytest.raises(ValueError, match=r"Expected 'sbm' to ask for no more than memory holds \(got 2,000,\d"):
        sample_edges(SBM(0 * ones, ones, ones[:, :1]), exploration=0.05, seed=0)
    with pytest.raises(ValueError, match=r"Expected 'sbm' to ask for no more than memory holds \(got 25,28\d,"):
        sample_edges(full, method="fastrg", seed=0)
    assert sample_edges(full, budget=3.0, seed=0).num_edges == pytest.approx(600_000, rel=0.02)
    sequences = SBM(ones, ones, ones[:, :1], torch.arange(0, 200_001, 10))
    assert sample_edges(sequences, seed=0).num_edges == 2_000_000


# ------------------------------------------------------------------ errors


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"method": "exact"}, ValueError, r"Expected 'method' to be one of \('bernoulli', 'fastrg'\) \(got 'exact'\)"),
    ({"exploration": 1.5}, ValueError, r"Expected 'exploration' in \[0, 1\] \(got 1.5\)"),
    ({"seed": 1, "generator": torch.Generator()}, ValueError, r"Expected 'seed' or 'generator' \(got both\)"),
    ({"seed": -(2**63) - 1}, ValueError, r"Expected 'seed' in -2\*\*63 .. 2\*\*63-1 \(got -9223372036854775809\)"),
    ({"sbm": None}, TypeError, r"Expected 'sbm' to be an SBM \(got NoneType\)"),
    ({"exploration": "1"}, TypeError, r"Expected 'exploration' to be a number in \[0, 1\] \(got str\)"),
    ({"budget": "3"}, TypeError, r"Expected 'budget' to be a number in \(0, inf\] \(got str\)"),
    ({"clamp": 2.0}, TypeError, r"Expected 'clamp' to be a bool \(got float\)"),
    ({"generator": 3}, TypeError, r"Expected 'generator' to be a torch.Generator \(got int\)"),
    ({"seed": 1.5}, TypeError, r"Expected 'seed' to be an integer \(got 1.5\)"),
    ({"seed": "a"}, TypeError, r"Expected 'seed' to be an integer \(got 'a'\)"),
    ({"seed": 0, "sequence_ids": [0]}, TypeError, r"Expected 'sequence_ids' to be a tensor \(got list\)"),
    ({"seed": 0, "sequence_ids": np.array([0])}, TypeError, r"Expected 'sequence_ids' to be a tensor \(got ndarray\)"),
]
ONE = Data(query_membership=torch.ones(3, 1), key_membership=torch.ones(3, 1), block_matrix=torch.ones(1, 1))
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda options=options: sample_edges(**{"sbm": larger_sbm()} | options), error, message) for options, error, message in BAD),
    (lambda: SBMGraph(edge_type=cast(Any, "to")), TypeError,
     r"Expected 'edge_type' to be \(source, relation, target\), three names \(got 'to'\)"),
    (lambda: SBMGraph(edge_type=cast(Any, ("key", "query"))), TypeError,
     r"Expected 'edge_type' to be \(source, relation, target\), three names"),
    (lambda: SBMGraph()(Data(x=torch.ones(3, 2))), ValueError, r"Expected 'data' to carry 'query_membership' \(got none\)"),
    (lambda: SBMGraph()(Batch.from_data_list([ONE, ONE])), ValueError, "Apply SBMGraph before batching"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_overflowing_rates_are_named() -> None:
    ones = torch.ones(1, 2, 1)
    sbm = SBM(1e25 * ones, 0 * ones, 1e25 * ones[:, :1])
    for check in (sbm.validate, lambda: sample_edges(sbm, clamp=True, seed=0)):
        refuses(check, "Expected 'query_membership @ block_matrix' to be finite")


@pytest.mark.parametrize("scale", [2**-1, 2**-2, 2**-5, 2**-9])  # coins, and gaps; rates keep their digits
@pytest.mark.parametrize("part", [0.98, 1.02])  # of half a unit in the last place of bfloat16: rounded down, or up
@pytest.mark.parametrize("row_group", [1, 16])
def test_numbers_that_bfloat16_rounds_the_most_are_drawn_like_all_others(
    scale: float, part: float, row_group: int
) -> None:
    """Both factors are nearly 2^-8 off in bfloat16, and all in the same direction, so that no sum evens it out."""
    rate, member = (torch.full((1, count, 1), 1 + part * 2.0**-8) for count in (300, 3000))
    ptrs = (torch.tensor([0, count]) for count in (300, 3000))
    arguments: Any = (scale * rate, member, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.0, False, False, row_group)
    assert same(ops.sample_sbm(*arguments), reference_sampling.sample_sbm(*arguments))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sample", [ops.sample_sbm, reference_sampling.sample_sbm])
def test_rows_without_keys_have_no_edges(sample: Any, is_causal: bool) -> None:
    """All queries are in one sequence, all keys in the other."""
    query, key = torch.full((2, 3, 1), 0.5), torch.ones(2, 5, 1)
    ptrs = torch.tensor([0, 3, 3]), torch.tensor([0, 0, 5])
    rowptr, col = sample(query, key, *ptrs, torch.arange(2), 0, "bernoulli", 0.0, False, is_causal)
    assert rowptr.tolist() == [0] * 7
    assert col.numel() == 0


@pytest.mark.parametrize("sample", [ops.sample_sbm, reference_sampling.sample_sbm])
def test_queries_without_keys_beside_rows_that_toss_no_coin(sample: Any) -> None:
    rate, member = torch.full((1, 43, 1), 0.001), torch.ones(1, 900, 1)
    ptrs, streams = (torch.tensor([0, 3, 43]), torch.tensor([0, 0, 900])), torch.tensor([0, 1])
    rowptr, _ = sample(rate, member, *ptrs, streams, 0, "bernoulli", 0.0, False, False)
    assert rowptr[3] == 0
    assert rowptr[43] > 0


@pytest.mark.parametrize("sample", [ops.sample_sbm, reference_sampling.sample_sbm])
def test_rates_that_are_no_numbers(sample: Any) -> None:
    ptr, stream = torch.tensor([0, 3]), torch.tensor([0])
    for value in (math.nan, math.inf):
        rate = torch.ones(1, 3, 2).index_fill(1, torch.tensor([1]), value)
        with pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
            sample(rate, torch.ones(1, 3, 2), ptr, ptr, stream, 0, "bernoulli", 0.0, True, False)


@pytest.mark.parametrize("name", ["query_membership", "key_membership", "block_matrix"])
@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "finite (got NaN or inf)"), (math.inf, "finite (got NaN or inf)"), (-0.1, "non-negative (got -0.1)")],
)
def test_bad_memberships(name: str, value: float, message: str) -> None:
    sbm = larger_sbm()
    tensor = getattr(sbm, name).clone()
    tensor[0, 1, 2] = value
    bad = replace(sbm, **{name: tensor})
    refuses(lambda: sample_edges(bad), f"Expected '{name}' to be {message}")
    refuses(lambda: bad.validate(), f"Expected '{name}' to be {message}")


def test_keys_that_int32_cannot_number() -> None:
    query_ptr, key_ptr, stream = torch.tensor([0, 1]), torch.tensor([0, 2**33]), torch.tensor([0])
    few, key = torch.full((1,), 2.0**-32), torch.ones(1, 1, 1).expand(1, 2**33, 1)
    for sample in (ops.schemas.sample_systematic, reference_systematic.sample_systematic):
        with pytest.raises(
            ValueError,
            match=r"Expected at most 2\^31 keys in a batch, .* \(got 8,589,934,592\). Sample fewer sequences at once.",
        ):
            sample(few, query_ptr, key_ptr, stream, 1, 0, False)
    with pytest.raises(ValueError, match=r"Expected at most 2\^31 keys in a batch"):
        ops.sample_sbm(few.view(1, 1, 1), key, query_ptr, key_ptr, stream, 0)


def test_probabilities_above_one(way: str) -> None:
    sbm = larger_sbm()
    bad = SBM(sbm.query_membership * 20, sbm.key_membership, sbm.block_matrix)
    message = r"Expected edge probabilities in \[0, 1\] \(got \d+\.\d+\). .* pass clamp=True"
    with pytest.raises(ValueError, match=message):
        sample_edges(bad, seed=0)
    with pytest.raises(ValueError, match=message):
        bad.validate()
    for factor in (1.0, 1e12) if way == "coins" else (1.0,):  # nobody would propose 1e12 edges
        huge = SBM(bad.query_membership * factor, bad.key_membership, bad.block_matrix)
        dense = sample_edges(huge, clamp=True, seed=0).to_dense()
        assert dense[huge.edge_prob_dense() >= 1].all()
        assert sample_edges(huge, method="fastrg", seed=0).to_dense()[huge.edge_prob_dense() >= 50].all()


def test_a_loose_bound_above_one_is_no_error() -> None:
    """No pair exceeds 1, though the cheap bound of the row does."""
    y = torch.tensor([[[1.0, 1.0]]])
    sbm = SBM(y, torch.tensor([[[0.9, 0.0], [0.0, 0.9]]]), torch.eye(2)[None])
    assert float((sbm.rate[0, 0] * sbm.key_membership.amax(1)[0]).sum()) > 1
    assert sample_edges(sbm.validate(), seed=0).num_edges <= 2


# ------------------------------------------------------------------ the transform


def test_transform_on_data() -> None:
    sbm = larger_sbm(queries=80)
    data = Data(
        query_membership=sbm.query_membership.transpose(0, 1),
        key_membership=sbm.key_membership.transpose(0, 1),
        block_matrix=sbm.block_matrix,
    )
    out = SBMGraph(seed=3)(data)
    graph = sample_edges(sbm, seed=3)
    assert torch.equal(out.edge_index, graph.edge_index)
    assert torch.equal(out.edge_type, graph.edge_head)
    assert "edge_index" not in data  # a transform works on a copy


def test_transform_on_bipartite_data() -> None:
    sbm = larger_sbm(heads=1)
    data = HeteroData()
    data["query"].query_membership = sbm.query_membership[0]
    data["key"].key_membership = sbm.key_membership[0]
    data.block_matrix = sbm.block_matrix[0]
    out = SBMGraph(seed=3)(data)
    assert torch.equal(out["key", "to", "query"].edge_index, sample_edges(sbm, seed=3).edge_index)


def test_bipartite_edges_of_a_batch_separate_again() -> None:
    def item(queries: int, keys: int) -> HeteroData:
        return HeteroData({"query": {"x": torch.randn(queries, 16)}, "key": {"x": torch.randn(keys, 16)}})

    batch = Batch.from_data_list([item(5, 7), item(3, 2)])
    query, key = (batch[name].x.unflatten(1, (2, 8)).transpose(0, 1) for name in ("query", "key"))
    tokens = Tokens(query, key, query_ptr=batch["query"].ptr, key_ptr=batch["key"].ptr)
    graph = sample_edges(SBMHead(8, heads=2, num_clusters=4)(tokens), seed=1)
    for number, part in enumerate(graph.replace_edges(batch, ("key", "to", "query")).to_data_list()):
        assert torch.equal(part["key", "to", "query"].edge_index, graph.sequence(number).edge_index)
        assert torch.equal(part["key", "to", "query"].edge_head, graph.sequence(number).edge_head)


def test_transform_is_a_functional_datapipe() -> None:
    from torch.utils.data import IterDataPipe

    assert "sbm_graph" in IterDataPipe.functions


def carriers(**changes: Any) -> dict[str, Any]:
    return {
        "query_membership": torch.ones(3, 1), "key_membership": torch.ones(3, 1), "block_matrix": torch.ones(1, 1),
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (Data(num_nodes=2, **carriers()), ValueError, r"Expected 'query_membership' to have a row for each of the 2 nodes \(got \[3, 1\]\)"),
        (Data(**carriers(query_membership=torch.ones(3))), ValueError, r"Expected 'query_membership' to be \[N, K\] or \[N, H, K\] \(got \[3\]\)"),
        (Data(**carriers(block_matrix=torch.ones(1))), ValueError, r"Expected 'block_matrix' to be \[K, K\] or \[H, K, K\] \(got \[1\]\)"),
        (Data(**carriers(key_membership=[1.0])), TypeError, r"Expected 'key_membership' to be a tensor \(got list\)"),
        (Data(**carriers(block_matrix=torch.ones(1, 1).long())), TypeError, r"Expected 'block_matrix' to be a floating tensor \(got torch.int64\)"),
        (SBM(torch.ones(1, 3, 1), torch.ones(1, 3, 1), torch.ones(1, 1, 1)), TypeError, r"Expected 'data' to be Data or HeteroData \(got SBM\)"),
        (HeteroData({"word": {"x": torch.ones(3, 2)}}), ValueError, r"Expected 'edge_type' to begin and end with a kind of nodes of the data, of \['word'\]"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit(data: Any, error: type[Exception], message: str) -> None:
    before = list(data.keys()) if isinstance(data, Data) else None
    with pytest.raises(error, match=message):
        SBMGraph(seed=0)(data)
    assert before is None or list(data.keys()) == before


def test_hetero_memberships_have_a_row_for_each_node() -> None:
    data = HeteroData(
        {"query": {"query_membership": torch.ones(3, 1)}, "key": {"key_membership": torch.ones(4, 1), "num_nodes": 3}}
    )
    data.block_matrix = torch.ones(1, 1)
    refuses(
        lambda: SBMGraph(seed=0)(data), "Expected 'key_membership' to have a row for each of the 3 nodes (got [4, 1])"
    )
    assert data.node_types == ["query", "key"]
