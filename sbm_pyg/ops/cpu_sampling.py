"""The sampler for the CPU: rows in parallel, each by proposals or by coins, sorted as they are made.

Same law, same random words and (up to rounding of a probability) the same edges as :func:`sbm_pyg.ops.reference.sample_sbm`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import reference
from .threads import kernel, run

_COIN_BYTE, _COIN_REST, _COUNT, _PROPOSAL = (
    p << 24 for p in (reference.COIN_BYTE, reference.COIN_REST, reference.COUNT, reference.PROPOSAL)
)
_ROWS = 256  # rows of one task


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


@kernel
def _search(bounds, word):
    """First place whose bound exceeds the word; the last bound counts as infinite."""
    low, high = 0, bounds.size - 1
    while low < high:
        middle = (low + high) >> 1
        if bounds[middle] <= word:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _bounds(mass, out):
    """Inverse CDF of unnormalised masses in 32-bit fixed point."""
    total = 0.0
    for v in range(mass.size):
        total += mass[v]
        out[v] = 0
    running = 0.0
    for v in range(mass.size):
        running += mass[v]
        if total > 0:
            out[v] = min(np.uint64(running / total * 2.0**32), np.uint64(0xFFFFFFFF))


@kernel
def _key_bounds(first, last, key, out):
    mass = np.empty(key.shape[0])
    row = np.empty(key.shape[0], np.uint64)
    for v in range(first, last):
        for j in range(key.shape[0]):
            mass[j] = key[j, v]
        _bounds(mass, row)
        for j in range(key.shape[0]):
            out[v, j] = row[j]


@kernel
def _propose(i, rate, key, key_sum, bounds, stretch, head, stream, seed, thin, exploration, seen, kept, out, used):
    """Edges of one row by Poisson proposals; returns the new end of ``out``, or -1 where it is too short."""
    num_keys, blocks = key.shape
    mass = np.empty(blocks + 1)
    for v in range(blocks):
        mass[v] = np.float64(rate[i, v]) * key_sum[v]
    mass[blocks] = exploration * num_keys
    block_bounds = np.empty(blocks + 1, np.uint64)
    _bounds(mass, block_bounds)
    count = _poisson(mass.sum() * stretch, i, stream, head, seed)
    if used + min(count, num_keys) > out.size:
        return -1
    start, rejected = used, 0
    drop = np.empty(min(count, num_keys), np.int64)
    for t in range(count):
        w0, w1, w2, _ = _philox(t, i, stream, head | _PROPOSAL, seed)
        block = _search(block_bounds, w0)
        j = _search(bounds[block], w1) if block < blocks else np.int64((w1 * np.uint64(num_keys)) >> np.uint64(32))
        bit = np.uint64(1) << np.uint64(j & 63)
        if seen[j >> 6] & bit:
            continue
        seen[j >> 6] |= bit
        keep = True
        if thin and np.float64(w2) * stretch >= 2.0**32:  # below 1/c every probability accepts
            p = exploration
            for v in range(blocks):
                p += np.float64(rate[i, v]) * np.float64(key[j, v])
            keep = np.float64(w2) * -np.expm1(-stretch * p) < p * 2.0**32
        if keep:
            out[used] = j
            used += 1
        else:
            drop[rejected] = j
            rejected += 1
    for e in range(rejected):
        seen[drop[e] >> 6] &= ~(np.uint64(1) << np.uint64(drop[e] & 63))
    if (used - start) * 8 < seen.size:
        out[start:used].sort()
        for e in range(start, used):
            seen[out[e] >> 6] = 0
    else:
        used = start
        for part in range(seen.size):
            word = seen[part]
            seen[part] = 0
            while word:
                bit = word & (~word + np.uint64(1))
                index = part << 6
                while bit > np.uint64(0xFFFF):
                    bit >>= np.uint64(16)
                    index += 16
                while bit > 1:
                    bit >>= np.uint64(1)
                    index += 1
                out[used] = index
                used += 1
                word &= word - np.uint64(1)
    return used


@kernel
def _flip(i, rate, key_t, head, stream, seed, fastrg, clamp, exploration, p, out, used):
    """Edges of one row by a coin per key; returns the new end of ``out`` and the largest probability."""
    blocks, num_keys = key_t.shape
    for j in range(num_keys):
        p[j] = exploration
    v = 0
    while v + 4 <= blocks:
        a, b, c, d = rate[i, v], rate[i, v + 1], rate[i, v + 2], rate[i, v + 3]
        x, y, z, w = key_t[v], key_t[v + 1], key_t[v + 2], key_t[v + 3]
        for j in range(num_keys):
            p[j] += (a * x[j] + b * y[j]) + (c * z[j] + d * w[j])
        v += 4
    while v < blocks:
        a, x = rate[i, v], key_t[v]
        for j in range(num_keys):
            p[j] += a * x[j]
        v += 1
    top = 0.0
    if fastrg:
        for j in range(num_keys):
            p[j] = -np.expm1(-p[j])
    for j in range(num_keys):
        top = max(top, p[j])
    if top > 1 and not clamp and top > 1 + 1e-5 + exploration:
        return used, top
    low = np.uint64(255)
    for first in range(0, num_keys, 16):
        words = _philox(first >> 4, i, stream, head | _COIN_BYTE, seed)
        for part in range(4):
            word = words[part]
            for k in range(4):
                j = first + 4 * part + k
                if j < num_keys:
                    byte = (word >> np.uint64(8 * k)) & low
                    threshold = np.uint64(min(np.float64(p[j]), 1.0) * 2.0**32)
                    hit = byte < threshold >> np.uint64(24)
                    if byte == threshold >> np.uint64(24):
                        rest = _philox(j >> 2, i, stream, head | _COIN_REST, seed)[j & 3] >> np.uint64(8)
                        hit = rest < threshold & np.uint64(0xFFFFFF)
                    out[used] = j
                    used += hit
    return used, top


@kernel
def _rows(
    first, last, rate, key, key_t, key_sum, bounds, stretch, dense, head, stream, seed, fastrg, exploration, clamp, out, counts, state
):  # fmt: skip
    """Rows first..last-1 into ``out``; state = [next row, edges so far, 1 if a probability exceeds 1], extreme in ``stretch``."""
    num_keys = key.shape[0]
    p = np.empty(num_keys, rate.dtype)
    seen = np.zeros((num_keys + 63) >> 6, np.uint64)
    kept = seen
    used = state[1]
    i = state[0]
    while i < last:
        if dense[i]:
            if used + num_keys + 16 > out.size:
                break
            end, top = _flip(i, rate, key_t, head, stream, seed, fastrg, clamp, exploration, p, out, used)
            if not fastrg and not clamp and top > 1 + 1e-5 + exploration:
                stretch[i] = top
                state[2] = 1
                break
        else:
            end = _propose(i, rate, key, key_sum, bounds, stretch[i], head, stream, seed, not fastrg, exploration, seen, kept, out, used)
            if end < 0:
                break
        counts[i] = end - used
        used = end
        i += 1
    state[0], state[1] = i, used


def sample_sbm(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, streams: Tensor, seed: int, method: str, exploration: float, clamp: bool
) -> tuple[Tensor, Tensor]:
    heads, num_queries = query.shape[:2]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = (x.detach().to(dtype).contiguous() for x in (query, key))
    index = np.int32 if key.size(1) < 2**31 else np.int64
    counts = np.zeros((heads, num_queries), np.int64)
    word = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    spans = [*zip(query_ptr.tolist(), query_ptr.tolist()[1:], key_ptr.tolist(), key_ptr.tolist()[1:], streams.tolist(), strict=False)]
    blocks: list[list[list[np.ndarray]]] = []

    def block(head: int, start: int, end: int, first_key: int, end_key: int, stream: int, pieces: list[list[np.ndarray]]) -> None:
        rate, keys = query[head, start:end], key[head, first_key:end_key]
        wide = keys.double()
        key_sum = wide.sum(0)
        stretch, dense = reference.plan_rows(rate.double(), key_sum, wide.amax(0), keys.size(0), method, exploration)
        bounds = np.empty((keys.size(1), 0 if bool(dense.all()) else keys.size(0)), np.uint32)
        if bounds.size:
            _key_bounds(0, keys.size(1), keys.numpy(), bounds)
        key_t = keys.T.contiguous() if bool(dense.any()) else keys.T[:, :0].contiguous()
        arrays = (rate.numpy(), keys.numpy(), key_t.numpy(), key_sum.numpy(), bounds, stretch.numpy(), dense.numpy())
        options = (np.uint64(head), np.uint64(stream & 0xFFFFFFFF), word, method == "fastrg", exploration, clamp)
        expected = (rate.double() @ key_sum).numpy() + exploration * keys.size(0)

        def rows(first: int, last: int, found: list[np.ndarray]) -> None:
            state = np.array([first, 0, 0])
            room = int(expected[first:last].sum() * 1.1) + keys.size(0) + 1024
            while state[0] < last:
                out = np.empty(room, index)
                state[1] = 0
                _rows(first, last, *arrays, *options, out, counts[head, start:end], state)
                if state[2]:
                    raise ValueError(reference.over_one(float(arrays[5][state[0]]) - exploration))
                found.append(out[: state[1]] + index(first_key))
                room *= 2

        n = end - start
        pieces.extend([] for _ in range(0, n, _ROWS))
        run(rows, [(first, min(first + _ROWS, n), pieces[first // _ROWS]) for first in range(0, n, _ROWS)])

    tasks = []
    for head in range(heads):
        for span in spans:
            blocks.append([])
            tasks.append((head, *span, blocks[-1]))
    if len(spans) > 1:
        run(block, tasks)
    else:
        for task in tasks:
            block(*task)
    rowptr = np.zeros(heads * num_queries + 1, np.int64)
    np.cumsum(counts, out=rowptr[1:])
    col = np.concatenate([piece for one in blocks for rows in one for piece in rows] or [np.empty(0, index)])
    return torch.from_numpy(rowptr), torch.from_numpy(col)
