"""The sampler for the CPU: rows in parallel, each by proposals or by coins, sorted as they are made.

Same law, same random words and the same edges as :func:`sbm_pyg.ops.reference.sample_sbm`. A row of coins needs its probabilities only
to the precision that each coin asks for: a matrix product, in bfloat16 where the machine has tiles for it, gives them with a proven
relative error, one random byte decides almost every pair, and the few that it leaves open are settled in float64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference
from .bits import append16, lowest_bit, philox16, toss16
from .threads import kernel, run

_COIN_BYTE, _COIN_REST, _COUNT, _PROPOSAL = (
    purpose << 24 for purpose in (reference.COIN_BYTE, reference.COIN_REST, reference.COUNT, reference.PROPOSAL)
)
_TILE = 2**20  # pairs whose probabilities are held at a time
_SMALL = 2**15  # pairs below which a matrix product of its own does not pay

# How a row is sampled.
_PROPOSE, _COINS, _EXACT_COINS = range(3)


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
            term = term * lam / count
            left -= term
            if not term > 0:
                break
        total += count
    return total


# ------------------------------------------------------------------ one row by coins


@kernel
def _prob(rate, key, exploration):
    """Probability of one pair in float64, as the reference has it."""
    total = 0.0
    for v in range(rate.size):
        total += np.float64(rate[v]) * np.float64(key[v])
    return total + exploration


@kernel
def _settle(p, byte, j, row, stream, head, seed):
    """The coin of a pair to its last bit."""
    threshold = np.uint64(min(p, 1.0) * 2.0**32)
    if byte != threshold >> np.uint64(24):
        return byte < threshold >> np.uint64(24)
    rest = _philox(j >> 2, row, stream, head | _COIN_REST, seed)[j & 3] >> np.uint64(8)
    return rest < threshold & np.uint64(0xFFFFFF)


@kernel
def _approximate_coins(approx, error, rate, key, row, stream, head, seed, exploration, words, shift, out, used):
    """Edges of a row whose probabilities are known up to a relative error; returns the new end of ``out``.

    Reads up to 15 elements after the end of ``approx``.
    """
    num_keys = key.shape[0]
    _coin_bytes(num_keys, row, stream, head, seed, words)
    coins = words.view(np.uint8)
    below, above = np.float32(256 * (1 - error)), np.float32(256 * (1 + error))
    less, more = np.float32(exploration) * below, np.float32(exploration) * above
    for first in range(0, num_keys, 16):
        masks = toss16(approx, coins, first, below, less, above, more)
        if first + 16 > num_keys:
            masks &= np.uint64(0x10001) * ((np.uint64(1) << np.uint64(num_keys - first)) - np.uint64(1))
        maybe = masks >> np.uint64(16)
        while maybe:
            lane = lowest_bit(maybe)
            maybe &= maybe - np.uint64(1)
            p = _prob(rate, key[first + lane], exploration)
            masks |= np.uint64(_settle(p, np.uint64(coins[first + lane]), first + lane, row, stream, head, seed)) << np.uint64(lane)
        used = append16(masks, first + shift, out, used)
    return used


@kernel
def _exact_coins(rate, key_t, row, stream, head, seed, fastrg, clamp, exploration, words, p, shift, out, used):
    """Edges of a row with every probability in float64; returns the new end of ``out`` and the largest probability."""
    blocks, num_keys = key_t.shape
    for j in range(num_keys):
        p[j] = 0
    for v in range(blocks):
        weight = np.float64(rate[v])
        column = key_t[v]
        for j in range(num_keys):
            p[j] += weight * np.float64(column[j])
    top = 0.0
    for j in range(num_keys):
        p[j] += exploration
        top = max(top, p[j])
    if fastrg:
        for j in range(num_keys):
            p[j] = -np.expm1(-p[j])
    elif not clamp and top > 1 + 1e-5 + exploration:
        return used, top
    _coin_bytes(num_keys, row, stream, head, seed, words)
    coins = words.view(np.uint8)
    for j in range(num_keys):
        out[used] = j + shift
        used += _settle(p[j], np.uint64(coins[j]), j, row, stream, head, seed)
    return used, top


# ------------------------------------------------------------------ one row by proposals


@kernel
def _bounds(mass, out):
    """Inverse CDF of unnormalised masses in 32-bit fixed point: the largest word that is mapped to this place or an earlier one."""
    total = 0.0
    for v in range(mass.size):
        total += mass[v]
        mass[v] = total
    scale = 2.0**32 / total if total > 0 else 0.0
    for v in range(mass.size):
        out[v] = np.uint32(min(max(mass[v] * scale, 1.0) - 1.0, 4294967295.0))
    out[mass.size - 1] = np.uint32(0xFFFFFFFF)


@kernel
def _count_below(bounds, word):
    count = 0
    for v in range(bounds.size):
        count += np.int32(bounds[v] < word)
    return count


@kernel
def _find(coarse, fine, start, groups, word):
    """Place of a word among the sorted bounds of one block of one sequence, which begin at group ``start``.

    By halves among the last bounds of each group of 64, then all at once inside the group.
    """
    group, length = start, groups
    while length > 1:
        half = length >> 1
        group += half * (coarse[group + half - 1] < word)
        length -= half
    return 64 * (group - start) + _count_below(fine[64 * group : 64 * group + 64], word)


@kernel
def _propose(
    rate, key, key_sum, coarse, fine, start, skip, groups, stretch, row, stream, head, seed, thin, exploration, mass, block_bounds, seen, drawn, drop, shift, out, used
):  # fmt: skip
    """Edges of a row by Poisson proposals; returns the new end of ``out``, or -1 where it is too short."""
    num_keys, blocks = key.shape
    for v in range(blocks):
        mass[v] = np.float64(rate[v]) * key_sum[v]
    mass[blocks] = exploration * num_keys
    _bounds(mass, block_bounds)
    count = _poisson(mass[blocks] * stretch, row, stream, head, seed)
    if used + min(count, num_keys) > out.size:
        return -1
    begin, rejected = used, 0
    squeeze = np.uint32(min(2.0**32 / stretch, 4294967295.0))  # below 1/c every probability accepts
    for first in range(0, count, 16):
        philox16(first, row, stream, head | _PROPOSAL, seed, drawn, 0)
        some = min(16, count - first)
        for t in range(some):
            drawn[t] = _count_below(block_bounds, drawn[t])
        for t in range(some):
            block, word = np.int64(drawn[t]), drawn[16 + t]
            if block < blocks:
                drawn[16 + t] = _find(coarse, fine, start + block * skip, groups, word)
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
                p = _prob(rate, key[j], exploration)
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


@kernel
def _totals(head, key, key_ptr, key_sum, key_max):
    """Sum and largest entry of each column of the memberships, for each sequence of a head."""
    for b in range(key_ptr.size - 1):
        for j in range(key_ptr[b], key_ptr[b + 1]):
            for v in range(key.shape[2]):
                z = np.float64(key[head, j, v])
                key_sum[head, b, v] += z
                key_max[head, b, v] = max(key_max[head, b, v], z)


@kernel
def _expect(first, last, queries, rate, batch, key_sum, key_max, expected, bound):
    """Expected number of keys and largest possible probability of each row, without exploration."""
    for r in range(first, last):
        head, b = r // queries, batch[r % queries]
        for v in range(rate.shape[1]):
            w = np.float64(rate[r, v])
            expected[r] += w * key_sum[head, b, v]
            bound[r] += w * key_max[head, b, v]


@kernel
def _key_bounds(head, first, last, key_t, key_ptr, fine_ptr, coarse, fine):
    """Tables that map a word to a key, for blocks first..last-1 of a head."""
    for b in range(key_ptr.size - 1):
        start, num_keys = key_ptr[b], key_ptr[b + 1] - key_ptr[b]
        mass = np.empty(num_keys)
        for v in range(first, last):
            for j in range(num_keys):
                mass[j] = key_t[head, v, start + j]
            table = fine[head, v, fine_ptr[b] : fine_ptr[b + 1]]
            table[num_keys:] = np.uint32(0xFFFFFFFF)
            _bounds(mass, table[:num_keys])
            for group in range(table.size >> 6):
                coarse[head, v, (fine_ptr[b] >> 6) + group] = table[64 * group + 63]


@kernel
def _rows(first, last, queries, way, stretch, approx, error, rate, key, key_t, key_sum, coarse, fine,
          batch, query_ptr, key_ptr, fine_ptr, streams, seed, fastrg, exploration, clamp, out, counts, state, top):  # fmt: skip
    """Edges of the rows from ``state[0]`` on: fills ``out`` and ``counts``, and leaves in ``state`` the next row, the edges so far, the
    row of ``approx`` that is next, and 1 if a probability exceeds 1, which then stands in ``top``."""
    longest = 0
    for b in range(key_ptr.size - 1):
        longest = max(longest, key_ptr[b + 1] - key_ptr[b])
    blocks = rate.shape[1]
    words = np.empty((longest + 255) // 256 * 64, np.uint32)
    p = np.empty(longest)
    mass, block_bounds = np.empty(blocks + 1), np.empty(blocks + 1, np.uint32)
    seen = np.zeros((longest + 63) >> 6, np.uint64)
    drawn = np.empty(64, np.uint32)
    drop = np.empty(longest, np.int32)
    r, used, known = state[0], state[1], state[2]
    while r < last:
        head, i = r // queries, r % queries
        b = batch[i]
        shift, end = key_ptr[b], key_ptr[b + 1]
        num_keys, row, stream = end - shift, i - query_ptr[b], streams[b]
        keys = key[head, shift:end]
        before = used
        if way[r] == _PROPOSE:
            places, skip = seen[: (num_keys + 63) >> 6], fine_ptr[-1] >> 6
            start, groups = head * blocks * skip + (fine_ptr[b] >> 6), (fine_ptr[b + 1] - fine_ptr[b]) >> 6
            used = _propose(
                rate[r], keys, key_sum[head, b], coarse, fine, start, skip, groups, stretch[r], row,
                stream, head, seed, not fastrg, exploration, mass, block_bounds, places, drawn, drop, shift, out, used,
            )  # fmt: skip
            if used < 0:
                used = before
                break
        else:
            if used + num_keys + 64 > out.size:
                break
            if way[r] == _COINS:
                used = _approximate_coins(
                    approx[known], error, rate[r], keys, row, stream, head, seed, exploration, words, shift, out, used
                )
                known += 1
            else:
                columns = key_t[head, :, shift:end]
                used, top[0] = _exact_coins(
                    rate[r], columns, row, stream, head, seed, fastrg, clamp, exploration, words, p[:num_keys], shift, out, used
                )
                if not fastrg and not clamp and top[0] > 1 + 1e-5 + exploration:
                    state[3] = 1
                    break
        counts[r] = used - before
        r += 1
    state[0], state[1], state[2] = r, used, known


# ------------------------------------------------------------------ the op


class _Tile(NamedTuple):
    """Consecutive rows, and where the probabilities of its rows of coins come from: one block of pairs, or each row by itself."""

    first: int
    last: int
    block: tuple[int, int] | None  # head and sequence


def _tiles(way: np.ndarray, heads: int, query_ptr: list[int], key_ptr: list[int]) -> list[_Tile]:
    """Cut all rows into tiles, in order. Blocks with many rows of coins get a matrix product for every ``_TILE`` pairs."""
    tiles: list[_Tile] = []
    queries, done = query_ptr[-1], 0
    for head in range(heads):
        for b, (start, end) in enumerate(pairwise(query_ptr)):
            first, last = head * queries + start, head * queries + end
            keys = key_ptr[b + 1] - key_ptr[b]
            coins = np.flatnonzero(way[first:last] == _COINS)
            if coins.size * keys < _SMALL:
                way[first:last][coins] = _EXACT_COINS
                continue
            if done < first:
                tiles.append(_Tile(done, first, None))
            step = max(1, _TILE // keys)
            cuts = [first, *(first + coins[step::step]), last]
            tiles.extend(_Tile(int(a), int(z), (head, b)) for a, z in pairwise(cuts))
            done = last
    if done < heads * queries:
        tiles.append(_Tile(done, heads * queries, None))
    return tiles


def _product_dtype() -> tuple[torch.dtype, float]:
    """Type of the matrix product, and a bound on its relative error: all terms are positive, so relative errors do not grow in sums.

    bfloat16 rounds both factors and the result by 2^-9 each.
    """
    return (torch.bfloat16, 2.0**-7) if torch.cpu._is_amx_tile_supported() else (torch.float32, 2.0**-13)


def sample_sbm(
    query: Tensor,
    key: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    streams: Tensor,
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
) -> tuple[Tensor, Tensor]:
    heads, queries, blocks = query.shape
    num_keys = key.size(1)
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = (x.detach().to(exact).contiguous() for x in (query, key))
    ends, key_ends = query_ptr.tolist(), key_ptr.tolist()
    rate, keys = query.view(heads * queries, blocks).numpy(), key.numpy()
    q_ptr, k_ptr = query_ptr.numpy(), key_ptr.numpy()
    batch = np.repeat(np.arange(len(ends) - 1), np.diff(q_ptr))

    key_sum, key_max = np.zeros((2, heads, len(ends) - 1, blocks))
    run(_totals, [(head, keys, k_ptr, key_sum, key_max) for head in range(heads)])
    expected, bound = np.zeros((2, heads * queries))
    pieces = 1 if heads * queries * blocks < 2**16 else torch.get_num_threads()
    cuts = [heads * queries * piece // pieces for piece in range(pieces + 1)]
    run(_expect, [(a, z, queries, rate, batch, key_sum, key_max, expected, bound) for a, z in pairwise(cuts)])
    row_keys = np.tile(np.diff(k_ptr)[batch], heads)
    expected += exploration * row_keys
    bound += exploration
    plan = reference.plan_rows(torch.from_numpy(expected), torch.from_numpy(bound), torch.from_numpy(row_keys), method)
    stretch, dense = (x.numpy() for x in plan)
    sure = (method == "bernoulli") & (clamp | (bound <= 1))  # the others' probabilities are all computed, for they may exceed 1
    way = np.where(dense, np.where(sure, _COINS, _EXACT_COINS), _PROPOSE).astype(np.uint8)
    tiles = _tiles(way, heads, ends, key_ends)

    fine_ptr = np.concatenate([[0], np.cumsum((np.diff(k_ptr) + 63) // 64 * 64)])
    proposes = bool((way == _PROPOSE).any())
    key_t = key.mT.contiguous().numpy() if proposes or (way == _EXACT_COINS).any() else np.empty((heads, blocks, 0), keys.dtype)
    fine = np.empty((heads, blocks, int(fine_ptr[-1]) if proposes else 0), np.uint32)
    coarse = np.empty((heads, blocks, fine.shape[2] >> 6), np.uint32)
    if proposes:
        step = max(1, blocks // torch.get_num_threads())
        run(_key_bounds, [(head, v, min(v + step, blocks), key_t, k_ptr, fine_ptr, coarse, fine) for head in range(heads) for v in range(0, blocks, step)])

    dtype, error = _product_dtype()
    low_rate, low_key = (query.to(dtype), key.to(dtype)) if any(tile.block for tile in tiles) else (query, key)
    none = np.empty((0, 0), np.uint16 if dtype == torch.bfloat16 else np.float32)
    counts = np.zeros(heads * queries, np.int64)
    found: list[list[np.ndarray]] = []

    def rows(first: int, last: int, approx: np.ndarray, known: int, out: list[np.ndarray]) -> None:
        state, top = np.array([first, 0, known, 0]), np.zeros(1)
        room = int(1.05 * expected[first:last].sum()) + 2 * int(row_keys[first:last].max()) + 1024
        while state[0] < last:
            buffer = np.empty(room, np.int32)
            state[1] = 0
            _rows(first, last, queries, way, stretch, approx, error, rate, keys, key_t, key_sum, coarse.ravel(), fine.ravel(), batch, q_ptr, k_ptr,
                  fine_ptr, stream, word, method == "fastrg", exploration, clamp, buffer, counts, state, top)  # fmt: skip
            if state[3]:
                raise ValueError(reference.over_one(float(top[0]) - exploration))
            out.append(buffer[: state[1]])
            room *= 2

    word, stream = np.uint64(seed & 0xFFFFFFFFFFFFFFFF), (streams.numpy() & 0xFFFFFFFF)
    for tile in tiles:
        approx, share = none, torch.get_num_threads() * 4
        if tile.block is not None:
            head, b = tile.block
            share = torch.get_num_threads()
            chosen = np.flatnonzero(way[tile.first : tile.last] == _COINS) + (tile.first - head * queries)
            columns = low_key[head, key_ends[b] : key_ends[b + 1]].T
            product = low_key.new_empty(chosen.size * columns.size(1) + 16)[:-16].view(chosen.size, -1)  # room to read past the end
            torch.mm(low_rate[head, torch.from_numpy(chosen)], columns, out=product)
            approx = (product.view(torch.uint16) if dtype == torch.bfloat16 else product).numpy()
        share = min(share, max(1, int(expected[tile.first : tile.last].sum()) >> 12))
        cuts = [tile.first + (tile.last - tile.first) * piece // share for piece in range(share + 1)]
        known = [int((way[tile.first : cut] == _COINS).sum()) for cut in cuts]
        parts: list[list[np.ndarray]] = [[] for _ in range(share)]
        run(rows, [(a, z, approx, k, part) for (a, z), k, part in zip(pairwise(cuts), known, parts, strict=False) if a < z])
        found.extend(parts)
    rowptr = np.zeros(heads * queries + 1, np.int64)
    np.cumsum(counts, out=rowptr[1:])
    col = np.concatenate([np.empty(0, np.int32), *(piece for part in found for piece in part)])
    return torch.from_numpy(rowptr), torch.from_numpy(col)
