"""Attention over all pairs with a score bias that learns, by rows, in plain torch on every device.

In: padded queries, keys and values, and numbers of each token from which the biases of pairs follow. Out: tokens. Not
here: attention over all pairs without such a bias, which torch has, and ragged tokens (``sources.dense``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .segments import upcast

PairFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Differentiable function of numbers of queries ``[*, L, D]`` and of keys ``[*, S, D']`` to biases of their pairs,
``[*, L, S]``. It reads nothing else that learns."""
Step: TypeAlias = tuple[slice, slice, slice]
"""Maps, rows and keys."""
PAIRS_PER_STEP = {"cpu": 2**19}
"""Pairs that are computed at a time, by the type of the device: as many as fit the cache of a core."""
PAIRS_PER_LAUNCH = 2**24
"""Pairs that are computed at a time on other devices."""


def attend_by_rows(
    query: Tensor, key: Tensor, value: Tensor, of_query: Tensor, of_key: Tensor, *, of_pairs: PairFunction,
    scale: float, is_causal: bool, mask: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention over padded sequences with a learned score bias of all pairs, ``[B, H, L, C']``.

    Scores, biases and weights are computed for some rows at a time, and again in the backward pass, in float32 or
    better. So memory is O(B H (L + S) (C + D)) and a fixed number of pairs; torch's attention would store some arrays
    of all pairs. Time is O(B H L S (C + D)).

    Args:
        query, key, value: ``[B, H, L, C]``, ``[B, H, S, C]`` and ``[B, H, S, C']``.
        of_query, of_key: Numbers of queries and of keys, ``[B, H, L, D]`` and ``[B, H, S, D']``.
        of_pairs: Function of both to the biases.
        scale: Factor of the scores.
        is_causal: No query attends to a later key.
        mask: True at real keys, ``[B, 1, 1, S]``. None: all are real.
        dropout: Probability that a weight is dropped, by torch's default generator.
    """
    vectors = [upcast(x).flatten(0, 1) for x in (query, key, value, of_query, of_key)]
    if mask is not None:
        mask = mask.expand(-1, query.size(1), -1, -1).flatten(0, 1)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = RowAttention.apply(*vectors, mask, of_pairs, scale, is_causal, dropout, seed)
    return out.to(value.dtype).unflatten(0, query.shape[:2])


class RowAttention(torch.autograd.Function):
    """The attention of G maps, each that of a head in a sequence, ``[G, L, C']``."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, of_query: Tensor, of_key: Tensor, mask: Tensor | None,
        of_pairs: PairFunction, scale: float, is_causal: bool, dropout: float, seed: int,
    ) -> Tensor:  # fmt: skip
        out = query.new_empty(*query.shape[:2], value.size(2))
        for number, (maps, rows, keys) in enumerate(_steps(query, key, is_causal)):
            bias = of_pairs(of_query[maps, rows], of_key[maps, keys])
            weight = _weights(query, key, bias, mask, scale, is_causal, (maps, rows, keys))
            if dropout:
                weight *= _redrawn_factor(weight, dropout, seed + number)
            out[maps, rows] = weight @ value[maps, keys]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:6], output)
        ctx.options = inputs[6:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, of_query, of_key, mask, out = ctx.saved_tensors
        of_pairs, scale, is_causal, dropout, seed = ctx.options
        dquery, dof_query = torch.empty_like(query), torch.empty_like(of_query)
        dkey, dvalue, dof_key = (torch.zeros_like(x) for x in (key, value, of_key))
        mean_gain = (grad * out).sum(2, keepdim=True)
        with torch.autocast(query.device.type, enabled=False):
            for number, (maps, rows, keys) in enumerate(_steps(query, key, is_causal)):
                with torch.enable_grad():
                    numbers = [x.detach().requires_grad_() for x in (of_query[maps, rows], of_key[maps, keys])]
                    bias = of_pairs(*numbers)
                weight = _weights(query, key, bias.detach(), mask, scale, is_causal, (maps, rows, keys))
                gain = grad[maps, rows] @ value[maps, keys].mT
                applied = weight
                if dropout:
                    factor = _redrawn_factor(weight, dropout, seed + number)
                    applied, gain = weight * factor, gain.mul_(factor)
                dscore = gain.sub_(mean_gain[maps, rows]).mul_(weight)
                dvalue[maps, keys].baddbmm_(applied.mT, grad[maps, rows])
                dkey[maps, keys].baddbmm_(dscore.mT, query[maps, rows], alpha=scale)
                dquery[maps, rows] = (dscore @ key[maps, keys]).mul_(scale)
                dof_query[maps, rows], dof_some = torch.autograd.grad(bias, numbers, dscore)
                dof_key[maps, keys] += dof_some
        return dquery, dkey, dvalue, dof_query, dof_key, *[None] * 6


def _steps(query: Tensor, key: Tensor, is_causal: bool) -> Iterator[Step]:
    """Yield some rows of one map, or all rows of some maps; causal rows get the keys up to the last of these rows."""
    pairs = PAIRS_PER_STEP.get(query.device.type, PAIRS_PER_LAUNCH)
    length, size = query.size(1), key.size(1)
    rows = min(length, max(1, pairs // size))
    maps = max(1, pairs // (length * size))
    for first_map in range(0, query.size(0), maps):
        for first in range(0, length, rows):
            keys = min(first + rows, size) if is_causal else size
            yield slice(first_map, first_map + maps), slice(first, first + rows), slice(keys)


def _weights(
    query: Tensor, key: Tensor, bias: Tensor, mask: Tensor | None, scale: float, is_causal: bool, step: Step
) -> Tensor:
    """The attention weights of a step before dropout, ``[g, l, s]``; 0 in rows without keys."""
    maps, rows, keys = step
    score = torch.baddbmm(bias, query[maps, rows], key[maps, keys].mT, alpha=scale)
    if is_causal:
        later = torch.ones(score.shape[1:], dtype=torch.bool, device=score.device).triu(1 + rows.start)
        score.masked_fill_(later, -torch.inf)
    if mask is None:
        return score.softmax(2)
    is_padding = ~mask[maps, :, keys]
    return score.masked_fill_(is_padding, -torch.inf).softmax(2).masked_fill_(is_padding, 0)


def _redrawn_factor(weight: Tensor, dropout: float, seed: int) -> Tensor:
    """The factor of each weight under dropout, the same for the same seed."""
    random = torch.Generator(weight.device).manual_seed(seed)
    return torch.empty_like(weight).bernoulli_(1 - dropout, generator=random).div_(1 - dropout)
