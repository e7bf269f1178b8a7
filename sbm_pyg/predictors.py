"""Graphs of what is near: how Sparsefinder foretells the edges of a head from projected queries and keys.

In: queries and keys of each head, projected to few dimensions. Out: an :class:`~sbm_pyg.graph.AttentionGraph`. Not
here: the projections and the source of a layer (``sparsefinder``), and what the head really uses (``gold``).

Reference: Treviso, Gois, Fernandes, Fonseca, Martins: "Predicting Attention Sparsity in Transformers", 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import AttentionGraph
from .ops import checks
from .pairs import Ptr, Sides, largest, ranges, streamed

__all__ = ["bucketing", "clustering", "distance"]

EXACT = "donot_use_mm_for_euclid_dist"


@torch.no_grad()
def distance(
    query: Tensor, key: Tensor, threshold: float, cap: int | None = None, *, ptr: Ptr = None, is_causal: bool = False
) -> AttentionGraph:
    r"""Each query attends to the keys at a distance of at most a threshold.

    An edge where :math:`\|q'_i - k'_j\| \le t`. Cost O(H N M r) time, rows a part at a time.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        threshold: The t above, at least 0.
        cap: Most keys of a query, the nearest, equal ones by the lower key. None: no limit.
        ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: one sequence.
        is_causal: No query attends to a later key.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.

    Example:
        >>> x = torch.tensor([[[0.0], [1.0], [3.0]]])
        >>> distance(x, x, 1.5).to_dense()[0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    sides = Sides.of(query, key, ptr, is_causal)
    checks.number("threshold", threshold, "[0, inf]", "It is a distance.")
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a query."), sides.num_keys)

    def near(scores: Tensor, possible: Tensor, token: Tensor) -> Tensor:
        inside = possible & (scores >= -threshold)
        return inside if cap is None else largest(cap)(scores.masked_fill_(~inside, -torch.inf), inside, token)

    def score(query: Tensor, key: Tensor) -> Tensor:
        return -torch.cdist(query, key, compute_mode=EXACT)

    return sides.graph(*streamed(sides, sides.key, sides.key_ptr, sides.reach, near, score))


@torch.no_grad()
def bucketing(
    query: Tensor, key: Tensor, num_buckets: int, *, ptr: Ptr = None, is_causal: bool = False
) -> AttentionGraph:
    r"""Each query attends to the keys that share a bucket with it in any dimension.

    In each dimension the queries of a sequence are ranked, and so are its keys; rank :math:`\rho` of n is in bucket
    :math:`\lfloor \rho \beta / n \rfloor`. Buckets have equal sizes, so there are at most :math:`r \lceil n/\beta
    \rceil \lceil m / \beta \rceil \beta` edges of a head and sequence, whatever the tokens hold. Cost O(H r (N + M) log
    (N + M) + E), E before repeats are taken out.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        num_buckets: Buckets :math:`\beta` of a dimension; the square root of n gives O(n^1.5) edges.
        ptr: As :func:`distance`.
        is_causal: Refused: ranks depend on later tokens.

    Raises:
        TypeError, ValueError: As :func:`distance`; or ``is_causal``.

    Example:
        >>> x = torch.tensor([[[0.1], [5.0], [0.3], [7.0]]])
        >>> bucketing(x, x, 2).to_dense()[0].int().tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    sides = Sides.of(query, key, ptr, is_causal)
    buckets = checks.integer("num_buckets", num_buckets, 1, "It is the number of buckets of a dimension.")
    if is_causal:
        raise ValueError(
            "Expected no 'is_causal' with buckets (got True). Ranks depend on later tokens; take 'distance' or "
            "'clustering'."
        )
    found = []
    every = torch.arange(sides.heads * sides.num_queries, device=query.device)
    for dim in range(query.size(2)):
        mine = _bucket(sides.query[..., dim], sides.query_ptr, sides.query_sequence, buckets)
        theirs = _bucket(sides.key[..., dim], sides.key_ptr, sides.key_sequence, buckets)
        order, low, _, _, high = sides.grouped(mine, theirs, buckets)
        row, at = ranges(every, low, high)
        found.append((row, order[at]))
    row, col = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sides.graph(row, col)


def _bucket(x: Tensor, ptr: Tensor, sequence: Tensor, buckets: int) -> Tensor:
    """The bucket of each token, ``[H, N]``, by its rank in its sequence."""
    order = x.argsort(dim=1, stable=True)
    order = order.gather(1, sequence[order].argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.size(1), device=x.device).expand_as(order))
    return (rank - ptr[sequence]) * buckets // ptr.diff()[sequence]


@torch.no_grad()
def clustering(
    query: Tensor,
    key: Tensor,
    centroids: Tensor,
    top: int = 1,
    cap: int | None = None,
    *,
    ptr: Ptr = None,
    is_causal: bool = False,
) -> AttentionGraph:
    """Each query attends to the keys that share a cluster with it.

    A token is in the m clusters of its nearest centroids. Cost O(H (N + M)(K r + m log (N + M)) + E), E before repeats
    are taken out; without a cap nothing bounds it.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        centroids: Of :func:`~sbm_pyg.sparsefinder.fit_centroids`, ``[H, K, r]``, or ``[1, K, r]`` for all heads.
        top: Clusters m of a token, at most K.
        cap: Most keys of a sequence in a cluster, the nearest to its centroid, equal ones by the lower key. None: no
            limit.
        ptr: As :func:`distance`.
        is_causal: As :func:`distance`; refused with a cap, whose ranks depend on later tokens.

    Raises:
        TypeError, ValueError: As :func:`distance`; or ``is_causal`` with a cap.
    """
    sides = Sides.of(query, key, ptr, is_causal)
    checks.tensors(centroids=centroids)
    checks.shape("centroids", centroids, (None, None, query.size(2)), "[H, K, r]", "They are as wide as the queries.")
    checks.floating(centroids=centroids)
    checks.same_device("query", query, centroids=centroids)
    clusters = centroids.size(1)
    if centroids.size(0) not in (1, sides.heads):
        raise ValueError(
            f"Expected 'centroids' to be [{sides.heads}, K, r] or [1, K, r] (got {list(centroids.shape)}). "
            "Each head has its own, or all share them."
        )
    top = checks.integer("top", top, 1, "It is the number of clusters of a token.")
    if top > clusters:
        raise ValueError(f"Expected 'top' to be at most {clusters}, the number of centroids (got {top}). Lower it.")
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a cluster."), sides.num_keys)
        if is_causal:
            raise ValueError("Expected no 'cap' with 'is_causal' (got both). Its ranks depend on later tokens.")
    centroids = centroids.to(query.dtype).expand(sides.heads, -1, -1)
    mine, theirs = (_nearest(x, centroids, top) for x in (sides.query, sides.key))
    group = theirs[0] if cap is None else _capped(*theirs, sides, clusters, cap)
    order, low, _, after, high = sides.grouped(mine[0], group, clusters + 1)
    every = torch.arange(sides.heads * sides.num_queries, device=query.device).repeat_interleave(top)
    row, at = ranges(every, low, after if is_causal else high)
    return sides.graph(row, order[at])


def _nearest(x: Tensor, centroids: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The clusters of each token, ``[H, N, m]``, and its distances to their centroids."""
    far, cluster = torch.cdist(x, centroids, compute_mode=EXACT).sort(dim=2, stable=True)
    return cluster[..., :top], far[..., :top]


def _capped(cluster: Tensor, far: Tensor, sides: Sides, clusters: int, cap: int) -> Tensor:
    """The clusters of each key, ``[H, M, m]``; ``clusters``, which no query is in, beyond the nearest ``cap``."""
    head = torch.arange(sides.heads, device=far.device)[:, None, None]
    group = ((head * (sides.key_ptr.numel() - 1) + sides.key_sequence[:, None]) * clusters + cluster).flatten()
    order = far.flatten().argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    of = group[order]
    rank = torch.arange(of.numel(), device=far.device) - torch.searchsorted(of, of)
    return torch.where(torch.empty_like(rank).scatter_(0, order, rank).view_as(cluster) < cap, cluster, clusters)
