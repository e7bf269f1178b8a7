"""Alpha-entmax over compressed rows in plain torch: the reference of ``segment_entmax`` and its backward pass.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..segments import edge_row, segment_max, segments, upcast


def check_ptr(rowptr: Tensor, num_values: int) -> None:
    """Refuse offsets that do not cut all values into segments: a kernel would leave its memory."""
    if not bool((rowptr[0] == 0) & (rowptr[-1] == num_values) & (rowptr.diff() >= 0).all()):
        raise ValueError(
            f"Expected 'ptr' to rise from 0 to E = {num_values} (got another order). "
            "Pass offsets, not lengths, of all segments."
        )


NEWTON_STEPS = 60
"""Number of steps of root finding; bisection alone takes one step per bit of a number."""
KERNEL_NEWTON_STEPS = 100
"""Upper bound on the steps of kernels, which compute in float64 and stop when a step is small."""
ROOT_TOLERANCE = 1e-12
"""Kernels stop after a step that changes the root by less than this factor of itself."""


def _flatten_columns(rowptr: Tensor, columns: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Segment of each value of ``[G, E]``, flattened, later columns after earlier ones; and the offsets of segments."""
    first = torch.arange(columns, device=rowptr.device)[:, None]
    row = edge_row(rowptr, num_values) + first * (rowptr.numel() - 1)
    return row.flatten(), torch.cat([rowptr[:1], (rowptr[1:] + first * num_values).flatten()])


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    """Find tau by a bracketed Newton method; :func:`sbm_pyg.ops.segment_entmax` defines entmax.

    Values ``[G, E]``, and an alpha for each column and segment, ``[G, S]``.
    """
    check_ptr(rowptr, src.size(1))
    if src.numel() == 0:
        return torch.empty_like(src)
    (row, ptr), num_rows = _flatten_columns(rowptr, *src.shape), alpha.numel()
    values, alpha = upcast(src).flatten(), alpha.flatten().double()
    less, power = ((alpha - 1).to(values.dtype), (1 / (alpha - 1)).to(values.dtype)[row])
    z = less[row] * values
    top = segment_max(z, row, num_rows)
    z = z - torch.where(top == -math.inf, 0, top)[row]  # a row whose values are all forbidden has none
    count = ptr.diff().to(z.dtype).clamp(min=1)
    low, high = -torch.ones_like(count), -(count**-less)  # mass >= 1 at low, <= 1 at high
    tau, done = low.clone(), torch.zeros_like(low, dtype=torch.bool)
    for _ in range(NEWTON_STEPS):
        slack = (z - tau[row]).clamp(min=0)
        part = slack.where(slack > 0, 1) ** (power - 1) * (slack > 0)
        steep, mass = segments(torch.stack([part, part * slack], 1), ptr).unbind(1)
        low, high = torch.where(mass > 1, tau, low), torch.where(mass <= 1, tau, high)
        step = tau + (mass - mass ** (1 - less)) / steep  # for the norm, which is nearly a straight line
        step = torch.where((step > low) & (step < high), step, (low + high) / 2)
        done |= (step - tau).abs() <= torch.finfo(z.dtype).eps * tau.abs()
        tau = torch.where(done, tau, step)  # so that no row depends on the steps of others
    out = (z - tau[row]).clamp(min=0) ** power
    total = segments(out, ptr)
    return (out / torch.where(total == 0, 1, total)[row]).to(src.dtype).view(src.shape)


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    """``dx = u (dy - mean)`` with ``u = p^(2 - alpha)`` on the support, and ``mean = sum(u dy) / sum(u)``.

    With the entropies ``h = -p log p`` of a row, its ``dalpha = (sum(p dy) - mean) / (alpha - 1)^2 + (sum(h dy) - mean
    sum(h)) / (alpha - 1)``.
    """
    row, ptr = _flatten_columns(rowptr, *out.shape)
    p, dy, a = upcast(out).flatten(), upcast(grad).flatten(), alpha.flatten().double()
    u = torch.where(p > 0, p, 1) ** (2 - a).to(p.dtype)[row] * (p > 0)
    tilted, norm, whole = segments(torch.stack([u * dy, u, p], 1), ptr).unbind(1)
    mean = torch.where(whole == 0, 0, tilted / norm)  # a row of zeros has no support, a row of NaN stays one
    dsrc = (u * dy - u * mean[row]).to(out.dtype).view(out.shape)
    if not need_alpha:
        return dsrc, alpha.new_empty(0)
    p, dy = p.double(), dy.double()
    h = -torch.xlogy(p, p)
    shared, mixed, entropy = segments(torch.stack([p * dy, h * dy, h], 1), ptr).unbind(1)
    dalpha = (shared - mean) / (a - 1) ** 2 + (mixed - mean * entropy) / (a - 1)
    return dsrc, dalpha.to(alpha.dtype).view(alpha.shape)


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Find the support of each row: its values whose weight is positive or NaN.

    Returns the offsets of the rows in the support, ``[S+1]``, and the ascending indices of its values.

    Values ``[E]``, and an alpha for each row, ``[S]``.
    """
    index = segment_entmax(upcast(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(index, rowptr), index
