"""Attention over a graph that nobody stores, in plain torch: the meaning, and what other devices than CUDA's run.

In and out: the tensors of :func:`sbm_pyg.ops.sampled_attention` and of its backward pass; any device, any floating
dtype. All pairs of some queries are looked at together: their probabilities, their coins and their scores. Sequences
of like length come together, so padding at most doubles what is held. The coins are those of
:func:`.reference.sampling.toss`, so the backward pass finds the same edges. Not here: checks of what comes in, and
graphs that are stored (``reference``, ``samplers``).

Shapes: N queries, M keys, H heads, C channels, K blocks; b sequences of like length, of at most n and m tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import widest
from .effects import ROUNDED
from .random_words import WORD
from .sampling import toss
from .segments import allowed_keys, compress, group_by_length, wide

COINS = 256  # of a query, at least: their random words come together
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


class _Side(NamedTuple):
    """The tokens of some sequences, ``[b, n]``, and which are there; of no token, the number of another."""

    number: Tensor
    there: Tensor

    @classmethod
    def padded(cls, tokens: Tensor) -> _Side:
        """Of tokens ``[b, n]``, where -1 is none."""
        return cls(tokens.clamp(min=0), tokens >= 0)

    def of(self, x: Tensor) -> Tensor:
        """Vectors of tokens ``[H, N, C]``, those of each sequence, ``[H, b, n, C]``; zeros where none is."""
        return wide(x)[:, self.number].masked_fill(~self.there[..., None], 0)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write numbers ``[H, b, n, ...]`` of these tokens where those of all are, ``[H, N, ...]``."""
        into[:, self.number[self.there]] = values[:, self.there].to(into.dtype)


class _Part(NamedTuple):
    """Some queries of some sequences, with all keys of theirs; numbers of pairs are ``[H, b, some, m]``."""

    queries: _Side
    p: Tensor  # float64, where the device has it
    edge: Tensor
    forced: Tensor  # [some, m], pairs in the window
    learns: Tensor  # which pairs are edges with probability p, and may become some


def _groups(law: _Law) -> Iterator[tuple[_Side, Iterator[_Part]]]:
    """Some sequences of like length: their keys, and their queries, some at a time."""
    heads = max(law.rate.size(0), 1)
    room = ROOM.get(law.rate.device.type, 2**26) // (8 * heads)
    allowed = allowed_keys(law.query_ptr, law.key_ptr, law.rate.size(1), law.is_causal)
    for queries, keys, which in group_by_length(law.query_ptr, law.key_ptr):
        width = max(keys.size(1), COINS)
        for mine, theirs, some in zip(*(x.split(max(room // width, 1)) for x in (queries, keys, which)), strict=True):
            if mine.numel() and theirs.numel() and law.rate.size(0):
                there = _Side.padded(theirs)
                each = max(room // (len(some) * width), 1)
                yield there, _parts(law, allowed, _Side.padded(mine), there, some, each)


def _parts(law: _Law, allowed: Tensor, queries: _Side, keys: _Side, which: Tensor, some: int) -> Iterator[_Part]:
    rate, heads = law.rate, law.rate.size(0)
    later = torch.arange(keys.number.size(1), device=rate.device)
    exact = widest(rate.device)
    theirs = keys.of(law.member).to(exact).mT  # [H, b, K, m]
    head, stream = torch.arange(heads, device=rate.device)[:, None, None], (law.sequence_ids[which] & WORD)[:, None]
    for begin in range(0, queries.number.size(1), some):
        mine = _Side(*(x[:, begin : begin + some] for x in queries))
        place = torch.arange(begin, begin + mine.number.size(1), device=rate.device)
        p = mine.of(rate).to(exact) @ theirs + law.exploration
        pair = (later < allowed[mine.number][..., None]) & mine.there[..., None]  # [b, some, m]
        forced = (later - place[:, None]).abs() <= law.window
        threshold = (p.nan_to_num(1.0).clamp(0, 1) * 2.0**32).long()  # NaN becomes an edge, and its score NaN
        edge = (toss(threshold, place, stream, head, law.seed) | forced) & pair
        yield _Part(mine, p, edge, forced, pair & ~forced & (p <= ROUNDED))


def _logits(query: Tensor, key: Tensor, part: _Part, scale: float) -> Tensor:
    """Scores of the edges, -inf for other pairs."""
    score = query @ key.mT * scale
    return torch.where(part.p.isnan(), torch.nan, score).masked_fill(~part.edge, -math.inf)


def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    sequence_ids: Tensor, seed: int, exploration: float, scale: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output ``[H, N, C']``, the same without the heaviest edge of each query, lse ``[H, N]``, and that edge.

    The heaviest edge is given by the place of its key in its sequence, ``[H, N]`` int32; -1 where there is none.
    """
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    (heads, num_queries), channels = query.shape[:2], value.size(2)
    out, rest = (value.new_zeros(heads, num_queries, channels) for _ in range(2))
    lse = wide(query).new_full((heads, num_queries), -math.inf)
    best = torch.full_like(lse, -1, dtype=torch.int32)
    for keys, parts in _groups(law):
        their_keys, values = keys.of(key), keys.of(value)
        for part in parts:
            logit = _logits(part.queries.of(query), their_keys, part, scale)
            top, heaviest = logit.max(-1)
            without = logit.scatter(-1, heaviest[..., None], -math.inf)
            sums = [torch.logsumexp(each, -1) for each in (logit, without)]
            for each, total, into in zip((logit, without), sums, (out, rest), strict=True):
                weight = torch.where(each == -math.inf, 0, (each - total[..., None]).exp())
                part.queries.put(weight @ values, into)
            part.queries.put(sums[0], lse)
            part.queries.put(torch.where(top == -math.inf, -1, heaviest), best)
    return out, rest, lse, best


def sampled_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, sequence_ids: Tensor, out: Tensor, rest: Tensor, lse: Tensor, best: Tensor, seed: int,
    exploration: float, scale: float, is_causal: bool, window: int, need_model: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values; and with ``need_model`` of rates and memberships, by the effect of each
    pair on the loss, the others given: see :func:`.reference.effects.leave_one_out`.
    """
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    mean_gain, rest_gain = ((wide(grad_out) * wide(x)).sum(-1) for x in (out, rest))
    d_query, d_key, d_value, d_rate, d_member = (torch.zeros_like(x) for x in (query, key, value, rate, member))
    to_queries, to_keys = (d_query, d_rate)[: 1 + need_model], (d_key, d_value, d_member)[: 2 + need_model]
    for keys, parts in _groups(law):
        k, v, z = (keys.of(x) for x in (key, value, member))
        theirs: tuple[Tensor, ...] = ()
        for part in parts:
            at, pairs = part.queries.number, part.edge
            q, g, y = (part.queries.of(x) for x in (query, grad_out, rate))
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
            for found, into in zip(rows, to_queries, strict=True):
                part.queries.put(found, into)
            theirs = tuple(map(torch.add, theirs, columns)) if theirs else tuple(columns)
        for found, into in zip(theirs, to_keys, strict=True):
            keys.put(found, into)
    if not need_model:
        d_rate, d_member = rate.new_empty(0, 0, 0), member.new_empty(0, 0, 0)
    return d_query, d_key, d_value, d_rate, d_member


def sampled_edges(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The graph that was attended to: its offsets ``[H*N+1]``, its keys ``[E]`` int32, and which edges are forced."""
    law = _Law(rate, member, query_ptr, key_ptr, sequence_ids, seed, exploration, is_causal, window)
    heads, num_queries, _ = rate.shape
    row = torch.arange(heads * num_queries, device=rate.device).view(heads, num_queries)
    none = query_ptr.new_empty(0)
    found: list[tuple[Tensor, ...]] = [(none, none, none.int(), none.bool())]
    for keys, parts in _groups(law):
        number = keys.number.int()[:, None]
        for part in parts:
            mine, edge = part.queries, part.edge
            rows = row[:, mine.number[mine.there]].flatten()
            values = (x.expand_as(edge)[edge] for x in (number, part.forced))
            found.append((rows, edge.sum(-1)[:, mine.there].flatten(), *values))
    rowptr, col, forced = compress(found, row.numel())
    return rowptr, col, forced
