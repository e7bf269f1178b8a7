"""Attention over blocks of tokens on the CPU: products of small matrices, four rows at a time.

In and out: as :mod:`sbm_pyg.ops.reference.blocks`. All keys of a block meet some queries at a time, in a strip of
scores with a row for each key and a column for each query. So maxima and sums over keys need no operation across lanes,
and strips stay in the first-level cache. No key is moved; queries are transposed once for all their keys. Not here:
vectors (:mod:`.simd`), threads (:mod:`.threads`).

Names: a unit of work is the rows ``begin .. end - 1``, each a query block of a head. ``room`` is the block size padded
to a multiple of 16, as widths are. ``query_side`` and ``key_side`` hold the number of blocks, the number of tokens of a
head, and for each block its first token, its length, and its position in its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..reference import blocks as reference_blocks
from ..segments import Rows
from ..tiles import Cut, cut_rows
from .channels import clear, to_array, to_padded_array, unpad_channels
from .edges import dropout_tables, summed, units_of
from .simd import (
    aligned_pointer,
    at,
    but_first,
    exp,
    keep16,
    lane_sum,
    load,
    maximum,
    peek,
    poke,
    scratch,
    splat,
    store,
    store16,
    transpose16,
)
from .threads import numba_kernel, run, split, task_count

MIN_SHIFT = -1e38
"""Lower bound on the number that is subtracted from logits."""
# Lanes of a row that stay in registers with those of three others: eight of 16 with AVX-512, and of 8 with AVX2
MAX_LANES = 32 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 16


# -------------------------------------------------------------------------------------------------------------- loops


@njit(inline="always")
def multiply(
    out, to, pitch, zero, fresh, left, begin, stride, step, rows, right_rows, start, width, count, lanes
):  # fmt: skip
    """Four rows of a product of matrices, ``lanes`` columns of each: ``out[r] (+)= sum_k left[r, k] right_rows[k]``.

    ``out[r]`` is at ``to + r * pitch``, ``left[r, k]`` at ``begin + r * stride + k * step`` and ``right_rows[k]`` at
    ``start + k * width``. Where there are fewer than four rows, the last is done again. ``fresh`` overwrites ``out``,
    otherwise it is added to.
    """
    # Missing rows repeat the last one, so four sums always run side by side.
    far, farther, last = min(1, rows - 1), min(2, rows - 1), min(3, rows - 1)
    one, two, three, four = begin, begin + far * stride, begin + farther * stride, begin + last * stride
    a, b, c, d = splat(zero, lanes), splat(zero, lanes), splat(zero, lanes), splat(zero, lanes)
    if not fresh:
        a, b = load(out, to, lanes), load(out, to + far * pitch, lanes)
        c, d = load(out, to + farther * pitch, lanes), load(out, to + last * pitch, lanes)
    for k in range(count):
        row = load(right_rows, start + k * width, lanes)
        a = a + peek(left, one + k * step) * row
        b = b + peek(left, two + k * step) * row
        c = c + peek(left, three + k * step) * row
        d = d + peek(left, four + k * step) * row
    store(out, to, a)
    store(out, to + far * pitch, b)
    store(out, to + farther * pitch, c)
    store(out, to + last * pitch, d)


@njit(inline="always")
def strip(out, zero, keys, start, count, width, columns, room, lanes):
    """``out[j, i]``, the products of ``count`` rows of keys from ``start`` on with ``lanes`` transposed queries."""
    for j in range(0, count, 4):
        multiply(
            out, j * lanes, lanes, zero, True, keys, (start + j) * width, width, 1, count - j, columns, 0, room, width,
            lanes,
        )  # fmt: skip


@njit(inline="always")
def transpose(out, room, zero, x, start, count, width):
    """Transposes ``count`` rows of ``x`` from ``start`` on, into ``[width, room]`` with zeros behind them."""
    # Transpose squares of 16 x 16 in registers, and the last rows number by number.
    whole = count - count % 16
    for i in range(0, whole, 16):
        for c in range(0, width, 16):
            transpose16(out, c * room + i, room, x, (start + i) * width + c, width)
    for i in range(whole, count):
        for c in range(width):
            poke(out, c * room + i, peek(x, (start + i) * width + c))
    for i in range(count, room):
        for c in range(width):
            poke(out, c * room + i, zero)


@njit(inline="always")
def strip_logits(scores, j, t, lanes, scale, bias, bias_offset, block_size, queries, early, low):
    """Scaled scores of key j with the sixteen queries from t on in a strip, with bias, as the exponential takes them.

    The bias lies from ``bias_offset`` on, a row for each query. The first ``early`` queries of the strip do not attend
    to the key.
    """
    if bias.size:
        for k in range(t, min(t + 16, queries)):
            score = peek(scores, j * lanes + k) * scale
            poke(scores, j * lanes + k, score + peek(bias, bias_offset + k * block_size + j))
        logit = load(scores, j * lanes + t, 16)
    else:
        logit = load(scores, j * lanes + t, 16) * scale
    return but_first(early - t, logit, low)


@njit(inline="always")
def count_up(numbers, start, count):
    """The numbers of sixteen tokens from ``start`` on; after ``count`` tokens, the last number repeats."""
    for k in range(16):
        poke(numbers, k, start + min(k, count - 1))


# ----------------------------------------------------------------------------------------------------------- attention


@cache
def _compile_block_attention(lanes, width, value_width):
    value_lanes = _lane_count(value_width)

    @numba_kernel
    def attention(
        memory, room, begin, end, block_size, is_causal, query_side, key_side, query, key, value, rowptr, col, bias,
        scale, least, grow, query_words, key_words, out, tops, norms,
    ):  # fmt: skip
        queries, tokens, starts, lengths, positions = query_side
        _, key_tokens, key_starts, key_lengths, key_positions = key_side
        zero, one = query.dtype.type(0), query.dtype.type(1)
        low, lowest = query.dtype.type(-np.inf), query.dtype.type(MIN_SHIFT)
        # The memory of a task holds a strip of scores, the transposed queries, maxima, sums and factors.
        scores = aligned_pointer(memory)
        columns = at(scores, room * lanes)
        top = at(columns, room * width)
        norm, factor, numbers = at(top, room), at(top, 2 * room), scratch(rowptr, 16)
        for row in range(begin, end):
            block, head = row % queries, row // queries
            start, count = head * tokens + peek(starts, block), peek(lengths, block)
            # Transpose the queries of the block once, for all its keys.
            transpose(columns, room, zero, query, start, count, width)
            clear(top, 0, room, low, 16)
            clear(norm, 0, room, zero, 16)
            clear(out, start * value_width, count * value_width, zero, value_lanes)
            for edge in range(peek(rowptr, row), peek(rowptr, row + 1)):
                other = peek(col, edge)
                first, keys = head * key_tokens + peek(key_starts, other), peek(key_lengths, other)
                # Query i of its block attends to key j of the other block if j <= i + lag.
                lag = block_size * (peek(positions, block) - peek(key_positions, other)) if is_causal else block_size
                for s in range(0, count, lanes):
                    filled, bias_offset = min(lanes, count - s), (edge * block_size + s) * block_size
                    # A strip of scores has a row for each key and a column for each query.
                    strip(scores, zero, key, first, keys, width, at(columns, s), room, lanes)
                    for t in range(0, filled, 16):
                        high, sums = load(top, s + t, 16), splat(zero, 16)
                        # Find the largest logit of each query, in this strip and in those before.
                        for j in range(keys):
                            logit = strip_logits(
                                scores, j, t, lanes, scale, bias, bias_offset, block_size, filled, j - lag - s, low
                            )
                            high = maximum(logit, high)
                            store(scores, j * lanes + t, logit)
                        shift = maximum(high, splat(lowest, 16))
                        if key_words.size:
                            count_up(numbers, start + s + t, filled - t)
                        # Compute the weights of the strip, and drop some of them after they are summed.
                        for j in range(keys):
                            p = exp(load(scores, j * lanes + t, 16) - shift)
                            sums = sums + p
                            if key_words.size:
                                p = p * keep16(query_words, numbers, peek(key_words, first + j), least, grow)
                            store(scores, j * lanes + t, p)
                        # A larger maximum shrinks the sums, and the output in the next loop.
                        changed = exp(load(top, s + t, 16) - shift)
                        store(norm, s + t, load(norm, s + t, 16) * changed + sums)
                        store(top, s + t, high)
                        store(factor, s + t, changed)
                    # Add the weighted values to the output, four queries at a time.
                    for i in range(0, filled, 4):
                        for c in range(0, value_width, value_lanes):
                            to = (start + s + i) * value_width + c
                            for k in range(min(4, filled - i)):
                                here = to + k * value_width
                                store(out, here, load(out, here, value_lanes) * peek(factor, s + i + k))
                            multiply(
                                out, to, value_width, zero, False, scores, i, 1, lanes, filled - i, value,
                                first * value_width + c, value_width, keys, value_lanes,
                            )  # fmt: skip
            # Divide by the sums of the weights; a query without keys stays zero.
            for i in range(count):
                sums = peek(norm, i)
                for c in range((start + i) * value_width, (start + i + 1) * value_width, value_lanes):
                    store(out, c, load(out, c, value_lanes) * (one / sums if sums != zero else zero))
                poke(tops, start + i, peek(top, i))
                poke(norms, start + i, sums)

    return attention


@cache
def _compile_block_attention_backward(lanes, width, value_width):
    query_lanes, value_lanes = _lane_count(width), _lane_count(value_width)

    @numba_kernel
    def backward(
        memory, room, begin, end, unit, block_size, is_causal, query_side, key_side, grad_out, query, key, value,
        rowptr, col, bias, out, lse, scale, least, grow, query_words, key_words, dquery, dkey, dvalue, dbias,
    ):  # fmt: skip
        queries, tokens, starts, lengths, positions = query_side
        _, key_tokens, key_starts, key_lengths, key_positions = key_side
        zero, low, lowest = query.dtype.type(0), query.dtype.type(-np.inf), query.dtype.type(MIN_SHIFT)
        # The memory of a task holds two strips, queries and gradients transposed, means and log-sums.
        scores = aligned_pointer(memory)
        gains = at(scores, room * lanes)
        columns = at(gains, room * lanes)
        grad_columns = at(columns, room * width)
        mean = at(grad_columns, room * value_width)
        shift, numbers = at(mean, room), scratch(rowptr, 16)
        first_sum, last_sum = unit * key_tokens * width, (unit + 1) * key_tokens * width
        clear(dkey, first_sum, key_tokens * width, zero, query_lanes)
        clear(dvalue, unit * key_tokens * value_width, key_tokens * value_width, zero, value_lanes)
        for row in range(begin, end):
            block, head = row % queries, row // queries
            start, count = head * tokens + peek(starts, block), peek(lengths, block)
            # Transpose the queries of the block and the gradients of their outputs.
            transpose(columns, room, zero, query, start, count, width)
            transpose(grad_columns, room, zero, grad_out, start, count, value_width)
            clear(dquery, start * width, count * width, zero, query_lanes)
            clear(mean, 0, room, zero, 16)
            clear(shift, 0, room, zero, 16)
            # Compute the mean gain of each query, and load its log-sum.
            for i in range(count):
                sums = splat(zero, value_lanes)
                for c in range((start + i) * value_width, (start + i + 1) * value_width, value_lanes):
                    sums = sums + load(grad_out, c, value_lanes) * load(out, c, value_lanes)
                poke(mean, i, lane_sum(sums))
                poke(shift, i, max(peek(lse, start + i), lowest))
            for edge in range(peek(rowptr, row), peek(rowptr, row + 1)):
                other = peek(col, edge)
                unit_first = unit * key_tokens + peek(key_starts, other)
                first = head * key_tokens + peek(key_starts, other)
                keys = peek(key_lengths, other)
                # Query i of its block attends to key j of the other block if j <= i + lag.
                lag = block_size * (peek(positions, block) - peek(key_positions, other)) if is_causal else block_size
                for s in range(0, count, lanes):
                    filled, bias_offset = min(lanes, count - s), (edge * block_size + s) * block_size
                    # Compute scores and gains, with a row for each key and a column for each query.
                    strip(scores, zero, key, first, keys, width, at(columns, s), room, lanes)
                    strip(gains, zero, value, first, keys, value_width, at(grad_columns, s), room, lanes)
                    for t in range(0, filled, 16):
                        lse_here, mean_here = load(shift, s + t, 16), load(mean, s + t, 16)
                        if key_words.size:
                            count_up(numbers, start + s + t, filled - t)
                        # Write the weights over the scores, and the gradients of the logits over the gains.
                        for j in range(keys):
                            logit = strip_logits(
                                scores, j, t, lanes, scale, bias, bias_offset, block_size, filled, j - lag - s, low
                            )
                            p, gain = exp(logit - lse_here), load(gains, j * lanes + t, 16)
                            used = p
                            if key_words.size:
                                drop = keep16(query_words, numbers, peek(key_words, first + j), least, grow)
                                used, gain = p * drop, gain * drop
                            store(scores, j * lanes + t, used)
                            slope = p * but_first(j - lag - s - t, gain - mean_here, zero)
                            store(gains, j * lanes + t, slope)
                    # The bias gets the gradients of the logits as they are.
                    if dbias.size:
                        for i in range(filled):
                            for j in range(keys):
                                poke(dbias, bias_offset + i * block_size + j, peek(gains, j * lanes + i))
                    # Add to the gradients of values and keys, four keys at a time.
                    for j in range(0, keys, 4):
                        for c in range(0, value_width, value_lanes):
                            multiply(
                                dvalue, (unit_first + j) * value_width + c, value_width, zero, False, scores, j * lanes,
                                lanes, 1, keys - j, grad_out, (start + s) * value_width + c, value_width, filled,
                                value_lanes,
                            )  # fmt: skip
                        for c in range(0, width, query_lanes):
                            multiply(
                                dkey, (unit_first + j) * width + c, width, zero, False, gains, j * lanes, lanes, 1,
                                keys - j, query, (start + s) * width + c, width, filled, query_lanes,
                            )  # fmt: skip
                    # Add to the gradients of queries, four queries at a time.
                    for i in range(0, filled, 4):
                        for c in range(0, width, query_lanes):
                            multiply(
                                dquery, (start + s + i) * width + c, width, zero, False, gains, i, 1, lanes,
                                filled - i, key, first * width + c, width, keys, query_lanes,
                            )  # fmt: skip
            # The scale of the scores comes last, once for each number.
            for c in range(start * width, (start + count) * width, query_lanes):
                store(dquery, c, load(dquery, c, query_lanes) * scale)
        for c in range(first_sum, last_sum, query_lanes):
            store(dkey, c, load(dkey, c, query_lanes) * scale)

    return backward


@cache
def _compile_pair_gains(lanes, width, value_width):
    @numba_kernel
    def gains(
        memory, room, begin, end, block_size, is_causal, query_side, key_side, grad_out, query, key, value, rowptr, col,
        bias, scale, tops, norms, means,
    ):  # fmt: skip
        queries, tokens, starts, lengths, positions = query_side
        _, key_tokens, key_starts, key_lengths, key_positions = key_side
        zero, tiny = query.dtype.type(0), query.dtype.type(-1 / MIN_SHIFT)
        low, lowest = query.dtype.type(-np.inf), query.dtype.type(MIN_SHIFT)
        # The memory of a task holds two strips, and queries and gradients transposed.
        scores = aligned_pointer(memory)
        gains = at(scores, room * lanes)
        columns = at(gains, room * lanes)
        grad_columns = at(columns, room * width)
        for row in range(begin, end):
            block, head = row % queries, row // queries
            start, count = head * tokens + peek(starts, block), peek(lengths, block)
            if peek(rowptr, row) < peek(rowptr, row + 1):
                transpose(columns, room, zero, query, start, count, width)
                transpose(grad_columns, room, zero, grad_out, start, count, value_width)
            for edge in range(peek(rowptr, row), peek(rowptr, row + 1)):
                other = peek(col, edge)
                first, keys = head * key_tokens + peek(key_starts, other), peek(key_lengths, other)
                # Query i of its block attends to key j of the other block if j <= i + lag.
                lag = block_size * (peek(positions, block) - peek(key_positions, other)) if is_causal else block_size
                for s in range(0, count, lanes):
                    filled, bias_offset = min(lanes, count - s), (edge * block_size + s) * block_size
                    # Compute scores and gains, with a row for each key and a column for each query.
                    strip(scores, zero, key, first, keys, width, at(columns, s), room, lanes)
                    strip(gains, zero, value, first, keys, value_width, at(grad_columns, s), room, lanes)
                    for t in range(0, filled, 16):
                        top, sums, sums_gain = splat(low, 16), splat(zero, 16), splat(zero, 16)
                        # Find the largest logit of each query in this key block.
                        for j in range(keys):
                            logit = strip_logits(
                                scores, j, t, lanes, scale, bias, bias_offset, block_size, filled, j - lag - s, low
                            )
                            top = maximum(logit, top)
                            store(scores, j * lanes + t, logit)
                        shift = maximum(top, splat(lowest, 16))
                        # Sum the weights, and the weighted gains.
                        for j in range(keys):
                            p = exp(load(scores, j * lanes + t, 16) - shift)
                            sums = sums + p
                            gain = but_first(j - lag - s - t, load(gains, j * lanes + t, 16), zero)
                            sums_gain = sums_gain + p * gain
                        to = edge * block_size + s + t
                        store16(tops, to, filled - t, top)
                        store16(norms, to, filled - t, sums)
                        store16(means, to, filled - t, sums_gain / maximum(sums, splat(tiny, 16)))

    return gains


@numba_kernel
def _leave_one_out(
    begin, end, block_size, rowptr, col, logits, gains, probe_rowptr, probe_col, probe_logits, probe_gains, out,
    probe_out,
):  # fmt: skip
    """The effects of pairs and probes, summed over the queries of each: :func:`.reference.effects.leave_one_out`."""
    zero, one, low = logits.dtype.type(0), logits.dtype.type(1), logits.dtype.type(-np.inf)
    for row in range(begin, end):
        start, stop = peek(rowptr, row), peek(rowptr, row + 1)
        first, last = peek(probe_rowptr, row), peek(probe_rowptr, row + 1)
        for i in range(block_size):
            # Find the heaviest pair of the query, and the second largest logit.
            top, second, best = low, low, -1
            for edge in range(start, stop):
                logit = peek(logits, edge * block_size + i)
                if logit > top:
                    top, second, best = logit, top, edge
                elif logit > second:
                    second = logit
            others, others_gain, ratio = zero, zero, np.exp(second - top) if second > low else zero
            for edge in range(start, stop):  # weights without the heaviest, relative to the second
                if second > low and edge != best:
                    weight = np.exp(peek(logits, edge * block_size + i) - second)
                    poke(logits, edge * block_size + i, weight)
                    others += weight
                    others_gain += weight * peek(gains, edge * block_size + i)
            # Sum up the whole row, relative to its largest logit.
            heaviest = peek(gains, best * block_size + i) if best >= 0 else zero
            whole, whole_gain = one + others * ratio, heaviest + others_gain * ratio
            # The effect of a pair is its share of its gain above the mean gain of the others.
            for edge in range(start, stop):
                gain = peek(gains, edge * block_size + i)
                if edge == best:
                    change = (gain - (others_gain / others if others > zero else zero)) / whole
                elif second > low:
                    share = peek(logits, edge * block_size + i) * ratio
                    change = share / whole * (gain - (whole_gain - share * gain) / (whole - share))
                else:
                    continue
                poke(out, edge, peek(out, edge) + change)
            # A probe joins the pairs of the row; one that is a pair already has no effect.
            edge, mean = start, whole_gain / whole if best >= 0 else zero
            for probe in range(first, last):
                token, logit = peek(probe_col, probe), peek(probe_logits, probe * block_size + i)
                while edge < stop and peek(col, edge) < token:
                    edge += 1
                if logit == low or (edge < stop and peek(col, edge) == token):
                    continue
                odds = whole * np.exp(top - logit) if best >= 0 else zero
                change = (peek(probe_gains, probe * block_size + i) - mean) / (one + odds)
                poke(probe_out, probe, peek(probe_out, probe) + change)


# ----------------------------------------------------------------------------------------------------- memory and work


def _lane_count(width: int) -> int:
    return MAX_LANES if width % MAX_LANES == 0 else 16


def _cut_arrays(unpad_channels: Cut) -> tuple[Any, ...]:
    """Number of blocks and of tokens of each head; first token, length and position in the sequence of each block."""
    arrays = (x.contiguous().numpy() for x in (unpad_channels.first, unpad_channels.length, unpad_channels.position))
    return unpad_channels.count, unpad_channels.total, *arrays


def _run(
    make: Callable, tasks: list[tuple], block_size: int, q: np.ndarray, v: np.ndarray, threads: int | None = None
) -> None:
    """Run a kernel for queries and values of these widths over tasks, each with memory of its own.

    The memory holds two strips, the queries and their gradients transposed, and three numbers of each query.
    """
    room, widths = -(-block_size // 16) * 16, (q.shape[1], v.shape[1])
    size, compiled = room * (2 * MAX_LANES + sum(widths) + 3) + 64, make(_lane_count(room), *widths)
    run(lambda *task: compiled(np.empty(size, q.dtype), room, *task), tasks, threads)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, bias: Tensor | None, scale: float, dropout: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    q, k, v = (to_padded_array(x, query) for x in (query, key, value))
    offsets, key_blocks = (x.contiguous().numpy() for x in (rowptr, col))
    out = torch.from_numpy(q).new_empty((*query.shape[:2], v.shape[1]))
    tops, norms = out.new_empty(query.shape[:2]), out.new_empty(query.shape[:2])
    arguments = (
        block_size, is_causal, *map(_cut_arrays, cuts), q, k, v, offsets, key_blocks, to_array(bias, query),
        q.dtype.type(scale), *dropout_tables(query, key, dropout, seed, q.dtype),
        *(x.view(-1).numpy() for x in (out, tops, norms)),
    )  # fmt: skip
    pieces = split(offsets, task_count(key_blocks.size * block_size**2 * (q.shape[1] + v.shape[1]), 3))
    _run(_compile_block_attention, [(*piece, *arguments) for piece in pieces], block_size, q, v)
    return unpad_channels(out, value), norms.log_().add_(tops)


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, block_size: int, is_causal: bool, scale: float,
    dropout: float, seed: int, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    heads = query.shape[0]
    q, k, v = (to_padded_array(x, query) for x in (query, key, value))
    offsets, key_blocks = (x.contiguous().numpy() for x in (rowptr, col))
    threads = task_count(3 * key_blocks.size * block_size**2 * (q.shape[1] + v.shape[1]))
    units = units_of(offsets, heads, cuts[1].count, threads)
    dquery = torch.from_numpy(q).new_empty((*query.shape[:2], q.shape[1]))
    dkey, dvalue = (dquery.new_empty((len(units), key.shape[1], x.shape[1])) for x in (k, v))
    dbias = np.zeros((key_blocks.size, block_size, block_size) if bias is not None and need_bias else 0, q.dtype)
    arguments = (
        block_size, is_causal, *map(_cut_arrays, cuts), to_padded_array(grad_out, query), q, k, v, offsets, key_blocks,
        to_array(bias, query), to_padded_array(out, query), to_array(lse, query).reshape(-1), q.dtype.type(scale),
        *dropout_tables(query, key, dropout, seed, q.dtype), *(x.view(-1).numpy() for x in (dquery, dkey, dvalue)),
        dbias.reshape(-1),
    )  # fmt: skip
    _run(_compile_block_attention_backward, [(*unit, *arguments) for unit in units], block_size, q, v, threads)
    return (
        unpad_channels(dquery, query),
        unpad_channels(summed(dkey, units, heads, cuts[0].count), key),
        unpad_channels(summed(dvalue, units, heads, cuts[0].count), value),
        torch.from_numpy(dbias).to(bias.dtype) if bias is not None and need_bias else lse.new_empty(0),
    )


def _compute_pair_gains(
    tokens: tuple[Tensor, ...], sets: Sequence[Rows], cuts: tuple[Cut, Cut], is_causal: bool, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Compute :func:`.reference.blocks.pair_gains`."""
    like, block_size, logits_and_gains = tokens[1], cuts[0].block_size, []
    g, q, k, v = (to_padded_array(x, like) for x in tokens)
    for rowptr, col, bias in sets:
        offsets, key_blocks = (x.contiguous().numpy() for x in (rowptr, col))
        logit, norm, gain = (torch.from_numpy(q).new_zeros((key_blocks.size, block_size)) for _ in range(3))
        arguments = (
            block_size, is_causal, *map(_cut_arrays, cuts), g, q, k, v, offsets, key_blocks, to_array(bias, like),
            q.dtype.type(scale), *(x.view(-1).numpy() for x in (logit, norm, gain)),
        )  # fmt: skip
        pieces = split(offsets, task_count(key_blocks.size * block_size**2 * (q.shape[1] + v.shape[1]), 3))
        _run(_compile_pair_gains, [(*piece, *arguments) for piece in pieces], block_size, q, v)
        logits_and_gains.append((logit.add_(norm.log_()), gain))
    return logits_and_gains


def block_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    sets = Rows(rowptr, col, bias), Rows(probe_rowptr, probe_col.to(col.dtype), probe_bias)
    logits_and_gains = _compute_pair_gains((grad_out, query, key, value), sets, cuts, is_causal, scale)
    arrays, out = [], []
    for (offsets, key_blocks, _), numbers in zip(sets, logits_and_gains, strict=True):
        arrays += [x.contiguous().view(-1).numpy() for x in (offsets, key_blocks, *numbers)]
        out.append(numbers[0].new_zeros(key_blocks.numel()))
    arguments = (block_size, *arrays, *(x.numpy() for x in out))
    pieces = split(arrays[0] + arrays[4], task_count(16 * block_size * (col.numel() + probe_col.numel()), 3))
    run(_leave_one_out, [(*piece, *arguments) for piece in pieces])
    return out[0].to(query.dtype), out[1].to(query.dtype)


block_weight = partial(reference_blocks.block_weight, compute_gains=_compute_pair_gains)
