"""The best keys of each query by dot products or the scores of an indexer, on the CPU: some rows stay in cache.

In and out: the tensors of ``index_top_k`` and ``segment_top_k`` in :mod:`sbm_pyg.ops`. Not here: the reference
(:mod:`sbm_pyg.ops.reference.pairs`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..reference.sampling import KEYS_PER_PANEL, check_keys
from .channels import to_array
from .draws import KEYS_AT_ONCE, four_dots
from .random_simd import above16, append64, count_bits, pick16
from .sampling import pack_lanes
from .simd import at, highest, lane_sum, load, maximum, peek, poke, splat, store, where_above
from .threads import even_ranges, numba_kernel, run, split, task_count

ROWS = 16
"""Rows that are scored together, a multiple of four."""
TRIALS = 12
"""Bounds that are tried for a row, so that few scores are left."""
BISECTIONS = 24
"""Bounds that are tried for these; with as many bits there is one that only ties do not obey."""


@numba_kernel
def _scores(query, pitch, weight, small, rows, channels, columns, start, count, scores, width):
    """As :func:`_dots`, weighted sums of ReLUs: two small heads of two rows at a time."""
    zero = splat(columns.dtype.type(0), KEYS_AT_ONCE)
    for panel in range(count):
        offset = start + panel * channels * KEYS_PER_PANEL
        # Take two rows at a time; an odd last row is done twice.
        for row in range(0, rows, 2):
            other = min(row + 1, rows - 1)
            q0, q1, w0, w1 = pitch * row, pitch * other, small * row, small * other
            for lane in range(0, KEYS_PER_PANEL, KEYS_AT_ONCE):
                s0 = s1 = zero
                # Take two small heads at a time, so that each key that is loaded serves four sums.
                for s in range(0, small, 2):
                    one, two = channels * s, channels * min(s + 1, small - 1)
                    x0 = y0 = x1 = y1 = zero
                    for v in range(channels):
                        keys = load(columns, offset + v * KEYS_PER_PANEL + lane, KEYS_AT_ONCE)
                        x0 = x0 + peek(query, q0 + one + v) * keys
                        y0 = y0 + peek(query, q0 + two + v) * keys
                        x1 = x1 + peek(query, q1 + one + v) * keys
                        y1 = y1 + peek(query, q1 + two + v) * keys
                    s0 = s0 + peek(weight, w0 + s) * maximum(zero, x0)  # of NaN, NaN
                    s1 = s1 + peek(weight, w1 + s) * maximum(zero, x1)
                    if s + 1 < small:
                        s0 = s0 + peek(weight, w0 + s + 1) * maximum(zero, y0)
                        s1 = s1 + peek(weight, w1 + s + 1) * maximum(zero, y1)
                first = width * row + KEYS_PER_PANEL * panel + lane
                store(scores, first, s0)
                store(scores, first + width, s1)


@numba_kernel
def _dots(query, pitch, rows, channels, columns, start, count, scores, width):
    """Dot products of one to ``ROWS`` rows with the keys of ``count`` panels, in rows of ``width`` scores.

    A panel stays in cache for all rows. Missing rows repeat the last one.
    """
    for panel in range(count):
        offset = start + panel * channels * KEYS_PER_PANEL
        for row in range(0, rows, 4):
            four_dots(
                at(query, pitch * row), at(query, pitch * min(row + 1, rows - 1)),
                at(query, pitch * min(row + 2, rows - 1)), at(query, pitch * min(row + 3, rows - 1)), channels,
                columns, offset, 1, at(scores, width * row + KEYS_PER_PANEL * panel), width,
            )  # fmt: skip


@numba_kernel
def _kth_largest(numbers, count, k):
    """The k-th largest of the first ``count`` numbers, by Hoare's selection; the k largest come to the front."""
    low, high, target = 0, count - 1, k - 1
    # Part the numbers around a pivot, and go on in the part that holds the k-th.
    while low < high:
        pivot, i, j = numbers[target], low, high
        while i <= j:
            while numbers[i] > pivot:
                i += 1
            while numbers[j] < pivot:
                j -= 1
            if i <= j:
                numbers[i], numbers[j] = numbers[j], numbers[i]
                i += 1
                j -= 1
        if j < target:
            low = i
        if i > target:
            high = j
    return numbers[target]


@numba_kernel
def _masks(scores, first, bound):
    """Masks of the scores above a bound and equal to the bound, of 64 scores from ``first`` on. NaN is in neither."""
    above = equal = np.uint64(0)
    for k in range(0, KEYS_PER_PANEL, 16):
        masks = above16(scores, first + k, bound)
        above |= (masks & np.uint64(0xFFFF)) << np.uint64(k)
        equal |= (masks >> np.uint64(16)) << np.uint64(k)
    return above, equal


@numba_kernel
def _count_above(scores, end, bound):
    """Number of scores above a bound among the first ``end``, a multiple of 64."""
    above = 0
    for first in range(0, end, KEYS_PER_PANEL):
        above += count_bits(_masks(scores, first, bound)[0])
    return above


@numba_kernel
def _spread_of(scores, count, kind):
    """Number, minimum, maximum, mean and standard deviation of those of ``count`` scores that are above minus infinity.

    NaN counts as minus infinity, but makes mean and deviation NaN.
    """
    lowest, zero, one = kind.type(-np.inf), splat(kind.type(0), 16), kind.type(1)
    top = bottom = splat(lowest, 16)
    total = square = finite = zero
    # Take sixteen scores at a time, and the last ones one by one.
    whole = count // 16 * 16
    for j in range(0, whole, 16):
        numbers = load(scores, j, 16)
        top, bottom = maximum(numbers, top), maximum(zero - numbers, bottom)
        finite = finite + where_above(numbers, lowest, one, zero)
        total, square = total + numbers, square + numbers * numbers
    number, low, high = int(lane_sum(finite)), -highest(bottom), highest(top)
    for j in range(whole, count):
        score = peek(scores, j)
        number += score > lowest
        if score < low:
            low = score
        if score > high:
            high = score
    mean = lane_sum(total) / max(1, whole)
    return number, low, high, mean, math.sqrt(max(0.0, lane_sum(square) / max(1, whole) - mean * mean))


@numba_kernel
def _gaussian_tail(part):
    """Standard deviations above the mean that a fraction of a normal distribution exceeds, with an error below 0.003.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.2.22.
    """
    root = math.sqrt(-2 * math.log(min(part, 1 - part)))
    distance = root - (2.30753 + 0.27061 * root) / (1 + root * (0.99229 + 0.04481 * root))
    return distance if part < 0.5 else -distance


@numba_kernel
def _with_ties(mask, equal, ties):
    """The mask with the first ``ties`` bits of ``equal``, and how many are left."""
    while equal and ties > 0:
        mask |= equal & (~equal + np.uint64(1))
        equal &= equal - np.uint64(1)
        ties -= 1
    return mask, ties


@numba_kernel
def _write_above(scores, end, bound, ties, base, out, used):
    """Append ``base`` and the position of each score above a bound, and of the first ``ties`` that equal it."""
    for first in range(0, end, KEYS_PER_PANEL):
        mask, equal = _masks(scores, first, bound)
        mask, ties = _with_ties(mask, equal, ties)
        if mask:
            used = append64(mask, base + first, out, used)
    return used


@numba_kernel
def _write_best_of_few(scores, k, count, low, high, best, where, base, out, used):
    """Append ``base`` and the k largest of the ``count`` scores at ``where``, which lie from ``low`` to ``high``."""
    half = best.dtype.type(0.5)
    # Pack the scores that are left.
    last = (count + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL
    for j in range(count):
        best[j] = peek(scores, where[j])
    best[count:last] = np.nan
    # Bisect for a bound that exactly k of them exceed.
    above = count
    for _ in range(BISECTIONS):
        bound = half * low + half * high
        if above == k or not low < bound < high:
            break
        above = _count_above(best, last, bound)
        if above >= k:
            low = bound
        else:
            high = bound
    # There is none if scores are equal: the k-th largest is the bound, and the first ties are taken.
    ties = 0
    if above != k:
        low, above = _kth_largest(best, count, k), 0
        for j in range(count):
            best[j] = peek(scores, where[j])
            above += best[j] > low
        ties = k - above
    # Append the positions of the chosen scores.
    for first in range(0, last, KEYS_PER_PANEL):
        mask, equal = _masks(best, first, low)
        mask, ties = _with_ties(mask, equal, ties)
        for j in range(0, KEYS_PER_PANEL, 16):
            chosen = mask >> np.uint64(j) & np.uint64(0xFFFF)
            used = pick16(chosen, at(where, first + j), base, out, used)
    return used


@numba_kernel
def _write_best(scores, count, end, k, relu, best, where, base, out, used):
    """Append ``base`` and the positions of the k largest scores, ascending; NaN becomes infinity.

    A few trials find a bound that some more than k scores exceed, or exactly k; then the bound among these is found,
    and of scores that equal it the first are taken. Scores from ``count`` to ``end`` are NaN. ``best`` has room for
    ``end`` numbers, and ``where`` for 64 more.
    """
    lowest, half, zero = best.dtype.type(-np.inf), best.dtype.type(0.5), best.dtype.type(0)
    # Count the scores that are numbers; NaN becomes infinity.
    candidates, low, high, mean, deviation = _spread_of(scores, count, best.dtype)
    if candidates < count:  # others are NaN, or minus infinity
        for j in range(count):
            score = peek(scores, j)
            if score != score:
                poke(scores, j, -lowest)
        candidates, low, high, mean, deviation = _spread_of(scores, count, best.dtype)
    # With so few numbers take all, and the first of the scores that are minus infinity.
    if candidates <= k:
        return _write_above(scores, end, lowest, k - candidates, base, out, used)
    # Try 0 as the bound first, which sums of ReLUs often are.
    at_high, start = 0, lowest
    if relu and low < 0 <= high:
        above, equal = 0, 0
        for first in range(0, end, KEYS_PER_PANEL):
            more, same = _masks(scores, first, zero)
            above, equal = above + count_bits(more), equal + count_bits(same)
        if above <= k <= above + equal:
            return _write_above(scores, end, zero, k - above, base, out, used)
        if above > k:
            low, candidates, start = zero, above, zero
        else:
            high, at_high = zero, above
    # Guess a bound by mean and deviation, which leaves slightly more than k scores; then interpolate.
    goal, most = 1.2 * k + 8, 2 * k + KEYS_PER_PANEL
    guess = mean + deviation * _gaussian_tail(goal / candidates) if goal < candidates else low
    for trial in range(TRIALS):
        if candidates <= most:
            break
        bound = best.dtype.type(guess)
        if not low < bound < high:
            bound = half * low + half * high
            if not low < bound < high:
                break
        above = _count_above(scores, end, bound)
        if above >= k:
            low, candidates, start = bound, above, bound
        else:
            high, at_high = bound, above
        if above == k:
            break
        if trial % 3 == 2:
            guess = half * low + half * high
        else:  # the logarithm of the number above falls about linearly
            part = math.log(candidates / goal) / math.log(candidates / (at_high + 0.5))
            guess = low + part * (high - low)
    # Write the k scores that the bound leaves; if it leaves more, bisect among these.
    if candidates == k:
        return _write_above(scores, end, start, 0, base, out, used)
    _write_above(scores, end, start, 0, 0, where, 0)
    return _write_best_of_few(scores, k, candidates, low, high, best, where, base, out, used)


@numba_kernel
def _rank_rows(first, last, queries, query, weight, columns, batch, allowed, num_chosen, key_ptr, panel_ptr, out):
    """Write the keys of rows ``first .. last-1``, ascending.

    Without small heads the scores are dot products.
    """
    small, pitch, longest, used = weight.shape[1], query.shape[1], 0, 0
    channels = pitch // max(1, small)
    for r in range(first, last):
        # The longest row sets the sizes of the buffers.
        longest = max(longest, allowed[r % queries])
    width = (longest + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL
    scores, best = np.empty(ROWS * width, query.dtype), np.empty(width, query.dtype)
    where, done = np.empty(width + KEYS_PER_PANEL, np.int32), first
    for r in range(first, last):
        head, i = r // queries, r % queries
        b, count = batch[i], allowed[i]
        start = (head * panel_ptr[-1] + panel_ptr[b]) * channels * KEYS_PER_PANEL
        panels = (count + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL
        # Score up to sixteen rows of a head and sequence together, while their panels are in cache.
        if r == done:  # rows of one head and sequence
            begin, most = r, panels
            while done < min(last, begin + ROWS, (head + 1) * queries) and batch[done % queries] == b:
                most = max(most, (allowed[done % queries] + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL)
                done += 1
            group_query, sizes = at(query, r * pitch), (done - begin, channels)
            if small:
                _scores(group_query, pitch, at(weight, r * small), small, *sizes, columns, start, most, scores, width)
            else:
                _dots(group_query, pitch, *sizes, columns, start, most, scores, width)
        # Rank each row by itself; padding of the last panel is NaN.
        row = at(scores, (r - begin) * width)
        end = panels * KEYS_PER_PANEL
        for j in range(count, end):
            poke(row, j, query.dtype.type(np.nan))
        used = _write_best(row, count, end, num_chosen[r], small > 0, best, where, key_ptr[b], out, used)


def index_top_k(
    query: Tensor, weight: Tensor | None, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, count: Tensor,
    allowed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_keys(int(key_ptr[-1]))
    if weight is None:
        query, weight = query.sum(2, keepdim=True), query.new_empty(*query.shape[:2], 0)
    heads, queries, _, channels = query.shape
    small = weight.size(2)
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    queries_of_rows = to_array(query.flatten(0, 1).flatten(1), like)
    weights, keys = to_array(weight, like).reshape(heads * queries, small), to_array(key, like)
    q_ptr, k_ptr = (ptr.contiguous().numpy() for ptr in (query_ptr, key_ptr))
    batch = np.repeat(np.arange(q_ptr.size - 1), np.diff(q_ptr))
    num_chosen = torch.minimum(count, allowed).flatten().numpy()
    panel_ptr = np.concatenate([[0], np.cumsum(-(-np.diff(k_ptr) // KEYS_PER_PANEL))])
    columns = np.empty((heads, panel_ptr[-1], channels, KEYS_PER_PANEL), keys.dtype)
    spans = [(head, b) for head in range(heads) for b in range(q_ptr.size - 1)]
    run(pack_lanes, [(*span, keys, k_ptr, panel_ptr, columns) for span in spans], task_count(keys.size))
    pieces = even_ranges(
        heads * queries, task_count(heads * int(allowed.sum()) * (max(1, small) * channels // 8 + 4), 8)
    )
    rowptr = np.zeros(heads * queries + 1, np.int64)
    np.cumsum(num_chosen, out=rowptr[1:])
    outs = [np.empty(rowptr[last] - rowptr[first] + KEYS_PER_PANEL, np.int32) for first, last in pieces]
    shared = (queries, queries_of_rows, weights, columns.ravel(), batch, allowed.numpy(), num_chosen, k_ptr)
    tasks = [(*piece, *shared, panel_ptr, out) for piece, out in zip(pieces, outs, strict=True)]
    run(_rank_rows, tasks)
    ends = (out[: rowptr[last] - rowptr[first]] for (first, last), out in zip(pieces, outs, strict=True))
    return torch.from_numpy(rowptr), torch.from_numpy(np.concatenate([*ends]))


@numba_kernel
def _rank_segments(first, last, src, ptr, count, out):
    """Write the indices of the largest numbers in each of the segments ``first .. last-1``.

    Places count from 0 in each segment.
    """
    longest, used = 0, 0
    for s in range(first, last):
        longest = max(longest, ptr[s + 1] - ptr[s])
    width = (longest + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL
    numbers, best = np.empty(width, src.dtype), np.empty(width, src.dtype)
    where = np.empty(width + KEYS_PER_PANEL, np.int32)
    for s in range(first, last):
        size = ptr[s + 1] - ptr[s]
        if count[s] > 0 and size > 0:
            end = (size + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL
            numbers[:size] = src[ptr[s] : ptr[s + 1]]
            numbers[size:end] = np.nan
            used = _write_best(at(numbers, 0), size, end, min(count[s], size), False, best, where, 0, out, used)


def segment_top_k(src: Tensor, ptr: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    numbers = to_array(src, src.new_empty(0, dtype=torch.promote_types(src.dtype, torch.float32)))
    before, num_chosen = ptr.contiguous().numpy(), count.contiguous().numpy()
    most = np.minimum(num_chosen, np.diff(before)).clip(0)
    ends = np.concatenate([[0], most.cumsum()])
    pieces = split(before, task_count(4 * numbers.size)) or [(0, 0)]
    outs = [np.empty(ends[last] - ends[first] + KEYS_PER_PANEL, np.int32) for first, last in pieces]
    tasks = [(*piece, numbers, before, num_chosen, out) for piece, out in zip(pieces, outs, strict=True)]
    run(_rank_segments, tasks)
    places = [out[: ends[last] - ends[first]] for (first, last), out in zip(pieces, outs, strict=True)]
    edge = np.concatenate(places) + np.repeat(before[:-1], most)
    return torch.from_numpy(ends), torch.from_numpy(edge)
