"""Attention over a graph that all heads share, with features of its edges, in plain torch.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`; any device, any floating dtype. Tokens are ``[N, H,
C]``, as graph layers have them, and features ``[E, D]`` belong to all heads. Rows may repeat a key, in any order. Not
here: the projections of the features; heads with graphs of their own (:mod:`.edges`).

A map W of features to keys and values would make ``[E, H, C]`` numbers. Instead, with ``edge_query`` u ``[N, H, D]``,
the queries times W, the score of an edge is ``q . k + u . e``. And the mean of the features by the weights, times W, is
what they add to the output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..segments import by_key, edge_row, segment_max, segments, upcast


def sort_edges(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Edges by their rows: offsets ``[num_rows + 1]``, and the numbers of the edges ``[E]``, stably sorted; int64."""
    rising, order = index.sort(stable=True)
    return torch._convert_indices_from_coo_to_csr(rising, num_rows), order


def _edge_dots(x: Tensor, y: Tensor, row: Tensor, end: Tensor | None) -> Tensor:
    """Dot products ``[E, H]`` of rows of ``[N, H, C]`` with rows of another, or with features ``[E, D]``."""
    other = upcast(y)[:, None] if end is None else upcast(y)[end]
    return (upcast(x)[row] * other).sum(-1)


def graph_attention(
    query: Tensor, key: Tensor, value: Tensor, edge_query: Tensor | None, feature: Tensor | None, bias: Tensor | None,
    keep: Tensor | None, rowptr: Tensor, col: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output ``[N, H, C']``, the mean features ``[N, H, D]``, and the weights ``[E, H]``, in float32 or better.

    Bias and ``keep``, the factor of dropout, are ``[E, H]``; weights are those before ``keep``. Without features D = 0.
    """
    row, end = edge_row(rowptr, col.numel()), col.long()
    logit = _edge_dots(query, key, row, end)
    if edge_query is not None and feature is not None:
        logit = logit + _edge_dots(edge_query, feature, row, None)
    logit = logit * scale if bias is None else logit * scale + upcast(bias)
    heads = torch.arange(query.size(1), device=row.device)
    slot = (row[:, None] * query.size(1) + heads).flatten()
    top = segment_max(logit.flatten(), slot, query.size(0) * query.size(1)).view(query.shape[:2])
    weight = (logit - torch.where(top == -math.inf, 0, top)[row]).exp()
    total = segments(weight, rowptr)
    weight = weight / torch.where(total == 0, 1, total)[row]
    share = weight if keep is None else weight * upcast(keep)
    out = segments(share[..., None] * upcast(value)[end], rowptr).to(value.dtype)
    mean = query.new_empty(*query.shape[:2], 0)
    if feature is not None:
        mean = segments(share[..., None] * upcast(feature)[:, None], rowptr).to(query.dtype)
    return out, mean, weight


def graph_attention_backward(
    grad_out: Tensor, grad_mean: Tensor | None, grad_weight: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    edge_query: Tensor | None, feature: Tensor | None, keep: Tensor | None, rowptr: Tensor, col: Tensor,
    weight: Tensor, scale: float, need_feature: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, ``edge_query``, features and bias; ``grad_mean`` comes with features."""
    row, end, alpha = edge_row(rowptr, col.numel()), col.long(), upcast(weight)
    gain = _edge_dots(grad_out, value, row, end)
    if feature is not None and grad_mean is not None:
        gain = gain + _edge_dots(grad_mean, feature, row, None)
    share = alpha if keep is None else alpha * upcast(keep)
    gain = gain if keep is None else gain * upcast(keep)
    gain = gain if grad_weight is None else gain + upcast(grad_weight)
    dlogit = alpha * (gain - segments(alpha * gain, rowptr)[row])
    slope = (dlogit * scale)[..., None]
    order, ptr, rows = by_key(rowptr, col, 1, key.size(0))
    dquery = segments(slope * upcast(key)[end], rowptr).to(query.dtype)
    dkey = segments(slope[order] * upcast(query)[rows], ptr).to(key.dtype)
    dvalue = segments(share[order][..., None] * upcast(grad_out)[rows], ptr).to(value.dtype)
    dedge_query = query.new_empty(*query.shape[:2], 0)
    dfeature = query.new_empty(0, 0 if feature is None else feature.size(1))
    if feature is not None and edge_query is not None and grad_mean is not None:
        dedge_query = segments(slope * upcast(feature)[:, None], rowptr).to(query.dtype)
        if need_feature:
            both = slope * upcast(edge_query)[row] + share[..., None] * upcast(grad_mean)[row]
            dfeature = both.sum(1).to(feature.dtype)
    return dquery, dkey, dvalue, dedge_query, dfeature, dlogit.to(query.dtype)
