"""The effect of switching single edges on or off, on the CPU: one pass over the edges and the probes of each row.

In and out: the tensors of ``edge_effect`` in :mod:`sbm_pyg.ops`. Scores and gains of a row's edges stay in two buffers as long as the
longest row; probes take their turn in the same buffers. Not here: attention itself (:mod:`.cpu_edges`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from .cpu_edges import _lanes, _rows, _wide
from .simd import NOTHING, at, dots, exp, first, highest, load, load16, maximum, peek, poke, scratch, splat, store, store16, total
from .threads import kernel, run, split


@cache
def _effect(width, value_width):
    lanes, value_lanes = _lanes(width), _lanes(value_width)

    @kernel
    def measure(row, start, count, keys, values, grad_out, query, col, bias, scale, logits, gains):
        """Logits and gains of ``count`` edges of a row; -inf and 0 behind them, up to a multiple of 16. Returns the largest logit."""
        tail, zero, low = scratch(col, 16), query.dtype.type(0), query.dtype.type(-np.inf)
        high = splat(low, 16)
        for t in range(0, count, 16):
            tokens = at(col, start + t)
            if count - t < 16:
                store(tail, 0, load16(tokens, 0, count - t))
                tokens = tail
            logit, gain = splat(zero, 16), splat(zero, 16)
            for c in range(0, width, lanes):
                logit = logit + dots(load(query, row * width + c, lanes), at(keys, c), width, tokens)
            for c in range(0, value_width, value_lanes):
                gain = gain + dots(load(grad_out, row * value_width + c, value_lanes), at(values, c), value_width, tokens)
            logit = logit * scale
            if bias.size:
                logit = logit + load16(bias, start + t, count - t)
            logit = first(count - t, logit, low)
            high = maximum(logit, high)
            store(logits, t, logit)
            store(gains, t, first(count - t, gain, zero))
        return highest(high)

    @kernel
    def effect(
        begin, end, longest, queries, num_keys, grad_out, query, key, value, rowptr, col, bias, probe_rowptr, probe_col, probe_bias, scale,
        out, probe_out,
    ):  # fmt: skip
        room = (longest + 15) // 16 * 16
        logits, gains = np.empty(room, query.dtype), np.empty(room, query.dtype)
        zero, one, low, most = query.dtype.type(0), query.dtype.type(1), query.dtype.type(-np.inf), query.dtype.type(-88)
        for row in range(begin, end):
            keys = at(key, row // queries * num_keys * width)
            values = at(value, row // queries * num_keys * value_width)
            start = peek(rowptr, row)
            count = peek(rowptr, row + 1) - start
            top = measure(row, start, count, keys, values, grad_out, query, col, bias, scale, logits, gains)
            best = 0
            while best < count and peek(logits, best) != top:
                best += 1
            best_gain = zero
            rest, rest_gain, second = splat(zero, 16), splat(zero, 16), low
            if best < count:
                best_gain = peek(gains, best)
                poke(logits, best, low)
                high = splat(low, 16)
                for t in range(0, count, 16):
                    high = maximum(load(logits, t, 16), high)
                second = highest(high)
            shift = second if second != low else zero
            for t in range(0, count, 16):
                weight = exp(load(logits, t, 16) - shift)
                rest = rest + weight
                rest_gain = rest_gain + weight * load(gains, t, 16)
                store(logits, t, weight)
            others, others_gain = total(rest), total(rest_gain)
            ratio = np.exp(second - top) if second - top > NOTHING else zero
            sums, sums_gain = one + others * ratio, best_gain + others_gain * ratio
            if top == low:
                sums, sums_gain = zero, zero
            for t in range(0, count, 16):
                share, gain = load(logits, t, 16) * ratio, load(gains, t, 16)
                change = share / sums * (gain - (sums_gain - share * gain) / (sums - share)) if top != low else splat(zero, 16)
                store16(out, start + t, count - t, change)
            if best < count and top != low:
                poke(out, start + best, (best_gain - (others_gain / others if others != zero else zero)) / sums)

            edge, stop = start, start + count
            start = peek(probe_rowptr, row)
            count = peek(probe_rowptr, row + 1) - start
            measure(row, start, count, keys, values, grad_out, query, probe_col, probe_bias, scale, logits, gains)
            mean = sums_gain / sums if sums != zero else zero
            if top != low:
                for t in range(0, count, 16):
                    weight = exp(zero - maximum(splat(most, 16), top - load(logits, t, 16)))
                    store16(probe_out, start + t, count - t, weight / (weight + sums) * (load(gains, t, 16) - mean))
            else:  # a probe would be the row's only edge
                for t in range(count):
                    poke(probe_out, start + t, peek(gains, t) if peek(logits, t) != low else zero)
            for t in range(count):
                token = peek(probe_col, start + t)
                while edge < stop and peek(col, edge) < token:
                    edge += 1
                if edge < stop and peek(col, edge) == token:
                    poke(probe_out, start + t, zero)

    return effect


def edge_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None, probe_rowptr: Tensor,
    probe_col: Tensor, probe_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    g, q, k, v = (_rows(x, query) for x in (grad_out, query, key, value))
    offsets, probe_offsets = (x.contiguous().numpy() for x in (rowptr, probe_rowptr))
    tokens, probe_tokens = (x.contiguous().numpy() for x in (col, probe_col.to(col.dtype)))
    out, probe_out = np.empty(len(tokens), q.dtype), np.empty(len(probe_tokens), q.dtype)
    longest = max((int(np.diff(x).max(initial=0)) for x in (offsets, probe_offsets)), default=0)
    arguments = (
        longest, query.shape[1], key.shape[1], g, q, k, v, offsets, tokens, _wide(bias, query), probe_offsets, probe_tokens,
        _wide(probe_bias, query), q.dtype.type(scale), out, probe_out,
    )  # fmt: skip
    pieces = split(offsets + probe_offsets, 3 * torch.get_num_threads())
    run(_effect(q.shape[1], v.shape[1]), [(*piece, *arguments) for piece in pieces])
    return torch.from_numpy(out).to(query.dtype), torch.from_numpy(probe_out).to(query.dtype)
