"""Initial parameters of sources from the queries and keys of a trained model, without a training step.

In: queries ``[H, N, C]`` and keys ``[H, M, C]`` of one layer. Out: clusters, thresholds and main directions. Not here:
the modules that use these values (``linear_sbm``, ``indexer``), and training (``layers.calibration``).

Attention depends on the scores :math:`\\langle q, k \\rangle`, so queries are compared by their scores: the squared
distance of two queries is the mean squared difference of their scores with the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clusters_of_queries", "covariance", "low_rank_scores", "thresholds"]

ROUNDS = 15
"""Rounds of k-means."""
LEAST = 1e-6
"""Smallest eigenvalue of a covariance that is inverted, as a part of the largest."""


def clusters_of_queries(query: Tensor, key: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    r"""Centers ``[H, K, C]`` of k-means clusters of the queries of each head.

    The distance of two queries is :math:`(q - q')^\top \Sigma (q - q')` with the covariance of the keys
    :math:`\Sigma`. Cost O(H N K C) per round.

    Args:
        query, key: ``[H, N, C]`` and ``[H, M, C]``.
        num_clusters: Number of clusters K of each head. If there are fewer queries, centers repeat.
        generator: Draws the queries at which clusters begin.
    """
    root, inverse = _roots_of(covariance(key, centered=True))
    points = query @ root
    heads, count, _ = points.shape
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(heads)]).to(query.device)
    order = order.repeat(1, -(-num_clusters // count))[:, :num_clusters]
    centers = points.gather(1, order[..., None].expand(-1, -1, points.size(2)))
    for _ in range(ROUNDS):
        nearest = (points @ centers.mT - centers.square().sum(2)[:, None] / 2).argmax(2)
        sums = torch.zeros_like(centers).scatter_add_(1, nearest[..., None].expand_as(points), points)
        sizes = torch.zeros_like(centers[..., 0]).scatter_add_(1, nearest, torch.ones_like(points[..., 0]))[..., None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)  # an empty cluster stays where it is
    return centers @ inverse


def thresholds(score: Tensor, density: float) -> Tensor:
    """Biases ``[H, K]`` with which the sigmoid of scores ``[H, M, K]`` has a given mean over the keys, by bisection."""
    low = -score.amax(1) - 30
    high = -score.amin(1) + 30
    for _ in range(40):
        middle = (low + high) / 2
        is_low = (score + middle[:, None]).sigmoid().mean(1) < density
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (low + high) / 2


def low_rank_scores(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    r"""Linear maps of queries and of keys ``[H, C, r]`` whose products best approximate the scores in the mean square.

    The maps are built from the largest singular vectors of :math:`Q^{1/2} \Sigma^{1/2}`, with second moments :math:`Q`
    of the queries and the covariance :math:`\Sigma` of the keys. The mean key adds the same number to all scores of a
    query, and is left out. Cost O(H (N C^2 + C^3)).

    Args:
        query, key: ``[H, N, C]`` and ``[H, M, C]``.
        rank: Number of directions r, at most C.
    """
    query_root, query_inverse = _roots_of(covariance(query, centered=False))
    key_root, key_inverse = _roots_of(covariance(key, centered=True))
    left, size, right = torch.linalg.svd(query_root @ key_root)
    root = size[:, None, :rank].sqrt()
    return query_inverse @ left[..., :rank] * root, key_inverse @ right.mT[..., :rank] * root


def covariance(x: Tensor, centered: bool) -> Tensor:
    """Second moments of vectors, ``[H, C, C]``, about their mean if ``centered``."""
    x = x - x.mean(1, keepdim=True) if centered else x
    return x.mT @ x / max(x.size(1), 1)


def _roots_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of positive matrices ``[H, C, C]``, and the inverse of the root."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=LEAST * values.amax(1, keepdim=True)).clamp(min=torch.finfo(values.dtype).tiny)[:, None]
    return vectors * values.sqrt() @ vectors.mT, vectors * values.rsqrt() @ vectors.mT
