"""Random queries, and keys at equal distances from a random start, for CUDA devices, in Triton.

In and out: the tensors of ``sample_queries``, ``sample_systematic`` and ``sample_probes``, on one device. Not here:
graphs of a block model (:mod:`.sampling`).

One kernel draws a word for each row and counts its keys; the counts are summed up; another kernel writes the keys.
Arithmetic is in float64 and keeps its order. Multiplications and additions are not fused, for that would round once
where the CPU rounds twice, so the keys are those of every other backend.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import random_words
from ..reference import sampling as reference_sampling
from ..reference import systematic as reference_systematic
from .rows import launch, mix_words, row_span, triton_kernel

_PURPOSE_SYSTEMATIC, _QUERY_STEP = tl.constexpr(random_words.SYSTEMATIC), tl.constexpr(random_words.QUERY_STEP)
ROWS_PER_PROGRAM, KEYS_PER_PROGRAM = 128, 64


@triton.jit
def _find_sequences(query_ptr, query, sequences):
    """Sequence of queries, or of one, and their positions."""
    low, high, size = query * 0, query * 0 + sequences, sequences
    # Bisect the offsets for all queries at once.
    while size > 0:
        middle, searching = (low + high) // 2, high - low > 1
        below = searching & (tl.load(query_ptr + middle, mask=searching, other=0) <= query)
        low, high = tl.where(below, middle, low), tl.where(searching & (below == 0), middle, high)
        size //= 2
    return low, query - tl.load(query_ptr + low)


@triton_kernel
def _sample_queries_kernel(
    query_ptr, sequence_ids, is_sampled, queries: tl.int64, sequences: tl.int64, start_word: tl.int64, least: tl.int64,
    ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """True for the queries whose word is small; see :func:`.random_words.query_words`."""
    query = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    sequence, position = _find_sequences(query_ptr, query, sequences)
    step = tl.mul(tl.load(sequence_ids + sequence).to(tl.uint32), _QUERY_STEP, sanitize_overflow=False)
    word = (step.to(tl.int64) + position + start_word).to(tl.uint32)
    tl.store(is_sampled + query, mix_words(word) < least, mask=query < queries)


def sample_queries(query_ptr: Tensor, sequence_ids: Tensor, num_queries: int, part: float, seed: int) -> Tensor:
    is_sampled = query_ptr.new_empty(num_queries, dtype=torch.bool)
    launch(
        _sample_queries_kernel, triton.cdiv(num_queries, ROWS_PER_PROGRAM), query_ptr.contiguous(),
        sequence_ids.contiguous(), is_sampled, num_queries, query_ptr.numel() - 1, random_words.query_start(seed),
        round(part * 2**32), ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, num_warps=1,
    )  # fmt: skip
    return is_sampled


@triton.jit
def _locate_queries(chance, query_ptr, key_ptr, query, exists, sequences, CAUSAL: tl.constexpr):
    """Sequence and positions of one or more queries, their allowed keys, and the probability of each key."""
    low, position = _find_sequences(query_ptr, query, sequences)
    allowed = tl.load(key_ptr + low + 1) - tl.load(key_ptr + low)
    if CAUSAL:
        allowed = tl.minimum(allowed, position + 1)
    p = tl.load(chance + query, mask=exists, other=0).to(tl.float64)
    return low, position, allowed, tl.where(p > 0, tl.where(p < 1, p, 1), 0)


@triton_kernel
def _start_kernel(
    chance, query_ptr, key_ptr, sequence_ids, start, counts, segments: tl.int64, queries: tl.int64, sequences: tl.int64,
    seed: tl.int64, CAUSAL: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Draw the start of each row, as a fraction of its spacing, and count its keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    exists, query = row < segments, row % queries
    sequence, position, allowed, share = _locate_queries(chance, query_ptr, key_ptr, query, exists, sequences, CAUSAL)
    sequence_id = tl.load(sequence_ids + sequence)
    head = (row // queries + (sequence_id >> 32)).to(tl.uint32) | _PURPOSE_SYSTEMATIC
    word = tl.philox(seed, position.to(tl.uint32) * 0, position.to(tl.uint32), sequence_id.to(tl.uint32), head)[0]
    part = word.to(tl.float64) / 4294967296.0
    tl.store(start + row, part, mask=exists)
    tl.store(counts + row + 1, tl.maximum(tl.ceil(allowed.to(tl.float64) * share - part), 0).to(tl.int64), mask=exists)


@triton_kernel
def _step_kernel(
    chance, query_ptr, key_ptr, start, rowptr, col, queries: tl.int64, sequences: tl.int64, CAUSAL: tl.constexpr,
    KEYS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """The keys of each row."""
    row, _none, first, stop = row_span(rowptr, queries, 0)
    sequence, _position, allowed, share = _locate_queries(
        chance, query_ptr, key_ptr, row % queries, True, sequences, CAUSAL
    )
    shift, part, spacing = tl.load(key_ptr + sequence), tl.load(start + row), 1.0 / share
    # Keys lie at equal distances from the start, up to the last that the query may attend to.
    for begin in range(first, stop, KEYS_PER_PROGRAM):
        edge = begin + tl.arange(0, KEYS_PER_PROGRAM)
        key = (((edge - first).to(tl.float64) + part) * spacing).to(tl.int64)
        tl.store(col + edge, (shift + tl.minimum(key, allowed - 1)).to(tl.int32), mask=edge < stop)


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    rows, queries, sequences = heads * chance.numel(), chance.numel(), query_ptr.numel() - 1
    arguments = (chance, query_ptr, key_ptr, sequence_ids)
    chance, query_ptr, key_ptr, sequence_ids = (x.detach().contiguous() for x in arguments)
    start = chance.new_empty(rows, dtype=torch.float64)
    counts, exact = query_ptr.new_zeros(rows + 1), {"num_warps": 1, "enable_fp_fusion": False}
    launch(
        _start_kernel, triton.cdiv(rows, ROWS_PER_PROGRAM), chance, query_ptr, key_ptr, sequence_ids, start, counts,
        rows, queries, sequences, seed, CAUSAL=is_causal, ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, **exact,
    )  # fmt: skip
    rowptr = counts.cumsum(0)
    num_keys, num_edges = torch.stack([key_ptr[-1], rowptr[-1]]).tolist()
    reference_sampling.check_keys(num_keys)
    col = query_ptr.new_empty(num_edges, dtype=torch.int32)
    launch(
        _step_kernel, rows, chance, query_ptr, key_ptr, start, rowptr, col, queries, sequences, CAUSAL=is_causal,
        KEYS_PER_PROGRAM=KEYS_PER_PROGRAM, **exact,
    )  # fmt: skip
    return rowptr, col


sample_probes = partial(reference_systematic.sample_probes, sample=sample_systematic)
