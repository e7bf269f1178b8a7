"""Attention over blocks of tokens for CUDA devices, in Triton.

In and out: as :mod:`sbm_pyg.ops.reference.blocks`. A program takes some queries of a block and goes through the blocks
of keys that they attend to, with products on tensor cores and a running maximum, as FlashAttention does. The backward
pass is one such kernel for queries, and one for keys, which goes through the blocks of queries that attend to them, in
the order that :func:`.segments.by_key` keeps. So every number has one writer, nothing is added atomically, and the same
call gives the same bits. Not here: parts that kernels share (:mod:`.rows`).

Products of float32 are exact ones, unless torch lets matrices round to TensorFloat-32
(``torch.backends.cuda.matmul.fp32_precision``). Vectors of no channels, or of more than ``MAX_BLOCK_CHANNELS``, take
plain torch.
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

from .. import segments as reference_segments
from ..reference import blocks as reference_blocks
from ..segments import Rows
from ..tiles import Cut, cut_rows
from .rows import (
    accumulate_dtype,
    cast_like,
    dropout_arguments,
    finite,
    float_bits,
    from_bits,
    keeps_words,
    launch,
    triton_kernel,
)

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
MAX_BLOCK_CHANNELS = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128, torch.float64: 64}
"""Channels of each type, at most: wider vectors of sixteen tokens do not fit the registers of a program."""
HAS_FLOAT64_DOT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""True if Triton compiles matrix products of float64."""

# ------------------------------------------------------------------ in a kernel


@triton.jit
def load_tokens(source, first, number, exists, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Tokens of a block, ``[tokens, width]``; zeros where the mask is false."""
    channel = tl.arange(0, max(16, triton.next_power_of_2(WIDTH)))
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + first * WIDTH + (number[:, None] * WIDTH + channel[None, :]), mask=inside, other=0).to(TYPE)


@triton.jit
def store_tokens(target, first, number, exists, x, WIDTH: tl.constexpr):
    """Write tokens of a block."""
    channel = tl.arange(0, max(16, triton.next_power_of_2(WIDTH)))
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    tl.store(target + first * WIDTH + (number[:, None] * WIDTH + channel[None, :]), cast_like(x, target), mask=inside)


@triton.jit
def load_block(layout, block, blocks, head, tokens):
    """First token of a block among the tokens of all heads, its number of tokens, and its position in its sequence."""
    first, count = tl.load(layout + block), tl.load(layout + blocks + block)
    return head * tokens + first, count, tl.load(layout + 2 * blocks + block)


@triton.jit
def load_words(query_words, key_words, first, row, is_query, first_key, column, is_key):
    """Bitwise xor of words of queries and words of keys, ``[queries, keys]``, for :func:`.rows.keeps_words`."""
    one = tl.load(query_words + first + row, mask=is_query, other=0)
    return one[:, None] ^ tl.load(key_words + first_key + column, mask=is_key, other=0)[None, :]


@triton.jit
def token_logits(
    query, key, row, column, edge, is_query, is_key, lag, bias, scale, block_size, CAUSAL: tl.constexpr,
    ACC_TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of queries and keys, ``[queries, keys]``; -inf where a query does not attend to a key."""
    # Multiply queries and keys, and mask the pairs that do not attend.
    logit = tl.dot(query, tl.trans(key), input_precision=PRECISION, out_dtype=ACC_TYPE) * from_bits(scale, ACC_TYPE)
    attends = is_query[:, None] & is_key[None, :]
    if CAUSAL:
        attends = attends & (column[None, :] <= (row + lag)[:, None])
    if bias is not None:
        offsets = row[:, None] * block_size.to(tl.int32) + column[None, :]
        logit += tl.load(bias + edge * block_size * block_size + offsets, mask=attends, other=0).to(ACC_TYPE)
    return tl.where(attends, logit, float("-inf"))


# ------------------------------------------------------------------ kernels


@triton_kernel
def _block_attention_kernel(
    query, key, value, rowptr, col, query_side, key_side, bias, query_words, key_words, out, lse, queries: tl.int64,
    keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64, block_size: tl.int64, least: tl.int64, grow: tl.int64,
    scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TYPE: tl.constexpr, ACC_TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, block = program // query_blocks, program % query_blocks
    first, count, number = load_block(query_side, block, query_blocks, head, queries)
    # Load some queries of the block, and start the running maximum and the sums.
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_query = row < count
    q = load_tokens(query, first, row, is_query, WIDTH, TYPE)
    top, norm = tl.full([TOKENS], float("-inf"), ACC_TYPE), tl.zeros([TOKENS], ACC_TYPE)
    sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(VALUE_WIDTH))], ACC_TYPE)
    for edge in range(tl.load(rowptr + program), tl.load(rowptr + program + 1)):
        first_key, key_count, key_number = load_block(
            key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys
        )
        # A causal query i attends to key j if j <= i + lag.
        lag = (block_size * (number - key_number)).to(tl.int32)
        # Compute the logits of a tile of keys.
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            is_key = column < key_count
            k = load_tokens(key, first_key, column, is_key, WIDTH, TYPE)
            logit = token_logits(
                q, k, row, column, edge, is_query, is_key, lag, bias, scale, block_size, CAUSAL, ACC_TYPE, PRECISION
            )
            # A larger maximum shrinks what has been summed so far.
            new = tl.maximum(top, tl.max(logit, 1))
            weight, shrink = tl.exp(logit - finite(new)[:, None]), tl.exp(top - finite(new))
            norm, top = norm * shrink + tl.sum(weight, 1), new
            # Drop pairs after their weights are summed, and add the weighted values.
            if query_words is not None:
                word = load_words(query_words, key_words, first, row, is_query, first_key, column, is_key)
                weight = tl.where(keeps_words(word, least), weight, 0)
            v = load_tokens(value, first_key, column, is_key, VALUE_WIDTH, TYPE)
            sums = sums * shrink[:, None] + tl.dot(weight.to(TYPE), v, input_precision=PRECISION, out_dtype=ACC_TYPE)
    # Divide by the sums of the weights, and write their logarithm.
    if query_words is not None:
        sums *= from_bits(grow, ACC_TYPE)
    store_tokens(out, first, row, is_query, sums / tl.where(norm == 0, 1, norm)[:, None], VALUE_WIDTH)
    tl.store(lse + first + row, top + tl.log(norm), mask=is_query)


@triton.jit
def score_slope(
    q, k, g, v, mean, shift, row, column, edge, is_query, is_key, lag, bias, query_words, key_words, first, first_key,
    scale, block_size, least, grow, CAUSAL: tl.constexpr, ACC_TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores, and weights that multiply the gradient of the output, ``[queries, keys]``."""
    # Recompute the weights from the log-sum, and compute the gains.
    logit = token_logits(
        q, k, row, column, edge, is_query, is_key, lag, bias, scale, block_size, CAUSAL, ACC_TYPE, PRECISION
    )
    weight = tl.exp(logit - shift[:, None])
    gain = tl.dot(g, tl.trans(v), input_precision=PRECISION, out_dtype=ACC_TYPE)
    share = weight
    # Dropout cuts the gain, and the weight that multiplies the gradient of the output.
    if query_words is not None:
        keep = keeps_words(load_words(query_words, key_words, first, row, is_query, first_key, column, is_key), least)
        gain = tl.where(keep, gain * from_bits(grow, ACC_TYPE), 0)
        share = tl.where(keep, weight * from_bits(grow, ACC_TYPE), 0)
    return weight * (gain - mean[:, None]), share


@triton_kernel
def _block_queries_kernel(
    grad_out, query, key, value, rowptr, col, query_side, key_side, bias, query_words, key_words, out, lse, mean,
    grad_query, grad_bias, queries: tl.int64, keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64,
    block_size: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr, ACC_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries and of the bias; and mean gains of queries, for the gradients of keys."""
    program = tl.program_id(0).to(tl.int64)
    head, block = program // query_blocks, program % query_blocks
    first, count, number = load_block(query_side, block, query_blocks, head, queries)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_query = row < count
    # Load some queries of the block, and the gradients of their outputs.
    q = load_tokens(query, first, row, is_query, WIDTH, TYPE)
    g = load_tokens(grad_out, first, row, is_query, VALUE_WIDTH, TYPE)
    # The mean gain of a query is the dot product of its output with the output's gradient.
    average = tl.sum(g.to(ACC_TYPE) * load_tokens(out, first, row, is_query, VALUE_WIDTH, ACC_TYPE), 1)
    tl.store(mean + first + row, average, mask=is_query)
    shift = finite(tl.load(lse + first + row, mask=is_query, other=0).to(ACC_TYPE))
    sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(WIDTH))], ACC_TYPE)
    for edge in range(tl.load(rowptr + program), tl.load(rowptr + program + 1)):
        first_key, key_count, key_number = load_block(
            key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys
        )
        # A causal query i attends to key j if j <= i + lag.
        lag = (block_size * (number - key_number)).to(tl.int32)
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            is_key = column < key_count
            k = load_tokens(key, first_key, column, is_key, WIDTH, TYPE)
            v = load_tokens(value, first_key, column, is_key, VALUE_WIDTH, TYPE)
            # Compute the gradients of the logits of a tile of keys; the bias gets them as they are.
            change, _ = score_slope(
                q, k, g, v, average, shift, row, column, edge, is_query, is_key, lag, bias, query_words, key_words,
                first, first_key, scale, block_size, least, grow, CAUSAL, ACC_TYPE, PRECISION,
            )  # fmt: skip
            if grad_bias is not None:
                offsets = row[:, None] * block_size.to(tl.int32) + column[None, :]
                exists = is_query[:, None] & is_key[None, :]
                tl.store(
                    grad_bias + edge * block_size * block_size + offsets, cast_like(change, grad_bias), mask=exists
                )
            # Add to the gradients of the queries.
            sums += tl.dot(change.to(TYPE), k, input_precision=PRECISION, out_dtype=ACC_TYPE)
    store_tokens(grad_query, first, row, is_query, sums * from_bits(scale, ACC_TYPE), WIDTH)


@triton_kernel
def _block_keys_kernel(
    grad_out, query, key, value, ptr, order, rows, query_side, key_side, bias, query_words, key_words, lse, mean,
    grad_key, grad_value, queries: tl.int64, keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64,
    block_size: tl.int64, least: tl.int64, grow: tl.int64, scale: tl.int64, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr, ACC_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and of values."""
    program = tl.program_id(0).to(tl.int64)
    head, block = program // key_blocks, program % key_blocks
    first_key, key_count, key_number = load_block(key_side, block, key_blocks, head, keys)
    column = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_key = column < key_count
    # Load some keys of the block, and their values.
    k = load_tokens(key, first_key, column, is_key, WIDTH, TYPE)
    v = load_tokens(value, first_key, column, is_key, VALUE_WIDTH, TYPE)
    key_sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(WIDTH))], ACC_TYPE)
    value_sums = tl.zeros([TOKENS, max(16, triton.next_power_of_2(VALUE_WIDTH))], ACC_TYPE)
    # Go through the blocks of queries that attend to them, in a fixed order.
    for at in range(tl.load(ptr + program), tl.load(ptr + program + 1)):
        edge, other = tl.load(order + at), tl.load(rows + at)
        first, count, number = load_block(query_side, other % query_blocks, query_blocks, head, queries)
        lag = (block_size * (number - key_number)).to(tl.int32)
        for begin in range(0, count, TOKENS):
            row = begin + tl.arange(0, TOKENS)
            is_query = row < count
            q = load_tokens(query, first, row, is_query, WIDTH, TYPE)
            g = load_tokens(grad_out, first, row, is_query, VALUE_WIDTH, TYPE)
            # Load what the kernel of queries has left: mean gains, and log-sums.
            average = tl.load(mean + first + row, mask=is_query, other=0)
            shift = finite(tl.load(lse + first + row, mask=is_query, other=0).to(ACC_TYPE))
            # Compute the gradients of the logits, and the weights, of a tile of queries.
            change, share = score_slope(
                q, k, g, v, average, shift, row, column, edge, is_query, is_key, lag, bias, query_words, key_words,
                first, first_key, scale, block_size, least, grow, CAUSAL, ACC_TYPE, PRECISION,
            )  # fmt: skip
            # Add to the gradients of the keys and of the values.
            key_sums += tl.dot(tl.trans(change.to(TYPE)), q, input_precision=PRECISION, out_dtype=ACC_TYPE)
            value_sums += tl.dot(tl.trans(share.to(TYPE)), g, input_precision=PRECISION, out_dtype=ACC_TYPE)
    store_tokens(grad_key, first_key, column, is_key, key_sums * from_bits(scale, ACC_TYPE), WIDTH)
    store_tokens(grad_value, first_key, column, is_key, value_sums, VALUE_WIDTH)


@triton_kernel
def _block_gains_kernel(
    grad_out, query, key, value, rowptr, col, query_side, key_side, bias, logits, gains, queries: tl.int64,
    keys: tl.int64, query_blocks: tl.int64, key_blocks: tl.int64, block_size: tl.int64, scale: tl.int64,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr,
    ACC_TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the logarithm of the summed weights and the mean gain of each pair of blocks and each query."""
    program = tl.program_id(0).to(tl.int64)
    head, block = program // query_blocks, program % query_blocks
    first, count, number = load_block(query_side, block, query_blocks, head, queries)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_query = row < count
    q = load_tokens(query, first, row, is_query, WIDTH, TYPE)
    if VALUE_WIDTH > 0:
        g = load_tokens(grad_out, first, row, is_query, VALUE_WIDTH, TYPE)
    for edge in range(tl.load(rowptr + program), tl.load(rowptr + program + 1)):
        first_key, key_count, key_number = load_block(
            key_side, tl.load(col + edge).to(tl.int64), key_blocks, head, keys
        )
        # A causal query i attends to key j if j <= i + lag.
        lag = (block_size * (number - key_number)).to(tl.int32)
        # Start the running maximum and the sums of this pair of blocks.
        top, norm = tl.full([TOKENS], float("-inf"), ACC_TYPE), tl.zeros([TOKENS], ACC_TYPE)
        sums = tl.zeros([TOKENS], ACC_TYPE)
        for begin in range(0, key_count, TOKENS):
            column = begin + tl.arange(0, TOKENS)
            is_key = column < key_count
            k = load_tokens(key, first_key, column, is_key, WIDTH, TYPE)
            logit = token_logits(
                q, k, row, column, edge, is_query, is_key, lag, bias, scale, block_size, CAUSAL, ACC_TYPE, PRECISION
            )
            # A larger maximum shrinks what has been summed so far.
            new = tl.maximum(top, tl.max(logit, 1))
            weight, shrink = tl.exp(logit - finite(new)[:, None]), tl.exp(top - finite(new))
            norm, top = norm * shrink + tl.sum(weight, 1), new
            # Add the weighted gains, if values were passed.
            if VALUE_WIDTH > 0:
                v = load_tokens(value, first_key, column, is_key, VALUE_WIDTH, TYPE)
                gain = tl.dot(g, tl.trans(v), input_precision=PRECISION, out_dtype=ACC_TYPE)
                sums = sums * shrink + tl.sum(weight * gain, 1)
        # Write the log of the summed weights, and the mean gain.
        tl.store(logits + edge * block_size + row, top + tl.log(norm), mask=is_query)
        tl.store(gains + edge * block_size + row, sums / tl.where(norm == 0, 1, norm), mask=is_query)


@triton_kernel
def _block_effect_kernel(
    rowptr, col, logits, gains, probe_rowptr, probe_col, probe_logits, probe_gains, effects, probe_effects,
    block_size: tl.int64, TOKENS: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """The effects of pairs and probes, summed over the queries of each: :func:`.reference.effects.leave_one_out`."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    start, stop, exists = tl.load(rowptr + row), tl.load(rowptr + row + 1), slot < block_size
    low, best = tl.full([TOKENS], float("-inf"), ACC_TYPE), slot.to(tl.int64) * 0 - 1
    top, second, heaviest = low, low, tl.zeros([TOKENS], ACC_TYPE)
    # Find the heaviest pair of each query, and the second largest logit.
    for edge in range(start, stop):
        logit = tl.load(logits + edge * block_size + slot, mask=exists, other=float("-inf"))
        more = logit > top
        second, top = tl.maximum(second, tl.minimum(logit, top)), tl.maximum(logit, top)
        heaviest = tl.where(more, tl.load(gains + edge * block_size + slot, mask=exists, other=0), heaviest)
        best = tl.where(more, edge, best)
    others, others_gain, base = tl.zeros([TOKENS], ACC_TYPE), tl.zeros([TOKENS], ACC_TYPE), finite(second)
    for edge in range(start, stop):  # weights without the heaviest, relative to the second
        logit = tl.load(logits + edge * block_size + slot, mask=exists, other=float("-inf"))
        weight = tl.where(best == edge, 0, tl.exp(tl.minimum(logit, second) - base))
        others += weight
        others_gain += weight * tl.load(gains + edge * block_size + slot, mask=exists, other=0)
    # Sum up the whole row, relative to its largest logit.
    ratio = tl.exp(second - finite(top))
    whole, whole_gain = 1 + others * ratio, heaviest + others_gain * ratio
    alone = others_gain / tl.where(others == 0, 1, others)
    # The effect of a pair is its share of its gain above the mean gain of the others.
    for edge in range(start, stop):
        logit = tl.load(logits + edge * block_size + slot, mask=exists, other=float("-inf"))
        gain = tl.load(gains + edge * block_size + slot, mask=exists, other=0)
        share = tl.exp(tl.minimum(logit, second) - base) * ratio
        other = share * (gain - (whole_gain - share * gain) / tl.where(best == edge, 1, whole - share))
        change = tl.where(best == edge, gain - alone, other) / whole
        tl.store(effects + edge, tl.sum(tl.where(exists, change, 0), 0))
    mean = tl.where(best < 0, 0, whole_gain / whole)
    # A probe joins the pairs of the row: bisection tells whether it is one already.
    for probe in range(tl.load(probe_rowptr + row), tl.load(probe_rowptr + row + 1)):
        token, least, most = tl.load(probe_col + probe), start, stop
        while least < most:
            middle = (least + most) // 2
            below = tl.load(col + middle) < token
            least, most = tl.where(below, middle + 1, least), tl.where(below, most, middle)
        edge_key = tl.load(col + least, mask=least < stop, other=-1)
        logit = tl.load(probe_logits + probe * block_size + slot, mask=exists, other=float("-inf"))
        gain = tl.load(probe_gains + probe * block_size + slot, mask=exists, other=0)
        # Write its effect, which is 0 for a pair of the row.
        odds = tl.where(best < 0, 0, whole * tl.exp(top - finite(logit)))
        counts = (logit > float("-inf")) & (edge_key != token)
        tl.store(probe_effects + probe, tl.sum(tl.where(counts, (gain - mean) / (1 + odds), 0), 0))


# ------------------------------------------------------------------ the ops


class _BlockLaunch:
    """Arguments of the kernels over blocks: blocks of both sides, number of programs, and constants.

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
        self.acc_dtype = accumulate_dtype(query, value, *more)
        kind = query.dtype if query.dtype == value.dtype and self.acc_dtype == torch.float32 else self.acc_dtype
        width, block_size = max(query.size(2), value.size(2)), cuts[0].block_size
        can_multiply = HAS_FLOAT64_DOT or kind != torch.float64
        self.possible = query.size(2) > 0 and width <= MAX_BLOCK_CHANNELS[kind] and can_multiply
        low = kind.itemsize == 2
        wide = width > (128 if low else 64) or kind == torch.float64
        most = 16 if wide else 64 if low and plain and width <= 64 else 32
        tokens = max(16, min(most, triton.next_power_of_2(block_size)))
        self.heads, self.counts = query.size(0), [cut.count for cut in cuts]
        self.parts = triton.cdiv(block_size, tokens)
        self.sides, self.sizes = cuts, (query.size(1), cuts[1].total, *self.counts, block_size)
        self.options = {
            "CAUSAL": is_causal, "WIDTH": query.size(2), "VALUE_WIDTH": value.size(2), "TOKENS": tokens,
            "TYPE": TRITON_DTYPES[kind], "ACC_TYPE": TRITON_DTYPES[self.acc_dtype], "maxnreg": 255,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            "num_warps": 4 if low and tokens < 64 and width <= 64 else 8, "num_stages": 2 if low else 1,
        }  # fmt: skip

    def start(self, program: Any, load_block: int, *arguments: Any) -> None:
        """A program for some tokens of each block of a side and head."""
        launch(program, (self.heads * self.counts[load_block], self.parts), *arguments, **self.options)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, bias: Tensor | None, scale: float, dropout: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    work = _BlockLaunch(cuts, query, value, (key, bias), is_causal, bias is None and dropout == 0)
    if not work.possible:
        return reference_blocks.block_attention(
            query, key, value, rowptr, col, query_ptr, key_ptr, block_size, is_causal, bias, scale, dropout, seed
        )
    out, lse = value.new_empty(*query.shape[:2], value.size(2)), query.new_empty(query.shape[:2], dtype=work.acc_dtype)
    tensors = (x.contiguous() for x in (query, key, value, rowptr, col))
    *load_words, least, grow = dropout_arguments(query, key, dropout, seed)
    bias = bias if bias is None else bias.contiguous()
    last = *work.sizes, least, grow, float_bits(scale)
    tables = (cut.table for cut in work.sides)
    work.start(_block_attention_kernel, 0, *tensors, *tables, bias, *load_words, out, lse, *last)
    return out, lse


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, block_size: int, is_causal: bool, scale: float,
    dropout: float, seed: int, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    work = _BlockLaunch(cuts, query, value, (key, bias), is_causal, bias is None and dropout == 0)
    if not work.possible:
        return reference_blocks.block_attention_backward(
            grad_out, query, key, value, rowptr, col, query_ptr, key_ptr, bias, out, lse, block_size, is_causal, scale,
            dropout, seed, need_bias,
        )  # fmt: skip
    order, ptr, row = reference_segments.by_key(rowptr, col, work.heads, work.counts[1])
    tokens = [x.contiguous() for x in (grad_out, query, key, value)]
    grads = [torch.empty_like(x) for x in tokens[1:]]
    mean, lse = lse.new_empty(lse.shape, dtype=work.acc_dtype), lse.contiguous()
    grad_bias = bias.new_zeros(bias.shape) if bias is not None and need_bias else None
    *load_words, least, grow = dropout_arguments(query, key, dropout, seed)
    common = *(cut.table for cut in work.sides), bias if bias is None else bias.contiguous(), *load_words
    last = *work.sizes, least, grow, float_bits(scale)
    work.start(
        _block_queries_kernel, 0, *tokens, rowptr.contiguous(), col.contiguous(), *common, out.contiguous(), lse, mean,
        grads[0], grad_bias, *last,
    )  # fmt: skip
    work.start(_block_keys_kernel, 1, *tokens, ptr, order, row, *common, lse, mean, *grads[1:], *last)
    return grads[0], grads[1], grads[2], lse.new_empty(0) if grad_bias is None else grad_bias


def _launch_pair_gains(
    parts: tuple[Tensor, ...], sets: Sequence[Rows], cuts: tuple[Cut, Cut], is_causal: bool, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Compute :func:`.reference.blocks.pair_gains`."""
    query, value, logits_and_gains = parts[1], parts[3], []
    biases = [bias for _, _, bias in sets]
    plain = all(bias is None for bias in biases)
    work = _BlockLaunch(cuts, query, value, (parts[2], *biases), is_causal, plain)
    if not work.possible:
        return reference_blocks.pair_gains(parts, sets, cuts, is_causal, scale)
    if work.acc_dtype == torch.float32:
        work.options["num_stages"] = 2  # keys and values wait in shared memory, not in registers
    tokens = [x.contiguous() for x in parts]
    for rowptr, col, bias in sets:
        logit, gain = (query.new_zeros(col.numel(), cuts[0].block_size, dtype=work.acc_dtype) for _ in range(2))
        rows, extra = (rowptr.contiguous(), col.contiguous()), bias if bias is None else bias.contiguous()
        graph = *rows, *(cut.table for cut in work.sides), extra
        work.start(_block_gains_kernel, 0, *tokens, *graph, logit, gain, *work.sizes, float_bits(scale))
        logits_and_gains.append((logit, gain))
    return logits_and_gains


def block_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    sets = Rows(rowptr, col, bias), Rows(probe_rowptr, probe_col, probe_bias)
    logits_and_gains = _launch_pair_gains((grad_out, query, key, value), sets, cuts, is_causal, scale)
    graphs = (
        (*(x.contiguous() for x in rows), *numbers) for (*rows, _), numbers in zip(sets, logits_and_gains, strict=True)
    )
    effects, tokens = (
        [logit.new_empty(logit.size(0)) for logit, _ in logits_and_gains],
        triton.next_power_of_2(block_size),
    )
    warps = min(32, max(1, tokens // 128))
    launch(
        _block_effect_kernel, rowptr.numel() - 1, *chain(*graphs), *effects, block_size, TOKENS=tokens,
        ACC_TYPE=TRITON_DTYPES[effects[0].dtype], num_warps=warps, maxnreg=min(255, 2048 // warps),
    )  # fmt: skip
    return effects[0].to(query.dtype), effects[1].to(query.dtype)


block_weight = partial(reference_blocks.block_weight, compute_gains=_launch_pair_gains)
