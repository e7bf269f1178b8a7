"""The effect of switching single edges on or off, for CUDA devices, in Triton.

In and out: the tensors of ``edge_effect`` and ``weigh_effect`` in :mod:`sbm_pyg.ops`, on one device. Not here:
attention (:mod:`.cuda.edges`), and what kernels share (:mod:`.cuda.rows`).

One kernel gathers vectors, for edges and again for probes, and leaves three numbers with each: its logit, its gain, and
what its effect counts for. Of each row it keeps six: its heaviest edge, and sums over all others. Another kernel looks
at all of them once, and writes the effects. Rows of very many edges or probes are shared by several programs in both.
Vectors of more than 512 channels, or of none, take the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import effects as reference_effects
from ..reference.sampling import MAX_PROB
from .rows import (
    Shared,
    aligned,
    bits,
    dots,
    finite,
    kernel,
    launch,
    logits,
    makers,
    narrow,
    piece,
    real,
    takes,
    tile,
    tiles,
    vector,
    vectors,
    wide,
)

_MAX_PROB = tl.constexpr(MAX_PROB)

# ------------------------------------------------------------------ kernels


@triton.jit
def _weight(p, eta, PROBING: tl.constexpr):
    """What an effect counts for; see :func:`.reference.effects.effect_weight`."""
    part = tl.where(eta > 0, 0.5, 1.0)
    few = tl.minimum(p, part)
    seen = tl.maximum(eta + few - eta * few, few / part)
    weight = tl.where(eta > 0, (seen - few) / (seen * (1 - few) * eta), 0) if PROBING else 1 / seen
    return tl.where(p > _MAX_PROB, 0, weight)


@triton.jit
def _logit(of, edge, there):
    """The first number that :func:`_measure` left; -inf where there is no edge."""
    return tl.load(of + edge, mask=there, other=float("-inf"))


@triton.jit
def _number(of, edge, there):
    """Another of them, ``of`` where it starts; 0 where there is no edge."""
    return tl.load(of + edge, mask=there, other=0)


@triton.jit
def _nothing(WIDE: tl.constexpr):
    """What is kept of a row without edges: the logit, place and gain of its heaviest edge; of all others the largest
    logit, and the sums of their weights, relative to it, and of weights by gains.
    """
    none, zero = tl.full([], float("-inf"), WIDE), tl.full([], 0, WIDE)
    return none, tl.full([], -1, tl.int64), zero, none, zero, zero


@triton.jit
def _join(top, best, best_gain, second, rest, rest_gain, high, found, gain, level, sums, sum_gains):
    """What is kept of a row, of what is kept of two parts of it. Of edges as heavy, the first part's is heaviest."""
    new = high > top
    less, less_gain = tl.where(new, top, high), tl.where(new, best_gain, gain)  # one of the others now
    base = tl.maximum(tl.maximum(second, level), less)
    one, two, three = tl.exp(second - finite(base)), tl.exp(level - finite(base)), tl.exp(less - finite(base))
    rest, rest_gain = rest * one + sums * two + three, rest_gain * one + sum_gains * two
    rest_gain += tl.where(less > float("-inf"), three * less_gain, 0)
    return tl.maximum(top, high), tl.where(new, found, best), tl.where(new, gain, best_gain), base, rest, rest_gain


@kernel
def _measure(
    grad_out, query, key, value, rowptr, more, col, bias, rate, member, chance, out, kept, count: tl.int64,
    rows: tl.int64, queries: tl.int64, keys: tl.int64, scale: tl.int64, exploration: tl.int64, PROBING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr,
    EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Logit and gain of each edge, and with a model what its effect counts for, ``[3, E]``; and of edges, not of
    probes, what :func:`_nothing` says, six numbers for each program.
    """
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
    if kept is not None:
        tl.debug_barrier()  # what others have written is read again, which takes fewer registers than to hold it
        top, best, best_gain, second, rest, rest_gain = _nothing(WIDE)
        for begin in range(0, stop - start, TILE):  # from 0: whether a row has edges is not held, either
            edge = start + begin + tl.arange(0, TILE)
            logit, gain = _logit(out, edge, edge < stop), _number(out + count, edge, edge < stop)
            high = tl.max(logit, 0)
            found = tl.min(tl.where(logit == high, edge, stop), 0)
            high_gain = tl.sum(tl.where(edge == found, gain, 0), 0)
            logit = tl.where(edge == found, float("-inf"), logit)
            level = tl.max(logit, 0)
            weight = tl.exp(logit - finite(level))
            top, best, best_gain, second, rest, rest_gain = _join(
                top, best, best_gain, second, rest, rest_gain, high, found, high_gain, level, tl.sum(weight, 0),
                tl.sum(weight * gain, 0),
            )  # fmt: skip
        at = kept + 6 * tl.program_id(0).to(tl.int64)
        tl.store(at, top)
        tl.store(at + 1, best)
        tl.store(at + 2, best_gain)
        tl.store(at + 3, second)
        tl.store(at + 4, rest)
        tl.store(at + 5, rest_gain)


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


@triton.jit
def _whole(kept, more, row, rows, WIDE: tl.constexpr):
    """Of a row, by all programs that had it: its heaviest edge, the mean gain of the others, and the sums of weights
    and of weights by gains, relative to the heaviest.
    """
    top, best, best_gain, second, rest, rest_gain = _nothing(WIDE)
    first, last = makers(more, row, rows)
    for maker in range(first, last):
        at = kept + 6 * maker
        top, best, best_gain, second, rest, rest_gain = _join(
            top, best, best_gain, second, rest, rest_gain, tl.load(at).to(WIDE), tl.load(at + 1).to(tl.int64),
            tl.load(at + 2).to(WIDE), tl.load(at + 3).to(WIDE), tl.load(at + 4).to(WIDE), tl.load(at + 5).to(WIDE),
        )  # fmt: skip
    ratio, some = tl.exp(second - finite(top)), top > float("-inf")
    norm, norm_gain = tl.where(some, 1 + rest * ratio, 0), tl.where(some, best_gain + rest_gain * ratio, 0)
    return top, best, rest_gain / tl.where(rest == 0, 1, rest), norm, norm_gain


@triton.jit
def _of_edges(edges, kept, rowptr, more, out, count, rows, MODEL: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    row, _, start, stop, _ = piece(rowptr, more, rows, 1, 0, LONG)
    top, best, alone, norm, norm_gain = _whole(kept, more, row, rows, WIDE)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        logit, gain = _logit(edges, edge, edge < stop), _number(edges + count, edge, edge < stop)
        share = tl.exp(logit - finite(top))
        others = tl.where(edge == best, alone, (norm_gain - share * gain) / (norm - share))
        change = tl.where(edge == best, 1, share) / norm * (gain - others)
        change = tl.where(logit == float("-inf"), 0, change)
        if MODEL:
            change *= _number(edges + 2 * count, edge, edge < stop)
        tl.store(out + edge, narrow(change, out), mask=edge < stop)


@triton.jit
def _of_probes(probes, kept, rowptr, more, col, probe_rowptr, probe_more, probe_col, out, count, rows,
               MODEL: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    row, first, start, stop, _ = piece(probe_rowptr, probe_more, rows, 1, 0, LONG)
    top, _, _, norm, norm_gain = _whole(kept, more, row, rows, WIDE)
    edges, last, mean = tl.load(rowptr + row), tl.load(rowptr + row + 1), norm_gain / tl.where(norm == 0, 1, norm)
    for begin in range(start, stop, EDGES):
        probe, there, token = tile(probe_col, begin, stop, first, EDGES)
        logit, gain = _logit(probes, probe, there), _number(probes + count, probe, there)
        odds = tl.where(top > float("-inf"), norm * tl.exp(top - logit), 0)  # of being without the probe
        nothing = (logit == float("-inf")) | _among(token.to(tl.int64), col, edges, last)
        change = tl.where(nothing, 0, (gain - mean) / (1 + odds))
        if MODEL:
            change *= _number(probes + 2 * count, probe, there)
        tl.store(out + probe, narrow(change, out), mask=there)


@kernel
def _effect(
    edges, probes, kept, rowptr, more, col, probe_rowptr, probe_more, probe_col, out, probe_out, count: tl.int64,
    probe_count: tl.int64, rows: tl.int64, pieces: tl.int64, probe_pieces: tl.int64, MODEL: tl.constexpr,
    LONG: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See :func:`.reference.effects.leave_one_out`: the edges of a row, or a piece of them, or its probes."""
    behind = tl.program_id(0) - rows  # 0 for the first piece
    if tl.program_id(1) == 0:
        if behind < pieces:
            _of_edges(edges, kept, rowptr, more, out, count, rows, MODEL, LONG, EDGES, WIDE)
    elif behind < probe_pieces:
        _of_probes(
            probes, kept, rowptr, more, col, probe_rowptr, probe_more, probe_col, probe_out, probe_count, rows, MODEL,
            LONG, EDGES, WIDE,
        )  # fmt: skip


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
        return reference_effects.edge_effect(
            grad_out, query, key, value, rowptr, col, bias, probe_rowptr, probe_col, probe_bias, scale, rate, member,
            chance, exploration,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = wide(grad_out, query, key, value, bias, probe_bias, rate, member, chance)
    tokens = [x.contiguous() for x in (grad_out, query, key, value)]
    model = [x if x is None else x.contiguous() for x in (rate, member, chance)]
    blocks = 1 if rate is None else rate.size(2)
    graphs = [(x.contiguous(), y.contiguous()) for x, y in ((rowptr, col), (probe_rowptr, probe_col))]
    biases = [x if x is None else x.contiguous() for x in (bias, probe_bias)]
    rows, works = heads * queries, [Shared(pointer, tokens_of.size(0), query) for pointer, tokens_of in graphs]
    outs = [query.new_empty(tokens_of.size(0)) for _, tokens_of in graphs]
    counts, pieces = [out.size(0) for out in outs], [work.programs for work in works]
    parts, of_numbers = 2 if rate is None else 3, tiles(dtype, 1)
    sizes = [aligned(parts * count) for count in counts]
    numbers = query.new_empty(sum(sizes), dtype=dtype).split(sizes)
    kept = query.new_empty(6 * (rows + pieces[0]), dtype=torch.float64)  # which holds the place of an edge, too
    sides: list[Tensor | None] = []
    for (pointer, tokens_of), extra, work, found, count in zip(graphs, biases, works, numbers, counts, strict=True):
        probing, graph = bool(sides), (pointer, work.more, tokens_of)
        sides += graph
        launch(
            _measure, rows + work.programs, *tokens, *graph, extra, *model, found, None if probing else kept, count,
            rows, queries, keys, bits(scale), bits(exploration), PROBING=probing, WIDTH=width, VALUE_WIDTH=value_width,
            BLOCKS=blocks, LONG=work.long, TILE=of_numbers["EDGES"], **tiles(dtype, width, value_width, blocks),
        )  # fmt: skip
    launch(
        _effect, (rows + max(pieces), 2), *numbers, kept, *sides, *outs, *counts, rows, *pieces,
        MODEL=rate is not None, LONG=works[0].long, **of_numbers,
    )  # fmt: skip
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
