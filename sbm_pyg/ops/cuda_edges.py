"""Edge kernels for CUDA devices, in Triton: scores of edges, attention over edges, and their gradients.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on one device. Not here: checks of what comes in, and
what kernels share (:mod:`.cuda_rows`).

A program takes one row: it gathers the keys and values of its edges a tile at a time, keeps a running maximum, and
writes what belongs to the row. The backward pass does so once more and leaves two numbers with each edge, by which a
second kernel sums over the edges of each key, in the order that :func:`.reference.by_key` keeps. So every number has
one writer, nothing is added atomically, and the same call gives the same bits.

Vectors of more than 512 channels, or of none, take the reference. A row, or a key, is one warp's work however many
edges it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .cuda_rows import (
    bits,
    chances,
    dots,
    finite,
    kept,
    kernel,
    launch,
    logits,
    narrow,
    put,
    real,
    span,
    takes,
    tile,
    tiles,
    total,
    vector,
    vectors,
    wide,
)

# ------------------------------------------------------------------ kernels


@kernel
def _dot(
    query, key, rowptr, col, out, queries: tl.int64, keys: tl.int64,
    WIDTH: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop = span(rowptr, queries, keys)
    q = vector(query, row, WIDTH, WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        score = dots(vectors(key, end, there, WIDTH, WIDE), q)
        tl.store(out + edge, narrow(score, out), mask=there)


@kernel
def _gather(
    weight, source, ptr, ends, order, out, queries: tl.int64, keys: tl.int64,
    WIDTH: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum of the vectors at the ends of each segment's edges, by their weights."""
    row, first, start, stop = span(ptr, queries, keys)
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(ends, begin, stop, first, EDGES)
        if order is not None:
            edge = tl.load(order + edge, mask=there, other=0)
        factor = tl.load(weight + edge, mask=there, other=0).to(WIDE)
        sums += total(factor, vectors(source, end, there, WIDTH, WIDE))
    put(out, row, sums, WIDTH)


@kernel
def _attention(
    query, key, value, rowptr, col, gate, bias, query_words, key_words, out, lse, queries: tl.int64, keys: tl.int64,
    least: tl.int64, grow: tl.int64, scale: tl.int64, WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop = span(rowptr, queries, keys)
    q = vector(query, row, WIDTH, WIDE) * real(scale, WIDE)
    top, norm = tl.full([], float("-inf"), WIDE), tl.full([], 0, WIDE)
    sums = tl.zeros([triton.next_power_of_2(VALUE_WIDTH)], WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        score = dots(vectors(key, end, there, WIDTH, WIDE), q)
        logit, factor = logits(score, gate, bias, edge, there, WEIGHTED, WIDE)
        new = tl.maximum(top, tl.max(logit, 0))
        weight, shrink = tl.exp(logit - finite(new)), tl.exp(top - finite(new))
        if WEIGHTED:
            weight *= factor
        norm, top = norm * shrink + tl.sum(weight, 0), new
        if query_words is not None:
            weight = tl.where(kept(tl.load(query_words + row), key_words, end, there, least), weight, 0)
        sums = sums * shrink + total(weight, vectors(value, end, there, VALUE_WIDTH, WIDE))
    if query_words is not None:
        sums *= real(grow, WIDE)
    put(out, row, sums / tl.where(norm == 0, 1, norm), VALUE_WIDTH)
    tl.store(lse + row, top + tl.log(norm))


@kernel
def _attention_backward(
    grad_out, query, key, value, rowptr, col, gate, bias, query_words, key_words, out, lse, grad_query, slopes, shares,
    grad_gate, grad_bias, queries: tl.int64, keys: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of a query and of what its edges have; and for each edge what its key and its value get."""
    row, first, start, stop = span(rowptr, queries, keys)
    q, g = vector(query, row, WIDTH, WIDE), vector(grad_out, row, VALUE_WIDTH, WIDE)
    mean, shift = tl.sum(g * vector(out, row, VALUE_WIDTH, WIDE), 0), finite(tl.load(lse + row).to(WIDE))
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        k = vectors(key, end, there, WIDTH, WIDE)
        score = dots(k, q) * real(scale, WIDE)
        gain = dots(vectors(value, end, there, VALUE_WIDTH, WIDE), g)
        logit, factor = logits(score, gate, bias, edge, there, WEIGHTED, WIDE)
        weight = tl.exp(logit - shift)
        share = weight
        if query_words is not None:
            keep = kept(tl.load(query_words + row), key_words, end, there, least)
            gain = tl.where(keep, gain * real(grow, WIDE), 0)
            share = tl.where(keep, weight * real(grow, WIDE), 0)
        slope = weight * (gain - mean)
        if grad_gate is not None:
            change = slope if WEIGHTED else slope * score
            tl.store(grad_gate + edge, narrow(change, grad_gate), mask=there)
        if WEIGHTED:
            share, slope = share * factor, slope * factor
        if grad_bias is not None:
            tl.store(grad_bias + edge, narrow(slope, grad_bias), mask=there)
        if not WEIGHTED:
            slope *= factor
        slope *= real(scale, WIDE)
        tl.store(slopes + edge, slope, mask=there)
        tl.store(shares + edge, share, mask=there)
        sums += total(slope, k)
    put(grad_query, row, sums, WIDTH)


# ------------------------------------------------------------------ the ops


def _by_row(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each row, ``[H, N, C]`` in the type of ``out``, which is written."""
    options = tiles(wide(weight, source), source.size(2))
    width, sizes = source.size(2), (out.size(1), source.size(1))
    rows = out.size(0) * out.size(1)
    graph = rowptr.contiguous(), col.contiguous()
    launch(_gather, rows, weight, source, *graph, None, out, *sizes, WIDTH=width, **options)
    return out


def _by_key(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each key, ``[H, M, C]`` in the type of ``out``, which is written."""
    order, ptr, row = reference.by_key(rowptr, col, *out.shape[:2])
    options = tiles(wide(weight, source), source.size(2))
    keys, width = out.size(0) * out.size(1), source.size(2)
    launch(_gather, keys, weight, source, ptr, row, order, out, max(keys, 1), 0, WIDTH=width, **options)
    return out


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    if not takes(query):
        return reference.edge_dot(query, key, rowptr, col)
    (heads, queries, width), keys = query.shape, key.size(1)
    out, options = query.new_empty(col.size(0)), tiles(wide(query, key), width)
    given = (x.contiguous() for x in (query, key, rowptr, col))
    launch(_dot, heads * queries, *given, out, queries, keys, WIDTH=width, **options)
    return out


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    if not takes(query):
        return reference.edge_dot_backward(grad, query, key, rowptr, col, need_query, need_key)
    grad, query, key = (x.contiguous() for x in (grad, query, key))
    grad_query, grad_key = torch.empty_like(query), torch.empty_like(key)
    _by_row(grad, key, rowptr, col, grad_query) if need_query else grad_query.zero_()
    _by_key(grad, query, rowptr, col, grad_key) if need_key else grad_key.zero_()
    return grad_query, grad_key


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None,
    scale: float, gate_form: str, dropout: float, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not takes(query, value):
        return reference.edge_attention(query, key, value, rowptr, col, gate, bias, scale, gate_form, dropout, seed)
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(query, key, value, gate, bias)
    out, lse = value.new_empty(heads, queries, value_width), query.new_empty(heads, queries, dtype=dtype)
    given = (x if x is None else x.contiguous() for x in (query, key, value, rowptr, col, gate, bias))
    *words, least, grow = chances(query, key, dropout, seed)
    launch(
        _attention, heads * queries, *given, *words, out, lse, queries, keys, least, grow, bits(scale),
        WEIGHTED=gate is not None and gate_form == "weight", WIDTH=width, VALUE_WIDTH=value_width,
        **tiles(dtype, width, value_width),
    )  # fmt: skip
    return out, lse


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None,
    bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int,
    need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not takes(query, value):
        return reference.edge_attention_backward(
            grad_out, query, key, value, rowptr, col, gate, bias, out, lse, scale, gate_form, dropout, seed, need_gate,
            need_bias,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(query, key, value, gate, bias)
    grad_out, query, key, value = (x.contiguous() for x in (grad_out, query, key, value))
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    slopes, shares = lse.new_empty(2, col.size(0), dtype=dtype)
    grad_gate, grad_bias = (
        x.new_empty(x.shape) if x is not None and need else None for x, need in ((gate, need_gate), (bias, need_bias))
    )
    edges = (x if x is None else x.contiguous() for x in (rowptr, col, gate, bias))
    *words, least, grow = chances(query, key, dropout, seed)
    launch(
        _attention_backward, heads * queries, grad_out, query, key, value, *edges, *words, out.contiguous(),
        lse.contiguous(), grad_query, slopes, shares, grad_gate, grad_bias, queries, keys, least, grow, bits(scale),
        WEIGHTED=gate is not None and gate_form == "weight", WIDTH=width, VALUE_WIDTH=value_width,
        **tiles(dtype, width, value_width, held=2),
    )  # fmt: skip
    _by_key(slopes, query, rowptr, col, grad_key)
    _by_key(shares, grad_out, rowptr, col, grad_value)
    grad_gate, grad_bias = (lse.new_empty(0) if x is None else x for x in (grad_gate, grad_bias))
    return grad_query, grad_key, grad_value, grad_gate, grad_bias
