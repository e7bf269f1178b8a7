"""The effect of switching single edges on or off, on the CPU: one pass over the edges and the probes of each row.

In and out: the tensors of ``edge_effect``, ``weigh_effect`` and ``effect_gradients``. Scores, gains and factors of a
row's edges stay in buffers as long as the longest row; probes take their turn in the same buffers. Not here: attention
itself (:mod:`.edges`).
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from ..reference import effects as reference_effects
from ..reference.sampling import MAX_PROB
from . import edges
from .channels import add_dots, lanes_of, sixteen, to_array, to_padded_array
from .simd import (
    NEGLIGIBLE_LOGIT,
    at,
    exp,
    first,
    highest,
    lane_sum,
    load,
    load16,
    maximum,
    peek,
    poke,
    scratch,
    splat,
    store,
    store16,
    where_above,
)
from .threads import numba_kernel, run, split, task_count


@cache
def _compile_edge_effect(width, value_width, blocks):
    lanes, value_lanes, block_lanes = lanes_of(width), lanes_of(value_width), lanes_of(blocks)

    @numba_kernel
    def effect(
        begin, end, longest, queries, num_keys, grad_out, query, key, value, rowptr, col, bias, probe_rowptr, probe_col,
        probe_bias, scale, rate, member, chance, exploration, out, probe_out,
    ):  # fmt: skip
        room = (longest + 15) // 16 * 16
        logits, gains, factors = np.empty(room, query.dtype), np.empty(room, query.dtype), np.empty(room, query.dtype)
        zero, half, one = query.dtype.type(0), query.dtype.type(0.5), query.dtype.type(1)
        low, most, certain = query.dtype.type(-np.inf), query.dtype.type(-88), query.dtype.type(MAX_PROB)
        tail, top, sums, sums_gain = scratch(col, 16), low, zero, zero
        for row in range(begin, end):
            # Point to the keys, values and memberships of the row's head.
            keys = at(key, row // queries * num_keys * width)
            values = at(value, row // queries * num_keys * value_width)
            members = at(member, row // queries * num_keys * blocks)
            edge, stop = peek(rowptr, row), peek(rowptr, row + 1)
            # The edges, then the probes. One loop for both: a kernel that it called for each would be compiled anew by
            # every process.
            for probing in range(2):
                start = peek(probe_rowptr, row) if probing else edge
                count = (peek(probe_rowptr, row + 1) if probing else stop) - start
                ends, target = (
                    (at(probe_col, start), at(probe_out, start)) if probing else (at(col, start), at(out, start))
                )
                extra, biased = (at(probe_bias, start), probe_bias.size) if probing else (at(bias, start), bias.size)
                # Write logit, gain and factor of each edge, sixteen at a time, to buffers as long as the row.
                high = splat(low, 16)
                for t in range(0, count, 16):
                    tokens, none, factor = sixteen(at(ends, t), count - t, tail), splat(zero, 16), splat(one, 16)
                    logit = add_dots(none, query, row * width, keys, width, tokens, width, lanes)
                    gain = add_dots(
                        none, grad_out, row * value_width, values, value_width, tokens, value_width, value_lanes
                    )
                    if blocks:
                        # The weight of the effect follows from the probability of the pair and of a probe.
                        eta, p = peek(chance, row % queries), splat(exploration, 16)
                        p = add_dots(p, rate, row * blocks, members, blocks, tokens, blocks, block_lanes)
                        part = half if eta > zero else one  # without probes the edges stand for absent pairs, too
                        few = zero - maximum(zero - p, splat(-part, 16))
                        seen = maximum(eta + (one - eta) * few, few / part)
                        factor = one / seen
                        if probing:  # a probe of probability 0 has weight 0
                            factor = (seen - few) / (seen * (one - few) * eta) if eta > zero else few * zero
                        factor = where_above(p, certain, zero, factor)
                    logit = logit * scale
                    if biased:
                        logit = logit + load16(extra, t, count - t)
                    logit = first(count - t, logit, low)
                    high = maximum(logit, high)
                    store(logits, t, logit)
                    store(gains, t, first(count - t, gain, zero))
                    store(factors, t, factor)

                if probing:
                    # A probe joins the row's edges: its effect is its share of its gain above their mean gain.
                    mean = sums_gain / sums if sums != zero else zero
                    for t in range(0, count, 16):
                        logit, change = load(logits, t, 16), load(gains, t, 16)
                        if top != low:
                            weight = exp(zero - maximum(splat(most, 16), top - logit))
                            change = weight / (weight + sums) * (change - mean)
                        store16(target, t, count - t, change * load(factors, t, 16))
                    # A probe that is an edge, or is forbidden, has no effect; both lists ascend.
                    for t in range(count):
                        token = peek(ends, t)
                        while edge < stop and peek(col, edge) < token:
                            edge += 1
                        if (edge < stop and peek(col, edge) == token) or peek(logits, t) == low:
                            poke(target, t, zero)
                else:
                    # sums over the row's edges without the heaviest, so that no other is taken from a sum that it
                    # dominates
                    top, best, second, best_gain = highest(high), 0, low, zero
                    while best < count and peek(logits, best) != top:
                        best += 1
                    other_weights, other_gains = splat(zero, 16), splat(zero, 16)
                    if best < count:
                        best_gain = peek(gains, best)
                        poke(logits, best, low)
                        high = splat(low, 16)
                        for t in range(0, count, 16):
                            high = maximum(load(logits, t, 16), high)
                        second = highest(high)
                    # Weigh the other edges, relative to the second largest logit.
                    shift = second if second != low else zero
                    for t in range(0, count, 16):
                        weight = exp(load(logits, t, 16) - shift)
                        other_weights = other_weights + weight
                        other_gains = other_gains + weight * load(gains, t, 16)
                        store(logits, t, weight)
                    others, others_gain = lane_sum(other_weights), lane_sum(other_gains)
                    # Sum up the whole row, relative to its largest logit.
                    ratio = np.exp(second - top) if second - top > NEGLIGIBLE_LOGIT else zero
                    sums, sums_gain = (
                        (one + others * ratio, best_gain + others_gain * ratio) if top != low else (zero, zero)
                    )
                    # The effect of an edge is its share of its gain above the mean gain of the others.
                    for t in range(0, count, 16):
                        share, gain, change = load(logits, t, 16) * ratio, load(gains, t, 16), splat(zero, 16)
                        if top != low:
                            change = (
                                share
                                / sums
                                * (gain - (sums_gain - share * gain) / (sums - share))
                                * load(factors, t, 16)
                            )
                        store16(target, t, count - t, change)
                    if best < count and top != low:
                        without = others_gain / others if others != zero else zero
                        poke(target, best, (best_gain - without) / sums * peek(factors, best))

    return effect


def edge_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, scale: float, rate: Tensor | None,
    member: Tensor | None, chance: Tensor | None, exploration: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    g, q, k, v = (to_padded_array(x, query) for x in (grad_out, query, key, value))
    r, z = (np.empty((0, 0), q.dtype) if x is None else to_padded_array(x, query) for x in (rate, member))
    offsets, probe_offsets = (x.contiguous().numpy() for x in (rowptr, probe_rowptr))
    tokens, probe_tokens = (x.contiguous().numpy() for x in (col, probe_col.to(col.dtype)))
    out, probe_out = np.empty(len(tokens), q.dtype), np.empty(len(probe_tokens), q.dtype)
    longest = max((int(np.diff(x).max(initial=0)) for x in (offsets, probe_offsets)), default=0)
    arguments = (
        longest, query.shape[1], key.shape[1], g, q, k, v, offsets, tokens, to_array(bias, query), probe_offsets,
        probe_tokens, to_array(probe_bias, query), q.dtype.type(scale), r, z, to_array(chance, query),
        q.dtype.type(exploration), out, probe_out,
    )  # fmt: skip
    steps = (tokens.size + probe_tokens.size) * (q.shape[1] + v.shape[1] + r.shape[1])
    pieces = split(offsets + probe_offsets, task_count(steps, 3))
    run(_compile_edge_effect(q.shape[1], v.shape[1], r.shape[1]), [(*piece, *arguments) for piece in pieces])
    return torch.from_numpy(out).to(query.dtype), torch.from_numpy(probe_out).to(query.dtype)


@numba_kernel
def _weigh_rows(begin, end, effect, prob, rowptr, chance, forced, exploration, probing, out):
    zero, half = out.dtype.type(0), out.dtype.type(0.5)
    one, certain = out.dtype.type(1), out.dtype.type(MAX_PROB)
    for row in range(begin, end):
        # Weigh an effect by one over the probability that the pair is drawn, as an edge or a probe.
        eta = chance[row % chance.size]
        part = half if eta > zero else one  # without probes the edges stand for absent pairs, too
        for edge in range(rowptr[row], rowptr[row + 1]):
            p = prob[edge] + exploration
            few = part if p > part else p
            seen = eta + few - eta * few
            seen = few / part if seen < few / part else seen
            weight = one / seen
            if probing:  # a probe of probability 0 has weight 0
                weight = (seen - few) / (seen * (one - few) * eta) if eta > zero else zero
            if p > certain:
                weight = zero
            out[edge] = zero if forced.size and forced[edge] else effect[edge] * weight


def weigh_effect(
    effect: Tensor, prob: Tensor, rowptr: Tensor, chance: Tensor, forced: Tensor | None, exploration: float,
    probing: bool,
) -> Tensor:  # fmt: skip
    like = prob.new_empty(0, dtype=torch.promote_types(prob.dtype, effect.dtype))
    change, p, eta = (to_array(x, like) for x in (effect, prob, chance))
    offsets, out = rowptr.contiguous().numpy(), np.empty(p.size, p.dtype)
    never = np.empty(0, np.bool_) if forced is None else forced.contiguous().numpy()
    arguments = (change, p, offsets, eta, never, p.dtype.type(exploration), probing, out)
    run(_weigh_rows, [(*piece, *arguments) for piece in split(offsets, task_count(8 * p.size, 3))])
    return torch.from_numpy(out).to(prob.dtype)


effect_gradients = partial(
    reference_effects.effect_gradients, effects=edge_effect, dot_backward=edges.edge_dot_backward
)
