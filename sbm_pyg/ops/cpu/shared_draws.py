"""Graphs of a block model whose queries share draws, for the CPU: keys that no row of a group reaches are skipped.

In and out: the tensors of ``sample_sbm`` in :mod:`sbm_pyg.ops`, with ``row_group`` above 1. The edges are those of the
comparison in :mod:`sbm_pyg.ops.reference.sampling`. Not here: independent pairs (:mod:`.sampling`).

The keys of a sequence are sorted by their strongest community, weighed by mean rates, a segment of positions at a
time, so that causal groups leave later segments out. They lie in blocks of 16 and panels of 16 blocks. For a group of
queries, of which up to 16 are in the lanes of a register, four stages narrow down the keys:

1. *Blocks.* The largest rates of the group times the largest memberships of a block bound its probabilities; the upper
   halves of the words of 256 keys are compared with the bounds of their blocks.
2. *Keys.* The bound of each key that is left: the largest rates times its own memberships.
3. *Rows.* The probabilities of all rows with a key, in float32 with a proven relative error. The few words that lie
   within the error are compared in float64.
4. *Order.* A bitmap of keys brings them back into the order of positions, and each row takes its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..reference import sampling as reference_sampling
from ..reference.random_words import MIX16, SHARED, split_ids
from ..reference.sampling import MAX_PROB
from .draws import pair_prob, philox_once
from .random_simd import (
    append64,
    fetch,
    lanes_with_bit,
    lowest_bit,
    mask_below,
    philox16,
    pick16,
    shared_masks,
    words_below,
)  # fmt: skip
from .simd import at, dots16, highest, load, peek, poke, scratch, splat, store
from .threads import empty_table, even_ranges, numba_kernel, run, task_count

KEYS_PER_BLOCK, KEYS_PER_PANEL = 16, 256
LEAST_SEGMENT, SEGMENTS = 1024, 4
"""Keys of a causal sequence that are sorted together, at least, in whole panels; and how many segments they make."""
LEVELS = 16
"""Classes of the sizes of memberships within a community, by powers of the square root of 2."""
NOWHERE = 2**31 - 1
"""Position of the keys that fill the last panel."""


class _GroupedSequences(NamedTuple):
    query_ptr: np.ndarray
    key_ptr: np.ndarray
    panel_ptr: np.ndarray
    tile_ptr: np.ndarray  # a tile: up to sixteen queries of a group
    sequence_ids: np.ndarray
    first_heads: np.ndarray  # number of head 0 in the random words of each sequence


class _Keys(NamedTuple):
    """Keys in the order of panels, heads outermost."""

    place: np.ndarray  # position in the sequence
    rows: np.ndarray  # memberships, padded with zeros
    upper: np.ndarray  # two 16-bit words of each key, which make upper halves
    other: np.ndarray
    lower: np.ndarray  # one 32-bit word, which makes lower halves
    tops: np.ndarray  # largest memberships of each block: panel, community, block


@numba_kernel
def _sort_keys(head, b, member, weight, sequences, segment, seed, keys, total):
    """Sort the keys of a sequence of one head into panels, and find the largest memberships of blocks."""
    _, key_ptr, panel_ptr, _, sequence_ids, first_heads = sequences
    place, rows, upper, other, lower, tops = keys
    blocks, first = member.shape[2], key_ptr[b]
    num_keys, panel = key_ptr[b + 1] - first, head * panel_ptr[-1] + panel_ptr[b]
    start, end = KEYS_PER_PANEL * panel, KEYS_PER_PANEL * (panel + panel_ptr[b + 1] - panel_ptr[b])
    words, bucket = np.empty(64, np.uint32), np.empty(min(segment, num_keys), np.int64)
    slots, sizes, seen = np.empty(blocks * LEVELS + 1, np.int64), np.empty(bucket.size, np.float32), 0.0
    bits = sizes.view(np.int32)
    for begin in range(0, num_keys, segment):
        some, most = min(segment, num_keys - begin), np.int32(0)
        for j in range(some):  # the strongest community of each key
            best, size = 0, np.float32(0)
            for v in range(blocks):
                x = np.float32(member[head, first + begin + j, v])
                seen += x
                if x * weight[head, v] > size:
                    best, size = v, x * weight[head, v]
            bucket[j], sizes[j] = best, size
            most = max(most, bits[j])
        slots[:] = 0
        for j in range(some):  # and its size, in half powers of 2
            bucket[j] = bucket[j] * LEVELS + min(LEVELS - 1, (most - bits[j]) >> 22)
            slots[bucket[j] + 1] += 1
        for v in range(1, slots.size):
            slots[v] += slots[v - 1]
        for j in range(some):
            if j % 16 == 0:
                philox16(begin + j, 0, sequence_ids[b], (head + first_heads[b]) | SHARED, seed, words, 0)
            slot = start + begin + slots[bucket[j]]
            slots[bucket[j]] += 1
            place[slot] = begin + j
            upper[slot], other[slot] = words[j % 16] >> np.uint32(16), words[j % 16] & np.uint32(0xFFFF)
            lower[slot] = words[16 + j % 16]
    place[start + num_keys : end] = NOWHERE
    rows[start + num_keys : end] = 0
    upper[start + num_keys : end] = 0
    other[start + num_keys : end] = 0
    largest = np.empty(blocks, np.float32)
    for block in range(start // KEYS_PER_BLOCK, end // KEYS_PER_BLOCK):
        largest[:] = 0
        for slot in range(KEYS_PER_BLOCK * block, min(KEYS_PER_BLOCK * (block + 1), start + num_keys)):
            row = first + place[slot]
            for v in range(blocks):
                rows[slot, v] = np.float32(member[head, row, v])
            for v in range(blocks):
                largest[v] = max(largest[v], rows[slot, v])
            rows[slot, blocks:] = 0
        for v in range(blocks):
            tops[block >> 4, v, block & 15] = largest[v]
        tops[block >> 4, blocks:, block & 15] = 0
    total[head, b] = seen


@numba_kernel
def _lower_half(word, own):
    """Lower half of the word of a key and a group, from the second words of both."""
    low = np.uint32(0xFFFF)
    x = ((word >> np.uint32(16)) + (own >> np.uint32(16))) & low
    for turn in range(2):
        x ^= x >> np.uint32(8)
        x = (x * np.uint32(MIX16[0])) & low
        x ^= x >> np.uint32(7)
        x = (x * np.uint32(MIX16[1])) & low
        x ^= x >> np.uint32(9)
        if turn == 0:
            x ^= (word + own) & low
    return x


@numba_kernel
def _sum_products(one, other, width):
    """Sum over v of ``one[v]`` times the sixteen numbers ``other[16 v : 16 v + 16]``; ``width`` is a multiple of 4."""
    w = x = y = z = splat(np.float32(0), 16)
    for v in range(0, width, 4):
        w = w + peek(one, v) * load(other, 16 * v, 16)
        x = x + peek(one, v + 1) * load(other, 16 * v + 16, 16)
        y = y + peek(one, v + 2) * load(other, 16 * v + 32, 16)
        z = z + peek(one, v + 3) * load(other, 16 * v + 48, 16)
    return (w + x) + (y + z)


@numba_kernel
def _four_products(rows, width, slots, turned, out):
    """The sums of :func:`_sum_products` for four rows, which read ``turned`` once; ``out`` receives 64 numbers."""
    a, b = at(rows, np.int64(peek(slots, 0)) * width), at(rows, np.int64(peek(slots, 1)) * width)
    c, d = at(rows, np.int64(peek(slots, 2)) * width), at(rows, np.int64(peek(slots, 3)) * width)
    w = x = y = z = splat(np.float32(0), 16)
    ww = xx = yy = zz = splat(np.float32(0), 16)
    for v in range(0, width, 2):
        one, two = load(turned, 16 * v, 16), load(turned, 16 * v + 16, 16)
        w, ww = w + peek(a, v) * one, ww + peek(a, v + 1) * two
        x, xx = x + peek(b, v) * one, xx + peek(b, v + 1) * two
        y, yy = y + peek(c, v) * one, yy + peek(c, v + 1) * two
        z, zz = z + peek(d, v) * one, zz + peek(d, v + 1) * two
    store(out, 0, w + ww)
    store(out, 16, x + xx)
    store(out, 32, y + yy)
    store(out, 48, z + zz)


@numba_kernel
def _draw_tiles(first, last, law, sequences, keys, rate, member, out, counts, state, top):
    """Draw the rows of the tiles from ``state[0]`` on, until ``last`` or until ``out`` is full.

    Keys go to ``out`` and their numbers to ``counts``. ``state`` receives the next tile, the edges so far, and 1 if a
    rate is not finite; ``top`` the largest probability, exact if it is above 1, unless it is cut.
    """
    seed, exploration, clamp, is_causal, row_group, segment = law
    query_ptr, key_ptr, panel_ptr, tile_ptr, sequence_ids, first_heads = sequences
    place, rows, upper, other, lower, tops = keys
    queries, blocks, width = query_ptr[-1], rate.shape[1], rows.shape[1]
    longest, tiles_of_group = 0, (row_group + 15) // 16
    for b in range(key_ptr.size - 1):
        longest = max(longest, key_ptr[b + 1] - key_ptr[b])
    error = np.float32((blocks + 16) * 2.0**-22)
    reach = np.float32(2.0**16) * (1 + error)
    reach_more = np.float32(exploration) * reach + np.float32(2.0**-10)
    below, above = np.float32(2.0**32) * (1 - error), np.float32(2.0**32) * (1 + error)
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    turned, largest = np.zeros(16 * width + 64, np.float32), np.zeros(width, np.float32)
    padded = (longest + KEYS_PER_PANEL - 1) // KEYS_PER_PANEL * KEYS_PER_PANEL
    candidates, words = np.zeros(padded + 64, np.int32), np.empty(padded, np.uint16)
    halves, probs, far = scratch(turned, 16), scratch(turned, 64), width * padded > 2**17
    marks, present = np.empty(longest + 16, np.uint16), np.zeros((longest + 63) >> 6, np.uint64)
    its_keys, its_marks = np.empty(longest + 16, np.int32), np.empty(longest + 16, np.uint16)
    masks = scratch(present, 4)
    tile, used, b = state[0], state[1], 0
    while tile < last:
        head, number = tile // tile_ptr[-1], tile % tile_ptr[-1]
        if number < tile_ptr[b]:
            b = 0
        while number >= tile_ptr[b + 1]:
            b += 1
        group, part = (number - tile_ptr[b]) // tiles_of_group, (number - tile_ptr[b]) % tiles_of_group
        position = group * row_group + 16 * part
        length, num_keys = query_ptr[b + 1] - query_ptr[b], key_ptr[b + 1] - key_ptr[b]
        count = min(16, row_group - 16 * part, length - position)
        allowed = min(num_keys, position + count) if is_causal else num_keys
        if count <= 0 or allowed == 0:
            tile += 1
            continue
        row = head * queries + query_ptr[b] + position

        # the rates of the group, with rows in the lanes, and the largest ones
        sure = np.float32(0)
        largest[:] = 0
        for lane in range(16):
            for v in range(blocks):
                x = np.float32(rate[row + lane, v]) if lane < count else np.float32(0)
                turned[16 * v + lane] = x
                sure += x
                largest[v] = max(largest[v], x)
        if not np.isfinite(sure):
            state[2] = 1
            return
        own, own_lower, _, _ = philox_once(group, 1, sequence_ids[b], (head + first_heads[b]) | SHARED, seed)
        own_upper, own_other = np.int64(own >> np.uint64(16)), np.int64(own & np.uint64(0xFFFF))

        # 1. blocks whose bound a word may lie below, and their keys
        first_panel, found = head * panel_ptr[-1] + panel_ptr[b], 0
        panels, origin = panel_ptr[b + 1] - panel_ptr[b], first_panel * KEYS_PER_PANEL
        whole = panels if allowed == num_keys else allowed // segment * (segment // KEYS_PER_PANEL)
        if is_causal:
            panels = min(panels, ((allowed - 1) // segment + 1) * (segment // KEYS_PER_PANEL))
        for panel in range(panels):
            bound = _sum_products(at(largest, 0), at(tops, 16 * width * (first_panel + panel)), width)
            start = KEYS_PER_PANEL * panel
            shared_masks(
                at(upper, origin), at(other, origin), start, own_upper, own_other, bound * reach + reach_more, masks,
                at(words, start),
            )  # fmt: skip
            if panel == panels - 1 or panel >= whole:
                for k in range(0, KEYS_PER_PANEL, 16):
                    there = words_below(at(place, origin), start + k, allowed) << np.uint64(k & 63)
                    there |= ~(np.uint64(0xFFFF) << np.uint64(k & 63))
                    poke(masks, k >> 6, peek(masks, k >> 6) & there)
            for quarter in range(4):
                found = append64(peek(masks, quarter), start + 64 * quarter, candidates, found)
        candidates[found : found + 16] = 0

        # 2. keys whose own bound their word may lie below
        left = 0
        for begin in range(0, found, 16):
            here, bound, c = at(candidates, begin), splat(np.float32(0), 16), 0
            for k in range(16):
                poke(halves, k, np.float32(peek(words, np.int64(peek(here, k)))))
            if far and begin + 16 < found:
                for k in range(begin + 16, begin + 32):
                    for line in range(0, width, 16):
                        fetch(rows, (origin + np.int64(peek(candidates, k))) * width + line)
            while width - c >= 64:
                bound = bound + dots16(load(largest, c, 64), at(rows, origin * width + c), width, here)
                c += 64
            while c < width:
                bound = bound + dots16(load(largest, c, 16), at(rows, origin * width + c), width, here)
                c += 16
            mask = mask_below(load(halves, 0, 16), bound * reach + reach_more)
            if found - begin < 16:
                mask &= (np.uint64(1) << np.uint64(found - begin)) - np.uint64(1)
            left = pick16(mask, here, 0, candidates, left)
        candidates[left : left + 4] = 0

        # 3. the rows that take each of these keys, four keys at a time
        for begin in range(0, left, 4):
            _four_products(at(rows, origin * width), width, at(candidates, begin), at(turned, 0), probs)
            for k in range(min(4, left - begin)):
                slot, p = np.int64(peek(candidates, begin + k)), load(probs, 16 * k, 16)
                key, word = np.int64(peek(place, origin + slot)), np.uint32(peek(words, slot)) << np.uint32(16)
                word |= _lower_half(peek(lower, origin + slot), np.uint32(own_lower))
                lanes = (np.uint64(1) << np.uint64(count)) - np.uint64(1)
                if is_causal and key > position:
                    lanes &= ~((np.uint64(1) << np.uint64(key - position)) - np.uint64(1))
                rounded = splat(np.float32(word), 16)
                hits, maybe = mask_below(rounded, p * below + less), mask_below(rounded, p * above + more)
                maybe &= ~hits & lanes
                hits &= lanes
                if not clamp and highest(p) * (1 + error) + exploration > 1:
                    maybe = lanes
                while maybe:
                    lane = lowest_bit(maybe)
                    maybe &= maybe - np.uint64(1)
                    exact = pair_prob(
                        at(rate, (row + lane) * blocks), at(member, (head * key_ptr[-1] + key_ptr[b] + key) * blocks),
                        blocks, exploration,
                    )  # fmt: skip
                    top[0] = max(top[0], exact)
                    hits |= np.uint64(np.float64(word) < np.floor(min(exact, 1.0) * 2.0**32)) << np.uint64(lane)
                poke(marks, key, np.uint16(hits))  # whether there is a hit or not: a guess would often be wrong
                poke(present, key >> 6, peek(present, key >> 6) | np.uint64(hits != 0) << np.uint64(key & 63))

        # 4. the keys by position, and for each row its own
        found = 0
        for part in range((allowed + 63) >> 6):
            mask = peek(present, part)
            poke(present, part, np.uint64(0))
            while mask:
                key = 64 * part + lowest_bit(mask)
                mask &= mask - np.uint64(1)
                poke(its_keys, found, np.int32(key))
                poke(its_marks, found, peek(marks, key))
                found += 1
        its_marks[found : found + 16] = 0
        if used + count * found + 16 > out.size:
            break
        for lane in range(count):
            before = used
            for begin in range(0, found, 16):
                used = pick16(lanes_with_bit(its_marks, begin, lane), at(its_keys, begin), key_ptr[b], out, used)
            counts[row + lane] = used - before
        tile += 1
    state[0], state[1] = tile, used


def sample_shared(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, clamp: bool, is_causal: bool, row_group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw the rows of groups. What has no finite sum is left to the reference, which says why."""
    heads, queries, blocks = rate.shape
    dtype = torch.float64 if rate.dtype == torch.float64 else torch.float32
    rates = rate.detach().to(dtype).reshape(heads * queries, blocks).contiguous().numpy()
    members = member.detach().to(dtype).contiguous().numpy()
    q_ptr, k_ptr = query_ptr.numpy(), key_ptr.numpy()
    lengths, sequences = np.diff(q_ptr), q_ptr.size - 1
    row_group = int(min(row_group, max(16, lengths.max(initial=0))))
    panels, tiles = -(-np.diff(k_ptr) // KEYS_PER_PANEL), -(-lengths // row_group) * -(-row_group // 16)
    panel_ptr, tile_ptr = (np.concatenate([[0], np.cumsum(x)]) for x in (panels, tiles))
    ids = (x.numpy() for x in split_ids(sequence_ids))
    batches = _GroupedSequences(q_ptr, k_ptr, panel_ptr, tile_ptr, *ids)
    longest = KEYS_PER_PANEL * max(1, int(panels.max(initial=0)))
    segment = max(LEAST_SEGMENT, -(-longest // (SEGMENTS * KEYS_PER_PANEL)) * KEYS_PER_PANEL) if is_causal else longest
    width, slots = -(-blocks // 16) * 16, heads * int(panel_ptr[-1]) * KEYS_PER_PANEL
    place, lower = np.empty(slots, np.int32), np.empty(slots, np.uint32)
    upper, other = np.empty((2, slots), np.uint16)
    tops = empty_table((slots // KEYS_PER_PANEL, width, 16), np.float32)
    keys = _Keys(place, empty_table((slots, width), np.float32), upper, other, lower, tops)
    word, totals = np.uint64(seed & 0xFFFFFFFFFFFFFFFF), np.zeros((heads, sequences))
    spans = [(head, b) for head in range(heads) for b in range(sequences) if lengths[b]]
    weight = rate.detach().float().mean(1).numpy()
    tasks = [(*span, members, weight, batches, segment, word, keys, totals) for span in spans]
    run(_sort_keys, tasks, task_count(4 * members.size))

    counts = np.zeros(heads * queries, np.int64)
    law = (word, exploration, clamp, is_causal, row_group, segment)
    pieces = even_ranges(heads * int(tile_ptr[-1]), task_count(16 * (rates.size + members.size), 8))
    found: list[list[np.ndarray]] = [[] for _ in pieces]
    tops_of, bad = np.zeros((len(pieces), 1)), [False]

    def draw(first: int, last: int, buffers: list[np.ndarray], top: np.ndarray) -> None:
        state = np.array([first, 0, 0])
        room = 17 * int(np.diff(k_ptr).max()) + 1024
        while state[0] < last and not bad[0]:
            out = np.empty(room, np.int32)
            state[1] = 0
            _draw_tiles(first, last, law, batches, keys, rates, members, out, counts, state, top)
            bad[0] |= bool(state[2])
            buffers.append(out[: state[1]])
            room *= 2

    if np.isfinite(totals).all():
        run(draw, [(*piece, buffers, top) for piece, buffers, top in zip(pieces, found, tops_of, strict=True)])
    if bad[0] or not np.isfinite(totals).all():
        more = (seed, "bernoulli", exploration, clamp, is_causal, row_group)
        return reference_sampling.sample_sbm(rate, member, query_ptr, key_ptr, sequence_ids, *more)
    if tops_of.max(initial=0) > MAX_PROB + exploration:
        raise ValueError(reference_sampling.probability_error(float(tops_of.max()) - exploration))
    rowptr = np.zeros(heads * queries + 1, np.int64)
    np.cumsum(counts, out=rowptr[1:])
    col = np.concatenate([np.empty(0, np.int32), *(buffer for buffers in found for buffer in buffers)])
    return torch.from_numpy(rowptr), torch.from_numpy(col)
