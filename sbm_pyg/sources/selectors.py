"""Graphs from queries and keys by rules without parameters: largest scores, blocks, hashes, clusters.

In: :class:`~sbm_pyg.Tokens`. Out: an :class:`~sbm_pyg.AttentionGraph`, or a source of it. Not here: graphs that do not
depend on queries and keys (``patterns``), and sources with trained parameters (``sampling``, ``indexer``).

No rule forms all pairs at once. In a causal graph no row depends on a later token, not even through a rank, a mean or a
length. A causal rule therefore differs from a rule that ranks all tokens of a sequence, as its docstring describes.
Scores are matrix products of torch, so the choice between scores that are equal up to rounding depends on the
processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..graphs.blocks import block_means
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, check_record
from ..graphs.rows import index_type
from ..ops import checks, tiles
from ..ops.random_words import head_generator
from ..ops.segments import compress, edge_row, group_by_length
from . import pairs, patterns
from .following import FollowingSource
from .interface import Choice, GraphSource, graph_without_edges
from .last_rows import RowRule, scores_of_groups
from .learned import DensitySource

__all__ = ["RoutingSource", "SelectorSource", "TopKSource", "block_top_k", "lsh", "routing", "top_k"]

Rule = TypeVar("Rule", bound=Callable[..., AttentionGraph])
LEAST_BLOCK = 32  # keys of a block in causal routing
NO_SINKS = ("num_sinks", 0)


def _of_pairs(rule: Rule) -> Rule:
    """Wrap a rule so that it is called only if there are pairs; otherwise the graph has no edges."""

    @wraps(rule)
    def choose(tokens: Tokens, *arguments: Any, **options: Any) -> AttentionGraph:
        check_record(tokens)
        if 0 in (tokens.num_queries, tokens.num_keys):
            return graph_without_edges(tokens)
        return rule(tokens, *arguments, **options)

    return cast(Rule, choose)


@_of_pairs
def top_k(tokens: Tokens, k: int | Tensor) -> AttentionGraph:
    r"""Each query attends to the k keys of its largest scores :math:`\langle q_i, k_j \rangle`.

    A query that may attend to fewer than k keys attends to all of them. The lower key wins a tie, and NaN counts as
    infinity. Cost O(H N M C), without an array of all pairs; on a CPU one kernel computes the scores and selects.

    Args:
        tokens: Queries and keys.
        k: Keys of each query, at least 1; one number, ``[N]`` or ``[H, N]`` int64.

    Returns:
        A graph with at most ``H * N * k`` edges.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.

    Example:
        >>> x = torch.tensor([[[1.0], [3.0], [2.0]]])
        >>> top_k(Tokens(x), 2).to_dense()[0].int().tolist()
        [[0, 1, 1], [0, 1, 1], [0, 1, 1]]
    """
    tokens = pairs.detached(tokens)
    return pairs.graph_of_best(tokens, k, tokens.query[:, :, None], None, tokens.key)


@_of_pairs
def block_top_k(tokens: Tokens, k: int, block_size: int) -> AttentionGraph:
    r"""Each query attends to all keys of the k blocks whose mean has the largest scores.

    The keys of a sequence are cut into blocks of :math:`\ell`, with scores :math:`\langle q_i, \bar k_b \rangle`. The
    lower block wins a tie. The block at the position of the query is always chosen. In a causal graph later blocks are
    excluded, and the block of the query ends at the query. Cost O(H N (M C / l + k l)).

    Args:
        tokens: Queries and keys. Bipartite queries have a block at their own position only if causal.
        k: Blocks of each query, including its own, at least 1.
        block_size: Keys of a block, at least 1; the last block of a sequence may have fewer.

    Returns:
        A graph with at most ``H * N * k * block_size`` edges.

    Example:
        >>> x = torch.tensor([[[-1.0], [-1.0], [1.0], [2.0], [0.0], [3.0]]])
        >>> block_top_k(Tokens(x, is_causal=True), 2, 2).to_dense()[0, 5].int().tolist()
        [0, 0, 1, 1, 1, 1]

    Reference: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.
    """
    tokens = pairs.detached(tokens)
    k = min(checks.integer("k", k, 1, "It is the number of blocks of each query."), tokens.num_keys)
    size = checks.integer("block_size", block_size, 1, "It is the number of keys of a block.")
    size = min(size, max(tokens.num_keys, tokens.num_queries))
    mean, block_ptr, _ = block_means(tokens.key, tokens.key_ptr, size)
    own_block = tokens.query_position // size if tokens.are_same or tokens.is_causal else None
    limit = block_ptr.diff()[tokens.query_sequence]
    limit = torch.minimum(limit, tokens.query_position // size + 1) if tokens.is_causal else limit
    rowptr, chosen = pairs.select_pairs(tokens, pairs.keep_top_k(k, own_block), most=k, among=(mean, block_ptr, limit))
    row = edge_row(rowptr, chosen.numel())
    query_of = row % tokens.num_queries
    sequence = tokens.query_sequence[query_of]
    start = tokens.key_ptr[sequence]
    first = start + (chosen - block_ptr[sequence]) * size
    return pairs.graph_of_ranges(tokens, row, first, torch.minimum(first + size, start + tokens.allowed_keys[query_of]))


@_of_pairs
def lsh(tokens: Tokens, num_buckets: int, chunk_size: int, *, rounds: int = 1) -> AttentionGraph:
    r"""Each query attends to keys in its bucket of a random hash.

    In each round a random matrix R, with half as many columns as buckets, hashes a token x to bucket
    :math:`\arg\max [x R; -x R]`. The keys of each sequence and head are sorted by bucket and position, and cut into
    chunks. A query belongs to the chunk at its own sorted position, and attends to the keys of its bucket in this chunk
    and in the previous one. The graph is the union of all rounds.

    If queries and keys are the same vectors, as with Reformer's shared projection, this is Reformer's graph. In a
    causal graph each bucket is cut into chunks from its first key, since the sorted order of a sequence depends on
    later tokens. Cost O(T H (N + M)(C S + log M) + E) with T rounds and S buckets.

    Args:
        tokens: Queries and keys. Their seed fixes the random matrices, which all sequences share.
        num_buckets: Buckets S, even.
        chunk_size: Keys of a chunk, at least 1.
        rounds: Number of hashes T, at least 1.

    Returns:
        A graph with at most ``2 * rounds * H * N * chunk_size`` edges.

    Reference: Kitaev, Kaiser, Levskaya: "Reformer: The Efficient Transformer", 2020, section 2.
    """
    tokens = pairs.detached(tokens)
    query, key = tokens.query, tokens.key
    buckets = checks.integer("num_buckets", num_buckets, 2, "Half of them are the opposites of the others.")
    checks.require(not buckets % 2, "num_buckets", "to be even", num_buckets, "Half are the others' opposites.")
    checks.memory("num_buckets", buckets * tokens.heads * max(tokens.num_keys, tokens.num_queries, query.size(2)), 10,
                  query.device, "Take fewer buckets.", "numbers")  # fmt: skip
    size = min(checks.integer("chunk_size", chunk_size, 1, "It is the number of keys of a chunk."), tokens.num_keys)
    rounds = checks.integer("rounds", rounds, 1, "It is the number of hashes.")
    # the position of each token in each round
    num_positions = rounds * tokens.heads * (2 * tokens.num_queries + tokens.num_keys)
    checks.memory("rounds", num_positions, 8, query.device, "Take fewer hashes.", "numbers")
    random = [head_generator(tokens.first_head + head, tokens.seed) for head in range(tokens.heads)]
    ranges, rows = [], torch.arange(tokens.heads * tokens.num_queries, device=query.device)
    for number in range(rounds):
        directions = [torch.randn(query.size(2), buckets // 2, generator=generator) for generator in random]
        matrix = torch.stack(directions).to(query)
        turned = [x @ matrix for x in (query, key)]
        query_bucket, key_bucket = (torch.cat([x, -x], 2).argmax(2) for x in turned)
        order, low, here, after, high = pairs.grouped(tokens, query_bucket, key_bucket, buckets)
        if tokens.is_causal:
            first = low + ((here - low) // size - 1).clamp(min=0) * size
            end = after
        else:
            start = tokens.first_key  # [H*N]
            rank = torch.minimum(here - start, tokens.allowed_keys.repeat(tokens.heads) - 1)
            first = torch.maximum(low, start + (rank // size - 1) * size)
            end = torch.minimum(high, start + (rank // size + 1) * size)
        shift = number * order.numel()  # to the keys of this round in the concatenation
        ranges.append((rows, first + shift, end + shift, order))
    graph = pairs.graph_of_ranges(tokens, *(torch.cat(parts) for parts in zip(*ranges, strict=True)))
    return pairs.show_nan(tokens, graph)


@_of_pairs
@torch.no_grad()
def routing(tokens: Tokens, centroids: Tensor, size: int | None = None) -> AttentionGraph:
    r"""The queries nearest to a centroid attend to the keys nearest to the same centroid.

    Tokens and centroids are scaled to length 1. In each sequence a centroid takes the w queries and the w keys of the
    largest dot products, and each of these queries attends to each of these keys. The lower token wins a tie. A token
    may belong to any number of centroids, and a query without a centroid gets no keys. Non-finite tokens are taken only
    if there are fewer than w finite tokens; then each query also attends to the first non-finite token, to return NaN.

    These ranks depend on later tokens. So in a causal graph each query takes its nearest centroid, and attends to the w
    keys of the largest dot products with it, up to its own position, if they are finite. Cost
    O(H (N + M)(K C + log M) + E), and where causal O(H N (K C + w) + H M K).

    Args:
        tokens: Queries and keys.
        centroids: Centroids, ``[H, K, C]``, or ``[1, K, C]`` for all heads.
        size: Tokens w that a centroid takes from each sequence, at least 1. None: the length of the sequence, in a
            causal graph up to the query, divided by K and rounded up.

    Returns:
        A graph with at most ``H * B * K * w * w`` edges, or ``H * N * w`` where ``is_causal``.

    Reference: Roy et al., "Efficient Content-Based Sparse Attention with Routing Transformers", TACL 2021, whose causal
    models rank all tokens of a sequence, and then mask later ones.
    """
    tokens = pairs.detached(tokens)
    if tokens.at_end and tokens.is_causal:  # whose blocks of keys are also blocks of queries
        return routing(_of_all_keys(tokens), centroids, size)._last_rows(tokens.query_ptr)
    centroids = pairs.check_centroids(centroids, tokens.query)
    if size is not None:
        size = checks.integer("size", size, 1, "It is the number of tokens that a centroid takes.")
        size = min(size, max(tokens.num_keys, tokens.num_queries))
    near = [_cosines(x, centroids) for x in (tokens.query, tokens.key)]  # [H, N, K], [H, M, K]
    if tokens.is_causal:
        count = tokens.allowed_keys.clamp(min=1)
        count = (count + centroids.size(1) - 1) // centroids.size(1) if size is None else count.clamp(max=size)
        graph = pairs.graph_of_rows(tokens, *_best_so_far(tokens, near[0].argmax(2), near[1], count))
        return pairs.show_nan(tokens, graph)
    # tokens by group; a group is a head, a sequence and a centroid
    query_count, queries = _nearest_tokens(near[0], tokens.query_ptr, size)
    key_count, keys = _nearest_tokens(near[1], tokens.key_ptr, size)
    group = torch.repeat_interleave(query_count)
    key_end = key_count.cumsum(0)
    graph = pairs.graph_of_ranges(tokens, queries, (key_end - key_count)[group], key_end[group], keys % tokens.num_keys)
    return pairs.show_nan(tokens, graph)


class SelectorSource(GraphSource):
    """Applies a rule to the queries and keys of each batch.

    Args:
        rule: A function of this module, or one of your own, ``rule(tokens, **options) -> AttentionGraph``.
        window: Each token also attends to tokens at this distance or less, and so to itself, where queries and keys are
            the same tokens. None: no window.
        num_sinks: Each token also attends to so many first tokens of its sequence, under the same condition.
        **options: Arguments of the rule, e.g. ``k=16``. Copies of tensors become buffers.

    Raises:
        TypeError: ``rule`` is not callable, does not have an option, or has another argument without a default.
        ValueError: The window or the number of sinks is out of range.

    Example:
        >>> source = SelectorSource(top_k, k=3)
        >>> source(Tokens(torch.randn(2, 10, 8), query_ptr=torch.tensor([0, 4, 10]))).graph
        AttentionGraph(2 sequences, 2 heads, 10 queries, 10 keys, 60 edges, density 57.7%)
    """

    def __init__(
        self, rule: Callable[..., AttentionGraph], *, window: int | None = None, num_sinks: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.rule = patterns.BoundRule(rule, options)
        self.tensors = [name for name, value in options.items() if isinstance(value, Tensor)]
        for name in self.tensors:  # buffers move with the module, and load into it alone
            self.register_buffer(name, self.rule.options.pop(name).detach().clone())
        self.head_dims = {name: 0 for name in self.tensors if name == "centroids"}
        self.window, self.num_sinks = patterns.check_window(window), patterns.check_sinks(num_sinks)

    def forward(self, tokens: Tokens) -> Choice:
        graph = self.rule(tokens, **{name: getattr(self, name) for name in self.tensors})
        choice = Choice(tokens._drop_later(graph))
        return patterns.with_forced(choice, self.window, self.num_sinks, tokens)

    def extra_repr(self) -> str:
        return ", ".join([repr(self.rule), *_named(self, ("window", "num_sinks"))])


class TopKSource(DensitySource):
    r"""Each query attends to the keys of its largest scores :math:`\langle q_i, k_j \rangle` among all pairs.

    The graph is that of :func:`top_k`. Attention over this graph differs from dense attention only by the contribution
    of the remaining keys, so a dense model can use this source without training. All pairs are scored in O(H N M C),
    without gradients; on a CPU that takes a seventh of dense attention's forward and backward pass at 4,096 tokens.

    Args:
        k: Keys of each query, at least 1; with a target density, the least number of keys. None: 1.
        target_density: Fraction of its keys that each query attends to, in (0, 1]; 1 is dense attention. A
            :class:`~sbm_pyg.Sparsifier` sets it. None: 1, or ``k`` keys if there is a ``k``.
        window: Each token also attends to tokens at this distance or less, and so to itself, where queries and keys are
            the same tokens. None: no window. Its edges come on top of the target density.
        num_sinks: Each token also attends to so many first tokens of its sequence, under the same condition.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.

    Example:
        >>> source = TopKSource(target_density=0.3)
        >>> source(Tokens(torch.randn(2, 10, 8))).graph
        AttentionGraph(1 sequence, 2 heads, 10 queries, 10 keys, 60 edges, density 30.0%)
    """

    has_head_budgets = True

    def __init__(
        self, k: int | None = None, *, target_density: float | None = None, window: int | None = None,
        num_sinks: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.k = None if k is None else checks.integer("k", k, 1, "It is the number of keys of each query.")
        self.target_density = 1.0 if self._needs_density and target_density is None else target_density
        self.window, self.num_sinks = patterns.check_window(window), patterns.check_sinks(num_sinks)

    @property
    def _needs_density(self) -> bool:
        return self.k is None

    def choose(self, tokens: Tokens) -> Choice:
        """Choose by rank."""
        count = pairs.number_of_keys(self.k, self._densities(tokens.query.device), tokens.allowed_keys)
        return patterns.with_forced(Choice(top_k(tokens, count)), self.window, self.num_sinks, tokens)

    @torch.no_grad()
    def _row_rule(self, query: Tensor, key: Tensor) -> RowRule | None:
        if type(self) is not TopKSource or self.target_density == 1:
            return None
        scores = scores_of_groups(query, key)
        return RowRule(scores, self.k, self._densities(query.device), self.window, self.num_sinks, are_products=True)

    def extra_repr(self) -> str:
        return ", ".join(_named(self, ("k", "target_density", "window", "num_sinks")))


class RoutingSource(GraphSource, FollowingSource):
    """Applies :func:`routing` with centroids that follow the tokens, as in online k-means.

    In training each centroid is a moving average of the queries and keys that are nearest to it. Centroids move when
    the next seed arrives, so that all parts of a batch use the same centroids; see :func:`~sbm_pyg.sync_statistics` for
    several processes. Centroids get no gradients.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        num_clusters: Centroids of each head K, at least 1.
        size: As :func:`routing`.
        decay: Weight of the old centroid in the moving average, in [0, 1].
        window, num_sinks: As in :class:`SelectorSource`. A query without a centroid attends only to these keys.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.

    Example:
        >>> source = RoutingSource(8, heads=2, num_clusters=4)
        >>> source(Tokens(torch.randn(2, 12, 8))).graph.degree.max() <= 12
        tensor(True)
    """

    state_name = "centroids"
    head_dims: ClassVar[dict[str, int]] = {"centroids": 0, "seen": 0}

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        num_clusters: int = 8,
        size: int | None = None,
        decay: float = 0.99,
        window: int | None = None,
        num_sinks: int = 0,
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
        self.size, self.decay = size, decay
        self.window, self.num_sinks = patterns.check_window(window), patterns.check_sinks(num_sinks)
        self.centroids: Tensor
        self.register_buffer("centroids", torch.empty(shape))
        self._follow_by(torch.zeros(shape))  # sums of the unit vectors of the nearest tokens
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the centroids, with random numbers of torch's default generator, and the statistics."""
        self.centroids.copy_(normalize(torch.randn_like(self.centroids), dim=-1))
        self.seen.zero_()
        self.last_seed.zero_()

    def forward(self, tokens: Tokens) -> Choice:
        """As :meth:`GraphSource.forward`; tokens have the heads and channels of the centroids."""
        pairs.check_vectors(tokens.query, tokens.key, *self.centroids.shape[::2])
        centroids = self._state_for(tokens.seed)
        graph = routing(tokens, centroids, self.size)
        if self._counts:
            self._note(self._sums_of_members(tokens.query.detach(), tokens.key.detach(), centroids))
        return patterns.with_forced(Choice(graph), self.window, self.num_sinks, tokens)

    def _sums_of_members(self, query: Tensor, key: Tensor, centroids: Tensor) -> Tensor:
        """Sums of the unit vectors of the tokens that are nearest to each centroid, ``[H, K, C]``."""
        unit = normalize(torch.cat([query, key], 1).to(centroids.dtype), dim=-1)  # [H, N + M, C]
        unit = unit.where(unit.isfinite().all(-1, keepdim=True), 0)
        chosen = (unit @ centroids.mT).argmax(2)
        return torch.zeros_like(centroids).scatter_add_(1, chosen[..., None].expand_as(unit), unit)

    def _moved(self, state: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """The centroids after one step towards the means of their tokens."""
        moved = normalize(self.decay * state + (1 - self.decay) * normalize(seen, dim=-1), dim=-1)
        return torch.where((seen.abs().sum(2, keepdim=True) > 0) & counts, moved, state)

    def extra_repr(self) -> str:
        heads, clusters, channels = self.centroids.shape
        options = _named(self, ("size", "decay", "window", "num_sinks"))
        return ", ".join([f"{channels}, {heads=}, num_clusters={clusters}", *options])


# --------------------------------------------------------------------------------------------------------------- parts


def _named(source: GraphSource, names: tuple[str, ...]) -> list[str]:
    """The options of a source that are not None, as text for its representation."""
    options = {name: getattr(source, name) for name in names}
    return [f"{name}={value}" for name, value in options.items() if value is not None and (name, value) != NO_SINKS]


def _cosines(x: Tensor, centroids: Tensor) -> Tensor:
    return normalize(x, dim=-1) @ normalize(centroids, dim=-1).mT


def _of_all_keys(tokens: Tokens) -> Tokens:
    """For queries that are the last tokens: the tokens with one query per key, where added queries are 0."""
    count = tokens.query_ptr.diff()
    place = pairs.runs(tokens.key_ptr[1:] - count, count, tokens.num_queries)
    query = torch.zeros_like(tokens.key).index_copy(1, place, tokens.query)
    ptrs = (tokens.key_ptr, tokens.key_ptr)
    return Tokens(query, tokens.key, *ptrs, False, tokens.is_causal, tokens.seed, tokens.sequence_ids)


def _best_so_far(tokens: Tokens, chosen: Tensor, near: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Compressed rows of the keys, not later than each query, with the largest scores for the centroid of the query.

    Keys are processed in blocks. Each centroid keeps only its best keys of all earlier blocks, and a query chooses
    among these and the keys of its own block.

    Args:
        chosen: The centroid of each query, ``[H, N]``.
        near: The score of each centroid with each key, ``[H, M, K]``.
        count: Keys of each query, ``[N]``, at least 1.
    """
    width = index_type(tokens.num_keys)
    way_out = "Choose fewer keys, or fewer sequences at once."
    edges = tokens.heads * int(torch.minimum(tokens.allowed_keys, count).sum())
    checks.memory("size", edges, 2 * width.itemsize, near.device, way_out)  # tiles, and their concatenation
    keep = pairs.keep_top_k(count)
    row = torch.arange(tokens.heads * tokens.num_queries, device=near.device).view(tokens.heads, -1)
    parts: list[tuple[Tensor, ...]] = [(row[:0, 0], row[:0, 0], row[:0, 0].to(width))]
    for queries, keys, _ in group_by_length(tokens.query_ptr, tokens.key_ptr):
        scores = near[:, keys.clamp(min=0)]
        scores = scores.masked_fill(scores.isnan() | (keys < 0)[..., None], -torch.inf).mT  # [H, b, K, L]
        most = int(count[queries.clamp(min=0)].max())
        block = max(most, LEAST_BLOCK)
        positions = torch.arange(keys.size(1), device=keys.device).expand(*scores.shape[:3], -1)
        best, position = scores[..., :0], positions[..., :0]
        for begin in range(0, queries.size(1), block):
            fresh = slice(begin, begin + block)
            best = torch.cat([best, scores[..., fresh]], -1)
            position = torch.cat([position, positions[..., fresh]], -1)  # in ascending order
            rows = queries[:, begin : begin + block]
            size = tiles.rows_per_tile(near.device, tokens.heads * len(rows) * best.size(-1))
            for tile in rows.split(size, dim=1):
                valid, query = tile >= 0, tile.clamp(min=0)
                clusters = chosen[:, query][..., None].expand(-1, -1, -1, best.size(-1))
                score, at = best.gather(2, clusters), position.gather(2, clusters)  # [H, b, r, w + block]
                possible = valid[..., None] & (at < tokens.allowed_keys[query][..., None]) & (score > -torch.inf)
                where = tiles.PairTile(query, keys, valid, possible)
                is_kept = keep(score.masked_fill_(~possible, -torch.inf), possible, where)
                key = keys.to(width)[:, None].expand(*is_kept.shape[:3], -1).gather(3, at)
                parts.append(where.rows(is_kept, key[is_kept], row))
            first = best.sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(-1).values
            best, position = best.gather(-1, first), position.gather(-1, first)
    rowptr, col = compress(parts, row.numel())
    return rowptr, col


def _nearest_tokens(near: Tensor, ptr: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """The tokens that each centroid takes from each sequence.

    Args:
        near: ``[H, N, K]``.

    Returns:
        The number of tokens of each group, ``[H*B*K]``, and the tokens ``h * N + i``, group by group.
    """
    heads, tokens, clusters = near.shape
    sequences = ptr.numel() - 1
    width = (ptr.diff() + clusters - 1) // clusters if size is None else torch.full_like(ptr[1:], size)
    width = torch.minimum(width, ptr.diff()).clamp(min=1)  # [B]
    members = []
    for padded, _, which in group_by_length(ptr, ptr):
        valid = (padded >= 0)[:, None]  # [b, 1, L]
        for first in range(0, clusters, step := tiles.rows_per_tile(near.device, heads * padded.numel())):
            scores = near[:, padded.clamp(min=0), first : first + step].mT.contiguous()  # [H, b, k, L]
            scores.masked_fill_(scores.isnan() | ~valid, -torch.inf)
            is_kept = tiles.best_of(scores, valid, width[which, None])
            head, sequence, cluster, position = is_kept.nonzero(as_tuple=True)
            group = (head * sequences + which[sequence]) * clusters + first + cluster
            members.append((group, head * tokens + padded[sequence, position]))
    group, token = (torch.cat(parts) for parts in zip(*members, strict=True))
    group, by_group = group.sort(stable=True)
    return torch.bincount(group, minlength=heads * sequences * clusters), token[by_group]
