"""The effect of switching single edges on or off, for CUDA devices, in Triton.

In and out: the tensors of ``edge_effect`` and ``weigh_effect`` in :mod:`sbm_pyg.ops`, on one device. Not here:
attention (:mod:`.cuda_edges`), and what kernels share (:mod:`.cuda_rows`).

One kernel gathers vectors, for edges and again for probes, and leaves three numbers with each: its logit, its gain, and
what its effect counts for. Another looks at the numbers of a row, a few times, and writes the effects. Vectors of more
than 512 channels, or of none, take the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .cuda_rows import (
    Shared,
    bits,
    dots,
    finite,
    kernel,
    launch,
    logits,
    narrow,
    piece,
    real,
    span,
    takes,
    tile,
    tiles,
    vector,
    vectors,
    wide,
)

_ROUNDED = tl.constexpr(reference.ROUNDED)

# ------------------------------------------------------------------ kernels


@triton.jit
def _weight(p, eta, PROBING: tl.constexpr):
    """What an effect counts for; see :func:`.reference.effect_weight`."""
    part = tl.where(eta > 0, 0.5, 1.0)
    few = tl.minimum(p, part)
    seen = tl.maximum(eta + few - eta * few, few / part)
    weight = tl.where(eta > 0, (seen - few) / (seen * (1 - few) * eta), 0) if PROBING else 1 / seen
    return tl.where(p > _ROUNDED, 0, weight)


@kernel
def _measure(
    grad_out, query, key, value, rowptr, more, col, bias, rate, member, chance, out, count: tl.int64, rows: tl.int64,
    queries: tl.int64, keys: tl.int64, scale: tl.int64, exploration: tl.int64, PROBING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Logit and gain of each edge, and with a model what its effect counts for, ``[3, E]``."""
    row, first, start, stop, _ = piece(rowptr, more, rows, queries, keys, LONG)
    q, g = vector(query, row, WIDTH, WIDE) * real(scale, WIDE), vector(grad_out, row, VALUE_WIDTH, WIDE)
    if rate is not None:
        y, eta = vector(rate, row, BLOCKS, WIDE), tl.load(chance + row % queries).to(WIDE)
    for begin in range(start, stop, EDGES):
        edge, there, end = tile(col, begin, stop, first, EDGES)
        score = dots(vectors(key, end, there, WIDTH, WIDE), q)
        tl.store(out + edge, logits(score, None, bias, edge, there, False, WIDE)[0], mask=there)
        tl.store(out + count + edge, dots(vectors(value, end, there, VALUE_WIDTH, WIDE), g), mask=there)
        if rate is not None:
            p = dots(vectors(member, end, there, BLOCKS, WIDE), y) + real(exploration, WIDE)
            tl.store(out + 2 * count + edge, _weight(p, eta, PROBING), mask=there)


@triton.jit
def _logit(of, edge, there):
    """The first number that :func:`_measure` left; -inf where there is no edge."""
    return tl.load(of + edge, mask=there, other=float("-inf"))


@triton.jit
def _number(of, edge, there):
    """Another of them, ``of`` where it starts; 0 where there is no edge."""
    return tl.load(of + edge, mask=there, other=0)


@triton.jit
def _among(token, col, start, stop):
    """Whether each token is among ascending ones, by halving the range where it may be."""
    low, high, size = token * 0 + start, token * 0 + stop, stop - start
    while size > 0:
        middle, some = (low + high) // 2, low < high
        below = some & (tl.load(col + middle, mask=some, other=0) < token)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        size //= 2
    return (low < stop) & (tl.load(col + low, mask=low < stop, other=0) == token)


@kernel
def _effect(
    edges, probes, rowptr, col, probe_rowptr, probe_col, out, probe_out, count: tl.int64, probe_count: tl.int64,
    MODEL: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See :func:`.reference.leave_one_out`."""
    row, first, start, stop = span(rowptr, 1, 0)
    none, zero = tl.full([], float("-inf"), WIDE), tl.full([], 0, WIDE)

    top, best = none, stop  # the heaviest edge
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        logit = _logit(edges, edge, edge < stop)
        high = tl.max(logit, 0)
        best = tl.where(high > top, tl.min(tl.where(logit == high, edge, stop), 0), best)
        top = tl.maximum(top, high)

    second, rest, rest_gain, best_gain = none, zero, zero, zero  # sums over all but the heaviest
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        logit, gain = _logit(edges, edge, edge < stop), _number(edges + count, edge, edge < stop)
        best_gain += tl.sum(tl.where(edge == best, gain, 0), 0)
        logit = tl.where(edge == best, float("-inf"), logit)
        new = tl.maximum(second, tl.max(logit, 0))
        weight, shrink = tl.exp(logit - finite(new)), tl.exp(second - finite(new))
        rest, rest_gain = rest * shrink + tl.sum(weight, 0), rest_gain * shrink + tl.sum(weight * gain, 0)
        second = new
    ratio, some = tl.exp(second - finite(top)), top > float("-inf")
    norm, norm_gain = tl.where(some, 1 + rest * ratio, 0), tl.where(some, best_gain + rest_gain * ratio, 0)

    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        logit, gain = _logit(edges, edge, edge < stop), _number(edges + count, edge, edge < stop)
        share = tl.exp(logit - finite(top))
        alone = rest_gain / tl.where(rest == 0, 1, rest)
        others = tl.where(edge == best, alone, (norm_gain - share * gain) / (norm - share))
        change = tl.where(edge == best, 1, share) / norm * (gain - others)
        change = tl.where(logit == float("-inf"), 0, change)
        if MODEL:
            change *= _number(edges + 2 * count, edge, edge < stop)
        tl.store(out + edge, narrow(change, out), mask=edge < stop)

    probe_stop, mean = tl.load(probe_rowptr + row + 1), norm_gain / tl.where(norm == 0, 1, norm)
    for begin in range(tl.load(probe_rowptr + row), probe_stop, EDGES):
        edge, there, token = tile(probe_col, begin, probe_stop, first, EDGES)
        logit, gain = _logit(probes, edge, there), _number(probes + probe_count, edge, there)
        odds = tl.where(some, norm * tl.exp(top - logit), 0)  # of being without the probe
        nothing = (logit == float("-inf")) | _among(token.to(tl.int64), col, start, stop)
        change = tl.where(nothing, 0, (gain - mean) / (1 + odds))
        if MODEL:
            change *= _number(probes + 2 * probe_count, edge, there)
        tl.store(probe_out + edge, narrow(change, probe_out), mask=there)


@kernel
def _weigh(
    effect, prob, rowptr, more, chance, forced, out, rows: tl.int64, queries: tl.int64, exploration: tl.int64,
    PROBING: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, _, start, stop, _ = piece(rowptr, more, rows, queries, 0, LONG)
    eta = tl.load(chance + row % queries).to(WIDE)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p = tl.load(prob + edge, mask=edge < stop, other=0).to(WIDE) + real(exploration, WIDE)
        change = tl.load(effect + edge, mask=edge < stop, other=0).to(WIDE) * _weight(p, eta, PROBING)
        if forced is not None:
            change = tl.where(tl.load(forced + edge, mask=edge < stop, other=0), 0, change)
        tl.store(out + edge, narrow(change, out), mask=edge < stop)


# ------------------------------------------------------------------ the ops


def edge_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, scale: float, rate: Tensor | None,
    member: Tensor | None, chance: Tensor | None, exploration: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not takes(query, value, rate):
        return reference.edge_effect(
            grad_out, query, key, value, rowptr, col, bias, probe_rowptr, probe_col, probe_bias, scale, rate, member,
            chance, exploration,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(grad_out, query, key, value, bias, probe_bias, rate, member, chance)
    tokens = [x.contiguous() for x in (grad_out, query, key, value)]
    model = [x if x is None else x.contiguous() for x in (rate, member, chance)]
    blocks = 1 if rate is None else rate.size(2)
    sides: list[Tensor] = []
    found: list[Tensor] = []
    outs: list[Tensor] = []
    for pointer, keys_of, extra in ((rowptr, col, bias), (probe_rowptr, probe_col, probe_bias)):
        graph, count = (pointer.contiguous(), keys_of.contiguous()), keys_of.size(0)
        work, rows = Shared(graph[0], count, query), heads * queries
        numbers = query.new_empty(2 if rate is None else 3, count, dtype=dtype)
        launch(
            _measure, rows + work.programs, *tokens, graph[0], work.more, graph[1],
            extra if extra is None else extra.contiguous(), *model, numbers, count, rows, queries, keys, bits(scale),
            bits(exploration), PROBING=bool(found), WIDTH=width, VALUE_WIDTH=value_width, BLOCKS=blocks,
            LONG=work.long, **tiles(dtype, width, value_width, blocks),
        )  # fmt: skip
        sides += graph
        found.append(numbers)
        outs.append(query.new_empty(count))
    counts = (x.size(0) for x in outs)
    launch(_effect, heads * queries, *found, *sides, *outs, *counts, MODEL=rate is not None, **tiles(dtype, 1))
    return outs[0], outs[1]


def weigh_effect(
    effect: Tensor, prob: Tensor, rowptr: Tensor, chance: Tensor, forced: Tensor | None, exploration: float,
    probing: bool,
) -> Tensor:  # fmt: skip
    out, rowptr, rows = prob.new_empty(prob.shape), rowptr.contiguous(), rowptr.numel() - 1
    work, forced = Shared(rowptr, prob.size(0), prob), forced if forced is None else forced.contiguous()
    launch(
        _weigh, rows + work.programs, effect.contiguous(), prob.contiguous(), rowptr, work.more, chance.contiguous(),
        forced, out, rows, chance.numel(), bits(exploration), PROBING=probing, LONG=work.long,
        **tiles(wide(effect, prob, chance), 1),
    )  # fmt: skip
    return out
