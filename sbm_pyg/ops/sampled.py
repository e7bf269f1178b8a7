"""Attention over a graph that nobody stores, in plain torch: the meaning, and what other devices than CUDA's run.

In and out: the tensors of :func:`sbm_pyg.ops.sampled_attention` and of its backward pass; any device, any floating
dtype. All pairs of some queries are looked at together: their probabilities, their coins and their scores. The coins
are those of :func:`.samplers.toss`, so the backward pass finds the same edges. Not here: checks of what comes in, and
graphs that are stored (``reference``, ``samplers``).

Shapes: N queries, M keys, H heads, C channels, K blocks, B sequences; n and m tokens of the longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import widest
from .reference import ROUNDED, reach, wide
from .samplers import toss
from .words import WORD

ROOM = {"cpu": 2**22}
"""Bytes of a number for each of the pairs that are looked at together, by kind of device; 2^26 on others."""


class _Law(NamedTuple):
    """What decides which pairs are edges."""

    rate: Tensor
    member: Tensor
    query_ptr: Tensor
    key_ptr: Tensor
    sequence_ids: Tensor
    seed: int
    exploration: float
    is_causal: bool
    window: int


class _Sides(NamedTuple):
    """The tokens of all sequences, ``[B, longest]``, and which are there; of no token, the number of another."""

    number: Tensor
    there: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Vectors of tokens ``[H, N, C]``, those of each sequence, ``[H, B, longest, C]``; zeros where none is."""
        return wide(x)[:, self.number].masked_fill(~self.there[..., None], 0)


class _Part(NamedTuple):
    """Some queries of all sequences, with all keys of theirs; numbers of pairs are ``[H, B, some, m]``."""

    queries: _Sides
    p: Tensor  # float64, where the device has it
    edge: Tensor
    learns: Tensor  # which pairs are edges with probability p, and may become some


def _inside(ptr: Tensor, tokens: int) -> _Sides:
    """The tokens of each sequence."""
    lengths = ptr.diff()
    place = torch.arange(int(lengths.max()), device=ptr.device)
    return _Sides((ptr[:-1, None] + place).clamp(max=max(tokens - 1, 0)), place < lengths[:, None])


def _parts(law: _Law) -> Iterator[tuple[_Part, _Sides]]:
    """All queries, some at a time, and the keys of their sequences."""
    rate, member = law.rate, law.member
    heads, num_queries, _ = rate.shape
    queries, keys = _inside(law.query_ptr, num_queries), _inside(law.key_ptr, member.size(1))
    (sequences, most), longest = queries.number.shape, keys.number.size(1)
    if not rate.numel() or not member.numel():
        return
    allowed = reach(law.query_ptr, law.key_ptr, num_queries, law.is_causal)
    later = torch.arange(longest, device=rate.device)
    exact = widest(rate.device)
    theirs = keys.of(member).to(exact).mT  # [H, B, K, m]
    head, stream = torch.arange(heads, device=rate.device)[:, None, None], (law.sequence_ids & WORD)[:, None]
    room = ROOM.get(rate.device.type, 2**26)
    some = max(1, room // (8 * heads * sequences * longest))
    for begin in range(0, most, some):
        mine = _Sides(*(x[:, begin : begin + some] for x in queries))
        place = torch.arange(begin, begin + mine.number.size(1), device=rate.device)
        p = mine.of(rate).to(exact) @ theirs + law.exploration
        pair = (later < allowed[mine.number][..., None]) & mine.there[..., None]  # [B, some, m]
        forced = (later - place[:, None]).abs() <= law.window
        threshold = (p.nan_to_num(1.0).clamp(0, 1) * 2.0**32).long()  # NaN becomes an edge, and its score NaN
        edge = (toss(threshold, place, stream, head, law.seed) | forced) & pair
        yield _Part(mine, p, edge, pair & ~forced & (p <= ROUNDED)), keys


def _logits(query: Tensor, key: Tensor, part: _Part, scale: float) -> Tensor:
    """Scores of the edges, -inf for other pairs."""
    score = query @ key.mT * scale
    return torch.where(part.p.isnan(), torch.nan, score).masked_fill(~part.edge, -math.inf)


def _unpadded(x: Tensor, ptr: Tensor, tokens: int) -> Tensor:
    """Numbers of tokens, ``[H, N, ...]``, of those of each sequence, ``[H, B, longest, ...]``."""
    batch = torch.repeat_interleave(ptr.diff(), output_size=tokens)
    return x[:, batch, torch.arange(tokens, device=ptr.device) - ptr[batch]]


def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    sequence_ids: Tensor, seed: int, exploration: float, scale: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output ``[H, N, C']``, the same without the heaviest edge of each query, lse ``[H, N]``, and that edge.

    The heaviest edge is given by the place of its key in its sequence, ``[H, N]`` int32; -1 where there is none.
    """
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    (heads, num_queries), channels = query.shape[:2], value.size(2)
    found: list[tuple[Tensor, ...]] = []
    for part, keys in _parts(law):
        logit, values = _logits(part.queries.of(query), keys.of(key), part, scale), keys.of(value)
        top, heaviest = logit.max(-1)
        without = logit.scatter(-1, heaviest[..., None], -math.inf)
        sums = [torch.logsumexp(each, -1) for each in (logit, without)]
        weights = (
            torch.where(each == -math.inf, 0, (each - lse[..., None]).exp())
            for each, lse in zip((logit, without), sums, strict=True)
        )
        found.append((*(weight @ values for weight in weights), sums[0], torch.where(top == -math.inf, -1, heaviest)))
    if not found:
        out = value.new_zeros(heads, num_queries, channels)
        lse = wide(query).new_full((heads, num_queries), -math.inf)
        return out, out.clone(), lse, torch.full_like(lse, -1, dtype=torch.int32)
    out, rest, lse, best = (_unpadded(torch.cat(each, 2), query_ptr, num_queries) for each in zip(*found, strict=True))
    return out.to(value.dtype), rest.to(value.dtype), lse, best.int()


def sampled_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, sequence_ids: Tensor, out: Tensor, rest: Tensor, lse: Tensor, best: Tensor, seed: int,
    exploration: float, scale: float, is_causal: bool, window: int, need_model: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values; and with ``need_model`` of rates and memberships, by the effect of each
    pair on the loss, the others given: see :func:`.reference.leave_one_out`.
    """
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    mean_gain, rest_gain = ((wide(grad_out) * wide(x)).sum(-1) for x in (out, rest))
    mine: list[tuple[Tensor, ...]] = []
    theirs: tuple[Tensor, ...] = ()
    for part, keys in _parts(law):
        at, pairs = part.queries.number, part.edge
        q, g, y = (part.queries.of(x) for x in (query, grad_out, rate))
        k, v, z = (keys.of(x) for x in (key, value, member))
        logit, level = _logits(q, k, part, scale), lse[:, at][..., None]
        weight = torch.where(pairs, (logit - level).exp(), 0)
        gain = g @ v.mT
        centred = gain - mean_gain[:, at][..., None]
        slope = weight * centred * scale
        rows, columns = [slope @ k], [slope.mT @ q, weight.mT @ g]
        if need_model:
            heaviest = torch.arange(k.size(2), device=k.device) == best[:, at][..., None]
            alone = weight * (gain - rest_gain[:, at][..., None])
            present = torch.where(heaviest, alone, weight / (1 - weight.masked_fill(heaviest, 0)) * centred)
            absent = torch.sigmoid(q @ k.mT * scale - level) * centred
            effect = torch.where(part.learns, torch.where(pairs, present, absent), 0).to(y.dtype)
            rows.append(effect @ z)
            columns.append(effect.mT @ y)
        mine.append(tuple(rows))
        theirs = tuple(map(torch.add, theirs, columns)) if theirs else tuple(columns)
    if not mine:
        grads = [torch.zeros_like(x) for x in (query, key, value, rate, member)]
    else:
        d_query, *of_rate = (
            _unpadded(torch.cat(each, 2), query_ptr, query.size(1)) for each in zip(*mine, strict=True)
        )
        d_key, d_value, *of_member = (_unpadded(each, key_ptr, key.size(1)) for each in theirs)
        grads = [d_query, d_key, d_value, *of_rate, *of_member]
    if not need_model:
        grads = [*grads[:3], rate.new_empty(0, 0, 0), member.new_empty(0, 0, 0)]
    d_query, d_key, d_value, d_rate, d_member = (
        grad.to(x.dtype) for grad, x in zip(grads, (query, key, value, rate, member), strict=True)
    )
    return d_query, d_key, d_value, d_rate, d_member


def sampled_edges(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The graph that was attended to: its offsets ``[H*N+1]``, its keys ``[E]`` int32, and which edges are forced."""
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    (heads, num_queries, _), num_keys = rate.shape, member.size(1)
    found, forced = [query_ptr.new_empty(0)], [query_ptr.new_empty(0, dtype=torch.bool)]
    for part, keys in _parts(law):
        head, sequence, query, key = part.edge.nonzero(as_tuple=True)
        number = part.queries.number[sequence, query]
        row, place = head * num_queries + number, number - query_ptr[sequence]
        found.append(row * num_keys + keys.number[sequence, key])
        forced.append((place - key).abs() <= window)
    pair, order = torch.cat(found).sort()
    starts = torch.arange(heads * num_queries + 1, device=pair.device) * num_keys
    return torch.searchsorted(pair, starts), (pair % max(num_keys, 1)).int(), torch.cat(forced)[order]
