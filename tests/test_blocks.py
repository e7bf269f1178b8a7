"""Graphs over blocks of tokens, attention over them, and what a block does to the loss, against tokens."""

from __future__ import annotations

import itertools
from typing import Any

import networkx as nx
import pytest
import torch
from problems import copies, on_threads, pair_counts, refuses, same
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch_geometric.data import Data

from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    BlockGraph,
    BlockPool,
    Choice,
    EdgeProbability,
    GraphSource,
    SBMGraph,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    SourceGraph,
    Tokens,
    auxiliary_loss,
    gradients,
    make_attention,
    ops,
    sample_edges,
)
from sbm_pyg.analysis import graph_statistics, plots, to_networkx
from sbm_pyg.graphs.blocks import block_means, pool_blocks
from sbm_pyg.graphs.ragged import offsets
from sbm_pyg.layers.normalizers import normalize
from sbm_pyg.ops.reference import blocks as meaning
from sbm_pyg.ops.tiles import Cut
from sbm_pyg.sources import patterns

block_attention: Any = ops.block_attention  # called with `rows`
edge_attention: Any = ops.edge_attention
backward: Any = meaning.block_attention_backward
grad_of: Any = torch.autograd.grad


def make(
    lengths: list[int], block_size: int, *, keys: list[int] | None = None, heads: int = 2, density: float = 0.6,
    is_causal: bool = False, seed: int = 0,
) -> BlockGraph:  # fmt: skip
    """Random blocks over sequences of these lengths."""
    random = torch.Generator().manual_seed(seed)
    query_ptr, key_ptr = (offsets(torch.tensor(each)) for each in (lengths, keys or lengths))
    cut = [offsets((ptr.diff() + block_size - 1) // block_size) for ptr in (query_ptr, key_ptr)]
    mask = torch.rand(heads, int(cut[0][-1]), int(cut[1][-1]), generator=random) < density
    mine, theirs = (torch.repeat_interleave(ptr.diff()) for ptr in cut)
    head, query, key = (mask & (mine[:, None] == theirs)).nonzero(as_tuple=True)
    over = AttentionGraph.from_edge_index(
        torch.stack([key, query]), size=(mask.size(2), mask.size(1)), edge_head=head, heads=heads, query_ptr=cut[0],
        key_ptr=cut[1],
    )  # fmt: skip
    return BlockGraph(over.causal() if is_causal else over, block_size, query_ptr=query_ptr, key_ptr=key_ptr)


def brute(graph: BlockGraph) -> Tensor:
    """Which tokens meet, ``[H, N, M]``, pair by pair."""
    found = torch.zeros(graph.heads, graph.num_queries, graph.num_keys, dtype=torch.bool)
    edges = {
        (head, query, key)
        for head, query, key in zip(
            graph.blocks.edge_head.tolist(), graph.blocks.edge_index[1].tolist(), graph.blocks.col.tolist(), strict=True
        )
    }
    for b in range(graph.num_sequences):
        (i0, i1), (j0, j1) = graph.query_ptr[b : b + 2].tolist(), graph.key_ptr[b : b + 2].tolist()
        first = int(graph.blocks.query_ptr[b]), int(graph.blocks.key_ptr[b])
        for h, i, j in itertools.product(range(graph.heads), range(i1 - i0), range(j1 - j0)):
            pair = (h, first[0] + i // graph.block_size, first[1] + j // graph.block_size)
            found[h, i0 + i, j0 + j] = pair in edges and (not graph.is_causal or j <= i)
    return found


CASES: dict[str, dict[str, Any]] = {
    "whole": {"lengths": [8, 12], "block_size": 4}, "ragged": {"lengths": [7, 1, 13], "block_size": 4},
    "cross": {"lengths": [7, 5, 8], "keys": [3, 9, 7], "block_size": 3}, "one token": {"lengths": [5, 6], "block_size": 1},
    "short": {"lengths": [3, 2], "block_size": 8}, "past a vector": {"lengths": [40, 23], "block_size": 17}, "long": {"lengths": [87, 41], "block_size": 40},
    "causal, long": {"lengths": [87, 41], "block_size": 40, "is_causal": True, "density": 0.9},
    "causal": {"lengths": [8, 12], "block_size": 4, "is_causal": True},
    "causal, ragged": {"lengths": [7, 1, 13], "block_size": 4, "is_causal": True},
    "causal, cross": {"lengths": [7, 5, 8], "keys": [3, 9, 8], "block_size": 3, "is_causal": True},
    "empty rows": {"lengths": [9, 10], "block_size": 2, "density": 0.15},
    "no edges": {"lengths": [9, 10], "block_size": 2, "density": 0.0},
}  # fmt: skip


@pytest.fixture(params=CASES, ids=[*CASES])
def graph(request: pytest.FixtureRequest) -> BlockGraph:
    return make(**CASES[request.param])


def rows(graph: BlockGraph) -> Any:
    """Arguments of ops over blocks."""
    return graph.blocks.rows, (graph.query_ptr, graph.key_ptr), graph.block_size, graph.is_causal


def tokens(graph: BlockGraph, dtype: torch.dtype = torch.float64, width: int = 5, value: int = 5) -> Any:
    """Queries, keys and values."""
    random = torch.Generator().manual_seed(1)
    sizes = ((graph.num_queries, width), (graph.num_keys, width), (graph.num_keys, value))
    return [torch.randn(graph.heads, *size, generator=random, dtype=torch.float64).to(dtype) for size in sizes]


# ------------------------------------------------------------------ the record


def test_a_block_graph_is_the_graph_of_its_tokens(graph: BlockGraph) -> None:
    wanted, mask = brute(graph), torch.zeros(graph.heads * graph.num_queries, graph.num_keys, dtype=torch.bool)
    expanded = graph.expand_tokens()
    expanded.validate()
    assert type(expanded) is AttentionGraph
    mask[expanded.edge_row, expanded.col.long()] = True
    assert torch.equal(mask.view_as(wanted), wanted)
    assert graph.num_edges == int(wanted.sum())
    assert torch.equal(graph.degree, wanted.sum(-1))
    assert torch.equal(graph.density, expanded.density)
    assert graph == expanded
    assert expanded == graph
    assert hash(graph) == hash(expanded)


def test_parts_and_questions_mean_tokens(graph: BlockGraph) -> None:
    expanded = graph.expand_tokens()
    for b in range(graph.num_sequences):
        assert graph.sequence(b) == expanded.sequence(b)
        assert isinstance(graph.sequence(b), BlockGraph)
        assert torch.equal(graph.to_dense(b), expanded.to_dense(b))
    assert graph.head(1) == expanded.head(1)
    assert graph.causal() == expanded.causal()
    query, key = torch.meshgrid(torch.arange(graph.num_queries), torch.arange(graph.num_keys), indexing="ij")
    pairs = torch.stack([key.flatten(), query.flatten()])
    for head in range(graph.heads):
        assert torch.equal(graph.contains(pairs, torch.full_like(pairs[0], head)), brute(graph)[head].flatten())
    assert nx.utils.graphs_equal(graph.to_networkx(0, 0, bipartite=True), expanded.to_networkx(0, 0, bipartite=True))
    assert torch.equal(graph.to_edge_index(0), expanded.to_edge_index(0))
    assert AttentionGraph.concatenate([graph, graph]) == AttentionGraph.concatenate([expanded, expanded])
    assert graph.to("cpu") == graph


def test_attention_and_densities_make_no_edges_of_tokens(graph: BlockGraph) -> None:
    conv = AttentionConv(6, 4, heads=2)
    x = torch.randn(graph.num_keys, 6), torch.randn(graph.num_queries, 6)
    conv(x, graph).sum().backward()
    assert graph.density.shape == (graph.num_sequences, 2)
    assert repr(graph)
    assert "_rows" not in vars(graph)
    assert graph.col.numel() == graph.num_edges
    assert "_rows" in vars(graph)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_may_be_far_longer_than_its_sequence(is_causal: bool) -> None:
    ptr = torch.tensor([0, 7, 10])
    blocks = patterns.full(2, ptr=torch.tensor([0, 1, 2]), is_causal=is_causal)
    assert BlockGraph(blocks, 2**62, query_ptr=ptr) == patterns.full(10, ptr=ptr, is_causal=is_causal)


def test_unions_of_blocks_are_blocks_and_of_others_tokens() -> None:
    one, two = make([7, 9], 4, seed=1, density=0.3), make([7, 9], 4, seed=2, density=0.3)
    union, mask = one.union(two)
    assert isinstance(union, BlockGraph)
    assert mask.shape == union.blocks.col.shape
    wanted, _ = one.expand_tokens().union(two.expand_tokens())
    assert union == wanted
    window = patterns.window(None, 1, ptr=one.query_ptr)
    union, mask = one.union(window)
    assert not isinstance(union, BlockGraph)
    assert union == one.expand_tokens().union(window)[0]
    assert mask.shape == union.col.shape
    assert union == window | one


def test_a_union_with_a_graph_that_is_not_causal_adds_no_later_keys_of_its_own() -> None:
    one, two = make([7, 9], 4, is_causal=True), make([7, 9], 4, seed=2, density=0.3)
    wanted, mask = one.expand_tokens().union(two.expand_tokens())
    for first, second in ((one, two), (two, one)):
        union, other = first.union(second)
        assert union == wanted
        assert other.shape == mask.shape


def test_what_is_forced_is_over_blocks_of_the_same_size() -> None:
    graph, other = make([5, 8], 3), make([5, 8], 3, seed=1)
    choice = Choice(graph).force(other)
    assert choice.graph == graph | other
    assert choice.graph.blocks == graph.blocks | other.blocks
    causal = make([5, 8], 3, is_causal=True)
    window = patterns.window(None, 1, ptr=graph.query_ptr)
    for mine, pattern in ((graph, window), (causal, other), (make([5], 3), make([5], 4)), (make([5], 4), make([5], 3))):
        with pytest.raises(ValueError, match=r"Expected 'pattern' over blocks of [34] tokens"):
            Choice(mine).force(pattern)
    refuses(lambda: Choice(graph).force(graph.blocks), "over the same tokens")
    assert Choice(graph.expand_tokens()).force(causal).graph == graph.expand_tokens() | causal.expand_tokens()


@pytest.mark.parametrize("is_causal", [False, True])
def test_sinks_and_windows_are_widened_to_whole_blocks(is_causal: bool) -> None:
    source = SBMSource(SBMHead(4, 2, 3), block_size=4, window=None, num_sinks=5).double().eval()
    tokens = Tokens(torch.randn(2, 30, 4).double(), query_ptr=torch.tensor([0, 9, 30]), is_causal=is_causal)
    choice = source(tokens)
    assert isinstance(choice.graph, BlockGraph)
    for sequence, keys in enumerate((9, 21)):
        is_edge = choice.graph.to_dense(sequence)
        first = torch.ones(keys, min(keys, 8), dtype=torch.bool)
        assert torch.equal(is_edge[:, :, :8], (first.tril() if is_causal else first).expand_as(is_edge[:, :, :8]))


def test_numbers_of_tokens_become_tiles(graph: BlockGraph) -> None:
    number = torch.arange(1.0, graph.num_edges + 1)
    tiles = graph.edge_bias_to_blocks(number)
    assert tiles.shape == (graph.blocks.num_edges, graph.block_size, graph.block_size)
    assert int((tiles > 0).sum()) == graph.num_edges
    expanded = graph.expand_tokens()
    index, head = expanded.edge_index, expanded.edge_head
    key_cut, query_cut = graph.cuts[1], graph.cuts[0]
    slots = torch.stack([key_cut.slot[index[0]], query_cut.slot[index[1]]])
    edge = graph.blocks.find(slots // graph.block_size, head)
    assert torch.equal(tiles[edge, slots[1] % graph.block_size, slots[0] % graph.block_size], number)
    assert torch.equal(graph.spread(torch.arange(graph.blocks.num_edges)), edge)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # small, and compared alone
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_mask_is_the_graph(is_causal: bool) -> None:
    graph = make([16, 32], 8, is_causal=is_causal)
    mask = graph.to_block_mask()
    dense = mask.to_dense()[0].bool()  # over blocks
    own = torch.zeros_like(dense)
    own.view(-1, dense.size(2))[graph.blocks.edge_row, graph.blocks.col.long()] = True
    assert torch.equal(dense, own)
    query, key, value = (x[None] for x in tokens(graph, torch.float32, 16, 16))
    out = torch.nn.attention.flex_attention.flex_attention(query, key, value, block_mask=mask)
    ours, _ = block_attention(query[0], key[0], value[0], *rows(graph), scale=16**-0.5)
    rest = graph.degree > 0
    torch.testing.assert_close(out[0][rest], ours[rest], atol=1e-5, rtol=1e-5)
    refuses(lambda: make([9], 8).to_block_mask(), "multiple of 8 tokens")


def test_bad_blocks_are_refused_by_name() -> None:
    blocks = AttentionGraph.from_dense(torch.eye(3))
    refuses(lambda: BlockGraph(blocks, 0), "'block_size' to be at least 1")
    with pytest.raises(TypeError, match="'blocks' to be an AttentionGraph"):
        BlockGraph(torch.eye(3), 4)  # type: ignore[arg-type]
    refuses(lambda: BlockGraph(BlockGraph(blocks, 4), 4), "Pass its `.blocks`", TypeError)
    with pytest.raises(ValueError, match="graph of tokens to leave edges out of"):
        Choice(BlockGraph(blocks, 4)).select(torch.ones(48, dtype=torch.bool))


# ------------------------------------------------------------------ the ops

PATHS: dict[str, Any] = {"cpu": ops.schemas, "plain torch": meaning}


def over_tokens(graph: BlockGraph, parts: Any, bias: Tensor | None, scale: float, *dropout: Any) -> Any:
    """The same attention, edge by edge; ``dropout`` is a share and a seed."""
    return edge_attention(*parts, graph.rows._replace(bias=bias), None, scale, "score", *dropout)


@pytest.mark.parametrize("path", [*PATHS])
@pytest.mark.parametrize(("biased", "value"), [(False, 5), (True, 3)])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_block_attention_is_attention_over_the_tokens(
    graph: BlockGraph, path: str, biased: bool, value: int, dropout: float
) -> None:
    """And dropout drops the same pairs."""
    parts = [x.requires_grad_() for x in tokens(graph, value=value)]
    bias = torch.randn(graph.num_edges, dtype=torch.float64).requires_grad_() if biased else None
    tiles = None if bias is None else graph.edge_bias_to_blocks(bias)
    (rowptr, col, _), ptrs, block_size, is_causal = rows(graph)
    given: Any = [*parts, *([] if bias is None else [bias])]
    wanted, lse = over_tokens(graph, parts, bias, 0.7, dropout, 5)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    grads = grad_of(wanted, given, weight)
    arguments = (*parts, rowptr, col, *ptrs, block_size, is_causal, tiles, 0.7, dropout, 5)
    out, total = PATHS[path].block_attention(*arguments)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(total, lse, atol=1e-10, rtol=1e-10)
    if path == "cpu":
        found = grad_of(out, given, weight)
    else:
        detached = [x if x is None else x.detach() for x in (*parts, rowptr, col, *ptrs, tiles, out, total)]
        *found, tile = backward(weight, *detached, block_size, is_causal, 0.7, dropout, 5, biased)
        found += [] if tiles is None else [*grad_of(tiles, [bias], tile.view_as(tiles))]
    torch.testing.assert_close(found, grads, atol=1e-10, rtol=1e-10)


def test_threads_that_share_a_head_add_up_its_gradients() -> None:
    graph = make([600], 8, keys=[150], density=0.9)
    parts = [x.requires_grad_() for x in tokens(graph)]
    found = []
    for threads in (1, 3):
        with on_threads(threads):
            out, _ = block_attention(*parts, *rows(graph), scale=0.5)
            found.append((out, *grad_of(out.square().sum(), parts)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("path", [*PATHS])
def test_dropout_of_more_heads_than_channels(path: str) -> None:
    test_block_attention_is_attention_over_the_tokens(make([5, 6], 2, heads=7), path, False, 5, 0.4)


def test_by_default_all_pairs_of_a_block_attend_with_their_products() -> None:
    graph = make([7, 1, 13], 4)
    parts, (edges, ptrs, block_size, is_causal) = tokens(graph), rows(graph)
    assert not is_causal
    torch.testing.assert_close(
        block_attention(*parts, edges, ptrs, block_size)[0], over_tokens(graph, parts, None, 1.0)[0]
    )


@pytest.mark.parametrize("path", [*PATHS])
def test_a_bias_may_leave_a_query_without_a_key(path: str) -> None:
    graph = make([7, 1, 13], 4)
    query, key, value = tokens(graph)
    bias = torch.zeros(graph.num_edges, dtype=torch.float64)
    alone = graph.edge_row % 3 == 0
    bias[alone] = -torch.inf
    (rowptr, col, _), ptrs, block_size, is_causal = rows(graph)
    layout, options = (*ptrs, graph.edge_bias_to_blocks(bias)), (block_size, is_causal, 0.7, 0.0, 0, True)
    out, total = PATHS[path].block_attention(
        query, key, value, rowptr, col, *ptrs, block_size, is_causal, layout[2], 0.7
    )
    empty = torch.arange(out.size(0) * out.size(1)) % 3 == 0
    assert not out.flatten(0, 1)[empty].any()
    assert bool((total.flatten()[empty] == -torch.inf).all())
    found = PATHS[path].block_attention_backward(
        torch.ones_like(out), query, key, value, rowptr, col, *layout, out, total, *options
    )
    assert all(x.isfinite().all() for x in found)
    assert not found[0].flatten(0, 1)[empty].any()


@pytest.mark.parametrize("path", [*PATHS])
@pytest.mark.parametrize("biased", [False, True])
def test_block_effects_are_those_of_having_a_block_and_not(graph: BlockGraph, path: str, biased: bool) -> None:
    query, key, value = tokens(graph)
    grad = torch.randn(graph.heads, graph.num_queries, value.size(2), dtype=torch.float64)
    every = graph.with_blocks(gradients.draw_probes(graph.blocks, float("inf"), seed=0)[0])
    everywhere = torch.randn(every.num_edges, dtype=torch.float64) * biased
    at = every.find(graph.edge_index, graph.edge_head)

    def tiles(of: BlockGraph, bias: Tensor) -> Tensor | None:
        return of.edge_bias_to_blocks(bias) if biased else None

    def loss(of: BlockGraph) -> Tensor:
        bias = everywhere[every.find(of.edge_index, of.edge_head)]
        return (over_tokens(of, [query, key, value], bias, 0.7)[0] * grad).sum()

    edges = (graph.blocks.rowptr, graph.blocks.col, tiles(graph, everywhere[at]))
    probes = (every.blocks.rowptr, every.blocks.col, tiles(every, everywhere))
    _, ptrs, block_size, is_causal = rows(graph)
    effect, probe_effect = PATHS[path].block_effect(
        grad, query, key, value, *edges, *probes, *ptrs, block_size, is_causal, 0.7
    )
    for number in range(graph.blocks.num_edges):
        kept = torch.arange(graph.blocks.num_edges) != number
        without = graph.with_blocks(graph.blocks.select(kept))
        torch.testing.assert_close(effect[number], loss(graph) - loss(without), atol=1e-10, rtol=1e-10)
    there = graph.blocks.contains(every.blocks.edge_index, every.blocks.edge_head)
    assert not probe_effect[there].any()
    for number in (~there).nonzero()[:, 0].tolist():
        added = every.blocks.select(torch.arange(every.blocks.num_edges) == number)
        having = graph.with_blocks(graph.blocks.union(added)[0])
        torch.testing.assert_close(probe_effect[number], loss(having) - loss(graph), atol=1e-10, rtol=1e-10)


def test_weights_of_blocks_are_sums_of_those_of_tokens(graph: BlockGraph) -> None:
    query, key, _ = tokens(graph)
    (rowptr, col, _), ptrs, block_size, is_causal = rows(graph)
    found = ops.schemas.block_weight(query, key, rowptr, col, None, *ptrs, block_size, is_causal, 0.7)
    logit = ops.edge_dot(query, key, graph.rows) * 0.7
    weight = normalize("softmax", logit, ptr=graph.rowptr)
    edge = graph.spread(torch.arange(graph.blocks.num_edges))
    wanted = torch.zeros(graph.blocks.num_edges, dtype=torch.float64).index_add(0, edge, weight)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_low_precision_is_no_worse_than_that_of_torch(dtype: torch.dtype, width: int) -> None:
    graph = make([70, 33], 16, density=0.4)
    exact = [x.requires_grad_() for x in tokens(graph, torch.float64, width, width)]
    wanted, _ = over_tokens(graph, exact, None, width**-0.5)
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    grads = [wanted, *grad_of(wanted, exact, weight)]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    mask = torch.zeros(graph.heads, graph.num_queries, graph.num_keys, dtype=torch.bool)
    mask.view(-1, graph.num_keys)[graph.edge_row, graph.col.long()] = True
    found = []
    for of in ("blocks", "fused", "by hand"):
        if of == "blocks":
            out, _ = block_attention(*low, *rows(graph), scale=width**-0.5)
        elif of == "fused":
            query, key, value = (x[None] for x in low)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=width**-0.5)[0]
        else:
            score = (low[0] @ low[1].mT * width**-0.5).masked_fill(~mask, -torch.inf)
            out = score.softmax(-1).nan_to_num(0) @ low[2]
        both = [out, *grad_of(out, low, weight.to(dtype))]
        found.append([float((x - y).detach().abs().max()) for x, y in zip(both, grads, strict=True)])
    # gains are subtracted from each other, and are equal where a query has one key
    gain = float((weight @ exact[2].detach().mT).abs().max())
    for ours, fused, by_hand in zip(*found, strict=True):
        assert ours <= 2 * max(fused, by_hand) + torch.finfo(torch.float32).eps * gain


def test_a_short_block_and_a_token_that_nobody_sees_bring_nothing() -> None:
    graph = make([7, 9], 4, density=1.0)
    kept = graph.blocks.col != 1  # tokens 4, 5, 6
    graph = graph.with_blocks(graph.blocks.select(kept))
    query, key, value = tokens(graph, torch.float32)
    out, _ = block_attention(query, key, value, *rows(graph))
    key[:, 4:7], value[:, 4:7] = torch.nan, torch.inf
    again, _ = block_attention(query, key, value, *rows(graph))
    assert torch.equal(out, again)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 looks at it
def test_ops_over_blocks_pass_opcheck_and_gradcheck() -> None:
    graph = make([5, 4], 2, is_causal=True, density=0.7)
    query, key, value = (x.requires_grad_() for x in tokens(graph, width=3, value=3))
    bias = torch.randn(graph.blocks.num_edges, 2, 2, dtype=torch.float64).requires_grad_()
    (rowptr, col, _), ptrs, block_size, is_causal = rows(graph)
    torch.library.opcheck(
        torch.ops.sbm_pyg.block_attention.default,
        (query, key, value, rowptr, col, *ptrs, block_size, is_causal, bias, 0.5),
    )

    def attend(*parts: Any) -> Any:
        return block_attention(*parts[:3], ops.Rows(rowptr, col, parts[3]), ptrs, block_size, is_causal, 0.5)[0]

    assert torch.autograd.gradcheck(attend, (query, key, value, bias))
    grad, probes = torch.randn_like(query), (rowptr.clone(), col.clone(), None)
    detached = [x.detach() for x in (query, key, value)]
    torch.library.opcheck(
        torch.ops.sbm_pyg.block_effect.default,
        (grad.detach(), *detached, rowptr, col, None, *probes, *ptrs, block_size, is_causal, 0.5),
    )
    torch.library.opcheck(
        torch.ops.sbm_pyg.block_weight.default, (*detached[:2], rowptr, col, None, *ptrs, block_size, is_causal, 0.5)
    )


def test_bad_arguments_of_block_ops_are_refused_by_name() -> None:
    graph = make([5, 4], 2)
    query, key, value = tokens(graph)
    (rowptr, col, _), ptrs, block_size, _ = rows(graph)
    with pytest.raises(ValueError, match=r"'rowptr' to be .*one row per head and query block"):
        block_attention(query, key, value, ops.Rows(rowptr[:-1], col), ptrs, block_size)
    refuses(lambda: block_attention(query, key, value, ops.Rows(rowptr, col), ptrs, 0), "'block_size'")
    with pytest.raises(ValueError, match=r"'ptrs\[1\]' to run from 0 to 9, the number of tokens"):
        block_attention(query, key, value, ops.Rows(rowptr, col), (ptrs[0], ptrs[1].clamp(max=8)), block_size)
    with pytest.raises(ValueError, match="'bias' to be"):
        block_attention(query, key, value, ops.Rows(rowptr, col, query.new_zeros(col.numel())), ptrs, block_size)
    with pytest.raises(TypeError, match="'ptrs' to be a tuple of offsets"):
        block_attention(query, key, value, ops.Rows(rowptr, col), ptrs[0], block_size)


# ------------------------------------------------------------------ the estimator and the layer


class FreeBlocks(EdgeProbability):
    """A free probability for each pair of blocks, ``[H, n, m]``."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def on(self, graph: AttentionGraph) -> Tensor:
        return self.p.flatten(0, 1)[graph.edge_row, graph.col.long()]

    def expected_density(self) -> Tensor:
        return self.p.mean((1, 2))[None]


@pytest.mark.parametrize(
    ("length", "is_causal"),
    [(7, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, False), (7, False), (9, True)))],
)
def test_the_local_gradient_of_blocks_is_unbiased_by_enumeration(length: int, is_causal: bool) -> None:
    ptr = torch.tensor([0, length])
    every = make([length], 3, heads=1, density=1.0, is_causal=is_causal)
    pairs = every.blocks
    free = torch.rand(1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.8 + 0.1
    free.requires_grad_()
    probability = FreeBlocks(free)
    p = probability.on(pairs)
    query, key, value = tokens(every)
    weight = torch.randn(1, length, value.size(2), dtype=torch.float64)
    expected, found = torch.zeros((), dtype=torch.float64), torch.zeros_like(free)
    chance = torch.tensor([0.3, 1.0, 0.5], dtype=torch.float64)
    for kept in itertools.product((False, True), repeat=pairs.num_edges):
        mask = torch.tensor(kept)
        graph = every.with_blocks(pairs.select(mask))
        law = torch.where(mask, p, 1 - p).prod()
        out, _ = block_attention(query, key, value, *rows(graph), scale=0.7)
        expected = expected + law * (out * weight).sum()
        # probes are pairs drawn with their chance: each alone has its effect, so their mean is exact
        local = gradients.attach_local_expectation(out, query, key, value, probability, graph, every, chance, scale=0.7)
        edge_part, probe_part = _split(local, weight, probability, pairs, mask, chance)
        found = found + law.detach() * (edge_part + probe_part)
    (wanted,) = grad_of(expected, free)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    assert ptr[-1] == length


def _split(
    local: Tensor, weight: Tensor, probability: FreeBlocks, pairs: AttentionGraph, mask: Tensor, chance: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient over edges, and what probes give in the mean over which of them are drawn."""
    (grad,) = grad_of((local * weight).sum(), probability.p)
    at = (pairs.edge_head, pairs.edge_index[1], pairs.edge_index[0])
    on_edges, on_probes = torch.zeros_like(grad), torch.zeros_like(grad)
    on_edges[tuple(x[mask] for x in at)] = grad[tuple(x[mask] for x in at)]
    drawn = chance[at[1]]
    on_probes[tuple(x[~mask] for x in at)] = (grad[at] * drawn)[~mask]
    return on_edges, on_probes


def pair_of_layers(is_causal: bool, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """A layer with blocks in float64, and two ragged sequences."""
    torch.manual_seed(0)
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, is_causal=is_causal, **options).double()
    return conv, torch.randn(21, 6, dtype=torch.float64), torch.tensor([0, 8, 21])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("estimator", ["local", "distill", "mask", "paper", "imitate", "none"])
def test_blocks_of_one_token_are_the_layer_over_tokens(is_causal: bool, estimator: str) -> None:
    conv, x, ptr = pair_of_layers(is_causal, estimator=estimator, probes=3)
    found = []
    for grain_one in (False, True):
        conv.zero_grad()
        source = conv.source

        class One(GraphSource):
            def forward(self, tokens: Tokens) -> Choice:
                choice = source(tokens)  # noqa: B023
                if grain_one:  # noqa: B023
                    graph = choice.graph
                    blocks = BlockGraph(graph, 1, query_ptr=graph.query_ptr, key_ptr=graph.key_ptr)
                    choice = Choice(blocks, choice.probability, choice.forced, choice.exploration)
                return choice

        conv.source = One()
        conv.source.inner = source
        out, graph = conv(x, ptr=ptr, seed=3, return_graph=True)
        assert isinstance(graph, BlockGraph) is grain_one
        (out.sin().sum() + auxiliary_loss(conv)).backward()
        found.append([out, *(p.grad.clone() for p in conv.parameters() if p.grad is not None)])
        conv.source = source
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pool", ["mean", "learned"])
@pytest.mark.parametrize("options", [{}, {"target_density": 0.4}, {"budget": 6.0}, {"window": 5}, {"exploration": 0.3}])
def test_no_row_of_a_causal_layer_depends_on_a_later_token(pool: str, options: dict[str, Any]) -> None:
    conv, x, ptr = pair_of_layers(True, block_size=4, pool=pool, probes=4, **options)
    if pool == "learned":
        torch.nn.init.normal_(conv.source.pool.weight, generator=torch.Generator().manual_seed(1))
    out, choice = conv(x, ptr=ptr, seed=5, return_choice=True)
    probes, _ = gradients.draw_probes(choice.graph, 4, seed=5)
    for t in (9, 13, 14, 20):
        other = x.clone()
        other[t:] = torch.randn(21 - t, 6, dtype=torch.float64)
        conv2, _, _ = pair_of_layers(True, block_size=4, pool=pool, probes=4, **options)
        conv2.load_state_dict(conv.state_dict())
        if "target_density" in options:  # the running mean has seen a batch; both layers begin without one
            for buffer in conv2.source.buffers(recurse=False):
                buffer.zero_()
        again, chosen = conv2(other, ptr=ptr, seed=5, return_choice=True)
        assert torch.equal(again[:t], out[:t])
        for graph, changed in (
            (choice.graph, chosen.graph),
            (probes, gradients.draw_probes(chosen.graph, 4, seed=5)[0]),
        ):
            early = [each.expand_tokens().degree[:, :t] for each in (graph, changed)]
            assert torch.equal(*early)
            assert torch.equal(graph.to_dense(1)[:, : t - 8], changed.to_dense(1)[:, : t - 8])
        before = choice.probability.on(choice.graph.blocks), chosen.probability.on(choice.graph.blocks)
        rows_before = choice.graph.blocks.edge_index[1] < 2 + (t - 8) // 4
        torch.testing.assert_close(*(p[rows_before] for p in before), atol=0, rtol=0)


def test_every_block_of_a_causal_layer_attends_to_itself() -> None:
    conv, x, ptr = pair_of_layers(True, block_size=4, initial_density=0.01)
    _, choice = conv(x, ptr=ptr, seed=0, return_choice=True)
    own = choice.graph.blocks.edge_index[0] == choice.graph.blocks.edge_index[1]
    assert int(own.sum()) == 2 * (2 + 4)
    assert choice.forced is not None
    assert choice.forced[own].all()
    assert not choice.probability.on(choice.graph.blocks)[own].any()
    assert (choice.graph.degree > 0).all()


def test_windows_and_budgets_count_tokens() -> None:
    conv, x, ptr = pair_of_layers(False, block_size=4, window=5, initial_density=1e-6)
    graph = conv(x, ptr=ptr, seed=0, return_graph=True)[1]
    window = patterns.window(None, 5, ptr=ptr).expand(2)
    assert graph | window == graph  # every token of the window, widened to whole blocks
    assert graph.blocks.degree[0].tolist() == [2, 2, 3, 4, 4, 3]
    conv, x, ptr = pair_of_layers(False, block_size=4, budget=4.0, initial_density=0.9)
    choice = conv(x, ptr=ptr, seed=0, return_choice=True)[1]
    assert float(choice.probability.expected_degree().detach().max()) <= 1 + 1e-9  # one block


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_a_strict_model_draws_earlier_keys_with_their_probabilities(method: str, density: float) -> None:
    random = torch.Generator().manual_seed(0)
    rate = torch.rand(1, 12, 2, generator=random) * density
    key = torch.rand(1, 12, 2, generator=random)
    ptr = torch.tensor([0, 5, 12])
    sbm = SBM(rate, key, torch.eye(2)[None], ptr, is_causal=True).strict()
    p = torch.block_diag(*(sbm.edge_prob_dense(b)[0] for b in range(2)))
    assert torch.equal(p, p.tril(-1))
    number = 4000
    counts = pair_counts(sample_edges(copies(sbm, number), method=method, exploration=0.05, seed=0), 12, 12)[0]
    allowed = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril(-1)
    law = (p + 0.05) * allowed if method == "bernoulli" else -torch.expm1(-(p + 0.05)) * allowed
    assert not counts[allowed == 0].any()
    deviation = ((counts / number - law).abs() / (law * (1 - law) / number).sqrt())[allowed > 0]
    assert float(deviation.max()) < 5.5
    degree = p.sum(1)
    torch.testing.assert_close(sbm.expected_degree()[0], degree)
    torch.testing.assert_close(
        sbm.expected_density()[:, 0], torch.stack([degree[:5].sum() / 10, degree[5:].sum() / 21])
    )


def test_estimators_that_gate_and_normalizers_attend_over_the_tokens() -> None:
    for options in ({"estimator": "mask"}, {"estimator": "relaxed"}, {"normalizer": "entmax15"}, {"dropout": 0.3}):
        conv, x, ptr = pair_of_layers(False, block_size=4, **options)
        out, choice = conv(x, ptr=ptr, seed=1, return_choice=True)
        out.square().sum().backward()
        assert isinstance(choice.graph, BlockGraph)
        assert conv.source.head.clusters.grad.abs().sum() > 0
        given = AttentionConv(6, 4, heads=2, **options).double()
        given.load_state_dict({k: v for k, v in conv.state_dict().items() if "source" not in k})
        if options.get("estimator") != "relaxed":
            torch.testing.assert_close(given(x, choice.graph.expand_tokens(), seed=1), out, atol=1e-12, rtol=1e-12)


def test_a_pool_is_the_mean_of_the_tokens_that_may_be_seen() -> None:
    x, cut = torch.arange(9.0)[None, :, None], Cut(torch.tensor([0, 6, 9]), 9, 4)
    assert pool_blocks(x, cut).flatten().tolist() == [1.5, 4.5, 7.0]
    assert pool_blocks(x, cut, before=True).flatten().tolist() == [0.0, 2.5, 6.0]
    for before in (False, True):
        torch.testing.assert_close(pool_blocks(x, cut, BlockPool(1), before=before), pool_blocks(x, cut, before=before))
    means, ptr, block = block_means(x, cut.tokens, 4)
    torch.testing.assert_close(means, pool_blocks(x, cut))
    assert (ptr.tolist(), block.tolist()) == ([0, 2, 3], [0, 0, 0, 0, 1, 1, 2, 2, 2])


def test_what_blocks_cannot_do_is_refused() -> None:
    refuses(lambda: make_attention("sbm", 6, 4, block_size=0), "'block_size' to be at least 1")
    source = SBMSource(SBMHead(4, num_clusters=3, tied=True), block_size=4)
    refuses(lambda: source(Tokens(torch.randn(1, 8, 4), is_causal=True)), "a head that is not tied")
    with pytest.raises(ValueError, match="'pool' to be 'mean', 'learned' or a module"):
        SBMSource(SBMHead(4), block_size=4, pool=3)  # type: ignore[arg-type]


def test_an_encoder_takes_blocks() -> None:
    encoder = SequenceEncoder(16, 8, max_length=32, attention_options={"block_size": 4, "num_clusters": 4})
    x, ptr = torch.randint(0, 16, (40,)), torch.tensor([0, 13, 40])
    out, trace = encoder(x, ptr=ptr, seed=0, return_trace=True)
    out.sum().backward()
    assert all(isinstance(choice.graph, BlockGraph) for choice in trace.choices)
    assert trace.density.shape == (2, 2, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms_write_edges_of_blocks(is_causal: bool) -> None:
    torch.manual_seed(0)
    data = Data(x=torch.randn(11, 8))
    source = SBMSource(SBMHead(4, 2, 3, initial_density=0.5), block_size=4).eval()
    graph = AttentionGraph.from_data(SourceGraph(source, heads=2, is_causal=is_causal, seed=0)(data))
    blocks = graph.to_dense().view(2, 11, 11)
    for i, j in itertools.product(range(3), range(3)):
        tile = blocks[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        whole = torch.ones_like(tile).tril() if is_causal and i == j else torch.ones_like(tile)
        for each, full in zip(tile, whole, strict=True):
            assert torch.equal(each, full) or (not each.any() and not (is_causal and i == j))
    assert 0 < graph.num_edges < 2 * 11 * 11
    members = Data(query_membership=torch.ones(8, 1), key_membership=torch.ones(8, 1), block_matrix=torch.ones(1, 1))
    assert SBMGraph(block_size=4, is_causal=is_causal, seed=0)(members).num_edges == (36 if is_causal else 64)


@pytest.mark.slow
def test_a_layer_over_blocks_compiles_without_a_break() -> None:
    graph = make([16, 33], 8, is_causal=True)
    conv = AttentionConv(6, 4, heads=2).double()
    x = torch.randn(49, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: conv(x, graph), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), conv(x, graph), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grad_of(compiled(x).sin().sum(), x)[0], grad_of(conv(x, graph).sin().sum(), x)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast_leaves_precisions_as_they_are(dropout: float) -> None:
    """Or products of tokens, and what is summed of them, would have two."""
    graph = make([7, 1, 13], 4, is_causal=True)
    (rowptr, col, _), ptrs, block_size, is_causal = rows(graph)
    parts = torch.randn(3, 2, 21, 8, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    bias = torch.randn(col.numel(), block_size, block_size, requires_grad=True)

    def attend() -> Tensor:
        return block_attention(*parts, ops.Rows(rowptr, col, bias), ptrs, block_size, is_causal, 0.5, dropout, 3)[0]

    wanted = attend()
    grads = grad_of(wanted.square().sum(), (*parts, bias))
    with torch.autocast("cpu", torch.bfloat16):
        found = attend()
        assert torch.equal(found, wanted)
        assert same(grad_of(found.square().sum(), (*parts, bias)), grads)


# ------------------------------------------------------------------ looked at with the model they were drawn from


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_model_over_blocks_says_what_tokens_may_expect(is_causal: bool) -> None:
    """Plots, statistics and networkx take it as if each token had the memberships of its block."""
    random, ptr = torch.Generator().manual_seed(0), torch.tensor([0, 3, 5])
    y, z = torch.rand(2, 2, 5, 4, generator=random) / 2
    over = SBM(y, z, torch.rand(2, 4, 4, generator=random) / 1.2, ptr, ptr, is_causal=is_causal)
    graph = BlockGraph(sample_edges(over, seed=0), 4, query_ptr=torch.tensor([0, 10, 17]))
    block = torch.tensor([0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 3)
    offsets = graph.query_ptr
    tokens = SBM(y[:, block], z[:, block], over.block_matrix, offsets, offsets, is_causal=is_causal)
    expanded = graph.expand_tokens()
    for draw in (plots.plot_mask, plots.plot_communities):
        found, wanted = (draw(*each, sequence=1, head=1) for each in ((graph, over), (expanded, tokens)))
        for mine, theirs in zip(found.axes, wanted.axes, strict=True):
            assert mine.get_title() == theirs.get_title()
            assert_close(
                [torch.tensor(image.get_array()) for image in mine.images],
                [torch.tensor(peer.get_array()) for peer in theirs.images],
            )
    modularity = graph_statistics(graph, communities=over, spectral_gap=False).modularity
    assert torch.equal(modularity, graph_statistics(expanded, communities=tokens, spectral_gap=False).modularity)
    for head in (0, "all"):
        found, wanted = (to_networkx(each, 0, head, sbm=sbm) for each, sbm in ((graph, over), (expanded, tokens)))
        assert dict(found.nodes(data=True)) == dict(wanted.nodes(data=True))
        assert {edge[:-1] for edge in found.edges(data=True)} == {edge[:-1] for edge in wanted.edges(data=True)}
        for *ends, data in found.edges(data=True, **({"keys": True} if head == "all" else {})):
            assert data["probability"] == pytest.approx(wanted.edges[tuple(ends)]["probability"], rel=1e-6)
