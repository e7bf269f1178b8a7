"""Rates that are scaled to a target density, on the CPU: two passes over the memberships of a sequence.

In and out: the tensors of ``scale_to_density`` in :mod:`sbm_pyg.ops.schemas`, and of its backward pass. Not here: the
law of the factors (:mod:`sbm_pyg.ops.reference.density`), and the expected numbers of keys (:mod:`.reach`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..reference.density import MIN_MEAN_PROBABILITY
from . import reach
from .channels import to_array
from .threads import numba_kernel, run


@partial(numba_kernel, reorder=True)
def _scale_rates(
    first, last, rate, query_ptr, key_ptr, lag, degree, running, density, least, scaled, factor, edges, pairs
):  # fmt: skip
    """Scale the rates of pieces ``first .. last-1``, each one sequence of one head. NaN fails every comparison."""
    for piece in range(first, last):
        head, b = piece // (query_ptr.size - 1), piece % (query_ptr.size - 1)
        keys, shift = key_ptr[b + 1] - key_ptr[b], 1 - lag - query_ptr[b]
        # Sum up the expected edges and the pairs of the sequence, for the running mean.
        sum_edges, sum_pairs = 0.0, 0
        for i in range(query_ptr[b], query_ptr[b + 1]):
            sum_edges += degree[head, i]
            sum_pairs += min(shift + i, keys)
        edges[head, b], pairs[head, b] = sum_edges, sum_pairs
        # Once the head has a running mean of its density, all its queries share one factor.
        mean = sum_edges / max(sum_pairs, 1)
        pooled = density[head] / max(running[head], least) * (mean / mean if mean > least or mean != mean else 1.0)
        for i in range(query_ptr[b], query_ptr[b + 1]):
            # Before that each query gets its own factor.
            allowed, number = min(shift + i, keys), pooled
            if not running[head] > 0:
                floor = least * max(allowed, 1)
                number = max(density[head] * allowed, 1.0) / (floor if degree[head, i] < floor else degree[head, i])
            factor[head, i] = number
            for k in range(rate.shape[2]):
                scaled[head, i, k] = rate[head, i, k] * factor[head, i]


@partial(numba_kernel, reorder=True)
def _degree_gradients(
    first, last, grad, grad_factor, rate, query_ptr, key_ptr, lag, degree, factor, running, least, of_degree
):  # fmt: skip
    for piece in range(first, last):
        head, b = piece // (query_ptr.size - 1), piece % (query_ptr.size - 1)
        keys, shift = key_ptr[b + 1] - key_ptr[b], 1 - lag - query_ptr[b]
        sum_slopes, sum_edges, sum_pairs = 0.0, 0.0, 0
        for i in range(query_ptr[b], query_ptr[b + 1]):
            # Compute the gradient of the query's factor, times the factor.
            slope, allowed = 0.0, min(shift + i, keys)
            for k in range(rate.shape[2]):
                slope += grad[head, i, k] * rate[head, i, k]
            if grad_factor.size:
                slope += grad_factor[head, i]
            slope *= factor[head, i]
            sum_slopes += slope
            sum_edges += degree[head, i]
            sum_pairs += allowed
            # It reaches the query's own expected number of keys, unless a floor stands in for it.
            counts = degree[head, i] >= least * max(allowed, 1)
            of_degree[head, i] = -slope / degree[head, i] if counts else 0.0
        # Where one factor serves the head, it reaches the mean of the sequence instead.
        if running[head] > 0:
            pooled = -sum_slopes / sum_edges if sum_edges / max(sum_pairs, 1) >= least else 0.0
            of_degree[head, query_ptr[b] : query_ptr[b + 1]] = pooled


def scale_to_density(
    rate: Tensor, member: Tensor, running: Tensor, query_ptr: Tensor, key_ptr: Tensor, density: float,
    densities: Tensor | None, is_causal: bool, is_strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    arrays = reach.to_arrays(rate, member, query_ptr, key_ptr, is_causal, is_strict)
    degree, (rates, _, *sides) = reach.degrees(*arrays), arrays
    sums = np.empty((2, rate.size(0), query_ptr.numel() - 1))
    scaled, factor, means = np.empty_like(rates), np.empty_like(degree), running.double().numpy()
    density_of_heads = np.full(rate.size(0), density) if densities is None else densities.double().numpy()
    arguments = (rates, *sides, degree, means, density_of_heads, MIN_MEAN_PROBABILITY, scaled, factor, *sums)
    run(_scale_rates, [(*piece, *arguments) for piece in reach.sequence_pieces(*arrays[:3])])
    statistics = np.where(np.isfinite(sums[0]), sums, 0).sum(2).astype(degree.dtype)
    more = torch.from_numpy(factor), torch.from_numpy(degree), torch.from_numpy(statistics)
    return torch.from_numpy(scaled).to(rate.dtype), *more


def scale_to_density_backward(
    grad: Tensor, grad_factor: Tensor | None, rate: Tensor, member: Tensor, running: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, factor: Tensor, degree: Tensor, is_causal: bool, is_strict: bool, need_rate: bool,
    need_member: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arrays = reach.to_arrays(rate, member, query_ptr, key_ptr, is_causal, is_strict)
    of_degree = np.empty(degree.shape, degree.numpy().dtype)
    more = (degree.numpy(), factor.numpy(), running.double().numpy(), MIN_MEAN_PROBABILITY, of_degree)
    arguments = (
        to_array(grad, rate),
        to_array(grad_factor, rate).reshape(-1, rate.size(1)),
        arrays[0],
        *arrays[2:],
        *more,
    )
    run(_degree_gradients, [(*piece, *arguments) for piece in reach.sequence_pieces(*arrays[:3])])
    of_rate, of_member = reach.gradients(of_degree, arrays, need_rate, need_member)
    if need_rate:
        of_rate.addcmul_(torch.from_numpy(arguments[0]), factor[..., None])
    return of_rate.to(rate.dtype), of_member.to(member.dtype)
