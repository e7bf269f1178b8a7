"""Keys at equal distances from a random start, on the CPU: a row costs one random word, and a key one multiplication.

In and out: the tensors of ``sample_systematic`` in :mod:`sbm_pyg.ops`. Not here: graphs of a block model
(:mod:`.cpu_sampling`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..reference import sampling as reference_sampling
from ..reference import segments as reference_segments
from ..reference import systematic as reference_systematic
from ..reference.random_words import SYSTEMATIC, WORD_MASK
from .draws import philox
from .sampling import _cuts
from .threads import kernel, run, worth

STEPS_PER_WORD = 128  # products of two numbers that take as long as a random word


@kernel
def _starts(first, last, chance, batch, reach, query_ptr, sequence_ids, seed, start, counts):
    """Where each row starts, as a part of its distance, and its number of keys."""
    queries = chance.size
    for r in range(first, last):
        head, i = r // queries, r % queries
        b = batch[i]
        start[r] = np.float64(philox(0, i - query_ptr[b], sequence_ids[b], head | SYSTEMATIC, seed)[0]) / 2.0**32
        counts[r] = max(0, np.int64(np.ceil(reach[i] * chance[i] - start[r])))


@kernel
def _steps(first, last, chance, batch, reach, key_ptr, start, rowptr, col):
    for r in range(first, last):
        i = r % chance.size
        shift, most, place = key_ptr[batch[i]], reach[i] - 1, rowptr[r]
        begin, spacing = start[r], 1 / chance[i]
        for number in range(rowptr[r + 1] - place):
            col[place + number] = shift + min(most, np.int64((number + begin) * spacing))


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    reference_sampling.check_keys(int(key_ptr[-1]))
    chances, q_ptr, k_ptr = reference_systematic.cut_chance(chance).numpy(), query_ptr.numpy(), key_ptr.numpy()
    batch = np.repeat(np.arange(q_ptr.size - 1), np.diff(q_ptr))
    reach = reference_segments.allowed_keys(query_ptr, key_ptr, chances.size, is_causal).numpy()
    rows = heads * chances.size
    start, counts, rowptr = np.empty(rows), np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    pieces = _cuts(rows, worth(STEPS_PER_WORD * rows, 3))
    stream, word = sequence_ids.numpy() & WORD_MASK, np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    run(_starts, [(*piece, chances, batch, reach, q_ptr, stream, word, start, counts) for piece in pieces])
    np.cumsum(counts, out=rowptr[1:])
    col = np.empty(rowptr[-1], np.int32)
    run(_steps, [(*piece, chances, batch, reach, k_ptr, start, rowptr, col) for piece in pieces])
    return torch.from_numpy(rowptr), torch.from_numpy(col)
