"""Rows of new tokens from a block model whose key memberships are kept from call to call, for the CPU.

In: memberships of keys as they come, and rates of the last tokens. Out: compressed rows, whose drawn edges are those of
``sample_sbm`` in :mod:`sbm_pyg.ops` with ``row_group`` above 1, by the comparison in
:mod:`sbm_pyg.ops.reference.sampling`. Not here: which keys a cache still holds (``hugging_face_attention``).

A membership has 24 bits, in two parts. The upper 8 bits of the communities with large rates bound the probabilities of
all keys, and the words that lie within the bounds are compared in float64. So most of the memory is not read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..random_words import SHARED
from .draws import philox_once
from .random_simd import append16, mask_below, philox16
from .shared_draws import whole_word
from .simd import at, load, peek, splat
from .threads import even_ranges, numba_kernel, run, task_count

BLOCK = 256
"""Keys whose memberships lie together."""
SKIPPED = 2.0**-7
"""Communities whose rates are below this part of the mean rate are bounded, and not read."""
PER_STEP = 8
"""Products with 8 bits that take as long as one of two numbers."""
ERROR = 2.0**-15
"""Bound on the relative error of sums of products, and of random words, in float32."""


@numba_kernel
def _store(member, start, high, low):
    """Write memberships ``[H, B * n, K]`` of the keys from slot ``start`` on."""
    heads, keys, blocks = member.shape
    batch = high.shape[0] // heads
    count = keys // batch
    for row in range(high.shape[0]):
        b, head = row // heads, row % heads
        for i in range(count):
            block, slot = (start + i) // BLOCK, (start + i) % BLOCK
            for u in range(blocks):
                x = min(max(np.int64(member[head, b * count + i, u] * np.float32(2.0**24)), 0), 2**24 - 1)
                high[row, block, u, slot], low[row, block, u, slot] = x >> 16, x & 0xFFFF


@numba_kernel
def _sum(high, low, heads, starts, places, out):
    """Sums of the memberships of all keys up to each token, ``[B * H, L, K]``."""
    sums = np.empty(high.shape[2], np.int64)
    for row in range(high.shape[0]):
        b = row // heads
        sums[:], key = 0, starts[b]
        for i in range(places.shape[1]):
            while key <= places[b, i]:
                block, begin = key // BLOCK, key % BLOCK
                end = min(BLOCK, places[b, i] + 1 - block * BLOCK)
                for u in range(sums.size):
                    for k in range(begin, end):
                        sums[u] += np.int64(high[row, block, u, k]) << 16 | np.int64(low[row, block, u, k])
                key = block * BLOCK + end
            for u in range(sums.size):
                out[row, i, u] = np.float32(sums[u] * 2.0**-24)


@numba_kernel
def _draw_words(group, begin, end, sequence, head, seed, word, rounded):
    """Write the words of a group and the keys at some positions, and the words in float32; returns the end."""
    one, two, _, _ = philox_once(group, 1, sequence, head | SHARED, seed)
    of_keys = np.empty(64, np.uint32)
    for start in range(begin // 16 * 16, end, 16):
        philox16(start, 0, sequence, head | SHARED, seed, of_keys, 0)
        for k in range(16):
            upper = whole_word(np.uint32(0), of_keys[k], np.uint32(one))
            drawn = whole_word(upper, of_keys[16 + k], np.uint32(two))
            word[start + k], rounded[start + k] = drawn, np.float32(drawn)
    return end


@partial(numba_kernel, reorder=True)
def _add_products(rates, which, count, high, base, sums):
    """Sums over some communities, four at a time, of rates and upper bits of the keys of a block."""
    sums[:BLOCK] = 0
    for v in range(0, count, 4):
        a, b, c, d = rates[v], rates[v + 1], rates[v + 2], rates[v + 3]
        first, second = at(high, base + which[v] * BLOCK), at(high, base + which[v + 1] * BLOCK)
        third, fourth = at(high, base + which[v + 2] * BLOCK), at(high, base + which[v + 3] * BLOCK)
        for k in range(BLOCK):
            one = a * np.float32(peek(first, k)) + b * np.float32(peek(second, k))
            sums[k] += one + (c * np.float32(peek(third, k)) + d * np.float32(peek(fourth, k)))


@numba_kernel
def _draw_last(first, last, rate, high, low, words, rounded, groups, filled, starts, places, law, out, counts, used):
    """Draw the rows of some heads of sequences; ``used`` receives their number of edges."""
    seed, row_group, heads, window, num_sinks = law
    length, blocks = rate.shape[1:]
    rates, which = np.empty(blocks + 4, np.float32), np.zeros(blocks + 4, np.int64)
    sums, candidates, total = np.zeros(BLOCK + 16, np.float32), np.empty(BLOCK + 32, np.int32), 0
    for row in range(first, last):
        b, head = row // heads, row % heads
        begin, pitch = starts[b], high.shape[1] * blocks * BLOCK
        for i in range(length):
            before, slot = total, places[b, i]
            if slot < 0:
                counts[row * length + i] = 0
                continue
            # Random words depend on the group of rows, so they are drawn once for each group.
            group = (slot - begin) // row_group
            if groups[row] != group:
                groups[row], filled[row] = group, 0
            if filled[row] <= slot - begin:
                filled[row] = _draw_words(group, filled[row], slot - begin + 1, b, head, seed, words[row], rounded[row])

            # First tokens come first; between them and the near ones, keys are drawn.
            drawn = begin + min(num_sinks, slot + 1 - begin)
            for key in range(begin, drawn):
                out[total] = key
                total += 1
            near = slot + 1 if window < 0 else max(drawn, slot - window)

            # Choose the communities with large rates; the others only widen the upper bound.
            count, skipped, mean = 0, np.float32(0), np.float32(0)
            for u in range(blocks):
                mean += rate[row, i, u]
            least = mean * np.float32(SKIPPED) / np.float32(blocks)
            for u in range(blocks):
                if rate[row, i, u] > least:
                    rates[count], which[count] = rate[row, i, u], u
                    count += 1
                else:
                    skipped += rate[row, i, u]
            rates[count : count + 4] = 0
            slack = (mean - skipped) * np.float32(2.0**24) + skipped * np.float32(2.0**32) + np.float32(1)
            below, above = np.float32(2.0**24 * (1 - ERROR)), np.float32(2.0**24 * (1 + ERROR))
            for block in range(drawn // BLOCK, (near + BLOCK - 1) // BLOCK):
                # Bound the probabilities of a block of keys, and list those whose words are below the bound.
                _add_products(rates, which, count, at(high, row * pitch), block * blocks * BLOCK, sums)
                hits = 0
                for k in range(max(drawn - block * BLOCK, 0), min(near - block * BLOCK, BLOCK), 16):
                    limit = load(sums, k, 16) * above + splat(slack, 16)
                    its_words = load(at(rounded, row * rounded.shape[1]), block * BLOCK + k - begin, 16)
                    mask = mask_below(its_words, limit)
                    hits = append16(mask, k, candidates, hits)
                # A word below the lower bound is an edge; others are compared with all bits.
                for c in range(hits):
                    k = candidates[c]
                    key = block * BLOCK + k
                    if key >= near or k >= BLOCK:
                        break
                    is_edge = rounded[row, key - begin] < sums[k] * below
                    if not is_edge:
                        exact = 0.0
                        for u in range(blocks):
                            bits = np.int64(high[row, block, u, k]) << 16 | np.int64(low[row, block, u, k])
                            exact += np.float64(rate[row, i, u]) * np.float64(bits)
                        exact = np.floor(min(exact * 2.0**-24, 1.0) * 2.0**32)
                        is_edge = np.float64(words[row, key - begin]) < exact
                    if is_edge:
                        out[total] = key
                        total += 1
            # Near tokens come last, so keys ascend.
            for key in range(near, slot + 1):
                out[total] = key
                total += 1
            counts[row * length + i] = total - before
    used[0] = total


class KeyMemberships:
    """Memberships in [0, 1] of the keys of some sequences, to which more are appended.

    Memory ``3 K`` bytes for each key and head.

    Args:
        batch: Number of sequences B.
        heads: Number of heads H.
        clusters: Number of communities K.
    """

    def __init__(self, batch: int, heads: int, clusters: int) -> None:
        self.count, self.heads = 0, heads
        self.law: tuple[Any, ...] = ()
        self.factor: tuple[Any, ...] | None = None
        self.high, self.low = (np.empty((batch * heads, 0, clusters, BLOCK), kind) for kind in (np.uint8, np.uint16))
        self.words, self.rounded = (np.empty((batch * heads, 16), kind) for kind in (np.uint32, np.float32))
        self.groups, self.filled = np.full((2, batch * heads), -1, np.int64)

    def append(self, member: Tensor) -> None:
        """Append keys, whose memberships are ``[H, B * n, K]``, in the order of sequences."""
        end = self.count + member.size(1) * self.heads // len(self.high)
        blocks = self.high.shape[1]
        if end > blocks * BLOCK:
            more = [(0, 0), (0, max(-(-end // BLOCK), blocks * 5 // 4 + 1) - blocks), (0, 0), (0, 0)]
            self.high, self.low = np.pad(self.high, more), np.pad(self.low, more)
            shape = (len(self.high), self.high.shape[1] * BLOCK + 32)
            self.words, self.rounded = np.empty(shape, np.uint32), np.empty(shape, np.float32)
            self.groups[:] = -1
        _store(member.float().contiguous().numpy(), self.count, self.high, self.low)
        self.count = end

    def sums(self, starts: np.ndarray, places: np.ndarray) -> Tensor:
        """Sums of the memberships of all keys up to each of the last tokens, ``[B, H, L, K]``; see :meth:`draw`."""
        out = np.empty((len(self.high), places.shape[1], self.high.shape[2]), np.float32)
        _sum(self.high, self.low, self.heads, starts, places, out)
        return torch.from_numpy(out).unflatten(0, (-1, self.heads))

    def draw(
        self, rate: Tensor, starts: np.ndarray, places: np.ndarray, seed: int, row_group: int, window: int | None,
        num_sinks: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rows of the last tokens in the order of sequences, heads and tokens, ``[B*H*L+1]`` and ``[E]`` int32.

        Args:
            rate: Rates of the tokens, ``[B, H, L, K]``.
            starts: First key of each sequence, ``[B]`` int64; those before it are padding.
            places: Each token's place among the keys, ``[B, L]`` int64; -1 for padding.
            seed: 64 bits.
            row_group: Queries that share their draws.
            window: Each token also attends to so many before it, and to itself. None: no edge is forced.
            num_sinks: Each token also attends to so many first ones.
        """
        rates = rate.float().flatten(0, 1).contiguous().numpy()
        rows, length = rates.shape[:2]
        law = (seed, row_group, starts.tobytes())
        if law != self.law:
            self.law, self.groups[:] = law, -1
        memory = (self.high, self.low, self.words, self.rounded, self.groups, self.filled)
        size = -1 if window is None else window
        how = (np.uint64(seed & 0xFFFFFFFFFFFFFFFF), row_group, self.heads, size, num_sinks)
        counts, pieces = (
            np.empty(rows * length, np.int64),
            even_ranges(rows, task_count(rates.size * self.count // PER_STEP)),
        )
        tasks = []
        for first, last in pieces:
            out, used = np.empty((last - first) * length * self.count + 16, np.int32), np.zeros(1, np.int64)
            tasks.append((first, last, rates, *memory, starts, places, how, out, counts, used))
        if len(tasks) == 1:
            _draw_last(*tasks[0])
        else:
            run(_draw_last, tasks)
        cols = [out[: used[0]] for *_, out, _, used in tasks]
        rowptr = np.zeros(rows * length + 1, np.int64)
        np.cumsum(counts, out=rowptr[1:])
        return torch.from_numpy(rowptr), torch.from_numpy(cols[0] if len(cols) == 1 else np.concatenate(cols))
