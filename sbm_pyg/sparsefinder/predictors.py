"""Sparsefinder's predicted graphs: distance, bucketing, clustering, blocks.

In: :class:`~sbm_pyg.Tokens` with queries and keys projected to few dimensions r. Out: an
:class:`~sbm_pyg.AttentionGraph`. Not here: the projections and the source (``projection``), and the edges that a
head really uses (``ground_truth``).

Reference: Treviso, Gois, Fernandes, Fonseca, Martins: "Predicting Attention Sparsity in Transformers", 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graphs.blocks import block_means
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, resolve_ptr
from ..ops import checks
from ..ops.tiles import PairTile
from ..sources import pairs, patterns

__all__ = ["block_bigbird", "bucketing", "buckets", "clustering", "clusters", "distance"]

EXACT = "donot_use_mm_for_euclid_dist"


def distance(tokens: Tokens, threshold: float, cap: int | None = None) -> AttentionGraph:
    r"""Each query attends to the keys at a distance of at most a threshold.

    A pair is an edge if :math:`\|q'_i - k'_j\| \le t`. Cost O(H N M r) time, tile by tile.

    Args:
        tokens: Projected queries and keys.
        threshold: The threshold t, at least 0.
        cap: Largest number of keys of a query; the nearest keys are kept, the lower key in a tie. None: no limit.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.

    Example:
        >>> x = torch.tensor([[[0.0], [1.0], [3.0]]])
        >>> distance(Tokens(x), 1.5).to_dense()[0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    tokens = pairs.detached(tokens)
    checks.number("threshold", threshold, "[0, inf]", "It is a distance.")
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a query."), tokens.num_keys)

    def near(scores: Tensor, possible: Tensor, tile: PairTile) -> Tensor:
        inside = possible & (scores >= -threshold)
        return inside if cap is None else pairs.keep_top_k(cap)(scores.masked_fill_(~inside, -torch.inf), inside, tile)

    return pairs.graph_of_rows(
        tokens, *pairs.select_pairs(tokens, near, lambda query, key: -_distance(query, key), cap)
    )


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Distances of all pairs, in float32 or wider, since torch does not compute them in half precision."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.cdist(x.to(wide), y.to(wide), compute_mode=EXACT)


@torch.no_grad()
def buckets(x: Tensor, num_buckets: int, *, ptr: Tensor | None = None) -> Tensor:
    r"""The bucket of each token in each dimension, by its rank in its sequence.

    Rank :math:`\rho` of n is in bucket :math:`\lfloor \rho \beta / n \rfloor`; of equal numbers, the lower token has
    the lower rank. Cost O(H r N log N).

    Args:
        x: Projected queries or keys, ``[H, N, r]``.
        num_buckets: Buckets :math:`\beta` of a dimension, at least 1.
        ptr: Offsets of the sequences, ``[B+1]`` int64. None: one sequence.

    Returns:
        ``[H, N, r]`` int64 in ``0 .. num_buckets-1``.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.

    Example:
        >>> buckets(torch.tensor([[[0.1], [5.0], [0.3], [7.0]]]), 2).flatten().tolist()
        [0, 1, 0, 1]
    """
    _check_points(x)
    count = checks.integer("num_buckets", num_buckets, 1, "It is the number of buckets of a dimension.")
    ptr = resolve_ptr(x.size(1), ptr, device=x.device)
    sequence = torch.repeat_interleave(ptr.diff(), output_size=x.size(1))
    return torch.stack([_bucket(x[..., dim], ptr, sequence, count) for dim in range(x.size(2))], 2)


@torch.no_grad()
def clusters(x: Tensor, centroids: Tensor, top: int = 1) -> Tensor:
    """The clusters of each token, which are its nearest centroids, nearest first; the lower centroid wins a tie.

    Cost O(H N K (r + log K)).

    Args:
        x: Projected queries or keys, ``[H, N, r]``.
        centroids: ``[H, K, r]``, or ``[1, K, r]`` for all heads.
        top: Clusters m of a token, at most K.

    Returns:
        ``[H, N, m]`` int64 in ``0 .. K-1``.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.

    Example:
        >>> clusters(torch.tensor([[[0.1], [0.8]]]), torch.tensor([[[1.0], [0.0]]])).flatten().tolist()
        [1, 0]
    """
    _check_points(x)
    centroids = pairs.check_centroids(centroids, x, "x", "r")
    return _nearest_clusters(x, centroids, _check_top(top, centroids.size(1)))[0]


def _check_points(x: Tensor) -> None:
    checks.tensors(x=x)
    checks.floating(x=x)
    checks.shape("x", x, (None, None, None), "[H, N, r]", "Heads come first.")
    checks.require(x.numel() != 0, "x", "of at least one head, token and channel", x.shape, "Project tokens.")


def bucketing(tokens: Tokens, num_buckets: int) -> AttentionGraph:
    r"""Each query attends to the keys that share a bucket with it in any dimension.

    In each dimension the queries of a sequence are ranked, and its keys separately; rank :math:`\rho` of n is in bucket
    :math:`\lfloor \rho \beta / n \rfloor`. Buckets have equal sizes, so there are at most :math:`r \lceil n/\beta
    \rceil \lceil m / \beta \rceil \beta` edges of a head and sequence, for any tokens. Cost O(H r (N + M) log (N + M) +
    E), where E counts an edge once for each shared bucket.

    Args:
        tokens: Projected queries and keys, not causal: ranks depend on later tokens.
        num_buckets: Buckets :math:`\beta` of a dimension; the square root of n gives O(n^1.5) edges.

    Raises:
        TypeError, ValueError: As :func:`distance`; or the tokens are causal.

    Example:
        >>> x = torch.tensor([[[0.1], [5.0], [0.3], [7.0]]])
        >>> bucketing(Tokens(x), 2).to_dense()[0].int().tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    tokens = pairs.detached(tokens)
    count = checks.integer("num_buckets", num_buckets, 1, "It is the number of buckets of a dimension.")
    if tokens.is_causal:
        raise ValueError(
            "Expected no 'is_causal' with buckets (got True). Ranks depend on later tokens; take 'distance' or "
            "'clustering'."
        )
    ranges = []
    rows = torch.arange(tokens.heads * tokens.num_queries, device=tokens.query.device)
    for dim in range(tokens.query.size(2)):
        query_bucket = _bucket(tokens.query[..., dim], tokens.query_ptr, tokens.query_sequence, count)
        key_bucket = _bucket(tokens.key[..., dim], tokens.key_ptr, tokens.key_sequence, count)
        order, low, _, _, high = pairs.grouped(tokens, query_bucket, key_bucket, count)
        shift = dim * order.numel()  # to the keys of this dimension in the concatenation
        ranges.append((rows, low + shift, high + shift, order))
    graph = pairs.graph_of_ranges(tokens, *(torch.cat(parts) for parts in zip(*ranges, strict=True)))
    return pairs.show_nan(tokens, graph)


def _bucket(x: Tensor, ptr: Tensor, sequence: Tensor, buckets: int) -> Tensor:
    """The bucket of each token, ``[H, N]``, by its rank in its sequence."""
    order = x.argsort(dim=1, stable=True)
    order = order.gather(1, sequence[order].argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.size(1), device=x.device).expand_as(order))
    rank, length = rank - ptr[sequence], ptr.diff()[sequence]
    return rank * (buckets // length) + rank * (buckets % length) // length  # rank * buckets may overflow


@torch.no_grad()
def clustering(tokens: Tokens, centroids: Tensor, top: int = 1, cap: int | None = None) -> AttentionGraph:
    """Each query attends to the keys that share a cluster with it.

    A token is in the m clusters of its nearest centroids. Cost O(H (N + M)(K r + m log (N + M)) + E), where E counts an
    edge once for each shared cluster. Without a cap, E has no bound below that of full attention.

    Args:
        tokens: Projected queries and keys.
        centroids: Of :func:`~sbm_pyg.sparsefinder.fit_centroids`, ``[H, K, r]``, or ``[1, K, r]`` for all heads.
        top: Clusters m of a token, at most K.
        cap: Largest number of keys of a sequence in a cluster; the keys nearest to its centroid are kept, the lower key
            in a tie. None: no limit, as causal graphs need, since these ranks depend on later tokens.

    Raises:
        TypeError, ValueError: As :func:`distance`; or the tokens are causal and there is a cap.
    """
    tokens = pairs.detached(tokens)
    centroids = pairs.check_centroids(centroids, tokens.query, width="r")
    count = centroids.size(1)
    top = _check_top(top, count)
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a cluster."), tokens.num_keys)
        if tokens.is_causal:
            raise ValueError("Expected no 'cap' with 'is_causal' (got both). Its ranks depend on later tokens.")
    query_clusters, key_clusters = (_nearest_clusters(x, centroids, top) for x in (tokens.query, tokens.key))
    group = key_clusters[0] if cap is None else _capped(*key_clusters, tokens, count, cap)
    order, low, _, after, high = pairs.grouped(tokens, query_clusters[0], group, count + 1)
    row = torch.arange(tokens.heads * tokens.num_queries, device=tokens.query.device).repeat_interleave(top)
    return pairs.show_nan(tokens, pairs.graph_of_ranges(tokens, row, low, after if tokens.is_causal else high, order))


def _check_top(top: int, count: int) -> int:
    top = checks.integer("top", top, 1, "It is the number of clusters of a token.")
    checks.require(top <= count, "top", f"to be at most {count}, the number of centroids", top, "Lower it.")
    return top


def _nearest_clusters(x: Tensor, centroids: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The clusters of each token, ``[H, N, m]``, and its distances to their centroids."""
    far, cluster = _distance(x, centroids).sort(dim=2, stable=True)
    return cluster[..., :top], far[..., :top]


def _capped(cluster: Tensor, far: Tensor, tokens: Tokens, clusters: int, cap: int) -> Tensor:
    """The clusters of each key, ``[H, M, m]``; keys beyond the nearest ``cap`` get the number ``clusters`` (unused)."""
    _, order, rank = _ranked(tokens, cluster, far, clusters, tokens.key_sequence)
    return torch.where(torch.empty_like(rank).scatter_(0, order, rank).view_as(cluster) < cap, cluster, clusters)


@torch.no_grad()
def block_bigbird(
    tokens: Tokens,
    centroids: Tensor,
    k: int,
    block_size: int,
    *,
    by: str = "shared",
    block_window: int | None = None,
    global_blocks: int = 0,
) -> AttentionGraph:
    r"""Block-sparse BigBird with blocks predicted by clustering in place of the random blocks.

    The queries and the keys of a sequence are cut into blocks of :math:`\ell` tokens, each represented by the mean of
    its projections. All queries of a block attend to all keys of the blocks that are chosen for it:

    * ``by="nearest"``: each centroid takes the k blocks of queries and the k blocks of keys that are nearest to it,
      and each of these query blocks attends to each of these key blocks. A block may have any number of centroids.
    * ``by="shared"``: each block is assigned to its nearest centroid. A query block attends to the k key blocks of its
      centroid that are nearest to it.

    Ties go to the lower block or centroid. The window and global blocks are added. Global blocks are never chosen;
    ``"shared"`` does not choose blocks in the window either, so that each block gets k more blocks. The two rules
    interpret the authors' slides, which describe each rule in one line. Cost O(H (N + M) r + H n (K r + log n) + E) for
    n blocks and K centroids.

    Args:
        tokens: Projected queries and keys, not causal: means of blocks hold later tokens.
        centroids: ``[H, K, r]``, or ``[1, K, r]`` for all heads; of :func:`~sbm_pyg.sparsefinder.fit_centroids` with
            this ``block_size``.
        k: Blocks that a centroid takes, or that a block attends to, at least 1.
        block_size: Tokens of a block, at least 1; the last block of a sequence may be shorter.
        by: ``"nearest"`` or ``"shared"``, named v1 and v2 in the slides.
        block_window: Each block also attends to blocks at this distance or less, including itself; 1 is the window of
            three blocks in the slides. None: no window.
        global_blocks: Number of first blocks of a sequence that attend to all blocks and that all blocks attend to.

    Raises:
        TypeError, ValueError: As :func:`distance`; or the tokens are causal; or queries and keys are different tokens,
            and there is a window or a global block.

    Example:
        >>> x = torch.tensor([[[0.0], [0.2], [5.0], [5.0], [0.1], [0.1]]])
        >>> graph = block_bigbird(Tokens(x), torch.tensor([[[0.0], [5.0]]]), k=2, block_size=2)
        >>> graph.to_dense()[0, ::2].int().tolist()
        [[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]
    """
    tokens = pairs.detached(tokens)
    if tokens.is_causal:
        raise ValueError(
            "Expected no 'is_causal' with blocks (got True). Their means hold later tokens; take 'distance' or "
            "'clustering'."
        )
    centroids = pairs.check_centroids(centroids, tokens.query, width="r")
    k = min(checks.integer("k", k, 1, "It is a number of blocks."), max(tokens.num_keys, tokens.num_queries))
    size = checks.integer("block_size", block_size, 1, "It is the number of tokens of a block.")
    size = min(size, max(tokens.num_keys, tokens.num_queries))
    checks.one_of("by", by, ("nearest", "shared"))
    if block_window is not None:
        block_window = checks.integer("block_window", block_window, 0, "It is a distance in blocks.")
    count = checks.integer("global_blocks", global_blocks, 0, "It is a number of blocks.")
    pair = tokens.bipartite or not torch.equal(tokens.query_ptr, tokens.key_ptr)
    if pair and (block_window is not None or count):
        name = "block_window" if block_window is not None else "global_blocks"
        raise ValueError(f"Expected the same tokens as queries and keys with '{name}' (got a pair). Leave it out.")
    query_mean, query_ptr, query_block = block_means(tokens.query, tokens.query_ptr, size)
    key_mean, key_ptr, _ = block_means(tokens.key, tokens.key_ptr, size)
    over = Tokens(query_mean, key_mean, query_ptr, key_ptr)
    half_width = -1 if block_window is None else block_window
    choose = _by_nearest if by == "nearest" else _by_shared
    chosen = pairs.graph_of_pairs(over, *choose(over, centroids.to(query_mean.dtype), k, count, half_width))
    if block_window is not None:
        chosen = chosen | patterns.window(None, block_window, ptr=query_ptr)
    if count:
        chosen = chosen | patterns.global_tokens(None, count, ptr=query_ptr)
    head = chosen.num_queries * torch.arange(tokens.heads, device=tokens.query.device)
    of = (head[:, None] + query_block).flatten()  # [H*N], the row of blocks of each query
    row, edge = pairs.expand_ranges(
        torch.arange(of.numel(), device=tokens.query.device), chosen.rowptr[of], chosen.rowptr[of + 1]
    )
    block = chosen.col[edge].long()
    sequence = over.key_sequence[block]
    first = tokens.key_ptr[sequence] + over.key_position[block] * size
    graph = pairs.graph_of_ranges(tokens, row, first, torch.minimum(first + size, tokens.key_ptr[sequence + 1]))
    return pairs.show_nan(tokens, graph)


def _by_nearest(tokens: Tokens, centroids: Tensor, k: int, num_global: int, half_width: int) -> tuple[Tensor, Tensor]:
    """Pair the k query blocks and the k key blocks that are nearest to each centroid."""
    clusters, taken = centroids.size(1), []
    for x, sequence, position in (
        (tokens.query, tokens.query_sequence, tokens.query_position),
        (tokens.key, tokens.key_sequence, tokens.key_position),
    ):
        far = _distance(x, centroids)  # [H, n, K]
        cluster = torch.arange(clusters, device=x.device).expand_as(far)
        group, item, rank = _ranked(tokens, cluster, far, clusters, sequence, position >= num_global)
        taken.append((group[rank < k], item[rank < k] // clusters))
    (query_cluster, query), (key_cluster, key) = taken
    low, high = (torch.searchsorted(key_cluster, query_cluster, right=is_end) for is_end in (False, True))
    row, at = pairs.expand_ranges(query, low, high)
    return row, key[at] % tokens.num_keys


def _by_shared(tokens: Tokens, centroids: Tensor, k: int, num_global: int, half_width: int) -> tuple[Tensor, Tensor]:
    """Pair each query block with k key blocks that share its centroid and lie outside the window."""
    query_clusters, key_clusters = (_nearest_clusters(x, centroids, 1) for x in (tokens.query, tokens.key))
    group, key, _ = _ranked(
        tokens, *key_clusters, centroids.size(1), tokens.key_sequence, tokens.key_position >= num_global
    )
    key = key % tokens.num_keys
    query_group = _group_number(tokens, query_clusters[0], tokens.query_sequence, centroids.size(1))
    (query,) = (tokens.query_position >= num_global).repeat(tokens.heads).nonzero(as_tuple=True)
    low, high = (torch.searchsorted(group, query_group.flatten()[query], right=is_end) for is_end in (False, True))
    row, at = pairs.expand_ranges(
        query, low, torch.minimum(high, low + k + 2 * half_width + 1 if half_width >= 0 else low + k)
    )
    col = key[at]
    other = (tokens.query_position[row % tokens.num_queries] - tokens.key_position[col]).abs() > half_width
    row, col = row[other], col[other]
    rank = torch.arange(row.numel(), device=row.device) - torch.searchsorted(row, row)
    return row[rank < k], col[rank < k]


def _group_number(tokens: Tokens, cluster: Tensor, sequence: Tensor, clusters: int) -> Tensor:
    """Number the combinations of head, sequence and cluster; ``cluster`` is ``[H, n, m]``."""
    head = torch.arange(tokens.heads, device=cluster.device)[:, None, None]
    return (head * (tokens.key_ptr.numel() - 1) + sequence[:, None]) * clusters + cluster


def _ranked(
    tokens: Tokens, cluster: Tensor, far: Tensor, clusters: int, sequence: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort members of clusters ``[H, n, m]`` by group and distance, optionally only valid tokens ``[n]``.

    Returns:
        The group of each member, ascending; its flat index; and its rank in its group.
    """
    group = _group_number(tokens, cluster, sequence, clusters).flatten()
    order = far.flatten().argsort(stable=True)
    if valid is not None:
        order = order[valid[:, None].expand_as(far).flatten()[order]]
    order = order[group[order].argsort(stable=True)]
    of = group[order]
    return of, order, torch.arange(of.numel(), device=of.device) - torch.searchsorted(of, of)
