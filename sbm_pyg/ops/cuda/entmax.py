"""alpha-entmax over rows, for CUDA devices, in Triton: weights, their gradients, and the support.

In and out: the tensors of ``segment_entmax``, its backward and ``entmax_support`` in :mod:`sbm_pyg.ops`, on one device.
Not here: attention (:mod:`.edges`).

A program takes one row of one column. The root is found in float64 by the steps of :mod:`sbm_pyg.ops.cpu.entmax`, which
explains why they are few. Each step reads the row again, which the cache holds. No other row enters.

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

from .. import segments as reference_segments
from ..reference import entmax as reference_entmax
from .rows import SplitRows, cast_like, finite, launch, programs_of_row, triton_kernel, work_item_of

_MAX_NEWTON_STEPS = tl.constexpr(reference_entmax.KERNEL_NEWTON_STEPS)
_ROOT_TOLERANCE = tl.constexpr(reference_entmax.ROOT_TOLERANCE)
PIECES_PER_STEP = 16
"""Pieces of a row whose candidates are read together: most pieces have few."""


@triton.jit
def _positive_power(x, exponent):
    """``x ** exponent`` where x > 0, else 0. Exponents 0, 1/2 and 1 need no logarithm."""
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
def _entmax_row(rowptr, piece_ends, alpha, segments, pieces, count, MAX_EDGES: tl.constexpr):
    """Locate the row of this program: its number in its column and among all columns, its start and end, its piece, its
    alpha - 1, and the first value and the first program of its column.
    """
    column, item = tl.program_id(0).to(tl.int64) // (segments + pieces), tl.program_id(0) % (segments + pieces)
    row, start, stop, slot = work_item_of(rowptr, piece_ends, item.to(tl.int64), segments, MAX_EDGES)
    number, shift = column * segments + row, column * count
    less = tl.load(alpha + number).to(tl.float64) - 1
    return row, number, shift + start, shift + stop, slot, less, shift, column * (segments + pieces)


@triton.jit
def _load_slack(src, edge, stop, shift, tau, less):
    """Excess of each value over the threshold, at least 0."""
    x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
    return tl.maximum(less * (x - shift) - tau, 0)


@triton.jit
def _largest_value(src, start, stop, EDGES: tl.constexpr):
    """The largest value, and a positive number if some values are NaN or infinite."""
    top, wrong = tl.full([], float("-inf"), tl.float64), 0
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
        wrong += tl.sum((x != x).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(tl.where(x != x, float("-inf"), x), 0))
    return top, wrong + (top == float("inf")).to(tl.int32)


@triton_kernel
def _near_kernel(
    src, rowptr, piece_ends, alpha, near, summaries, segments: tl.int64, pieces: tl.int64, count: tl.int64,
    MAX_EDGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Pack the values of a piece that may have a positive weight, and write the largest value, the number of invalid
    values, and the number of packed values."""
    _, _number, start, stop, _slot, less, _shift, _first = _entmax_row(
        rowptr, piece_ends, alpha, segments, pieces, count, MAX_EDGES
    )
    # Find the largest value of the piece.
    top, wrong = _largest_value(src, start, stop, EDGES)
    end = start
    # Pack the values that are near enough to it to have a share.
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        is_near = _load_slack(src, edge, stop, finite(top), -1.0, less) > 0
        x = tl.load(src + edge, mask=is_near, other=0)
        tl.store(near + end + tl.cumsum(is_near.to(tl.int32), 0) - 1, x, mask=is_near)
        end += tl.sum(is_near.to(tl.int32), 0)
    # Write what the programs of the row need to know of the piece.
    at = summaries + 3 * tl.program_id(0).to(tl.int64)
    tl.store(at, top)
    tl.store(at + 1, wrong)
    tl.store(at + 2, end - start)


@triton.jit
def _candidate_counts(summaries, program, last, length, PIECES_PER_STEP: tl.constexpr):
    """Number of values that may have a positive weight in some pieces of a row; all values of an uncut row."""
    at = program + tl.arange(0, PIECES_PER_STEP)
    counts = tl.load(summaries + 3 * at + 2, mask=at < last, other=0) if summaries is not None else at * 0 + length
    return counts.to(tl.int32)


@triton.jit
def _piece_slack(
    near, begins, program, first, begin, counts, shift, tau, less, PIECES_PER_STEP: tl.constexpr,
    MAX_EDGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Excess of packed values over the threshold, ``[PIECES_PER_STEP, EDGES / PIECES_PER_STEP]``."""
    number, offset = begin + tl.arange(0, EDGES // PIECES_PER_STEP), tl.arange(0, PIECES_PER_STEP) * MAX_EDGES
    start = near + begins + (program - first) * MAX_EDGES
    return _load_slack(start, offset[:, None] + number[None, :], (offset + counts)[:, None], shift, tau, less)


@triton_kernel
def _entmax_kernel(
    src, rowptr, piece_ends, alpha, near, summaries, out, segments: tl.int64, pieces: tl.int64, count: tl.int64,
    PIECES_PER_STEP: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    row, _number, start, stop, _slot, less, offset, programs = _entmax_row(
        rowptr, piece_ends, alpha, segments, pieces, count, MAX_EDGES
    )
    # Find the largest value of the row: in the row, or among what its pieces have left.
    first, last, begins = 0, 1, start
    if summaries is None:
        top, wrong = _largest_value(src, start, stop, EDGES)
    else:
        first, last = programs_of_row(piece_ends, row, segments)
        first, last, begins = programs + first, programs + last, offset + tl.load(rowptr + row)
        top, wrong = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
        last = tl.where(start < stop, last, first)  # a program without a piece looks for nothing
        for program in range(first, last):
            top = tl.maximum(top, tl.load(summaries + 3 * program))
            wrong += (tl.load(summaries + 3 * program + 1) > 0).to(tl.int32)
    # Count the values that may have a share.
    shift, num_near = finite(top), tl.full([], 0, tl.float64)
    for program in range(first, last, PIECES_PER_STEP):
        counts = _candidate_counts(summaries, program, last, stop - start, PIECES_PER_STEP)
        for begin in range(0, tl.max(counts, 0), EDGES // PIECES_PER_STEP):
            slack = _piece_slack(
                near, begins, program, first, begin, counts, shift, -1.0, less, PIECES_PER_STEP, MAX_EDGES, EDGES
            )
            num_near += tl.sum(tl.sum((slack > 0).to(tl.float64), 1), 0)

    # Bracket the root, which lies above -1.
    low, high = shift * 0 - 1, -_positive_power(tl.maximum(num_near, 1), -less)  # the root lies between
    tau, mass, steps = low, shift * 0, tl.where((wrong == 0) & (num_near > 0), _MAX_NEWTON_STEPS, 0)
    # Take Newton's steps on the norm of the slacks, which is nearly straight.
    while steps > 0:
        steep, mass = shift * 0, shift * 0
        for program in range(first, last, PIECES_PER_STEP):
            counts = _candidate_counts(summaries, program, last, stop - start, PIECES_PER_STEP)
            for begin in range(0, tl.max(counts, 0), EDGES // PIECES_PER_STEP):
                slack = _piece_slack(
                    near, begins, program, first, begin, counts, shift, tau, less, PIECES_PER_STEP, MAX_EDGES, EDGES
                )
                term = _positive_power(slack, 1 / less - 1)
                steep += tl.sum(tl.sum(term, 1), 0)
                mass += tl.sum(tl.sum(term * slack, 1), 0)
        # A step that leaves the bracket goes to its middle; one that moves nothing ends the search.
        step = tau + (mass - _positive_power(mass, 1 - less)) / steep  # Newton's, for the norm
        passed = (mass <= 1) & (less <= 1)  # past the root by rounding
        ended = (tl.abs(step - tau) <= -tau * _ROOT_TOLERANCE) | passed
        low, high = tl.where(mass > 1, tau, low), tl.where(mass > 1, high, tau)
        step = tl.where((step > low) & (step < high), step, (low + high) / 2)
        ended = ended | (step == low) | (step == high)
        tau, steps = tl.where(ended, tau, step), tl.where(ended, 0, steps - 1)

    # Write the shares, normalized by their sum.
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        share = _positive_power(_load_slack(src, edge, stop, shift, tau, less), 1 / less) / tl.where(mass > 0, mass, 1)
        share = tl.where(wrong > 0, float("nan"), share)
        tl.store(out + edge, cast_like(share, out), mask=edge < stop)


@triton.jit
def _load_pair(out, grad, edge, stop):
    """Load weights and their slopes, in float64."""
    p = tl.load(out + edge, mask=edge < stop, other=0).to(tl.float64)
    return p, tl.load(grad + edge, mask=edge < stop, other=0).to(tl.float64)


@triton.jit
def _row_sums(grad, out, start, stop, less, WHOLE: tl.constexpr, EDGES: tl.constexpr):
    """The sums over a row in :func:`.reference.entmax.segment_entmax_backward`; the last three are for alpha."""
    nothing = tl.full([], 0, tl.float64)
    whole, norm, tilted, shared, mixed, entropy = nothing, nothing, nothing, nothing, nothing, nothing
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _load_pair(out, grad, edge, stop)
        # Sum shares, the weights p^(2 - alpha), and the gradient by them.
        u = _positive_power(p, 1 - less)
        whole, norm, tilted = whole + tl.sum(p, 0), norm + tl.sum(u, 0), tilted + tl.sum(u * g, 0)
        if WHOLE:
            term = -p * tl.log(tl.where(p == 0, 1, p))
            shared, mixed, entropy = shared + tl.sum(p * g, 0), mixed + tl.sum(term * g, 0), entropy + tl.sum(term, 0)
    return whole, norm, tilted, shared, mixed, entropy


@triton_kernel
def _entmax_sums_kernel(
    grad, out, rowptr, piece_ends, alpha, piece_sums, segments: tl.int64, pieces: tl.int64, count: tl.int64,
    WHOLE: tl.constexpr, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write the sums of the piece of each program, six numbers."""
    _, _number, start, stop, _slot, less, _shift, _first = _entmax_row(
        rowptr, piece_ends, alpha, segments, pieces, count, MAX_EDGES
    )
    whole, norm, tilted, shared, mixed, entropy = _row_sums(grad, out, start, stop, less, WHOLE, EDGES)
    at = piece_sums + 6 * tl.program_id(0).to(tl.int64)
    tl.store(at, whole)
    tl.store(at + 1, norm)
    tl.store(at + 2, tilted)
    tl.store(at + 3, shared)
    tl.store(at + 4, mixed)
    tl.store(at + 5, entropy)


@triton_kernel
def _entmax_backward_kernel(
    grad, out, rowptr, piece_ends, alpha, piece_sums, grad_src, grad_alpha, segments: tl.int64, pieces: tl.int64,
    count: tl.int64, MAX_EDGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute :func:`.reference.entmax.segment_entmax_backward`."""
    row, number, start, stop, slot, less, _shift, programs = _entmax_row(
        rowptr, piece_ends, alpha, segments, pieces, count, MAX_EDGES
    )
    # Sum over the row, or over what its pieces have left.
    if piece_sums is None:
        whole, norm, tilted, shared, mixed, entropy = _row_sums(
            grad, out, start, stop, less, grad_alpha is not None, EDGES
        )
    else:
        nothing = tl.full([], 0, tl.float64)
        whole, norm, tilted, shared, mixed, entropy = nothing, nothing, nothing, nothing, nothing, nothing
        first, last = programs_of_row(piece_ends, row, segments)
        for program in range(first, last):
            at = piece_sums + 6 * (programs + program)
            whole, norm, tilted = whole + tl.load(at), norm + tl.load(at + 1), tilted + tl.load(at + 2)
            shared, mixed, entropy = shared + tl.load(at + 3), mixed + tl.load(at + 4), entropy + tl.load(at + 5)
    mean = tl.where(whole == 0, 0, tilted / norm)  # a row of zeros has no support, a row of NaN stays one
    # Write the gradient of each value.
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _load_pair(out, grad, edge, stop)
        u = _positive_power(p, 1 - less)
        slope = u * g - u * mean
        tl.store(grad_src + edge, cast_like(slope, grad_src), mask=edge < stop)
    # Write the gradient of alpha, in the program of the whole row.
    if grad_alpha is not None:
        slope = (shared - mean) / (less * less) + (mixed - mean * entropy) / less
        tl.store(grad_alpha + number, cast_like(slope, grad_alpha), mask=slot < 0)


def _row_tile_options(count: int, segments: int) -> dict[str, Any]:
    """Tiles as long as a row is on average, 64 to 1,024, and four values for each thread."""
    edges = max(64, min(1024, triton.next_power_of_2(count // max(segments, 1))))
    return {"EDGES": edges, "num_warps": max(1, edges // 128)}


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    reference_entmax.check_ptr(rowptr, src.size(1))
    (columns, count), segments, out = src.shape, rowptr.numel() - 1, src.new_empty(src.shape)
    src, rowptr, alpha = (x.contiguous() for x in (src, rowptr, alpha))
    work, near, summaries = SplitRows(rowptr, count, src), src, None
    options = {"MAX_EDGES": work.max_edges, **_row_tile_options(count, segments)}
    sizes = (segments, work.programs, count)
    programs = columns * (segments + work.programs)
    if work.piece_ends is not None:
        near, summaries = torch.empty_like(src), alpha.new_empty(3 * programs, dtype=torch.float64)
        launch(_near_kernel, programs, src, rowptr, work.piece_ends, alpha, near, summaries, *sizes, **options)
    launch(
        _entmax_kernel, programs, src, rowptr, work.piece_ends, alpha, near, summaries, out, *sizes,
        PIECES_PER_STEP=1 if summaries is None else PIECES_PER_STEP, maxnreg=128, **options,
    )  # fmt: skip
    return out


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    (columns, count), segments = out.shape, rowptr.numel() - 1
    grad, out, rowptr, alpha = (x.contiguous() for x in (grad, out, rowptr, alpha))
    grad_src, grad_alpha = out.new_empty(out.shape), alpha.new_empty(alpha.shape if need_alpha else 0)
    work, piece_sums = SplitRows(rowptr, count, out), None
    options = {"MAX_EDGES": work.max_edges, **_row_tile_options(count, segments)}
    sizes = (segments, work.programs, count)
    programs, arguments = columns * (segments + work.programs), (grad, out, rowptr, work.piece_ends, alpha)
    if work.piece_ends is not None:
        piece_sums = alpha.new_empty(6 * programs, dtype=torch.float64)
        launch(_entmax_sums_kernel, programs, *arguments, piece_sums, *sizes, WHOLE=need_alpha, **options)
    grads = grad_src, grad_alpha if need_alpha else None
    launch(_entmax_backward_kernel, programs, *arguments, piece_sums, *grads, *sizes, **options)
    return grad_src, grad_alpha


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    offset = segment_entmax(reference_segments.upcast(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(offset, rowptr), offset
