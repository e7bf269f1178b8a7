"""Attention over blocks of tokens in plain torch: the reference of the ops over blocks, which runs on any device.

In: tokens of all heads, and compressed rows over their blocks. Out: tokens, or numbers for each pair of blocks. Not
here: rows over single tokens (:mod:`.edges`), and the choice of blocks.

Each sequence is cut into blocks of ``block_size`` tokens from its beginning; its last block may be shorter. Row
``h * n + I`` of ``rowptr`` [H*n+1] holds the key blocks ``col`` [E] of query block I, ascending. In causal graphs a
block meets itself by the tokens that are not later, and no later block. Attention of a row is that over each of its
blocks alone, weighted by the sums of the block's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..random_words import dropout_keeps, dropout_words
from ..segments import Rows, edge_row, segments, upcast
from ..tiles import Cut, cut_rows
from .effects import find_edges, leave_one_out

SCORES_PER_CHUNK = 2**18
"""Scores of pairs of tokens that are held at a time."""
DropoutFactors = Callable[[Tensor, Tensor], Tensor]
"""From query blocks and key blocks ``[e]`` to the factors of their weights, ``[e, block_size, block_size]``."""


class Pairs:
    """Pairs of a query block and a key block, and the pairs of tokens in them that may attend.

    Args:
        rowptr, col: The pairs, in compressed rows.
        cuts: Cuts of queries and of keys.
        is_causal: No query attends to a later key.
    """

    def __init__(self, rowptr: Tensor, col: Tensor, cuts: tuple[Cut, Cut], is_causal: bool) -> None:
        query, key = cuts
        self.row, col = edge_row(rowptr, col.numel()), col.long()  # [E], among the blocks of all heads, as `key`
        self.key = torch.div(self.row, query.count, rounding_mode="floor") * key.count + col
        self.block_size = query.block_size
        self.length = None if key.whole else key.length[col]  # [E] tokens of the key block
        self.lag = query.position[self.row % query.count] - key.position[col] if is_causal else None  # [E] blocks

    def __len__(self) -> int:
        return self.row.numel()

    def allowed(self, which: Tensor) -> Tensor | None:
        """Mask of the tokens that attend in some pairs, broadcast to ``[..., block_size, block_size]``; None: all."""
        slot, mask = torch.arange(self.block_size, device=which.device), None
        if self.length is not None:
            mask = (slot < self.length[which][..., None])[..., None, :]
        if self.lag is not None:
            early = slot <= slot[:, None] + self.block_size * self.lag[which][..., None, None]
            mask = early if mask is None else mask & early
        return mask

    def scores(
        self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Iterate over the scores of all tokens, a few pairs of blocks at a time, in float32 or better.

        Yields:
            Pairs ``[e]``, their query blocks and key blocks ``[e]``, and scores ``[e, block_size, block_size]``.
        """
        all_pairs, chunk = torch.arange(len(self), device=self.row.device), SCORES_PER_CHUNK // self.block_size**2
        for which in all_pairs.split(max(1, chunk)):
            row, block = self.row[which], self.key[which]
            score = torch.bmm(query[row], key[block].mT).mul_(scale)
            score = score if bias is None else score.add_(bias[which])
            allowed = self.allowed(which)
            score = score if allowed is None else score.masked_fill_(~allowed, -torch.inf)
            yield which, row, block, score

    def sums(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float,
        keep: DropoutFactors | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """Attention of each query over the tokens of one key block, for a few pairs of blocks at a time.

        Args:
            keep: Factors of dropout, or None.

        Yields:
            Pairs ``[e]``; the logarithm of the summed weights, ``[e, block_size]``; and the mean of the values, ``[e,
            block_size, C']``.
        """
        for which, row, block, score in self.scores(query, key, bias, scale):
            top = score.amax(-1, keepdim=True).clamp_(min=torch.finfo(score.dtype).min)
            weight = score.sub_(top).exp_()
            mass = weight.sum(-1, keepdim=True)
            logit = (top + mass.log())[..., 0]
            weight = weight if keep is None else weight.mul_(keep(row, block))
            yield which, logit, torch.bmm(weight, value[block]).div_(mass.clamp_(min=torch.finfo(mass.dtype).tiny))


def _normalize(logit: Tensor, row: Tensor, rowptr: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the pairs of each row, ``[E, block_size]``, and the log of their sum, ``[rows, block_size]``."""
    index = row[:, None].expand_as(logit)
    top = logit.new_full((rowptr.numel() - 1, logit.size(1)), -math.inf).scatter_reduce(0, index, logit, "amax")
    top = top.clamp(min=torch.finfo(top.dtype).min)
    weight = (logit - top[row]).exp()
    total = segments(weight, rowptr)
    return weight / total[row].clamp(min=torch.finfo(top.dtype).tiny), top + total.log()


def _dropout_factors(
    cuts: tuple[Cut, Cut], heads: int, dropout: float, seed: int, like: Tensor
) -> DropoutFactors | None:
    """Factors of the weights of pairs of blocks: 0 for dropped pairs, else ``1 / (1 - dropout)``. None: no dropout."""
    if dropout == 0:
        return None
    words = dropout_words(heads, cuts[0].total, cuts[1].total, seed, cuts[0].ptr.device)
    query, key = (cut.split(word[..., None])[..., 0] for cut, word in zip(cuts, words, strict=True))

    def keep(row: Tensor, block: Tensor) -> Tensor:
        return dropout_keeps(query[row][:, :, None], key[block][:, None], dropout).to(like.dtype) / (1 - dropout)

    return keep


def _split_tokens(cuts: tuple[Cut, Cut], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return upcast(cuts[0].split(query)), upcast(cuts[1].split(key)), upcast(cuts[1].split(value))


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, bias: Tensor | None, scale: float, dropout: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    pairs = Pairs(rowptr, col, cuts, is_causal)
    blocks = _split_tokens(cuts, query, key, value)
    logit = blocks[0].new_empty(len(pairs), block_size)
    mean = logit.new_empty(*logit.shape, value.size(2))
    for which, *numbers in pairs.sums(
        *blocks, bias, scale, _dropout_factors(cuts, query.size(0), dropout, seed, logit)
    ):
        logit[which], mean[which] = numbers
    weight, total = _normalize(logit, pairs.row, rowptr)
    out = segments(weight[..., None] * mean, rowptr)
    heads = query.size(0)
    return cuts[0].join(out, heads).to(value.dtype), cuts[0].join(total[..., None], heads)[..., 0].contiguous()


def block_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, block_size: int, is_causal: bool, scale: float,
    dropout: float, seed: int, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    pairs = Pairs(rowptr, col, cuts, is_causal)
    q, k, v = _split_tokens(cuts, query, key, value)
    grad = upcast(cuts[0].split(grad_out))
    total = cuts[0].split(lse[..., None])[..., 0]  # [rows, block_size]
    total = total.masked_fill(total == -torch.inf, 0)  # rows without a key, whose scores are all -inf
    mean = (grad * upcast(cuts[0].split(out))).sum(-1, keepdim=True)  # gain of each row
    grads, keep = [torch.zeros_like(x) for x in (q, k, v)], _dropout_factors(cuts, query.size(0), dropout, seed, q)
    grad_bias = [q.new_empty(0)]
    for _, row, block, score in pairs.scores(q, k, bias, scale):
        weight = score.sub_(total[row][..., None]).exp_()
        gain, share = torch.bmm(grad[row], v[block].mT), weight
        if keep is not None:
            factor = keep(row, block)
            gain, share = gain * factor, weight * factor
        grads[2].index_add_(0, block, torch.bmm(share.mT, grad[row]))
        change = weight * (gain - mean[row])
        grads[0].index_add_(0, row, torch.bmm(change, k[block]) * scale)
        grads[1].index_add_(0, block, torch.bmm(change.mT, q[row]) * scale)
        if need_bias:
            grad_bias.append(change.flatten())
    heads = query.size(0)
    joined = (cut.join(x, heads) for cut, x in zip((cuts[0], cuts[1], cuts[1]), grads, strict=True))
    d_query, d_key, d_value = (x.to(like.dtype) for x, like in zip(joined, (query, key, value), strict=True))
    if bias is None or not need_bias:
        return d_query, d_key, d_value, lse.new_empty(0)
    return d_query, d_key, d_value, torch.cat(grad_bias).view(-1, block_size, block_size).to(bias.dtype)


def pair_gains(
    tokens: tuple[Tensor, ...], sets: Sequence[Rows], cuts: tuple[Cut, Cut], is_causal: bool, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Attention over each key block alone: the logarithm of the summed weights and the mean gain, ``[E, block_size]``.

    Args:
        tokens: Gradient of the output, queries, keys and values.
        sets: Pairs of blocks.
    """
    grad, blocks, logits_and_gains = upcast(cuts[0].split(tokens[0])), _split_tokens(cuts, *tokens[1:]), []
    for rowptr, col, bias in sets:
        pairs = Pairs(rowptr, col, cuts, is_causal)
        logit, gain = (grad.new_empty(len(pairs), cuts[0].block_size) for _ in range(2))
        for which, logit[which], mean in pairs.sums(*blocks, bias, scale):
            gain[which] = (mean * grad.index_select(0, pairs.row[which])).sum(-1)
        logits_and_gains.append((logit, gain))
    return logits_and_gains


def block_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, scale: float, *, compute_gains: Callable = pair_gains,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The effect of each pair of blocks ``[E]``, and of each probe ``[E']``: ``edge_effect``, summed over its queries.

    For one query a block of keys J is one edge, with weight :math:`W_{iJ} = \sum_{j \in J} w_{ij}` and as gain the mean
    of its gains by their weights. With sums over the other blocks L of the row,

    .. math::
        \Delta_{IJ} = \sum_{i \in I} \frac{W_{iJ}}{W_{iJ} + \sum W_{iL}} \Big( G_{iJ} - \frac{\sum W_{iL} G_{iL}}
        {\sum W_{iL}} \Big) .
    """
    cuts = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size)
    sets = Rows(rowptr, col, bias), Rows(probe_rowptr, probe_col, probe_bias)
    logits_and_gains = compute_gains((grad_out, query, key, value), sets, cuts, is_causal, scale)
    rows = (edge_row(pointer, keys.numel()) for pointer, keys, _ in sets)
    edges, probes = ((row, *numbers) for row, numbers in zip(rows, logits_and_gains, strict=True))
    is_edge = find_edges(edges[0] * cuts[1].count + col, probes[0] * cuts[1].count + probe_col)
    effect, probe_effect = leave_one_out(rowptr, edges, probes, is_edge)
    return effect.sum(-1).to(query.dtype), probe_effect.sum(-1).to(query.dtype)


def block_weight(
    query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None, query_ptr: Tensor, key_ptr: Tensor,
    block_size: int, is_causal: bool, scale: float, *, compute_gains: Callable = pair_gains,
) -> Tensor:  # fmt: skip
    """Weights of ``block_attention``, summed over the tokens of each pair of blocks, ``[E]``, without gradient."""
    cuts, row = cut_rows(rowptr, query, key, (query_ptr, key_ptr), block_size), edge_row(rowptr, col.numel())
    nothing = query[..., :0], query, key, key[..., :0]  # no values, so no gains
    ((logit, _),) = compute_gains(nothing, [Rows(rowptr, col, bias)], cuts, is_causal, scale)
    weight, _ = _normalize(logit, row, rowptr)
    real = torch.arange(block_size, device=col.device) < cuts[0].length[row % cuts[0].count][:, None]
    return weight.masked_fill(~real, 0).sum(-1).to(query.dtype)
