"""Draws of the keys of one row on the CPU: by pairs, by gaps, or by proposals.

In: rates and memberships of a row, or tables made of them, and the counters of its random words. Out: its keys,
ascending, appended to an array. Not here: the way that a row takes, and the tables (:mod:`.sampling`).

A row by pairs computes its probabilities in float32, with a proven relative error. One random byte decides almost
every pair. The few pairs that it leaves open are decided in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from ..random_words import BERNOULLI_BYTE, BERNOULLI_REST, GAP, PROPOSAL, PROPOSAL_COUNT
from ..reference.sampling import KEYS_PER_PANEL
from .random_simd import (
    append16,
    append64,
    below16,
    bernoulli16,
    fetch,
    gaps16,
    lowest_bit,
    philox16,
    pick16,
    quick_gaps16,
    weigh16,
)
from .simd import WIDE, at, dots16, load, peek, poke, scratch, splat, store
from .threads import numba_kernel, run

KEYS_AT_ONCE = 64 if WIDE else 16
"""Keys whose products with four rows are summed at once; the sums stay in registers."""

_INVERSE = 1 / np.arange(1, 2**14 + 1).astype(np.float64)  # placed at count - 1


# ------------------------------------------------------------------ many rows


def draw_pieces(
    kernel: Callable, arguments: tuple, pieces: list[tuple[int, int]], rooms: Iterable[int], num_rows: int
) -> tuple[np.ndarray, np.ndarray, bool, float]:
    """Draw ranges of rows on all threads, each into a buffer that starts with a size from ``rooms`` and grows.

    The kernel draws from ``state[0]`` on, until the end of the range or of the buffer. It writes the number of edges of
    each row, and to ``state`` where to go on, the edges in the buffer, and 1 if it gives up. Returns the offsets of the
    rows, their keys, whether a kernel gave up, and the largest number that one left as ``top``.
    """
    counts, tops, gave_up = np.zeros(num_rows, np.int64), np.zeros((len(pieces), 1)), [False]
    buffers_of_pieces: list[list[np.ndarray]] = [[] for _ in pieces]

    def draw(first: int, last: int, room: int, buffers: list[np.ndarray], top: np.ndarray) -> None:
        state = np.array([first, 0, 0])
        while state[0] < last and not gave_up[0]:
            out = np.empty(room, np.int32)
            state[1] = 0
            kernel(first, last, *arguments, out, counts, state, top)
            gave_up[0] |= bool(state[2])
            buffers.append(out[: state[1]])
            room *= 2

    tasks = zip(pieces, rooms, buffers_of_pieces, tops, strict=True)
    run(draw, [(*piece, room, buffers, top) for piece, room, buffers, top in tasks])
    rowptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(counts, out=rowptr[1:])
    col = np.concatenate([np.empty(0, np.int32), *(buffer for buffers in buffers_of_pieces for buffer in buffers)])
    return rowptr, col, gave_up[0], float(tops.max(initial=0))


# ------------------------------------------------------------------ random words


@numba_kernel
def philox_once(c0, c1, c2, c3, seed):
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    k0, k1 = seed & low, seed >> np.uint64(32)
    for _ in range(10):
        a, b = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (b >> np.uint64(32)) ^ x1 ^ k0, b & low, (a >> np.uint64(32)) ^ x3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return x0, x1, x2, x3


@numba_kernel
def _fill_bernoulli_bytes(num_keys, position, sequence_id, head, seed, words):
    """Write the first random byte of each pair of a row, as 32-bit words in the order of the keys."""
    for first in range(0, num_keys, 256):
        philox16(first >> 4, position, sequence_id, head | BERNOULLI_BYTE, seed, words, first >> 2)


@numba_kernel
def _draw_poisson(rate, position, sequence_id, head, seed):
    # Draw equal parts of at most 256, whose exp(-rate) is a normal number, by inversion.
    parts = max(1, int(np.ceil(rate / 256)))
    lam = rate / parts
    total = 0
    for part in range(parts):
        w0, w1, _, _ = philox_once(part, position, sequence_id, head | PROPOSAL_COUNT, seed)
        left = np.float64((w0 << np.uint64(21)) | (w1 >> np.uint64(11))) * 2.0**-53
        count = 0
        term = np.exp(-lam)
        left -= term
        while left >= 0:
            count += 1
            term *= lam * _INVERSE[count - 1]
            left -= term
            if not term > 0:  # beyond double precision; a part of 256 ends far below the length of the table
                break
        total += count
    return total


# ------------------------------------------------------------------ one row by pairs


@partial(numba_kernel, reorder=True)
def pair_prob(rate, member, blocks, exploration):
    """Probability of one pair in float64, equal to the reference."""
    total = 0.0
    for v in range(blocks):
        total += np.float64(peek(rate, v)) * np.float64(peek(member, v))
    return total + exploration


@numba_kernel
def _bernoulli_word(byte, j, position, sequence_id, head, seed):
    """The random word of a pair, from its first byte."""
    low_bits = philox_once(j >> 2, position, sequence_id, head | BERNOULLI_REST, seed)[j & 3] >> np.uint64(8)
    return np.float64(np.uint64(byte) << np.uint64(24) | low_bits)


@numba_kernel
def four_dots(a, b, c, d, channels, columns, start, panels, out, width):
    """Dot products of four rows with the keys of some panels, into four rows of ``out``, ``width`` numbers apart.

    The panels lie in ``columns`` from ``start`` on, channel by channel, so each key that is loaded serves four rows.
    """
    for panel in range(panels):
        offset = start + panel * channels * KEYS_PER_PANEL
        for lane in range(0, KEYS_PER_PANEL, KEYS_AT_ONCE):
            w = x = y = z = splat(columns.dtype.type(0), KEYS_AT_ONCE)
            for v in range(channels):
                keys = load(columns, offset + v * KEYS_PER_PANEL + lane, KEYS_AT_ONCE)
                w = w + peek(a, v) * keys
                x = x + peek(b, v) * keys
                y = y + peek(c, v) * keys
                z = z + peek(d, v) * keys
            key = KEYS_PER_PANEL * panel + lane
            store(out, key, w)
            store(out, key + width, x)
            store(out, key + 2 * width, y)
            store(out, key + 3 * width, z)


@numba_kernel
def approximate_probs(rate, rows, count, columns, start, panels, approx):
    """Probabilities, in float32, of the first ``count`` of four rows with the keys of some panels."""
    blocks = rate.shape[1]
    four_dots(
        at(rate, rows[0] * blocks), at(rate, rows[min(1, count - 1)] * blocks),
        at(rate, rows[min(2, count - 1)] * blocks), at(rate, rows[min(3, count - 1)] * blocks), blocks, columns,
        start * blocks * KEYS_PER_PANEL, panels, at(approx, 0), approx.shape[1],
    )  # fmt: skip


@numba_kernel
def by_pairs(
    approx, error, rate, member, position, sequence_id, head, seed, is_fastrg, exploration, words, shift, out, used
):
    """Append the edges of a row whose probabilities are known up to a relative error; returns the new end of ``out``.

    ``approx`` is padded to a whole number of panels.
    """
    num_keys = member.shape[0]
    # Draw one random byte for each key.
    _fill_bernoulli_bytes(num_keys, position, sequence_id, head, seed, words)
    first_bytes = words.view(np.uint8)
    # A byte below the lower bound is an edge; one above the upper bound is not.
    below, above = np.float32(256 * (1 - error)), np.float32(256 * (1 + error))
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    if is_fastrg:  # 1 - exp(-p), whose relative error is no larger than that of p
        for j in range(num_keys):
            approx[j] = -np.expm1(-(approx[j] + np.float32(exploration)))
        less = more = np.float32(0)
    # Compare 64 keys at a time: bits of edges, and of keys that the error leaves open.
    for first in range(0, num_keys, KEYS_PER_PANEL):
        hits = maybe = np.uint64(0)
        for k in range(0, KEYS_PER_PANEL, 16):
            masks = bernoulli16(approx, first_bytes, first + k, below, less, above, more)
            hits |= (masks & np.uint64(0xFFFF)) << np.uint64(k)
            maybe |= (masks >> np.uint64(16)) << np.uint64(k)
        if first + KEYS_PER_PANEL > num_keys:
            existing = (np.uint64(1) << np.uint64(num_keys - first)) - np.uint64(1)
            hits, maybe = hits & existing, maybe & existing
        # Open keys draw the other 24 bits, and if these do not decide either, p is computed in float64.
        while maybe:
            lane = lowest_bit(maybe)
            maybe &= maybe - np.uint64(1)
            word = (
                _bernoulli_word(first_bytes[first + lane], first + lane, position, sequence_id, head, seed) * 2.0**-24
            )
            p = np.float64(approx[first + lane])
            hit = word < p * below + less
            if not hit and word <= p * above + more:
                exact = pair_prob(at(rate, 0), at(member, (first + lane) * rate.size), rate.size, exploration)
                hit = word * 2.0**24 < np.floor((-np.expm1(-exact) if is_fastrg else exact) * 2.0**32)
            hits |= np.uint64(hit) << np.uint64(lane)
        # Append the keys of the bits that are set.
        used = append64(hits, first + shift, out, used)
    return used


@numba_kernel
def largest_prob(approx, error, rate, member, exploration):
    """Largest probability of a row, exact if it is above 1."""
    top = np.float32(0)
    for j in range(member.shape[0]):
        top = max(top, approx[j])
    if top * (1 + error) + exploration <= 1:
        return 0.0
    exact = 0.0
    for j in range(member.shape[0]):
        if approx[j] * (1 + error) + exploration > 1:
            exact = max(exact, pair_prob(at(rate, 0), at(member, j * rate.size), rate.size, exploration))
    return exact


# ------------------------------------------------------------------ one row by gaps


@numba_kernel
def by_gaps(
    low_rate, low_member, width, error, rate, member, first_key, num_keys, blocks, bound, position, sequence_id, head,
    seed, exploration, out, used
):  # fmt: skip
    """Edges of a row whose probabilities are at most ``bound``, by gaps; returns the new end of ``out``.

    ``low_member`` holds two numbers of bfloat16 in each element, and one row behind the last. Up to 512 positions
    are drawn at a time, then thinned by approximate probabilities; those that these leave open are decided one by one.
    """
    spread, scale = -1 / np.log1p(-bound), np.float32(bound * 2.0**-32)
    below, above = np.float32(1 - error), np.float32(1 + error)
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    words, positions = scratch(low_member, 2048), scratch(out, 512)
    masks, doubtful = scratch(out, 32), scratch(out, 528)
    number, drawn, quick = 0, -1, num_keys <= 2**22
    far = num_keys * width > 2**17  # more than half of a usual second-level cache
    # Draw up to 512 positions of the row, sixteen gaps at a time.
    while drawn < num_keys:
        count = 0
        while count < 512 and drawn < num_keys:
            philox16(number, position, sequence_id, head | GAP, seed, words, 4 * count)
            # Float32 decides, unless rounding may have moved a position: then float64 does.
            last = quick_gaps16(words, 4 * count, spread, drawn, num_keys, at(positions, count)) if quick else -1
            if last < 0:
                last = gaps16(words, 4 * count, spread, drawn, num_keys, at(positions, count))
            drawn = last
            number += 16
            count += 16
        # Thin them: a position stays with probability p / bound, by p in bfloat16.
        left = 0
        for k in range(0, count, 16):
            # Ask for the memberships of the next sixteen, where the table exceeds the cache.
            if far and k + 16 < count:
                for t in range(16):
                    for c in range(0, width, 16):
                        fetch(low_member, np.int64(peek(positions, k + 16 + t)) * width + c)
            here, approx, c = at(positions, k), splat(np.float32(0), 16), 0
            # Sum sixteen dot products, in steps of 128, 64 and 32 channels.
            while 2 * (width - c) >= 128:
                approx = approx + dots16(load(low_rate, 2 * c, 128), at(low_member, c), width, here)
                c += 64
            while 2 * (width - c) >= 64:
                approx = approx + dots16(load(low_rate, 2 * c, 64), at(low_member, c), width, here)
                c += 32
            while c < width:
                approx = approx + dots16(load(low_rate, 2 * c, 32), at(low_member, c), width, here)
                c += 16
            both = weigh16(approx, words, 4 * k + 32, here, num_keys, scale, below, less, above, more)
            poke(masks, k >> 4, np.int32(both & np.uint64(0xFFFF)))
            left = append16(both >> np.uint64(16), k, doubtful, left)
        # Decide in float64 the positions that the error left open.
        for k in range(left):
            lane = np.int64(peek(doubtful, k))
            p = pair_prob(rate, at(member, np.int64(peek(positions, lane)) * blocks), blocks, exploration)
            word = peek(words, 4 * (lane & ~15) + 32 + (lane & 15))
            hit = np.float64(word) * bound < p * 2.0**32
            poke(masks, lane >> 4, peek(masks, lane >> 4) | np.int32(np.int64(hit) << (lane & 15)))
        # Append the positions that stay.
        for k in range(0, count, 16):
            used = pick16(np.uint64(peek(masks, k >> 4)), at(positions, k), first_key, out, used)
    return used


# ------------------------------------------------------------------ one row by proposals


@numba_kernel
def _inverse_cdf(mass, out):
    """Inverse CDF of unnormalized masses in 32-bit fixed point.

    For each entry the largest word that is mapped to it or to an earlier one.
    """
    total = 0.0
    for v in range(mass.size):
        total += mass[v]
        mass[v] = total
    scale = 2.0**32 / total if total > 0 else 0.0
    for v in range(mass.size):
        out[v] = np.uint32(min(max(mass[v] * scale, 1.0) - 1.0, 4294967295.0))
    out[mass.size - 1] = np.uint32(0xFFFFFFFF)


@numba_kernel
def _count_below(bounds, first, last, word):
    count = 0
    for offset in range(first, last, 16):
        count += below16(bounds, offset, word)
    return count


@numba_kernel
def _find(sums, start, length, target):
    """Index of the first of ``length`` ascending sums from ``start`` on that exceeds the target, else the last."""
    index = start
    while length > 1:
        half = length >> 1
        index += half * (sums[index + half - 1] <= target)
        length -= half
    return index


@numba_kernel
def by_proposals(
    rate, member, coarse, fine, start, skip, groups, stretch, position, sequence_id, head, seed, thin, exploration,
    mass, block_bounds, seen, drawn, target, group, drop, shift, out, used
):  # fmt: skip
    """Append the edges of a row by Poisson proposals; returns the new end of ``out``, or -1 if it is too short."""
    num_keys, blocks = member.shape
    # Expect edges of each block, and of exploration as one more; invert their distribution.
    for v in range(blocks):
        mass[v] = np.float64(rate[v]) * fine[KEYS_PER_PANEL * (start + v * skip) + num_keys - 1]
    mass[blocks] = exploration * num_keys
    _inverse_cdf(mass, block_bounds[: blocks + 1])
    # Draw a Poisson number of proposals, and then sixteen of them at a time.
    count = _draw_poisson(mass[blocks] * stretch, position, sequence_id, head, seed)
    if used + min(count, num_keys) > out.size:
        return -1
    begin, rejected = used, 0
    squeeze = np.uint32(min(2.0**32 / stretch, 4294967295.0))  # below 1/c every probability accepts
    for first in range(0, count, 16):
        philox16(first, position, sequence_id, head | PROPOSAL, seed, drawn, 0)
        size = min(16, count - first)
        # Draw the block of each proposal.
        for t in range(size):
            drawn[t] = _count_below(block_bounds, 0, block_bounds.size, drawn[t])
        # Find the panel of its key by bisection in the running sums, and ask for the panel's numbers.
        for t in range(size):
            block = np.int64(drawn[t])
            if block < blocks:
                panel = start + block * skip
                target[t] = (drawn[16 + t] + 0.5) * 2.0**-32 * fine[KEYS_PER_PANEL * panel + num_keys - 1]
                group[t] = _find(coarse, panel, groups, target[t])
                for line in range(0, KEYS_PER_PANEL, 8):
                    fetch(fine, KEYS_PER_PANEL * group[t] + line)
        # Find the key in the panel, or any key where exploration proposed.
        for t in range(size):
            block, word = np.int64(drawn[t]), drawn[16 + t]
            if block < blocks:
                sums = KEYS_PER_PANEL * (start + block * skip)
                length = min(KEYS_PER_PANEL, sums + num_keys - KEYS_PER_PANEL * group[t])
                drawn[16 + t] = _find(fine, KEYS_PER_PANEL * group[t], length, target[t]) - sums
            else:
                drawn[16 + t] = (np.uint64(word) * np.uint64(num_keys)) >> np.uint64(32)
        # Drop repeats by a bit for each key, and thin the others to the exact probability.
        for t in range(size):
            j = np.int64(drawn[16 + t])
            bit = np.uint64(1) << np.uint64(j & 63)
            if seen[j >> 6] & bit:
                continue
            seen[j >> 6] |= bit
            keep = True
            if thin and drawn[32 + t] >= squeeze:
                p = pair_prob(at(rate, 0), at(member, j * rate.size), rate.size, exploration)
                keep = np.float64(drawn[32 + t]) * -np.expm1(-stretch * p) < p * 2.0**32
            if keep:
                out[used] = j
                used += 1
            else:
                if rejected == drop.size:
                    return -1
                drop[rejected] = j
                rejected += 1
    # Clear the bits of rejected keys; the others are the edges.
    for e in range(rejected):
        seen[drop[e] >> 6] &= ~(np.uint64(1) << np.uint64(drop[e] & 63))
    # Few edges are sorted, many are read from the bits in order.
    if (used - begin) * 4 < seen.size:
        for e in range(begin, used):
            seen[out[e] >> 6] = 0
            out[e] += shift
        out[begin:used].sort()
        return used
    used = begin
    for part in range(seen.size):
        word = seen[part]
        seen[part] = 0
        while word:
            out[used] = (part << 6) + lowest_bit(word) + shift
            used += 1
            word &= word - np.uint64(1)
    return used
