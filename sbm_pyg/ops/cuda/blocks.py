"""Attention over blocks of tokens for CUDA devices, in Triton.

In and out: as ``blocks``, which is the meaning. A program takes some queries of a block and goes through the blocks of
keys that they attend to, with products on tensor cores and a running maximum, as FlashAttention does. The backward pass
is one such kernel for queries, and one for keys, which goes through the blocks of queries that attend to them, in the
order that :func:`.segments.by_key` keeps. So every number has one writer, nothing is added atomically, and the same
call gives the same bits. Not here: the effect of a pair from its sums (``blocks``), what kernels share
(:mod:`.cuda.rows`).

Products of float32 are exact ones, unless torch lets matrices round to TensorFloat-32
(``torch.backends.cuda.matmul.fp32_precision``). Vectors of no channels, or of more than ``WIDEST`` says, take plain
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import blocks as reference_blocks
from ..reference import segments as reference_segments
from ..reference.blocks import Cut, Set
from .rows import bits, chances, finite, keeps, kernel, launch, narrow, real, wide

KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128, torch.float64: 64}
"""Channels of each type above which vectors of sixteen tokens do not fit the registers of a block."""
DOUBLES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Whether Triton compiles products of float64."""

# ------------------------------------------------------------------ in a kernel


@triton.jit
def load_tokens(source, first, number, there, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Tokens of a block, ``[tokens, width]``; zeros where there is none."""
    channel = tl.arange(0, max(16, triton.next_power_of_2(WIDTH)))
    inside = there[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + first * WIDTH + (number[:, None] * WIDTH + channel[None, :]), mask=inside, other=0).to(TYPE)


@triton.jit
def put_tokens(target, first, number, there, x, WIDTH: tl.constexpr):
    """Write tokens of a block."""
    channel = tl.arange(0, max(16, triton.next_power_of_2(WIDTH)))
    inside = there[:, None] & (channel < WIDTH)[None, :]
    tl.store(target + first * WIDTH + (number[:, None] * WIDTH + channel[None, :]), narrow(x, target), mask=inside)


@triton.jit
def side(layout, block, blocks, head, tokens):
    """First token of a block among those of all heads, how many it has, and its number in its sequence."""
    first, count = tl.load(layout + block), tl.load(layout + blocks + block)
    return head * tokens + first, count, tl.load(layout + 2 * blocks + block)


@triton.jit
def words(query_words, key_words, first, row, mine, first_key, column, theirs):
    """What :func:`.cuda.rows.keeps` asks of queries and keys, ``[queries, keys]``."""
    one = tl.load(query_words + first + row, mask=mine, other=0)
    return one[:, None] ^ tl.load(key_words + first_key + column, mask=theirs, other=0)[None, :]


@triton.jit
def meet(query, key, row, column, edge, mine, theirs, lag, bias, scale, grain, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Scores of queries with keys as they enter the softmax, ``[queries, keys]``; -inf where they do not meet."""
    logit = tl.dot(query, tl.trans(key), input_precision=PRECISION, out_dtype=WIDE) * real(scale, WIDE)
    there = mine[:, None] & theirs[None, :]
    if CAUSAL:
        there = there & (column[None, :] <= (row + lag)[:, None])
    if bias is not None:
        places = row[:, None] * grain.to(tl.int32) + column[None, :]
        logit += tl.load(bias + edge * grain * grain + places, mask=there, other=0).to(WIDE)
    return tl.where(there, logit, float("-inf"))


# ------------------------------------------------------------------ kernels


@kernel
def _block_attention(
    query, key, value, rowptr, col, query_side, key_side, bias, query_words, key_words, out, lse, queries: tl.int64,
    keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64, grain: tl.int64, least: tl.int64, grow: tl.int64,
    scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TYPE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    head, block = place // query_blocks, place % query_blocks
    first, count, number = side(query_side, block, query_blocks, head, queries)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mine = row < count
    q = load_tokens(query, first, row, mine, WIDTH, TYPE)
    top, norm = tl.full([TOKENS], float("-inf"), WIDE), tl.zeros([TOKENS], WIDE)
    sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(VALUE_WIDTH))], WIDE)
    for edge in range(tl.load(rowptr + place), tl.load(rowptr + place + 1)):
        first_key, key_count, key_number = side(key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys)
        lag = (grain * (number - key_number)).to(tl.int32)
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            theirs = column < key_count
            k = load_tokens(key, first_key, column, theirs, WIDTH, TYPE)
            logit = meet(q, k, row, column, edge, mine, theirs, lag, bias, scale, grain, CAUSAL, WIDE, PRECISION)
            new = tl.maximum(top, tl.max(logit, 1))
            weight, shrink = tl.exp(logit - finite(new)[:, None]), tl.exp(top - finite(new))
            norm, top = norm * shrink + tl.sum(weight, 1), new
            if query_words is not None:
                word = words(query_words, key_words, first, row, mine, first_key, column, theirs)
                weight = tl.where(keeps(word, least), weight, 0)
            v = load_tokens(value, first_key, column, theirs, VALUE_WIDTH, TYPE)
            sums = sums * shrink[:, None] + tl.dot(weight.to(TYPE), v, input_precision=PRECISION, out_dtype=WIDE)
    if query_words is not None:
        sums *= real(grow, WIDE)
    put_tokens(out, first, row, mine, sums / tl.where(norm == 0, 1, norm)[:, None], VALUE_WIDTH)
    tl.store(lse + first + row, top + tl.log(norm), mask=mine)


@triton.jit
def slope(q, k, g, v, mean, shift, row, column, edge, mine, theirs, lag, bias, query_words, key_words, first, first_key,
          scale, grain, least, grow, CAUSAL: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What scores, and what weights, receive from the gradient of the output, ``[queries, keys]``."""
    logit = meet(q, k, row, column, edge, mine, theirs, lag, bias, scale, grain, CAUSAL, WIDE, PRECISION)
    weight = tl.exp(logit - shift[:, None])
    gain = tl.dot(g, tl.trans(v), input_precision=PRECISION, out_dtype=WIDE)
    share = weight
    if query_words is not None:
        keep = keeps(words(query_words, key_words, first, row, mine, first_key, column, theirs), least)
        gain = tl.where(keep, gain * real(grow, WIDE), 0)
        share = tl.where(keep, weight * real(grow, WIDE), 0)
    return weight * (gain - mean[:, None]), share


@kernel
def _block_queries(
    grad_out, query, key, value, rowptr, col, query_side, key_side, bias, query_words, key_words, out, lse, mean,
    grad_query, grad_bias, queries: tl.int64, keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64,
    grain: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries and of the bias; and the mean gain of each query, for its keys."""
    place = tl.program_id(0).to(tl.int64)
    head, block = place // query_blocks, place % query_blocks
    first, count, number = side(query_side, block, query_blocks, head, queries)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mine = row < count
    q = load_tokens(query, first, row, mine, WIDTH, TYPE)
    g = load_tokens(grad_out, first, row, mine, VALUE_WIDTH, TYPE)
    average = tl.sum(g.to(WIDE) * load_tokens(out, first, row, mine, VALUE_WIDTH, WIDE), 1)
    tl.store(mean + first + row, average, mask=mine)
    shift = finite(tl.load(lse + first + row, mask=mine, other=0).to(WIDE))
    sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(WIDTH))], WIDE)
    for edge in range(tl.load(rowptr + place), tl.load(rowptr + place + 1)):
        first_key, key_count, key_number = side(key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys)
        lag = (grain * (number - key_number)).to(tl.int32)
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            theirs = column < key_count
            k = load_tokens(key, first_key, column, theirs, WIDTH, TYPE)
            v = load_tokens(value, first_key, column, theirs, VALUE_WIDTH, TYPE)
            change, _ = slope(
                q, k, g, v, average, shift, row, column, edge, mine, theirs, lag, bias, query_words, key_words, first,
                first_key, scale, grain, least, grow, CAUSAL, WIDE, PRECISION,
            )  # fmt: skip
            if grad_bias is not None:
                places = row[:, None] * grain.to(tl.int32) + column[None, :]
                there = mine[:, None] & theirs[None, :]
                tl.store(grad_bias + edge * grain * grain + places, narrow(change, grad_bias), mask=there)
            sums += tl.dot(change.to(TYPE), k, input_precision=PRECISION, out_dtype=WIDE)
    put_tokens(grad_query, first, row, mine, sums * real(scale, WIDE), WIDTH)


@kernel
def _block_keys(
    grad_out, query, key, value, ptr, order, rows, query_side, key_side, bias, query_words, key_words, lse, mean,
    grad_key, grad_value, queries: tl.int64, keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64,
    grain: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and of values."""
    place = tl.program_id(0).to(tl.int64)
    head, block = place // key_blocks, place % key_blocks
    first_key, key_count, key_number = side(key_side, block, key_blocks, head, keys)
    column = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    theirs = column < key_count
    k = load_tokens(key, first_key, column, theirs, WIDTH, TYPE)
    v = load_tokens(value, first_key, column, theirs, VALUE_WIDTH, TYPE)
    key_sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(WIDTH))], WIDE)
    value_sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(VALUE_WIDTH))], WIDE)
    for at in range(tl.load(ptr + place), tl.load(ptr + place + 1)):
        edge, other = tl.load(order + at), tl.load(rows + at)
        first, count, number = side(query_side, other % query_blocks, query_blocks, head, queries)
        lag = (grain * (number - key_number)).to(tl.int32)
        for begin in range(0, count, TOKENS):
            row = begin + tl.arange(0, TOKENS)
            mine = row < count
            q = load_tokens(query, first, row, mine, WIDTH, TYPE)
            g = load_tokens(grad_out, first, row, mine, VALUE_WIDTH, TYPE)
            average = tl.load(mean + first + row, mask=mine, other=0)
            shift = finite(tl.load(lse + first + row, mask=mine, other=0).to(WIDE))
            change, share = slope(
                q, k, g, v, average, shift, row, column, edge, mine, theirs, lag, bias, query_words, key_words, first,
                first_key, scale, grain, least, grow, CAUSAL, WIDE, PRECISION,
            )  # fmt: skip
            key_sums += tl.dot(tl.trans(change.to(TYPE)), q, input_precision=PRECISION, out_dtype=WIDE)
            value_sums += tl.dot(tl.trans(share.to(TYPE)), g, input_precision=PRECISION, out_dtype=WIDE)
    put_tokens(grad_key, first_key, column, theirs, key_sums * real(scale, WIDE), WIDTH)
    put_tokens(grad_value, first_key, column, theirs, value_sums, VALUE_WIDTH)


@kernel
def _block_gains(
    grad_out, query, key, value, rowptr, col, query_side, key_side, bias, logits, gains, queries: tl.int64,
    keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64, grain: tl.int64, scale: tl.int64,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each pair of blocks and each query, the log of the summed weights, and the mean gain."""
    place = tl.program_id(0).to(tl.int64)
    head, block = place // query_blocks, place % query_blocks
    first, count, number = side(query_side, block, query_blocks, head, queries)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mine = row < count
    q = load_tokens(query, first, row, mine, WIDTH, TYPE)
    if VALUE_WIDTH > 0:
        g = load_tokens(grad_out, first, row, mine, VALUE_WIDTH, TYPE)
    for edge in range(tl.load(rowptr + place), tl.load(rowptr + place + 1)):
        first_key, key_count, key_number = side(key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys)
        lag = (grain * (number - key_number)).to(tl.int32)
        top, norm = tl.full([TOKENS], float("-inf"), WIDE), tl.zeros([TOKENS], WIDE)
        sums = tl.zeros([TOKENS], WIDE)
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            theirs = column < key_count
            k = load_tokens(key, first_key, column, theirs, WIDTH, TYPE)
            logit = meet(q, k, row, column, edge, mine, theirs, lag, bias, scale, grain, CAUSAL, WIDE, PRECISION)
            new = tl.maximum(top, tl.max(logit, 1))
            weight, shrink = tl.exp(logit - finite(new)[:, None]), tl.exp(top - finite(new))
            norm, top = norm * shrink + tl.sum(weight, 1), new
            if VALUE_WIDTH > 0:
                v = load_tokens(value, first_key, column, theirs, VALUE_WIDTH, TYPE)
                gain = tl.dot(g, tl.trans(v), input_precision=PRECISION, out_dtype=WIDE)
                sums = sums * shrink + tl.sum(weight * gain, 1)
        tl.store(logits + edge * grain + row, top + tl.log(norm), mask=mine)
        tl.store(gains + edge * grain + row, sums / tl.where(norm == 0, 1, norm), mask=mine)


@kernel
def _block_effect(
    rowptr, col, logits, gains, probe_rowptr, probe_col, probe_logits, probe_gains, effects, probe_effects,
    grain: tl.int64, TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The effects of pairs and probes, summed over the queries of each: :func:`.reference.effects.leave_one_out`."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    start, stop, there = tl.load(rowptr + row), tl.load(rowptr + row + 1), slot < grain
    low, best = tl.full([TOKENS], float("-inf"), WIDE), slot.to(tl.int64) * 0 - 1
    top, second, heaviest = low, low, tl.zeros([TOKENS], WIDE)
    for edge in range(start, stop):
        logit = tl.load(logits + edge * grain + slot, mask=there, other=float("-inf"))
        more = logit > top
        second, top = tl.maximum(second, tl.minimum(logit, top)), tl.maximum(logit, top)
        heaviest = tl.where(more, tl.load(gains + edge * grain + slot, mask=there, other=0), heaviest)
        best = tl.where(more, edge, best)
    rest, rest_gain, base = tl.zeros([TOKENS], WIDE), tl.zeros([TOKENS], WIDE), finite(second)
    for edge in range(start, stop):  # weights without the heaviest, relative to the second
        logit = tl.load(logits + edge * grain + slot, mask=there, other=float("-inf"))
        weight = tl.where(best == edge, 0, tl.exp(tl.minimum(logit, second) - base))
        rest += weight
        rest_gain += weight * tl.load(gains + edge * grain + slot, mask=there, other=0)
    ratio = tl.exp(second - finite(top))
    whole, whole_gain = 1 + rest * ratio, heaviest + rest_gain * ratio
    alone = rest_gain / tl.where(rest == 0, 1, rest)
    for edge in range(start, stop):
        logit = tl.load(logits + edge * grain + slot, mask=there, other=float("-inf"))
        gain = tl.load(gains + edge * grain + slot, mask=there, other=0)
        share = tl.exp(tl.minimum(logit, second) - base) * ratio
        other = share * (gain - (whole_gain - share * gain) / tl.where(best == edge, 1, whole - share))
        change = tl.where(best == edge, gain - alone, other) / whole
        tl.store(effects + edge, tl.sum(tl.where(there, change, 0), 0))
    mean = tl.where(best < 0, 0, whole_gain / whole)
    for probe in range(tl.load(probe_rowptr + row), tl.load(probe_rowptr + row + 1)):
        token, least, most = tl.load(probe_col + probe), start, stop
        while least < most:
            middle = (least + most) // 2
            below = tl.load(col + middle) < token
            least, most = tl.where(below, middle + 1, least), tl.where(below, most, middle)
        found = tl.load(col + least, mask=least < stop, other=-1)
        logit = tl.load(probe_logits + probe * grain + slot, mask=there, other=float("-inf"))
        gain = tl.load(probe_gains + probe * grain + slot, mask=there, other=0)
        odds = tl.where(best < 0, 0, whole * tl.exp(top - finite(logit)))
        counts = (logit > float("-inf")) & (found != token)
        tl.store(probe_effects + probe, tl.sum(tl.where(counts, (gain - mean) / (1 + odds), 0), 0))


# ------------------------------------------------------------------ the ops


class _Work:
    """Two sides of blocks, how many programs go through one of them, and what kernels are compiled for.

    A program takes as many tokens at a time as its registers hold: fewer with a bias or dropout, or where channels are
    many or precise. docs/kernels.md has what each takes.

    Args:
        cuts: The two sides.
        query, value: Like these.
        more: What else decides the precision.
        plain: Whether there is neither a bias nor dropout.
    """

    def __init__(
        self, cuts: tuple[Cut, Cut], query: Tensor, value: Tensor, more: Sequence[Tensor | None], is_causal: bool,
        plain: bool,
    ) -> None:  # fmt: skip
        self.wide = wide(query, value, *more)
        kind = query.dtype if query.dtype == value.dtype and self.wide == torch.float32 else self.wide
        width, grain = max(query.size(2), value.size(2)), cuts[0].grain
        self.possible = query.size(2) > 0 and width <= WIDEST[kind] and (DOUBLES or kind != torch.float64)
        low = kind.itemsize == 2
        most = (
            16 if width > (128 if low else 64) or kind == torch.float64 else 64 if low and plain and width <= 64 else 32
        )
        tokens = max(16, min(most, triton.next_power_of_2(grain)))
        self.heads, self.counts, self.parts = query.size(0), [cut.count for cut in cuts], triton.cdiv(grain, tokens)
        self.sides, self.sizes = cuts, (query.size(1), cuts[1].total, *self.counts, grain)
        self.options = {
            "CAUSAL": is_causal, "WIDTH": query.size(2), "VALUE_WIDTH": value.size(2), "TOKENS": tokens,
            "TYPE": KINDS[kind], "WIDE": KINDS[self.wide], "maxnreg": 255,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            "num_warps": 4 if low and tokens < 64 and width <= 64 else 8, "num_stages": 2 if low else 1,
        }  # fmt: skip

    def start(self, program: Any, side: int, *arguments: Any) -> None:
        """A program for some tokens of each block of a side and head."""
        launch(program, (self.heads * self.counts[side], self.parts), *arguments, **self.options)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    grain: int, is_causal: bool, bias: Tensor | None, scale: float, dropout: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = reference_blocks.cut_rows(rowptr, query, key, (query_ptr, key_ptr), grain)
    work = _Work(cuts, query, value, (key, bias), is_causal, bias is None and dropout == 0)
    if not work.possible:
        return reference_blocks.block_attention(
            query, key, value, rowptr, col, query_ptr, key_ptr, grain, is_causal, bias, scale, dropout, seed
        )
    out, lse = value.new_empty(*query.shape[:2], value.size(2)), query.new_empty(query.shape[:2], dtype=work.wide)
    given = (x.contiguous() for x in (query, key, value, rowptr, col))
    *words, least, grow = chances(query, key, dropout, seed)
    bias = bias if bias is None else bias.contiguous()
    work.start(
        _block_attention,
        0,
        *given,
        *(cut.table for cut in work.sides),
        bias,
        *words,
        out,
        lse,
        *work.sizes,
        least,
        grow,
        bits(scale),
    )
    return out, lse


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grain: int, is_causal: bool, scale: float,
    dropout: float, seed: int, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cuts = reference_blocks.cut_rows(rowptr, query, key, (query_ptr, key_ptr), grain)
    work = _Work(cuts, query, value, (key, bias), is_causal, bias is None and dropout == 0)
    if not work.possible:
        return reference_blocks.block_attention_backward(
            grad_out, query, key, value, rowptr, col, query_ptr, key_ptr, bias, out, lse, grain, is_causal, scale,
            dropout, seed, need_bias,
        )  # fmt: skip
    order, ptr, row = reference_segments.by_key(rowptr, col, work.heads, work.counts[1])
    tokens = [x.contiguous() for x in (grad_out, query, key, value)]
    grads = [torch.empty_like(x) for x in tokens[1:]]
    mean, lse = lse.new_empty(lse.shape, dtype=work.wide), lse.contiguous()
    grad_bias = bias.new_zeros(bias.shape) if bias is not None and need_bias else None
    *words, least, grow = chances(query, key, dropout, seed)
    common = *(cut.table for cut in work.sides), bias if bias is None else bias.contiguous(), *words
    last = *work.sizes, least, grow, bits(scale)
    work.start(
        _block_queries, 0, *tokens, rowptr.contiguous(), col.contiguous(), *common, out.contiguous(), lse, mean,
        grads[0], grad_bias, *last,
    )  # fmt: skip
    work.start(_block_keys, 1, *tokens, ptr, order, row, *common, lse, mean, *grads[1:], *last)
    return grads[0], grads[1], grads[2], lse.new_empty(0) if grad_bias is None else grad_bias


def _split_gains(
    parts: tuple[Tensor, ...], sets: Sequence[Set], cuts: tuple[Cut, Cut], is_causal: bool, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """As in ``blocks``."""
    query, value, found = parts[1], parts[3], []
    biases = [bias for _, _, bias in sets]
    work = _Work(cuts, query, value, (parts[2], *biases), is_causal, not any(bias is not None for bias in biases))
    if not work.possible:
        return reference_blocks.split_gains(parts, sets, cuts, is_causal, scale)
    if work.wide == torch.float32:
        work.options["num_stages"] = 2  # keys and values wait in shared memory, not in registers
    tokens = [x.contiguous() for x in parts]
    for rowptr, col, bias in sets:
        logit, gain = (query.new_zeros(col.numel(), cuts[0].grain, dtype=work.wide) for _ in range(2))
        graph = (
            rowptr.contiguous(),
            col.contiguous(),
            *(cut.table for cut in work.sides),
            bias if bias is None else bias.contiguous(),
        )
        work.start(_block_gains, 0, *tokens, *graph, logit, gain, *work.sizes, bits(scale))
        found.append((logit, gain))
    return found


def block_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor, grain: int,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = reference_blocks.cut_rows(rowptr, query, key, (query_ptr, key_ptr), grain)
    sets = (rowptr, col, bias), (probe_rowptr, probe_col, probe_bias)
    found = _split_gains((grad_out, query, key, value), sets, cuts, is_causal, scale)
    graphs = ((*(x.contiguous() for x in rows), *numbers) for (*rows, _), numbers in zip(sets, found, strict=True))
    effects, tokens = [logit.new_empty(logit.size(0)) for logit, _ in found], triton.next_power_of_2(grain)
    warps = min(32, max(1, tokens // 128))
    launch(
        _block_effect, rowptr.numel() - 1, *chain(*graphs), *effects, grain, TOKENS=tokens,
        WIDE=KINDS[effects[0].dtype], num_warps=warps, maxnreg=min(255, 2048 // warps),
    )  # fmt: skip
    return effects[0].to(query.dtype), effects[1].to(query.dtype)


block_weight = partial(reference_blocks.block_weight, split=_split_gains)
