"""Edge kernels for the CPU: scores of edges, attention over edges, and their gradients, in one pass over rows.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on the CPU. Here are the kernels and the functions that
lay out memory for them. Not here: checks of what comes in, the vectors that kernels are written in (:mod:`.simd`),
threads (:mod:`.threads`).

Sixteen edges of a row at a time get their dot products with the row's query; a row's own sums stay in registers. What
bounds the backward pass is the second-level cache: each edge rewrites the gradients of its key. So keys are taken in
tiles that fit that cache, a key and its value side by side, and so their gradients. docs/kernels.md has the
measurements.

Names: a unit of work is the rows ``begin .. end - 1``. A width is a number of channels, padded to a multiple of 16.
Lanes are the channels that one instruction takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..random_words import DROPOUT
from .channels import (
    add_dots,
    clear,
    copy,
    count_below,
    lanes_of,
    sixteen,
    to_array,
    to_padded_array,
    unpad_channels,
    weigh,
)
from .random_simd import philox16
from .simd import (
    aligned_pointer,
    at,
    exp,
    first,
    highest,
    keep16,
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
)
from .threads import numba_kernel, run, split, task_count

EDGES_PER_STRIP = 512
"""Edges of a row whose logits are held at a time, between two updates of its running maximum."""
CACHE_BYTES = 2**20
"""Bytes of the second-level cache that a tile of keys may fill."""
MIN_EDGES_PER_TILE = 24
"""Least average number of edges of a row in a tile of keys; tiles are made larger to reach it."""


# ------------------------------------------------------------------ attention


@numba_kernel
def _fill_dropout_words(side, padded, seed, words):
    """Random words of the queries, or of the keys, of all heads; see :func:`.reference.random_words.dropout_words`."""
    for offset in range(0, words.size, 64):
        head, number = offset // padded, offset % padded
        philox16(number >> 2, side, 0, head | DROPOUT, seed, words, offset)


@cache
def _compile_edge_attention(width, value_width):
    lanes, value_lanes = lanes_of(width), lanes_of(value_width)

    @numba_kernel
    def attention(
        begin, end, queries, keys, query, key, value, rowptr, col, gate, bias, scale, weighted, least, grow,
        query_words, key_words, out, tops, norms,
    ):  # fmt: skip
        weight, factor, tail = scratch(query, EDGES_PER_STRIP), scratch(query, EDGES_PER_STRIP), scratch(col, 16)
        zero, one, low = query.dtype.type(0), query.dtype.type(1), query.dtype.type(-np.inf)
        for row in range(begin, end):
            # Point to the keys, values and words of the row's head.
            keys_here = at(key, row // queries * keys * width)
            values_here = at(value, row // queries * keys * value_width)
            words_here = at(key_words, row // queries * keys if key_words.size else 0)
            output = at(out, row * value_width)
            clear(output, 0, value_width, zero, value_lanes)
            top, sums, stop = low, splat(zero, 16), peek(rowptr, row + 1)
            # Take the edges in strips whose logits fit a buffer.
            for start in range(peek(rowptr, row), stop, EDGES_PER_STRIP):
                strip, count, high = at(col, start), min(EDGES_PER_STRIP, stop - start), splat(low, 16)
                # Compute sixteen scores at a time, and the largest logit of the strip.
                for t in range(0, count, 16):
                    tokens = sixteen(at(strip, t), count - t, tail)
                    logit = (
                        add_dots(splat(zero, 16), query, row * width, keys_here, width, tokens, width, lanes) * scale
                    )
                    if gate.size and not weighted:
                        logit = logit * load16(gate, start + t, count - t)
                    if bias.size:
                        logit = logit + load16(bias, start + t, count - t)
                    logit = first(count - t, logit, low)
                    high = maximum(logit, high)
                    store(weight, t, logit)
                    if key_words.size:
                        store(factor, t, keep16(words_here, tokens, peek(query_words, row), least, grow))
                # A larger maximum shrinks what has been summed so far.
                new = highest(high)
                if new > top:
                    if top > low:
                        sums = sums * np.exp(top - new)
                        for c in range(0, value_width, value_lanes):
                            store(output, c, load(output, c, value_lanes) * np.exp(top - new))
                    top = new
                # Add the weights, and sixteen weighted values at a time to the output.
                for t in range(0, count, 16):
                    p = exp(load(weight, t, 16) - (top if top > low else zero))
                    if weighted:
                        p = p * load16(gate, start + t, count - t)
                    sums = sums + p
                    store(weight, t, p * load(factor, t, 16) if key_words.size else p)
                    last = min(t + 16, count)
                    for c in range(0, value_width, value_lanes):
                        # Two sums of values run side by side, so that no addition waits for the one before.
                        even, odd = load(output, c, value_lanes), splat(zero, value_lanes)
                        for u in range(t, last - 1, 2):
                            even = even + weigh(weight, u, values_here, strip, value_width, c, value_lanes)
                            odd = odd + weigh(weight, u + 1, values_here, strip, value_width, c, value_lanes)
                        if last & 1:
                            even = even + weigh(weight, last - 1, values_here, strip, value_width, c, value_lanes)
                        store(output, c, even + odd)
            # Divide by the sum of the weights; a row without edges stays zero.
            norm = lane_sum(sums)
            poke(tops, row, top)
            poke(norms, row, norm)
            for c in range(0, value_width, value_lanes):
                store(output, c, load(output, c, value_lanes) * (one / norm if norm != zero else zero))

    return attention


@cache
def _compile_edge_attention_backward(width, value_width):
    both, wider = width + value_width, max(width, value_width)
    lanes, value_lanes, common_lanes = lanes_of(width), lanes_of(value_width), lanes_of(width, value_width)

    @numba_kernel
    def attention_backward(
        memory, begin, end, unit, tiles, queries, keys, grad_out, query, key, value, rowptr, col, gate, bias, out, lse,
        scale, weighted, least, grow, query_words, key_words, dquery, dkey, dvalue, dgate, dbias,
    ):  # fmt: skip
        slopes, weights, factor, tail = scratch(query, 16), scratch(query, 16), scratch(query, 16), scratch(col, 16)
        position = rowptr[begin:end].copy()
        zero, one = query.dtype.type(0), query.dtype.type(1)
        first_key, limit, room = begin // queries * keys, 0, (keys // tiles + 1) * both
        words_here = at(key_words, first_key if key_words.size else 0)
        # Keys come in tiles that fit the second-level cache, with their gradients.
        for tile in range(tiles):
            start, limit = limit, keys * (tile + 1) // tiles
            keys_here = at(aligned_pointer(memory), -start * both)
            dkeys_here = at(aligned_pointer(memory), room - start * both)
            values_here, dvalues_here = at(keys_here, width), at(dkeys_here, width)
            # Copy each key next to its value, and clear their gradients.
            for token in range(start, limit):
                clear(dkeys_here, token * both, both, zero, common_lanes)
                copy(keys_here, token * both, key, (first_key + token) * width, width, lanes)
                copy(values_here, token * both, value, (first_key + token) * value_width, value_width, value_lanes)
            for row in range(begin, end):
                # The mean gain of the row is the dot product of its output with the output's gradient.
                mean, shift = zero, peek(lse, row) if peek(lse, row) != -np.inf else zero
                for c in range(row * value_width, (row + 1) * value_width, value_lanes):
                    mean += lane_sum(load(grad_out, c, value_lanes) * load(out, c, value_lanes))
                if tile == 0:
                    clear(dquery, row * width, width, zero, lanes)
                start, stop = peek(position, row - begin), peek(rowptr, row + 1)
                # Take sixteen edges of the row at a time, up to the end of the tile.
                while start < stop and peek(col, start) < limit:
                    count, none = count_below(at(col, start), min(16, stop - start), limit), splat(zero, 16)
                    tokens = sixteen(at(col, start), count, tail)
                    if count < 16:  # the tile need not hold key 0
                        store(tail, 0, first(count, load(tail, 0, 16), peek(col, start)))
                    # Compute scores and gains, and recompute the weights from the log-sum.
                    score = add_dots(none, query, row * width, keys_here, both, tokens, width, lanes) * scale
                    gain = add_dots(
                        none, grad_out, row * value_width, values_here, both, tokens, value_width, value_lanes
                    )
                    some_gate = load16(gate, start, count) if gate.size else splat(one, 16)
                    logit = score if weighted else score * some_gate
                    if bias.size:
                        logit = logit + load16(bias, start, count)
                    p = exp(logit - shift)
                    if key_words.size:
                        store(factor, 0, keep16(words_here, tokens, peek(query_words, row), least, grow))
                        gain = gain * load(factor, 0, 16)
                    # Compute the gradient of each logit, of which gate and bias get theirs.
                    slope = p * (gain - mean)
                    if dgate.size:
                        store16(dgate, start, count, slope if weighted else slope * score)
                    if weighted:
                        p, slope = p * some_gate, slope * some_gate
                    if dbias.size:
                        store16(dbias, start, count, slope)
                    # Store the factors of the gradients of the values, and of the query and the keys.
                    store(weights, 0, p * load(factor, 0, 16) if key_words.size else p)
                    store(slopes, 0, (slope if weighted else slope * some_gate) * scale)
                    # Add to the gradients of the query, the keys and the values, a strip of channels at a time.
                    for c in range(0, wider, common_lanes):
                        nothing = splat(zero, common_lanes)
                        q = load(query, row * width + c, common_lanes) if c < width else nothing
                        dq = load(dquery, row * width + c, common_lanes) if c < width else nothing
                        g = load(grad_out, row * value_width + c, common_lanes) if c < value_width else nothing
                        for t in range(count):
                            offset = peek(tokens, t) * both + c
                            if c < width:
                                dq = dq + peek(slopes, t) * load(keys_here, offset, common_lanes)
                                store(dkeys_here, offset, load(dkeys_here, offset, common_lanes) + peek(slopes, t) * q)
                            if c < value_width:
                                grown = load(dvalues_here, offset, common_lanes) + peek(weights, t) * g
                                store(dvalues_here, offset, grown)
                        if c < width:
                            store(dquery, row * width + c, dq)
                    start += count
                poke(position, row - begin, start)
            # Copy the gradients of the tile to those of the unit.
            for token in range(keys * tile // tiles, limit):
                offset = unit * keys + token
                copy(dkey, offset * width, dkeys_here, token * both, width, lanes)
                copy(dvalue, offset * value_width, dvalues_here, token * both, value_width, value_lanes)

    return attention_backward


# ------------------------------------------------------------------ scores alone


@cache
def _compile_edge_dot(width):
    lanes = lanes_of(width)

    @numba_kernel
    def dot(begin, end, tiles, queries, keys, query, key, rowptr, col, out):
        tail, zero, position = scratch(col, 16), query.dtype.type(0), rowptr[begin:end].copy()
        # Keys come in tiles that fit the second-level cache; each row remembers how far it has come.
        for tile in range(tiles):
            limit = keys * (tile + 1) // tiles
            for row in range(begin, end):
                keys_here = at(key, row // queries * keys * width)
                start, stop = peek(position, row - begin), peek(rowptr, row + 1)
                while start < stop and peek(col, start) < limit:
                    count = count_below(at(col, start), min(16, stop - start), limit)
                    tokens = sixteen(at(col, start), count, tail)
                    score = add_dots(splat(zero, 16), query, row * width, keys_here, width, tokens, width, lanes)
                    store16(out, start, count, score)
                    start += count
                poke(position, row - begin, start)

    return dot


@cache
def _compile_edge_dot_backward(width):
    lanes = width if width == 128 else lanes_of(width)

    @numba_kernel
    def dot_backward(
        begin, end, unit, tiles, queries, keys, grad, query, key, rowptr, col, need_query, need_key, dquery, dkey
    ):
        position, zero = rowptr[begin:end].copy(), query.dtype.type(0)
        keys_here, dkeys_here = at(key, begin // queries * keys * width), at(dkey, unit * keys * width)
        # Keys come in tiles whose gradients fit the second-level cache.
        for tile in range(tiles):
            limit = keys * (tile + 1) // tiles
            start = keys * tile // tiles
            clear(dkeys_here, start * width, (limit - start) * width, zero, lanes)
            for row in range(begin, end):
                start, stop = peek(position, row - begin), peek(rowptr, row + 1)
                if tile + 1 < tiles:  # up to the first edge beyond the tile, by bisection
                    low = start
                    while low < stop:
                        middle = (low + stop) >> 1
                        if peek(col, middle) < limit:
                            low = middle + 1
                        else:
                            stop = middle
                    poke(position, row - begin, stop)
                # One pass over the edges of the tile serves the gradients of both sides.
                for c in range(0, width, lanes):
                    q, dq = load(query, row * width + c, lanes), splat(zero, lanes)
                    if tile:
                        dq = load(dquery, row * width + c, lanes)
                    for edge in range(start, stop):
                        offset, slope = peek(col, edge) * width + c, peek(grad, edge)
                        if need_query:
                            dq = dq + slope * load(keys_here, offset, lanes)
                        if need_key:
                            store(dkeys_here, offset, load(dkeys_here, offset, lanes) + slope * q)
                    store(dquery, row * width + c, dq)

    return dot_backward


# ------------------------------------------------------------------ memory and work


def units_of(rowptr: np.ndarray, heads: int, keys: int, threads: int) -> list[tuple[int, int, int]]:
    """Cut rows into units of backward work: ``(begin, end, unit)``, largest first.

    Unit h belongs to head h; :func:`summed` adds further units to it. Each unit has sums of its own for all keys, which
    cost time and memory. So a head is one unit if that keeps all threads busy, and otherwise as many as needed, if
    there are many more edges than keys.
    """
    rows = (len(rowptr) - 1) // max(heads, 1)
    sizes = [int(rowptr[(head + 1) * rows] - rowptr[head * rows]) for head in range(heads)]
    # Split heads until a greedy schedule keeps all threads busy to within 15 %.
    for refine in (1, 2, 4):
        goal = max(sum(sizes) / (refine * threads), 16 * keys, 1)
        parts = [max(1, round(size / goal)) for size in sizes]
        busy = [0.0] * threads
        for work in sorted((size / n for size, n in zip(sizes, parts, strict=True) for _ in range(n)), reverse=True):
            busy[busy.index(min(busy))] += work
        if max(busy) * threads <= 1.15 * sum(sizes):
            break
    # The first unit of a head has the sums of the head; others have sums of their own.
    units, extra = [], heads
    for head in range(heads):
        spans = split(rowptr[head * rows : (head + 1) * rows + 1], parts[head]) or [(0, 0)]
        for part, (begin, end) in enumerate(spans):
            units.append((head * rows + begin, head * rows + end, extra if part else head))
            extra += part > 0
    return sorted(units, key=lambda unit: rowptr[unit[0]] - rowptr[unit[1]])


def summed(sums: Tensor, units: list[tuple[int, int, int]], heads: int, queries: int) -> Tensor:
    """Gradients of keys, ``[H, M, width]``, from gradients of units."""
    for begin, _, unit in units:
        if unit >= heads:
            sums[begin // queries] += sums[unit]
    return sums[:heads]


def count_key_tiles(rowptr: np.ndarray, keys: int, bytes_per_key: int) -> int:
    """Number of tiles of keys, so that each tile fits the cache; fewer if rows get too few edges per tile."""
    tiles, rows = -(-keys * bytes_per_key // CACHE_BYTES), max(len(rowptr) - 1, 1)
    return max(1, min(tiles, int(rowptr[-1]) // (MIN_EDGES_PER_TILE * rows)))


def dropout_tables(query: Tensor, key: Tensor, dropout: float, seed: int, dtype: np.dtype) -> tuple[Any, ...]:
    """Arguments of dropout: a threshold, the factor of kept weights, and the words of queries and of keys.

    Mixed words above the threshold keep an edge. Without dropout the tables of words are empty.
    """
    threshold, tables = round(float(dropout) * 2**32), []
    for side, tokens in enumerate((query, key)):
        heads, count = tokens.shape[:2]
        padded = -(-count // 64) * 64
        words = np.empty(heads * padded if threshold else 0, np.uint32)
        if threshold:
            _fill_dropout_words(side, padded, np.uint64(seed % 2**64), words)
            words = words.reshape(heads, padded)[:, :count].ravel()
        tables.append(words)
    return np.uint32(max(threshold - 1, 0)), dtype.type(1 / (1 - dropout)), *tables


# ------------------------------------------------------------------ the ops


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    q, k = (to_padded_array(x, query) for x in (query, key))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    out = np.empty(len(tokens), q.dtype)
    tiles = count_key_tiles(offsets, key.shape[1], k.itemsize * k.shape[1])
    arguments = (tiles, query.shape[1], key.shape[1], q, k, offsets, tokens, out)
    pieces = split(offsets, task_count(tokens.size * q.shape[1], 3))
    run(_compile_edge_dot(q.shape[1]), [(*piece, *arguments) for piece in pieces])
    return torch.from_numpy(out).to(query.dtype)


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    q, k = (to_padded_array(x, query) for x in (query, key))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    threads = task_count(2 * tokens.size * q.shape[1])
    units = units_of(offsets, query.shape[0], key.shape[1], threads)
    dquery = torch.from_numpy(q).new_empty((*query.shape[:2], q.shape[1]))
    dkey = dquery.new_empty((len(units), key.shape[1], k.shape[1]))
    arguments = (
        count_key_tiles(offsets, key.shape[1], 2 * k.itemsize * k.shape[1]), query.shape[1], key.shape[1],
        to_array(grad, query), q, k, offsets, tokens, need_query, need_key, dquery.view(-1).numpy(),
        dkey.view(-1).numpy(),
    )  # fmt: skip
    run(_compile_edge_dot_backward(q.shape[1]), [(*unit, *arguments) for unit in units], threads)
    return unpad_channels(dquery, query), unpad_channels(summed(dkey, units, *query.shape[:2]), key)


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None,
    scale: float, gate_form: str, dropout: float, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (to_padded_array(x, query) for x in (query, key, value))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    out = torch.from_numpy(q).new_empty((*query.shape[:2], v.shape[1]))
    tops, norms = out.new_empty(query.shape[:2]), out.new_empty(query.shape[:2])
    arguments = (
        query.shape[1], key.shape[1], q, k, v, offsets, tokens, to_array(gate, query), to_array(bias, query),
        q.dtype.type(scale), gate is not None and gate_form == "weight",
        *dropout_tables(query, key, dropout, seed, q.dtype), out.view(-1).numpy(), tops.view(-1).numpy(),
        norms.view(-1).numpy(),
    )  # fmt: skip
    pieces = split(offsets, task_count(tokens.size * (q.shape[1] + v.shape[1]), 3))
    run(_compile_edge_attention(q.shape[1], v.shape[1]), [(*piece, *arguments) for piece in pieces])
    return unpad_channels(out, value), norms.log_().add_(tops)


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None,
    bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int,
    need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (to_padded_array(x, query) for x in (query, key, value))
    offsets, tokens = (x.contiguous().numpy() for x in (rowptr, col))
    threads = task_count(3 * tokens.size * (q.shape[1] + v.shape[1]))
    units = units_of(offsets, query.shape[0], key.shape[1], threads)
    tiles = count_key_tiles(offsets, key.shape[1], 2 * k.itemsize * (k.shape[1] + v.shape[1]))
    dquery = torch.from_numpy(q).new_empty((*query.shape[:2], q.shape[1]))
    dkey, dvalue = (dquery.new_empty((len(units), key.shape[1], x.shape[1])) for x in (k, v))
    sizes = (len(tokens) if need and x is not None else 0 for x, need in ((gate, need_gate), (bias, need_bias)))
    dgate, dbias = (np.empty(size, q.dtype) for size in sizes)
    arguments = (
        tiles, query.shape[1], key.shape[1], to_padded_array(grad_out, query), q, k, v, offsets, tokens,
        to_array(gate, query), to_array(bias, query), to_padded_array(out, query), to_array(lse, query).reshape(-1),
        q.dtype.type(scale), gate is not None and gate_form == "weight",
        *dropout_tables(query, key, dropout, seed, q.dtype), dquery.view(-1).numpy(), dkey.view(-1).numpy(),
        dvalue.view(-1).numpy(), dgate, dbias,
    )  # fmt: skip
    room = 2 * (key.shape[1] // tiles + 1) * (k.shape[1] + v.shape[1]) + 64

    def work(*arguments):  # numpy backs large arrays with huge pages, malloc does not
        _compile_edge_attention_backward(k.shape[1], v.shape[1])(np.empty(room, q.dtype), *arguments)

    run(work, [(*unit, *arguments) for unit in units], threads)
    return (
        unpad_channels(dquery, query),
        unpad_channels(summed(dkey, units, *query.shape[:2]), key),
        unpad_channels(summed(dvalue, units, *query.shape[:2]), value),
        torch.from_numpy(dgate).to(query.dtype if gate is None else gate.dtype),
        torch.from_numpy(dbias).to(query.dtype if bias is None else bias.dtype),
    )
