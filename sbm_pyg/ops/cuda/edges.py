"""Edge kernels for CUDA devices, in Triton: scores of edges, attention over edges, and their gradients.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on one device. Not here: checks of what comes in, and
what kernels share (:mod:`.cuda.rows`).

A program takes one row: it gathers the keys and values of its edges a tile at a time, keeps a running maximum, and
writes what belongs to the row. The backward pass does so once more and leaves two numbers with each edge, by which a
second kernel sums over the edges of each key, in the order that :func:`.segments.by_key` keeps. So every number has
one writer, nothing is added atomically, and the same call gives the same bits.

Rows, or keys, of very many edges are shared by several programs, whose parts one more kernel unites. Vectors of more
than 512 channels, or of none, take the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import edges as reference_edges
from ..reference import segments as reference_segments
from .rows import (
    Shared,
    aligned,
    bits,
    chances,
    dots,
    finite,
    give,
    kept,
    kernel,
    launch,
    logits,
    narrow,
    piece,
    real,
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
    query, key, rowptr, more, col, out, rows: tl.int64, queries: tl.int64, keys: tl.int64,
    WIDTH: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop, _ = piece(rowptr, more, rows, queries, keys, LONG)
    q = vector(query, row, WIDTH, WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        score = dots(vectors(key, end, there, WIDTH, WIDE), q)
        tl.store(out + edge, narrow(score, out), mask=there)


@kernel
def _gather(
    weight, source, ptr, more, ends, order, out, parts, rows: tl.int64, queries: tl.int64, keys: tl.int64,
    WIDTH: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum of the vectors at the ends of each segment's edges, by their weights."""
    _, first, start, stop, slot = piece(ptr, more, rows, queries, keys, LONG)
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(ends, begin, stop, first, EDGES)
        if order is not None:
            edge = tl.load(order + edge, mask=there, other=0)
        factor = tl.load(weight + edge, mask=there, other=0).to(WIDE)
        sums += total(factor, vectors(source, end, there, WIDTH, WIDE))
    give(out, parts, slot, sums, WIDTH)


@kernel
def _attention(
    query, key, value, rowptr, more, col, gate, bias, query_words, key_words, out, lse, parts, tops, norms,
    rows: tl.int64, queries: tl.int64, keys: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop, slot = piece(rowptr, more, rows, queries, keys, LONG)
    q = vector(query, row, WIDTH, WIDE) * real(scale, WIDE)
    top, norm = tl.full([], float("-inf"), WIDE), tl.full([], 0, WIDE)
    sums = tl.zeros([triton.next_power_of_2(VALUE_WIDTH)], WIDE)
    if query_words is not None:
        word = tl.load(query_words + row)
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
            weight = tl.where(kept(word, key_words, end, there, least), weight, 0)
        sums = sums * shrink + total(weight, vectors(value, end, there, VALUE_WIDTH, WIDE))
    if query_words is not None:
        sums *= real(grow, WIDE)
    if parts is None:
        tl.store(lse + row, top + tl.log(norm))
    else:
        tl.store(lse + row, top + tl.log(norm), mask=slot < 0)
        tl.store(tops + slot, top, mask=slot >= 0)
        tl.store(norms + slot, norm, mask=slot >= 0)
        norm = tl.where(slot < 0, norm, 1)  # which the whole row divides by
    give(out, parts, slot, sums / tl.where(norm == 0, 1, norm), VALUE_WIDTH)


@kernel
def _attention_backward(
    grad_out, query, key, value, rowptr, more, col, gate, bias, query_words, key_words, out, lse, grad_query, parts,
    slopes, shares, grad_gate, grad_bias, rows: tl.int64, queries: tl.int64, keys: tl.int64, least: tl.int64,
    grow: tl.int64, scale: tl.int64, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of a query and of what its edges have; and for each edge what its key and its value get."""
    row, first, start, stop, slot = piece(rowptr, more, rows, queries, keys, LONG)
    q, g = vector(query, row, WIDTH, WIDE) * real(scale, WIDE), vector(grad_out, row, VALUE_WIDTH, WIDE)
    mean, shift = tl.sum(g * vector(out, row, VALUE_WIDTH, WIDE), 0), finite(tl.load(lse + row).to(WIDE))
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], WIDE)
    if query_words is not None:
        word = tl.load(query_words + row)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        k = vectors(key, end, there, WIDTH, WIDE)
        score = dots(k, q)
        gain = dots(vectors(value, end, there, VALUE_WIDTH, WIDE), g)
        logit, factor = logits(score, gate, bias, edge, there, WEIGHTED, WIDE)
        weight = tl.exp(logit - shift)
        share = weight
        if query_words is not None:
            keep = kept(word, key_words, end, there, least)
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
    give(grad_query, parts, slot, sums, WIDTH)


# ------------------------------------------------------------------ the ops


def _sums(
    weight: Tensor, source: Tensor, ptr: Tensor, ends: Tensor, order: Tensor | None, out: Tensor, *sizes: int
) -> Tensor:
    """Sum over the edges of each segment, ``[H, N, C]`` in the type of ``out``, which is written."""
    rows, width = out.size(0) * out.size(1), source.size(2)
    options, work = tiles(wide(weight, source), width), Shared(ptr, ends.size(0), weight, source)
    parts = work.parts(width)
    launch(
        _gather, rows + work.programs, weight, source, ptr, work.more, ends, order, out, parts, rows, *sizes,
        WIDTH=width, LONG=work.long, **options,
    )  # fmt: skip
    work.unite(out, parts)
    return out


def _by_row(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each query, ``[H, N, C]``."""
    return _sums(weight, source, rowptr.contiguous(), col.contiguous(), None, out, out.size(1), source.size(1))


def _by_key(weight: Tensor, source: Tensor, rowptr: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Sum over the edges of each key, ``[H, M, C]``."""
    order, ptr, row = reference_segments.by_key(rowptr, col, *out.shape[:2])
    return _sums(weight, source, ptr, row, order, out, max(out.size(0) * out.size(1), 1), 0)


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    if not takes(query):
        return reference_edges.edge_dot(query, key, rowptr, col)
    (heads, queries, width), keys = query.shape, key.size(1)
    out, rows = query.new_empty(col.size(0)), heads * queries
    query, key, rowptr, col = (x.contiguous() for x in (query, key, rowptr, col))
    work = Shared(rowptr, col.size(0), query, key)
    launch(
        _dot, rows + work.programs, query, key, rowptr, work.more, col, out, rows, queries, keys, WIDTH=width,
        LONG=work.long, **tiles(wide(query, key), width),
    )  # fmt: skip
    return out


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    if not takes(query):
        return reference_edges.edge_dot_backward(grad, query, key, rowptr, col, need_query, need_key)
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
        return reference_edges.edge_attention(
            query, key, value, rowptr, col, gate, bias, scale, gate_form, dropout, seed
        )
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(query, key, value, gate, bias)
    out, lse = value.new_empty(heads, queries, value_width), query.new_empty(heads, queries, dtype=dtype)
    rows, rowptr = heads * queries, rowptr.contiguous()
    work = Shared(rowptr, col.size(0), lse)
    parts, tops, norms = work.parts(value_width), work.parts(), work.parts()
    tokens, edges = (query, key, value), (col, gate, bias)
    given, of_edge = ([x if x is None else x.contiguous() for x in side] for side in (tokens, edges))
    *words, least, grow = chances(query, key, dropout, seed)
    launch(
        _attention, rows + work.programs, *given, rowptr, work.more, *of_edge, *words, out, lse, parts, tops, norms,
        rows, queries, keys, least, grow, bits(scale), WEIGHTED=gate is not None and gate_form == "weight",
        WIDTH=width, VALUE_WIDTH=value_width, LONG=work.long, **tiles(dtype, width, value_width),
    )  # fmt: skip
    work.unite(out, parts, tops, norms, lse)
    return out, lse


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None,
    bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int,
    need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not takes(query, value):
        return reference_edges.edge_attention_backward(
            grad_out, query, key, value, rowptr, col, gate, bias, out, lse, scale, gate_form, dropout, seed, need_gate,
            need_bias,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(query, key, value, gate, bias)
    grad_out, query, key, value = (x.contiguous() for x in (grad_out, query, key, value))
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    slopes, shares = lse.new_empty(2, aligned(col.size(0)), dtype=dtype)
    grad_gate, grad_bias = (
        x.new_empty(x.shape) if x is not None and need else None for x, need in ((gate, need_gate), (bias, need_bias))
    )
    rows, rowptr = heads * queries, rowptr.contiguous()
    work = Shared(rowptr, col.size(0), slopes)
    parts = work.parts(width)
    edges = (x if x is None else x.contiguous() for x in (col, gate, bias))
    *words, least, grow = chances(query, key, dropout, seed)
    launch(
        _attention_backward, rows + work.programs, grad_out, query, key, value, rowptr, work.more, *edges, *words,
        out.contiguous(), lse.contiguous(), grad_query, parts, slopes, shares, grad_gate, grad_bias, rows, queries,
        keys, least, grow, bits(scale), WEIGHTED=gate is not None and gate_form == "weight", WIDTH=width,
        VALUE_WIDTH=value_width, LONG=work.long, **tiles(dtype, width, value_width, held=2),
    )  # fmt: skip
    work.unite(grad_query, parts)
    _by_key(slopes, query, rowptr, col, grad_key)
    _by_key(shares, grad_out, rowptr, col, grad_value)
    grad_gate, grad_bias = (lse.new_empty(0) if x is None else x for x in (grad_gate, grad_bias))
    return grad_query, grad_key, grad_value, grad_gate, grad_bias
