"""Entmax, probes, graphs, and what all of them ask of a device, in Triton's interpreter or on a GPU; see ``triton_contract.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import test_estimators
import test_ops
import torch
from problems import pointer, random_graph
from torch.utils._python_dispatch import _disable_current_modes
from triton_contract import COUNTED, INTERPRETED, MODULES_BY_NAME, ON_ONE_SIDE, QUIET, Kernels, contract
from triton_contract import kernels as kernels

from sbm_pyg import SBMAttentionConv, make_attention, ops
from sbm_pyg.ops import random_words, segments
from sbm_pyg.ops.reference import edges as reference_edges
from sbm_pyg.ops.reference import effects as reference_effects
from sbm_pyg.ops.reference import sampling as reference_sampling
from sbm_pyg.ops.reference import systematic as reference_systematic
from sbm_pyg.training.estimators import Local

pytestmark = QUIET


# ------------------------------------------------------------------ entmax

ALPHAS = 1.05, 1.3, 1.5, 2.0, 3.0, 4.0
FLOATS = torch.float32, torch.float64

test_entmax = contract(
    test_ops.test_entmax_equals_the_dense_one_row_by_row, *zip(ALPHAS, [0.1, 30.0] * 3, strict=True), (1.5, 0.0),
    (1.5, 1.0),
)  # fmt: skip
test_gradients_of_entmax = contract(
    test_ops.test_entmax_and_its_gradient_are_those_of_the_dense_one,
    *product(ALPHAS[:4], [(0, 1, 2, 15, 16, 17, 0, 300, 4)]),
    (1.5, (1, 100_000)),
)
test_values_of_entmax = contract(test_ops.test_entmax_kernels_equal_the_reference, *((dtype,) for dtype in FLOATS))
test_forbidden_values = contract(
    test_ops.test_entmax_of_forbidden_values_is_zero, *product([1.5, 2.0, 3.0], [torch.float32])
)
test_support = contract(test_ops.test_the_support_is_where_shares_are, ())


test_entmax_of_long_rows = contract(
    test_ops.test_entmax_and_its_gradient_are_those_of_the_dense_one,
    *product(ALPHAS[:4], [(0, 1, 2, 15, 16, 17, 0, 40, 4)]),
    long=15,
)
test_values_of_long_rows = contract(
    test_ops.test_entmax_kernels_equal_the_reference, *((dtype,) for dtype in FLOATS), long=200
)
test_forbidden_values_of_long_rows = contract(
    test_ops.test_entmax_of_forbidden_values_is_zero, *product([1.5, 2.0, 3.0], [torch.float32]), long=1
)
test_support_of_long_rows = contract(test_ops.test_the_support_is_where_shares_are, (), long=200)


@pytest.mark.parametrize(
    ("long", "more"), [(2048, []), (10, ["_count_pieces_kernel", "_near_kernel", "_entmax_sums_kernel"])]
)
def test_long_rows_of_entmax_take_a_kernel_more(
    long: int, more: list[str], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", long)
    src, ptr = test_ops.ragged(5, 0, 30)
    ops.segment_entmax(src.requires_grad_(), ptr=ptr, alpha=1.4).sum().backward()
    assert sorted(kernels.started) == sorted(["_entmax_kernel", "_entmax_backward_kernel", *more])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entmax_in_half_precision(dtype: torch.dtype) -> None:
    src, ptr = test_ops.ragged(5, 0, 30)
    given = src.to(dtype).requires_grad_()
    wide = given.detach().double().requires_grad_()
    out, wanted = (ops.segment_entmax(x, ptr=ptr, alpha=1.4) for x in (given, wide))
    torch.testing.assert_close(out, wanted.to(dtype))
    grad = torch.linspace(-1, 1, 35, dtype=torch.float64)
    found = torch.autograd.grad(out, given, grad.to(dtype))[0]
    torch.testing.assert_close(found.double(), torch.autograd.grad(wanted, wide, grad)[0], rtol=0.02, atol=0.02)


# ------------------------------------------------------------------ probes

test_probes = contract(
    test_estimators.test_systematic_samples_are_those_of_the_reference, (0.3, torch.float64), (7.0, torch.float32)
)


@pytest.mark.parametrize("seed", [3, -1, 2**40 + 5, 2**63 - 1])
def test_queries_are_those_of_the_reference(seed: int) -> None:
    given = (torch.tensor([0, 9, 9, 300]), torch.tensor([7, 2**32 - 1, 5 + (3 << 32)]), 300, 0.3, seed)
    assert torch.equal(ops.schemas.sample_queries(*given), reference_systematic.sample_queries(*given))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seed", [3, -1, 2**40 + 5])
def test_probes_are_those_of_the_reference_to_the_bit(seed: int, is_causal: bool) -> None:
    chance = torch.tensor([2.0, math.nan, -1.0, 0.0, 1.0, 1e-9, *torch.linspace(0.01, 0.99, 34).tolist()])
    given = (chance, torch.tensor([0, 9, 9, 40]), torch.tensor([0, 300, 301, 500]), torch.tensor([7, 2**32 - 1, 0]))
    found = ops.schemas.sample_systematic(*given, 2, seed, is_causal)
    for mine, wanted in zip(found, reference_systematic.sample_systematic(*given, 2, seed, is_causal), strict=True):
        assert torch.equal(mine, wanted)


# ------------------------------------------------------------------ graphs of a block model

WAYS = {"proposals": (0.0, math.inf), "gaps": (math.inf, 0.0), "coins": (math.inf, math.inf), "any": (64.0, 11.0)}
"""What a proposal and a gap are taken to cost, by the way that rows then take."""


def model(way: str, sequences: int, tokens: int, heads: int, is_causal: bool = False, blocks: int = 32) -> tuple:
    """Arguments of ``sample_sbm`` whose rows go one way, or all three."""
    random = torch.Generator().manual_seed(0)
    y, z = (torch.rand(heads, sequences * tokens, blocks, generator=random) for _ in range(2))
    y, z = (y + 3) / 4 / blocks, (z + 3) / 4  # nearly even, as a layer starts
    y *= {"gaps": 0.05, "coins": 0.4, "proposals": 0, "all": 0.05}[way]
    if way in ("proposals", "all"):  # one key in a hundred is in the first block, and surely an edge of some rows
        some = slice(0, None, {"proposals": 1, "all": 3}[way])
        y[:, some], z[:, :, 0] = 0, 0
        y[:, some, 0], z[:, ::100, 0] = 0.5, 1
    if way == "all":
        y[:, 1::3] *= 8
    ptr = torch.arange(sequences + 1) * tokens
    return y, z, ptr, ptr, torch.arange(sequences), 7, "bernoulli", 0.0, False, is_causal


def agree(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same edges as those of plain torch, which are returned."""
    found = ops.sample_sbm(*given)
    with _disable_current_modes():  # the reference takes thousands of operations, which nobody counts
        wanted = reference_sampling.sample_sbm(*given)
    for mine, meant in zip(found, wanted, strict=True):
        assert mine.dtype == meant.dtype
        assert torch.equal(mine, meant)
    return wanted


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Iterator[str]:
    proposal_cost, gap_cost = WAYS[request.param]
    monkeypatch.setattr(reference_sampling, "PROPOSAL_COST", proposal_cost)
    monkeypatch.setattr(reference_sampling, "GAP_COST", gap_cost)
    yield request.param
    assert {"_panel_sums_kernel", "_join_panels_kernel", "_plan_kernel", "_proposals_kernel", "_pairs_kernel"} <= {
        *kernels.started
    }


@pytest.mark.parametrize(
    ("blocks", "keys", "method", "exploration", "seed", "is_causal"),
    [
        (6, 100, "bernoulli", 0.0, 1, True), (18, 150, "bernoulli", 0.0625, 2**63 - 1, False), (6, 100, "fastrg", 0.03125, -3, False),
        (6, 100, "fastrg", 0.03125, -3, True),
    ],
)  # fmt: skip
def test_graphs_are_those_of_plain_torch(
    blocks: int, keys: int, method: str, exploration: float, seed: int, is_causal: bool, way: str
) -> None:
    """Memberships in sixteenths, whose sums are exact in any order; a sequence has no query, another no key."""
    random = torch.Generator().manual_seed(5)
    y = torch.randint(0, 17, (2, 14, blocks), generator=random) / 16 / (8 if blocks < 10 else 32)
    z = torch.randint(0, 17, (2, keys, blocks), generator=random) / 16
    y[:, ::2] /= blocks
    y[:, 3] = 0
    ptrs = torch.tensor([0, 5, 5, 7, 14]), torch.tensor([0, 3, 20, 20, keys])
    streams = torch.tensor([3, 0, 9, 2**32 - 1])
    _, col = agree(y, z, *ptrs, streams, seed, method, exploration, True, is_causal)
    assert len(col) > 4


@pytest.mark.parametrize(
    ("row_group", "exploration", "seed", "is_causal", "dtype"),
    [
        (16, 0.0, 1, True, torch.float32), (32, 0.03125, 2**63 - 1, False, torch.bfloat16), (5, 0.0, -3, True, torch.float64),
        (2**62, 0.03125, 2, False, torch.float32),
    ],
)  # fmt: skip
def test_graphs_with_shared_draws_are_those_of_plain_torch(
    row_group: int, exploration: float, seed: int, is_causal: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """In sequences of 0, 1, 15, 16, 17 and 63 queries."""
    lengths, sizes = [0, 1, 15, 16, 17, 63], [3, 70, 15, 0, 30, 63]
    random = torch.Generator().manual_seed(5)
    y, z = (torch.rand(2, sum(x), 6, generator=random).pow(6).to(dtype) for x in (lengths, sizes))
    y[:, 3], y[:, 4] = 0.0, -0.0
    ids = torch.tensor([3, 0, 9, 2**32 - 1, 1, 2])
    given = (y, z, pointer(lengths), pointer(sizes), ids, seed, "bernoulli", exploration, True, is_causal, row_group)
    _, col = agree(*given)
    assert len(col) > 20
    assert kernels.started == ["_shared_kernel"] * 2
    rowptr, col = ops.sample_sbm(*given)
    of_second: Any = (y[1:], z[1:], *given[2:4], ids + (1 << 32), *given[5:])
    alone = ops.sample_sbm(*of_second)
    assert torch.equal(alone[0], rowptr[112:] - rowptr[112])
    assert torch.equal(alone[1], col[rowptr[112] :])


def test_shared_draws_of_sixteen_rows_of_one_sequence_do_not_depend_on_the_batch() -> None:
    random = torch.Generator().manual_seed(9)
    y, z = (torch.rand(1, 30, 3, generator=random) / 2 for _ in range(2))
    law: Any = (11, "bernoulli", 0.0, False, True, 16)
    ptr = torch.tensor([0, 12, 30])
    rowptr, col = ops.sample_sbm(y, z, ptr, ptr, torch.tensor([5, 2]), *law)
    mine, keys = ops.sample_sbm(y[:, 12:], z[:, 12:], pointer([18]), pointer([18]), torch.tensor([2]), *law)
    assert torch.equal(mine, rowptr[12:] - rowptr[12])
    assert torch.equal(keys + 12, col[rowptr[12] :])


def test_shared_draws_that_cannot_be_and_that_only_float64_decides() -> None:
    ptr, stream, ones = torch.tensor([0, 3]), torch.tensor([0]), torch.ones(1, 3, 2)
    for value in (math.nan, math.inf):
        rate = ones.index_fill(1, torch.tensor([1]), value)
        with pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
            ops.sample_sbm(rate, ones, ptr, ptr, stream, 0, "bernoulli", 0.0, True, False, 16)
    with pytest.raises(ValueError, match=r"Expected edge probabilities in \[0, 1\] \(got 2\)"):
        ops.sample_sbm(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, False, False, 16)
    assert len(agree(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, True, False, 16)[1]) == 9
    head = torch.zeros(1, 1, dtype=torch.int64)
    least = (random_words.shared_words(head, torch.arange(130), 3, head, 5)[0] + 1).double()
    least[1::2] -= 2**-10
    rate, member = torch.ones(1, 1, 1).double(), (least / 2**32).view(1, 130, 1)
    given = (rate, member, pointer([1]), pointer([130]), torch.tensor([3]), 5, "bernoulli", 0.0, False, False, 16)
    assert agree(*given)[1].tolist() == [*range(0, 130, 2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_graphs_of_any_type_and_strides(dtype: torch.dtype, way: str) -> None:
    random = torch.Generator().manual_seed(6)
    y, z = (torch.rand(17, n, 3, generator=random).div(4).to(dtype).permute(2, 1, 0) for n in (3, 75))
    ptrs = (torch.stack([x, x], 1)[:, 0] for x in (torch.tensor([0, 1, 3]), torch.tensor([0, 66, 75])))
    agree(y, z, *ptrs, torch.tensor([1, 0]), 7, "bernoulli", 0.01, True, False)


@pytest.mark.parametrize(("scale", "part"), [(2**-1, 0.98), (2**-5, 1.02)])
def test_numbers_that_half_precision_rounds_the_most(scale: float, part: float, way: str) -> None:
    rate, member = (torch.full((1, count, 1), 1 + part * 2.0**-8) for count in (3, 200))
    ptrs = (torch.tensor([0, count]) for count in (3, 200))
    agree(scale * rate, member, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.0, False, False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_all_ways_in_one_batch(is_causal: bool) -> None:
    """At the costs that decide by default. A causal row has few keys here, and tosses for them."""
    y, z, _, key_ptr, streams, *law = model("all", 2, 600, 2)
    given = (y[:, :6], z, torch.tensor([0, 3, 6]), key_ptr, streams, *law[:-1], is_causal)
    sizes = (given[0].double() @ part[:, :, None].double() for part in (z[:, :600].sum(1), z[:, :600].amax(1)))
    expected, bound = (x.flatten() for x in sizes)
    way = reference_sampling.plan_rows(expected, bound, 600, "bernoulli").way
    assert {*way.tolist()} == {reference_sampling.PROPOSALS, reference_sampling.GAPS, reference_sampling.PAIRS}
    agree(*given)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_many_panels_and_many_proposals(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More panels than are joined at once, and more proposals than one Poisson count draws; rows share one scratch."""
    monkeypatch.setattr(reference_sampling, "PROPOSAL_COST", 0.0)
    monkeypatch.setattr(reference_sampling, "GAP_COST", math.inf)
    monkeypatch.setattr(MODULES_BY_NAME["sampling"], "MAX_PROPOSAL_BYTES", 1)
    monkeypatch.setattr(MODULES_BY_NAME["sampling"], "PANELS_PER_STEP", 2)
    random = torch.Generator().manual_seed(8)
    y, z = torch.zeros(1, 160, 2), torch.randint(12, 17, (1, 160, 2), generator=random) / 16
    y[:, -1] = 0.48
    ptrs = torch.tensor([0, 160]), torch.tensor([0, 160])
    rowptr, _ = agree(y, z, *ptrs, torch.tensor([0]), 3, "bernoulli", 0.0, False, is_causal)
    assert rowptr[-1] > 100  # of about 300 proposals


def test_a_sequence_has_its_graph_in_any_batch(way: str) -> None:
    random = torch.Generator().manual_seed(9)
    y, z, ptr = (
        torch.rand(1, 9, 3, generator=random) / 4, torch.rand(1, 9, 3, generator=random), torch.tensor([0, 4, 9]),
    )  # fmt: skip
    law = (11, "bernoulli", 0.0, False, True)
    rowptr, col = ops.sample_sbm(y, z, ptr, ptr, torch.tensor([5, 2]), *law)
    mine, keys = ops.sample_sbm(y[:, 4:], z[:, 4:], torch.tensor([0, 5]), torch.tensor([0, 5]), torch.tensor([2]), *law)
    assert torch.equal(mine, rowptr[4:] - rowptr[4])
    assert torch.equal(keys + 4, col[rowptr[4] :])


def test_some_heads_alone_draw_the_edges_of_these_heads(way: str) -> None:
    random = torch.Generator().manual_seed(9)
    y, z, ptr = (
        torch.rand(3, 5, 3, generator=random) / 4, torch.rand(3, 9, 3, generator=random), torch.tensor([0, 4, 9]),
    )  # fmt: skip
    given, ids = (torch.tensor([0, 2, 5]), ptr), torch.tensor([5, 2])
    rowptr, col = ops.sample_sbm(y, z, *given, ids, 11, "bernoulli")
    mine, keys = ops.sample_sbm(y[1:], z[1:], *given, ids + (1 << 32), 11, "bernoulli")
    assert torch.equal(mine, rowptr[5:] - rowptr[5])
    assert torch.equal(keys, col[rowptr[5] :])


def test_probes_of_some_heads_are_those_of_all() -> None:
    ptr, chance, ids = torch.tensor([0, 4, 9]), torch.full((9,), 0.4), torch.tensor([5, 2])
    rowptr, col = ops.schemas.sample_systematic(chance, ptr, ptr, ids, 3, 7, False)
    mine, keys = ops.schemas.sample_systematic(chance, ptr, ptr, ids + (1 << 32), 2, 7, False)
    assert torch.equal(mine, rowptr[9:] - rowptr[9])
    assert torch.equal(keys, col[rowptr[9] :])


def test_graphs_that_cannot_be() -> None:
    ptr, stream, ones = torch.tensor([0, 3]), torch.tensor([0]), torch.ones(1, 3, 2)
    for value in (math.nan, math.inf):
        rate = ones.index_fill(1, torch.tensor([1]), value)
        with pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
            ops.sample_sbm(rate, ones, ptr, ptr, stream, 0, "bernoulli", 0.0, True, False)
    with pytest.raises(ValueError, match=r"Expected edge probabilities in \[0, 1\] \(got 2\)"):
        ops.sample_sbm(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, False, False)
    assert len(agree(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, True, False)[1]) == 9
    agree(ones, ones, ptr, ptr, stream, 0, "fastrg", 0.25, False, False)


def test_coins_that_only_float64_decides(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """A word is a coin that falls if word + 1 <= 2^32 p. Of two keys one has just that, the next a little less."""
    monkeypatch.setattr(reference_sampling, "PROPOSAL_COST", math.inf)
    monkeypatch.setattr(reference_sampling, "GAP_COST", math.inf)
    word, first = torch.zeros(130, dtype=torch.int64), torch.tensor(0)
    for bit in reversed(range(32)):
        above = word + 2**bit
        word = torch.where(reference_sampling.bernoulli_draws(above, first, 3, 0, 5), word, above)
    least = (word + 1).double()
    least[1::2] -= 2**-10
    ptrs = torch.tensor([0, 1]), torch.tensor([0, 130])
    rate, member = torch.ones(1, 1, 1).double(), (least / 2**32).view(1, 130, 1)
    _, col = agree(rate, member, *ptrs, torch.tensor([3]), 5, "bernoulli", 0.0, False, False)
    assert col.tolist() == [*range(0, 130, 2)]
    assert "_pairs_kernel" in kernels.started


def test_models_without_queries_or_keys_start_no_kernel(kernels: Kernels) -> None:
    for queries, keys in ((0, 3), (2, 0)):
        y, z, ptrs = torch.ones(1, queries, 2), torch.ones(1, keys, 2), (pointer([queries]), pointer([keys]))
        agree(y, z, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.5, False, False)
    assert not kernels.started


def test_models_without_blocks_have_the_edges_of_exploration(way: str) -> None:
    y, z, ptrs = torch.ones(1, 3, 0), torch.ones(1, 70, 0), (pointer([3]), pointer([70]))
    for row_group in (1, 16):
        _, col = agree(y, z, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.25, False, False, row_group)
        assert len(col) > 30


@COUNTED
@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
def test_sampling_takes_few_launches_and_one_wait(method: str, kernels: Kernels) -> None:
    given = model("coins", 1, 3, 1, blocks=4)
    before, waits = kernels.launches, kernels.waits
    torch.ops.sbm_pyg.sample_sbm(*given[:6], method, *given[7:])
    draws = (
        ["_gaps_kernel", "_proposals_kernel", "_pairs_kernel"]
        if method == "bernoulli"
        else ["_proposals_kernel", "_pairs_kernel"]
    )
    assert kernels.started == ["_panel_sums_kernel", "_join_panels_kernel", "_plan_kernel", *draws, *draws]
    assert kernels.launches - before == len(kernels.started) + 13
    assert kernels.waits - waits <= 1


# ------------------------------------------------------------------ what kernels do not take


@pytest.mark.parametrize("width", [0, 513])
def test_vectors_that_fit_no_tile_take_the_reference(width: int, kernels: Kernels) -> None:
    graph = random_graph(1, 3, 4, 0.7)
    query, key, value = (torch.randn(1, n, c, dtype=torch.float64) for n, c in ((3, width), (4, width), (4, 2)))
    leaves, rows = [query.requires_grad_(), key.requires_grad_()], (graph.rowptr, graph.col)
    out, _ = ops.edge_attention(query, key, value, graph.rows, scale=0.1)
    meant, _ = reference_edges.edge_attention(query, key, value, *rows, None, None, 0.1, "score", 0.0, 0)
    torch.testing.assert_close(out, meant)
    losses = (
        out.sum() + ops.edge_dot(query, key, graph.rows).sum(),
        meant.sum() + reference_edges.edge_dot(query, key, *rows).sum(),
    )
    for mine, wanted in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(mine, wanted)
    given = torch.ones_like(out), query.detach(), key.detach(), value
    more: Any = (*graph.rows, *graph.rows, 0.1, None, None, None, 0.0)
    found = ops.schemas.edge_effect(*given, *more)
    wanted = reference_effects.edge_effect(*given, *more)
    for mine, meant in zip(found, wanted, strict=True):
        within = 0.0 if INTERPRETED else 1e-12  # a GPU sums in another order
        torch.testing.assert_close(mine, meant, rtol=within, atol=within)
    assert not kernels.started


# ------------------------------------------------------------------ what is asked of the device


def attended(heads: int, tokens: int, dropout: float) -> None:
    graph = random_graph(heads, tokens, tokens, 0.3)
    leaves = test_ops.tensors(graph, 4, 4, True, True, torch.float32)
    out, _ = test_ops.attend(leaves, graph, "score", dropout)
    test_ops.gradients(out, leaves)


BACKWARD = ["_edge_attention_backward_kernel", "_gather_kernel", "_gather_kernel"]


@pytest.mark.parametrize(("heads", "tokens"), [(1, 3), (2, 9)])
def test_attention_takes_few_launches(heads: int, tokens: int, kernels: Kernels) -> None:
    attended(heads, tokens, 0.0)
    assert kernels.started == ["_edge_attention_kernel", *BACKWARD]
    kernels.started.clear()
    attended(heads, tokens, 0.1)
    fill = ["_dropout_words_kernel", "_dropout_words_kernel"]
    assert kernels.started == [*fill, "_edge_attention_kernel", *fill, *BACKWARD]


@ON_ONE_SIDE
def test_attention_asks_for_nothing_but_kernels_and_memory(kernels: Kernels) -> None:
    """Forward and backward, over a graph whose keys are in order already: each kernel, and what holds its results."""
    graph = random_graph(2, 5, 6, 0.5)
    query, key, value = (torch.randn(2, n, 4) for n in (5, 6, 6))
    given = (query, key, value, graph.rowptr, graph.col, None, None)
    segments.by_key(graph.rowptr, graph.col, 2, 6)
    before, waits = kernels.launches, kernels.waits
    out, lse = torch.ops.sbm_pyg.edge_attention(*given, 0.5, "score", 0.0, 0)
    torch.ops.sbm_pyg.edge_attention_backward(out, *given, out, lse, 0.5, "score", 0.0, 0, False, False)
    assert len(kernels.started) == 4
    assert kernels.launches - before == 4 + 8
    assert kernels.waits == waits


def layer(rows: float = 1, **options: Any) -> tuple[SBMAttentionConv, torch.Tensor]:
    """The default layer without a window, or one whose probabilities get the gradients of all queries, and its input."""
    torch.manual_seed(0)
    conv = make_attention("sbm", 8, 4, 2, num_clusters=4, estimator=Local(rows=rows), **{"window": None, **options})
    return conv, torch.randn(14, 8, requires_grad=True)


@COUNTED
@pytest.mark.parametrize("rows", [1, 0.25])
@pytest.mark.parametrize(("is_causal", "most"), [(False, 124), (True, 128)])
def test_a_training_step_takes_few_launches(is_causal: bool, most: int, rows: float, kernels: Kernels) -> None:
    """Of the default layer, whose rows are 0.25, and with all rows. Most are for projections and their gradients."""
    conv, x = layer(rows, is_causal=is_causal)
    more = 0 if rows == 1 else 25
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, allocations, waits = kernels.launches, kernels.allocations, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    effects = [
        "_measure_kernel",
        "_measure_kernel",
        "_edge_effect_kernel",
        *["_gather_kernel"] * 4,
    ]  # gradients of memberships, for edges and probes
    assert kernels.started == [
        *["_shared_kernel"] * 2,  # counts edges, then writes them
        "_edge_attention_kernel",
        *(["_sample_queries_kernel"] if more else []),
        "_start_kernel",
        "_step_kernel",
        *effects,
        *BACKWARD,
    ]
    assert kernels.launches - launches <= most + more
    assert kernels.launches - launches - (kernels.allocations - allocations) <= 108 + more
    assert kernels.waits - waits <= (4 if more else 3)


@COUNTED
def test_long_rows_take_few_launches_more(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all rows: eight kernels unite rows, and pieces are counted for both sides of edges and of probes."""
    monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", 8)
    conv, x = layer()
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, allocations, waits = kernels.launches, kernels.allocations, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert (kernels.started.count("_merge_kernel"), kernels.started.count("_count_pieces_kernel")) == (8, 4)
    assert kernels.launches - launches - (kernels.allocations - allocations) <= 126
    assert kernels.waits - waits <= 3


@ON_ONE_SIDE
# One launch copies the offsets, which may be edited between the passes.
@pytest.mark.parametrize(("is_causal", "most", "waits"), [(False, 203, 4), (True, 275, 6)])
def test_a_training_step_over_blocks_takes_few_launches(
    is_causal: bool, most: int, waits: int, kernels: Kernels
) -> None:
    conv, x = layer(is_causal=is_causal, block_size=2)
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, waited = kernels.launches, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert [name for name in kernels.started if name.startswith("_block")] == [
        "_block_attention_kernel", *["_block_gains_kernel"] * 2, "_block_effect_kernel", "_block_queries_kernel", "_block_keys_kernel",
    ]  # fmt: skip
    assert kernels.launches - launches <= most
    assert kernels.waits - waited <= waits


@QUIET
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "window": 2}, {"block_size": 4}, {"normalizer": "entmax15"},
     {"normalizer": "entmax", "target_density": 0.2}],
)  # fmt: skip
def test_layers_in_inference_mode(options: dict[str, Any], kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows that several programs share, of which something is kept, and tensors that do not tell their version."""
    monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", 4)
    torch.manual_seed(0)
    conv = make_attention("sbm", 8, 4, 2, num_clusters=4, **options).eval()
    x, ptr = torch.randn(22, 8), torch.tensor([0, 9, 22])
    with torch.no_grad():
        meant = conv(x, ptr=ptr, seed=1)
    with torch.inference_mode():
        torch.testing.assert_close(conv(x.clone(), ptr=ptr.clone(), seed=1), meant)


@COUNTED
@pytest.mark.parametrize(("option", "most", "waits"), [({"window": 0}, 205, 4), ({"window": 3}, 224, 5)])
def test_edges_that_are_always_there_take_few_launches(
    option: dict[str, Any], most: int, waits: int, kernels: Kernels
) -> None:
    conv, x = layer(**option)
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, waited = kernels.launches, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert kernels.launches - launches <= most
    assert kernels.waits - waited <= waits
