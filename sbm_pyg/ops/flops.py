"""Floating point operations of each op, for the counter of torch.

That counter, ``torch.utils.flop_counter.FlopCounterMode``, knows torch's own ops alone. In: the arguments of an op, as
in its schema. Out: floating point operations, for each op of the same name. Not here: time and memory.

The conventions are torch's: a multiplication and its addition are 2; exponentials, comparisons, random words, and what
is done once per token or once per edge without a sum over channels, are 0 (so ``segment_entmax`` is 0, as softmax is).
Attention over a full graph therefore counts as much as the matrix products of dense attention do, forward and backward.
E counts the edges of the given graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .reference import sampling as reference_sampling
from .reference import segments as reference_segments

__all__ = [
    "block_attention", "block_attention_backward", "block_effect", "block_weight", "edge_attention",
    "edge_attention_backward", "edge_dot", "edge_dot_backward", "edge_effect", "reach_dot", "reach_dot_backward",
    "sample_sbm",
]  # fmt: skip


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, *, out_val: Any = None) -> int:
    """2 E K."""
    return 2 * col.numel() * query.size(-1)


def edge_dot_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    rowptr: Tensor,
    col: Tensor,
    need_query: bool,
    need_key: bool,
    *,
    out_val: Any = None,
) -> int:
    """2 E K for each side that needs its gradient."""
    return 2 * col.numel() * query.size(-1) * (need_query + need_key)


def reach_dot(query: Tensor, *_: Any, out_val: Any = None) -> int:
    """2 H N K; sums over tokens alone are 0."""
    return 2 * query.numel()


def reach_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool,
    need_query: bool, need_key: bool, *, out_val: Any = None,
) -> int:  # fmt: skip
    """2 H N K for each side that needs its gradient."""
    return 2 * query.numel() * (need_query + need_key)


def edge_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, *_: Any, out_val: Any = None
) -> int:
    """2 E (C + C'): scores, and the sum of values."""
    return 2 * col.numel() * (query.size(-1) + value.size(-1))


def edge_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    *_: Any,
    out_val: Any = None,
) -> int:
    """2 E (3 C + 2 C'): scores again, gradients to queries and keys; gains, gradients to values."""
    return 2 * col.numel() * (3 * query.size(-1) + 2 * value.size(-1))


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, *_: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """2 E block_size^2 (C + C'): all tokens of two blocks, and slots without a token."""
    return 2 * col.numel() * block_size**2 * (query.size(-1) + value.size(-1))


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, block_size: int, *_: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """2 E block_size^2 (3 C + 2 C')."""
    return 2 * col.numel() * block_size**2 * (3 * query.size(-1) + 2 * value.size(-1))


def block_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, *_: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """2 (E + E') block_size (block_size (C + C') + C'): attention of each pair of blocks, and the gains of its rows."""
    each = block_size * (query.size(-1) + value.size(-1)) + value.size(-1)
    return 2 * (col.numel() + probe_col.numel()) * block_size * each


def block_weight(
    query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, *_: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """2 E block_size^2 C."""
    return 2 * col.numel() * block_size**2 * query.size(-1)


def edge_effect(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    bias: Tensor | None,
    probe_rowptr: Tensor,
    probe_col: Tensor,
    probe_bias: Tensor | None = None,
    scale: float = 1.0,
    rate: Tensor | None = None,
    *_: Any,
    out_val: Any = None,
) -> int:
    """2 (E + E') (C + C'): score and gain of each edge and each probe; with factors 2 (E + E') K more."""
    width = query.size(-1) + value.size(-1) + (0 if rate is None else rate.size(-1))
    return 2 * (col.numel() + probe_col.numel()) * width


def sample_sbm(
    rate: Tensor,
    member: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
    is_causal: bool,
    *,
    out_val: Any = None,
) -> int:
    """2 K for each pair whose probability is computed, and 4 H N K for the plan of the rows.

    The plan needs expected degrees and bounds. It tells, before anything is drawn, for how many pairs a probability is
    computed: all keys of rows by pairs, else the expected number of proposals (none with ``"fastrg"``, which
    takes proposals as they come). Where there are no values to plan by (fake tensors), only the edges count, which is
    the least it can be.
    """
    heads, num_queries, blocks = rate.shape
    if is_fake(rate) or rate.is_meta:
        return 2 * blocks * (2 * heads * num_queries + out_val[1].numel())
    pairs = 0.0
    allowed = reference_segments.allowed_keys(query_ptr, key_ptr, num_queries, is_causal)
    offsets = zip(query_ptr.tolist(), query_ptr.tolist()[1:], key_ptr.tolist(), key_ptr.tolist()[1:], strict=False)
    for start, end, first, last in offsets:
        rates, members = rate[:, start:end].detach().double(), member[:, first:last].detach().double()
        keys = allowed[start:end]
        bound = (rates * members.cummax(1).values[:, keys - 1]).sum(-1) + exploration
        expected = (rates * members.cumsum(1)[:, keys - 1]).sum(-1) + exploration * keys
        plan = reference_sampling.plan_rows(expected, bound, keys, method)
        proposals = torch.zeros_like(expected) if method == "fastrg" else plan.proposals
        tried = torch.where(plan.way == reference_sampling.GAPS, plan.landings, proposals)
        pairs += float(torch.where(plan.way == reference_sampling.PAIRS, keys.double(), tried).sum())
    return 2 * blocks * (2 * heads * num_queries + round(pairs))
