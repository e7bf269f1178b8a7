"""A block model whose memberships are linear in queries and keys, and which a trained model can begin with.

In: :class:`~sbm_pyg.Tokens`. Out: an :class:`~sbm_pyg.SBM`. Not here: the block models of the papers (``sbm``), and
the clusters that a start is made of (``starts``).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..graphs.ragged import Tokens, check_record
from ..ops import checks
from . import starts
from .sbm import SBM, log_odds

__all__ = ["LinearSBMHead"]

SHARPNESS = 2.0
"""Factor of the scores of keys at a start, which decides how sharply a cluster prefers its best keys."""
MOST_TOKENS = 4096
"""Queries, and keys, of each head that a start is computed from."""


class LinearSBMHead(torch.nn.Module):
    r"""Predicts the block model of each head by a linear map of its queries and a separate linear map of its keys.

    .. math:: Y = \operatorname{softmax}_K(q A + a), \quad Z = \sigma(k B + b), \quad p_{ij} = \langle Y_i, Z_j \rangle

    A query chooses one community, and a key is in any number of them, as with the ``"overlapping"`` memberships of
    :class:`~sbm_pyg.SBMHead`. Unlike in :class:`~sbm_pyg.SBMHead`, queries, keys and heads share no parameters. So
    :meth:`start_from` can begin with the clusters of a trained model: :math:`p_{ij}` is then large where the center of
    the cluster of query i has a large score with key j. Cost O(N C K) per head.

    Args:
        channels: Channels per head C.
        heads: Number of heads H.
        num_clusters: Number of communities K.
        initial_density: Probability of an edge before training, in (0, 1).

    Raises:
        TypeError, ValueError: An option is out of range.

    Shapes:
        - :class:`~sbm_pyg.Tokens` of N queries and M keys; returns an :class:`~sbm_pyg.SBM` with K blocks.

    Example:
        >>> head = LinearSBMHead(8, heads=2, num_clusters=4)
        >>> head(Tokens(torch.randn(2, 10, 8)))
        SBM(1 sequence, 2 heads, 10 queries, 10 keys, 4 blocks)
    """

    head_dims: ClassVar[dict[str, int]] = {"query_map": 0, "query_bias": 0, "key_map": 0, "key_bias": 0}

    def __init__(self, channels: int, heads: int = 1, num_clusters: int = 64, *, initial_density: float = 0.25) -> None:
        super().__init__()
        sizes = {"channels": channels, "heads": heads, "num_clusters": num_clusters}
        channels, heads, num_clusters = (
            checks.integer(*size, 1, "It is a size of the head.") for size in sizes.items()
        )
        checks.number("initial_density", initial_density, "(0, 1)", "It is an edge's probability at first.")
        checks.parameters(sizes, 2 * heads * num_clusters * (channels + 1))
        self.channels, self.heads, self.num_clusters = channels, heads, num_clusters
        self.initial_density = initial_density
        for side in ("query", "key"):
            self.register_parameter(f"{side}_map", torch.nn.Parameter(torch.empty(heads, channels, num_clusters)))
            self.register_parameter(f"{side}_bias", torch.nn.Parameter(torch.empty(heads, num_clusters)))
        self.reset_parameters()

    query_map: Tensor
    query_bias: Tensor
    key_map: Tensor
    key_bias: Tensor

    def reset_parameters(self) -> None:
        """Reset the maps as :class:`torch.nn.Linear` does, and the biases to the initial density."""
        with torch.no_grad():
            for weight in (self.query_map, self.key_map):
                weight.uniform_(-(self.channels**-0.5), self.channels**-0.5)
            self.query_bias.zero_()
            self.key_bias.fill_(log_odds(self.initial_density))

    def forward(self, tokens: Tokens) -> SBM:
        """Predict the model of the tokens; see the class.

        Raises:
            TypeError, ValueError: A shape or type does not fit.
        """
        check_record(tokens)
        checks.check_query_key(self, tokens.query, tokens.key, self.heads, self.channels)
        query = torch.baddbmm(self.query_bias[:, None], tokens.query, self.query_map)
        key = torch.baddbmm(self.key_bias[:, None], tokens.key, self.key_map)
        query_side = query.softmax(-1, dtype=query.dtype)  # also under autocast
        return SBM._trusted(query_side, key.sigmoid(), None, tokens.query_ptr, tokens.key_ptr)

    @torch.no_grad()
    def start_from(self, query: Tensor, key: Tensor, *, scale: float, density: float, seed: int = 0) -> None:
        r"""Initialize the parameters from k-means clusters of the queries of a trained layer.

        A query belongs to its nearest center :math:`c_u`, and a key to the communities whose centers score it high,
        :math:`\sigma(2 \, \text{scale} \, \langle c_u, k \rangle + b_u)`. The bias :math:`b_u` gives each community the
        same fraction of the keys. Cost O(H n K C) for n tokens, of which at most 4,096 are used, drawn at random.

        Args:
            query, key: Queries ``[H, N, C]`` and keys ``[H, M, C]``.
            scale: Factor of the scores.
            density: Fraction of the keys in each community, in (0, 1).
            seed: Seed of the clusters.
        """
        generator = torch.Generator().manual_seed(seed)
        query, key = (_some_tokens(x.float(), generator) for x in (query, key))
        centers = starts.clusters_of_queries(query, key, self.num_clusters, generator)  # [H, K, C]
        nearness = starts.covariance(key, centered=True) @ centers.mT  # [H, C, K]
        key_map = SHARPNESS * scale * centers.mT
        self.query_map.copy_(scale * nearness)
        self.query_bias.copy_(-scale * (centers * nearness.mT).sum(2) / 2)
        self.key_map.copy_(key_map)
        self.key_bias.copy_(starts.thresholds(key @ key_map, density))

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}, num_clusters={self.num_clusters}"


def _some_tokens(x: Tensor, generator: torch.Generator) -> Tensor:
    """Select at random at most ``MOST_TOKENS`` of the tokens of ``[H, N, C]``."""
    if x.size(1) <= MOST_TOKENS:
        return x
    return x[:, torch.randperm(x.size(1), generator=generator)[:MOST_TOKENS].to(x.device)]
