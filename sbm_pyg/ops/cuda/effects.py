"""The effect of switching single edges on or off, for CUDA devices, in Triton.

In and out: the tensors of ``edge_effect``, ``weigh_effect`` and ``effect_gradients``, on one device. Not here:
attention (:mod:`.edges`), and parts that kernels share (:mod:`.rows`).

One kernel gathers vectors, for edges and again for probes, and leaves three numbers with each: its logit, its gain, and
the weight of its effect. Of each row it keeps six: its heaviest edge, and sums over all others. Another kernel looks
at all of them once, and writes the effects. Rows of very many edges or probes are shared by several programs in both.
Vectors of more than 512 channels, or of none, take the reference.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import effects as reference_effects
from ..reference.sampling import MAX_PROB
from . import edges
from .rows import (
    SplitRows,
    accumulate_dtype,
    aligned_size,
    cast_like,
    dot_rows,
    finite,
    float_bits,
    from_bits,
    gated_logits,
    gather,
    launch,
    load_edges,
    load_vector,
    programs_of_row,
    supports,
    tile_options,
    triton_kernel,
    work_item,
)

_PROB_LIMIT = tl.constexpr(MAX_PROB)


@triton.jit
def _effect_weight(p, eta, PROBING: tl.constexpr):
    """Weight of an effect; see :func:`.reference.effects.effect_weight`."""
    # Without probes the edges stand for absent pairs, too, so p is cut at 1 instead of 1/2.
    part = tl.where(eta > 0, 0.5, 1.0)
    few = tl.minimum(p, part)
    seen = tl.maximum(eta + few - eta * few, few / part)
    weight = tl.where(eta > 0, (seen - few) / (seen * (1 - few) * eta), 0) if PROBING else 1 / seen
    return tl.where(p > _PROB_LIMIT, 0, weight)


@triton.jit
def _load_logit(of, edge, exists):
    """Load the logits that :func:`_measure_kernel` stored; -inf where there is no edge."""
    return tl.load(of + edge, mask=exists, other=float("-inf"))


@triton.jit
def _load_number(of, edge, exists):
    """Load other numbers that :func:`_measure_kernel` stored at ``of``; 0 where there is no edge."""
    return tl.load(of + edge, mask=exists, other=0)


@triton.jit
def _empty_row(ACC_TYPE: tl.constexpr):
    """Summary of a row without edges, six numbers: logit, index and gain of its heaviest edge; and for the other edges
    the largest logit, the sum of their weights relative to it, and the sum of weights times gains.
    """
    none, zero = tl.full([], float("-inf"), ACC_TYPE), tl.full([], 0, ACC_TYPE)
    return none, tl.full([], -1, tl.int64), zero, none, zero, zero


@triton.jit
def _merge_parts(top, best, best_gain, second, mass, others_gain, high, heaviest, gain, level, sums, sum_gains):
    """Merge the summaries of two parts of a row. If their heaviest edges are equal, that of the first part stays."""
    # The lighter of two heaviest edges joins the others.
    new = high > top
    less, less_gain = tl.where(new, top, high), tl.where(new, best_gain, gain)  # one of the others now
    # Bring the sums of both parts, and this edge, to one scale.
    base = tl.maximum(tl.maximum(second, level), less)
    one, two, three = tl.exp(second - finite(base)), tl.exp(level - finite(base)), tl.exp(less - finite(base))
    mass, others_gain = mass * one + sums * two + three, others_gain * one + sum_gains * two
    others_gain += tl.where(less > float("-inf"), three * less_gain, 0)
    gain = tl.where(new, gain, best_gain)
    return tl.maximum(top, high), tl.where(new, heaviest, best), gain, base, mass, others_gain


@triton_kernel
def _measure_kernel(
    grad_out, query, key, value, rowptr, piece_ends, col, bias, rate, member, chance, out, summaries, count: tl.int64,
    rows: tl.int64, queries: tl.int64, keys: tl.int64, scale: tl.int64, exploration: tl.int64, PROBING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, MAX_EDGES: tl.constexpr, TILE: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Write logit and gain of each edge and, with a model, the weight of its effect, ``[3, E]``. For edges, but not for
    probes, also write the summary of each program, whose six numbers :func:`_empty_row` lists.
    """
    row, first, start, stop, _ = work_item(rowptr, piece_ends, rows, queries, keys, MAX_EDGES)
    q, g = (
        load_vector(query, row, WIDTH, ACC_TYPE) * from_bits(scale, ACC_TYPE),
        load_vector(grad_out, row, VALUE_WIDTH, ACC_TYPE),
    )
    # Load the rates of the row, and the probability of a probe.
    if rate is not None:
        y, eta = load_vector(rate, row, BLOCKS, ACC_TYPE), tl.load(chance + row % queries).to(ACC_TYPE)
    # Gather keys, values and memberships of a tile of edges; write logit, gain and weight.
    for begin in range(start, stop, EDGES):
        edge, exists, end = load_edges(col, begin, stop, first, EDGES)
        score = dot_rows(gather(key, end, exists, WIDTH, ACC_TYPE), q)
        tl.store(out + edge, gated_logits(score, None, bias, edge, exists, False, ACC_TYPE)[0], mask=exists)
        tl.store(out + count + edge, dot_rows(gather(value, end, exists, VALUE_WIDTH, ACC_TYPE), g), mask=exists)
        if rate is not None:
            p = dot_rows(gather(member, end, exists, BLOCKS, ACC_TYPE), y) + from_bits(exploration, ACC_TYPE)
            tl.store(out + 2 * count + edge, _effect_weight(p, eta, PROBING), mask=exists)
    # Summarize the edges of the program: the heaviest one, and sums over all others.
    if summaries is not None:
        tl.debug_barrier()  # what others have written is read again, which takes fewer registers than to hold it
        top, best, best_gain, second, mass, others_gain = _empty_row(ACC_TYPE)
        for begin in range(0, stop - start, TILE):  # from 0: whether a row has edges is not held, either
            edge = start + begin + tl.arange(0, TILE)
            logit, gain = _load_logit(out, edge, edge < stop), _load_number(out + count, edge, edge < stop)
            high = tl.max(logit, 0)
            heaviest = tl.min(tl.where(logit == high, edge, stop), 0)
            high_gain = tl.sum(tl.where(edge == heaviest, gain, 0), 0)
            # Weigh the others of a tile, relative to their largest logit.
            logit = tl.where(edge == heaviest, float("-inf"), logit)
            level = tl.max(logit, 0)
            weight = tl.exp(logit - finite(level))
            top, best, best_gain, second, mass, others_gain = _merge_parts(
                top, best, best_gain, second, mass, others_gain, high, heaviest, high_gain, level,
                tl.sum(weight, 0), tl.sum(weight * gain, 0),
            )  # fmt: skip
        # Write the six numbers of the program.
        at = summaries + 6 * tl.program_id(0).to(tl.int64)
        tl.store(at, top)
        tl.store(at + 1, best)
        tl.store(at + 2, best_gain)
        tl.store(at + 3, second)
        tl.store(at + 4, mass)
        tl.store(at + 5, others_gain)


@triton.jit
def _is_among(token, col, start, stop):
    """True for tokens that are in a range of ascending tokens, by binary search."""
    low, high, size = token * 0 + start, token * 0 + stop, stop - start
    while size > 0:
        middle, searching = (low + high) // 2, low < high
        below = searching & (tl.load(col + middle, mask=searching, other=0) < token)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        size //= 2
    return (low < stop) & (tl.load(col + low, mask=low < stop, other=0) == token)


@triton.jit
def _merge_row(summaries, piece_ends, row, rows, ACC_TYPE: tl.constexpr):
    """Merge the summaries of all programs of a row: its heaviest edge, the mean gain of the other edges, and the sums
    of their weights and of weights times gains, relative to the heaviest.
    """
    top, best, best_gain, second, mass, others_gain = _empty_row(ACC_TYPE)
    # Merge the summaries of all programs that had edges of the row.
    first, last = programs_of_row(piece_ends, row, rows)
    for program in range(first, last):
        at = summaries + 6 * program
        top, best, best_gain, second, mass, others_gain = _merge_parts(
            top, best, best_gain, second, mass, others_gain, tl.load(at).to(ACC_TYPE),
            tl.load(at + 1).to(tl.int64), tl.load(at + 2).to(ACC_TYPE), tl.load(at + 3).to(ACC_TYPE),
            tl.load(at + 4).to(ACC_TYPE), tl.load(at + 5).to(ACC_TYPE),
        )  # fmt: skip
    # Bring the sums to the scale of the heaviest edge.
    ratio, has_edges = tl.exp(second - finite(top)), top > float("-inf")
    norm, norm_gain = (
        tl.where(has_edges, 1 + mass * ratio, 0),
        tl.where(has_edges, best_gain + others_gain * ratio, 0),
    )
    return top, best, others_gain / tl.where(mass == 0, 1, mass), norm, norm_gain


@triton.jit
def _edge_effects(
    edges, summaries, rowptr, piece_ends, out, count, rows, MODEL: tl.constexpr, MAX_EDGES: tl.constexpr,
    EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    row, _, start, stop, _ = work_item(rowptr, piece_ends, rows, 1, 0, MAX_EDGES)
    top, best, alone, norm, norm_gain = _merge_row(summaries, piece_ends, row, rows, ACC_TYPE)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        logit, gain = _load_logit(edges, edge, edge < stop), _load_number(edges + count, edge, edge < stop)
        # The effect of an edge is its share of its gain above the mean gain of the others.
        share = tl.exp(logit - finite(top))
        others = tl.where(edge == best, alone, (norm_gain - share * gain) / (norm - share))
        change = tl.where(edge == best, 1, share) / norm * (gain - others)
        change = tl.where(logit == float("-inf"), 0, change)
        if MODEL:
            change *= _load_number(edges + 2 * count, edge, edge < stop)
        tl.store(out + edge, cast_like(change, out), mask=edge < stop)


@triton.jit
def _probe_effects(
    probes, summaries, rowptr, piece_ends, col, probe_rowptr, probe_piece_ends, probe_col, out, count, rows,
    MODEL: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    row, first, start, stop, _ = work_item(probe_rowptr, probe_piece_ends, rows, 1, 0, MAX_EDGES)
    top, _, _, norm, norm_gain = _merge_row(summaries, piece_ends, row, rows, ACC_TYPE)
    edges, last, mean = tl.load(rowptr + row), tl.load(rowptr + row + 1), norm_gain / tl.where(norm == 0, 1, norm)
    for begin in range(start, stop, EDGES):
        probe, exists, token = load_edges(probe_col, begin, stop, first, EDGES)
        logit, gain = _load_logit(probes, probe, exists), _load_number(probes + count, probe, exists)
        # A probe joins the row's edges: its effect is its share of its gain above their mean gain.
        odds = tl.where(top > float("-inf"), norm * tl.exp(top - logit), 0)  # of being without the probe
        # A probe that is an edge, or is forbidden, has no effect.
        nothing = (logit == float("-inf")) | _is_among(token.to(tl.int64), col, edges, last)
        change = tl.where(nothing, 0, (gain - mean) / (1 + odds))
        if MODEL:
            change *= _load_number(probes + 2 * count, probe, exists)
        tl.store(out + probe, cast_like(change, out), mask=exists)


@triton_kernel
def _edge_effect_kernel(
    edges, probes, summaries, rowptr, piece_ends, col, probe_rowptr, probe_piece_ends, probe_col, out, probe_out,
    count: tl.int64, probe_count: tl.int64, rows: tl.int64, pieces: tl.int64, probe_pieces: tl.int64,
    MODEL: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Compute :func:`.reference.effects.leave_one_out` for the edges of a row, or of a piece, or for its probes."""
    behind = tl.program_id(0) - rows  # 0 for the first piece
    if tl.program_id(1) == 0:
        if behind < pieces:
            _edge_effects(edges, summaries, rowptr, piece_ends, out, count, rows, MODEL, MAX_EDGES, EDGES, ACC_TYPE)
    elif behind < probe_pieces:
        _probe_effects(
            probes, summaries, rowptr, piece_ends, col, probe_rowptr, probe_piece_ends, probe_col, probe_out,
            probe_count, rows, MODEL, MAX_EDGES, EDGES, ACC_TYPE,
        )  # fmt: skip


@triton_kernel
def _weigh_kernel(
    effect, prob, rowptr, piece_ends, chance, forced, out, rows: tl.int64, queries: tl.int64, exploration: tl.int64,
    PROBING: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr, ACC_TYPE: tl.constexpr,
):  # fmt: skip
    row, _, start, stop, _ = work_item(rowptr, piece_ends, rows, queries, 0, MAX_EDGES)
    eta = tl.load(chance + row % queries).to(ACC_TYPE)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p = tl.load(prob + edge, mask=edge < stop, other=0).to(ACC_TYPE) + from_bits(exploration, ACC_TYPE)
        change = tl.load(effect + edge, mask=edge < stop, other=0).to(ACC_TYPE) * _effect_weight(p, eta, PROBING)
        if forced is not None:
            change = tl.where(tl.load(forced + edge, mask=edge < stop, other=0), 0, change)
        tl.store(out + edge, cast_like(change, out), mask=edge < stop)


def edge_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, scale: float, rate: Tensor | None,
    member: Tensor | None, chance: Tensor | None, exploration: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not supports(query, value, rate):
        return reference_effects.edge_effect(
            grad_out, query, key, value, rowptr, col, bias, probe_rowptr, probe_col, probe_bias, scale, rate, member,
            chance, exploration,
        )  # fmt: skip
    (heads, queries, width), (_, keys, value_width) = query.shape, value.shape
    dtype = accumulate_dtype(grad_out, query, key, value, bias, probe_bias, rate, member, chance)
    tokens = [x.contiguous() for x in (grad_out, query, key, value)]
    model = [x if x is None else x.contiguous() for x in (rate, member, chance)]
    blocks = 1 if rate is None else rate.size(2)
    graphs = [(x.contiguous(), y.contiguous()) for x, y in ((rowptr, col), (probe_rowptr, probe_col))]
    biases = [x if x is None else x.contiguous() for x in (bias, probe_bias)]
    rows, works = heads * queries, [SplitRows(pointer, tokens_of.size(0), query) for pointer, tokens_of in graphs]
    outs = [query.new_empty(tokens_of.size(0)) for _, tokens_of in graphs]
    counts, pieces = [out.size(0) for out in outs], [work.programs for work in works]
    parts, of_numbers = 2 if rate is None else 3, tile_options(dtype, 1)
    sizes = [aligned_size(parts * count) for count in counts]
    numbers = query.new_empty(sum(sizes), dtype=dtype).split(sizes)
    summaries = query.new_empty(6 * (rows + pieces[0]), dtype=torch.float64)  # which holds the number of an edge, too
    # Measure the edges first, then the probes, which get no summaries.
    sides: list[Tensor | None] = []
    for (pointer, tokens_of), extra, work, measured, count in zip(graphs, biases, works, numbers, counts, strict=True):
        probing, graph = bool(sides), (pointer, work.piece_ends, tokens_of)
        sides += graph
        launch(
            _measure_kernel, rows + work.programs, *tokens, *graph, extra, *model, measured,
            None if probing else summaries, count, rows, queries, keys, float_bits(scale), float_bits(exploration),
            PROBING=probing, WIDTH=width, VALUE_WIDTH=value_width, BLOCKS=blocks, MAX_EDGES=work.max_edges,
            TILE=of_numbers["EDGES"], **tile_options(dtype, width, value_width, blocks),
        )  # fmt: skip
    launch(
        _edge_effect_kernel, (rows + max(pieces), 2), *numbers, summaries, *sides, *outs, *counts, rows, *pieces,
        MODEL=rate is not None, MAX_EDGES=works[0].max_edges, **of_numbers,
    )  # fmt: skip
    return outs[0], outs[1]


def weigh_effect(
    effect: Tensor, prob: Tensor, rowptr: Tensor, chance: Tensor, forced: Tensor | None, exploration: float,
    probing: bool,
) -> Tensor:  # fmt: skip
    out, rowptr, rows = prob.new_empty(prob.shape), rowptr.contiguous(), rowptr.numel() - 1
    work, forced = SplitRows(rowptr, prob.size(0), prob), forced if forced is None else forced.contiguous()
    launch(
        _weigh_kernel, rows + work.programs, effect.contiguous(), prob.contiguous(), rowptr, work.piece_ends,
        chance.contiguous(), forced, out, rows, chance.numel(), float_bits(exploration), PROBING=probing,
        MAX_EDGES=work.max_edges, **tile_options(accumulate_dtype(effect, prob, chance), 1),
    )  # fmt: skip
    return out


effect_gradients = partial(
    reference_effects.effect_gradients, effects=edge_effect, dot_backward=edges.edge_dot_backward
)
