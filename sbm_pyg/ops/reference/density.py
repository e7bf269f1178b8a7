"""Rates that are scaled to a target density, in plain torch.

In and out: the tensors of ``scale_to_density`` in :mod:`sbm_pyg.ops.schemas`, and of its backward pass. With the
expected number of keys :math:`d_i` of a query, its number of allowed keys :math:`m_i`, and the density
:math:`\\rho` of the graph, or of its head, the factor of its rates is

* :math:`\\max(\\rho m_i, 1) / \\max(d_i, \\epsilon m_i)` where the running mean of the head is 0: the keys of a row
  compete;
* :math:`(\\rho / r) \\, (\\bar p / \\bar p)` elsewhere, with the running mean :math:`r` and the mean probability
  :math:`\\bar p` of the sequence, whose numerator is a constant: all pairs of a sequence compete in the gradient.

Not here: the running mean (:mod:`sbm_pyg.sources.following`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..segments import allowed_keys, segments, upcast
from .reach import reach_dot, reach_dot_backward

MIN_MEAN_PROBABILITY = 1e-3
"""Lower bound of mean probabilities, by which probabilities are divided."""


def _means(
    degree: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allowed keys of each query ``[N]``; expected edges ``[H, B]`` and pairs ``[B]`` of each sequence."""
    allowed = (allowed_keys(query_ptr, key_ptr, degree.size(1), is_causal) - int(is_strict)).to(degree.dtype)
    edges, pairs = segments(degree.T.contiguous(), query_ptr).T, segments(allowed, query_ptr)
    return allowed, edges, pairs


def scale_to_density(
    rate: Tensor, member: Tensor, running: Tensor, query_ptr: Tensor, key_ptr: Tensor, density: float,
    densities: Tensor | None, is_causal: bool, is_strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    degree = reach_dot(rate, member, query_ptr, key_ptr, is_causal, is_strict)
    allowed, edges, pairs = _means(degree, query_ptr, key_ptr, is_causal, is_strict)
    mean = (edges / pairs.clamp(min=1)).clamp(min=MIN_MEAN_PROBABILITY)
    running = running.to(degree.dtype)[:, None]
    of_head = density if densities is None else densities.to(degree.dtype)[:, None]
    pooled = of_head / running.clamp(min=MIN_MEAN_PROBABILITY) * (mean / mean)  # NaN in a sequence that is not finite
    pooled = pooled.repeat_interleave(query_ptr.diff(), dim=1, output_size=degree.size(1))
    least = MIN_MEAN_PROBABILITY * allowed.clamp(min=1)
    alone = (of_head * allowed).clamp(min=1) / torch.maximum(degree, least)
    factor = torch.where(running > 0, pooled, alone)
    counts = edges.isfinite()
    statistics = torch.stack([torch.where(counts, edges, 0).sum(1), (counts * pairs).sum(1)])
    return (rate * factor[..., None]).to(rate.dtype), factor, degree, statistics


def scale_to_density_backward(
    grad: Tensor, grad_factor: Tensor | None, rate: Tensor, member: Tensor, running: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, factor: Tensor, degree: Tensor, is_causal: bool, is_strict: bool, need_rate: bool,
    need_member: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slope = (upcast(grad) * rate).sum(-1)
    slope = factor * (slope if grad_factor is None else slope + grad_factor)
    allowed, edges, pairs = _means(degree, query_ptr, key_ptr, is_causal, is_strict)
    mean = edges / pairs.clamp(min=1)
    of_edges = segments(slope.T.contiguous(), query_ptr).T / edges
    pooled = torch.where(mean >= MIN_MEAN_PROBABILITY, of_edges, 0)
    pooled = pooled.repeat_interleave(query_ptr.diff(), dim=1, output_size=degree.size(1))
    alone = torch.where(degree >= MIN_MEAN_PROBABILITY * allowed.clamp(min=1), slope / degree, 0)
    of_degree = -torch.where(running[:, None] > 0, pooled, alone)
    ends = (query_ptr, key_ptr, is_causal, is_strict, need_rate, need_member)
    of_rate, of_member = reach_dot_backward(of_degree, rate, member, *ends)
    if need_rate:
        of_rate = torch.addcmul(of_rate.to(degree.dtype), grad, factor[..., None]).to(rate.dtype)
    return of_rate, of_member
