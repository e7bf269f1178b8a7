"""Attention over blocks on the CPU: blocks are gathered, a few at a time, for torch's own fused attention.

In and out: as ``blocks``, which is the meaning. Not here: dropout, what a bias gets as its gradient, and values of
another width than keys; those go there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import blocks
from .blocks import Cut, Pairs
from .reference import wide

__all__ = ["block_attention", "block_attention_backward", "block_effect"]

GATHERED = 2**22  # bytes of keys and values at a time: they stay in the cache, and their memory is used again
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Group(NamedTuple):
    """Rows with equal numbers of edges and like masks, side by side in the order of :class:`_Plan`."""

    rows: slice
    edges: slice
    degree: int
    kind: int  # 0: all tokens meet; 1: so they do, but the last block is the row's own and causal; 2: each has its mask


class _Plan:
    """Rows in the order of their degrees, and which of them attend together."""

    def __init__(self, rowptr: Tensor, col: Tensor, cuts: tuple[Cut, Cut], is_causal: bool) -> None:
        self.cuts, self.pairs = cuts, Pairs(rowptr, col, cuts, is_causal)
        degree, pairs = rowptr.diff(), self.pairs
        kind = torch.zeros_like(degree)
        if pairs.lag is not None and len(pairs):
            kind = torch.where(degree > 0, (pairs.lag[(rowptr[1:] - 1).clamp(min=0)] == 0).long(), kind)
        if pairs.length is not None:
            short = torch.cat([rowptr.new_zeros(1), (pairs.length < pairs.grain).cumsum(0)])[rowptr].diff()
            kind = torch.where(short > 0, 2, kind)
        code, self.order = (3 * degree + kind).sort(stable=True)
        codes, counts = code.unique_consecutive(return_counts=True)
        self.kinds = [*zip(codes.tolist(), counts.tolist(), strict=True)]
        degree = degree[self.order]
        before = rowptr[self.order] - degree.cumsum(0) + degree
        self.edges = torch.repeat_interleave(before, degree, output_size=len(pairs)) + torch.arange(len(pairs))
        self.places = pairs.key[self.edges]
        self.back = torch.empty_like(self.order).index_copy_(0, self.order, torch.arange(self.order.numel()))

    def groups(self, size: int) -> Iterator[_Group]:
        """All rows that have edges, so many edges at a time, or one row."""
        row = edge = 0
        for code, count in self.kinds:
            degree, kind = divmod(code, 3)
            end, step = row + count, max(1, size // max(degree, 1))
            while degree and row < end:
                rows = min(step, end - row)
                yield _Group(slice(row, row + rows), slice(edge, edge + rows * degree), degree, kind)
                row, edge = row + rows, edge + rows * degree
            row = end

    def ordered(self, x: Tensor) -> Tensor:
        """Blocks of queries ``[H*n, 1, grain, C]``, in this order, in float32 or better."""
        return wide(self.cuts[0].split(x)).index_select(0, self.order)[:, None]

    def join(self, x: Tensor, heads: int) -> Tensor:
        """Tokens ``[H, N, C]`` of blocks of queries in this order."""
        return self.cuts[0].join(x.index_select(0, self.back), heads)

    def gather(self, x: Tensor, group: _Group) -> Tensor:
        """Blocks of keys of the rows of a group, those of a row side by side, ``[r, 1, d * grain, C]``."""
        return x.index_select(0, self.places[group.edges]).view(-1, 1, group.degree * x.size(1), x.size(2))

    def mask(self, group: _Group, bias: Tensor | None, like: Tensor) -> Tensor | None:
        """What is added to the scores, ``[r, 1, grain, d * grain]`` or smaller."""
        grain, allowed = self.pairs.grain, None
        edges = self.edges[group.edges].view(-1, group.degree)
        if group.kind == 1:
            allowed = torch.ones(grain, grain * group.degree, dtype=torch.bool).tril(grain * (group.degree - 1))
        elif group.kind == 2:
            found = self.pairs.allowed(edges)
            allowed = None if found is None else _side_by_side(found.expand(*edges.shape, grain, grain))
        return _added(allowed, None if bias is None else _side_by_side(bias[edges]), like)


def _added(allowed: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to scores of the type of ``like``, so that tokens meet only where that is allowed."""
    bias = None if bias is None else bias.to(like.dtype)
    if allowed is None:
        return bias
    return (like.new_zeros(()) if bias is None else bias).masked_fill(~allowed, -torch.inf)


def _side_by_side(x: Tensor) -> Tensor:
    """``[r, d, grain, grain]`` to ``[r, 1, grain, d * grain]``."""
    return x.transpose(1, 2).flatten(2)[:, None]


def _at_a_time(key: Tensor) -> int:
    """How many blocks of keys ``[n, grain, C]``, and of values."""
    return max(1, GATHERED // max(1, 2 * key[:1].nbytes))


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    grain: int, is_causal: bool, bias: Tensor | None, scale: float, dropout: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if dropout > 0 or value.size(2) != key.size(2):
        return blocks.block_attention(
            query, key, value, rowptr, col, query_ptr, key_ptr, grain, is_causal, bias, scale, dropout, seed
        )
    cuts = blocks.cut_rows(rowptr, query, key, (query_ptr, key_ptr), grain)
    plan = _Plan(rowptr, col, cuts, is_causal)
    q, k, v = plan.ordered(query), wide(cuts[1].split(key)), wide(cuts[1].split(value))
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for group in plan.groups(_at_a_time(k)):
        out[group.rows], lse[group.rows] = _forward(
            q[group.rows], plan.gather(k, group), plan.gather(v, group), attn_mask=plan.mask(group, bias, q),
            scale=scale,
        )  # fmt: skip
    heads = query.size(0)
    return plan.join(out[:, 0], heads).to(value.dtype), plan.join(lse[:, 0, :, None], heads)[..., 0].contiguous()


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grain: int, is_causal: bool, scale: float,
    dropout: float, seed: int, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if need_bias or dropout > 0 or value.size(2) != key.size(2):
        return blocks.block_attention_backward(
            grad_out, query, key, value, rowptr, col, query_ptr, key_ptr, bias, out, lse, grain, is_causal, scale,
            dropout, seed, need_bias,
        )  # fmt: skip
    cuts = blocks.cut_rows(rowptr, query, key, (query_ptr, key_ptr), grain)
    plan = _Plan(rowptr, col, cuts, is_causal)
    q, grad, own, total = (plan.ordered(x) for x in (query, grad_out, out, lse[..., None]))
    theirs = [wide(cuts[1].split(x)) for x in (key, value)]
    d_query = torch.zeros_like(q)
    sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in theirs]
    for group in plan.groups(_at_a_time(theirs[0])):
        rows, places = group.rows, plan.places[group.edges]
        k, v = (plan.gather(x, group) for x in theirs)
        d_query[rows], *rest = _backward(
            grad[rows], q[rows], k, v, own[rows], total[rows][..., 0], 0.0, False,
            attn_mask=plan.mask(group, bias, q), scale=scale,
        )  # fmt: skip
        for each, found in zip(sums, rest, strict=True):
            each.index_add_(0, places, found.reshape(-1, grain, found.size(-1)))
    heads = query.size(0)
    d_key, d_value = (cuts[1].join(x, heads).to(key.dtype) for x in sums)
    return plan.join(d_query[:, 0], heads).to(query.dtype), d_key, d_value, lse.new_empty(0)


def _sums(
    pairs: Pairs, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As :meth:`Pairs.sums`: attention of each pair by itself."""
    if value.size(2) != key.size(2):
        yield from pairs.sums(query, key, value, bias, scale)
        return
    for which in torch.arange(len(pairs)).split(_at_a_time(key)):
        allowed = pairs.allowed(which)
        allowed = None if allowed is None else allowed[:, None]
        added = _added(allowed, None if bias is None else bias[which, None], query)
        places = pairs.row[which], pairs.key[which], pairs.key[which]
        parts = (x.index_select(0, place)[:, None] for x, place in zip((query, key, value), places, strict=True))
        mean, logit = _forward(*parts, attn_mask=added, scale=scale)
        yield which, logit[:, 0], mean[:, 0]


block_effect = partial(blocks.block_effect, sums=_sums)
