"""Keys at equal distances from a random start, on the CPU: a row costs one random word, and a key one multiplication.

In and out: the tensors of ``sample_systematic`` and ``sample_probes``. Not here: graphs of a block model
(:mod:`.sampling`); queries, which plain torch samples in a few microseconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..random_words import SYSTEMATIC, split_ids
from ..reference import sampling as reference_sampling
from ..reference import systematic as reference_systematic
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
        # Keys lie at equal distances from the start, up to the last that the query may attend to.
        for number in range(rowptr[r + 1] - begin_edge):
            col[begin_edge + number] = shift + min(most, np.int64((number + begin) * spacing))


def _allowed_keys(ptrs: tuple[np.ndarray, np.ndarray], is_causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each query, and the number of keys that it may attend to, ``[N]`` each."""
    queries, keys = ptrs
    batch = np.repeat(np.arange(queries.size - 1), np.diff(queries))
    allowed = np.diff(keys)[batch]
    return batch, np.minimum(np.arange(1, batch.size + 1) - queries[batch], allowed) if is_causal else allowed


def _sample(
    chance: np.ndarray, places: tuple[np.ndarray, np.ndarray], ptrs: tuple[np.ndarray, np.ndarray],
    sequence_ids: Tensor, heads: int, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw keys by chances in float64, ``[N]``; ``places`` are those of :func:`_allowed_keys`."""
    reference_sampling.check_keys(int(ptrs[1][-1]))
    rows = heads * chance.size
    start, counts, rowptr = np.empty(rows), np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    pieces = even_ranges(rows, task_count(STEPS_PER_WORD * rows, 3))
    ids, word = [x.numpy() for x in split_ids(sequence_ids)], np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    run(_start_rows, [(*piece, chance, *places, ptrs[0], *ids, word, start, counts) for piece in pieces])
    np.cumsum(counts, out=rowptr[1:])
    col = np.empty(rowptr[-1], np.int32)
    run(_write_keys, [(*piece, chance, *places, ptrs[1], start, rowptr, col) for piece in pieces])
    return torch.from_numpy(rowptr), torch.from_numpy(col)


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    ptrs = query_ptr.numpy(), key_ptr.numpy()
    chances = reference_systematic.cut_chance(chance).numpy()
    return _sample(chances, _allowed_keys(ptrs, is_causal), ptrs, sequence_ids, heads, seed)


def sample_probes(
    query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, queries: Tensor | None, num_queries: int, heads: int,
    per_query: float, seed: int, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ptrs = query_ptr.numpy(), key_ptr.numpy()
    places = _allowed_keys(ptrs, is_causal)
    chance = np.minimum(per_query / np.maximum(places[1], 1), 1).astype(np.float32)
    if queries is not None:
        chance[~queries.numpy()] = 0
    return *_sample(chance.astype(np.float64), places, ptrs, sequence_ids, heads, seed), torch.from_numpy(chance)
