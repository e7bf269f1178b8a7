"""Graphs in which the queries of a group share their draws: words, laws of rows, and what the edges depend on."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from problems import LAW_CASES, on_threads, pointer, same, small_sbms
from problems import draw as draw64
from scipy import stats
from test_sampling import FALSE_ALARM, chi_square, joint_law
from torch import Tensor

from sbm_pyg import SBM, AttentionGraph, SBMHead, SBMSource, Tokens, make_attention, ops, sample_edges
from sbm_pyg.ops import random_words
from sbm_pyg.ops.reference import sampling as reference_sampling
from sbm_pyg.training.gradients import attach_local_expectation

SAMPLERS = pytest.mark.parametrize("draw", [ops.sample_sbm, reference_sampling.sample_sbm], ids=["numba", "reference"])


def words(groups: int, keys: int, seed: int = 3) -> Tensor:
    """Words of the first groups and keys of one head, ``[groups, keys]``."""
    group, key = torch.arange(groups)[:, None], torch.arange(keys)
    return random_words.shared_words(group, key, 5, torch.zeros(1, 1, dtype=torch.int64), seed)


def evenness(cells: Tensor, count: int) -> float:
    """p-value of numbers in ``0 .. count-1`` that should be equally frequent."""
    return chi_square(cells.flatten(), torch.full((count,), 1 / count, dtype=torch.float64))


# ------------------------------------------------------------------ words


@pytest.mark.parametrize("shift", [0, 8, 16, 20, 24])
def test_words_are_uniform(shift: int) -> None:
    assert evenness(words(1000, 1000) >> shift & 0xFF, 256) > FALSE_ALARM


@pytest.mark.parametrize("shift", [0, 14, 16, 30])
@pytest.mark.parametrize("distance", [(0, 1), (1, 0), (1, 1), (0, 16), (16, 0), (0, 100), (100, 0)])
def test_words_of_two_pairs_are_independent(shift: int, distance: tuple[int, int]) -> None:
    """Of keys and groups at some distance, in two bits of each."""
    bits, (down, right) = words(1000, 1000) >> shift & 3, distance
    assert evenness(4 * bits[: 1000 - down, : 1000 - right] + bits[down:, right:], 16) > FALSE_ALARM


def four_words(table: Tensor) -> float:
    """p-value of four pairs, of two groups and two keys each, in two bits of each word."""
    corner = table.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 1, 3).flatten(2)
    return evenness((corner * torch.tensor([64, 16, 4, 1])).sum(2), 256)


@pytest.mark.parametrize("shift", [0, 14, 16, 30])
def test_words_of_three_and_four_pairs_are_independent(shift: int) -> None:
    """Two groups and two keys make four pairs, of which any three are independent, and the fourth hardly depends."""
    assert four_words(words(2000, 1000, seed=-4) >> shift & 3) > FALSE_ALARM
    halves = torch.randint(0, 4, (2000, 1), generator=torch.Generator().manual_seed(0))
    assert four_words((halves + halves[:1000, 0]) & 3) < FALSE_ALARM  # a sum of both sides is no word


def test_small_words_are_as_many_and_as_scattered_as_chance_has_them() -> None:
    """Rare events decide about sparse rows: counts of words below 2^-9 by group and by key are Poisson."""
    rare = (words(4096, 4096) < 2**23).double()
    for axis in (0, 1):
        count = rare.sum(axis)
        statistic = float(((count - 8) ** 2 / (8 * (1 - 2**-9))).sum())
        assert FALSE_ALARM < stats.chi2.sf(statistic, count.numel()) < 1 - FALSE_ALARM
    both = (rare.T @ rare).triu(1).sum()  # keys that a group has in common, 4096 * 4096^2 / 2 * 2^-18 expected
    assert float(both) == pytest.approx(131_040, abs=6 * math.sqrt(131_040))


def test_words_depend_on_all_counters() -> None:
    group, key, head = torch.arange(50)[:, None], torch.arange(60), torch.arange(2)[:, None, None]
    base = random_words.shared_words(group, key, 5, head, 3)
    others = [
        random_words.shared_words(group + 50, key, 5, head, 3), random_words.shared_words(group, key + 60, 5, head, 3),
        random_words.shared_words(group, key, 6, head, 3), random_words.shared_words(group, key, 5, head + 2, 3),
        random_words.shared_words(group, key, 5, head, 4), random_words.shared_words(group, key, 5, head, 3 + 2**32),
    ]  # fmt: skip
    tables = torch.stack([base, *others]).flatten(0, 1)
    assert len(tables.unique()) > tables.numel() - 100  # of 42,000 words in 2^32, one pair in five tables agrees
    assert not any(torch.equal(one, other) for n, one in enumerate(tables) for other in tables[:n])


# ------------------------------------------------------------------ laws


def grouped(prob: Tensor, groups: int, row_group: int, draw: Any, **options: Any) -> Tensor:
    """Many groups whose rows have probabilities ``[row_group, m]``: the graph of each row, ``[groups, row_group, m]``."""
    size, keys = prob.shape
    rate, member = prob.repeat(groups, 1)[None], torch.eye(keys)[None]
    ptrs, law = (pointer([groups * size]), pointer([keys])), {"seed": 11, "method": "bernoulli"} | options
    law |= {"exploration": 0.0, "clamp": False, "is_causal": False} | options
    rowptr, col = draw(rate, member, *ptrs, torch.tensor([2]), **law, row_group=row_group)
    dense = torch.zeros(groups * size, keys, dtype=torch.bool)
    dense[torch.repeat_interleave(rowptr.diff()), col.long()] = True
    return dense.view(groups, size, keys)


def numbers(graphs: Tensor) -> Tensor:
    """Graphs ``[..., m]`` by their bits."""
    return (graphs * (1 << torch.arange(graphs.size(-1)))).sum(-1)


@SAMPLERS
@LAW_CASES
def test_each_row_has_the_joint_law_of_independent_pairs(name: str, exploration: float, draw: Any) -> None:
    """Chi-square over all sets of keys of a row, in each place of a group."""
    prob = small_sbms()[name].edge_prob_dense()[0].float()
    graphs = grouped(prob, 200_000, len(prob), draw, exploration=exploration)
    for row, p in enumerate(prob):
        assert chi_square(numbers(graphs[:, row]), joint_law(p + exploration)) > FALSE_ALARM


def test_the_test_of_rows_sees_wrong_probabilities_and_shared_groups() -> None:
    """Negative controls: an error of 3 % in one probability; and rows of one group taken for independent ones."""
    prob = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.4, 0.6]])
    graphs = grouped(prob, 300_000, 2, reference_sampling.sample_sbm)
    assert chi_square(numbers(graphs[:, 0]), joint_law(prob[0])) > FALSE_ALARM
    assert chi_square(numbers(graphs[:, 0]), joint_law(prob[0] * torch.tensor([1, 1.03, 1]))) < FALSE_ALARM
    assert chi_square(numbers(graphs.flatten(1)), joint_law(prob)) < FALSE_ALARM
    apart = grouped(prob, 300_000, 1, ops.sample_sbm)  # without groups the pairs are independent
    assert chi_square(numbers(apart.flatten(1)), joint_law(prob)) > FALSE_ALARM


@SAMPLERS
def test_rows_of_a_group_share_their_uniforms(draw: Any) -> None:
    """The keys of a row are those of a row with larger probabilities, and groups are independent of each other."""
    prob = torch.tensor([0.1, 0.4, 0.2])[:, None].expand(3, 4)
    graphs = grouped(prob, 100_000, 3, draw)
    assert (graphs[:, 0] <= graphs[:, 2]).all()
    assert (graphs[:, 2] <= graphs[:, 1]).all()
    pairs = graphs[:, 1].unflatten(0, (-1, 2)).flatten(1)  # of two groups
    assert chi_square(numbers(pairs), joint_law(prob[1].repeat(2))) > FALSE_ALARM


# ------------------------------------------------------------------ what the edges depend on, and what not


def problem(lengths: list[int], keys: list[int] | None = None, blocks: int = 7, heads: int = 2) -> tuple[Any, ...]:
    """Rates, memberships and offsets: peaked memberships, of probabilities of all sizes."""
    random = torch.Generator().manual_seed(len(lengths) + blocks)
    ptr, key_ptr = pointer(lengths), pointer(keys or lengths)
    y, z = (torch.rand(heads, int(x[-1]), blocks, generator=random) ** 8 for x in (ptr, key_ptr))
    y *= 10.0 ** -(4 * torch.rand(heads, y.size(1), 1, generator=random))
    return y, z, ptr, key_ptr


@SAMPLERS
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_has_its_graph_in_any_batch_with_any_heads_and_threads(is_causal: bool, draw: Any) -> None:
    y, z, ptr, key_ptr = problem([40, 0, 100, 333], [50, 3, 0, 400])
    law = (7, "bernoulli", 0.01, True, is_causal, 16)
    ids = torch.tensor([4, 9, 1, 2**32 - 1])
    rowptr, col = draw(y, z, ptr, key_ptr, ids, *law)
    with on_threads(2):
        assert same(draw(y, z, ptr, key_ptr, ids, *law), (rowptr, col))
    for sequence, number in enumerate(ids.tolist()):
        queries, keys = slice(*ptr[sequence : sequence + 2].tolist()), slice(*key_ptr[sequence : sequence + 2].tolist())
        ptrs = (torch.tensor([0, x.stop - x.start]) for x in (queries, keys))
        rows, its = draw(y[1:, queries], z[1:, keys], *ptrs, torch.tensor([number + (1 << 32)]), *law)
        begin = y.size(1) + queries.start
        end = y.size(1) + queries.stop
        assert torch.equal(rows, rowptr[begin : end + 1] - rowptr[begin])
        assert torch.equal(its + keys.start, col[rowptr[begin] : rowptr[end]])


@SAMPLERS
def test_no_row_depends_on_a_later_token_nor_on_its_neighbors(draw: Any) -> None:
    y, z, ptr, _ = problem([100])
    law = (ptr, ptr, torch.tensor([0]), 7, "bernoulli", 0.0, True, True, 16)
    rowptr, col = draw(y, z, *law)
    for cut in (20, 32, 77):  # 20 is within a group
        later, other = y.clone(), z.clone()
        later[:, cut:], other[:, cut:] = 0.3, 0.7
        rows, keys = draw(later, other, *law)
        for head in (0, 100):
            assert torch.equal(rows[head : head + cut + 1].diff(), rowptr[head : head + cut + 1].diff())
            span = slice(int(rowptr[head]), int(rowptr[head + cut])), slice(int(rows[head]), int(rows[head + cut]))
            assert torch.equal(col[span[0]], keys[span[1]])


@SAMPLERS
def test_extremes_of_shared_draws(draw: Any) -> None:
    ptr, ids, ones = pointer([40]), torch.tensor([0]), torch.ones(1, 40, 1)
    degrees = [(1.0, 40), (0.0, 0), (-0.0, 0), (2.0**-33, 0)]
    for rate, degree in degrees:
        rowptr, col = draw(rate * ones, ones, ptr, ptr, ids, 0, "bernoulli", 0.0, False, False, 16)
        assert rowptr.diff().tolist() == [degree] * 40
        assert torch.equal(col, torch.arange(degree, dtype=torch.int32).repeat(40))
    rowptr, _ = draw(0 * ones, ones, ptr, ptr, ids, 0, "bernoulli", 1.0, False, True, 7)
    assert rowptr.diff().tolist() == [*range(1, 41)]


@SAMPLERS
def test_shared_draws_refuse_what_independent_ones_refuse(draw: Any) -> None:
    ptr, ids, ones = pointer([30]), torch.tensor([0]), torch.ones(1, 30, 2)
    for side in (0, 1):
        for value in (math.nan, math.inf):
            given = [ones / 4, ones.clone()]
            given[side][0, 17, 1] = value
            with pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
                draw(*given, ptr, ptr, ids, 0, "bernoulli", 0.0, True, False, 16)
    with pytest.raises(ValueError, match=r"Expected edge probabilities in \[0, 1\] \(got 2\)"):
        draw(ones, ones, ptr, ptr, ids, 0, "bernoulli", 0.25, False, False, 16)
    large = ones.clone()
    large[:, :29] = 0.4
    with pytest.raises(ValueError, match=r"Expected edge probabilities in \[0, 1\] \(got 2\)"):
        draw(large, ones, ptr, ptr, ids, 0, "bernoulli", 0.0, False, True, 16)
    rowptr, _ = draw(ones, ones, ptr, ptr, ids, 0, "bernoulli", 0.25, True, False, 16)
    assert rowptr[-1] == 900


@SAMPLERS
def test_keys_that_no_query_attends_to_may_be_anything(draw: Any) -> None:
    """They are later than all queries, or in a sequence without queries."""
    y, z, ptr, key_ptr = problem([20, 0, 9], [30, 5, 9], heads=1)
    law = (ptr, key_ptr, torch.arange(3), 7, "bernoulli", 0.0, True, True, 16)
    meant = draw(y, z, *law)
    z[0, 20:35] = math.nan
    assert same(draw(y, z, *law), meant)


def test_queries_share_draws_of_bernoulli_alone() -> None:
    ones, ptr = torch.ones(1, 3, 1), pointer([3])
    with pytest.raises(ValueError, match=r"Expected 'row_group' to be 1 with method='fastrg' \(got 2\)"):
        ops.sample_sbm(ones, ones, ptr, ptr, torch.tensor([0]), 0, "fastrg", row_group=2)
    with pytest.raises(ValueError, match=r"Expected 'row_group' to be at least 1 \(got 0\)"):
        ops.sample_sbm(ones, ones, ptr, ptr, torch.tensor([0]), 0, row_group=0)


@pytest.mark.parametrize("row_group", [1, 16, 2**62])
def test_opcheck_of_shared_draws(row_group: int) -> None:
    y, z, ptr, key_ptr = problem([3, 20])
    arguments = (y, z, ptr, key_ptr, torch.tensor([0, 1]), 5, "bernoulli", 0.1, True, True, row_group)
    torch.library.opcheck(torch.ops.sbm_pyg.sample_sbm.default, arguments)


# ------------------------------------------------------------------ kernels


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("row_group", [2, 16, 17, 40, 2**62])
@pytest.mark.parametrize(
    ("blocks", "dtype"), [(1, torch.float64), (7, torch.float32), (16, torch.bfloat16), (70, None)]
)
def test_the_kernel_draws_the_edges_of_the_comparison(
    blocks: int, dtype: torch.dtype | None, row_group: int, is_causal: bool
) -> None:
    lengths = [0, 1, 15, 16, 17, 63, 300]
    y, z, ptr, key_ptr = problem(lengths, lengths if blocks == 16 else [300, 0, 31, 257, 16, 1, 513], blocks)
    y, z = (x.to(dtype or torch.float32) for x in (y, z))
    y[:, 20], y[:, 21] = 0.0, -0.0
    for exploration, seed in ((0.0, -3), (0.03, 2**63 - 1)):
        given = (y, z, ptr, key_ptr, torch.arange(7), seed, "bernoulli", exploration, True, is_causal, row_group)
        found = ops.sample_sbm(*given)
        assert same(found, reference_sampling.sample_sbm(*given))
        assert found[1].numel() > 30


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_over_many_segments_and_threads(is_causal: bool) -> None:
    """Sequences of several segments of sorted keys, whose probabilities are small; rows beside each other differ."""
    y, z, ptr, _ = problem([5000, 1000], heads=1)
    given = (0.1 * y, z, ptr, ptr, torch.arange(2), 3, "bernoulli", 0.0, True, is_causal, 16)
    found = ops.sample_sbm(*given)
    assert same(found, reference_sampling.sample_sbm(*given))
    with on_threads(2):
        assert same(found, ops.sample_sbm(*given))


def test_words_that_only_float64_decides() -> None:
    """An edge needs word + 1 <= 2^32 p. Of two keys one has just that, the next a little less."""
    least = (words(1, 130)[0] + 1).double()
    least[1::2] -= 2**-10
    rate, member = torch.ones(1, 1, 1).double(), (least / 2**32).view(1, 130, 1)
    given = (rate, member, pointer([1]), pointer([130]), torch.tensor([5]), 3, "bernoulli", 0.0, False, False, 16)
    for draw in (ops.sample_sbm, reference_sampling.sample_sbm):
        assert draw(*given)[1].tolist() == [*range(0, 130, 2)]


@pytest.mark.parametrize("part", [0.98, 1.02])
def test_numbers_that_float32_and_bfloat16_round_the_most(part: float) -> None:
    rate, member = (torch.full((1, count, 3), 1 + part * 2.0**-24, dtype=torch.float64) for count in (300, 3000))
    ptrs = pointer([300]), pointer([3000])
    given = (rate / 16, member, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.0, False, False, 16)
    assert same(ops.sample_sbm(*given), reference_sampling.sample_sbm(*given))


# ------------------------------------------------------------------ the source


def test_a_source_shares_draws() -> None:
    torch.manual_seed(0)
    head, tokens = SBMHead(8, 2, 4), Tokens(torch.randn(2, 40, 8), is_causal=True, seed=3)
    source, apart = SBMSource(head, row_group=16, window=None), SBMSource(head, window=None)
    graph = source(tokens).graph
    sbm = head(tokens).causal()
    options: dict[str, Any] = {"seed": 3, "sequence_ids": tokens.sequence_ids, "clamp": True}
    assert graph == sample_edges(sbm, row_group=16, **options)
    assert graph != apart(tokens).graph == sample_edges(sbm, **options)
    assert "row_group=16" in repr(source)
    assert "row_group" not in repr(apart)
    with pytest.raises(ValueError, match=r"Expected 'row_group' to be 1 with method='fastrg' \(got 2\)"):
        SBMSource(head, method="fastrg", row_group=2)


def test_layers_share_draws_by_default() -> None:
    cases: list[dict[str, Any]] = [{}, {"row_group": 1}, {"block_size": 2}, {"method": "fastrg"}]
    sources: list[Any] = [make_attention("sbm", 8, 4, 2, num_clusters=4, **options).source for options in cases]
    assert [source.row_group for source in sources] == [16, 1, 1, 1]


# ------------------------------------------------------------------ gradients, by enumeration


def graphs_of(p: Tensor, shared: bool) -> tuple[list[Tensor], Tensor]:
    """All graphs of rows ``[n, m]`` that share uniforms or not, and their chances, differentiable in p."""
    keys = []  # of each key: sets of rows, and their chances
    for column in p.T:
        if shared:  # one uniform number: rows drop out by and by as it rises
            rising, order = column.sort()
            sets = [torch.zeros(len(p)).index_fill(0, order[rank:], 1.0) for rank in range(len(p) + 1)]
            keys.append((sets, torch.cat([rising[:1], rising.diff(), 1 - rising[-1:]])))
        else:
            sets = [torch.tensor(bits) for bits in product([0.0, 1.0], repeat=len(p))]
            keys.append((sets, torch.stack([torch.where(rows > 0, column, 1 - column).prod() for rows in sets])))
    chosen = list(product(*(range(len(sets)) for sets, _ in keys)))
    graphs = [torch.stack([sets[n] for (sets, _), n in zip(keys, number, strict=True)], 1) for number in chosen]
    chances = [
        torch.stack([chance[n] for (_, chance), n in zip(keys, number, strict=True)]).prod() for number in chosen
    ]
    return graphs, torch.stack(chances)


def gradients(loss: Any, shared: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the expected loss to p, and the expectation of what ``local`` computes, with probes everywhere."""
    query, key, value = (draw64(seed, 1, 3, 4) for seed in (1, 2, 3))
    p = torch.tensor([[0.1, 0.3, 0.9], [0.2, 0.7, 0.5], [0.6, 0.4, 0.8]], dtype=torch.float64, requires_grad=True)
    graphs, chances = graphs_of(p, shared)
    assert float(chances.detach().sum()) == pytest.approx(1)
    expected, mean = torch.zeros((), dtype=torch.float64), torch.zeros_like(p)
    every, eye = AttentionGraph.from_dense(torch.ones(3, 3)), torch.eye(3, dtype=p.dtype)[None]
    for mask, chance in zip(graphs, chances, strict=True):
        graph = AttentionGraph.from_dense(mask)
        out = ops.edge_attention(query, key, value, graph.rows, scale=0.5)[0]
        expected = expected + chance * loss(out)
        leaf = p.detach().clone().requires_grad_()
        more = (SBM(leaf[None], eye, eye), graph, every, torch.ones(3, dtype=p.dtype))
        seen = attach_local_expectation(out, query, key, value, *more, scale=0.5)
        mean += chance.detach() * torch.autograd.grad(loss(seen), leaf)[0]
    return torch.autograd.grad(expected, p)[0], mean


def test_local_is_exact_for_losses_that_add_over_rows() -> None:
    """Expectations of sums need no independence: both laws have the same gradient, and `local` has it exactly."""
    weight = draw64(4, 1, 3, 4)
    (apart, _), (exact, mean) = (gradients(lambda out: (out * weight).sum(), shared) for shared in (False, True))
    torch.testing.assert_close(exact, apart, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-12)


def second_layer(out: Tensor) -> Tensor:
    """Dense attention over the outputs of the sampled layer, and a weighted sum of what it gives."""
    return ((2 * out @ out.mT).softmax(2) @ out * draw64(5, 1, 3, 4)).sum()


@pytest.mark.parametrize(
    ("power", "shared", "bias"), [(1, False, 0.2116), (1, True, 0.2913), (2, False, 0.400), (2, True, 0.348)]
)
def test_bias_of_local_for_a_loss_over_two_layers(power: int, shared: bool, bias: float) -> None:
    """Neither is exact where rows meet; docs/concepts.md has the figures."""
    exact, mean = gradients(lambda out: second_layer(out) ** power, shared)
    assert float((mean - exact).norm() / exact.norm()) == pytest.approx(bias, rel=0.01)
