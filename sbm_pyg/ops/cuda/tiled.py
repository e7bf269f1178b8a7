"""Attention over a graph that is drawn with the scores and not stored, for CUDA devices, in Triton.

In and out: the tensors of ``sampled_attention`` and of its backward pass in :mod:`sbm_pyg.ops`, on one device. Not
here: graphs that are stored (:mod:`.sampling`, :mod:`.edges`), and parts that kernels share (:mod:`.rows`).

A program takes some queries of one sequence, and goes through its keys 64 at a time: probabilities and scores are
matrix products of tiles, and random words are made in registers. What is kept of a query is its output, with and
without its heaviest edge, so that the effect of no edge is ever the small difference of two large sums. The backward
pass has a kernel for queries and one for keys. Both see pairs in the tiles of the forward pass, so they round alike and
find the same edges. Numbers in float64, and very wide vectors, take the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import segments as reference_segments
from ..reference import tiled as reference_tiled
from .rows import PROB_LIMIT, WORD_RANGE, cast_like, finite, float_bits, from_bits, launch, triton_kernel
from .sampling import bernoulli_words, panel_of

_COLUMNS_PER_STEP = tl.constexpr(16)  # columns that are multiplied at a time
_DOT_PRECISION = tl.constexpr("tf32x3")  # of matrix products in float32, nearly as exact
KEYS_PER_TILE = 64
"""Keys that a program takes together, in the order of their random words."""
MAX_TILE_CHANNELS = 128
"""Channels of a token, or blocks, at most: wider tiles do not fit the registers of a program."""

# ------------------------------------------------------------------ what the kernels share


@triton.jit
def _load_columns(source, first, there, begin, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Some columns of rows of a matrix from one row on, ``[rows, SIZE]``; zeros where the mask is false."""
    row, channel = tl.arange(0, there.shape[0]), begin + tl.arange(0, SIZE)
    inside = there[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + first * WIDTH + (row[:, None] * WIDTH + channel[None, :]), mask=inside, other=0)


@triton.jit
def _load_rows(source, first, there, WIDTH: tl.constexpr):
    """All columns, their number a power of two."""
    return _load_columns(source, first, there, 0, WIDTH, max(16, triton.next_power_of_2(WIDTH)))


@triton.jit
def _gather_rows(source, rows, there, WIDTH: tl.constexpr):
    """Rows that stand anywhere, in float32."""
    channel = tl.arange(0, max(16, triton.next_power_of_2(WIDTH)))
    inside = there[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + rows[:, None] * WIDTH + channel[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def _store_rows(target, first, there, x, WIDTH: tl.constexpr):
    """Write rows of a matrix from one row on."""
    row, channel = tl.arange(0, there.shape[0]), tl.arange(0, x.shape[1])
    inside = there[:, None] & (channel < WIDTH)[None, :]
    tl.store(target + first * WIDTH + (row[:, None] * WIDTH + channel[None, :]), cast_like(x, target), mask=inside)


@triton.jit
def _tile_dots(x, y, first, second, there, known, length, WIDTH: tl.constexpr):
    """Dot products of some rows of two matrices, ``[rows, rows]`` in float32, some columns at a time.

    The compiler does not know ``length``, how many keys there are. So one turn stays a loop, or products that do not
    belong together would be laid out alike.
    """
    out = tl.zeros([there.shape[0], known.shape[0]], tl.float32)
    for begin in range(0, tl.where(length > 0, WIDTH, 0), _COLUMNS_PER_STEP):
        a = _load_columns(x, first, there, begin, WIDTH, _COLUMNS_PER_STEP)
        b = _load_columns(y, second, known, begin, WIDTH, _COLUMNS_PER_STEP)
        out = tl.dot(a, tl.trans(b.to(a.dtype)), out, input_precision=_DOT_PRECISION)
    return out


@triton.jit
def _tile_product(x, y):
    """Matrix product in float32; what is computed is rounded to the type of what is given."""
    return tl.dot(x.to(y.dtype), y, input_precision=_DOT_PRECISION)


@triton.jit
def _transposed_product(x, y):
    """The same of ``x`` with rows and columns exchanged; its columns are what warps share out."""
    return tl.dot(tl.trans(x), y.to(x.dtype), input_precision=_DOT_PRECISION)


@triton.jit
def _score_pairs(
    query, key, rate, member, mine, theirs, position, number, there, known, allowed, length, begin, window, seed,
    sequence_id, head, scale, exploration, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some queries and 64 keys, ``[ROWS, 64]``: which are edges, which may be, their scores."""
    p = _tile_dots(rate, member, mine, theirs, there, known, length, BLOCKS)
    p += from_bits(exploration, tl.float32)
    distance = number[None, :] - position[:, None]
    forced = (distance <= window) & (-distance <= window)
    inside = number[None, :] < allowed[:, None]
    word = bernoulli_words(seed, begin, position, sequence_id, head, ROWS).to(tl.uint32)
    least = (tl.where(p < 1, p, 0) * WORD_RANGE).to(tl.uint32)
    wrong = p != p  # it becomes an edge, whose score is wrong, too
    hit = (word < least) | (p >= 1) | forced | wrong
    score = _tile_dots(query, key, mine, theirs, there, known, length, WIDTH) * from_bits(scale, tl.float32)
    score = tl.where(wrong, float("nan"), score)
    return hit & inside, inside & ~forced & (p <= PROB_LIMIT), score


@triton.jit
def _query_positions(start, queries, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """Places of some queries, which are there, and how many keys each may attend to; none where there is no query."""
    position = (start + tl.arange(0, ROWS)).to(tl.int32)
    there = position < queries
    allowed = tl.where(there, keys, 0).to(tl.int32)
    if CAUSAL:
        allowed = tl.minimum(allowed, position + 1)
    return position, there, allowed


@triton.jit
def _query_tile(
    query_ptr, key_ptr, sequence_ids, sequences, queries, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The queries of this program.

    Returns their head, sequence number, keys and queries of the sequence, the position of the first one, how many keys
    they attend to together, and the first rows of queries and of keys.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence, part = panel_of(query_ptr, slot, sequences, ROWS)
    sequence_id, start = tl.load(sequence_ids + sequence), tl.load(query_ptr + sequence)
    first, length = tl.load(key_ptr + sequence), tl.load(key_ptr + sequence + 1) - tl.load(key_ptr + sequence)
    count, begin = tl.load(query_ptr + sequence + 1) - start, part * ROWS
    seen = tl.where(begin < count, length, 0)
    if CAUSAL:
        seen = tl.minimum(seen, tl.minimum(begin + ROWS, count))
    return (
        head,
        sequence_id,
        length,
        count,
        begin.to(tl.int32),
        seen,
        head * queries + start + begin,
        head * keys + first,
    )


@triton.jit
def _pull(hit, score, gain, mean, lse, scale):
    """Weights of the edges, what each gain is beyond the mean, and the gradient of the products of queries and keys."""
    weight = tl.where(hit, tl.exp(score - finite(lse)[:, None]), 0)
    beyond = gain - mean[:, None]
    return weight, beyond, weight * beyond * from_bits(scale, tl.float32)


@triton.jit
def _pair_effects(hit, learns, score, gain, weight, beyond, number, best, rest_mean, lse):
    """What each pair does to the loss, ``[ROWS, 64]``; see :func:`.reference.tiled.sampled_attention_backward`."""
    heaviest = number[None, :] == best[:, None]
    others = tl.where(heaviest, 0, weight)
    present = tl.where(heaviest, weight * (gain - rest_mean[:, None]), others / (1 - others) * beyond)
    absent = beyond / (1 + tl.exp(lse[:, None] - score))
    return tl.where(learns, tl.where(hit, present, absent), 0)


# ------------------------------------------------------------------ kernels


@triton_kernel
def _sampled_kernel(
    query, key, value, rate, member, query_ptr, key_ptr, sequence_ids, out, rest, lse, best, sequences: tl.int64,
    queries: tl.int64, keys: tl.int64, seed: tl.int64, exploration: tl.int64, scale: tl.int64, window: tl.int64,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Output of some queries, with and without the heaviest edge of each."""
    head, sequence_id, length, count, start, seen, mine, theirs = _query_tile(
        query_ptr, key_ptr, sequence_ids, sequences, queries, keys, CAUSAL, ROWS
    )
    position, there, allowed = _query_positions(start, count, length, CAUSAL, ROWS)

    top, second = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    norm, heaviest = tl.zeros([ROWS], tl.float32), tl.full([ROWS], -1, tl.int32)
    sums = tl.zeros([ROWS, max(16, triton.next_power_of_2(VALUE_WIDTH))], tl.float32)  # of all but the heaviest
    for begin in tl.range(0, seen, KEYS_PER_TILE, disable_licm=True):
        number = (begin + tl.arange(0, KEYS_PER_TILE)).to(tl.int32)
        known = number < length
        hit, _learns, score = _score_pairs(
            query, key, rate, member, mine, theirs + begin, position, number, there, known, allowed, length, begin,
            window, seed, sequence_id, head, scale, exploration, WIDTH, BLOCKS, ROWS,
        )  # fmt: skip
        logit = tl.where(hit, score, float("-inf"))
        high = tl.max(logit, 1)
        new = high > top
        found = tl.min(tl.where(logit == high[:, None], number[None, :], 2**31 - 1), 1)
        logit = tl.where(new[:, None] & (number[None, :] == found[:, None]), float("-inf"), logit)
        left = tl.where(new, top, float("-inf"))  # the former heaviest, one of the others now
        level = tl.maximum(tl.maximum(second, tl.max(logit, 1)), left)
        shrink, weight = tl.exp(second - finite(level)), tl.exp(logit - finite(level)[:, None])
        again = tl.exp(left - finite(level))
        norm = norm * shrink + tl.sum(weight, 1) + again
        sums = sums * shrink[:, None] + _tile_product(weight, _load_rows(value, theirs + begin, known, VALUE_WIDTH))
        sums += again[:, None] * _gather_rows(value, theirs + heaviest.to(tl.int64), left > float("-inf"), VALUE_WIDTH)
        second, top, heaviest = level, tl.maximum(top, high), tl.where(new, found, heaviest)

    others = sums / tl.where(norm == 0, 1, norm)[:, None]
    share = norm * tl.exp(second - finite(top))
    whole = tl.where(top > float("-inf"), 1, 0) + share
    heavy = _gather_rows(value, theirs + heaviest.to(tl.int64), top > float("-inf"), VALUE_WIDTH)
    mean = (heavy + others * share[:, None]) / tl.where(whole == 0, 1, whole)[:, None]
    _store_rows(out, mine, there, mean, VALUE_WIDTH)
    _store_rows(rest, mine, there, others, VALUE_WIDTH)
    at = mine + tl.arange(0, ROWS)
    tl.store(lse + at, tl.where(whole == 0, float("-inf"), finite(top) + tl.log(whole)), mask=there)
    tl.store(best + at, heaviest, mask=there)


@triton_kernel
def _sampled_queries_kernel(
    grad_out, query, key, value, rate, member, query_ptr, key_ptr, sequence_ids, mean, rest_mean, lse, best, d_query,
    d_rate, sequences: tl.int64, queries: tl.int64, keys: tl.int64, seed: tl.int64, exploration: tl.int64,
    scale: tl.int64, window: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of some queries and, where asked for, of their rates."""
    head, sequence_id, length, count, start, seen, mine, theirs = _query_tile(
        query_ptr, key_ptr, sequence_ids, sequences, queries, keys, CAUSAL, ROWS
    )
    d_q = tl.zeros([ROWS, max(16, triton.next_power_of_2(WIDTH))], tl.float32)
    d_y = tl.zeros([ROWS, max(16, triton.next_power_of_2(BLOCKS))], tl.float32)
    for begin in tl.range(0, seen, KEYS_PER_TILE, disable_licm=True):
        position, there, allowed = _query_positions(start, count, length, CAUSAL, ROWS)
        number = (begin + tl.arange(0, KEYS_PER_TILE)).to(tl.int32)
        known = number < length
        hit, learns, score = _score_pairs(
            query, key, rate, member, mine, theirs + begin, position, number, there, known, allowed, length, begin,
            window, seed, sequence_id, head, scale, exploration, WIDTH, BLOCKS, ROWS,
        )  # fmt: skip
        at = mine + tl.arange(0, ROWS)
        average, level = tl.load(mean + at, mask=there, other=0), tl.load(lse + at, mask=there, other=0)
        rest_average, heaviest = tl.load(rest_mean + at, mask=there, other=0), tl.load(best + at, mask=there, other=-1)
        gain = _tile_dots(grad_out, value, mine, theirs + begin, there, known, length, VALUE_WIDTH)
        weight, beyond, slope = _pull(hit, score, gain, average, level, scale)
        if d_rate is not None:
            change = _pair_effects(hit, learns, score, gain, weight, beyond, number, heaviest, rest_average, level)
            d_y += _tile_product(change, _load_rows(member, theirs + begin, known, BLOCKS))
        d_q += _tile_product(slope, _load_rows(key, theirs + begin, known, WIDTH))
    there = start + tl.arange(0, ROWS) < count
    _store_rows(d_query, mine, there, d_q, WIDTH)
    if d_rate is not None:
        _store_rows(d_rate, mine, there, d_y, BLOCKS)


@triton_kernel
def _sampled_keys_kernel(
    grad_out, query, key, value, rate, member, query_ptr, key_ptr, sequence_ids, mean, rest_mean, lse, best, d_key,
    d_value, d_member, sequences: tl.int64, queries: tl.int64, keys: tl.int64, seed: tl.int64, exploration: tl.int64,
    scale: tl.int64, window: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys, their values and, where asked for, their memberships."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence, part = panel_of(key_ptr, slot, sequences, KEYS_PER_TILE)
    sequence_id, start = tl.load(sequence_ids + sequence), tl.load(query_ptr + sequence)
    first, length = tl.load(key_ptr + sequence), tl.load(key_ptr + sequence + 1) - tl.load(key_ptr + sequence)
    count, begin = tl.load(query_ptr + sequence + 1) - start, part * KEYS_PER_TILE
    theirs = head * keys + first

    d_k = tl.zeros([max(16, triton.next_power_of_2(WIDTH)), KEYS_PER_TILE], tl.float32)
    d_v = tl.zeros([max(16, triton.next_power_of_2(VALUE_WIDTH)), KEYS_PER_TILE], tl.float32)
    d_z = tl.zeros([max(16, triton.next_power_of_2(BLOCKS)), KEYS_PER_TILE], tl.float32)
    least = begin // ROWS * ROWS if CAUSAL else begin * 0
    for from_query in tl.range(least, tl.where(begin < length, count, 0), ROWS, disable_licm=True):
        number = (begin + tl.arange(0, KEYS_PER_TILE)).to(tl.int32)
        known = number < length
        position, there, allowed = _query_positions(from_query, count, length, CAUSAL, ROWS)
        mine = head * queries + start + from_query
        at = mine + tl.arange(0, ROWS)
        average, level = tl.load(mean + at, mask=there, other=0), tl.load(lse + at, mask=there, other=0)
        rest_average, heaviest = tl.load(rest_mean + at, mask=there, other=0), tl.load(best + at, mask=there, other=-1)
        hit, learns, score = _score_pairs(
            query, key, rate, member, mine, theirs + begin, position, number, there, known, allowed, length, begin,
            window, seed, sequence_id, head, scale, exploration, WIDTH, BLOCKS, ROWS,
        )  # fmt: skip
        gain = _tile_dots(grad_out, value, mine, theirs + begin, there, known, length, VALUE_WIDTH)
        weight, beyond, slope = _pull(hit, score, gain, average, level, scale)
        if d_member is not None:
            change = _pair_effects(hit, learns, score, gain, weight, beyond, number, heaviest, rest_average, level)
            d_z += _transposed_product(_load_rows(rate, mine, there, BLOCKS), change)
        d_v += _transposed_product(_load_rows(grad_out, mine, there, VALUE_WIDTH), weight)
        d_k += _transposed_product(_load_rows(query, mine, there, WIDTH), slope)
    known = begin + tl.arange(0, KEYS_PER_TILE) < length
    _store_rows(d_key, theirs + begin, known, tl.trans(d_k), WIDTH)
    _store_rows(d_value, theirs + begin, known, tl.trans(d_v), VALUE_WIDTH)
    if d_member is not None:
        _store_rows(d_member, theirs + begin, known, tl.trans(d_z), BLOCKS)


# ------------------------------------------------------------------ the ops


def _supports(*given: Tensor) -> bool:
    """True if kernels take these tokens."""
    widths = {x.size(2) for x in given}
    small = min(x.numel() for x in given) > 0 and max(widths) <= MAX_TILE_CHANNELS
    return small and all(x.dtype != torch.float64 for x in given)


def _tile_sizes(query: Tensor, value: Tensor, rate: Tensor) -> dict[str, Any]:
    """Widths, and how many queries a program takes: as many as leave its numbers in registers (docs/kernels.md)."""
    widths = {"WIDTH": query.size(2), "VALUE_WIDTH": value.size(2), "BLOCKS": rate.size(2)}
    padded = sum(triton.next_power_of_2(width) for width in widths.values())
    low = max(x.itemsize for x in (query, value, rate)) == 2
    rows = 32 if low and padded <= 256 else 16
    options = {**widths, "ROWS": rows, "KEYS_PER_TILE": KEYS_PER_TILE, "num_warps": 8, "num_stages": 1}
    return options if low else {**options, "maxnreg": 255}  # the assembler gives float32 as few as 128, and spills


def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    sequence_ids: Tensor, seed: int, exploration: float, scale: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    law = (seed, float_bits(exploration), float_bits(scale), window)
    if not _supports(query, key, value, rate, member):
        return reference_tiled.sampled_attention(
            query, key, value, rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, scale, is_causal,
            window,
        )  # fmt: skip
    (heads, queries, _), keys, sequences = query.shape, key.size(1), query_ptr.numel() - 1
    given = [x.contiguous() for x in (query, key, value, rate, member, query_ptr, key_ptr, sequence_ids)]
    out, rest = (value.new_empty(heads, queries, value.size(2)) for _ in range(2))
    lse = query.new_empty(heads, queries, dtype=torch.float32)
    best = torch.empty_like(lse, dtype=torch.int32)
    sizes = _tile_sizes(query, value, rate)
    grid = (queries // sizes["ROWS"] + sequences, heads)
    launch(
        _sampled_kernel, grid, *given, out, rest, lse, best, sequences, queries, keys, *law, CAUSAL=is_causal, **sizes
    )
    return out, rest, lse, best


def sampled_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, sequence_ids: Tensor, out: Tensor, rest: Tensor, lse: Tensor, best: Tensor, seed: int,
    exploration: float, scale: float, is_causal: bool, window: int, need_model: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not _supports(query, key, value, rate, member):
        return reference_tiled.sampled_attention_backward(
            grad_out, query, key, value, rate, member, query_ptr, key_ptr, sequence_ids, out, rest, lse, best, seed,
            exploration, scale, is_causal, window, need_model,
        )  # fmt: skip
    (heads, queries, _), keys, sequences = query.shape, key.size(1), query_ptr.numel() - 1
    tokens = (grad_out, query, key, value, rate, member, query_ptr, key_ptr, sequence_ids)
    given = [x.contiguous() for x in tokens]
    gains = [(reference_segments.upcast(grad_out) * reference_segments.upcast(x)).sum(-1) for x in (out, rest)]
    law = (sequences, queries, keys, seed, float_bits(exploration), float_bits(scale), window)
    d_query, d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    d_rate, d_member = (x.new_empty(x.shape) if need_model else None for x in (rate, member))
    known, sizes = (*gains, lse, best), {"CAUSAL": is_causal, **_tile_sizes(query, value, rate)}
    grid = (queries // sizes["ROWS"] + sequences, heads)
    launch(_sampled_queries_kernel, grid, *given, *known, d_query, d_rate, *law, **sizes)
    grid = (keys // KEYS_PER_TILE + sequences, heads)
    if sizes["ROWS"] == 32:
        sizes["maxnreg"] = 255  # as in float32
    launch(_sampled_keys_kernel, grid, *given, *known, d_key, d_value, d_member, *law, **sizes)
    if d_rate is None or d_member is None:
        return d_query, d_key, d_value, rate.new_empty(0, 0, 0), member.new_empty(0, 0, 0)
    return d_query, d_key, d_value, d_rate, d_member
