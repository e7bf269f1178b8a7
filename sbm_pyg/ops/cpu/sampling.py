"""The sampler for the CPU: rows in parallel, each by the cheapest of three ways, with its keys ascending.

In and out: the tensors of ``sample_sbm`` in :mod:`sbm_pyg.ops`. The law, the random words and the edges are those of
:func:`sbm_pyg.ops.reference.sampling.sample_sbm`. This module makes the tables that rows share, and orders the work.
Not here: how one row is drawn (:mod:`.draws`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import segments as reference_segments
from ..random_words import split_ids
from ..reference import sampling as reference_sampling
from ..reference.sampling import GAPS, KEYS_PER_PANEL, MAX_PROB, PAIRS, PROPOSALS, Law
from .draws import approximate_probs, by_gaps, by_pairs, by_proposals, draw_pieces, largest_prob
from .shared_draws import sample_shared
from .simd import at
from .threads import empty_table, even_ranges, numba_kernel, run, task_count

BFLOAT16_ERROR = 2.0**-8
"""Upper bound on the relative error of a number in bfloat16, which has eight significant bits."""
STEPS_PER_EDGE = 16
"""Products of two numbers that take as long as an edge of a sparse row."""
ROWS_PER_GROUP = 4
"""Rows by pairs whose probabilities are computed together."""
LARGE_PAIRS = 3
"""The way ``PAIRS`` of rows whose probabilities may exceed 1."""


# ------------------------------------------------------------------ many rows


class _Sequences(NamedTuple):
    """Sequences of the queries, and offsets of the sequences."""

    batch: np.ndarray  # sequence of each query
    allowed: np.ndarray  # number of keys that each query may attend to, the first ones of its sequence
    query_ptr: np.ndarray
    key_ptr: np.ndarray
    panel_ptr: np.ndarray
    sequence_ids: np.ndarray
    first_heads: np.ndarray  # number of head 0 in the random words of each sequence


class _Plan(NamedTuple):
    """For each row its way, the factor of its Poisson rates, and a bound on its probabilities."""

    way: np.ndarray
    stretch: np.ndarray
    bound: np.ndarray


class _Tables(NamedTuple):
    """Rates and memberships in the form of each sampling method. A table is empty if no row needs it."""

    rate: np.ndarray
    member: np.ndarray
    low_rate: np.ndarray  # these three for pairs: arguments of `approximate_probs`, and the error of its results
    columns: np.ndarray
    error: float
    wide_rate: np.ndarray  # these two for gaps: see `by_gaps`
    low_member: np.ndarray
    coarse: np.ndarray  # these two for proposals: see `_cumulate`
    fine: np.ndarray


@numba_kernel
def _survey(head, b, member, bits, key_ptr, member_sum, member_max, low_member):
    """Sum and maximum of each column of the memberships of a sequence of one head; and memberships in bfloat16.

    ``bits`` are those of the memberships in float32. Rows of bfloat16 are padded with zeros.
    """
    sums, tops, blocks = np.zeros(member.shape[2]), np.zeros(member.shape[2], member.dtype), member.shape[2]
    # Update sums and maxima by column, and round each number to the nearest bfloat16.
    for j in range(key_ptr[b], key_ptr[b + 1]):
        row, low = head * member.shape[1] + j, low_member.shape[1]
        for v in range(blocks):
            sums[v] += member[head, j, v]
        for v in range(blocks):
            tops[v] = member[head, j, v] if member[head, j, v] > tops[v] else tops[v]
        for v in range(blocks):
            word = bits[head, j, v]
            low_member[row, v] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        for v in range(blocks, low):
            low_member[row, v] = 0
    member_sum[head, b], member_max[head, b] = sums, tops


@partial(numba_kernel, reorder=True)
def _expect(first, last, queries, rate, batch, member_sum, member_max, expected, bound):
    """Expected number of keys and largest possible probability of each row, without exploration."""
    for r in range(first, last):
        head, b = r // queries, batch[r % queries]
        total, most = 0.0, 0.0
        for v in range(rate.shape[1]):
            total += np.float64(rate[r, v]) * member_sum[head, b, v]
            most += np.float64(rate[r, v]) * member_max[head, b, v]
        expected[r], bound[r] = total, most


@partial(numba_kernel, reorder=True)
def _expect_causal(head, b, queries, rate, member, query_ptr, key_ptr, expected, bound):
    """As :func:`_expect`, for the rows of a sequence of one head, over the keys that are not later."""
    blocks = rate.shape[1]
    sums, tops = np.zeros(blocks), np.zeros(blocks, member.dtype)
    for i in range(query_ptr[b], query_ptr[b + 1]):
        j, r = key_ptr[b] + i - query_ptr[b], head * queries + i
        if j < key_ptr[b + 1]:
            for v in range(blocks):
                sums[v] += member[head, j, v]
            for v in range(blocks):
                tops[v] = member[head, j, v] if member[head, j, v] > tops[v] else tops[v]
        total, most = 0.0, 0.0
        for v in range(blocks):
            total += np.float64(rate[r, v]) * sums[v]
            most += np.float64(rate[r, v]) * tops[v]
        expected[r], bound[r] = total, most


@numba_kernel
def pack_lanes(head, b, member, key_ptr, panel_ptr, columns):
    """Memberships of a sequence of one head in panels of 64 keys, block by block; zeros fill the last panel."""
    for panel in range(panel_ptr[b], panel_ptr[b + 1]):
        first = key_ptr[b] + KEYS_PER_PANEL * (panel - panel_ptr[b])
        count = min(KEYS_PER_PANEL, key_ptr[b + 1] - first)
        for v in range(member.shape[2]):
            for j in range(count):
                columns[head, panel, v, j] = member[head, first + j, v]
            columns[head, panel, v, count:] = 0


@numba_kernel
def _cumulate(head, first, last, member, key_ptr, panel_ptr, coarse, fine):
    """Running sums of memberships, for blocks ``first .. last-1`` of a head, and the sums at the ends of panels."""
    sums = np.empty(last - first)
    for b in range(key_ptr.size - 1):
        num_keys, begin = key_ptr[b + 1] - key_ptr[b], KEYS_PER_PANEL * panel_ptr[b]
        sums[:] = 0
        for j in range(KEYS_PER_PANEL * (panel_ptr[b + 1] - panel_ptr[b])):
            for v in range(first, last):
                if j < num_keys:
                    sums[v - first] += member[head, key_ptr[b] + j, v]
                fine[head, v, begin + j] = sums[v - first]
                if j % KEYS_PER_PANEL == KEYS_PER_PANEL - 1:
                    coarse[head, v, (begin + j) // KEYS_PER_PANEL] = sums[v - first]


@numba_kernel
def _draw_rows(first, last, law, sequences, plan, model, out, counts, state, top):
    """Draw the rows from ``state[0]`` on, until ``last`` or until ``out`` is full.

    Keys go to ``out`` and their numbers to ``counts``. ``state`` receives the next row, the edges so far, and 1 if a
    probability exceeds 1, which is written to ``top``.
    """
    seed, is_fastrg, exploration, clamp = law
    batch, allowed, query_ptr, key_ptr, panel_ptr, sequence_ids, first_heads = sequences
    way, stretch, bound = plan
    rate, member, low_rate, columns, error, wide_rate, low_member, coarse, fine = model
    queries = batch.size
    # Allocate buffers for the longest row, which all rows of the task share.
    longest = 0
    for b in range(key_ptr.size - 1):
        longest = max(longest, key_ptr[b + 1] - key_ptr[b])
    blocks, skip = rate.shape[1], panel_ptr[-1]
    words = np.empty((longest + 255) // 256 * 64, np.uint32)
    mass, block_bounds = np.empty(blocks + 1), np.full((blocks + 16) // 16 * 16, 0xFFFFFFFF, np.uint32)
    seen = np.zeros((longest + 63) >> 6, np.uint64)
    drawn, target, indices = np.empty(64, np.uint32), np.empty(16), np.empty(16, np.int64)
    drop = np.empty(longest, np.int32)
    half = wide_rate.shape[1] >> 1
    rough = 1.1 * BFLOAT16_ERROR + (blocks + 8) * 2.0**-22
    approx = np.empty((ROWS_PER_GROUP, (longest + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL), np.float32)
    group = np.empty(ROWS_PER_GROUP, np.int64)
    taken, ready = 0, 0  # rows of the group that are used, and that it holds
    r, used = state[0], state[1]
    while r < last:
        head, i = r // queries, r % queries
        b = batch[i]
        shift, num_keys, position, sequence_id = key_ptr[b], allowed[i], i - query_ptr[b], sequence_ids[b]
        its_head = head + first_heads[b]
        start, end, groups = panel_ptr[b], shift + num_keys, (num_keys + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL
        before = used
        # Rows by gaps take positions at geometric distances, and thin them.
        if way[r] == GAPS:
            if used + num_keys + 16 > out.size:
                break
            first_key = head * member.shape[1] + shift
            used = by_gaps(
                at(wide_rate, 2 * half * r), at(low_member, first_key * half), half, rough, at(rate, r * blocks),
                at(member, first_key * blocks), shift, num_keys, blocks, bound[r], position, sequence_id, its_head,
                seed, exploration, at(out, 0), used,
            )  # fmt: skip
        # Rows by proposals take a Poisson number of keys, and thin them; -1 says that `out` is full.
        elif way[r] == PROPOSALS:
            used = by_proposals(
                rate[r], member[head, shift:end], coarse, fine, head * blocks * skip + start, skip, groups, stretch[r],
                position, sequence_id, its_head, seed, not is_fastrg, exploration, mass, block_bounds, seen[:groups],
                drawn, target, indices, drop, shift, out, used,
            )  # fmt: skip
            if used < 0:
                used = before
                break
        else:
            # Rows by pairs compute their probabilities four rows at a time.
            members = member[head, shift:end]
            if used + num_keys + 64 > out.size:
                break
            if taken == ready:
                taken, ready, next_row, stop = 0, 0, r, min(last, head * queries + query_ptr[b + 1])
                while ready < ROWS_PER_GROUP and next_row < stop:
                    if way[next_row] >= PAIRS:
                        group[ready] = next_row
                        ready += 1
                    next_row += 1
                longest_row = allowed[group[ready - 1] % queries]
                most = (longest_row + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL  # panels of the last row
                approximate_probs(low_rate, group, ready, columns, head * skip + start, most, approx)
            # Probabilities that may exceed 1 are cut, or are an error.
            if way[r] == LARGE_PAIRS and not is_fastrg:
                top[0] = 0.0 if clamp else largest_prob(approx[taken], error, rate[r], members, exploration)
                if top[0] > MAX_PROB + exploration:
                    state[2] = 1
                    break
                for j in range(num_keys):
                    approx[taken, j] = min(approx[taken, j], np.float32(2))
            used = by_pairs(
                approx[taken], error, rate[r], members, position, sequence_id, its_head, seed, is_fastrg, exploration,
                words, shift, out, used,
            )  # fmt: skip
            taken += 1
        counts[r] = used - before
        r += 1
    state[0], state[1] = r, used


# ------------------------------------------------------------------ the op


def sample_sbm(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int, method: str,
    exploration: float, clamp: bool, is_causal: bool, row_group: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    reference_sampling.check_keys(int(key_ptr[-1]))
    if row_group > 1:
        more = (seed, exploration, clamp, is_causal, row_group)
        return sample_shared(rate, member, query_ptr, key_ptr, sequence_ids, *more)
    rate = rate.contiguous()  # rows are read through pointers
    heads, queries, blocks = rate.shape
    dtype = torch.float64 if rate.dtype == torch.float64 else torch.float32
    rates = rate.detach().to(dtype).reshape(heads * queries, blocks).numpy()
    members = member.detach().to(dtype).contiguous().numpy()
    q_ptr, k_ptr = query_ptr.numpy(), key_ptr.numpy()
    sequences = q_ptr.size - 1
    batch = np.repeat(np.arange(sequences), np.diff(q_ptr))
    allowed = reference_segments.allowed_keys(query_ptr, key_ptr, queries, is_causal).numpy()
    width = -(-blocks // 32) * 32

    # Sum up the memberships of each sequence, find the largest, and copy them in bfloat16.
    member_sum, member_max = np.empty((2, heads, sequences, blocks))
    low_member = empty_table((heads * member.shape[1] + 1, width), np.uint16)  # with one row more: see `by_gaps`
    low_rate, low_members = (x.astype(np.float32, copy=False) for x in (rates, members))
    bits = low_members.view(np.uint32)
    spans = [(head, b) for head in range(heads) for b in range(sequences)]
    tasks: list[tuple] = [(*span, members, bits, k_ptr, member_sum, member_max, low_member) for span in spans]
    run(_survey, tasks, task_count(4 * members.size))
    # Compute the expected number of keys of each row, and a bound on its probabilities.
    expected, bound = np.empty((2, heads * queries))
    if is_causal:
        tasks = [(*span, queries, rates, members, q_ptr, k_ptr, expected, bound) for span in spans]
        run(_expect_causal, tasks, task_count(2 * (rates.size + members.size)))
    else:
        cuts = even_ranges(heads * queries, task_count(2 * rates.size))
        run(_expect, [(*cut, queries, rates, batch, member_sum, member_max, expected, bound) for cut in cuts])
    # Each row takes the cheapest way.
    row_keys = np.tile(allowed, heads)
    expected += exploration * row_keys
    bound += exploration
    reference_sampling.check_expected(torch.from_numpy(expected))
    numbers = [torch.from_numpy(x) for x in (expected, bound, row_keys)]
    ways = reference_sampling.plan_rows(numbers[0], numbers[1], numbers[2], method)
    way = ways.way.numpy()
    way = np.where((way == PAIRS) & (bound > 1), LARGE_PAIRS, way).astype(np.uint8)
    plan, used = _Plan(way, ways.stretch.numpy(), bound), np.bincount(way, minlength=4)

    # Make the tables of those ways that a row takes.
    panel_ptr = np.concatenate([[0], np.cumsum((np.diff(k_ptr) + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL)])
    by_pairs_too = bool(used[PAIRS] + used[LARGE_PAIRS])
    columns = empty_table((heads, int(panel_ptr[-1]) if by_pairs_too else 0, blocks, KEYS_PER_PANEL), np.float32)
    if by_pairs_too:
        tasks = [(*span, low_members, k_ptr, panel_ptr, columns) for span in spans]
        run(pack_lanes, tasks, task_count(members.size))
    error = (blocks + 8) * 2.0**-22  # K products and sums of positive terms, each rounded by at most 2^-24
    wide_rate = rates
    if width > blocks or dtype == torch.float64:
        wide_rate = np.zeros((heads * queries if used[GAPS] else 0, width), np.float32)
        wide_rate[:, :blocks] = rates[: len(wide_rate)]
    coarse = np.empty((heads, blocks, panel_ptr[-1] if used[PROPOSALS] else 0))
    fine = empty_table((heads, blocks, coarse.shape[2] * KEYS_PER_PANEL), np.float64)
    if used[PROPOSALS]:
        parts = [(h, *part) for h in range(heads) for part in even_ranges(blocks, -(-blocks // 16))]
        tasks = [(*part, members, k_ptr, panel_ptr, coarse, fine) for part in parts]
        run(_cumulate, tasks, task_count(2 * members.size))

    law = Law(np.uint64(seed & 0xFFFFFFFFFFFFFFFF), method == "fastrg", exploration, clamp)
    ids = (x.numpy() for x in split_ids(sequence_ids))
    batches = _Sequences(batch, allowed, q_ptr, k_ptr, panel_ptr, *ids)
    model = _Tables(
        rates, members, low_rate, columns.ravel(), error, wide_rate, low_member.view(np.uint32).ravel(), coarse.ravel(),
        fine.ravel(),
    )  # fmt: skip
    # Draw ranges of rows on all threads, each into a buffer for the edges that are likely.
    likely = np.minimum(expected, row_keys)
    steps = STEPS_PER_EDGE * int(likely.sum()) + blocks // 4 * int(row_keys[way >= PAIRS].sum())
    pieces = even_ranges(heads * queries, task_count(steps, 8))
    rooms = (int(1.05 * likely[a:z].sum()) + 2 * int(row_keys[a:z].max(initial=0)) + 1024 for a, z in pieces)
    rowptr, col, gave_up, top = draw_pieces(_draw_rows, (law, batches, plan, model), pieces, rooms, heads * queries)
    if gave_up:
        raise ValueError(reference_sampling.probability_error(top - exploration))
    return torch.from_numpy(rowptr), torch.from_numpy(col)


# glibc keeps as much freed memory as twice the largest block, of up to 32 MiB, that ever came back to it: after this
# one, 64 MiB. So a training step need not give its memory back, and fault it in again page by page.
np.empty(2**25 - 2**16, np.uint8)
