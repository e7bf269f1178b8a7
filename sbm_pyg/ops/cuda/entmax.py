"""alpha-entmax over rows, for CUDA devices, in Triton: shares, their gradients, and which values have a share at all.

In and out: the tensors of ``segment_entmax``, its backward and ``entmax_support`` in :mod:`sbm_pyg.ops`, on one device.
Not here: attention (:mod:`.cuda.edges`).

A program takes one row of one column. The root is found in float64 by the steps of :mod:`.cpu_entmax`, which says why
they are few. Each step reads the row again, which the cache holds. No other row enters.

Where a row may have very many values, several programs share it. A kernel before leaves what each finds in its piece:
the largest value and all that are near it, which alone can have a share; or sums. Each then looks for the root by
itself, among what all of them have found.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import entmax as reference_entmax
from ..reference import segments as reference_segments
from .rows import Shared, finite, kernel, launch, makers, narrow, part

STEPS = tl.constexpr(100)  # of root finding; halving alone takes 53
MAKERS = 16
"""Pieces of a row whose values are looked at together: most have few that may have a share."""
CLOSE = tl.constexpr(1e-12)  # a step that moves the root by this share of itself is the last

# ------------------------------------------------------------------ kernels


@triton.jit
def _power(x, exponent):
    """Positive numbers to one power, and 0 for others; roots, and what needs no power, without a logarithm."""
    positive = tl.where(x > 0, x, 1)
    result = x * 0 + 1
    if exponent == 1:
        result = positive
    elif exponent == 0.5:
        result = tl.sqrt(positive)
    elif exponent != 0:
        result = tl.exp(exponent * tl.log(positive))
    return tl.where(x > 0, result, 0)


@triton.jit
def _row(rowptr, more, alpha, segments, pieces, count, LONG: tl.constexpr):
    """Row of this program, its number among those of all columns, where it starts and stops, and its alpha less 1; the
    first value, and the first program, of its column.
    """
    column, place = tl.program_id(0).to(tl.int64) // (segments + pieces), tl.program_id(0) % (segments + pieces)
    row, start, stop, slot = part(rowptr, more, place.to(tl.int64), segments, LONG)
    number, shift = column * segments + row, column * count
    less = tl.load(alpha + number).to(tl.float64) - 1
    return row, number, shift + start, shift + stop, slot, less, shift, column * (segments + pieces)


@triton.jit
def _slack(src, edge, stop, shift, tau, less):
    """What is left of each value above the threshold."""
    x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
    return tl.maximum(less * (x - shift) - tau, 0)


@triton.jit
def _largest(src, start, stop, EDGES: tl.constexpr):
    """The largest value, and how many are wrong: NaN, or infinity."""
    top, wrong = tl.full([], float("-inf"), tl.float64), 0
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
        wrong += tl.sum((x != x).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(tl.where(x != x, float("-inf"), x), 0))
    return top, wrong + (top == float("inf")).to(tl.int32)


@kernel
def _near(
    src, rowptr, more, alpha, near, kept, segments: tl.int64, pieces: tl.int64, count: tl.int64, LONG: tl.constexpr,
    EDGES: tl.constexpr,
):  # fmt: skip
    """The values of a piece that may have a share, from where it starts; the largest, how many are wrong, and near."""
    _, _number, start, stop, _slot, less, _shift, _first = _row(rowptr, more, alpha, segments, pieces, count, LONG)
    top, wrong = _largest(src, start, stop, EDGES)
    found = start
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        there = _slack(src, edge, stop, finite(top), -1.0, less) > 0
        x = tl.load(src + edge, mask=there, other=0)
        tl.store(near + found + tl.cumsum(there.to(tl.int32), 0) - 1, x, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
    at = kept + 3 * tl.program_id(0).to(tl.int64)
    tl.store(at, top)
    tl.store(at + 1, wrong)
    tl.store(at + 2, found - start)


@triton.jit
def _candidates(kept, maker, last, length, MAKERS: tl.constexpr):
    """How many values may have a share, of each of some programs that share a row; of one that has it, all."""
    at = maker + tl.arange(0, MAKERS)
    counts = tl.load(kept + 3 * at + 2, mask=at < last, other=0) if kept is not None else at * 0 + length
    return counts.to(tl.int32)


@triton.jit
def _left(near, begins, maker, first, begin, counts, shift, tau, less, MAKERS: tl.constexpr, LONG: tl.constexpr,
          EDGES: tl.constexpr):  # fmt: skip
    """What is left of some of these values above the threshold, ``[MAKERS, EDGES / MAKERS]``."""
    number, place = begin + tl.arange(0, EDGES // MAKERS), tl.arange(0, MAKERS) * LONG
    start = near + begins + (maker - first) * LONG
    return _slack(start, place[:, None] + number[None, :], (place + counts)[:, None], shift, tau, less)


@kernel
def _entmax(
    src, rowptr, more, alpha, near, kept, out, segments: tl.int64, pieces: tl.int64, count: tl.int64,
    MAKERS: tl.constexpr, LONG: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    row, _number, start, stop, _slot, less, offset, programs = _row(rowptr, more, alpha, segments, pieces, count, LONG)
    first, last, begins = 0, 1, start
    if kept is None:
        top, wrong = _largest(src, start, stop, EDGES)
    else:
        first, last = makers(more, row, segments)
        first, last, begins = programs + first, programs + last, offset + tl.load(rowptr + row)
        top, wrong = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
        last = tl.where(start < stop, last, first)  # a program without a piece looks for nothing
        for maker in range(first, last):
            top = tl.maximum(top, tl.load(kept + 3 * maker))
            wrong += (tl.load(kept + 3 * maker + 1) > 0).to(tl.int32)
    shift, some = finite(top), tl.full([], 0, tl.float64)
    for maker in range(first, last, MAKERS):
        counts = _candidates(kept, maker, last, stop - start, MAKERS)
        for begin in range(0, tl.max(counts, 0), EDGES // MAKERS):
            slack = _left(near, begins, maker, first, begin, counts, shift, -1.0, less, MAKERS, LONG, EDGES)
            some += tl.sum(tl.sum((slack > 0).to(tl.float64), 1), 0)

    low, high = shift * 0 - 1, -_power(tl.maximum(some, 1), -less)  # the root lies between
    tau, mass, steps = low, shift * 0, tl.where((wrong == 0) & (some > 0), STEPS, 0)
    while steps > 0:
        steep, mass = shift * 0, shift * 0
        for maker in range(first, last, MAKERS):
            counts = _candidates(kept, maker, last, stop - start, MAKERS)
            for begin in range(0, tl.max(counts, 0), EDGES // MAKERS):
                slack = _left(near, begins, maker, first, begin, counts, shift, tau, less, MAKERS, LONG, EDGES)
                term = _power(slack, 1 / less - 1)
                steep += tl.sum(tl.sum(term, 1), 0)
                mass += tl.sum(tl.sum(term * slack, 1), 0)
        step = tau + (mass - _power(mass, 1 - less)) / steep  # Newton's, for the norm
        ended = (tl.abs(step - tau) <= -tau * CLOSE) | ((mass <= 1) & (less <= 1))  # or past the root by rounding
        low, high = tl.where(mass > 1, tau, low), tl.where(mass > 1, high, tau)
        step = tl.where((step > low) & (step < high), step, (low + high) / 2)
        ended = ended | (step == low) | (step == high)
        tau, steps = tl.where(ended, tau, step), tl.where(ended, 0, steps - 1)

    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        share = _power(_slack(src, edge, stop, shift, tau, less), 1 / less) / tl.where(mass > 0, mass, 1)
        share = tl.where(wrong > 0, float("nan"), share)
        tl.store(out + edge, narrow(share, out), mask=edge < stop)


@triton.jit
def _pair(out, grad, edge, stop):
    """Shares and their slopes, in float64."""
    p = tl.load(out + edge, mask=edge < stop, other=0).to(tl.float64)
    return p, tl.load(grad + edge, mask=edge < stop, other=0).to(tl.float64)


@triton.jit
def _sums(grad, out, start, stop, less, WHOLE: tl.constexpr, EDGES: tl.constexpr):
    """What :func:`.reference.entmax.segment_entmax_backward` sums over a row; the last three are for alpha, else 0."""
    nothing = tl.full([], 0, tl.float64)
    whole, norm, tilted, shared, mixed, entropy = nothing, nothing, nothing, nothing, nothing, nothing
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _pair(out, grad, edge, stop)
        u = _power(p, 1 - less)
        whole, norm, tilted = whole + tl.sum(p, 0), norm + tl.sum(u, 0), tilted + tl.sum(u * g, 0)
        if WHOLE:
            term = -p * tl.log(tl.where(p == 0, 1, p))
            shared, mixed, entropy = shared + tl.sum(p * g, 0), mixed + tl.sum(term * g, 0), entropy + tl.sum(term, 0)
    return whole, norm, tilted, shared, mixed, entropy


@kernel
def _tilt(
    grad, out, rowptr, more, alpha, kept, segments: tl.int64, pieces: tl.int64, count: tl.int64, WHOLE: tl.constexpr,
    LONG: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """The sums of a piece, six numbers for each program."""
    _, _number, start, stop, _slot, less, _shift, _first = _row(rowptr, more, alpha, segments, pieces, count, LONG)
    whole, norm, tilted, shared, mixed, entropy = _sums(grad, out, start, stop, less, WHOLE, EDGES)
    at = kept + 6 * tl.program_id(0).to(tl.int64)
    tl.store(at, whole)
    tl.store(at + 1, norm)
    tl.store(at + 2, tilted)
    tl.store(at + 3, shared)
    tl.store(at + 4, mixed)
    tl.store(at + 5, entropy)


@kernel
def _entmax_backward(
    grad, out, rowptr, more, alpha, kept, grad_src, grad_alpha, segments: tl.int64, pieces: tl.int64, count: tl.int64,
    LONG: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """See :func:`.reference.entmax.segment_entmax_backward`."""
    row, number, start, stop, slot, less, _shift, programs = _row(rowptr, more, alpha, segments, pieces, count, LONG)
    if kept is None:
        whole, norm, tilted, shared, mixed, entropy = _sums(grad, out, start, stop, less, grad_alpha is not None, EDGES)
    else:
        nothing = tl.full([], 0, tl.float64)
        whole, norm, tilted, shared, mixed, entropy = nothing, nothing, nothing, nothing, nothing, nothing
        first, last = makers(more, row, segments)
        for maker in range(first, last):
            at = kept + 6 * (programs + maker)
            whole, norm, tilted = whole + tl.load(at), norm + tl.load(at + 1), tilted + tl.load(at + 2)
            shared, mixed, entropy = shared + tl.load(at + 3), mixed + tl.load(at + 4), entropy + tl.load(at + 5)
    mean = tl.where(whole == 0, 0, tilted / norm)  # a row of zeros has no support, a row of NaN stays one
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _pair(out, grad, edge, stop)
        u = _power(p, 1 - less)
        slope = u * g - u * mean
        tl.store(grad_src + edge, narrow(slope, grad_src), mask=edge < stop)
    if grad_alpha is not None:
        slope = (shared - mean) / (less * less) + (mixed - mean * entropy) / less
        tl.store(grad_alpha + number, narrow(slope, grad_alpha), mask=slot < 0)


# ------------------------------------------------------------------ the ops


def _tiles(count: int, segments: int) -> dict[str, Any]:
    """Tiles as long as a row is on average, 64 to 1,024, and four values for each thread."""
    edges = max(64, min(1024, triton.next_power_of_2(count // max(segments, 1))))
    return {"EDGES": edges, "num_warps": max(1, edges // 128)}


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    reference_entmax.check_ptr(rowptr, src.size(1))
    (columns, count), segments, out = src.shape, rowptr.numel() - 1, src.new_empty(src.shape)
    src, rowptr, alpha = (x.contiguous() for x in (src, rowptr, alpha))
    work, near, kept = Shared(rowptr, count, src), src, None
    options, sizes = {"LONG": work.long, **_tiles(count, segments)}, (segments, work.programs, count)
    programs = columns * (segments + work.programs)
    if work.more is not None:
        near, kept = torch.empty_like(src), alpha.new_empty(3 * programs, dtype=torch.float64)
        launch(_near, programs, src, rowptr, work.more, alpha, near, kept, *sizes, **options)
    launch(
        _entmax, programs, src, rowptr, work.more, alpha, near, kept, out, *sizes,
        MAKERS=1 if kept is None else MAKERS, maxnreg=128, **options,
    )  # fmt: skip
    return out


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    (columns, count), segments = out.shape, rowptr.numel() - 1
    grad, out, rowptr, alpha = (x.contiguous() for x in (grad, out, rowptr, alpha))
    grad_src, grad_alpha = out.new_empty(out.shape), alpha.new_empty(alpha.shape if need_alpha else 0)
    work, kept = Shared(rowptr, count, out), None
    options, sizes = {"LONG": work.long, **_tiles(count, segments)}, (segments, work.programs, count)
    programs, given = columns * (segments + work.programs), (grad, out, rowptr, work.more, alpha)
    if work.more is not None:
        kept = alpha.new_empty(6 * programs, dtype=torch.float64)
        launch(_tilt, programs, *given, kept, *sizes, WHOLE=need_alpha, **options)
    launch(_entmax_backward, programs, *given, kept, grad_src, grad_alpha if need_alpha else None, *sizes, **options)
    return grad_src, grad_alpha


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    place = segment_entmax(reference_segments.wide(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(place, rowptr), place
