"""Keys at equal distances from a random start, on the CPU: a row costs one random word, and a key one multiplication.

In and out: the tensors of ``sample_systematic`` in :mod:`sbm_pyg.ops`. Not here: graphs of a block model
(:mod:`.sampling`); queries, which plain torch samples in a few microseconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..reference import sampling as reference_sampling
from ..reference import segments as reference_segments
from ..reference import systematic as reference_systematic
from ..reference.random_words import SYSTEMATIC, split_ids
from .draws import philox_once
from .threads import even_ranges, numba_kernel, run, task_count

sample_queries = reference_systematic.sample_queries

STEPS_PER_WORD = 128
"""Products of two numbers that take as long as a random word."""


@numba_kernel
def _start_rows(first, last, chance, batch, allowed, query_ptr, sequence_ids, first_heads, seed, start, counts):
    """Draw the start of each row, as a fraction of its spacing, and count its keys."""
    queries = chance.size
    for r in range(first, last):
        head, i = r // queries, r % queries
        b = batch[i]
        head += first_heads[b]
        start[r] = np.float64(philox_once(0, i - query_ptr[b], sequence_ids[b], head | SYSTEMATIC, seed)[0]) / 2.0**32
        counts[r] = max(0, np.int64(np.ceil(allowed[i] * chance[i] - start[r])))


@numba_kernel
def _write_keys(first, last, chance, batch, allowed, key_ptr, start, rowptr, col):
    for r in range(first, last):
        i = r % chance.size
        shift, most, begin_edge = key_ptr[batch[i]], allowed[i] - 1, rowptr[r]
        begin, spacing = start[r], 1 / chance[i]
        for number in range(rowptr[r + 1] - begin_edge):
            col[begin_edge + number] = shift + min(most, np.int64((number + begin) * spacing))


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    reference_sampling.check_keys(int(key_ptr[-1]))
    chances, q_ptr, k_ptr = reference_systematic.cut_chance(chance).numpy(), query_ptr.numpy(), key_ptr.numpy()
    batch = np.repeat(np.arange(q_ptr.size - 1), np.diff(q_ptr))
    allowed = reference_segments.allowed_keys(query_ptr, key_ptr, chances.size, is_causal).numpy()
    rows = heads * chances.size
    start, counts, rowptr = np.empty(rows), np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    pieces = even_ranges(rows, task_count(STEPS_PER_WORD * rows, 3))
    ids, word = [x.numpy() for x in split_ids(sequence_ids)], np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    run(_start_rows, [(*piece, chances, batch, allowed, q_ptr, *ids, word, start, counts) for piece in pieces])
    np.cumsum(counts, out=rowptr[1:])
    col = np.empty(rowptr[-1], np.int32)
    run(_write_keys, [(*piece, chances, batch, allowed, k_ptr, start, rowptr, col) for piece in pieces])
    return torch.from_numpy(rowptr), torch.from_numpy(col)
