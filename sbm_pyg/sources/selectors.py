"""Graphs that follow what tokens hold, by rules without parameters: largest scores, blocks, hashes, clusters.

In: :class:`~sbm_pyg.Tokens`. Out: an :class:`~sbm_pyg.graph.AttentionGraph`; the same as a source of a layer. Not here:
graphs that are the same whatever tokens hold (``patterns``), and choosers that learn (``sampling``).

No rule forms all pairs at once. A causal graph never looks ahead: no row depends on a later token, not even through a
rank, a mean or a length. Where the usual rule ranks all tokens of a sequence, the causal one is another, and its
docstring says so. Scores come from matrix products of torch; where two are equal up to rounding, the choice may differ
from one processor to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..blocks import block_means
from ..graph import AttentionGraph
from ..ops import checks
from ..ops.reference.segments import compress, edge_row, like_lengths
from ..ragged import Tokens
from ..rows import index_type
from . import patterns
from .following import FollowingSource
from .interface import Choice, GraphSource
from .pairs import (
    CHUNK,
    Part,
    best_of,
    check_centroids,
    detached,
    graph_of_ranges,
    graph_of_rows,
    grouped,
    largest,
    streamed,
)

__all__ = ["RoutingSource", "SelectorSource", "block_top_k", "lsh", "routing", "top_k"]

LEAST_BLOCK = 32  # keys of a block in causal routing


@torch.no_grad()
def top_k(tokens: Tokens, k: int) -> AttentionGraph:
    r"""Each query attends to the keys of its largest scores: what a source of single keys can do at best.

    The k largest of :math:`\langle q_i, k_j \rangle` among the keys that the query may attend to, all of them where
    there are no more; equal ones by the lower key. NaN is never chosen. Cost O(H N M C), rows a part at a time.

    Args:
        tokens: Queries and keys.
        k: Keys of each query, at least 1.

    Returns:
        A graph with at most ``H * N * k`` edges.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.

    Example:
        >>> x = torch.tensor([[[1.0], [3.0], [2.0]]])
        >>> top_k(Tokens(x), 2).to_dense()[0].int().tolist()
        [[0, 1, 1], [0, 1, 1], [0, 1, 1]]
    """
    tokens = detached(tokens)
    k = min(checks.integer("k", k, 1, "It is the number of keys of each query."), tokens.num_keys)
    return graph_of_rows(tokens, *streamed(tokens, largest(k), most=k))


@torch.no_grad()
def block_top_k(tokens: Tokens, k: int, block_size: int) -> AttentionGraph:
    r"""Each query attends to all keys of the blocks whose mean suits it best.

    The keys of a sequence are cut into blocks of :math:`\ell`. A query takes the k blocks with the largest
    :math:`\langle q_i, \bar k_b \rangle`, equal ones by the lower block. The block at its own place is always one of
    them. In a causal graph blocks after it are out, and its own ends with the query. Cost O(H N (M C / l + k l)).

    Args:
        tokens: Queries and keys. If they are bipartite, a query has a block of its own only in a causal graph.
        k: Blocks of each query, its own among them, at least 1.
        block_size: Keys of a block, at least 1; the last block of a sequence may have fewer.

    Returns:
        A graph with at most ``H * N * k * block_size`` edges.

    Example:
        >>> x = torch.tensor([[[-1.0], [-1.0], [1.0], [2.0], [0.0], [3.0]]])
        >>> block_top_k(Tokens(x, is_causal=True), 2, 2).to_dense()[0, 5].int().tolist()
        [0, 0, 1, 1, 1, 1]

    Reference: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.
    """
    tokens = detached(tokens)
    k = min(checks.integer("k", k, 1, "It is the number of blocks of each query."), tokens.num_keys)
    size = checks.integer("block_size", block_size, 1, "It is the number of keys of a block.")
    size = min(size, max(tokens.num_keys, tokens.num_queries))
    mean, block_ptr, _ = block_means(tokens.key, tokens.key_ptr, size)
    own = None if tokens.bipartite and not tokens.is_causal else tokens.query_position // size
    limit = block_ptr.diff()[tokens.query_sequence]
    limit = torch.minimum(limit, tokens.query_position // size + 1) if tokens.is_causal else limit
    rowptr, chosen = streamed(tokens, largest(k, own), most=k, among=(mean, block_ptr, limit))
    row = edge_row(rowptr, chosen.numel())
    query_of = row % tokens.num_queries
    sequence = tokens.query_sequence[query_of]
    start = tokens.key_ptr[sequence]
    first = start + (chosen - block_ptr[sequence]) * size
    return graph_of_ranges(tokens, row, first, torch.minimum(first + size, start + tokens.allowed_keys[query_of]))


@torch.no_grad()
def lsh(tokens: Tokens, num_buckets: int, chunk_size: int, *, rounds: int = 1) -> AttentionGraph:
    r"""Each query attends to keys that fall into its bucket of a random hash.

    In each round a random matrix R with half as many columns as there are buckets puts a token x into bucket
    :math:`\arg\max [x R; -x R]`. Keys are sorted by bucket and place, and cut into chunks. A query stands where it
    would be among them. It attends to the keys of its bucket in its own chunk and in the one before. Rounds are united.
    Sequences and heads are apart.

    Where queries are keys, as in Reformer, which shares their projections, this is its graph. In a causal graph chunks
    are those of each bucket, counted from its first key, for the sorted order of a whole sequence would depend on later
    tokens. Cost O(T H (N + M)(C S + log M) + E) with T rounds and S buckets.

    Args:
        tokens: Queries and keys. The random matrices follow from their seed, and all sequences share them.
        num_buckets: Buckets S, even.
        chunk_size: Keys of a chunk, at least 1.
        rounds: Number of hashes T, at least 1.

    Returns:
        A graph with at most ``2 * rounds * H * N * chunk_size`` edges.

    Reference: Kitaev, Kaiser, Levskaya: "Reformer: The Efficient Transformer", 2020, section 2.
    """
    tokens = detached(tokens)
    query, key = tokens.query, tokens.key
    buckets = checks.integer("num_buckets", num_buckets, 2, "Half of them are opposite to the others.")
    if buckets % 2:
        raise ValueError(f"Expected 'num_buckets' to be even (got {num_buckets}). Half are opposite to the others.")
    checks.memory("num_buckets", buckets * tokens.heads * max(tokens.num_keys, tokens.num_queries, query.size(2)), 12,
                  query.device, "Take fewer buckets.", "numbers")  # fmt: skip
    size = min(checks.integer("chunk_size", chunk_size, 1, "It is the number of keys of a chunk."), tokens.num_keys)
    rounds = checks.integer("rounds", rounds, 1, "It is the number of hashes.")
    kept = rounds * tokens.heads * (2 * tokens.num_queries + tokens.num_keys)  # where each round puts each token
    checks.memory("rounds", kept, 8, query.device, "Take fewer hashes.", "numbers")
    random = torch.Generator().manual_seed(tokens.seed % 2**63)
    found, every = [], torch.arange(tokens.heads * tokens.num_queries, device=query.device)
    for number in range(rounds):
        matrix = torch.randn(tokens.heads, query.size(2), buckets // 2, generator=random).to(query)
        turned = [x @ matrix for x in (query, key)]
        mine, theirs = (torch.cat([x, -x], 2).argmax(2) for x in turned)
        order, low, here, after, high = grouped(tokens, mine, theirs, buckets)
        if tokens.is_causal:
            first = low + ((here - low) // size - 1).clamp(min=0) * size
            end = after
        else:
            start = tokens.first_key  # [H*N]
            rank = torch.minimum(here - start, tokens.allowed_keys.repeat(tokens.heads) - 1)
            first = torch.maximum(low, start + (rank // size - 1) * size)
            end = torch.minimum(high, start + (rank // size + 1) * size)
        shift = number * order.numel()  # to where keys of this round stand among those of all
        found.append((every, first + shift, end + shift, order))
    return graph_of_ranges(tokens, *(torch.cat(each) for each in zip(*found, strict=True)))


@torch.no_grad()
def routing(tokens: Tokens, centroids: Tensor, size: int | None = None) -> AttentionGraph:
    r"""Each centroid brings together the queries and the keys that are nearest to it.

    Tokens and centroids are scaled to length 1. In each sequence a centroid takes the w queries and the w keys of the
    largest products, equal ones by the lower token; each of these queries attends to each of these keys. Then a token
    may have several centroids, or none, and a query without one attends to nothing.

    Such a rank would depend on later tokens. So in a causal graph each query goes to its nearest centroid, and attends
    to the w keys of the largest products with it among those before it and itself. Cost O(H (N + M)(K C + log M) + E),
    and where causal O(H N (K C + w) + H M K).

    Args:
        tokens: Queries and keys.
        centroids: Centroids, ``[H, K, C]``, or ``[1, K, C]`` for all heads.
        size: Tokens w that a centroid takes of each sequence, at least 1. None: the length of the sequence divided by
            K, rounded up; in a causal graph, that of the sequence so far.

    Returns:
        A graph with at most ``H * B * K * w * w`` edges, or ``H * N * w`` where ``is_causal``.

    Reference: Roy et al., "Efficient Content-Based Sparse Attention with Routing Transformers", TACL 2021, whose causal
    models rank all tokens of a sequence and mask what is later.
    """
    tokens = detached(tokens)
    centroids = check_centroids(centroids, tokens.query)
    if size is not None:
        size = checks.integer("size", size, 1, "It is the number of tokens that a centroid takes.")
        size = min(size, max(tokens.num_keys, tokens.num_queries))
    near = [_cosines(x, centroids) for x in (tokens.query, tokens.key)]  # [H, N, K], [H, M, K]
    if tokens.is_causal:
        count = tokens.allowed_keys.clamp(min=1)
        count = (count + centroids.size(1) - 1) // centroids.size(1) if size is None else count.clamp(max=size)
        return graph_of_rows(tokens, *_best_so_far(tokens, near[0].argmax(2), near[1], count))
    # both list tokens by group, which is a head, a sequence and a centroid
    query_count, queries = _nearest(near[0], tokens.query_ptr, size)
    key_count, keys = _nearest(near[1], tokens.key_ptr, size)
    group = torch.repeat_interleave(torch.arange(query_count.numel(), device=queries.device), query_count)
    key_end = key_count.cumsum(0)
    return graph_of_ranges(tokens, queries, (key_end - key_count)[group], key_end[group], keys % tokens.num_keys)


class SelectorSource(GraphSource):
    """Chooses by a rule, from the queries and keys of each batch.

    Args:
        rule: A function of this module, or one of your own, ``rule(tokens, **options) -> AttentionGraph``.
        window: Each token also attends to tokens at this distance or less, and so to itself. None: no window.
        **options: Arguments of the rule, e.g. ``k=16``. Tensors become buffers.

    Raises:
        TypeError: ``rule`` cannot be called, does not take an option, or needs another one.
        ValueError: The window is out of range.

    Example:
        >>> source = SelectorSource(top_k, k=3)
        >>> source(Tokens(torch.randn(2, 10, 8), query_ptr=torch.tensor([0, 4, 10]))).graph
        AttentionGraph(2 sequences, 2 heads, 10 queries, 10 keys, 60 edges, density 57.7%)
    """

    def __init__(self, rule: Callable[..., AttentionGraph], *, window: int | None = None, **options: Any) -> None:
        super().__init__()
        tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        self.rule = patterns.BoundRule(rule, options)
        self.tensors = self.rule.release(tensors)
        for name, value in tensors.items():  # they go with the module
            self.register_buffer(name, value)
        self.window = patterns.check_window(window)

    def forward(self, tokens: Tokens) -> Choice:
        """As :meth:`GraphSource.forward`."""
        held = {name: getattr(self, name) for name in self.tensors}
        graph = self.rule(tokens, **held)
        choice = Choice(graph.causal() if tokens.is_causal else graph)
        return patterns.with_window(choice, self.window, tokens.bipartite)

    def extra_repr(self) -> str:
        """The rule and its options."""
        window = [] if self.window is None else [f"window={self.window}"]
        return ", ".join([repr(self.rule), *window])


class RoutingSource(GraphSource, FollowingSource):
    """Chooses by :func:`routing`, around centroids that follow the tokens.

    In training each centroid moves towards the mean of the queries and keys that are nearest to it: a moving average,
    as in k-means over a stream of batches. It moves when the next seed comes, so that all parts of a batch have the
    same centroids; see :func:`~sbm_pyg.sync_statistics` for several processes. The loss does not reach it.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        num_clusters: Centroids of each head K, at least 1.
        size: As :func:`routing`.
        decay: How much of a centroid a batch leaves, in [0, 1].
        window: As :class:`SelectorSource`. A query that no centroid takes has no other keys.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.

    Example:
        >>> source = RoutingSource(8, heads=2, num_clusters=4)
        >>> source(Tokens(torch.randn(2, 12, 8))).graph.degree.max() <= 12
        tensor(True)
    """

    state_name = "centroids"

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        num_clusters: int = 8,
        size: int | None = None,
        decay: float = 0.99,
        window: int | None = None,
    ) -> None:
        super().__init__()
        shape = [
            checks.integer(name, value, 1, "It is a size of the centroids.")
            for name, value in (("heads", heads), ("num_clusters", num_clusters), ("channels", channels))
        ]
        checks.memory("num_clusters", math.prod(shape), 4, torch.get_default_device(), "Take fewer.", "numbers")
        if size is not None:
            size = checks.integer("size", size, 1, "It is the number of tokens that a centroid takes.")
        checks.number("decay", decay, "[0, 1]", "It is the factor of a moving average.")
        self.size, self.decay, self.window = size, decay, patterns.check_window(window)
        self.centroids: Tensor
        self.register_buffer("centroids", torch.empty(shape))
        self._follow_by(torch.zeros(shape))  # sum of the unit vectors of the tokens that are nearest
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the centroids anew from torch's default generator, and forget what was seen."""
        self.centroids.copy_(normalize(torch.randn_like(self.centroids), dim=-1))
        self.seen.zero_()
        self.last_seed.zero_()

    def forward(self, tokens: Tokens) -> Choice:
        """As :meth:`GraphSource.forward`."""
        centroids = self._state_for(tokens.seed)
        graph = routing(tokens, centroids, self.size)
        if self._counts:
            self._note(self._nearest(tokens.query.detach(), tokens.key.detach(), centroids))
        return patterns.with_window(Choice(graph), self.window, tokens.bipartite)

    @torch.no_grad()
    def _nearest(self, query: Tensor, key: Tensor, centroids: Tensor) -> Tensor:
        """Sum of the unit vectors of the tokens that are nearest to each centroid, ``[H, K, C]``."""
        unit = normalize(torch.cat([query, key], 1).to(centroids.dtype), dim=-1)  # [H, N + M, C]
        unit = unit.where(unit.isfinite().all(-1, keepdim=True), 0)
        chosen = (unit @ centroids.mT).argmax(2)
        return torch.zeros_like(centroids).scatter_add_(1, chosen[..., None].expand_as(unit), unit)

    def _moved(self, state: Tensor, seen: Tensor) -> Tensor:
        """Centroids, one step closer to the means of their tokens."""
        moved = normalize(self.decay * state + (1 - self.decay) * normalize(seen, dim=-1), dim=-1)
        return torch.where(seen.abs().sum(2, keepdim=True) > 0, moved, state)

    def extra_repr(self) -> str:
        """Its options."""
        heads, clusters, channels = self.centroids.shape
        rest = {"size": self.size, "decay": self.decay, "window": self.window}
        return f"{channels}, {heads=}, num_clusters={clusters}, " + ", ".join(f"{k}={v}" for k, v in rest.items())


# --------------------------------------------------------------------------------------------------------------- parts


def _cosines(x: Tensor, centroids: Tensor) -> Tensor:
    return normalize(x, dim=-1) @ normalize(centroids, dim=-1).mT


def _best_so_far(tokens: Tokens, chosen: Tensor, near: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Compressed rows of each query and the keys before it that its centroid likes best, equal ones by the lower key.

    Keys come in blocks. Of all blocks before, each centroid remembers its best keys alone. A query looks at these and
    at its own block.

    Args:
        chosen: The centroid of each query, ``[H, N]``.
        near: How much each centroid likes each key, ``[H, M, K]``.
        count: Keys of each query, ``[N]``, at least 1.
    """
    width = index_type(tokens.num_keys)
    way_out = "Choose fewer keys, or fewer sequences at once."
    edges = tokens.heads * int(torch.minimum(tokens.allowed_keys, count).sum())
    checks.memory("size", edges, 2 * width.itemsize, near.device, way_out)  # in parts, and joined
    keep, row = (
        largest(count),
        torch.arange(tokens.heads * tokens.num_queries, device=near.device).view(tokens.heads, -1),
    )
    found: list[tuple[Tensor, ...]] = [(row[:0, 0], row[:0, 0], row[:0, 0].to(width))]
    for queries, keys, _ in like_lengths(tokens.query_ptr, tokens.key_ptr):
        scores = near[:, keys.clamp(min=0)]
        scores = scores.masked_fill(scores.isnan() | (keys < 0)[..., None], -torch.inf).mT  # [H, b, K, L]
        most = int(count[queries.clamp(min=0)].max())
        block = max(most, LEAST_BLOCK)
        places = torch.arange(keys.size(1), device=keys.device).expand(*scores.shape[:3], -1)
        best, place = scores[..., :0], places[..., :0]
        for begin in range(0, queries.size(1), block):
            fresh = slice(begin, begin + block)
            best = torch.cat([best, scores[..., fresh]], -1)
            place = torch.cat([place, places[..., fresh]], -1)  # in ascending order
            rows = queries[:, begin : begin + block]
            for part in rows.split(max(1, CHUNK // max(1, tokens.heads * len(rows) * best.size(-1))), dim=1):
                there, query = part >= 0, part.clamp(min=0)
                mine = chosen[:, query][..., None].expand(-1, -1, -1, best.size(-1))
                score, at = best.gather(2, mine), place.gather(2, mine)  # [H, b, r, w + block]
                possible = there[..., None] & (at < tokens.allowed_keys[query][..., None]) & (score > -torch.inf)
                where = Part(query, keys, there, possible)
                kept = keep(score.masked_fill_(~possible, -torch.inf), possible, where)
                key = keys.to(width)[:, None].expand(*kept.shape[:3], -1).gather(3, at)
                found.append(where.rows(kept, key[kept], row))
            first = best.sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(-1).values
            best, place = best.gather(-1, first), place.gather(-1, first)
    rowptr, col = compress(found, row.numel())
    return rowptr, col


def _nearest(near: Tensor, ptr: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """Tokens that each centroid takes of each sequence.

    Args:
        near: ``[H, N, K]``.

    Returns:
        How many each group of head, sequence and centroid takes, ``[H*B*K]``, and these tokens ``h N + i``, group by
        group.
    """
    heads, tokens, clusters = near.shape
    sequences = ptr.numel() - 1
    width = (ptr.diff() + clusters - 1) // clusters if size is None else torch.full_like(ptr[1:], size)
    width = torch.minimum(width, ptr.diff())  # [B]
    found = []
    for padded, _, which in like_lengths(ptr, ptr):
        there = (padded >= 0)[:, None]  # [b, 1, L]
        for first in range(0, clusters, step := max(1, CHUNK // max(1, heads * padded.numel()))):
            scores = near[:, padded.clamp(min=0), first : first + step].mT.contiguous()  # [H, b, k, L]
            scores.masked_fill_(scores.isnan() | ~there, -torch.inf)
            head, sequence, cluster, place = best_of(scores, there, width[which, None]).nonzero(as_tuple=True)
            group = (head * sequences + which[sequence]) * clusters + first + cluster
            found.append((group, head * tokens + padded[sequence, place]))
    group, token = (torch.cat(parts) for parts in zip(*found, strict=True))
    group, by_group = group.sort(stable=True)
    return torch.bincount(group, minlength=heads * sequences * clusters), token[by_group]
