"""Ops that train indexers by imitation of attention, on the CPU: sixteen edges of a row at a time.

In and out: the tensors of ``index_score`` and ``edge_cross_entropy`` in :mod:`sbm_pyg.ops`. Not here: the reference
(:mod:`sbm_pyg.ops.reference.imitation`), and attention over the same edges (:mod:`.edges`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .channels import add_dots, clear, count_below, lanes_of, sixteen, to_array, to_padded_array, unpad_channels
from .edges import count_key_tiles, summed, units_of
from .simd import (
    at,
    exp,
    first,
    highest,
    lane_sum,
    load,
    load16,
    maximum,
    peek,
    poke,
    scratch,
    splat,
    store,
    store16,
    where_above,
)
from .threads import numba_kernel, run, split, task_count


@cache
def _compile_index_score(width):
    lanes = lanes_of(width)

    @numba_kernel
    def score(begin, end, queries, keys, small, query, weight, key, rowptr, col, out):
        tail, zero = scratch(col, 16), query.dtype.type(0)
        for row in range(begin, end):
            keys_here, stop = at(key, row // queries * keys * width), peek(rowptr, row + 1)
            for start in range(peek(rowptr, row), stop, 16):
                count, total = min(16, stop - start), splat(zero, 16)
                tokens = sixteen(at(col, start), count, tail)
                # Add the weighted ReLUs of all small heads, sixteen edges at a time.
                for s in range(row * small, (row + 1) * small):
                    dot = add_dots(splat(zero, 16), query, s * width, keys_here, width, tokens, width, lanes)
                    total = total + peek(weight, s) * maximum(splat(zero, 16), dot)  # of NaN, NaN
                store16(out, start, count, total)

    return score


@cache
def _compile_index_score_backward(width):
    lanes = lanes_of(width)

    @numba_kernel
    def score_backward(
        begin, end, unit, tiles, queries, keys, small, grad, query, weight, key, rowptr, col, dquery, dweight, dkey
    ):
        slopes, tail, zero, one = scratch(query, 16), scratch(col, 16), query.dtype.type(0), query.dtype.type(1)
        position = rowptr[begin:end].copy()
        keys_here, dkeys_here = at(key, begin // queries * keys * width), at(dkey, unit * keys * width)
        # Clear what the rows of the unit sum up.
        for s in range(begin * small, end * small):
            clear(dquery, s * width, width, zero, lanes)
            poke(dweight, s, zero)
        # Keys come in tiles whose gradients fit the second-level cache.
        for tile in range(tiles):
            first_key, limit = keys * tile // tiles, keys * (tile + 1) // tiles
            clear(dkeys_here, first_key * width, (limit - first_key) * width, zero, lanes)
            for row in range(begin, end):
                start, stop = peek(position, row - begin), peek(rowptr, row + 1)
                while start < stop and peek(col, start) < limit:
                    count = count_below(at(col, start), min(16, stop - start), limit)
                    tokens, change = sixteen(at(col, start), count, tail), load16(grad, start, count)
                    # Compute the product of each small head again; its ReLU goes to the gradient of the weight.
                    for s in range(row * small, (row + 1) * small):
                        dot = add_dots(splat(zero, 16), query, s * width, keys_here, width, tokens, width, lanes)
                        gain = first(count, change * maximum(splat(zero, 16), dot), zero)
                        poke(dweight, s, peek(dweight, s) + lane_sum(gain))
                        # Where the product is positive, the gradient reaches the small query and the keys.
                        active = where_above(dot, zero, one, splat(zero, 16))
                        store(slopes, 0, change * peek(weight, s) * active)
                        for c in range(0, width, lanes):
                            q, dq = load(query, s * width + c, lanes), load(dquery, s * width + c, lanes)
                            for t in range(count):
                                offset, slope = peek(tokens, t) * width + c, peek(slopes, t)
                                dq = dq + slope * load(keys_here, offset, lanes)
                                store(dkeys_here, offset, load(dkeys_here, offset, lanes) + slope * q)
                            store(dquery, s * width + c, dq)
                    start += count
                poke(position, row - begin, start)

    return score_backward


@cache
def _compile_edge_cross_entropy(width):
    lanes = lanes_of(width)

    @numba_kernel
    def cross_entropy(begin, end, longest, queries, keys, query, key, log_p, rowptr, col, bias, scale, loss, slope):
        room = (longest + 15) // 16 * 16
        weights, shares, tail = np.empty(room, query.dtype), np.empty(room, query.dtype), scratch(col, 16)
        zero, one = query.dtype.type(0), query.dtype.type(1)
        low, least = query.dtype.type(-np.inf), query.dtype.type(-3e38)
        for row in range(begin, end):
            keys_here, start = at(key, row // queries * keys * width), peek(rowptr, row)
            size = peek(rowptr, row + 1) - start
            # Compute logits, load logarithms of probabilities, and find the largest of both.
            high = most = splat(low, 16)
            for t in range(0, size, 16):
                count = min(16, size - t)
                tokens = sixteen(at(col, start + t), count, tail)
                logit = add_dots(splat(zero, 16), query, row * width, keys_here, width, tokens, width, lanes) * scale
                if bias.size:
                    logit = logit + load16(bias, start + t, count)
                logit, log_prob = first(count, logit, low), first(count, load16(log_p, start + t, count), low)
                high, most = maximum(logit, high), maximum(log_prob, most)
                store(weights, t, logit)
                store(shares, t, log_prob)
            top, best = highest(high), highest(most)
            top, best = top if top > low else zero, best if best > low else zero
            # Sum both softmaxes of the row, and the product of attention with the logarithms.
            total = seen = product = whole = splat(zero, 16)
            for t in range(0, size, 16):
                log_prob = load(shares, t, 16)
                weight, share = exp(load(weights, t, 16) - top), exp(log_prob - best)
                total, whole = total + weight, whole + share
                weight = weight * where_above(log_prob, low, one, splat(zero, 16))  # nothing where p = 0
                seen = seen + weight
                product = product + weight * maximum(log_prob - best, splat(least, 16))
                store(weights, t, weight)
                store(shares, t, share)
            # Write the loss of the row, for the part of the attention that lies on possible edges.
            norm, sums = lane_sum(total), lane_sum(whole)
            norm = one / norm if norm != zero else zero
            part = lane_sum(seen) * norm
            ratio = part / sums if sums != zero else zero
            poke(loss, row, part * np.log(sums) - lane_sum(product) * norm if sums != zero else zero)
            # Write the slope of each edge, for the backward pass.
            for t in range(0, size, 16):
                change = load(shares, t, 16) * ratio - load(weights, t, 16) * norm
                store16(slope, start + t, min(16, size - t), change)

    return cross_entropy


@numba_kernel
def _scale_rows(begin, end, grad, slope, rowptr, out):
    for row in range(begin, end):
        factor, stop = peek(grad, row), peek(rowptr, row + 1)
        for start in range(peek(rowptr, row), stop, 16):
            count = min(16, stop - start)
            store16(out, start, count, factor * load16(slope, start, count))


def _as_heads(query: Tensor) -> Tensor:
    """The small heads of each query one after the other, ``[H, N*S, D]``."""
    return query.flatten(1, 2)


def index_score(query: Tensor, weight: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    q, k = (to_padded_array(x, query) for x in (_as_heads(query), key))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    out, small = np.empty(len(tokens), q.dtype), query.shape[2]
    arguments = (query.shape[1], key.shape[1], small, q, to_array(weight, query).ravel(), k, offsets, tokens, out)
    pieces = split(offsets, task_count(tokens.size * small * q.shape[1], 3))
    run(_compile_index_score(q.shape[1]), [(*piece, *arguments) for piece in pieces])
    return torch.from_numpy(out).to(query.dtype)


def index_score_backward(
    grad: Tensor, query: Tensor, weight: Tensor, key: Tensor, rowptr: Tensor, col: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (to_padded_array(x, query) for x in (_as_heads(query), key))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    heads, queries, small, _ = query.shape
    threads = task_count(3 * tokens.size * small * q.shape[1])
    units = units_of(offsets, heads, key.shape[1], threads)
    dquery = torch.from_numpy(q).new_empty((heads, queries * small, q.shape[1]))
    dweight = dquery.new_empty(weight.shape)
    dkey = dquery.new_empty((len(units), key.shape[1], k.shape[1]))
    arguments: tuple[Any, ...] = (
        count_key_tiles(offsets, key.shape[1], 2 * k.itemsize * k.shape[1]), queries, key.shape[1], small,
        to_array(grad, query), q, to_array(weight, query).ravel(), k, offsets, tokens, dquery.view(-1).numpy(),
        dweight.view(-1).numpy(), dkey.view(-1).numpy(),
    )  # fmt: skip
    run(_compile_index_score_backward(q.shape[1]), [(*unit, *arguments) for unit in units], threads)
    of_query = unpad_channels(dquery, _as_heads(query)).unflatten(1, (queries, small))
    return of_query, dweight.to(weight.dtype), unpad_channels(summed(dkey, units, heads, queries), key)


def edge_cross_entropy(
    query: Tensor, key: Tensor, log_p: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, log_p.dtype))
    q, k = (to_padded_array(x, like) for x in (query, key))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    loss, slope = np.empty(len(offsets) - 1, q.dtype), np.empty(len(tokens), q.dtype)
    arguments = (
        int(np.diff(offsets).max(initial=0)), query.shape[1], key.shape[1], q, k, to_array(log_p, like), offsets,
        tokens, to_array(bias, like), q.dtype.type(scale), loss, slope,
    )  # fmt: skip
    pieces = split(offsets, task_count(tokens.size * q.shape[1], 3))
    run(_compile_edge_cross_entropy(q.shape[1]), [(*piece, *arguments) for piece in pieces])
    dtype = torch.promote_types(log_p.dtype, torch.float32)
    return torch.from_numpy(loss).view(query.shape[:2]).to(dtype), torch.from_numpy(slope).to(dtype)


def edge_cross_entropy_backward(grad: Tensor, slope: Tensor, rowptr: Tensor) -> Tensor:
    offsets, out = rowptr.contiguous().numpy(), np.empty(slope.numel(), slope.numpy().dtype)
    arguments = (to_array(grad, slope).ravel(), slope.contiguous().numpy(), offsets, out)
    run(_scale_rows, [(*piece, *arguments) for piece in split(offsets, task_count(8 * out.size, 3))])
    return torch.from_numpy(out)
