"""Edge kernels for CUDA devices, in Triton: scores of edges, attention over edges, and their gradients.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on one device. Not here: checks of what comes in, and
parts that kernels share (:mod:`.rows`).

A program takes one row: it gathers the keys and values of its edges a tile at a time, keeps a running maximum, and
writes what belongs to the row. The backward pass does so once more and leaves two numbers with each edge, by which a
second kernel sums over the edges of each key, in the order that :func:`.segments.by_key` keeps. So every number has
one writer, nothing is added atomically, and the same call gives the same bits.

Rows, or keys, of very many edges are shared by several programs, whose parts one more kernel merges. Vectors of more
than 512 channels, or of none, take the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import segments as reference_segments
from ..reference import edges as reference_edges
from .rows import (
    SplitRows,
    accumulate_dtype,
    aligned_size,
    cast_like,
    dot_rows,
    dropout_arguments,
    finite,
    float_bits,
    from_bits,
    gated_logits,
    gather,
    keeps_edges,
    launch,
    load_edges,
    load_vector,
    store_row,
    supports,
    tile_options,
    triton_kernel,
    weighted_sum,
    work_item,
)


@triton_kernel
def _edge_dot_kernel(
    query, key, rowptr, piece_ends, col, out, rows: tl.int64, queries: tl.int64, keys: tl.int64, WIDTH: tl.constexpr,
    MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop, _ = work_item(rowptr, piece_ends, rows, queries, keys, MAX_EDGES)
    q = load_vector(query, row, WIDTH, ACC_TYPE)
    # Gather the keys of a tile of edges, and write their products with the query.
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(col, begin, stop, first, EDGES)
        score = dot_rows(gather(key, end, exists, WIDTH, ACC_TYPE), q)
        tl.store(out + edge, cast_like(score, out), mask=exists)


@triton_kernel
def _gather_kernel(
    weight, source, ptr, piece_ends, ends, order, out, parts, rows: tl.int64, queries: tl.int64, keys: tl.int64,
    WIDTH: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Sum of the vectors at the ends of each segment's edges, by their weights."""
    _, first, start, stop, slot = work_item(ptr, piece_ends, rows, queries, keys, MAX_EDGES)
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], ACC_TYPE)
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(ends, begin, stop, first, EDGES)
        # By key, the numbers of the edges come from the table ``order``.
        if order is not None:
            edge = tl.load(order + edge, mask=exists, other=0)
        factor = tl.load(weight + edge, mask=exists, other=0).to(ACC_TYPE)
        sums += weighted_sum(factor, gather(source, end, exists, WIDTH, ACC_TYPE))
    store_row(out, parts, slot, sums, WIDTH)


@triton_kernel
def _edge_attention_kernel(
    query, key, value, rowptr, piece_ends, col, gate, bias, query_words, key_words, out, lse, parts, tops, norms,
    rows: tl.int64, queries: tl.int64, keys: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, MAX_EDGES: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop, slot = work_item(rowptr, piece_ends, rows, queries, keys, MAX_EDGES)
    # Load the query, and start the running maximum and the sums.
    q = load_vector(query, row, WIDTH, ACC_TYPE) * from_bits(scale, ACC_TYPE)
    top, norm = tl.full([], float("-inf"), ACC_TYPE), tl.full([], 0, ACC_TYPE)
    sums = tl.zeros([triton.next_power_of_2(VALUE_WIDTH)], ACC_TYPE)
    if query_words is not None:
        word = tl.load(query_words + row)
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(col, begin, stop, first, EDGES)
        # Compute the logits of a tile of edges.
        score = dot_rows(gather(key, end, exists, WIDTH, ACC_TYPE), q)
        logit, factor = gated_logits(score, gate, bias, edge, exists, WEIGHTED, ACC_TYPE)
        # A larger maximum shrinks what has been summed so far.
        new = tl.maximum(top, tl.max(logit, 0))
        weight, shrink = tl.exp(logit - finite(new)), tl.exp(top - finite(new))
        if WEIGHTED:
            weight *= factor
        norm, top = norm * shrink + tl.sum(weight, 0), new
        # Drop edges after their weights are summed, and add the weighted values.
        if query_words is not None:
            weight = tl.where(keeps_edges(word, key_words, end, exists, least), weight, 0)
        sums = sums * shrink + weighted_sum(weight, gather(value, end, exists, VALUE_WIDTH, ACC_TYPE))
    if query_words is not None:
        sums *= from_bits(grow, ACC_TYPE)
    # Write the log-sum; a piece of a long row leaves its maximum and its sum of weights instead.
    if parts is None:
        tl.store(lse + row, top + tl.log(norm))
    else:
        tl.store(lse + row, top + tl.log(norm), mask=slot < 0)
        tl.store(tops + slot, top, mask=slot >= 0)
        tl.store(norms + slot, norm, mask=slot >= 0)
        norm = tl.where(slot < 0, norm, 1)  # which the whole row divides by
    # Divide by the sum of the weights; a row without edges stays zero.
    store_row(out, parts, slot, sums / tl.where(norm == 0, 1, norm), VALUE_WIDTH)


@triton_kernel
def _edge_attention_backward_kernel(
    grad_out, query, key, value, rowptr, piece_ends, col, gate, bias, query_words, key_words, out, lse, grad_query,
    parts, slopes, shares, grad_gate, grad_bias, rows: tl.int64, queries: tl.int64, keys: tl.int64, least: tl.int64,
    grow: tl.int64, scale: tl.int64, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a query, and of gates and biases of its edges; and terms for keys and values."""
    row, first, start, stop, slot = work_item(rowptr, piece_ends, rows, queries, keys, MAX_EDGES)
    q, g = (
        load_vector(query, row, WIDTH, ACC_TYPE) * from_bits(scale, ACC_TYPE),
        load_vector(grad_out, row, VALUE_WIDTH, ACC_TYPE),
    )
    # The mean gain of the row is the dot product of its output with the output's gradient.
    mean, shift = tl.sum(g * load_vector(out, row, VALUE_WIDTH, ACC_TYPE), 0), finite(tl.load(lse + row).to(ACC_TYPE))
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], ACC_TYPE)
    if query_words is not None:
        word = tl.load(query_words + row)
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(col, begin, stop, first, EDGES)
        # Compute scores and gains of a tile of edges, and recompute the weights from the log-sum.
        k = gather(key, end, exists, WIDTH, ACC_TYPE)
        score = dot_rows(k, q)
        gain = dot_rows(gather(value, end, exists, VALUE_WIDTH, ACC_TYPE), g)
        logit, factor = gated_logits(score, gate, bias, edge, exists, WEIGHTED, ACC_TYPE)
        weight = tl.exp(logit - shift)
        # Dropout cuts the gain, and the weight that multiplies the gradient of the output.
        share = weight
        if query_words is not None:
            keep = keeps_edges(word, key_words, end, exists, least)
            gain = tl.where(keep, gain * from_bits(grow, ACC_TYPE), 0)
            share = tl.where(keep, weight * from_bits(grow, ACC_TYPE), 0)
        # Compute the gradient of each logit, of which gate and bias get theirs.
        slope = weight * (gain - mean)
        if grad_gate is not None:
            change = slope if WEIGHTED else slope * score
            tl.store(grad_gate + edge, cast_like(change, grad_gate), mask=exists)
        if WEIGHTED:
            share, slope = share * factor, slope * factor
        if grad_bias is not None:
            tl.store(grad_bias + edge, cast_like(slope, grad_bias), mask=exists)
        if not WEIGHTED:
            slope *= factor
        # Leave two numbers with each edge, for the sums over the edges of each key.
        slope *= from_bits(scale, ACC_TYPE)
        tl.store(slopes + edge, slope, mask=exists)
        tl.store(shares + edge, share, mask=exists)
        # Add to the gradient of the query.
        sums += weighted_sum(slope, k)
    store_row(grad_query, parts, slot, sums, WIDTH)


def _segment_sums(
    weight: Tensor, source: Tensor, ptr: Tensor, ends: Tensor, order: Tensor | None, out: Tensor, *sizes: int
) -> Tensor:
    """Sum over the edges of each segment, ``[H, N, C]`` in the type of ``out``, which is written."""
    rows, width = out.size(0) * out.size(1), source.size(2)
    options, work = tile_options(accumulate_dtype(weight, source), width), SplitRows(ptr, ends.size(0), weight, source)
    parts = work.parts(width)
    launch(
        _gather_kernel, rows + work.programs, weight, source, ptr, work.piece_ends, ends, order, out, parts, rows,
        *sizes, WIDTH=width, MAX_EDGES=work.max_edges, **options,
    )  # fmt: skip
    work.merge(out, parts)
    return out


def _sum_by_row(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each query, ``[H, N, C]``."""
    return _segment_sums(weight, source, rowptr.contiguous(), col.contiguous(), None, out, out.size(1), source.size(1))


def _sum_by_key(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each key, ``[H, M, C]``."""
    order, ptr, row = reference_segments.by_key(rowptr, col, *out.shape[:2])
    return _segment_sums(weight, source, ptr, row, order, out, max(out.size(0) * out.size(1), 1), 0)


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    if not supports(query):
        return reference_edges.edge_dot(query, key, rowptr, col)
    (heads, queries, width), keys = query.shape, key.size(1)
    out, rows = query.new_empty(col.size(0)), heads * queries
    query, key, rowptr, col = (x.contiguous() for x in (query, key, rowptr, col))
    work = SplitRows(rowptr, col.size(0), query, key)
    launch(
        _edge_dot_kernel, rows + work.programs, query, key, rowptr, work.piece_ends, col, out, rows, queries, keys,
        WIDTH=width, MAX_EDGES=work.max_edges, **tile_options(accumulate_dtype(query, key), width),
    )  # fmt: skip
    return out


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    if not supports(query):
        return reference_edges.edge_dot_backward(grad, query, key, rowptr, col, need_query, need_key)
    grad, query, key = (x.contiguous() for x in (grad, query, key))
    grad_query, grad_key = torch.empty_like(query), torch.empty_like(key)
    _sum_by_row(grad, key, rowptr, col, grad_query) if need_query else grad_query.zero_()
    _sum_by_key(grad, query, rowptr, col, grad_key) if need_key else grad_key.zero_()
    return grad_query, grad_key


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None,
    scale: float, gate_form: str, dropout: float, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not supports(query, value):
        more = (gate, bias, scale, gate_form, dropout, seed)
        return reference_edges.edge_attention(query, key, value, rowptr, col, *more)
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = accumulate_dtype(query, key, value, gate, bias)
    out, lse = value.new_empty(heads, queries, value_width), query.new_empty(heads, queries, dtype=dtype)
    rows, rowptr = heads * queries, rowptr.contiguous()
    work = SplitRows(rowptr, col.size(0), lse)
    parts, tops, norms = work.parts(value_width), work.parts(), work.parts()
    tokens, edges = (query, key, value), (col, gate, bias)
    of_tokens, of_edge = ([x if x is None else x.contiguous() for x in side] for side in (tokens, edges))
    *words, least, grow = dropout_arguments(query, key, dropout, seed)
    launch(
        _edge_attention_kernel, rows + work.programs, *of_tokens, rowptr, work.piece_ends, *of_edge, *words, out, lse,
        parts, tops, norms, rows, queries, keys, least, grow, float_bits(scale),
        WEIGHTED=gate is not None and gate_form == "weight", WIDTH=width, VALUE_WIDTH=value_width,
        MAX_EDGES=work.max_edges, **tile_options(dtype, width, value_width),
    )  # fmt: skip
    work.merge(out, parts, tops, norms, lse)
    return out, lse


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None,
    bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int,
    need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not supports(query, value):
        return reference_edges.edge_attention_backward(
            grad_out, query, key, value, rowptr, col, gate, bias, out, lse, scale, gate_form, dropout, seed, need_gate,
            need_bias,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = accumulate_dtype(query, key, value, gate, bias)
    grad_out, query, key, value = (x.contiguous() for x in (grad_out, query, key, value))
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    slopes, shares = lse.new_empty(2, aligned_size(col.size(0)), dtype=dtype)
    needs = ((gate, need_gate), (bias, need_bias))
    grad_gate, grad_bias = (x.new_empty(x.shape) if x is not None and need else None for x, need in needs)
    rows, rowptr = heads * queries, rowptr.contiguous()
    work = SplitRows(rowptr, col.size(0), slopes)
    parts = work.parts(width)
    edges = (x if x is None else x.contiguous() for x in (col, gate, bias))
    *words, least, grow = dropout_arguments(query, key, dropout, seed)
    launch(
        _edge_attention_backward_kernel, rows + work.programs, grad_out, query, key, value, rowptr, work.piece_ends,
        *edges, *words, out.contiguous(), lse.contiguous(), grad_query, parts, slopes, shares, grad_gate, grad_bias,
        rows, queries, keys, least, grow, float_bits(scale), WEIGHTED=gate is not None and gate_form == "weight",
        WIDTH=width, VALUE_WIDTH=value_width, MAX_EDGES=work.max_edges,
        **tile_options(dtype, width, value_width, held=2),
    )  # fmt: skip
    work.merge(grad_query, parts)
    # Sum up over the edges of each key, in the order of the keys.
    _sum_by_key(slopes, query, rowptr, col, grad_key)
    _sum_by_key(shares, grad_out, rowptr, col, grad_value)
    grad_gate, grad_bias = (lse.new_empty(0) if x is None else x for x in (grad_gate, grad_bias))
    return grad_query, grad_key, grad_value, grad_gate, grad_bias
