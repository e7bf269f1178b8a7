"""alpha-entmax over rows, for CUDA devices, in Triton: shares, their gradients, and which values have a share at all.

In and out: the tensors of ``segment_entmax``, its backward and ``entmax_support`` in :mod:`sbm_pyg.ops`, on one device.
Not here: attention (:mod:`.cuda_edges`).

A program takes one row of one column. The root is found in float64 by the steps of :mod:`.cpu_entmax`, which says why
they are few. Each step reads the row again, which the cache holds. No other row enters, so that nothing depends on
the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .cuda_rows import finite, kernel, launch, narrow

STEPS = tl.constexpr(100)  # of root finding; halving alone takes 53
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
def _row(rowptr, alpha, segments, count):
    """Number of this program's row, where it starts and stops, and its alpha less 1."""
    number = tl.program_id(0).to(tl.int64)
    row, shift = number % segments, number // segments * count
    less = tl.load(alpha + number).to(tl.float64) - 1
    return number, shift + tl.load(rowptr + row), shift + tl.load(rowptr + row + 1), less


@triton.jit
def _slack(src, edge, stop, shift, tau, less):
    """What is left of each value above the threshold."""
    x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
    return tl.maximum(less * (x - shift) - tau, 0)


@kernel
def _entmax(
    src, rowptr, alpha, out, segments: tl.int64, count: tl.int64, EDGES: tl.constexpr
):  # fmt: skip
    _number, start, stop, less = _row(rowptr, alpha, segments, count)
    top, wrong = tl.full([], float("-inf"), tl.float64), 0
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        x = tl.load(src + edge, mask=edge < stop, other=float("-inf")).to(tl.float64)
        wrong += tl.sum((x != x).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(tl.where(x != x, float("-inf"), x), 0))
    wrong += (top == float("inf")).to(tl.int32)
    shift, near = finite(top), tl.full([], 0, tl.float64)
    for begin in range(start, stop, EDGES):
        slack = _slack(src, begin + tl.arange(0, EDGES), stop, shift, -1.0, less)
        near += tl.sum((slack > 0).to(tl.float64), 0)

    low, high = shift * 0 - 1, -_power(tl.maximum(near, 1), -less)  # the root lies between
    tau, mass, steps = low, shift * 0, tl.where((wrong == 0) & (near > 0), STEPS, 0)
    while steps > 0:
        steep, mass = shift * 0, shift * 0
        for begin in range(start, stop, EDGES):
            slack = _slack(src, begin + tl.arange(0, EDGES), stop, shift, tau, less)
            part = _power(slack, 1 / less - 1)
            steep += tl.sum(part, 0)
            mass += tl.sum(part * slack, 0)
        step = tau + (mass - _power(mass, 1 - less)) / steep  # Newton's, for the norm
        last = (tl.abs(step - tau) <= -tau * CLOSE) | ((mass <= 1) & (less <= 1))  # or past the root by rounding
        low, high = tl.where(mass > 1, tau, low), tl.where(mass > 1, high, tau)
        step = tl.where((step > low) & (step < high), step, (low + high) / 2)
        last = last | (step == low) | (step == high)
        tau, steps = tl.where(last, tau, step), tl.where(last, 0, steps - 1)

    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        share = _power(_slack(src, edge, stop, shift, tau, less), 1 / less) / tl.where(mass > 0, mass, 1)
        share = tl.where(wrong > 0, float("nan"), share)
        tl.store(out + edge, narrow(share, out), mask=edge < stop)


@kernel
def _entmax_backward(
    grad, out, rowptr, alpha, grad_src, grad_alpha, segments: tl.int64, count: tl.int64, EDGES: tl.constexpr,
):  # fmt: skip
    """See :func:`.reference.segment_entmax_backward`."""
    number, start, stop, less = _row(rowptr, alpha, segments, count)
    nothing = tl.full([], 0, tl.float64)
    whole, norm, tilted, shared, mixed, entropy = nothing, nothing, nothing, nothing, nothing, nothing
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _pair(out, grad, edge, stop)
        u = _power(p, 1 - less)
        whole, norm, tilted = whole + tl.sum(p, 0), norm + tl.sum(u, 0), tilted + tl.sum(u * g, 0)
        if grad_alpha is not None:
            part = -p * tl.log(tl.where(p == 0, 1, p))
            shared, mixed, entropy = shared + tl.sum(p * g, 0), mixed + tl.sum(part * g, 0), entropy + tl.sum(part, 0)
    mean = tl.where(whole == 0, 0, tilted / norm)  # a row of zeros has no support, a row of NaN stays one
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        p, g = _pair(out, grad, edge, stop)
        u = _power(p, 1 - less)
        slope = u * g - u * mean
        tl.store(grad_src + edge, narrow(slope, grad_src), mask=edge < stop)
    if grad_alpha is not None:
        slope = (shared - mean) / (less * less) + (mixed - mean * entropy) / less
        tl.store(grad_alpha + number, narrow(slope, grad_alpha))


@triton.jit
def _pair(out, grad, edge, stop):
    """Shares and their slopes, in float64."""
    p = tl.load(out + edge, mask=edge < stop, other=0).to(tl.float64)
    return p, tl.load(grad + edge, mask=edge < stop, other=0).to(tl.float64)


# ------------------------------------------------------------------ the ops


def _tiles(count: int, segments: int) -> dict[str, Any]:
    """Tiles as long as a row is on average, 64 to 1,024, and four values for each thread."""
    edges = max(64, min(1024, triton.next_power_of_2(count // max(segments, 1))))
    return {"EDGES": edges, "num_warps": max(1, edges // 128)}


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    reference.check_ptr(rowptr, src.size(1))
    (columns, count), segments, out = src.shape, rowptr.numel() - 1, src.new_empty(src.shape)
    given = (x.contiguous() for x in (src, rowptr, alpha))
    launch(_entmax, columns * segments, *given, out, segments, count, **_tiles(count, segments))
    return out


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    (columns, count), segments = out.shape, rowptr.numel() - 1
    given = (x.contiguous() for x in (grad, out, rowptr, alpha))
    grad_src, grad_alpha = out.new_empty(out.shape), alpha.new_empty(alpha.shape if need_alpha else 0)
    launch(
        _entmax_backward, columns * segments, *given, grad_src, grad_alpha if need_alpha else None, segments, count,
        **_tiles(count, segments),
    )  # fmt: skip
    return grad_src, grad_alpha


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    place = segment_entmax(reference.wide(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(place, rowptr), place
