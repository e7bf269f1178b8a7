"""Attention over a graph that is drawn but not stored, in plain torch: the reference of ``sampled_attention``.

In and out: the tensors of :func:`sbm_pyg.ops.sampled_attention` and of its backward pass; any device, any floating
dtype. Not here: checks of the arguments, and graphs that are stored (:mod:`.edges`, :mod:`.sampling`).

Probabilities, random words and scores of all pairs of some queries are computed together. Sequences of like length come
together, so padding at most doubles what is held. The draws are those of :func:`.sampling.bernoulli_draws`, so the
backward pass finds the same edges.

Shapes: N queries, M keys, H heads, C channels, K blocks; b sequences of like length, of at most n and m tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import widest
from .random_words import WORD_MASK
from .sampling import MAX_PROB, Law, bernoulli_draws
from .segments import allowed_keys, compress, group_by_length, upcast

MIN_TILE_KEYS = 256
"""Keys of a query that a tile counts at least: their random words come together."""
MAX_PAIR_BYTES = {"cpu": 2**22}
"""Bytes of one number for each pair of a tile, by kind of device."""
MAX_PAIR_BYTES_ELSEWHERE = 2**26


class _Graph(NamedTuple):
    """A graph by its distribution: the arguments of ``sample_sbm``, and a window of pairs that are edges anyway."""

    rate: Tensor
    member: Tensor
    query_ptr: Tensor
    key_ptr: Tensor
    sequence_ids: Tensor
    law: Law
    is_causal: bool
    window: int


class _PaddedTokens(NamedTuple):
    """Tokens of some sequences, ``[b, n]``; padding has the number of another token."""

    number: Tensor
    exists: Tensor

    @classmethod
    def of(cls, tokens: Tensor) -> _PaddedTokens:
        """From tokens ``[b, n]``, where -1 is padding."""
        return cls(tokens.clamp(min=0), tokens >= 0)

    def gather(self, x: Tensor) -> Tensor:
        """Vectors of the tokens, ``[H, b, n, C]``, from those of all, ``[H, N, C]``; zeros for padding."""
        return upcast(x)[:, self.number].masked_fill(~self.exists[..., None], 0)

    def scatter(self, values: Tensor, target: Tensor) -> None:
        """Write numbers of the tokens, ``[H, b, n, ...]``, to those of all, ``[H, N, ...]``."""
        target[:, self.number[self.exists]] = values[:, self.exists].to(target.dtype)


class _Tile(NamedTuple):
    """Some queries of some sequences, with all keys of these sequences. Numbers of pairs are ``[H, b, n', m]``."""

    queries: _PaddedTokens
    p: Tensor
    """Probabilities; float64, if the device has it."""
    edge: Tensor
    forced: Tensor
    """Pairs in the window, ``[n', m]``."""
    learns: Tensor
    """Pairs that are edges with probability p. They receive a gradient."""


def _tiles(graph: _Graph) -> Iterator[tuple[_PaddedTokens, Iterator[_Tile]]]:
    """Yield keys of some sequences of like length, and the tiles of their queries."""
    heads = max(graph.rate.size(0), 1)
    room = MAX_PAIR_BYTES.get(graph.rate.device.type, MAX_PAIR_BYTES_ELSEWHERE) // (8 * heads)
    allowed = allowed_keys(graph.query_ptr, graph.key_ptr, graph.rate.size(1), graph.is_causal)
    for group in group_by_length(graph.query_ptr, graph.key_ptr):
        width = max(group[1].size(1), MIN_TILE_KEYS)
        for queries, keys, sequences in zip(*(x.split(max(room // width, 1)) for x in group), strict=True):
            if queries.numel() and keys.numel() and graph.rate.size(0):
                padded_keys = _PaddedTokens.of(keys)
                count = max(room // (len(sequences) * width), 1)
                yield (
                    padded_keys,
                    _query_tiles(graph, allowed, _PaddedTokens.of(queries), padded_keys, sequences, count),
                )


def _query_tiles(
    graph: _Graph, allowed: Tensor, queries: _PaddedTokens, keys: _PaddedTokens, sequences: Tensor, count: int
) -> Iterator[_Tile]:
    """Yield tiles of ``count`` queries at a time."""
    rate, law, heads = graph.rate, graph.law, graph.rate.size(0)
    key_position = torch.arange(keys.number.size(1), device=rate.device)
    exact = widest(rate.device)
    members = keys.gather(graph.member).to(exact).mT  # [H, b, K, m]
    head = torch.arange(heads, device=rate.device)[:, None, None]
    sequence_id = (graph.sequence_ids[sequences] & WORD_MASK)[:, None]
    for begin in range(0, queries.number.size(1), count):
        some = _PaddedTokens(*(x[:, begin : begin + count] for x in queries))
        position = torch.arange(begin, begin + some.number.size(1), device=rate.device)
        p = some.gather(rate).to(exact) @ members + law.exploration
        is_pair = (key_position < allowed[some.number][..., None]) & some.exists[..., None]  # [b, n', m]
        forced = (key_position - position[:, None]).abs() <= graph.window
        threshold = (p.nan_to_num(1.0).clamp(0, 1) * 2.0**32).long()  # NaN becomes an edge, and its score NaN
        edge = (bernoulli_draws(threshold, position, sequence_id, head, law.seed) | forced) & is_pair
        yield _Tile(some, p, edge, forced, is_pair & ~forced & (p <= MAX_PROB))


def _edge_logits(query: Tensor, key: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Scores of the edges, and -inf for other pairs."""
    score = query @ key.mT * scale
    return torch.where(tile.p.isnan(), torch.nan, score).masked_fill(~tile.edge, -math.inf)


def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor,
    sequence_ids: Tensor, seed: int, exploration: float, scale: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output ``[H, N, C']``, the same without the heaviest edge of each query, lse ``[H, N]``, and that edge.

    The heaviest edge is given by the position of its key in its sequence, ``[H, N]`` int32, or -1 without an edge.
    """
    law = Law(seed, False, exploration, True)
    graph = _Graph(rate, member, query_ptr, key_ptr, sequence_ids, law, is_causal, window)
    (heads, num_queries), channels = query.shape[:2], value.size(2)
    out, rest = (value.new_zeros(heads, num_queries, channels) for _ in range(2))
    lse = upcast(query).new_full((heads, num_queries), -math.inf)
    best = torch.full_like(lse, -1, dtype=torch.int32)
    for padded_keys, tiles in _tiles(graph):
        keys, values = padded_keys.gather(key), padded_keys.gather(value)
        for tile in tiles:
            logit = _edge_logits(tile.queries.gather(query), keys, tile, scale)
            top, heaviest = logit.max(-1)
            without = logit.scatter(-1, heaviest[..., None], -math.inf)
            sums = [torch.logsumexp(each, -1) for each in (logit, without)]
            for each, total, target in zip((logit, without), sums, (out, rest), strict=True):
                weight = torch.where(each == -math.inf, 0, (each - total[..., None]).exp())
                tile.queries.scatter(weight @ values, target)
            tile.queries.scatter(sums[0], lse)
            tile.queries.scatter(torch.where(top == -math.inf, -1, heaviest), best)
    return out, rest, lse, best


def sampled_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, member: Tensor, query_ptr: Tensor,
    key_ptr: Tensor, sequence_ids: Tensor, out: Tensor, rest: Tensor, lse: Tensor, best: Tensor, seed: int,
    exploration: float, scale: float, is_causal: bool, window: int, need_model: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, and with ``need_model`` of rates and memberships.

    The latter are made of the effect of each pair on the loss, given the other edges: see
    :func:`.effects.leave_one_out`.
    """
    law = Law(seed, False, exploration, True)
    graph = _Graph(rate, member, query_ptr, key_ptr, sequence_ids, law, is_causal, window)
    mean_gain, rest_gain = ((upcast(grad_out) * upcast(x)).sum(-1) for x in (out, rest))
    d_query, d_key, d_value, d_rate, d_member = (torch.zeros_like(x) for x in (query, key, value, rate, member))
    to_queries, to_keys = (d_query, d_rate)[: 1 + need_model], (d_key, d_value, d_member)[: 2 + need_model]
    for padded_keys, tiles in _tiles(graph):
        k, v, z = (padded_keys.gather(x) for x in (key, value, member))
        key_sums: tuple[Tensor, ...] = ()
        for tile in tiles:
            number, is_edge = tile.queries.number, tile.edge
            q, g, y = (tile.queries.gather(x) for x in (query, grad_out, rate))
            logit, level = _edge_logits(q, k, tile, scale), lse[:, number][..., None]
            weight = torch.where(is_edge, (logit - level).exp(), 0)
            gain = g @ v.mT
            centred = gain - mean_gain[:, number][..., None]
            slope = weight * centred * scale
            rows, columns = [slope @ k], [slope.mT @ q, weight.mT @ g]
            if need_model:
                heaviest = torch.arange(k.size(2), device=k.device) == best[:, number][..., None]
                alone = weight * (gain - rest_gain[:, number][..., None])
                present = torch.where(heaviest, alone, weight / (1 - weight.masked_fill(heaviest, 0)) * centred)
                absent = torch.sigmoid(q @ k.mT * scale - level) * centred
                effect = torch.where(tile.learns, torch.where(is_edge, present, absent), 0).to(y.dtype)
                rows.append(effect @ z)
                columns.append(effect.mT @ y)
            for found, target in zip(rows, to_queries, strict=True):
                tile.queries.scatter(found, target)
            key_sums = tuple(map(torch.add, key_sums, columns)) if key_sums else tuple(columns)
        for found, target in zip(key_sums, to_keys, strict=True):
            padded_keys.scatter(found, target)
    if not need_model:
        d_rate, d_member = rate.new_empty(0, 0, 0), member.new_empty(0, 0, 0)
    return d_query, d_key, d_value, d_rate, d_member


def sampled_edges(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, is_causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The graph that attention runs over: its offsets ``[H*N+1]``, keys ``[E]`` int32, and which edges are forced."""
    law = Law(seed, False, exploration, True)
    graph = _Graph(rate, member, query_ptr, key_ptr, sequence_ids, law, is_causal, window)
    heads, num_queries, _ = rate.shape
    row = torch.arange(heads * num_queries, device=rate.device).view(heads, num_queries)
    none = query_ptr.new_empty(0)
    parts: list[tuple[Tensor, ...]] = [(none, none, none.int(), none.bool())]
    for keys, tiles in _tiles(graph):
        number = keys.number.int()[:, None]
        for tile in tiles:
            queries, edge = tile.queries, tile.edge
            rows = row[:, queries.number[queries.exists]].flatten()
            values = (x.expand_as(edge)[edge] for x in (number, tile.forced))
            parts.append((rows, edge.sum(-1)[:, queries.exists].flatten(), *values))
    rowptr, col, forced = compress(parts, row.numel())
    return rowptr, col, forced
