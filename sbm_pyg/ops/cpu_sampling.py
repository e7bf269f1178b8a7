"""The sampler for the CPU: rows in parallel, each by proposals, by gaps or by coins, sorted as they are made.

Same law, same random words and the same edges as :func:`sbm_pyg.ops.reference.sample_sbm`. A row of coins needs its
probabilities only to the precision that each coin asks for: a product in float32, or in bfloat16 where the machine has
tiles for it, gives them with a proven relative error, one random byte decides almost every pair, and the few that it
leaves open are settled in float64.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference, tiles
from .bits import append16, below16, fetch, gaps16, lowest_bit, philox16, pick16, toss16, weigh16
from .simd import at, dots, load, peek, scratch, splat, store
from .threads import kernel, run
from .tiles import close_tiles, multiply_tiles, open_tiles

_COIN_BYTE, _COIN_REST, _COUNT, _PROPOSAL, _GAP = (
    purpose << 24
    for purpose in (reference.COIN_BYTE, reference.COIN_REST, reference.COUNT, reference.PROPOSAL, reference.GAP)
)
_PANEL = 64  # keys that lie together, block by block
_GROUP = 16 if tiles.AVAILABLE else 4  # rows whose probabilities are computed together

_INVERSE = 1 / np.arange(1, 2**14 + 1).astype(np.float64)  # placed at count - 1

_PROPOSALS, _GAPS, _COINS = reference.PROPOSALS, reference.GAPS, reference.COINS
_LARGE_COINS = 3  # coins whose probabilities may exceed 1


# ------------------------------------------------------------------ random words


@kernel
def _philox(c0, c1, c2, c3, seed):
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    k0, k1 = seed & low, seed >> np.uint64(32)
    for _ in range(10):
        a, b = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (b >> np.uint64(32)) ^ x1 ^ k0, b & low, (a >> np.uint64(32)) ^ x3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return x0, x1, x2, x3


@kernel
def _coin_bytes(num_keys, row, stream, head, seed, words):
    """Random bytes of a row of coins, as 32-bit words in the order of the keys."""
    for first in range(0, num_keys, 256):
        philox16(first >> 4, row, stream, head | _COIN_BYTE, seed, words, first >> 2)


@kernel
def _poisson(rate, row, stream, head, seed):
    parts = max(1, int(np.ceil(rate / 256)))
    lam = rate / parts
    total = 0
    for part in range(parts):
        w0, w1, _, _ = _philox(part, row, stream, head | _COUNT, seed)
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


# ------------------------------------------------------------------ one row by coins


@partial(kernel, reorder=True)
def _prob(rate, key, blocks, exploration):
    """Probability of one pair in float64, as the reference has it."""
    total = 0.0
    for v in range(blocks):
        total += np.float64(peek(rate, v)) * np.float64(peek(key, v))
    return total + exploration


@kernel
def _coin(byte, j, row, stream, head, seed):
    """All 32 bits of the coin of a pair, from its first byte on."""
    rest = _philox(j >> 2, row, stream, head | _COIN_REST, seed)[j & 3] >> np.uint64(8)
    return np.float64(np.uint64(byte) << np.uint64(24) | rest)


@kernel
def _product_of_lanes(rate, rows, some, columns, first, count, some_rows, approx):
    """Probabilities of the first ``some`` of four rows with the keys of ``count`` panels.

    Four times 64 sums that stay in registers.
    """
    blocks, width, flat = rate.shape[1], approx.shape[1], approx.ravel()
    a, b, c, d = rows[0], rows[min(1, some - 1)], rows[min(2, some - 1)], rows[min(3, some - 1)]
    for panel in range(count):
        w = x = y = z = splat(rate.dtype.type(0), _PANEL)
        offset = (first + panel) * blocks * _PANEL
        for v in range(blocks):
            keys = load(columns, offset + v * _PANEL, _PANEL)
            w = w + rate[a, v] * keys
            x = x + rate[b, v] * keys
            y = y + rate[c, v] * keys
            z = z + rate[d, v] * keys
        store(flat, _PANEL * panel, w)
        store(flat, _PANEL * panel + width, x)
        store(flat, _PANEL * panel + 2 * width, y)
        store(flat, _PANEL * panel + 3 * width, z)


@kernel
def _product_of_tiles(rate, rows, some, columns, first, count, some_rows, approx):
    """The same for sixteen rows of bfloat16 bits."""
    depth, width, flat = rate.shape[1], approx.shape[1], approx.ravel()
    for k in range(some):
        some_rows[k] = rate[rows[k]]
    open_tiles()
    for panel in range(count):
        multiply_tiles(some_rows, columns, (first + panel) * depth * _PANEL, depth, flat, _PANEL * panel, width)
    close_tiles()


_product = _product_of_tiles if tiles.AVAILABLE else _product_of_lanes


@kernel
def _flip_coins(approx, error, rate, key, row, stream, head, seed, fastrg, exploration, words, shift, out, used):
    """Edges of a row whose probabilities are known up to a relative error; returns the new end of ``out``.

    ``approx`` is padded to a whole number of panels.
    """
    num_keys = key.shape[0]
    _coin_bytes(num_keys, row, stream, head, seed, words)
    coins = words.view(np.uint8)
    below, above = np.float32(256 * (1 - error)), np.float32(256 * (1 + error))
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    if fastrg:  # 1 - exp(-p), whose relative error is no larger than that of p
        for j in range(num_keys):
            approx[j] = -np.expm1(-(approx[j] + np.float32(exploration)))
        less = more = np.float32(0)
    for first in range(0, num_keys, 16):
        masks = toss16(approx, coins, first, below, less, above, more)
        if first + 16 > num_keys:
            masks &= np.uint64(0x10001) * ((np.uint64(1) << np.uint64(num_keys - first)) - np.uint64(1))
        maybe = masks >> np.uint64(16)
        while maybe:
            lane = lowest_bit(maybe)
            maybe &= maybe - np.uint64(1)
            coin = _coin(coins[first + lane], first + lane, row, stream, head, seed) * 2.0**-24
            p = np.float64(approx[first + lane])
            hit = coin < p * below + less
            if not hit and coin <= p * above + more:
                exact = _prob(at(rate, 0), at(key, (first + lane) * rate.size), rate.size, exploration)
                hit = coin * 2.0**24 < np.floor((-np.expm1(-exact) if fastrg else exact) * 2.0**32)
            masks |= np.uint64(hit) << np.uint64(lane)
        used = append16(masks, first + shift, out, used)
    return used


@kernel
def _largest(approx, error, rate, key, exploration):
    """Largest probability of a row, exact if it is above 1."""
    top = np.float32(0)
    for j in range(key.shape[0]):
        top = max(top, approx[j])
    if top * (1 + error) + exploration <= 1:
        return 0.0
    exact = 0.0
    for j in range(key.shape[0]):
        if approx[j] * (1 + error) + exploration > 1:
            exact = max(exact, _prob(at(rate, 0), at(key, j * rate.size), rate.size, exploration))
    return exact


# ------------------------------------------------------------------ one row by gaps


@kernel
def _skip(
    low_rate, low_key, width, error, rate, key, first_key, num_keys, blocks, bound, row, stream, head, seed,
    exploration, out, used
):  # fmt: skip
    """Edges of a row whose probabilities are at most ``bound``, by gaps; returns the new end of ``out``.

    ``low_key`` holds two numbers of bfloat16 in each element, and one row behind the last. Places are drawn sixteen at
    a time, and weighed while the next sixteen are drawn, when their keys have come.
    """
    spread, scale = -1 / np.log1p(-bound), np.float32(bound * 2.0**-32)
    below, above = np.float32(1 - error), np.float32(1 + error)
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    words, places = scratch(low_key, 128), scratch(out, 32)
    number, drawn, end = 0, -1, -1
    while end < num_keys:
        new, old = number & 16, 16 - (number & 16)
        end = drawn
        if drawn < num_keys:
            philox16(number, row, stream, head | _GAP, seed, words, 4 * new)
            drawn = gaps16(words, 4 * new, spread, drawn, num_keys, at(places, new))
            for t in range(16):
                for c in range(0, width, 16):
                    fetch(low_key, np.int64(peek(places, new + t)) * width + c)
        number += 16
        if number == 16:
            continue
        here, approx, c = at(places, old), splat(np.float32(0), 16), 0
        while 2 * (width - c) >= 128:
            approx = approx + dots(load(low_rate, 2 * c, 128), at(low_key, c), width, here)
            c += 64
        while c < width:
            approx = approx + dots(load(low_rate, 2 * c, 32), at(low_key, c), width, here)
            c += 16
        masks = weigh16(approx, words, 4 * old + 32, here, num_keys, scale, below, less, above, more)
        maybe = masks >> np.uint64(16)
        while maybe:
            lane = lowest_bit(maybe)
            maybe &= maybe - np.uint64(1)
            p = _prob(rate, at(key, np.int64(peek(here, lane)) * blocks), blocks, exploration)
            hit = np.float64(peek(words, 4 * old + 32 + lane)) * bound < p * 2.0**32
            masks |= np.uint64(hit) << np.uint64(lane)
        used = pick16(masks, here, first_key, out, used)
    return used


# ------------------------------------------------------------------ one row by proposals


@kernel
def _bounds(mass, out):
    """Inverse CDF of unnormalised masses in 32-bit fixed point.

    The largest word that is mapped to this place or an earlier one.
    """
    total = 0.0
    for v in range(mass.size):
        total += mass[v]
        mass[v] = total
    scale = 2.0**32 / total if total > 0 else 0.0
    for v in range(mass.size):
        out[v] = np.uint32(min(max(mass[v] * scale, 1.0) - 1.0, 4294967295.0))
    out[mass.size - 1] = np.uint32(0xFFFFFFFF)


@kernel
def _count_below(bounds, first, last, word):
    count = 0
    for offset in range(first, last, 16):
        count += below16(bounds, offset, word)
    return count


@kernel
def _find_group(coarse, start, groups, word):
    """Group of 64 bounds in which the word has its place, among those from ``start`` on: by halves."""
    group, length = start, groups
    while length > 1:
        half = length >> 1
        group += half * (coarse[group + half - 1] < word)
        length -= half
    return group


@kernel
def _propose(
    rate, key, key_sum, coarse, fine, start, skip, groups, stretch, row, stream, head, seed, thin, exploration, mass,
    block_bounds, seen, drawn, group, drop, shift, out, used
):  # fmt: skip
    """Edges of a row by Poisson proposals; returns the new end of ``out``, or -1 where it is too short."""
    num_keys, blocks = key.shape
    for v in range(blocks):
        mass[v] = np.float64(rate[v]) * key_sum[v]
    mass[blocks] = exploration * num_keys
    _bounds(mass, block_bounds[: blocks + 1])
    count = _poisson(mass[blocks] * stretch, row, stream, head, seed)
    if used + min(count, num_keys) > out.size:
        return -1
    begin, rejected = used, 0
    squeeze = np.uint32(min(2.0**32 / stretch, 4294967295.0))  # below 1/c every probability accepts
    for first in range(0, count, 16):
        philox16(first, row, stream, head | _PROPOSAL, seed, drawn, 0)
        some = min(16, count - first)
        for t in range(some):
            drawn[t] = _count_below(block_bounds, 0, block_bounds.size, drawn[t])
        for t in range(some):
            block = np.int64(drawn[t])
            if block < blocks:
                group[t] = _find_group(coarse, start + block * skip, groups, drawn[16 + t])
                for line in range(0, _PANEL, 16):
                    fetch(fine, _PANEL * group[t] + line)
        for t in range(some):
            block, word = np.int64(drawn[t]), drawn[16 + t]
            if block < blocks:
                first_key = _PANEL * (group[t] - start - block * skip)
                drawn[16 + t] = first_key + _count_below(fine, _PANEL * group[t], _PANEL * group[t] + _PANEL, word)
            else:
                drawn[16 + t] = (np.uint64(word) * np.uint64(num_keys)) >> np.uint64(32)
        for t in range(some):
            j = np.int64(drawn[16 + t])
            bit = np.uint64(1) << np.uint64(j & 63)
            if seen[j >> 6] & bit:
                continue
            seen[j >> 6] |= bit
            keep = True
            if thin and drawn[32 + t] >= squeeze:
                p = _prob(at(rate, 0), at(key, j * rate.size), rate.size, exploration)
                keep = np.float64(drawn[32 + t]) * -np.expm1(-stretch * p) < p * 2.0**32
            if keep:
                out[used] = j
                used += 1
            else:
                if rejected == drop.size:
                    return -1
                drop[rejected] = j
                rejected += 1
    for e in range(rejected):
        seen[drop[e] >> 6] &= ~(np.uint64(1) << np.uint64(drop[e] & 63))
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


# ------------------------------------------------------------------ many rows


class _Law(NamedTuple):
    """What the graph is drawn by."""

    seed: np.uint64
    fastrg: bool
    exploration: float
    clamp: bool


class _Sequences(NamedTuple):
    """Which queries and keys belong together: the sequence of each query, offsets, numbers of random streams."""

    batch: np.ndarray
    query_ptr: np.ndarray
    key_ptr: np.ndarray
    panel_ptr: np.ndarray
    sequence_ids: np.ndarray


class _Plan(NamedTuple):
    """For each row the way it is drawn, the stretch of its proposals, and a bound on its probabilities."""

    way: np.ndarray
    stretch: np.ndarray
    bound: np.ndarray


class _Model(NamedTuple):
    """Rates and memberships as each way takes them; a table that no row needs has no elements."""

    rate: np.ndarray
    key: np.ndarray
    key_sum: np.ndarray
    low_rate: np.ndarray  # these three for coins: what `_product` takes, and the error of what it gives
    columns: np.ndarray
    error: float
    wide_rate: np.ndarray  # these two for gaps: see `_skip`
    low_key: np.ndarray
    coarse: np.ndarray  # these two for proposals: see `_key_bounds`
    fine: np.ndarray


@kernel
def _survey(head, b, key, bits, key_ptr, key_sum, key_max, low_key):
    """Sum and largest entry of each column of the memberships of a sequence of one head, and their roundings to
    bfloat16, filled up with zeros; ``bits`` are those of the memberships in float32.
    """
    sums, tops, blocks = np.zeros(key.shape[2]), np.zeros(key.shape[2], key.dtype), key.shape[2]
    for j in range(key_ptr[b], key_ptr[b + 1]):
        row, low = head * key.shape[1] + j, low_key.shape[1]
        for v in range(blocks):
            sums[v] += key[head, j, v]
        for v in range(blocks):
            tops[v] = key[head, j, v] if key[head, j, v] > tops[v] else tops[v]
        for v in range(blocks):
            word = bits[head, j, v]
            low_key[row, v] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        for v in range(blocks, low):
            low_key[row, v] = 0
    key_sum[head, b], key_max[head, b] = sums, tops


@partial(kernel, reorder=True)
def _expect(first, last, queries, rate, batch, key_sum, key_max, expected, bound):
    """Expected number of keys and largest possible probability of each row, without exploration."""
    for r in range(first, last):
        head, b = r // queries, batch[r % queries]
        total, most = 0.0, 0.0
        for v in range(rate.shape[1]):
            total += np.float64(rate[r, v]) * key_sum[head, b, v]
            most += np.float64(rate[r, v]) * key_max[head, b, v]
        expected[r], bound[r] = total, most


@kernel
def _pack_lanes(head, b, key, key_ptr, panel_ptr, columns):
    """Keys of a sequence of one head in panels of 64, block by block; the last panel is filled up with zeros."""
    for panel in range(panel_ptr[b], panel_ptr[b + 1]):
        first = key_ptr[b] + _PANEL * (panel - panel_ptr[b])
        some = min(_PANEL, key_ptr[b + 1] - first)
        for v in range(key.shape[2]):
            for j in range(some):
                columns[head, panel, v, j] = key[head, first + j, v]
            columns[head, panel, v, some:] = 0


@kernel
def _pack_tiles(head, b, key, key_ptr, panel_ptr, columns):
    """The same for pairs of bfloat16 bits: for each 16 pairs, four tiles of 16 keys."""
    for panel in range(panel_ptr[b], panel_ptr[b + 1]):
        first = key_ptr[b] + _PANEL * (panel - panel_ptr[b])
        for part in range(key.shape[2] >> 4):
            for j in range(_PANEL):
                inside = first + j < key_ptr[b + 1]
                for pair in range(16):
                    number = key[head, first + j, 16 * part + pair] if inside else np.uint32(0)
                    columns[head, panel, part, j >> 4, pair, j & 15] = number


@kernel
def _key_bounds(head, first, last, key, key_ptr, panel_ptr, coarse, fine):
    """Tables that map a word to a key, for blocks first..last-1 of a head."""
    for b in range(key_ptr.size - 1):
        num_keys = key_ptr[b + 1] - key_ptr[b]
        mass = np.empty((last - first, num_keys))
        for j in range(num_keys):
            for v in range(first, last):
                mass[v - first, j] = key[head, key_ptr[b] + j, v]
        for v in range(first, last):
            table = fine[head, v, _PANEL * panel_ptr[b] : _PANEL * panel_ptr[b + 1]]
            table[num_keys:] = np.uint32(0xFFFFFFFF)
            _bounds(mass[v - first], table[:num_keys])
            for group in range(panel_ptr[b + 1] - panel_ptr[b]):
                coarse[head, v, panel_ptr[b] + group] = table[_PANEL * group + _PANEL - 1]


@kernel
def _rows(first, last, law, sequences, plan, model, out, counts, state, top):
    """Edges of the rows from ``state[0]`` on: fills ``out`` and ``counts``, and leaves in ``state`` the next row, the
    edges so far, and 1 if a probability exceeds 1, which then stands in ``top``.
    """
    seed, fastrg, exploration, clamp = law
    batch, query_ptr, key_ptr, panel_ptr, sequence_ids = sequences
    way, stretch, bound = plan
    rate, key, key_sum, low_rate, columns, error, wide_rate, low_key, coarse, fine = model
    queries = batch.size
    longest = 0
    for b in range(key_ptr.size - 1):
        longest = max(longest, key_ptr[b + 1] - key_ptr[b])
    blocks, skip = rate.shape[1], panel_ptr[-1]
    words = np.empty((longest + 255) // 256 * 64, np.uint32)
    mass, block_bounds = np.empty(blocks + 1), np.full((blocks + 16) // 16 * 16, 0xFFFFFFFF, np.uint32)
    seen = np.zeros((longest + 63) >> 6, np.uint64)
    drawn, place = np.empty(64, np.uint32), np.empty(16, np.int64)
    drop = np.empty(longest, np.int32)
    half = wide_rate.shape[1] >> 1
    rough = 1.1 * 2.0**-9 + (blocks + 8) * 2.0**-22
    approx = np.empty((_GROUP, (longest + _PANEL - 1) // _PANEL * _PANEL), np.float32)
    some_rows = np.zeros((_GROUP, low_rate.shape[1]), low_rate.dtype)
    group = np.empty(_GROUP, np.int64)
    known, ready = 0, 0  # rows of the group that are used, and that it holds
    r, used = state[0], state[1]
    while r < last:
        head, i = r // queries, r % queries
        b = batch[i]
        shift, end = key_ptr[b], key_ptr[b + 1]
        num_keys, row, stream = end - shift, i - query_ptr[b], sequence_ids[b]
        start, groups = panel_ptr[b], panel_ptr[b + 1] - panel_ptr[b]
        before = used
        if way[r] == _GAPS:
            if used + num_keys + 16 > out.size:
                break
            first_key = head * key.shape[1] + shift
            used = _skip(
                at(wide_rate, 2 * half * r), at(low_key, first_key * half), half, rough, at(rate, r * blocks),
                at(key, first_key * blocks), shift, num_keys, blocks, bound[r], row, stream, head, seed, exploration,
                at(out, 0), used,
            )  # fmt: skip
        elif way[r] == _PROPOSALS:
            used = _propose(
                rate[r], key[head, shift:end], key_sum[head, b], coarse, fine, head * blocks * skip + start, skip,
                groups, stretch[r], row, stream, head, seed, not fastrg, exploration, mass, block_bounds,
                seen[:groups], drawn, place, drop, shift, out, used,
            )  # fmt: skip
            if used < 0:
                used = before
                break
        else:
            keys = key[head, shift:end]
            if used + num_keys + 64 > out.size:
                break
            if known == ready:
                known, ready, next_row, stop = 0, 0, r, min(last, head * queries + query_ptr[b + 1])
                while ready < _GROUP and next_row < stop:
                    if way[next_row] >= _COINS:
                        group[ready] = next_row
                        ready += 1
                    next_row += 1
                _product(low_rate, group, ready, columns, head * skip + start, groups, some_rows, approx)
            if way[r] == _LARGE_COINS and not fastrg:
                top[0] = 0.0 if clamp else _largest(approx[known], error, rate[r], keys, exploration)
                if top[0] > 1 + 1e-5 + exploration:
                    state[2] = 1
                    break
                for j in range(num_keys):
                    approx[known, j] = min(approx[known, j], np.float32(2))
            used = _flip_coins(
                approx[known], error, rate[r], keys, row, stream, head, seed, fastrg, exploration, words, shift,
                out, used,
            )  # fmt: skip
            known += 1
        counts[r] = used - before
        r += 1
    state[0], state[1] = r, used


# ------------------------------------------------------------------ the op


def _low_precision(
    query: Tensor, key: Tensor, low_key: np.ndarray, key_ptr: np.ndarray, panel_ptr: np.ndarray, needed: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Rates and keys as :func:`_product` takes them, and a bound on the relative error of what it gives.

    All terms are positive, so relative errors do not grow in sums: each of the K products and additions in float32
    rounds by at most 2^-24, and bfloat16 rounds both factors by 2^-9.
    """
    heads, queries, blocks = query.shape
    rounding = (blocks + 8) * 2.0**-22
    spans = [(head, b) for head in range(heads) for b in range(key_ptr.size - 1)] if needed else []
    panels = int(panel_ptr[-1]) if needed else 0
    if not tiles.AVAILABLE:
        keys = key.detach().float().contiguous().numpy()
        columns = _empty((heads, panels, blocks, _PANEL), np.float32)
        run(_pack_lanes, [(head, b, keys, key_ptr, panel_ptr, columns) for head, b in spans])
        return query.detach().float().reshape(heads * queries, blocks).numpy(), columns.ravel(), rounding
    low_rate = torch.nn.functional.pad(
        query.detach()[:, : queries * needed].bfloat16(), (0, -blocks % tiles.DEPTH)
    ).contiguous()
    pairs = low_key[:-1].view(np.uint32).reshape(heads, key.shape[1], -1)
    columns = _empty((heads, panels, pairs.shape[2] // 16, _PANEL // 16, 16, 16), np.uint32)
    run(_pack_tiles, [(head, b, pairs, key_ptr, panel_ptr, columns) for head, b in spans])
    return low_rate.flatten(0, 1).view(torch.uint16).numpy(), columns.view(np.uint16).ravel(), 2.1 * 2.0**-9 + rounding


def sample_sbm(
    query: Tensor,
    key: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
) -> tuple[Tensor, Tensor]:
    reference.check_keys(int(key_ptr[-1]))
    heads, queries, blocks = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rate, keys = (
        query.detach().to(dtype).reshape(heads * queries, blocks).numpy(),
        key.detach().to(dtype).contiguous().numpy(),
    )
    q_ptr, k_ptr = query_ptr.numpy(), key_ptr.numpy()
    sequences, threads = q_ptr.size - 1, torch.get_num_threads()
    batch = np.repeat(np.arange(sequences), np.diff(q_ptr))
    width = -(-blocks // 32) * 32

    key_sum, key_max = np.empty((2, heads, sequences, blocks))
    low_key = _empty((heads * key.shape[1] + 1, width), np.uint16)  # one row more than there are keys: see `_skip`
    bits = keys.astype(np.float32, copy=False).view(np.uint32)
    run(
        _survey,
        [(head, b, keys, bits, k_ptr, key_sum, key_max, low_key) for head in range(heads) for b in range(sequences)],
    )
    expected, bound = np.empty((2, heads * queries))
    run(
        _expect,
        [(a, z, queries, rate, batch, key_sum, key_max, expected, bound) for a, z in _cuts(heads * queries, threads)],
    )
    row_keys = np.tile(np.diff(k_ptr)[batch], heads)
    expected += exploration * row_keys
    bound += exploration
    costs = (torch.from_numpy(x) for x in (expected, bound, row_keys))
    stretch, way = (x.numpy() for x in reference.plan_rows(*costs, method))
    way = np.where((way == _COINS) & (bound > 1), _LARGE_COINS, way).astype(np.uint8)
    plan, used = _Plan(way, stretch, bound), np.bincount(way, minlength=4)

    panel_ptr = np.concatenate([[0], np.cumsum((np.diff(k_ptr) + _PANEL - 1) // _PANEL)])
    low_rate, columns, error = _low_precision(
        query, key, low_key, k_ptr, panel_ptr, bool(used[_COINS] + used[_LARGE_COINS])
    )
    wide_rate = rate
    if width > blocks or dtype == torch.float64:
        wide_rate = np.zeros((heads * queries if used[_GAPS] else 0, width), np.float32)
        wide_rate[:, :blocks] = rate[: len(wide_rate)]
    coarse = np.empty((heads, blocks, panel_ptr[-1] if used[_PROPOSALS] else 0), np.uint32)
    fine = _empty((heads, blocks, coarse.shape[2] * _PANEL), np.uint32)
    if used[_PROPOSALS]:
        run(
            _key_bounds,
            [
                (h, a, z, keys, k_ptr, panel_ptr, coarse, fine)
                for h in range(heads)
                for a, z in _cuts(blocks, -(-blocks // 16))
            ],
        )

    law = _Law(np.uint64(seed & 0xFFFFFFFFFFFFFFFF), method == "fastrg", exploration, clamp)
    spans = _Sequences(batch, q_ptr, k_ptr, panel_ptr, sequence_ids.numpy() & 0xFFFFFFFF)
    model = _Model(
        rate, keys, key_sum, low_rate, columns, error, wide_rate, low_key.view(np.uint32).ravel(), coarse.ravel(),
        fine.ravel(),
    )  # fmt: skip
    counts = np.zeros(heads * queries, np.int64)
    likely = np.minimum(expected, row_keys)
    pieces = _cuts(heads * queries, min(8 * threads, 1 + int(likely.sum()) // 2**14))
    found: list[list[np.ndarray]] = [[] for _ in pieces]

    def rows(first: int, last: int, buffers: list[np.ndarray]) -> None:
        state, top = np.array([first, 0, 0]), np.zeros(1)
        room = int(1.05 * likely[first:last].sum()) + 2 * int(row_keys[first:last].max()) + 1024
        while state[0] < last:
            out = np.empty(room, np.int32)
            state[1] = 0
            _rows(first, last, law, spans, plan, model, out, counts, state, top)
            if state[2]:
                raise ValueError(reference.over_one(float(top[0]) - exploration))
            buffers.append(out[: state[1]])
            room *= 2

    run(rows, [(a, z, buffers) for (a, z), buffers in zip(pieces, found, strict=True)])
    rowptr = np.zeros(heads * queries + 1, np.int64)
    np.cumsum(counts, out=rowptr[1:])
    col = np.concatenate([np.empty(0, np.int32), *(buffer for buffers in found for buffer in buffers)])
    return torch.from_numpy(rowptr), torch.from_numpy(col)


def _cuts(total: int, pieces: int) -> list[tuple[int, int]]:
    """At most ``pieces`` ranges of about equal length that cover ``range(total)``, none empty."""
    pieces = max(1, min(pieces, total))
    return [*pairwise([total * piece // pieces for piece in range(pieces + 1)])]


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised memory for a table that is read at random.

    It lies in huge pages if numpy can get them, as it tries to from 4 MiB on. In pages of 4 KiB, a table that just fits
    the second-level cache would not stay there.

    At least 16 MiB are asked for. glibc keeps as much freed memory as twice the largest block that came back to it. So
    a training step need not give its memory back and fault it in again.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(max(size + 2**21, 2**24), np.uint8)
    return room[-room.ctypes.data % 2**21 :][:size].view(dtype).reshape(shape)
