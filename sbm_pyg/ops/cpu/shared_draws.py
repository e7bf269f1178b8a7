"""Graphs of a block model whose queries share draws, for the CPU: keys that no row of a group reaches are skipped.

In and out: the tensors of ``sample_sbm`` in :mod:`sbm_pyg.ops`, with ``row_group`` above 1. The edges are those of the
comparison in :mod:`sbm_pyg.ops.reference.sampling`. Not here: independent pairs (:mod:`.sampling`).

The keys of a sequence are sorted by their strongest community, weighed by mean rates, a segment of positions at a
time, so that causal groups leave later segments out. They lie in blocks of 16 and panels of 16 blocks. For a group of
queries, of which up to 16 are in the lanes of a register, four stages narrow down the keys:

1. *Blocks.* The largest rates of the group times the largest memberships of a block bound its probabilities; the upper
   halves of the words of 256 keys are compared with the bounds of their blocks.
2. *Keys.* The bounds of the sixteen keys of a block that is left: the largest rates times their own memberships.
3. *Rows.* The probabilities of all rows with a key that is left, in bfloat16 with a proven relative error. The few
   words that lie within the error are compared in float64.
4. *Order.* A bitmap of keys brings them back into the order of positions, and each row takes its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..random_words import MIX16, SHARED, split_ids
from ..reference import sampling as reference_sampling
from ..reference.sampling import MAX_PROB
from .draws import draw_pieces, pair_prob, philox_once
from .random_simd import (
    append16,
    fetch,
    lanes_with_bit,
    lowest_bit,
    mask_below,
    philox16,
    pick16,
    shared_masks,
    words_below,
    words_within,
)  # fmt: skip
from .simd import (
    add_products_of_pairs,
    at,
    highest,
    lane_sum,
    load,
    load16,
    maximum,
    maximum_of_pairs,
    narrowed,
    pairs_of,
    peek,
    poke,
    splat,
    store,
    store16,
    transpose16,
)
from .threads import empty_table, even_ranges, numba_kernel, run, task_count

KEYS_PER_BLOCK, KEYS_PER_PANEL = 16, 256
LEAST_SEGMENT, SEGMENTS = 1024, 4
"""Keys of a causal sequence that are sorted together, at least, in whole panels; and how many segments they make."""
TILES = 4
"""Tiles of up to sixteen queries that go through the keys together."""
LEAST_CANDIDATES = 64
"""Number of candidate keys that a tile collects before it reads memberships, which the cache fetches meanwhile."""
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
    low: np.ndarray  # memberships of keys in the order of positions, in bfloat16, two in a word, padded with zeros
    pairs: np.ndarray  # the same words: block, pair of communities, key
    upper: np.ndarray  # two 16-bit words of each key, which make upper halves
    other: np.ndarray
    lower: np.ndarray  # one 32-bit word, which makes lower halves
    tops: np.ndarray  # largest memberships of each block, likewise: panel, pair of communities, block


@numba_kernel
def _pack_row(row, blocks, count, out, offset):
    """Write a row in bfloat16, communities v and ``count + v`` in word v; returns sums that are finite if it is."""
    sums = splat(np.float32(0), 16)
    for v in range(0, count, 16):
        one = narrowed(load16(row, v, blocks - v))
        two = narrowed(load16(row, count + v, blocks - count - v))
        sums = sums + (one + two)
        store16(out, offset + v, count - v, pairs_of(one, two))
    return sums


@numba_kernel
def _turn_rows(rows, pitch, count, out, offset, largest):
    """Turn sixteen rows of ``count`` words, so that rows are in the lanes; find the largest numbers of each word."""
    whole = count - count % 16
    for v in range(0, whole, 16):
        transpose16(out, offset + 16 * v, 16, rows, v, pitch)
    for v in range(whole, count):
        for lane in range(16):
            poke(out, offset + 16 * v + lane, peek(rows, lane * pitch + v))
    for v in range(0, count, 16):
        most = load(rows, v, 16)
        for lane in range(1, 16):
            most = maximum_of_pairs(load(rows, lane * pitch + v, 16), most)
        store16(largest, v, count - v, most)


@numba_kernel
def _sort_keys(head, b, member, weight, sequences, segment, seed, keys, total):
    """Sort the keys of a sequence of one head into panels, and find the largest memberships of blocks."""
    _, key_ptr, panel_ptr, _, sequence_ids, first_heads = sequences
    place, low, pairs, upper, other, lower, tops = keys
    blocks, first, num_pairs = member.shape[2], key_ptr[b], tops.shape[1]
    num_keys, panel = key_ptr[b + 1] - first, head * panel_ptr[-1] + panel_ptr[b]
    start, end = KEYS_PER_PANEL * panel, KEYS_PER_PANEL * (panel + panel_ptr[b + 1] - panel_ptr[b])
    words, bucket = np.empty(64, np.uint32), np.empty(min(segment, num_keys), np.int64)
    slots, sizes = np.empty(blocks * LEVELS + 1, np.int64), np.empty(bucket.size, np.float32)
    bits, sums, products = sizes.view(np.int32), splat(np.float32(0), 16), np.empty(2 * num_pairs + 16, np.float32)
    # Sort each segment of positions by itself.
    for begin in range(0, num_keys, segment):
        count, most = min(segment, num_keys - begin), np.int32(0)

        # the strongest community of each key, and its row in bfloat16
        for j in range(count):
            key = head * key_ptr[-1] + first + begin + j
            row, largest = at(member, key * blocks), splat(np.float32(0), 16)
            sums = sums + _pack_row(row, blocks, num_pairs, low, key * num_pairs)
            for v in range(0, blocks, 16):
                weighed = narrowed(load16(row, v, blocks - v)) * load16(at(weight, head * blocks), v, blocks - v)
                largest = maximum(weighed, largest)
                store(products, v, weighed)
            size, best = highest(largest), 0
            for v in range(0, blocks, 16):
                mask = ~mask_below(load(products, v, 16), splat(size, 16)) & np.uint64(0xFFFF)
                if mask:
                    best = v + lowest_bit(mask)
                    break
            bucket[j], sizes[j] = best, size
            most = max(most, bits[j])

        # and its size, in half powers of 2
        slots[:] = 0
        for j in range(count):
            bucket[j] = bucket[j] * LEVELS + min(LEVELS - 1, (most - bits[j]) >> 22)
            slots[bucket[j] + 1] += 1
        # Find places by counting sort, and draw the random words of each key.
        for v in range(1, slots.size):
            slots[v] += slots[v - 1]
        for j in range(count):
            if j % 16 == 0:
                philox16(begin + j, 0, sequence_ids[b], (head + first_heads[b]) | SHARED, seed, words, 0)
            slot = start + begin + slots[bucket[j]]
            slots[bucket[j]] += 1
            place[slot] = begin + j
            upper[slot], other[slot] = words[j % 16] >> np.uint32(16), words[j % 16] & np.uint32(0xFFFF)
            lower[slot] = words[16 + j % 16]
    place[start + num_keys : end] = NOWHERE
    upper[start + num_keys : end] = 0
    other[start + num_keys : end] = 0

    # memberships of the blocks: all, and the largest
    pitch = (num_pairs + 15) // 16 * 16
    rows, largest = np.zeros((16, pitch), np.uint32), np.empty(num_pairs, np.uint32)
    for block in range(start // KEYS_PER_BLOCK, end // KEYS_PER_BLOCK):
        for k in range(KEYS_PER_BLOCK):
            slot = KEYS_PER_BLOCK * block + k
            if slot < start + num_keys:
                words_here = (head * key_ptr[-1] + first + place[slot]) * num_pairs
                for v in range(0, num_pairs, 16):
                    store(rows, k * pitch + v, load16(at(low, words_here), v, num_pairs - v))
            else:
                rows[k] = 0
        _turn_rows(rows, pitch, num_pairs, pairs, block * num_pairs * 16, largest)
        for v in range(num_pairs):
            tops[block >> 4, v, block & 15] = largest[v]
    total[head, b] = lane_sum(sums)


@numba_kernel
def whole_word(upper, word, group_word):
    """The word of a key and a group: the upper half, and the lower half from the second words of both."""
    low = np.uint32(0xFFFF)
    x = ((word >> np.uint32(16)) + (group_word >> np.uint32(16))) & low
    for turn in range(2):
        x ^= x >> np.uint32(8)
        x = (x * np.uint32(MIX16[0])) & low
        x ^= x >> np.uint32(7)
        x = (x * np.uint32(MIX16[1])) & low
        x ^= x >> np.uint32(9)
        if turn == 0:
            x ^= (word + group_word) & low
    return np.uint32(upper) << np.uint32(16) | x


@numba_kernel
def _four_products(a, b, c, d, count, vectors, out):
    """Products of four rows with sixteen others, which are in the lanes; ``out`` receives 64 numbers.

    A row has ``count`` words of two numbers in bfloat16, a multiple of 8; the others have word v from ``16 v`` on.
    """
    w = x = y = z = splat(np.float32(0), 16)
    ww = xx = yy = zz = splat(np.float32(0), 16)
    for v in range(0, count, 2):
        w = add_products_of_pairs(w, vectors, 16 * v, peek(a, v))
        ww = add_products_of_pairs(ww, vectors, 16 * v + 16, peek(a, v + 1))
        x = add_products_of_pairs(x, vectors, 16 * v, peek(b, v))
        xx = add_products_of_pairs(xx, vectors, 16 * v + 16, peek(b, v + 1))
        y = add_products_of_pairs(y, vectors, 16 * v, peek(c, v))
        yy = add_products_of_pairs(yy, vectors, 16 * v + 16, peek(c, v + 1))
        z = add_products_of_pairs(z, vectors, 16 * v, peek(d, v))
        zz = add_products_of_pairs(zz, vectors, 16 * v + 16, peek(d, v + 1))
    store(out, 0, w + ww)
    store(out, 16, x + xx)
    store(out, 32, y + yy)
    store(out, 48, z + zz)


@numba_kernel
def _products_of_tiles(most, tiles, vectors, out):
    """:func:`_four_products` for one row of each tile, four tiles at a time."""
    count = most.shape[1]
    for t in range(0, tiles, 4):
        _four_products(
            at(most, t * count), at(most, (t + 1) * count), at(most, (t + 2) * count), at(most, (t + 3) * count), count,
            vectors, at(out, 16 * t),
        )  # fmt: skip


@numba_kernel
def _load_rates(rate, row, count, rows, turned, most):
    """Write the rates of up to sixteen rows in bfloat16, rows in the lanes, and the largest; whether all are finite."""
    blocks, sums = rate.shape[1], splat(np.float32(0), 16)
    rows[count:] = 0
    for lane in range(count):
        start = lane * rows.shape[1]
        sums = sums + _pack_row(at(rate, (row + lane) * blocks), blocks, most.size, rows, start)
    _turn_rows(rows, rows.shape[1], most.size, turned, 0, most)
    return np.isfinite(lane_sum(sums))


@numba_kernel
def _draw_tiles(first, last, law, sequences, keys, rate, member, out, counts, state, top):
    """Draw the rows of the tiles from ``state[0]`` on, until ``last`` or until ``out`` is full.

    Tiles of one sequence go through the panels together, so that each panel comes to the cache once for all. Keys go to
    ``out`` and their numbers to ``counts``. ``state`` receives the next tile, the edges so far, and 1 if a rate is not
    finite; ``top`` the largest probability, exact if it is above 1, unless it is cut.
    """
    seed, exploration, clamp, is_causal, row_group, segment = law
    query_ptr, key_ptr, panel_ptr, tile_ptr, sequence_ids, first_heads = sequences
    place, low, pairs, upper, other, lower, tops = keys
    queries, blocks, num_pairs = query_ptr[-1], rate.shape[1], tops.shape[1]
    width, tiles_of_group, longest = 2 * num_pairs, (row_group + 15) // 16, 0
    for b in range(key_ptr.size - 1):
        longest = max(longest, key_ptr[b + 1] - key_ptr[b])
    # Widen the bounds on words by the relative error of probabilities in bfloat16.
    error = np.float32(1.01 * 2.0**-7 + (blocks + 16) * 2.0**-22)
    reach = np.float32(2.0**16) * (1 + error)
    reach_more = np.float32(exploration) * reach + np.float32(2.0**-10)
    below, above = np.float32(2.0**32) * (1 - error), np.float32(2.0**32) * (1 + error)
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    turned, rows = np.zeros((TILES, 8 * width + 64), np.uint32), np.zeros((16, (num_pairs + 15) // 16 * 16), np.uint32)
    most = np.zeros((TILES, num_pairs), np.uint32)
    bounds, probs = np.empty(16 * TILES, np.float32), np.empty(64, np.float32)
    positions, sizes, reachable, fresh = np.empty((4, TILES), np.int64)
    waiting, room = np.zeros(TILES, np.int64), LEAST_CANDIDATES + KEYS_PER_PANEL + 16
    own_words, masks = np.empty((TILES, 3), np.int64), np.empty((TILES, 4), np.uint64)
    candidates, slots = np.empty((2, TILES, room), np.int32)
    whole, words = np.empty((TILES, room), np.uint32), np.empty((TILES, KEYS_PER_PANEL), np.uint16)
    unsure = np.empty((TILES * room, 4), np.int64)
    marks, present = np.empty((TILES, longest + 16), np.uint16), np.zeros((TILES, (longest + 63) >> 6), np.uint64)
    row_keys, row_marks = np.empty(longest + 16, np.int32), np.empty(longest + 16, np.uint16)
    tile, used, b = state[0], state[1], 0
    while tile < last:
        head, number = tile // tile_ptr[-1], tile % tile_ptr[-1]
        if number < tile_ptr[b]:
            b = 0
        while number >= tile_ptr[b + 1]:
            b += 1
        length, num_keys = query_ptr[b + 1] - query_ptr[b], key_ptr[b + 1] - key_ptr[b]
        # Load the next tiles of this sequence, with their positions, keys, rates and words.
        tiles = min(TILES, last - tile, tile_ptr[b + 1] - number)
        most_allowed = 0
        for t in range(tiles):
            group, part = (number + t - tile_ptr[b]) // tiles_of_group, (number + t - tile_ptr[b]) % tiles_of_group
            position = group * row_group + 16 * part
            count = max(0, min(16, row_group - 16 * part, length - position))
            allowed = min(num_keys, position + count) if is_causal else num_keys
            positions[t], sizes[t], reachable[t] = position, count, allowed if count else 0
            most_allowed = max(most_allowed, reachable[t])
            row = head * queries + query_ptr[b] + position
            if count and not _load_rates(rate, row, count, rows, turned[t], most[t]):
                state[2] = 1
                return
            group_word, own_lower, _, _ = philox_once(group, 1, sequence_ids[b], (head + first_heads[b]) | SHARED, seed)
            own_words[t] = (
                np.int64(group_word >> np.uint64(16)),
                np.int64(group_word & np.uint64(0xFFFF)),
                np.int64(own_lower),
            )

        first_panel, panels = head * panel_ptr[-1] + panel_ptr[b], panel_ptr[b + 1] - panel_ptr[b]
        origin = first_panel * KEYS_PER_PANEL
        members = at(low, (head * key_ptr[-1] + key_ptr[b]) * num_pairs)
        if is_causal:
            panels = min(panels, ((most_allowed - 1) // segment + 1) * (segment // KEYS_PER_PANEL))
        for panel in range(panels):
            start = origin + KEYS_PER_PANEL * panel
            # 1. blocks whose bound a word may lie below, for each tile
            _products_of_tiles(most, tiles, at(tops, 16 * num_pairs * (first_panel + panel)), bounds)
            for t in range(tiles):
                its_masks, allowed = at(masks, 4 * t), reachable[t]
                limits = load(bounds, 16 * t, 16) * reach + reach_more
                its_words = at(words, t * KEYS_PER_PANEL)
                shared_masks(
                    at(upper, 0), at(other, 0), start, own_words[t, 0], own_words[t, 1], limits, its_masks, its_words
                )
                if panel == panels - 1 or (panel + 1) * KEYS_PER_PANEL > allowed // segment * segment:
                    for k in range(0, KEYS_PER_PANEL, 16):
                        allowed_mask = words_below(at(place, 0), start + k, allowed) << np.uint64(k & 63)
                        allowed_mask |= ~(np.uint64(0xFFFF) << np.uint64(k & 63))
                        poke(its_masks, k >> 6, peek(its_masks, k >> 6) & allowed_mask)
                fresh[t] = 0

            # 2. their keys whose own bound it may lie below
            for k in range(0, KEYS_PER_PANEL, 16):
                mask = np.uint64(0)
                for t in range(tiles):
                    mask |= masks[t, k >> 6]
                if mask >> np.uint64(k & 63) & np.uint64(0xFFFF):
                    _products_of_tiles(most, tiles, at(pairs, (start + k) * num_pairs), bounds)
                    for t in range(tiles):
                        mask = masks[t, k >> 6] >> np.uint64(k & 63) & np.uint64(0xFFFF)
                        limits = load(bounds, 16 * t, 16) * reach + reach_more
                        mask &= words_within(at(words, t * KEYS_PER_PANEL + k), limits)
                        fresh[t] = append16(mask, k, at(slots, t * slots.shape[1]), fresh[t])

            # 3. the rows that take each of these keys, four keys at a time
            left_over = 0
            for t in range(tiles):
                its_words, its_slots = at(words, t * KEYS_PER_PANEL), at(slots, t * slots.shape[1])
                its_candidates, full = at(candidates, t * candidates.shape[1]), at(whole, t * whole.shape[1])
                its_marks, is_present = at(marks, t * marks.shape[1]), at(present, t * present.shape[1])
                every_lane, own_lower = (np.uint64(1) << np.uint64(sizes[t])) - np.uint64(1), np.uint32(own_words[t, 2])
                position, left = positions[t], waiting[t]
                for k in range(fresh[t]):
                    slot = np.int64(peek(its_slots, k))
                    key = np.int64(peek(place, start + slot))
                    poke(full, left, whole_word(peek(its_words, slot), peek(lower, start + slot), own_lower))
                    poke(its_candidates, left, np.int32(key))
                    for v in range(0, num_pairs, 16):
                        fetch(members, key * num_pairs + v)
                    left += 1
                waiting[t] = left
                if left < LEAST_CANDIDATES and panel < panels - 1:
                    continue
                waiting[t] = 0
                for k in range(left, left + 4):
                    poke(its_candidates, k, np.int32(0))
                for begin in range(0, left, 4):
                    four_keys = at(its_candidates, begin)
                    _four_products(
                        at(members, peek(four_keys, 0) * num_pairs), at(members, peek(four_keys, 1) * num_pairs),
                        at(members, peek(four_keys, 2) * num_pairs), at(members, peek(four_keys, 3) * num_pairs),
                        num_pairs, at(turned, t * turned.shape[1]), at(probs, 0),
                    )  # fmt: skip
                    for k in range(begin, min(begin + 4, left)):
                        key, word = np.int64(peek(its_candidates, k)), peek(full, k)
                        p, lanes = load(probs, 16 * (k - begin), 16), every_lane
                        if is_causal and key > position:
                            lanes &= ~((np.uint64(1) << np.uint64(key - position)) - np.uint64(1))
                        rounded = splat(np.float32(word), 16)
                        hits, maybe = mask_below(rounded, p * below + less), mask_below(rounded, p * above + more)
                        maybe &= ~hits & lanes
                        hits &= lanes
                        if not clamp and highest(p) * (1 + error) + exploration > 1:
                            maybe = lanes
                        # whether there is a hit or not: a guess would often be wrong
                        poke(its_marks, key, np.uint16(hits))
                        bit = np.uint64(hits != 0) << np.uint64(key & 63)
                        poke(is_present, key >> 6, peek(is_present, key >> 6) | bit)
                        unsure[left_over] = t, key, np.int64(maybe), np.int64(word)
                        left_over += maybe != 0

            # and in float64 the words that lie within the error
            for k in range(left_over):
                t, key, maybe, word = unsure[k]
                hits, lanes = np.uint64(0), np.uint64(maybe)
                while lanes:
                    lane = lowest_bit(lanes)
                    lanes &= lanes - np.uint64(1)
                    exact = pair_prob(
                        at(rate, (head * queries + query_ptr[b] + positions[t] + lane) * blocks),
                        at(member, (head * key_ptr[-1] + key_ptr[b] + key) * blocks), blocks, exploration,
                    )  # fmt: skip
                    top[0] = max(top[0], exact)
                    hits |= np.uint64(np.float64(word) < np.floor(min(exact, 1.0) * 2.0**32)) << np.uint64(lane)
                marks[t, key] |= np.uint16(hits)
                present[t, key >> 6] |= np.uint64(hits != 0) << np.uint64(key & 63)

        # 4. the keys by position, and for each row its own
        for t in range(tiles):
            drawn = 0
            for part in range((reachable[t] + 63) >> 6):
                mask = peek(present, t * present.shape[1] + part)
                poke(present, t * present.shape[1] + part, np.uint64(0))
                while mask:
                    key = 64 * part + lowest_bit(mask)
                    mask &= mask - np.uint64(1)
                    poke(row_keys, drawn, np.int32(key))
                    poke(row_marks, drawn, peek(marks, t * marks.shape[1] + key))
                    drawn += 1
            row_marks[drawn : drawn + 16] = 0
            if used + sizes[t] * drawn + 16 > out.size:
                present[:] = 0
                state[0], state[1] = tile, used
                return
            for lane in range(sizes[t]):
                before = used
                for begin in range(0, drawn, 16):
                    used = pick16(lanes_with_bit(row_marks, begin, lane), at(row_keys, begin), key_ptr[b], out, used)
                counts[head * queries + query_ptr[b] + positions[t] + lane] = used - before
            tile += 1
    state[0], state[1] = tile, used


def sample_shared(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, clamp: bool, is_causal: bool, row_group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw the rows of groups. If a sum is not finite, call the reference, which raises the error."""
    heads, queries, blocks = rate.shape
    dtype = torch.float64 if rate.dtype == torch.float64 else torch.float32
    rates = rate.detach().to(dtype).reshape(heads * queries, blocks).contiguous().numpy()
    members = member.detach().to(dtype).contiguous().numpy()
    q_ptr, k_ptr = query_ptr.numpy(), key_ptr.numpy()
    lengths, num_keys, sequences = q_ptr[1:] - q_ptr[:-1], k_ptr[1:] - k_ptr[:-1], q_ptr.size - 1
    row_group = int(min(row_group, max(16, lengths.max(initial=0))))
    panel_ptr, tile_ptr = np.zeros((2, sequences + 1), np.int64)
    np.cumsum(-(-num_keys // KEYS_PER_PANEL), out=panel_ptr[1:])
    np.cumsum(-(-lengths // row_group) * -(-row_group // 16), out=tile_ptr[1:])
    ids = (x.numpy() for x in split_ids(sequence_ids))
    batches = _GroupedSequences(q_ptr, k_ptr, panel_ptr, tile_ptr, *ids)
    longest = KEYS_PER_PANEL * max(1, -(-int(num_keys.max(initial=0)) // KEYS_PER_PANEL))
    segment = max(LEAST_SEGMENT, -(-longest // (SEGMENTS * KEYS_PER_PANEL)) * KEYS_PER_PANEL) if is_causal else longest
    width, slots = -(-blocks // 16) * 16, heads * int(panel_ptr[-1]) * KEYS_PER_PANEL
    place, lower = np.empty(slots, np.int32), np.empty(slots, np.uint32)
    upper, other = np.empty((2, slots), np.uint16)
    pairs, tops = (empty_table((count, width // 2, 16), np.uint32) for count in (slots // 16, slots // KEYS_PER_PANEL))
    low = empty_table((heads * int(k_ptr[-1]), width // 2), np.uint32)
    keys = _Keys(place, low, pairs, upper, other, lower, tops)
    word, totals = np.uint64(seed & 0xFFFFFFFFFFFFFFFF), np.zeros((heads, sequences))
    spans = [(head, b) for head in range(heads) for b in range(sequences) if lengths[b]]
    weight = rate.detach()[:, ::16].float().mean(1).numpy()  # of a part of the rows, since only the order depends on it
    tasks = [(*span, members, weight, batches, segment, word, keys, totals) for span in spans]
    run(_sort_keys, tasks, task_count(4 * members.size))

    law, is_finite = (word, exploration, clamp, is_causal, row_group, segment), bool(np.isfinite(totals).all())
    tasks_per_thread = 8 if torch.get_num_threads() > 1 else 1
    pieces = even_ranges(heads * int(tile_ptr[-1]), task_count(16 * (rates.size + members.size), tasks_per_thread))
    pieces = pieces if is_finite else []
    rooms = [17 * TILES * int(num_keys.max()) + 1024] * len(pieces)
    arguments = (law, batches, keys, rates, members)
    rowptr, col, gave_up, top = draw_pieces(_draw_tiles, arguments, pieces, rooms, heads * queries)
    if gave_up or not is_finite:
        more = (seed, "bernoulli", exploration, clamp, is_causal, row_group)
        return reference_sampling.sample_sbm(rate, member, query_ptr, key_ptr, sequence_ids, *more)
    if not clamp and top > MAX_PROB + exploration:
        raise ValueError(reference_sampling.probability_error(top - exploration))
    return torch.from_numpy(rowptr), torch.from_numpy(col)
