"""Ops that train indexers by imitation of attention, in plain torch: scores of edges, and the cross-entropy.

In and out: the tensors of ``index_score`` and ``edge_cross_entropy`` in :mod:`sbm_pyg.ops.schemas`. The kernels of
edges that they use are those of this shelf, or of the one that is passed as ``edges``. Not here: the choice of keys by
these scores (``pairs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..segments import edge_row, segment_log_softmax, segments, upcast
from . import edges as reference_edges


def _small_heads(query: Tensor, weight: Tensor, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries of each small head, ``[H, N, D]``, and its weight at each edge, ``[E]``."""
    for small, factor in zip(upcast(query).unbind(2), upcast(weight).unbind(2), strict=True):
        yield small.contiguous(), factor.flatten()[row]


def index_score(
    query: Tensor, weight: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, *, edges: Any = reference_edges
) -> Tensor:
    """Score of each edge, ``[E]``, by a lightning indexer, as in :func:`.pairs.index_top_k`. Cost O(E S D)."""
    row, key, total = edge_row(rowptr, col.numel()), upcast(key), upcast(query).new_zeros(col.numel())
    for small, factor in _small_heads(query, weight, row):
        total = total + torch.relu(edges.edge_dot(small, key, rowptr, col)) * factor
    return total.to(query.dtype)


def index_score_backward(
    grad: Tensor, query: Tensor, weight: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, *,
    edges: Any = reference_edges,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    row, grad, wide = edge_row(rowptr, col.numel()), upcast(grad), upcast(key)
    queries, weights, of_keys = [], [], torch.zeros_like(wide)
    for small, factor in _small_heads(query, weight, row):
        dot = edges.edge_dot(small, wide, rowptr, col)
        slope = torch.where(dot > 0, grad * factor, 0)
        of_query, of_key = edges.edge_dot_backward(slope, small, wide, rowptr, col, True, True)
        queries.append(of_query)
        weights.append(segments(grad * torch.relu(dot), rowptr).view(query.shape[:2]))
        of_keys = of_keys + of_key
    return torch.stack(queries, 2).to(query.dtype), torch.stack(weights, 2).to(weight.dtype), of_keys.to(key.dtype)


def edge_cross_entropy(
    query: Tensor, key: Tensor, log_p: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None, scale: float, *,
    edges: Any = reference_edges,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Cross-entropy of each row ``[H, N]``, and its slope in the logarithm of each edge ``[E]``. Cost O(E C).

    With the attention weights :math:`P_{ij}` over the edges as constants, it is :math:`- \sum_j P_{ij} \log (p_{ij} /
    \sum_{j'} p_{ij'})`. Edges of probability 0 add nothing, and neither do queries without edges. ``log_p`` is known up
    to a number that is the same in a row.
    """
    wide = torch.promote_types(upcast(query).dtype, log_p.dtype)
    logit = edges.edge_dot(query.to(wide), key.to(wide), rowptr, col) * scale
    logit = logit if bias is None else logit + bias.to(wide)
    weight = torch.where(logit == -torch.inf, 0, segment_log_softmax(logit, rowptr).exp())
    possible, log_q = log_p != -torch.inf, segment_log_softmax(log_p.to(wide), rowptr)
    weight = torch.where(possible, weight, 0)
    loss = -segments(torch.where(possible, weight * log_q, 0), rowptr).view(query.shape[:2])
    part = segments(weight, rowptr)[edge_row(rowptr, col.numel())]
    slope = torch.where(possible, log_q.exp() * part - weight, 0)
    return loss.to(upcast(log_p).dtype), slope.to(upcast(log_p).dtype)


def edge_cross_entropy_backward(grad: Tensor, slope: Tensor, rowptr: Tensor) -> Tensor:
    """Gradient of the logarithms, ``[E]``."""
    return slope * grad.flatten()[edge_row(rowptr, slope.numel())]
