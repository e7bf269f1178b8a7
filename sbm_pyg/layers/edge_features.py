"""Attention over edges that have features, which all heads share.

In: tokens ``[N, H, C]``, edges and their features ``[E, D]``. Out: edges sorted by their queries, and attention over
them. Not here: layers (``transformer_conv``, ``propagation``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.nn.dense.linear import Linear

from ..graphs.rows import check_edges, check_ends
from ..ops import schemas
from ..ops.memo import TensorMemo
from ..ops.segments import edge_row
from ..ops.values import can_read_without_sync

_ROWS = TensorMemo()

SortedEdges = tuple[Tensor, Tensor, Tensor | None]
"""Offsets ``[N+1]``, keys ``[E]``, and where the caller has each edge ``[E]``, None if in this order."""


def rows_of(edge_index: Tensor, num_queries: int, num_keys: int) -> SortedEdges:
    """Sort edges ``[2, E]``, which may be repeated, by their queries. Cost O(E + N), once for each tensor.

    A sorted :class:`~torch_geometric.EdgeIndex` stores its order, which is reused.

    Raises:
        TypeError, ValueError: The tensor does not hold edges between these tokens.
    """
    if torch.compiler.is_compiling():
        return _sort(edge_index, num_queries, num_keys)
    return _ROWS.get(_sort, edge_index, num_queries, num_keys)


def _sort(edge_index: Tensor, num_queries: int, num_keys: int) -> SortedEdges:
    key, query, _ = check_edges(edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index, None)
    check_ends({"edge_index[0]": (key, num_keys), "edge_index[1]": (query, num_queries)})
    if isinstance(edge_index, EdgeIndex) and edge_index.is_sorted and edge_index.get_num_cols() == num_queries:
        (rowptr, col), order = edge_index.get_csc()
        return rowptr.long(), col, order
    rowptr, order = schemas.sort_edges(query, num_queries)
    if can_read_without_sync(query) and bool((query[1:] >= query[:-1]).all()):
        return rowptr, key.clone(), None
    return rowptr, key[order], order


def is_plain(lin: Module | None) -> bool:
    """True if a projection of features is a plain matrix product: no adapter, no hooks, and a known width."""
    if not isinstance(lin, Linear) or type(lin).forward is not Linear.forward or lin.in_channels < 0:
        return False
    return not (lin._forward_pre_hooks or lin._forward_hooks)


class _Reorder(torch.autograd.Function):
    """``x[order]`` for a permutation. The backward pass of plain indexing adds gradients, at three times the cost."""

    @staticmethod
    def forward(x: Tensor, order: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


def reorder(x: Tensor | None, order: Tensor | None) -> Tensor | None:
    """Values per edge in the order of the rows; without an order, the values are returned unchanged."""
    if x is None or order is None:
        return x
    return x.index_select(0, order) if torch.compiler.is_compiling() else _Reorder.apply(x, order)


def attend_over_rows(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, scale: float, feature: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over rows that all heads share; projected features of an edge are added to its key and its value.

    Cost O(E H (C + D)) time and O(E (H + D)) memory, since projected features are never stored.

    Args:
        query, key, value: ``[N, H, C]``, ``[M, H, C]`` and ``[M, H, C]``.
        rowptr, col: Offsets of the queries ``[N+1]``, and the key of each edge ``[E]``.
        feature: Features of the edges, ``[E, D]``, or None.
        weight: Projection of the features, ``[H*C, D]``.
        bias: Added to the logits, ``[E, H]``.
        keep: Factor of the weights in the sums, ``[E, H]``, such as dropout.

    Returns:
        The output ``[N, H, C]``, and the weights ``[E, H]`` in float32 or better, before ``keep``.
    """
    if feature is None or weight is None:
        out, _, alpha = schemas.graph_attention(query, key, value, None, None, bias, keep, rowptr, col, scale)
        return out, alpha
    projection = weight.view(query.size(1), query.size(2), -1)  # [H, C, D]
    edge_query = _project(query, projection).to(query.dtype)
    out, mean, alpha = schemas.graph_attention(query, key, value, edge_query, feature, bias, keep, rowptr, col, scale)
    return out + _project(mean, projection.transpose(1, 2)).to(out.dtype), alpha


def _project(tokens: Tensor, projection: Tensor) -> Tensor:
    """``[N, H, C]`` times ``[H, C, D]``, head by head."""
    return (tokens.transpose(0, 1) @ projection).transpose(0, 1)


def attend_with_features(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, scale: float, feature: Tensor,
    weight: Tensor, shared: bool, bias: Tensor | None, keep: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`attend_over_rows`, over a graph with rows for each head, for tokens ``[H, N, C]``.

    Args:
        rowptr, col: Offsets of the queries of all heads ``[H*N+1]``, and the key of each edge ``[E]``.
        feature: ``[E, D]``, or ``[E/H, D]`` with ``shared``.
        shared: Whether all heads have the same edges.
        bias, keep: ``[E]``.

    Returns:
        The output ``[H, N, C]`` and the weights ``[E]``.
    """
    heads = query.size(0)
    if shared:  # heads become channels of a token
        numbers = [x if x is None else x.view(heads, -1).T for x in (bias, keep)]
        tokens = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        rows = rowptr[: query.size(1) + 1], col[: feature.size(0)]
        out, alpha = attend_over_rows(*tokens, *rows, scale, feature, weight, *numbers)
        return out.transpose(0, 1), alpha.T.flatten()
    # Each head has its own edges: tokens of each head are tokens of their own.
    head = torch.div(edge_row(rowptr, col.numel()), query.size(1), rounding_mode="floor")
    numbers = [x if x is None else x[:, None] for x in (bias, keep)]
    projection = weight.view(heads, query.size(2), -1)
    edge_query = (query @ projection).to(query.dtype)
    sides = (x.flatten(0, 1)[:, None] for x in (query, key, value, edge_query))
    rows = rowptr, col + head * key.size(1)
    out, mean, alpha = schemas.graph_attention(*sides, feature, *numbers, *rows, scale)
    out, mean = (x.view(heads, query.size(1), -1) for x in (out, mean))
    return out + (mean @ projection.transpose(1, 2)).to(out.dtype), alpha[:, 0]
