"""Edge kernels for the CPU: scores of edges, attention over edges, and their gradients, in one pass over compressed rows.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on the CPU. Here are the kernels and the functions that lay out memory for
them. Not here: checks of what comes in, the vectors that kernels are written in (:mod:`.simd`), threads (:mod:`.threads`).

Sixteen edges of a row at a time get their dot products with the row's query (:func:`.simd.dots`); sums over the edges of a row stay in
registers. Gradients of keys are added edge by edge, and what bounds that is the second-level cache: so backward kernels take the keys in
tiles that fit it, and keep all that belongs to a key on neighbouring cache lines.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from .bits import philox16
from .simd import at, dots, exp, first, highest, load, load16, maximum, peek, poke, scratch, splat, store, store16, total
from .threads import kernel, run, split

STRIP = 512  # edges of a row between two looks at its maximum
DROPOUT = 5  # what these random words are for; see reference.py
CACHE = 2**20  # bytes of the second-level cache that keys and their gradients may fill
LEAST = 16  # edges of a row that make a tile of keys worthwhile


def _lanes(*widths: int) -> int:
    """Channels that a kernel takes at once, for widths that are multiples of 16."""
    return next(lanes for lanes in (64, 48, 32, 16) if not any(width % lanes for width in widths))


# ------------------------------------------------------------------ attention


@kernel
def _drop(factor, start, count, words, threshold, kept, seed):
    """Dropout of edges ``start .. start + count - 1``: 0 or ``kept``. Edge e looks at word ``e % 4`` of counter ``e // 4``."""
    for t in range(count):
        edge = start + t
        if t == 0 or edge & 63 == 0:
            philox16((edge >> 6) << 4, edge >> 34, 0, DROPOUT, seed, words, 0)
        poke(factor, t, kept if words[((edge & 3) << 4) + ((edge & 63) >> 2)] >= threshold else 0)


@cache
def _attention(width, value_width):
    lanes, value_lanes = _lanes(width), _lanes(value_width)

    @kernel
    def attention(
        begin, end, queries, keys, query, key, value, rowptr, col, gate, bias, scale, weighted, threshold, kept, seed, out, tops, norms
    ):
        weight, factor, tail, words = scratch(query, STRIP), scratch(query, STRIP), scratch(col, 16), np.empty(64, np.uint32)
        zero, one, low = query.dtype.type(0), query.dtype.type(1), query.dtype.type(-np.inf)
        head = begin // queries
        for row in range(begin, end):
            if row >= (head + 1) * queries:
                head = row // queries
            keys_here, values_here = at(key, head * keys * width), at(value, head * keys * value_width)
            top, sums = low, splat(zero, 16)
            for c in range(0, value_width, value_lanes):
                store(out, row * value_width + c, splat(zero, value_lanes))
            begin_edge, end_edge = peek(rowptr, row), peek(rowptr, row + 1)
            for start in range(begin_edge, end_edge, STRIP):
                count = min(STRIP, end_edge - start)
                high = splat(low, 16)
                for t in range(0, count, 16):
                    tokens = at(col, start + t)
                    if count - t < 16:
                        store(tail, 0, load16(tokens, 0, count - t))
                        tokens = tail
                    logit = splat(zero, 16)
                    for c in range(0, width, lanes):
                        logit = logit + dots(load(query, row * width + c, lanes), at(keys_here, c), width, tokens)
                    logit = logit * scale
                    if gate.size and not weighted:
                        logit = logit * load16(gate, start + t, count - t)
                    if bias.size:
                        logit = logit + load16(bias, start + t, count - t)
                    logit = first(count - t, logit, low)
                    high = maximum(logit, high)
                    store(weight, t, logit)
                new = highest(high)
                if new > top:
                    if top > low:
                        shrink = np.exp(top - new)
                        sums = sums * shrink
                        for c in range(0, value_width, value_lanes):
                            store(out, row * value_width + c, load(out, row * value_width + c, value_lanes) * shrink)
                    top = new
                if threshold:
                    _drop(factor, start, count, words, threshold, kept, seed)
                for t in range(0, count, 16):
                    p = exp(load(weight, t, 16) - (top if top > low else zero))
                    if weighted:
                        p = p * load16(gate, start + t, count - t)
                    sums = sums + p
                    store(weight, t, p * load(factor, t, 16) if threshold else p)
                    for c in range(0, value_width, value_lanes):
                        odd, even = splat(zero, value_lanes), load(out, row * value_width + c, value_lanes)
                        for u in range(t + 1, min(t + 16, count), 2):
                            even = even + peek(weight, u - 1) * load(values_here, peek(col, start + u - 1) * value_width + c, value_lanes)
                            odd = odd + peek(weight, u) * load(values_here, peek(col, start + u) * value_width + c, value_lanes)
                        if count & 1 and count - t < 16:
                            u = count - 1
                            odd = odd + peek(weight, u) * load(values_here, peek(col, start + u) * value_width + c, value_lanes)
                        store(out, row * value_width + c, even + odd)
            norm = total(sums)
            poke(tops, row, top)
            poke(norms, row, norm)
            if norm != zero:
                for c in range(0, value_width, value_lanes):
                    store(out, row * value_width + c, load(out, row * value_width + c, value_lanes) * (one / norm))

    return attention


@cache
def _attention_backward(width, value_width):
    both = width + value_width
    lanes, value_lanes, add_lanes = _lanes(width), _lanes(value_width), _lanes(width, value_width)
    wider = max(width, value_width)

    @kernel
    def attention_backward(
        begin, end, sums, tiles, queries, keys, grad_out, query, pair, rowptr, col, gate, bias, out, lse, scale, weighted, threshold, kept, seed,
        dquery, dpair, dgate, dbias,
    ):  # fmt: skip
        slopes, weights, factor, tail = scratch(query, 16), scratch(query, 16), scratch(query, 16), scratch(col, 16)
        words = np.empty(64, np.uint32)
        zero, one = query.dtype.type(0), query.dtype.type(1)
        keys_here, values_here = at(pair, begin // queries * keys * both), at(pair, begin // queries * keys * both + width)
        dkeys_here, dvalues_here = at(dpair, sums * keys * both), at(dpair, sums * keys * both + width)
        position = rowptr[begin:end].copy()
        for tile in range(tiles):
            limit = keys * (tile + 1) // tiles
            for row in range(begin, end):
                mean = zero
                for c in range(0, value_width, value_lanes):
                    mean += total(load(grad_out, row * value_width + c, value_lanes) * load(out, row * value_width + c, value_lanes))
                if tile == 0:
                    for c in range(0, width, lanes):
                        store(dquery, row * width + c, splat(zero, lanes))
                shift = lse[row] if lse[row] != -np.inf else zero
                start, stop = peek(position, row - begin), rowptr[row + 1]
                while start < stop and peek(col, start) < limit:
                    count = min(16, stop - start)
                    while peek(col, start + count - 1) >= limit:
                        count -= 1
                    tokens = at(col, start)
                    if count < 16:
                        store(tail, 0, load16(tokens, 0, count))
                        tokens = tail
                    score, gain = splat(zero, 16), splat(zero, 16)
                    for c in range(0, width, lanes):
                        score = score + dots(load(query, row * width + c, lanes), at(keys_here, c), both, tokens)
                    for c in range(0, value_width, value_lanes):
                        gain = gain + dots(load(grad_out, row * value_width + c, value_lanes), at(values_here, c), both, tokens)
                    score = score * scale
                    some_gate = load16(gate, start, count) if gate.size else splat(one, 16)
                    logit = score if weighted else score * some_gate
                    if bias.size:
                        logit = logit + load16(bias, start, count)
                    p = exp(logit - shift)
                    if threshold:
                        _drop(factor, start, count, words, threshold, kept, seed)
                        gain = gain * load(factor, 0, 16)
                    slope = p * (gain - mean)
                    if dgate.size:
                        store16(dgate, start, count, slope if weighted else slope * score)
                    if weighted:
                        p, slope = p * some_gate, slope * some_gate
                    if dbias.size:
                        store16(dbias, start, count, slope)
                    store(weights, 0, p * load(factor, 0, 16) if threshold else p)
                    store(slopes, 0, (slope if weighted else slope * some_gate) * scale)
                    for c in range(0, wider, add_lanes):
                        q = load(query, row * width + c, add_lanes) if c < width else splat(zero, add_lanes)
                        dq = load(dquery, row * width + c, add_lanes) if c < width else splat(zero, add_lanes)
                        g = load(grad_out, row * value_width + c, add_lanes) if c < value_width else splat(zero, add_lanes)
                        for t in range(count):
                            place = peek(col, start + t) * both + c
                            if c < width:
                                slope_t = peek(slopes, t)
                                dq = dq + slope_t * load(keys_here, place, add_lanes)
                                store(dkeys_here, place, load(dkeys_here, place, add_lanes) + slope_t * q)
                            if c < value_width:
                                store(dvalues_here, place, load(dvalues_here, place, add_lanes) + peek(weights, t) * g)
                        if c < width:
                            store(dquery, row * width + c, dq)
                    start += count
                poke(position, row - begin, start)

    return attention_backward


# ------------------------------------------------------------------ scores alone


@cache
def _dot(width):
    lanes = _lanes(width)

    @kernel
    def dot(begin, end, queries, keys, query, key, rowptr, col, out):
        tail, zero = scratch(col, 16), query.dtype.type(0)
        for row in range(begin, end):
            keys_here = at(key, row // queries * keys * width)
            for start in range(rowptr[row], rowptr[row + 1], 16):
                count = rowptr[row + 1] - start
                tokens = at(col, start)
                if count < 16:
                    store(tail, 0, load16(tokens, 0, count))
                    tokens = tail
                score = splat(zero, 16)
                for c in range(0, width, lanes):
                    score = score + dots(load(query, row * width + c, lanes), at(keys_here, c), width, tokens)
                store16(out, start, count, score)

    return dot


@cache
def _dot_backward(width):
    lanes = _lanes(width)

    @kernel
    def dot_backward(begin, end, sums, tiles, queries, keys, grad, query, key, rowptr, col, need_query, need_key, dquery, dkey):
        zero = query.dtype.type(0)
        keys_here, dkeys_here = at(key, begin // queries * keys * width), at(dkey, sums * keys * width)
        position = rowptr[begin:end].copy()
        for tile in range(tiles):
            limit = keys * (tile + 1) // tiles
            for row in range(begin, end):
                start, stop = peek(position, row - begin), rowptr[row + 1]
                if tile + 1 < tiles:  # the first edge beyond the tile, by bisection
                    low = start
                    while low < stop:
                        middle = (low + stop) >> 1
                        if peek(col, middle) < limit:
                            low = middle + 1
                        else:
                            stop = middle
                    poke(position, row - begin, stop)
                for c in range(0, width, lanes):
                    if need_query:
                        dq = load(dquery, row * width + c, lanes) if tile else splat(zero, lanes)
                        for edge in range(start, stop):
                            dq = dq + peek(grad, edge) * load(keys_here, peek(col, edge) * width + c, lanes)
                        store(dquery, row * width + c, dq)
                    if need_key:
                        q = load(query, row * width + c, lanes)
                        for edge in range(start, stop):
                            place = peek(col, edge) * width + c
                            store(dkeys_here, place, load(dkeys_here, place, lanes) + peek(grad, edge) * q)

    return dot_backward


# ------------------------------------------------------------------ memory and work


def _wide(tensor: Tensor, like: Tensor) -> np.ndarray:
    """A contiguous array in the precision that kernels compute in."""
    return tensor.detach().to(torch.promote_types(like.dtype, torch.float32)).contiguous().numpy()


def _maybe(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    return _wide(like.new_empty(0) if tensor is None else tensor, like)


def _padded(*tensors: Tensor) -> np.ndarray:
    """Tensors ``[H, N, C]`` side by side as ``[H*N, width]``, each with zeros behind its channels up to a multiple of 16."""
    parts = [torch.nn.functional.pad(x, (0, _width(x) - x.shape[2])) if x.shape[2] % 16 or not x.shape[2] else x for x in tensors]
    rows = _wide(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0], tensors[0])
    return rows.reshape(rows.shape[0] * rows.shape[1], rows.shape[2])


def _width(tensor: Tensor) -> int:
    return max(1, -(-tensor.shape[2] // 16)) * 16


def _cut(rows: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """The first channels of ``[..., width]`` as ``[H, N, C]``: heads and tokens of ``tokens``, channels and dtype of ``like``."""
    channels = like.shape[2]
    result = rows.view(*tokens.shape[:2], rows.shape[1])[..., :channels]
    return result.to(like.dtype, copy=rows.stride(0) != channels, memory_format=torch.contiguous_format)


def _units(rowptr: np.ndarray, heads: int, keys: int, keys_bytes: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """How backward work is divided: ``(begin, end, sums)`` for each unit, how many sums, and tiles of keys.

    Rows of a unit add to gradients of keys of their own, one of ``parts`` for each head, that are added up in the end. A head is divided
    only as far as it has many more edges than keys. None of this depends on the number of threads, so neither do results.
    """
    rows, edges = (len(rowptr) - 1) // max(heads, 1), int(rowptr[-1])
    parts = max(1, min(8 // max(heads, 1), edges // max(1, 64 * heads * keys)))
    tiles = max(1, min(-(-keys * keys_bytes // CACHE), edges // max(1, LEAST * heads * rows)))
    cuts = [split(rowptr[head * rows : (head + 1) * rows + 1], parts) for head in range(heads)]
    return [(h * rows + i, h * rows + j, part * heads + h) for h in range(heads) for part, (i, j) in enumerate(cuts[h])], parts, tiles


def _chances(dropout: float, seed: int, dtype: np.dtype) -> tuple[np.uint64, np.floating, np.uint64]:
    """Words below the first number drop an edge, and the others multiply it by the second."""
    return np.uint64(round(dropout * 2**32)), dtype.type(1 / (1 - dropout) if dropout < 1 else 0), np.uint64(seed % 2**64)


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    q, k, pointers, tokens = _padded(query), _padded(key), rowptr.contiguous().numpy(), col.contiguous().numpy()
    out = np.empty(len(tokens), q.dtype)
    arguments = (query.shape[1], key.shape[1], q, k, pointers, tokens, out)
    run(_dot(q.shape[1]), [(*cut, *arguments) for cut in split(pointers, 4 * torch.get_num_threads())])
    return torch.from_numpy(out).to(query.dtype)


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    q, k, pointers, tokens = _padded(query), _padded(key), rowptr.contiguous().numpy(), col.contiguous().numpy()
    units, parts, tiles = _units(pointers, query.shape[0], key.shape[1], 2 * k.itemsize * k.shape[1])
    dquery = torch.from_numpy(np.empty_like(q) if need_query else np.zeros_like(q))
    dkey = torch.from_numpy(k).new_zeros((parts, *k.shape))
    arguments = (
        tiles, query.shape[1], key.shape[1], _wide(grad, query), q, k, pointers, tokens, need_query, need_key, dquery.numpy(),
        dkey.view(-1).numpy(),
    )  # fmt: skip
    run(_dot_backward(q.shape[1]), [(*unit, *arguments) for unit in units])
    return _cut(dquery, query, query), _cut(dkey.sum(0) if parts > 1 else dkey[0], key, key)


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None, scale: float,
    gate_form: str, dropout: float, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, pointers, tokens = _padded(query), _padded(key), _padded(value), rowptr.contiguous().numpy(), col.contiguous().numpy()
    like = torch.from_numpy(q)
    out, tops, norms = like.new_empty(q.shape[0], v.shape[1]), like.new_empty(query.shape[:2]), like.new_empty(query.shape[:2])
    arguments = (
        query.shape[1], key.shape[1], q, k, v, pointers, tokens, _maybe(gate, query), _maybe(bias, query), q.dtype.type(scale),
        gate is not None and gate_form == "weight", *_chances(dropout, seed, q.dtype), out.numpy(), tops.view(-1).numpy(), norms.view(-1).numpy(),
    )  # fmt: skip
    run(_attention(q.shape[1], v.shape[1]), [(*cut, *arguments) for cut in split(pointers, 4 * torch.get_num_threads())])
    return _cut(out, query, value), norms.log_().add_(tops)


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None,
    out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int, need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, pair, pointers, tokens = _padded(query), _padded(key, value), rowptr.contiguous().numpy(), col.contiguous().numpy()
    units, parts, tiles = _units(pointers, query.shape[0], key.shape[1], 2 * pair.itemsize * pair.shape[1])
    dquery, dpair = torch.from_numpy(q).new_empty(q.shape), torch.from_numpy(pair).new_zeros((parts, *pair.shape))
    dgate, dbias = (np.empty(len(tokens) if need and x is not None else 0, q.dtype) for x, need in ((gate, need_gate), (bias, need_bias)))
    arguments = (
        tiles, query.shape[1], key.shape[1], _padded(grad_out), q, pair, pointers, tokens, _maybe(gate, query), _maybe(bias, query), _padded(out),
        _wide(lse, query).reshape(-1), q.dtype.type(scale), gate is not None and gate_form == "weight", *_chances(dropout, seed, q.dtype),
        dquery.numpy(), dpair.view(-1).numpy(), dgate, dbias,
    )  # fmt: skip
    run(_attention_backward(q.shape[1], _width(value)), [(*unit, *arguments) for unit in units])
    dkey, dvalue = (dpair.sum(0) if parts > 1 else dpair[0]).split([q.shape[1], _width(value)], dim=1)
    edge_grads = (torch.from_numpy(x).to((query if y is None else y).dtype) for x, y in ((dgate, gate), (dbias, bias)))
    return _cut(dquery, query, query), _cut(dkey, key, key), _cut(dvalue, value, value), *edge_grads
