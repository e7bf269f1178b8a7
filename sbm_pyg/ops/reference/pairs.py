"""The best keys of each query among all pairs, in plain torch.

In: offsets of sequences, and scores. Out: the tensors of
``index_top_k`` and ``segment_top_k`` in :mod:`sbm_pyg.ops.schemas`. Not here: graphs, and other rules that keep pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..segments import compress, upcast
from ..tiles import best_of, pair_tiles


def small_heads(packed: Tensor, small: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Unpack ``[H, b, r, S D + S]`` to queries ``[H, b, r, D]`` and weights ``[H, b, r, 1]``, head by head."""
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
    allowed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The keys of the largest scores of each query, by the scores of a lightning indexer: compressed rows.

    .. math:: I_{ij} = \sum_{s=1}^{S} w_{is} \, \mathrm{ReLU}(\langle q_{is}, k_j \rangle)

    Small queries are ``[H, N, S, D]``, weights ``[H, N, S]``, keys ``[H, M, D]``. Without weights the scores are dot
    products, :math:`I_{ij} = \sum_s \langle q_{is}, k_j \rangle`. Query i of head h takes ``count[h, i]`` of the first
    ``allowed[i]`` keys of its sequence, or all of these if they are fewer. The lower key wins a tie, and a score that
    is NaN counts as infinity, so that NaN shows. Scores that are equal up to rounding may rank differently on another
    kind of device. Cost O(H N M S D), without an array of all pairs.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, equations 1 and 2.
    """
    heads, queries, small, _ = query.shape
    dtype = torch.int32 if key.size(1) < 2**31 else torch.int64
    packed = query.sum(2) if weight is None else torch.cat([query.flatten(2), weight], 2)
    packed, key = upcast(packed), upcast(key)
    row = torch.arange(heads * queries, device=key.device).view(heads, queries)
    parts: list[tuple[Tensor, ...]] = []
    for tile in pair_tiles(heads, query_ptr, key_ptr, allowed):
        tile_queries, tile_keys = packed[:, tile.query], key[:, tile.key.clamp(min=0)]
        scores = tile_queries @ tile_keys.mT if weight is None else index_scores(tile_queries, tile_keys, small)
        scores.masked_fill_(scores.isnan(), torch.inf).masked_fill_(~tile.possible, -torch.inf)
        is_edge = best_of(scores, tile.possible, count[:, tile.query])
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
