"""alpha-entmax over rows, on the CPU: weights, their gradients, and the support, the values with a weight above 0.

In and out: the tensors of ``segment_entmax``, its backward and ``entmax_support`` in :mod:`sbm_pyg.ops`. Here are the
kernels and the functions that lay out memory for them. Not here: attention (:mod:`.edges`).

A row is read twice: for its maximum, and for the values near enough to the maximum to have a share. The root is found
among those few, in float64. Each row is one thread's work and no other row enters it, so nothing depends on threads or
on the batch.

Let z = (alpha - 1) (x - max), p = 1 / (alpha - 1), and ``|.|_p`` the p-norm of the positive parts. The root is that of
g(tau) = |z - tau|_p - 1. For alpha up to 2, g is convex, so Newton's steps from -1 rise to the root and never pass it:
values below a step are out for good. g is nearly straight where the sum of powers is not, so four or five steps do. For
larger alpha, steps that leave the bracket are halved.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..reference.entmax import KERNEL_NEWTON_STEPS, ROOT_TOLERANCE, check_ptr
from .channels import to_array
from .simd import first, highest, load16, maximum, splat
from .threads import numba_kernel, run, split, task_count

PASSES_PER_ROW = 16
"""Passes over a row that finding its root takes, about."""

# Powers: log m = 2 atanh f, and exp, by their series, highest term first; and what rounds a number to an integer.
ATANH_SERIES = tuple(2 / (2 * k + 1) for k in range(10, -1, -1))
EXP_SERIES = tuple(1 / math.factorial(k) for k in range(13, -1, -1))
ROUNDING_SHIFT, ROUNDING_BITS, SQRT_HALF = 1.5 * 2.0**52, np.int64(0x4338000000000000), np.int64(0x3FE6A09E667F3BCD)
LOG2_HIGH, LOG2_LOW, MIN_EXPONENT = 0.6931471803691238, 1.9082149292705877e-10, -700.0


@njit(inline="always")
def _polynomial(x, factors):
    result = 0.0
    for factor in factors:
        result = result * x + factor
    return result


@numba_kernel
def _powers(x, exponent, count, out):
    """``out[:count] = x[:count] ** exponent`` of positive normal numbers, or e^-700 where that is less.

    Other numbers give any result. Relative error below 1e-15 (1 + the size of the power's
    logarithm). A loop without calls, which the compiler turns into vectors: a third of the time of the C library.
    """
    if exponent == 0:
        for k in range(count):
            out[k] = 1.0
    elif exponent == 1:
        for k in range(count):
            out[k] = x[k]
    elif exponent == 0.5:
        for k in range(count):
            out[k] = np.sqrt(x[k])
    else:
        for k in range(count):
            # x = 2^n m with m around 1; log m = 2 atanh f
            bits = np.float64(x[k] if x[k] > 0 else 1.0).view(np.int64)
            n = (bits - SQRT_HALF) >> np.int64(52)
            m = np.int64(bits - (n << np.int64(52))).view(np.float64)
            f = (m - 1) / (m + 1)
            whole = np.int64(n + ROUNDING_BITS).view(np.float64) - ROUNDING_SHIFT
            y = exponent * (whole * np.log(2) + f * _polynomial(f * f, ATANH_SERIES))
            y = y if y > MIN_EXPONENT else MIN_EXPONENT
            # y = n log 2 + r; the sum rounds to n and leaves it in the low bits
            shifted = np.float64(y * (1 / np.log(2)) + ROUNDING_SHIFT)
            whole = shifted - ROUNDING_SHIFT
            r = y - whole * LOG2_HIGH - whole * LOG2_LOW
            power = np.float64(_polynomial(r, EXP_SERIES)).view(np.int64)
            out[k] = np.int64(power + (shifted.view(np.int64) << np.int64(52))).view(np.float64)


def _slack_sums(slack, part, count):
    """Sum of a power of the positive slacks, ``part``, and sum of the next power, which replaces ``part``."""
    steep, mass = 0.0, 0.0
    for k in range(count):
        here = part[k] if slack[k] > 0 else 0.0
        part[k] = here * slack[k]
        steep += here
        mass += part[k]
    return steep, mass


_slack_sums = numba_kernel(_slack_sums, reorder=True)


@numba_kernel
def _solve(src, start, stop, alpha, index, level, slack, part):
    """Weights of the row ``src[start:stop]``, up to a common factor.

    Returns how many values may have one, and the sum of the shares: NaN where the row has no shares to compute. Writes
    the values' numbers in the row to ``index`` and their shares to ``part``.
    """
    # Find the largest value of the row.
    less, none = alpha - 1, src.dtype.type(-np.inf)
    high16 = splat(none, 16)
    for e in range(start, stop, 16):
        high16 = maximum(first(stop - e, load16(src, e, stop - e), none), high16)
    top, count, broken = np.float64(highest(high16)), 0, 0
    # Pack the values within 1 / (alpha - 1) of it, which alone can have a share.
    bound = top - 1 / less
    for e in range(start, stop):
        x = np.float64(src[e])
        index[count], level[count] = e - start, less * (x - top)
        count += x > bound
        broken += x != x
    if broken or top == np.inf:
        return 0, np.nan
    # Take Newton's steps on the norm of the slacks, which is nearly straight.
    low, high, tau, mass = -1.0, -(float(max(count, 1)) ** -less), -1.0, 0.0
    for _ in range(KERNEL_NEWTON_STEPS if count else 0):
        for k in range(count):
            slack[k] = level[k] - tau
        _powers(slack, 1 / less - 1, count, part)
        steep, mass = _slack_sums(slack, part, count)
        step = tau + (mass - mass ** (1 - less)) / steep
        if abs(step - tau) <= ROOT_TOLERANCE * -tau:
            break
        # Below the root, values without slack are out for good; above it, alpha up to 2 is done.
        if mass > 1:
            low, remaining = tau, 0
            for k in range(count):
                index[remaining], level[remaining], part[remaining] = index[k], level[k], part[k]
                remaining += slack[k] > 0
            count = remaining
        else:
            high = tau
            if less <= 1:
                break  # past the root by rounding
        tau = step if low < step < high else (low + high) / 2
        if tau in (low, high):
            break
    return count, mass


@numba_kernel
def _entmax_rows(begin, end, column, longest, src, rowptr, alpha, out):
    index, level, slack, share = np.empty(longest, np.int64), np.empty(longest), np.empty(longest), np.empty(longest)
    shift, rows = column * rowptr[-1], rowptr.size - 1
    for row in range(begin, end):
        start, stop = shift + rowptr[row], shift + rowptr[row + 1]
        count, mass = _solve(src, start, stop, alpha[column * rows + row], index, level, slack, share)
        out[start:stop] = 0 if mass == mass else np.nan
        if mass == mass:
            for k in range(count):
                out[start + index[k]] = share[k] / mass


@numba_kernel
def _support_rows(begin, end, longest, src, rowptr, alpha, places, counts):
    index, level, slack, share = np.empty(longest, np.int64), np.empty(longest), np.empty(longest), np.empty(longest)
    for row in range(begin, end):
        start, stop = rowptr[row], rowptr[row + 1]
        count, mass = _solve(src, start, stop, alpha[row], index, level, slack, share)
        place = start
        if mass == mass:
            for k in range(count):
                places[place] = start + index[k]
                place += share[k] > 0
        else:
            for e in range(start, stop):
                places[e] = e
            place = stop
        counts[row + 1] = place - start


@numba_kernel
def _gather_places(begin, end, places, rowptr, rows, out):
    """Copy the indices of each row, stored from the start of the row on, to ``out[rows[r] : rows[r + 1]]``."""
    for row in range(begin, end):
        start, to = rowptr[row], rows[row]
        for k in range(rows[row + 1] - to):
            out[to + k] = places[start + k]


@numba_kernel
def _entmax_backward_rows(begin, end, column, longest, grad, p, rowptr, alpha, need_alpha, dsrc, dalpha):
    index, share, weight = np.empty(longest, np.int64), np.empty(longest), np.empty(longest)
    shift, rows = column * rowptr[-1], rowptr.size - 1
    for row in range(begin, end):
        start, stop, number, count = shift + rowptr[row], shift + rowptr[row + 1], column * rows + row, 0
        # Find the support, the values with a share.
        for e in range(start, stop):
            index[count] = e
            count += p[e] != 0  # NaN is in
        # Sum the weights p^(2 - alpha), and the gradient by them.
        norm, tilted, total = 0.0, 0.0, 0.0
        for k in range(count):
            share[k] = p[index[k]]
        _powers(share, 2 - alpha[number], count, weight)
        for k in range(count):
            total += share[k]
            norm += weight[k]
            tilted += weight[k] * grad[index[k]]
        # Write the gradient of each value of the support.
        mean = (tilted if total == total else np.nan) / norm if count else 0.0
        dsrc[start:stop] = 0 if mean == mean else np.nan
        for k in range(count):
            dsrc[index[k]] = weight[k] * (grad[index[k]] - mean)
        # Write the gradient of alpha, which takes the entropy of the shares.
        if need_alpha:
            shared, mixed, entropy = 0.0, 0.0, 0.0
            for k in range(count):
                part = -share[k] * np.log(share[k])
                shared += share[k] * grad[index[k]]
                mixed += part * grad[index[k]]
                entropy += part
            less = alpha[number] - 1
            dalpha[number] = (shared - mean) / less**2 + (mixed - mean * entropy) / less


def _work(rowptr: Tensor) -> tuple[np.ndarray, list[tuple[int, int]], int]:
    """Offsets, rows for each piece of work, and the length of the longest row."""
    offsets = rowptr.contiguous().numpy()
    longest = int(np.diff(offsets).max(initial=1))
    return offsets, split(offsets, task_count(PASSES_PER_ROW * int(offsets[-1]), 3)), longest


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    check_ptr(rowptr, src.shape[1])
    offsets, pieces, longest = _work(rowptr)
    values, alphas = to_array(src, src).reshape(-1), alpha.detach().double().contiguous().view(-1).numpy()
    out = torch.empty(src.shape, dtype=torch.promote_types(src.dtype, torch.float32))
    tasks = [(*piece, column) for column in range(src.shape[0]) for piece in pieces]
    arguments = (longest, values, offsets, alphas, out.view(-1).numpy())
    run(_entmax_rows, [(*task, *arguments) for task in tasks], task_count(PASSES_PER_ROW * values.size))
    return out.to(src.dtype)


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    offsets, pieces, longest = _work(rowptr)
    slopes, p = (to_array(x, out).reshape(-1) for x in (grad, out))
    alphas = alpha.detach().double().contiguous().view(-1).numpy()
    dsrc = torch.empty(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
    dalpha = torch.empty(alpha.shape if need_alpha else 0, dtype=torch.float64)
    arguments = (longest, slopes, p, offsets, alphas, need_alpha, dsrc.view(-1).numpy(), dalpha.view(-1).numpy())
    tasks = [(*piece, column) for column in range(out.shape[0]) for piece in pieces]
    run(_entmax_backward_rows, [(*task, *arguments) for task in tasks], task_count(p.size))
    return dsrc.to(out.dtype), dalpha.to(alpha.dtype)


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    check_ptr(rowptr, src.shape[0])
    offsets, pieces, longest = _work(rowptr)
    values, alphas = to_array(src, src), alpha.detach().double().contiguous().numpy()
    places, rows = np.empty(src.shape[0], np.int64), np.zeros(len(offsets), np.int64)
    run(_support_rows, [(*piece, longest, values, offsets, alphas, places, rows) for piece in pieces])
    np.cumsum(rows, out=rows)
    index = np.empty(rows[-1], np.int64)
    run(_gather_places, [(*piece, places, offsets, rows, index) for piece in pieces])
    return torch.from_numpy(rows), torch.from_numpy(index)
