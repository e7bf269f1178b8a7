r"""Block models that add to the scores: the bias of the DCMM-Transformer, over any graph.

In: queries and keys of each head, and a graph. Out: a number for each edge, which attention adds to its score. Not
here: block models that choose the graph (``sbm``), and attention.

A block model of :class:`~sbm_pyg.SBM` says which pairs attend at all; this one says how much more. The two go together:
a graph that the one samples is attended to with the bias of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from .auxiliary import AuxiliaryLosses, mean_weights
from .graph import AttentionGraph, check_graph
from .ops import checks, edge_dot

__all__ = ["DCMM", "DCMMBias"]

DEGREES: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "sigmoid": torch.sigmoid, "softplus": softplus}


class DCMM(NamedTuple):
    """Parameters of a degree-corrected mixed-membership block model, for each head."""

    query_membership: Tensor
    r"""Memberships of the queries :math:`\pi`, ``[H, N, K]``; those of a token sum to 1."""
    key_membership: Tensor
    """Memberships of the keys, ``[H, M, K]``."""
    block_matrix: Tensor
    """How blocks attract each other, ``[H, K, K]`` in (0, 1); ``[u, v]`` links query block u to key block v."""
    query_degree: Tensor
    r"""Degrees of the queries :math:`\theta`, ``[H, N]``, non-negative."""
    key_degree: Tensor
    """Degrees of the keys, ``[H, M]``."""

    @property
    def entropy(self) -> Tensor:
        r"""Mean entropy of the memberships over tokens and heads, a scalar in nats, at most :math:`\ln K`.

        Keys count where their memberships are their own. The authors add 0.1 times it to the loss, so that tokens
        decide for few blocks.
        """
        member = self.query_membership
        if self.key_membership is not member:
            member = torch.cat([member, self.key_membership], 1)
        return _entropy(member).mean()


def _entropy(member: Tensor) -> Tensor:
    """Entropy of the memberships of each token, ``[H, N]``."""
    return -(member * (member + 1e-8).log()).sum(-1)


def _mean_entropy(member: Tensor, ptr: Tensor) -> Tensor:
    """Mean over sequences of the mean entropy of their tokens, over heads, a scalar."""
    return (_entropy(member) * mean_weights(ptr, member.size(1), member.dtype)).sum(-1).mean()


class DCMMBias(nn.Module):
    r"""Adds the strength of a degree-corrected mixed-membership block model to the score of each edge.

    .. math:: b_{ij} = \lambda \, \theta_i \theta_j \tanh(\pi_i B \pi_j^\top)

    with memberships :math:`\pi_i = \operatorname{softmax}_K(W q_i + w)`, degrees :math:`\theta_i =
    \operatorname{ReLU}(\langle v, q_i \rangle + c)`, block matrices B that are the sigmoid of free entries, and one
    learnable scale :math:`\lambda`. All heads share W and v; each has its own B. Everything has a derivative, and no
    graph is chosen: pass an instance as ``score_bias`` of :class:`~sbm_pyg.AttentionConv`. Over
    :func:`~sbm_pyg.sources.patterns.full` that is the published layer; over any other graph, its restriction to the
    edges.

    Cost O(N K (C + K) + E K) per head. Memory O(E); no array of N x M unless the graph has so many edges.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        num_blocks: Number of blocks K.
        degree: What makes degrees positive: ``"relu"``, as the code of the authors has it, where half of the degrees
            start at 0, without a gradient; ``"sigmoid"``, as its help text; or ``"softplus"``.
        squash: The tanh, which the authors' code has and their figure has not.
        symmetric: B is the sigmoid of a symmetric matrix, as the affinities of an undirected network.
        tied: Keys have the memberships and degrees that their own tokens have as queries, as published; needs the same
            tokens on both sides. Otherwise both are linear in the keys, with maps of their own.
        scale: Where :math:`\lambda` starts.
        entropy_weight: In training this times the mean entropy of the memberships of a sequence is an auxiliary loss,
            which the training loop adds, see :func:`sbm_pyg.auxiliary_loss`; at least 0. The authors have 0.1.

    Raises:
        TypeError, ValueError: An option is unknown or out of range, or memory does not hold the parameters.

    Shapes:
        - query ``[H, N, C]``, key ``[H, M, C]``, graph with E edges; output ``[E]``, in the type of the queries.

    Example:
        >>> from sbm_pyg import AttentionConv, SBMAttentionConv, patterns
        >>> bias = DCMMBias(8, heads=2, num_blocks=5)
        >>> conv = AttentionConv(16, 8, 2, patterns.PatternSource(patterns.full), score_bias=bias)  # as published
        >>> conv(torch.randn(10, 16)).shape
        torch.Size([10, 16])
        >>> sampled = SBMAttentionConv(16, 8, 2, num_blocks=4, score_bias=bias)  # over the edges of a sampled graph
        >>> out, graph = sampled(torch.randn(10, 16), seed=0, return_graph=True)

    Reference: Cheng et al., "DCMM-Transformer: Degree-Corrected Mixed-Membership Attention for Medical Imaging", AAAI
    2026, and the code of its authors, where text, figure and code differ.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        num_blocks: int = 100,
        *,
        degree: str = "relu",
        squash: bool = True,
        symmetric: bool = False,
        tied: bool = True,
        scale: float = 10.0,
        entropy_weight: float = 0.0,
    ) -> None:
        super().__init__()
        given = {"channels": channels, "heads": heads, "num_blocks": num_blocks}
        for name, size in given.items():
            checks.integer(name, size, 1, "The paper has 64 channels, 6 heads and 100 blocks.")
        checks.one_of("degree", degree, tuple(DEGREES))
        for name, flag in (("squash", squash), ("symmetric", symmetric), ("tied", tied)):
            checks.flag(name, flag, "See the docstring of DCMMBias.")
        checks.number("scale", scale, "(-inf, inf)", "It is where the factor of the bias starts.")
        checks.number("entropy_weight", entropy_weight, "[0, inf)", "It is a factor of what is added to the loss.")
        self.channels, self.heads, self.num_blocks = given.values()
        self.degree, self.squash, self.symmetric, self.tied = degree, squash, symmetric, tied
        self.start, self.entropy_weight = float(scale), entropy_weight
        self.auxiliary_losses = AuxiliaryLosses()
        self.lin_group, self.lin_degree = nn.Linear(channels, num_blocks), nn.Linear(channels, 1)
        self.lin_key_group = None if tied else nn.Linear(channels, num_blocks)
        self.lin_key_degree = None if tied else nn.Linear(channels, 1)
        self.affinity = nn.Parameter(torch.empty(heads, num_blocks, num_blocks))
        self.scale = nn.Parameter(torch.empty(()))
        self._reset_own()

    def _reset_own(self) -> None:
        nn.init.normal_(self.affinity)
        nn.init.constant_(self.scale, self.start)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as those of :class:`torch.nn.Linear`; affinities are normal."""
        for layer in (self.lin_group, self.lin_degree, self.lin_key_group, self.lin_key_degree):
            if layer is not None:
                layer.reset_parameters()
        self._reset_own()

    def predict(self, query: Tensor, key: Tensor) -> DCMM:
        """The block model of these tokens, in float32 or better, differentiable: for looking, and for regularisers.

        Args:
            query: ``[H, N, C]``.
            key: ``[H, M, C]``; its values do not matter where keys are tied.

        Raises:
            TypeError, ValueError: A shape or type does not fit, or there are other tokens on both sides of a tied one.
        """
        checks.check_query_key(self, query, key, self.heads, self.channels)
        if self.tied and key.size(1) != query.size(1):
            raise ValueError(
                f"Expected 'key' of {query.size(1)} tokens, as 'query' has (got {key.size(1)}). Memberships of keys "
                "are those of queries; use tied=False."
            )
        wide = torch.promote_types(query.dtype, torch.float32)
        affinity = self.affinity.to(wide)
        block = torch.sigmoid((affinity + affinity.mT) / 2 if self.symmetric else affinity)
        mine = self._side(query, self.lin_group, self.lin_degree)
        if self.lin_key_group is None or self.lin_key_degree is None:
            theirs = mine
        else:
            theirs = self._side(key, self.lin_key_group, self.lin_key_degree)
        return DCMM(mine[0], theirs[0], block, mine[1], theirs[1])

    def _side(self, x: Tensor, group: nn.Linear, degree: nn.Linear) -> tuple[Tensor, Tensor]:
        """Memberships ``[H, N, K]`` and degrees ``[H, N]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return group(x).to(wide).softmax(-1), DEGREES[self.degree](degree(x)[..., 0].to(wide))

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        """What is added to the score of each edge.

        Raises:
            TypeError, ValueError: As :meth:`predict`, or the graph is of other heads or tokens.
        """
        check_graph(graph)
        model = self.predict(query, key)
        sides = (self.heads, query.size(1), key.size(1))
        if (graph.heads, graph.num_queries, graph.num_keys) != sides:
            raise ValueError(
                f"Expected 'graph' over {sides[0]} heads, {sides[1]} queries and {sides[2]} keys (got {graph}). "
                "Build it over these tokens."
            )
        rate = model.query_membership @ model.block_matrix
        strength = edge_dot(rate, model.key_membership, graph.rows)
        strength = strength.tanh() if self.squash else strength
        key_node = graph.num_keys * graph.edge_head + graph.col
        degree = model.query_degree.flatten()[graph.edge_row] * model.key_degree.flatten()[key_node]
        bias = (self.scale * degree * strength).to(query.dtype)
        if self.entropy_weight and self.training and torch.is_grad_enabled():
            found = [_mean_entropy(model.query_membership, graph.query_ptr)]
            found += [] if self.tied else [_mean_entropy(model.key_membership, graph.key_ptr)]
            entropy = torch.stack(found).mean()
            bias = self.auxiliary_losses.add(
                bias, self.entropy_weight * entropy, "DCMMBias, whose entropy has a weight"
            )
        return bias

    def extra_repr(self) -> str:
        """Its sizes and options."""
        return (
            f"{self.channels}, heads={self.heads}, num_blocks={self.num_blocks}, degree={self.degree!r}, "
            f"squash={self.squash}, symmetric={self.symmetric}, tied={self.tied}"
        )
