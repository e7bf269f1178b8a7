"""Attention over a graph that all heads share, with features of its edges, for CUDA devices, in Triton.

In and out: the tensors of ``graph_attention`` and its backward in :mod:`sbm_pyg.ops`, on one device. Not here: the sort
of the edges, and heads with graphs of their own (:mod:`.edges`).

A program takes one row and one head, its edges a tile at a time; the heads of a row are neighbors, which read the same
features. Each direction has three steps. The first writes dot products, one number for each edge and head, with what
the row needs to know of them. The second makes weights of them, or in the backward pass their slopes, for all heads of
a row. The third adds up vectors by these numbers: over the edges of each query, and in the backward pass over those of
each key as well, in the order that :func:`.segments.by_key` keeps. So no vector is written for an edge, but for the
gradient of its features. Nothing is added atomically, and the same call gives the same bits.

Rows of very many edges are shared by several programs. Vectors of more than 512 channels, or of none, and more than 512
heads take the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import segments as reference_segments
from ..reference import graph_attention as reference_graph_attention
from .rows import (
    SplitRows,
    accumulate_dtype,
    aligned_size,
    cast_like,
    dot_rows,
    finite,
    float_bits,
    from_bits,
    gather,
    launch,
    load_edges,
    load_vector,
    programs_of_row,
    store_row,
    supports,
    tile_options,
    triton_kernel,
    weighted_sum,
    work_item_of,
)


@triton.jit
def _item_of_head(ptr, piece_ends, rows, heads, MAX_EDGES: tl.constexpr):
    """Vector of this program's row and head, its head, where its edges start and stop, and the vector of its piece.

    A whole row has a negative piece.
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    row, start, stop, slot = work_item_of(ptr, piece_ends, program // heads, rows, MAX_EDGES)
    return row * heads + head, head, start, stop, slot * heads + head


@triton.jit
def _load_factor(weight, keep, place, exists, ACC_TYPE: tl.constexpr):
    """A number of each edge and head, times that of ``keep``; zeros where the mask is false."""
    factor = tl.load(weight + place, mask=exists, other=0).to(ACC_TYPE)
    if keep is not None:
        factor *= tl.load(keep + place, mask=exists, other=0).to(ACC_TYPE)
    return factor


@triton_kernel
def _graph_dot_kernel(
    vectors, ends, edge_vectors, feature, keep, term, weight, rowptr, piece_ends, col, out, tops, sums, rows: tl.int64,
    heads: tl.int64, scale: tl.int64, WIDTH: tl.constexpr, DEPTH: tl.constexpr, MAX_EDGES: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Dot products of vectors of a row with the ends of its edges and with features, times ``keep``, plus ``term``.

    Without ``weight`` they are logits: the largest and the sum of exponentials are written for each program. With it,
    they are gains, and their sum by the weights is.
    """
    vector, head, start, stop, _ = _item_of_head(rowptr, piece_ends, rows, heads, MAX_EDGES)
    # Load the vectors of the row, times the scale: a product that follows could be fused into what subtracts a maximum.
    x = load_vector(vectors, vector, WIDTH, ACC_TYPE) * from_bits(scale, ACC_TYPE)
    if feature is not None:
        u = load_vector(edge_vectors, vector, DEPTH, ACC_TYPE) * from_bits(scale, ACC_TYPE)
    top, total = tl.full([], float("-inf"), ACC_TYPE), tl.full([], 0, ACC_TYPE)
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(col, begin, stop, 0, EDGES)
        place = edge * heads + head
        # Compute the products of a tile of edges.
        dot = dot_rows(gather(ends, end * heads + head, exists, WIDTH, ACC_TYPE), x)
        if feature is not None:
            dot += dot_rows(gather(feature, edge, exists, DEPTH, ACC_TYPE), u)
        if keep is not None:
            dot *= tl.load(keep + place, mask=exists, other=0).to(ACC_TYPE)
        if term is not None:
            dot += tl.load(term + place, mask=exists, other=0).to(ACC_TYPE)
        tl.store(out + place, cast_like(dot, out), mask=exists)
        # Add up exponentials, which a larger maximum shrinks; or gains.
        if weight is None:
            dot = tl.where(exists, dot, float("-inf"))
            new = tl.maximum(top, tl.max(dot, 0))
            total = total * tl.exp(top - finite(new)) + tl.sum(tl.exp(dot - finite(new)), 0)
            top = new
        else:
            total += tl.sum(_load_factor(weight, None, place, exists, ACC_TYPE) * dot, 0)
    # Write what the next kernel needs to know of the edges of this program.
    program = tl.program_id(0).to(tl.int64)
    if weight is None:
        tl.store(tops + program, top)
    tl.store(sums + program, total)


@triton_kernel
def _graph_weights_kernel(
    x, weight, rowptr, piece_ends, tops, sums, rows: tl.int64, HEADS: tl.constexpr, MAX_EDGES: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Weights in place of logits, for all heads of a row; or with ``weight``, slopes of logits in place of gains."""
    row, start, stop, _ = work_item_of(rowptr, piece_ends, tl.program_id(0).to(tl.int64), rows, MAX_EDGES)
    first, last = programs_of_row(piece_ends, row, rows)
    head = tl.arange(0, triton.next_power_of_2(HEADS))
    top, total = tl.full(head.shape, float("-inf"), ACC_TYPE), tl.full(head.shape, 0, ACC_TYPE)
    # Unite what the programs of the row have left: the largest logit, and the sum of exponentials or of gains.
    if weight is None:
        for program in range(first, last):
            top = tl.maximum(top, tl.load(tops + program * HEADS + head, mask=head < HEADS, other=float("-inf")))
    for program in range(first, last):
        part = tl.load(sums + program * HEADS + head, mask=head < HEADS, other=0)
        if weight is None:
            part_top = tl.load(tops + program * HEADS + head, mask=head < HEADS, other=float("-inf"))
            part *= tl.exp(part_top - finite(top))
        total += part
    if weight is None:
        total = tl.where(total == 0, 1, total)
    # Divide exponentials by their sum; or compare gains with their mean.
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        place, exists = edge[:, None] * HEADS + head[None, :], (edge < stop)[:, None] & (head < HEADS)[None, :]
        number = tl.load(x + place, mask=exists, other=0).to(ACC_TYPE)
        if weight is None:
            number = tl.exp(number - finite(top)[None, :]) / total[None, :]
        else:
            number = _load_factor(weight, None, place, exists, ACC_TYPE) * (number - total[None, :])
        tl.store(x + place, cast_like(number, x), mask=exists)


@triton_kernel
def _graph_sum_kernel(
    weight, keep, source, feature, ptr, piece_ends, ends, order, out, parts, mean, mean_parts, rows: tl.int64,
    heads: tl.int64, scale: tl.int64, WIDTH: tl.constexpr, DEPTH: tl.constexpr, MAX_EDGES: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Sums over the edges of a segment of the vectors at their ends, and of their features, by their weights."""
    _, head, start, stop, slot = _item_of_head(ptr, piece_ends, rows, heads, MAX_EDGES)
    sums = tl.zeros([triton.next_power_of_2(WIDTH)], ACC_TYPE)
    if feature is not None:
        means = tl.zeros([triton.next_power_of_2(DEPTH)], ACC_TYPE)
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(ends, begin, stop, 0, EDGES)
        # By key, the numbers of the edges come from the table ``order``.
        if order is not None:
            edge = tl.load(order + edge, mask=exists, other=0)
        factor = _load_factor(weight, keep, edge * heads + head, exists, ACC_TYPE) * from_bits(scale, ACC_TYPE)
        sums += weighted_sum(factor, gather(source, end * heads + head, exists, WIDTH, ACC_TYPE))
        if feature is not None:
            means += weighted_sum(factor, gather(feature, edge, exists, DEPTH, ACC_TYPE))
    store_row(out, parts, slot, sums, WIDTH)
    if feature is not None:
        store_row(mean, mean_parts, slot, means, DEPTH)


@triton_kernel
def _graph_feature_kernel(
    slope, weight, keep, edge_query, grad_mean, rowptr, piece_ends, out, rows: tl.int64, heads: tl.int64,
    scale: tl.int64, DEPTH: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of the features of a row's edges, over all heads."""
    row, start, stop, _ = work_item_of(rowptr, piece_ends, tl.program_id(0).to(tl.int64), rows, MAX_EDGES)
    channel = tl.arange(0, triton.next_power_of_2(DEPTH))
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        exists, sums = edge < stop, tl.zeros([EDGES, triton.next_power_of_2(DEPTH)], ACC_TYPE)
        # Add what each head gets of a feature: by its score, and by its mean.
        for head in range(heads):
            by_score = _load_factor(slope, None, edge * heads + head, exists, ACC_TYPE) * from_bits(scale, ACC_TYPE)
            by_mean = _load_factor(weight, keep, edge * heads + head, exists, ACC_TYPE)
            sums += by_score[:, None] * load_vector(edge_query, row * heads + head, DEPTH, ACC_TYPE)[None, :]
            sums += by_mean[:, None] * load_vector(grad_mean, row * heads + head, DEPTH, ACC_TYPE)[None, :]
        inside = exists[:, None] & (channel < DEPTH)[None, :]
        tl.store(out + edge[:, None] * DEPTH + channel[None, :], cast_like(sums, out), mask=inside)


# ------------------------------------------------------------------ on the host


def _numbers_of_edges(
    out: Tensor, sides: tuple[Tensor, Tensor], of_features: tuple[Tensor | None, Tensor | None], keep: Tensor | None,
    term: Tensor | None, weight: Tensor | None, rowptr: Tensor, col: Tensor, scale: float, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write weights ``[E, H]``, or with ``weight`` the derivatives by the logits, to ``out``."""
    (rows, heads, width), depth = sides[0].shape, 1 if of_features[1] is None else of_features[1].size(1)
    work = SplitRows(rowptr, col.numel(), out)
    programs = rows + work.programs
    tops, sums = out.new_empty(2, aligned_size(programs * heads), dtype=dtype)
    shared = {"MAX_EDGES": work.max_edges}
    launch(
        _graph_dot_kernel, programs * heads, *sides, *of_features, keep, term, weight, rowptr, work.piece_ends, col,
        out, tops, sums, rows, heads, float_bits(scale), WIDTH=width, DEPTH=depth, **shared,
        **tile_options(dtype, width, depth),
    )  # fmt: skip
    launch(
        _graph_weights_kernel, programs, out, weight, rowptr, work.piece_ends, tops, sums, rows, HEADS=heads, **shared,
        **tile_options(dtype, heads, held=2),
    )  # fmt: skip


def _vector_sums(
    out: Tensor, mean: Tensor | None, weight: Tensor, keep: Tensor | None, source: Tensor, feature: Tensor | None,
    ptr: Tensor, ends: Tensor, order: Tensor | None, scale: float, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write sums over the edges of each segment, ``[N, H, C]`` and ``[N, H, D]``, to ``out`` and ``mean``."""
    (rows, heads, width), depth = out.shape, 1 if feature is None else feature.size(1)
    work = SplitRows(ptr, ends.numel(), weight.new_empty(0, dtype=dtype))
    parts, mean_parts = work.parts(heads, width), None if feature is None else work.parts(heads, depth)
    launch(
        _graph_sum_kernel, (rows + work.programs) * heads, weight, keep, source, feature, ptr, work.piece_ends, ends,
        order, out, parts, mean, mean_parts, rows, heads, float_bits(scale), WIDTH=width, DEPTH=depth,
        MAX_EDGES=work.max_edges, **tile_options(dtype, width, depth, held=1 if feature is None else 2),
    )  # fmt: skip
    work.merge(out, parts)
    if mean is not None:
        work.merge(mean, mean_parts)


def graph_attention(
    query: Tensor, key: Tensor, value: Tensor, edge_query: Tensor | None, feature: Tensor | None, bias: Tensor | None,
    keep: Tensor | None, rowptr: Tensor, col: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not supports(query, query.mT, value, edge_query):
        more = (edge_query, feature, bias, keep, rowptr, col, scale)
        return reference_graph_attention.graph_attention(query, key, value, *more)
    dtype = accumulate_dtype(query, key, value, edge_query, feature, bias, keep)
    query, key, value, rowptr, col = (x.contiguous() for x in (query, key, value, rowptr, col))
    edge_query, feature, bias, keep = (None if x is None else x.contiguous() for x in (edge_query, feature, bias, keep))
    out = value.new_empty(*query.shape[:2], value.size(2))
    mean = query.new_empty(*query.shape[:2], 0 if feature is None else feature.size(1))
    weight = query.new_empty(col.numel(), query.size(1), dtype=torch.promote_types(query.dtype, torch.float32))
    _numbers_of_edges(weight, (query, key), (edge_query, feature), None, bias, None, rowptr, col, scale, dtype)
    _vector_sums(out, mean, weight, keep, value, feature, rowptr, col, None, 1.0, dtype)
    return out, mean, weight


def graph_attention_backward(
    grad_out: Tensor, grad_mean: Tensor | None, grad_weight: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    edge_query: Tensor | None, feature: Tensor | None, keep: Tensor | None, rowptr: Tensor, col: Tensor,
    weight: Tensor, scale: float, need_feature: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not supports(query, query.mT, value, edge_query):
        return reference_graph_attention.graph_attention_backward(
            grad_out, grad_mean, grad_weight, query, key, value, edge_query, feature, keep, rowptr, col, weight, scale,
            need_feature,
        )  # fmt: skip
    dtype, num_keys = accumulate_dtype(query, key, value, edge_query, feature, keep, weight), key.size(0)
    grad_out, query, key, value, weight = (x.contiguous() for x in (grad_out, query, key, value, weight))
    rowptr, col = rowptr.contiguous(), col.contiguous()
    grad_mean, grad_weight, edge_query, feature, keep = (
        None if x is None else x.contiguous() for x in (grad_mean, grad_weight, edge_query, feature, keep)
    )
    dquery, dkey, dvalue = (torch.empty_like(x) for x in (query, key, value))
    dedge_query, dfeature = query.new_empty(*query.shape[:2], 0), query.new_empty(0, 0)
    if feature is not None and edge_query is not None:
        dedge_query = torch.empty_like(edge_query)
        dfeature = feature.new_empty(len(feature) * need_feature, feature.size(1))
    # Compute the derivatives by the logits, and sum up over the edges of each query.
    slope = weight.new_empty(weight.shape, dtype=dtype)
    sides, of_features = (grad_out, value), (grad_mean, feature)
    _numbers_of_edges(slope, sides, of_features, keep, grad_weight, weight, rowptr, col, 1.0, dtype)
    _vector_sums(dquery, dedge_query, slope, None, key, feature, rowptr, col, None, scale, dtype)
    # Sum up over the edges of each key, in the order of the keys.
    order, ptr, row = reference_segments.by_key(rowptr, col, 1, num_keys)
    _vector_sums(dkey, None, slope, None, query, None, ptr, row, order, scale, dtype)
    _vector_sums(dvalue, None, weight, keep, grad_out, None, ptr, row, order, 1.0, dtype)
    # Sum up over the heads of each edge.
    if feature is not None and need_feature:
        work, rows = SplitRows(rowptr, col.numel(), slope), query.size(0)
        launch(
            _graph_feature_kernel, rows + work.programs, slope, weight, keep, edge_query, grad_mean, rowptr,
            work.piece_ends, dfeature, rows, query.size(1), float_bits(scale), DEPTH=feature.size(1),
            MAX_EDGES=work.max_edges, **tile_options(dtype, feature.size(1), held=2) | {"maxnreg": 255},
        )  # fmt: skip
    return dquery, dkey, dvalue, dedge_query, dfeature, slope.to(query.dtype)
