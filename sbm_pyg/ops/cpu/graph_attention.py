"""Attention over a graph that all heads share, with features of its edges: kernels for the CPU.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on the CPU. Tokens are ``[N, H, C]``, as graph layers
have them, so an edge finds the numbers of all heads in one place. Not here: heads with graphs of their own, and long
rows, whose keys need tiles (:mod:`.edges`).

The forward pass and the first half of the backward pass go over queries. The second half goes over keys, whose edges
are listed first. So each sum has one owner, and results do not depend on the number of threads.

Names: a task takes rows ``begin .. end - 1``. ``width``, ``value_width`` and ``depth`` are the channels of keys, values
and features, padded to a multiple of 16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .channels import lanes_of, to_array, to_padded_array, unpad_channels
from .simd import exp, lane_sum, load, peek, poke, splat, store
from .threads import numba_kernel, run, split, task_count

# ------------------------------------------------------------------ edges by rows


@numba_kernel
def _sort_edges(index, rowptr, order):
    # Count the edges of each row.
    rowptr[:] = 0
    for edge in range(index.size):
        rowptr[index[edge] + 1] += 1
    for row in range(rowptr.size - 1):
        rowptr[row + 1] += rowptr[row]
    # Put each edge behind the previous ones of its row.
    position = rowptr[:-1].copy()
    for edge in range(index.size):
        order[position[index[edge]]] = edge
        position[index[edge]] += 1


def _sorted_edges(rows: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rowptr, order = np.empty(num_rows + 1, np.int64), np.empty(len(rows), np.int64)
    _sort_edges(rows, rowptr, order)
    return rowptr, order


# ------------------------------------------------------------------ kernels


@njit(inline="always")
def _edge_dot(vectors, of_row, ends, of_token, width, row_features, feature, edge, depth, zero):
    """Dot product of a row's vector with that at the other end of an edge, plus that of their features."""
    dots = splat(zero, 16)
    for c in range(0, width, 16):
        dots = dots + load(vectors, of_row * width + c, 16) * load(ends, of_token * width + c, 16)
    for c in range(0, depth, 16):
        dots = dots + load(row_features, of_row * depth + c, 16) * load(feature, edge * depth + c, 16)
    return lane_sum(dots)


@njit(inline="always")
def _store_sums(
    out, mean, row, factors, heads, start, count, col, ends, width, lanes, feature, depth, depth_lanes, zero
):
    """Sums over a row's edges, by a factor for each head, of the vectors at their ends and of their features."""
    for head in range(heads):
        of_row = row * heads + head
        for c in range(0, width, lanes):
            sums = splat(zero, lanes)
            for t in range(count):
                offset = (peek(col, start + t) * heads + head) * width + c
                sums = sums + peek(factors, t * heads + head) * load(ends, offset, lanes)
            store(out, of_row * width + c, sums)
        for c in range(0, depth, depth_lanes):
            sums = splat(zero, depth_lanes)
            for t in range(count):
                sums = sums + peek(factors, t * heads + head) * load(feature, (start + t) * depth + c, depth_lanes)
            store(mean, of_row * depth + c, sums)


@cache
def _compile_attention(width, value_width, depth):
    value_lanes, feature_lanes = lanes_of(value_width), lanes_of(depth)

    @numba_kernel
    def attention(
        begin, end, heads, longest, query, key, value, edge_query, feature, bias, keep, rowptr, col, scale, out, mean,
        weight,
    ):  # fmt: skip
        zero, one, low = query.dtype.type(0), query.dtype.type(1), query.dtype.type(-np.inf)
        buffer = np.empty(longest * heads + 16, query.dtype)
        top, total = np.empty(heads, query.dtype), np.empty(heads, query.dtype)
        for row in range(begin, end):
            start, count = peek(rowptr, row), peek(rowptr, row + 1) - peek(rowptr, row)
            top[:], total[:] = low, zero
            # Compute the logit of each edge and head, and the largest of each head.
            for t in range(count):
                edge = start + t
                for head in range(heads):
                    of_row, of_token = row * heads + head, peek(col, edge) * heads + head
                    logit = scale * _edge_dot(
                        query, of_row, key, of_token, width, edge_query, feature, edge, depth, zero
                    )
                    if bias.size:
                        logit += peek(bias, edge * heads + head)
                    poke(buffer, t * heads + head, logit)
                    top[head] = max(top[head], logit)
            # Take exponentials, sixteen at a time, and add them up.
            for t in range(0, count * heads, heads):
                for head in range(heads):
                    if top[head] > low:
                        poke(buffer, t + head, peek(buffer, t + head) - top[head])
            for t in range(0, count * heads, 16):
                store(buffer, t, exp(load(buffer, t, 16)))
            for t in range(0, count * heads, heads):
                for head in range(heads):
                    total[head] += peek(buffer, t + head)
            # Divide by the sums; then drop weights.
            for head in range(heads):
                total[head] = one / total[head] if total[head] != zero else zero
            for t in range(0, count * heads, heads):
                for head in range(heads):
                    share, place = peek(buffer, t + head) * total[head], start * heads + t + head
                    poke(weight, place, share)
                    poke(buffer, t + head, share * peek(keep, place) if keep.size else share)
            # Add up the values and the features of the edges.
            _store_sums(
                out, mean, row, buffer, heads, start, count, col, value, value_width, value_lanes, feature, depth,
                feature_lanes, zero,
            )  # fmt: skip

    return attention


@cache
def _compile_backward_of_queries(width, value_width, depth):
    lanes, feature_lanes = lanes_of(width), lanes_of(depth)

    @numba_kernel
    def backward_of_queries(
        begin, end, heads, longest, grad_out, grad_mean, grad_weight, query, key, value, edge_query, feature, keep,
        rowptr, col, weight, scale, dquery, dedge_query, dfeature, dlogit,
    ):  # fmt: skip
        zero = query.dtype.type(0)
        slope, share = np.empty(longest * heads, query.dtype), np.empty(longest * heads, query.dtype)
        average = np.empty(heads, query.dtype)
        for row in range(begin, end):
            start, count = peek(rowptr, row), peek(rowptr, row + 1) - peek(rowptr, row)
            average[:] = zero
            # Compute the gain of each edge, the derivative by its weight, and the average gain of each head.
            for t in range(count):
                edge = start + t
                for head in range(heads):
                    of_row, of_token = row * heads + head, peek(col, edge) * heads + head
                    place = edge * heads + head
                    gain = _edge_dot(
                        grad_out, of_row, value, of_token, value_width, grad_mean, feature, edge, depth, zero
                    )
                    if keep.size:
                        gain *= peek(keep, place)
                    if grad_weight.size:
                        gain += peek(grad_weight, place)
                    average[head] += peek(weight, place) * gain
                    poke(slope, t * heads + head, gain)
                    poke(share, t * heads + head, peek(weight, place) * (peek(keep, place) if keep.size else 1))
            # The derivative by a logit is the weight times what the gain is above the average.
            for t in range(0, count * heads, heads):
                for head in range(heads):
                    place = start * heads + t + head
                    grad = peek(weight, place) * (peek(slope, t + head) - average[head])
                    poke(dlogit, place, grad)
                    poke(slope, t + head, grad * scale)
            # Add up the gradients of the query.
            _store_sums(
                dquery, dedge_query, row, slope, heads, start, count, col, key, width, lanes, feature, depth,
                feature_lanes, zero,
            )  # fmt: skip
            # Add up the gradients of the features over the heads.
            for t in range(count if dfeature.size else 0):
                for c in range(0, depth, feature_lanes):
                    sums = splat(zero, feature_lanes)
                    for head in range(heads):
                        offset = (row * heads + head) * depth + c
                        sums = sums + peek(slope, t * heads + head) * load(edge_query, offset, feature_lanes)
                        sums = sums + peek(share, t * heads + head) * load(grad_mean, offset, feature_lanes)
                    store(dfeature, (start + t) * depth + c, sums)

    return backward_of_queries


@cache
def _compile_backward_of_keys(width, value_width):
    lanes, value_lanes = lanes_of(width), lanes_of(value_width)

    @numba_kernel
    def backward_of_keys(
        begin, end, heads, grad_out, query, keep, colptr, edges, edge_row, weight, dlogit, scale, dkey, dvalue
    ):
        zero = query.dtype.type(0)
        for token in range(begin, end):
            start, stop = peek(colptr, token), peek(colptr, token + 1)
            for head in range(heads):
                # Add up the gradients of the key over its edges.
                for c in range(0, width, lanes):
                    sums = splat(zero, lanes)
                    for t in range(start, stop):
                        edge = peek(edges, t)
                        offset = (peek(edge_row, edge) * heads + head) * width + c
                        sums = sums + peek(dlogit, edge * heads + head) * load(query, offset, lanes)
                    store(dkey, (token * heads + head) * width + c, sums * scale)
                # And those of its value.
                for c in range(0, value_width, value_lanes):
                    sums = splat(zero, value_lanes)
                    for t in range(start, stop):
                        edge = peek(edges, t)
                        share, offset = peek(weight, edge * heads + head), peek(edge_row, edge) * heads + head
                        if keep.size:
                            share *= peek(keep, edge * heads + head)
                        sums = sums + share * load(grad_out, offset * value_width + c, value_lanes)
                    store(dvalue, (token * heads + head) * value_width + c, sums)

    return backward_of_keys


# ------------------------------------------------------------------ the ops


def sort_edges(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    rowptr, order = _sorted_edges(index.contiguous().numpy(), num_rows)
    return torch.from_numpy(rowptr), torch.from_numpy(order)


def _token_rows(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    """``[N, H, C]`` as ``[N*H, width]``, without elements for None."""
    return to_array(None, like)[:, None] if tensor is None else to_padded_array(tensor, like)


def _numbers(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    """All numbers of a tensor, and none for None: arrays of one dimension, for which a kernel is compiled once."""
    return to_array(tensor, like).ravel()


def _tasks(offsets: np.ndarray, steps_per_edge: int, *arguments: Any) -> list[tuple[Any, ...]]:
    return [(*piece, *arguments) for piece in split(offsets, task_count(steps_per_edge * int(offsets[-1]), 3))]


def graph_attention(
    query: Tensor, key: Tensor, value: Tensor, edge_query: Tensor | None, feature: Tensor | None, bias: Tensor | None,
    keep: Tensor | None, rowptr: Tensor, col: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = query.shape[1]
    q, k, v, e = (_token_rows(x, query) for x in (query, key, value, edge_query))
    f = _token_rows(None if feature is None else feature[:, None], query)
    width, value_width, depth = q.shape[1], v.shape[1], 0 if feature is None else f.shape[1]
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    out, mean = (torch.from_numpy(q).new_empty(len(query), heads, size) for size in (value_width, depth))
    weight = out.new_empty(len(tokens), heads)
    tasks = _tasks(
        offsets, heads * (width + value_width + 2 * depth), heads, int(np.diff(offsets).max(initial=0)), q, k, v,
        e, f, _numbers(bias, query), _numbers(keep, query), offsets, tokens, q.dtype.type(scale),
        *(x.view(-1).numpy() for x in (out, mean, weight)),
    )  # fmt: skip
    run(_compile_attention(width, value_width, depth), tasks)
    mean = mean.to(query.dtype) if edge_query is None else unpad_channels(mean, edge_query)
    return unpad_channels(out, value), mean, weight


def graph_attention_backward(
    grad_out: Tensor, grad_mean: Tensor | None, grad_weight: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    edge_query: Tensor | None, feature: Tensor | None, keep: Tensor | None, rowptr: Tensor, col: Tensor,
    weight: Tensor, scale: float, need_feature: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads, num_keys = query.shape[1], key.shape[0]
    g, gm, q, k, v, e = (_token_rows(x, query) for x in (grad_out, grad_mean, query, key, value, edge_query))
    f = _token_rows(None if feature is None else feature[:, None], query)
    width, value_width, depth = q.shape[1], v.shape[1], 0 if feature is None else f.shape[1]
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    like, factors, weights = torch.from_numpy(q), _numbers(keep, query), _numbers(weight, query)
    dquery, dedge_query = (like.new_empty(len(query), heads, size) for size in (width, depth))
    dkey, dvalue = (like.new_empty(num_keys, heads, size) for size in (width, value_width))
    dfeature, dlogit = like.new_empty(len(tokens) if need_feature else 0, 1, depth), like.new_empty(len(tokens), heads)
    tasks = _tasks(
        offsets, heads * (2 * width + value_width + 3 * depth), heads, int(np.diff(offsets).max(initial=0)),
        g, gm, _numbers(grad_weight, query), q, k, v, e, f, factors, offsets, tokens, weights, q.dtype.type(scale),
        *(x.view(-1).numpy() for x in (dquery, dedge_query, dfeature, dlogit)),
    )  # fmt: skip
    run(_compile_backward_of_queries(width, value_width, depth), tasks)
    colptr, edges = _sorted_edges(tokens, num_keys)
    edge_row = np.repeat(np.arange(len(query)), np.diff(offsets))
    tasks = _tasks(
        colptr, heads * (width + value_width), heads, g, q, factors, colptr, edges, edge_row, weights,
        *(dlogit.view(-1).numpy(), q.dtype.type(scale), dkey.view(-1).numpy(), dvalue.view(-1).numpy()),
    )  # fmt: skip
    run(_compile_backward_of_keys(width, value_width), tasks)
    return (
        unpad_channels(dquery, query), unpad_channels(dkey, key), unpad_channels(dvalue, value),
        dedge_query if edge_query is None else unpad_channels(dedge_query, edge_query),
        dfeature[:, 0] if feature is None else unpad_channels(dfeature, feature[:, None])[:, 0],
        dlogit.to(query.dtype),
    )  # fmt: skip
