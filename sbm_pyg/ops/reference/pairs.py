"""All pairs of queries and keys, tile by tile, and the best keys of each query, in plain torch.

In: offsets of sequences, and scores. Out: tiles of pairs; masks of the largest scores; and the tensors of
``index_top_k`` and ``segment_top_k`` in :mod:`sbm_pyg.ops.schemas`. Not here: graphs, and other rules that keep pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..values import can_read_without_sync
from .segments import allowed_keys, compress, group_by_length, upcast

SCORES_PER_TILE = {"cpu": 2**23}
"""Scores that are computed at a time, by kind of device."""
SCORES_PER_TILE_ELSEWHERE = 2**26
"""The same for other devices, where few large operations are fastest. A tile has a few tensors of 256 MiB."""


def rows_per_tile(device: torch.device, scores: int) -> int:
    """Number of rows, each with so many scores in all heads and sequences, that are computed at a time; at least 1."""
    return max(1, SCORES_PER_TILE.get(device.type, SCORES_PER_TILE_ELSEWHERE) // max(1, scores))


@dataclass(frozen=True)
class PairTile:
    """Some queries of b sequences of similar length, with all keys of these sequences."""

    query: Tensor  # [b, r] tokens; 0 where invalid
    key: Tensor  # [b, L] tokens; -1 where the sequence is shorter
    valid: Tensor  # [b, r], False for padding of the queries
    possible: Tensor  # [b, r, L], False for pairs that cannot be edges

    def select(
        self, scores: Tensor, keep: PairRule, row: Tensor, dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, ...]:
        """The pairs that a rule keeps, as an argument of :func:`.segments.compress`.

        Args:
            scores: Scores of the pairs, ``[H, b, r, L]``, which are overwritten: those that are NaN, or of impossible
                pairs, become minus infinity.
            keep: The rule. The first pair of a row whose score is NaN is kept as well, so that NaN shows.
            row: Row of each query and head, ``[H, N]``.
            dtype: Of the keys.
        """
        undefined = scores.isnan().logical_and_(self.possible)
        possible = self.possible & ~undefined
        is_edge = keep(scores.masked_fill_(~possible, -torch.inf), possible, self)
        if scores.size(-1) and not (can_read_without_sync(undefined) and not bool(undefined.any())):
            first = undefined.to(torch.uint8).argmax(-1, keepdim=True)
            is_edge = is_edge.scatter(-1, first, is_edge.gather(-1, first) | undefined.gather(-1, first))
        return self.rows(is_edge, self.key.to(dtype)[:, None].expand_as(is_edge)[is_edge], row)

    def rows(self, is_edge: Tensor, key: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of :func:`.segments.compress` for this tile.

        Args:
            is_edge: Mask of the pairs that are edges, ``[H, b, r, L]``.
            key: Keys of these edges, ``[e]``.
            row: Row of each query and head, ``[H, N]``.
        """
        return row[:, self.query[self.valid]].flatten(), is_edge.sum(-1)[:, self.valid].flatten(), key


PairRule = Callable[[Tensor, Tensor, PairTile], Tensor]
"""From scores ``[H, b, r, L]``, the mask of possible pairs and their tile to the mask of the pairs to keep."""


def pair_tiles(heads: int, query_ptr: Tensor, key_ptr: Tensor, limit: Tensor) -> Iterator[PairTile]:
    """Iterate over all pairs in tiles of bounded size: some rows of all sequences of similar length.

    Args:
        heads: Number of heads.
        query_ptr, key_ptr: Offsets of the sequences, ``[B+1]`` each.
        limit: Number of leading keys of its sequence that a query may attend to, ``[N]``.
    """
    for queries, keys, _ in group_by_length(query_ptr, key_ptr):
        position = torch.arange(keys.size(1), device=keys.device)
        for tile in queries.split(rows_per_tile(keys.device, heads * keys.numel()), dim=1):
            valid, query = tile >= 0, tile.clamp(min=0)
            yield PairTile(query, keys, valid, (position < limit[query][..., None]) & valid[..., None])


def best_of(scores: Tensor, possible: Tensor, count: int | Tensor) -> Tensor:
    """Mask of the largest possible scores along the last axis; the lower index wins a tie.

    Args:
        scores: ``[..., m]``, without NaN, and ``-inf`` where not possible.
        possible: Mask of the scores to choose from, ``[..., m]``.
        count: How many to choose, at least 1; one number or ``[...]``. Rows with fewer possible scores choose all.
    """
    if not scores.size(-1):
        return torch.zeros_like(scores, dtype=torch.bool)
    count = torch.as_tensor(count, device=scores.device).clamp(max=scores.size(-1))
    best = scores.topk(int(count.max()), dim=-1).values
    least = best.gather(-1, (count - 1).expand(scores.shape[:-1])[..., None])
    above, equal = scores > least, (scores == least) & possible
    left = count[..., None] - above.sum(-1, keepdim=True, dtype=torch.int32)  # six times as fast as int64
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))


def small_heads(packed: Tensor, small: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries ``[H, b, r, D]`` and weights ``[H, b, r, 1]`` of each small head, of packed ``[H, b, r, S D + S]``."""
    query, weight = packed.split([packed.size(3) - small, small], 3)
    return zip(query.chunk(small, 3), weight.split(1, 3), strict=True)


def index_scores(packed: Tensor, key: Tensor, small: int) -> Tensor:
    """Scores ``[H, b, r, L]`` of packed queries and keys ``[H, b, L, D]``: weighted sums of ReLUs of dot products."""
    # allocating memory for each head would cost more than the products
    total, tile = (packed.new_empty(*packed.shape[:3], key.size(2)) for _ in range(2))
    for number, (query, weight) in enumerate(small_heads(packed, small)):
        out = tile if number else total
        torch.relu_(torch.matmul(query, key.mT, out=out)).mul_(weight)
        total = total.add_(tile) if number else total
    return total


def index_top_k(
    query: Tensor, weight: Tensor | None, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, count: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The keys of the largest scores of each query, by the scores of a lightning indexer: compressed rows.

    .. math:: I_{ij} = \sum_{s=1}^{S} w_{is} \, \mathrm{ReLU}(\langle q_{is}, k_j \rangle)

    Small queries are ``[H, N, S, D]``, weights ``[H, N, S]``, keys ``[H, M, D]``. Without weights the scores are dot
    products, :math:`I_{ij} = \sum_s \langle q_{is}, k_j \rangle`. Query i takes ``count[i]`` keys, or all if it has
    fewer. The lower key wins a tie, and a score that is NaN counts as infinity, so that NaN shows. Scores that are
    equal up to rounding may rank differently on another kind of device. Cost O(H N M S D), without an array of all
    pairs.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, equations 1 and 2.
    """
    heads, queries, small, _ = query.shape
    dtype = torch.int32 if key.size(1) < 2**31 else torch.int64
    packed = query.sum(2) if weight is None else torch.cat([query.flatten(2), weight], 2)
    packed, key = upcast(packed), upcast(key)
    row = torch.arange(heads * queries, device=key.device).view(heads, queries)
    limit = allowed_keys(query_ptr, key_ptr, queries, is_causal)
    parts: list[tuple[Tensor, ...]] = []
    for tile in pair_tiles(heads, query_ptr, key_ptr, limit):
        tile_queries, tile_keys = packed[:, tile.query], key[:, tile.key.clamp(min=0)]
        scores = tile_queries @ tile_keys.mT if weight is None else index_scores(tile_queries, tile_keys, small)
        scores.masked_fill_(scores.isnan(), torch.inf).masked_fill_(~tile.possible, -torch.inf)
        is_edge = best_of(scores, tile.possible, count[tile.query])
        parts.append(tile.rows(is_edge, tile.key.to(dtype)[:, None].expand_as(is_edge)[is_edge], row))
    return compress(parts, row.numel())


def segment_top_k(src: Tensor, ptr: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of each segment, ``count[s]`` of them or all: their offsets ``[S+1]`` and numbers, ascending.

    The earlier value wins a tie, and NaN counts as infinity.
    """
    segment = torch.repeat_interleave(ptr.diff(), output_size=src.numel())
    order = src.masked_fill(src.isnan(), torch.inf).argsort(descending=True, stable=True)
    order = order[segment[order].argsort(stable=True)]  # by segment, then the largest first, then the earlier first
    rank = torch.arange(src.numel(), device=src.device) - ptr[segment]
    chosen = order[rank < count[segment]].sort().values
    return torch.searchsorted(chosen, ptr), chosen
