"""Attention over edges in plain torch: the reference that each kernel is tested against.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`; any device, any floating dtype. All rows are
computed at once: no loop over heads, sequences or rows, few operations, and few waits for the device (docs/kernels.md).
Not here: checks of the arguments, which the public ops make.

Shapes: N queries, M keys, E edges, H heads, C channels; row ``r = h * N + i``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..random_words import dropout_keeps, dropout_words
from ..segments import by_key, edge_row, segment_max, segments, upcast


def dropout_mask(rowptr: Tensor, col: Tensor, heads: int, num_keys: int, dropout: float, seed: int) -> Tensor:
    """Edges that attention dropout keeps, ``[E]`` bool, by :func:`dropout_keeps`."""
    num_queries = (rowptr.numel() - 1) // max(heads, 1)
    query, key = dropout_words(heads, num_queries, num_keys, seed, col.device)
    row = edge_row(rowptr, col.numel())
    end = torch.div(row, max(num_queries, 1), rounding_mode="floor") * num_keys + col
    return dropout_keeps(query.flatten()[row], key.flatten()[end], dropout)


def edge_ends(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Row of the query and row of the key of each edge, in tensors flattened over heads."""
    row = edge_row(rowptr, col.numel())
    return row, torch.div(row, query.size(1), rounding_mode="floor") * key.size(1) + col


def row_dots(x: Tensor, y: Tensor, row: Tensor, end: Tensor) -> Tensor:
    """Dot products of rows of two tensors that are flattened over heads, in float32 or better."""
    return (upcast(x).flatten(0, 1)[row] * upcast(y).flatten(0, 1)[end]).sum(-1)


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    return row_dots(query, key, *edge_ends(query, key, rowptr, col)).to(query.dtype)


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    _, end = edge_ends(query, key, rowptr, col)
    weight, flat_query, flat_key = upcast(grad)[:, None], upcast(query).flatten(0, 1), upcast(key).flatten(0, 1)
    grad_query, grad_key = torch.zeros_like(query), torch.zeros_like(key)
    if need_query:
        grad_query = segments(weight * flat_key[end], rowptr).view(query.shape).to(query.dtype)
    if need_key:
        order, ptr, rows = by_key(rowptr, col, *key.shape[:2])
        grad_key = segments(weight[order] * flat_query[rows], ptr).view(key.shape).to(key.dtype)
    return grad_query, grad_key


def apply_gate_and_bias(score: Tensor, gate: Tensor | None, bias: Tensor | None, gate_form: str) -> Tensor:
    """Logits of scaled scores, a "weight" gate as its logarithm, in float32 or better."""
    logit = upcast(score)
    if gate is not None:
        logit = upcast(gate) * logit if gate_form == "score" else logit + upcast(gate).log()
    return logit if bias is None else logit + upcast(bias)


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None, bias: Tensor | None,
    scale: float, gate_form: str, dropout: float, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, num_queries = query.shape[:2]
    rows = heads * num_queries
    row, end = edge_ends(query, key, rowptr, col)
    logit = apply_gate_and_bias(row_dots(query, key, row, end) * scale, gate, bias, gate_form)
    top = segment_max(logit, row, rows)
    top = torch.where(top == -math.inf, 0, top)  # a row whose edges are all forbidden has no edges
    weight = (logit - top[row]).exp()
    total = segments(weight, rowptr)
    alpha = weight / torch.where(total == 0, 1, total)[row]
    if dropout > 0:
        alpha = alpha * dropout_mask(rowptr, col, heads, key.size(1), dropout, seed) / (1 - dropout)
    values = upcast(value).flatten(0, 1)
    out = segments(alpha[:, None] * values[end], rowptr)
    lse = torch.where(total > 0, top + total.log(), torch.where(total.isnan(), total, -math.inf))
    return out.view(heads, num_queries, -1).to(value.dtype), lse.view(heads, num_queries)


def edge_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, gate: Tensor | None,
    bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, gate_form: str, dropout: float, seed: int,
    need_gate: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    row, end = edge_ends(query, key, rowptr, col)
    score = row_dots(query, key, row, end) * scale
    logit = apply_gate_and_bias(score, gate, bias, gate_form)
    alpha = torch.where(logit == -math.inf, 0, (logit - lse.flatten()[row]).exp())
    flat_grad, flat_query, flat_key = (upcast(x).flatten(0, 1) for x in (grad_out, query, key))
    gain = row_dots(grad_out, value, row, end)
    share = alpha
    if dropout > 0:
        keep = dropout_mask(rowptr, col, query.size(0), key.size(1), dropout, seed).to(alpha.dtype) / (1 - dropout)
        gain, share = gain * keep, alpha * keep
    mean_gain = (flat_grad * upcast(out).flatten(0, 1)).sum(-1)
    grad_logit = alpha * (gain - mean_gain[row])
    grad_score = grad_logit * scale if gate is None or gate_form == "weight" else grad_logit * scale * upcast(gate)
    grad_query = segments(grad_score[:, None] * flat_key[end], rowptr)
    order, ptr, rows = by_key(rowptr, col, *key.shape[:2])
    grad_key = segments(grad_score[order][:, None] * flat_query[rows], ptr)
    grad_value = segments(share[order][:, None] * flat_grad[rows], ptr)
    grad_gate, grad_bias = (grad_logit.new_empty(0) for _ in range(2))
    if gate is not None and need_gate:
        grad_gate = (grad_logit * score if gate_form == "score" else grad_logit / upcast(gate)).to(gate.dtype)
    if bias is not None and need_bias:
        grad_bias = grad_logit.to(bias.dtype, copy=True)
    return (
        grad_query.view(query.shape).to(query.dtype),
        grad_key.view(key.shape).to(key.dtype),
        grad_value.view(value.shape).to(value.dtype),
        grad_gate,
        grad_bias,
    )
