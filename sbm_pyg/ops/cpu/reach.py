"""Sums over the keys that each query may attend to, on the CPU: one pass over a sequence, with a running sum.

In and out: the tensors of ``reach_dot`` in :mod:`sbm_pyg.ops`, and of its backward pass. Not here: the
reference (:mod:`sbm_pyg.ops.reference.reach`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .channels import to_array
from .threads import even_ranges, numba_kernel, run, task_count


@partial(numba_kernel, reorder=True)
def _reach_dots(first, last, query, key, query_ptr, key_ptr, lag, out):
    """Dot products of queries with sums of keys, for pieces ``first .. last-1``, each one sequence of one head."""
    total = np.empty(query.shape[2], np.float64)
    for piece in range(first, last):
        head, b = piece // (query_ptr.size - 1), piece % (query_ptr.size - 1)
        total[:] = 0
        j, shift = key_ptr[b], key_ptr[b] + 1 - lag - query_ptr[b]
        for i in range(query_ptr[b], query_ptr[b + 1]):
            # Add the keys that this query is the first to attend to, then take the dot product.
            while j < min(shift + i, key_ptr[b + 1]):
                for k in range(total.size):
                    total[k] += key[head, j, k]
                j += 1
            dot = 0.0
            for k in range(total.size):
                dot += query[head, i, k] * total[k]
            out[head, i] = dot


@numba_kernel
def _gradients(first, last, grad, query, key, query_ptr, key_ptr, lag, dquery, dkey):
    """Gradients of :func:`_reach_dots` for the same pieces. Gradients of keys are summed from the last query on."""
    total = np.empty(query.shape[2], np.float64)
    for piece in range(first, last):
        head, b = piece // (query_ptr.size - 1), piece % (query_ptr.size - 1)
        j, shift = key_ptr[b], key_ptr[b] + 1 - lag - query_ptr[b]
        # From the first query on, gradients of queries are running sums of the keys.
        if dquery.size:
            total[:] = 0
            for i in range(query_ptr[b], query_ptr[b + 1]):
                while j < min(shift + i, key_ptr[b + 1]):
                    for k in range(total.size):
                        total[k] += key[head, j, k]
                    j += 1
                for k in range(total.size):
                    dquery[head, i, k] = grad[head, i] * total[k]
        # From the last key on, gradients of keys are running sums over the queries that attend to them.
        if dkey.size:
            total[:] = 0
            i = query_ptr[b + 1] - 1
            for j in range(key_ptr[b + 1] - 1, key_ptr[b] - 1, -1):
                while i >= query_ptr[b] and shift + i > j:
                    for k in range(total.size):
                        total[k] += grad[head, i] * query[head, i, k]
                    i -= 1
                for k in range(total.size):
                    dkey[head, j, k] = total[k]


def sequence_pieces(query: np.ndarray, key: np.ndarray, ptr: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of pieces, each one sequence of one head."""
    return even_ranges(query.shape[0] * (ptr.size - 1), task_count(2 * (query.size + key.size), 3))


def to_arrays(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool
) -> tuple[Any, ...]:
    """Arguments of kernels: a query attends to keys whose position plus ``lag`` is at most its own."""
    ptrs = (x.contiguous().numpy() for x in (query_ptr, key_ptr))
    return to_array(query, query), to_array(key, query), *ptrs, int(is_strict) if is_causal else -key.size(1)


def degrees(*arrays: Any) -> np.ndarray:
    """``reach_dot`` of arrays, ``[H, N]``."""
    out = np.empty(arrays[0].shape[:2], arrays[0].dtype)
    run(_reach_dots, [(*piece, *arrays, out) for piece in sequence_pieces(*arrays[:3])])
    return out


def gradients(
    grad: np.ndarray, arrays: tuple[Any, ...], need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``reach_dot_backward`` of arrays; a gradient that is not needed is empty."""
    needed = zip(arrays[:2], (need_query, need_key), strict=True)
    grads = [np.empty(x.shape if need else (0, 0, 0), x.dtype) for x, need in needed]
    run(_gradients, [(*piece, grad, *arrays, *grads) for piece in sequence_pieces(*arrays[:3])])
    return torch.from_numpy(grads[0]), torch.from_numpy(grads[1])


def reach_dot(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool
) -> Tensor:
    return torch.from_numpy(degrees(*to_arrays(query, key, query_ptr, key_ptr, is_causal, is_strict)))


def reach_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool,
    need_query: bool, need_key: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arrays = to_arrays(query, key, query_ptr, key_ptr, is_causal, is_strict)
    dquery, dkey = gradients(to_array(grad, query), arrays, need_query, need_key)
    return dquery.to(query.dtype), dkey.to(key.dtype)
