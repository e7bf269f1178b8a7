"""Keys at equal distances from a random start, for CUDA devices, in Triton.

In and out: the tensors of ``sample_systematic`` in :mod:`sbm_pyg.ops`, on one device. Not here: graphs of a block
model (:mod:`.cuda.sampling`).

One kernel draws a word for each row and counts its keys; the counts are summed up; another kernel writes the keys.
Arithmetic is in float64 and keeps its order. Multiplications and additions are not fused, for that would round once
where the CPU rounds twice, so the keys are those of every other backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import random_words
from ..reference import sampling as reference_sampling
from .rows import kernel, launch, span

_PURPOSE_SYSTEMATIC = tl.constexpr(random_words.SYSTEMATIC)
ROWS, KEYS = 128, 64  # that a program takes at once

# ------------------------------------------------------------------ kernels


@triton.jit
def _tokens(chance, query_ptr, key_ptr, query, there, sequences, CAUSAL: tl.constexpr):
    """Sequence of queries, or of one, their places there, the keys they may attend to, and the chance of each key."""
    low, high, size = query * 0, query * 0 + sequences, sequences
    while size > 0:
        middle, some = (low + high) // 2, high - low > 1
        below = some & (tl.load(query_ptr + middle, mask=some, other=0) <= query)
        low, high = tl.where(below, middle, low), tl.where(some & (below == 0), middle, high)
        size //= 2
    place = query - tl.load(query_ptr + low)
    reach = tl.load(key_ptr + low + 1) - tl.load(key_ptr + low)
    if CAUSAL:
        reach = tl.minimum(reach, place + 1)
    given = tl.load(chance + query, mask=there, other=0).to(tl.float64)
    return low, place, reach, tl.where(given > 0, tl.where(given < 1, given, 1), 0)


@kernel
def _start(
    chance, query_ptr, key_ptr, sequence_ids, start, counts, segments: tl.int64, queries: tl.int64, sequences: tl.int64,
    seed: tl.int64, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where each row starts, as a part of its distance, and its number of keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, query = row < segments, row % queries
    sequence, place, reach, share = _tokens(chance, query_ptr, key_ptr, query, there, sequences, CAUSAL)
    stream = tl.load(sequence_ids + sequence)
    head = (row // queries).to(tl.uint32) | _PURPOSE_SYSTEMATIC
    word = tl.philox(seed, place.to(tl.uint32) * 0, place.to(tl.uint32), stream.to(tl.uint32), head)[0]
    part = word.to(tl.float64) / 4294967296.0
    tl.store(start + row, part, mask=there)
    tl.store(counts + row + 1, tl.maximum(tl.ceil(reach.to(tl.float64) * share - part), 0).to(tl.int64), mask=there)


@kernel
def _step(
    chance, query_ptr, key_ptr, start, rowptr, col, queries: tl.int64, sequences: tl.int64, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The keys of each row."""
    row, _none, first, stop = span(rowptr, queries, 0)
    sequence, _place, reach, share = _tokens(chance, query_ptr, key_ptr, row % queries, True, sequences, CAUSAL)
    shift, part, spacing = tl.load(key_ptr + sequence), tl.load(start + row), 1.0 / share
    for begin in range(first, stop, KEYS):
        edge = begin + tl.arange(0, KEYS)
        key = (((edge - first).to(tl.float64) + part) * spacing).to(tl.int64)
        tl.store(col + edge, (shift + tl.minimum(key, reach - 1)).to(tl.int32), mask=edge < stop)


# ------------------------------------------------------------------ the op


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    rows, queries, sequences = heads * chance.numel(), chance.numel(), query_ptr.numel() - 1
    chance, query_ptr, key_ptr, sequence_ids = (
        x.detach().contiguous() for x in (chance, query_ptr, key_ptr, sequence_ids)
    )
    start = chance.new_empty(rows, dtype=torch.float64)
    counts, exact = query_ptr.new_zeros(rows + 1), {"num_warps": 1, "enable_fp_fusion": False}
    launch(
        _start, triton.cdiv(rows, ROWS), chance, query_ptr, key_ptr, sequence_ids, start, counts, rows, queries,
        sequences, seed, CAUSAL=is_causal, ROWS=ROWS, **exact,
    )  # fmt: skip
    rowptr = counts.cumsum(0)
    num_keys, num_edges = torch.stack([key_ptr[-1], rowptr[-1]]).tolist()
    reference_sampling.check_keys(num_keys)
    col = query_ptr.new_empty(num_edges, dtype=torch.int32)
    launch(
        _step, rows, chance, query_ptr, key_ptr, start, rowptr, col, queries, sequences, CAUSAL=is_causal, KEYS=KEYS,
        **exact,
    )  # fmt: skip
    return rowptr, col
