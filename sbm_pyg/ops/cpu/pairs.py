"""The best keys of each query by the scores of an indexer, on the CPU: a row of scores at a time stays in cache.

In and out: the tensors of ``index_top_k`` in :mod:`sbm_pyg.ops`. Not here: the reference
(:mod:`sbm_pyg.ops.reference.pairs`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..reference.sampling import KEYS_PER_PANEL, check_keys
from ..reference.segments import allowed_keys
from .channels import to_array
from .random_simd import above16, append64, count_bits, lowest_bit
from .sampling import even_ranges, pack_lanes
from .simd import WIDE, at, highest, load, maximum, peek, splat, store
from .threads import numba_kernel, run, task_count

LANES = 64 if WIDE else 32
"""Keys whose products with two small heads are summed at once; the sums stay in registers."""
BISECTIONS = 12
"""Bounds that are tried for a row; thousands of scores need that many. Ties need order, whatever the bound."""


@numba_kernel
def _score(query, weight, small, channels, columns, start, count, scores):
    """Scores of a row with the keys of ``count`` panels, two small heads at a time."""
    zero = splat(scores.dtype.type(0), LANES)
    for panel in range(count):
        offset = start + panel * channels * KEYS_PER_PANEL
        for lane in range(0, KEYS_PER_PANEL, LANES):
            total = zero
            for s in range(0, small, 2):
                one, other = channels * s, channels * min(s + 1, small - 1)
                x = y = zero
                for v in range(channels):
                    keys = load(columns, offset + v * KEYS_PER_PANEL + lane, LANES)
                    x = x + peek(query, one + v) * keys
                    y = y + peek(query, other + v) * keys
                total = total + peek(weight, s) * maximum(zero, x)  # of NaN, NaN
                if s + 1 < small:
                    total = total + peek(weight, s + 1) * maximum(zero, y)
            store(scores, KEYS_PER_PANEL * panel + lane, total)


@numba_kernel
def _kth_largest(numbers, count, k):
    """The k-th largest of the first ``count`` numbers, by Hoare's selection; the k largest come to the front."""
    low, high, wanted = 0, count - 1, k - 1
    while low < high:
        pivot, i, j = numbers[wanted], low, high
        while i <= j:
            while numbers[i] > pivot:
                i += 1
            while numbers[j] < pivot:
                j -= 1
            if i <= j:
                numbers[i], numbers[j] = numbers[j], numbers[i]
                i += 1
                j -= 1
        if j < wanted:
            low = i
        if i > wanted:
            high = j
    return numbers[wanted]


@numba_kernel
def _masks(scores, first, bound):
    """Which of 64 scores from ``first`` on are above a bound, and which equal it; NaN is neither."""
    above = equal = np.uint64(0)
    for k in range(0, KEYS_PER_PANEL, 16):
        masks = above16(scores, first + k, bound)
        above |= (masks & np.uint64(0xFFFF)) << np.uint64(k)
        equal |= (masks >> np.uint64(16)) << np.uint64(k)
    return above, equal


@numba_kernel
def _count_above(scores, end, bound):
    """How many of the first ``end`` scores, a multiple of 64, are above a bound."""
    above = 0
    for first in range(0, end, KEYS_PER_PANEL):
        above += count_bits(_masks(scores, first, bound)[0])
    return above


@numba_kernel
def _bound_of_best(scores, end, k, best):
    """A bound that at most k of the first ``end`` scores exceed, and how many do; k or more are at least as large.

    It is one that exactly k scores exceed, which bisection may find; else the k-th largest score, or minus infinity if
    there are fewer. ``best`` has room for ``end`` numbers.
    """
    lowest, zero = scores.dtype.type(-np.inf), splat(scores.dtype.type(0), 16)
    above = _count_above(scores, end, lowest)
    if above <= k:
        return lowest, above
    top = bottom = splat(lowest, 16)
    for j in range(0, end, 16):
        some = load(scores, j, 16)
        top, bottom = maximum(some, top), maximum(zero - some, bottom)  # not NaN
    low, high, half = -highest(bottom), highest(top), scores.dtype.type(0.5)
    for _ in range(BISECTIONS):
        bound = half * low + half * high
        if not low < bound < high:
            break
        above = _count_above(scores, end, bound)
        if above == k:
            return bound, above
        if above > k:
            low = bound
        else:
            high = bound
    bound = low if _count_above(scores, end, low) >= k else lowest
    known = 0
    for first in range(0, end, KEYS_PER_PANEL):
        mask, _ = _masks(scores, first, bound)
        while mask:
            best[known] = scores[first + lowest_bit(mask)]
            known += 1
            mask &= mask - np.uint64(1)
    if known > k:
        bound, known = _kth_largest(best, known, k), k
    above = 0
    for place in range(known):
        above += best[place] > bound
    return bound, above


@numba_kernel
def _rank_rows(first, last, queries, query, weight, columns, batch, allowed, wanted, key_ptr, panel_ptr, degree, out):
    """Write the keys of rows ``first .. last-1``, ascending, and how many there are."""
    small, channels, longest, used = weight.shape[1], query.shape[1] // weight.shape[1], 0, 0
    for r in range(first, last):
        longest = max(longest, allowed[r % queries])
    scores = np.empty((longest + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL, query.dtype)
    best = np.empty_like(scores)
    for r in range(first, last):
        head, i = r // queries, r % queries
        b, count, before = batch[i], allowed[i], used
        start = (head * panel_ptr[-1] + panel_ptr[b]) * channels * KEYS_PER_PANEL
        panels = (count + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL
        _score(at(query, r * query.shape[1]), at(weight, r * small), small, channels, columns, start, panels, scores)
        end = panels * KEYS_PER_PANEL
        scores[count:end] = np.nan
        bound, above = _bound_of_best(scores, end, wanted[i], best)
        ties = wanted[i] - above
        for key in range(0, end, KEYS_PER_PANEL):
            mask, equal = _masks(scores, key, bound)
            while equal and ties > 0:  # the lower key wins
                mask |= equal & (~equal + np.uint64(1))
                equal &= equal - np.uint64(1)
                ties -= 1
            used = append64(mask, key_ptr[b] + key, out, used)
        degree[r] = used - before


def index_top_k(
    query: Tensor, weight: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, count: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    check_keys(int(key_ptr[-1]))
    heads, queries, small, channels = query.shape
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    queries_of_rows = to_array(query.flatten(2), like).reshape(heads * queries, -1)
    weights, keys = to_array(weight, like).reshape(heads * queries, small), to_array(key, like)
    q_ptr, k_ptr = (ptr.contiguous().numpy() for ptr in (query_ptr, key_ptr))
    batch = np.repeat(np.arange(q_ptr.size - 1), np.diff(q_ptr))
    allowed = allowed_keys(query_ptr, key_ptr, queries, is_causal)
    wanted = torch.minimum(count, allowed)
    panel_ptr = np.concatenate([[0], np.cumsum(-(-np.diff(k_ptr) // KEYS_PER_PANEL))])
    columns = np.empty((heads, panel_ptr[-1], channels, KEYS_PER_PANEL), keys.dtype)
    spans = [(head, b) for head in range(heads) for b in range(q_ptr.size - 1)]
    run(pack_lanes, [(*span, keys, k_ptr, panel_ptr, columns) for span in spans], task_count(keys.size))
    pieces = even_ranges(heads * queries, task_count(heads * int(allowed.sum()) * (small * channels // 8 + 4), 8))
    rowptr, degree = np.zeros(heads * queries + 1, np.int64), np.empty(heads * queries, np.int64)
    np.cumsum(np.tile(wanted.numpy(), heads), out=rowptr[1:])
    outs = [np.empty(rowptr[last] - rowptr[first] + KEYS_PER_PANEL, np.int32) for first, last in pieces]
    shared = (queries, queries_of_rows, weights, columns.ravel(), batch, allowed.numpy(), wanted.numpy(), k_ptr)
    tasks = [(*piece, *shared, panel_ptr, degree, out) for piece, out in zip(pieces, outs, strict=True)]
    run(_rank_rows, tasks)
    np.cumsum(degree, out=rowptr[1:])  # fewer than wanted where scores are NaN
    ends = (out[: rowptr[last] - rowptr[first]] for (first, last), out in zip(pieces, outs, strict=True))
    return torch.from_numpy(rowptr), torch.from_numpy(np.concatenate([*ends]))
