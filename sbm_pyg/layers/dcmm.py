r"""The block model of the DCMM-Transformer as a score bias, over any graph.

In: queries and keys of each head, and a graph. Out: a bias for each edge, which attention adds to its score. Not
here: block models that choose the graph (``sbm``), and attention.

An :class:`~sbm_pyg.SBM` decides which pairs attend; this block model decides how strongly. The two can be combined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from ..graphs.graph import AttentionGraph, check_graph
from ..ops import checks, schemas
from ..sources.dense import BiasFactors
from ..training.auxiliary import AuxiliaryLosses, mean_weights

__all__ = ["DCMM", "DCMMBias"]

DEGREES: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "sigmoid": torch.sigmoid, "softplus": softplus}


class DCMM(NamedTuple):
    """Parameters of a degree-corrected mixed-membership block model, for each head."""

    query_membership: Tensor
    r"""Memberships of the queries :math:`\pi`, ``[H, N, K]``; they sum to 1 for each token."""
    key_membership: Tensor
    """Memberships of the keys, ``[H, M, K]``."""
    block_matrix: Tensor
    """Affinities ``[H, K, K]`` in (0, 1); ``[u, v]`` links queries in community u to keys in community v."""
    query_degree: Tensor
    r"""Degrees of the queries :math:`\theta`, ``[H, N]``, non-negative."""
    key_degree: Tensor
    """Degrees of the keys, ``[H, M]``."""

    @property
    def entropy(self) -> Tensor:
        r"""Mean entropy of the memberships over tokens and heads, a scalar in nats, at most :math:`\ln K`.

        Keys count only if their memberships are computed separately. The authors add 0.1 times the entropy to the loss,
        so that each token belongs to few communities.
        """
        member = self.query_membership
        if self.key_membership is not member:
            member = torch.cat([member, self.key_membership], 1)
        return _entropy(member).mean()


def _entropy(member: Tensor) -> Tensor:
    """Entropy of the memberships of each token, ``[H, N]``."""
    return -(member * (member + 1e-8).log()).sum(-1)


def _mean_entropy(member: Tensor, ptr: Tensor) -> Tensor:
    """Entropy, averaged over the tokens of each sequence, then over sequences and heads; a scalar."""
    return (_entropy(member) * mean_weights(ptr, member.size(1), member.dtype)).sum(-1).mean()


class Squashed(torch.autograd.Function):
    """Products of degrees with the tanh of strengths, ``[G, L, S]``, with few new arrays.

    Args:
        of_query: Degrees of queries, and their affinities to the communities, ``[G, L, 1+K]``.
        of_key: Degrees and memberships of keys, ``[G, S, 1+K]``.
    """

    @staticmethod
    def forward(of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor]:
        strength = of_query[..., 1:] @ of_key[..., 1:].mT
        strength = strength.mul_(2).sigmoid_().mul_(2).sub_(1)  # the tanh, in a third of its time
        return (strength * of_query[..., :1]).mul_(of_key[..., :1].mT), strength

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        of_query, of_key, strength = ctx.saved_tensors
        (query_degree, rate), (key_degree, member) = (x.split([1, x.size(-1) - 1], -1) for x in (of_query, of_key))
        moved = grad * strength
        dquery_degree, dkey_degree = moved @ key_degree, moved.mT @ query_degree
        dstrength = torch.addcmul(grad, moved, strength, value=-1, out=moved)  # 1 - tanh^2 times the gradient
        dstrength = dstrength.mul_(query_degree).mul_(key_degree.mT)
        drate, dmember = dstrength @ member, dstrength.mT @ rate
        return torch.cat([dquery_degree, drate], -1), torch.cat([dkey_degree, dmember], -1)


def _squashed(of_query: Tensor, of_key: Tensor) -> Tensor:
    bias: Tensor = Squashed.apply(of_query, of_key)[0]
    return bias


def _products(of_query: Tensor, of_key: Tensor) -> Tensor:
    return of_query @ of_key.mT


class DCMMBias(nn.Module):
    r"""Adds the strength of a degree-corrected mixed-membership block model to the score of each edge.

    .. math:: b_{ij} = \lambda \, \theta_i \theta_j \tanh(\pi_i B \pi_j^\top)

    with memberships :math:`\pi_i = \operatorname{softmax}_K(W q_i + w)`, degrees :math:`\theta_i =
    \operatorname{ReLU}(\langle v, q_i \rangle + c)`, block matrices B that are the sigmoid of free entries, and one
    learnable scale :math:`\lambda`. All heads share W and v; each has its own B. The bias is differentiable and chooses
    no graph: pass it as ``score_bias`` of :class:`~sbm_pyg.AttentionConv`. Over :func:`~sbm_pyg.sources.patterns.full`
    this is the published layer; over any other graph, the published layer restricted to the edges. Cost O(N K (C + K) +
    E K) per head. Memory is O(E) over edges. Over all pairs it is O(N K): biases are computed for some rows at a time,
    and again in the backward pass. Without the tanh a bias is an inner product, which K more channels of queries and
    keys add to the scores of any graph.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        num_clusters: Number of communities K.
        degree: Function that makes degrees positive: ``"relu"``, as in the authors' code, with which half of the
            degrees start at 0 and get no gradient; ``"sigmoid"``, as in the help text of that code; or ``"softplus"``.
        squash: Apply the tanh, which is in the authors' code but not in their figure.
        symmetric: B is the sigmoid of a symmetric matrix, as the affinities of an undirected network.
        tied: Keys have the memberships and degrees of the same tokens as queries, as published; queries and keys must
            be the same tokens. Otherwise keys use separate linear maps.
        scale: Initial :math:`\lambda`.
        entropy_weight: Weight, at least 0, of the mean entropy of the memberships of a sequence, an auxiliary loss in
            training that the training loop adds (:func:`sbm_pyg.auxiliary_loss`). The authors use 0.1.

    Raises:
        TypeError, ValueError: An option is unknown or out of range, or memory does not hold the parameters.

    Shapes:
        - query ``[H, N, C]``, key ``[H, M, C]``, graph with E edges; output ``[E]``, in the dtype of the queries.

    Example:
        >>> from sbm_pyg import AttentionConv, SBMAttentionConv, patterns
        >>> bias = DCMMBias(8, heads=2, num_clusters=5)
        >>> conv = AttentionConv(16, 8, 2, patterns.PatternSource(patterns.full), score_bias=bias)  # as published
        >>> conv(torch.randn(10, 16)).shape
        torch.Size([10, 16])
        >>> sampled = SBMAttentionConv(16, 8, 2, num_clusters=4, score_bias=bias)  # over the edges of a sampled graph
        >>> out, graph = sampled(torch.randn(10, 16), seed=0, return_graph=True)

    Reference: Cheng et al., "DCMM-Transformer: Degree-Corrected Mixed-Membership Attention for Medical Imaging", AAAI
    2026, and the code of its authors. Text, figure and code differ.
    """

    head_dims: ClassVar[dict[str, int]] = {"affinity": 0}

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        num_clusters: int = 100,
        *,
        degree: str = "relu",
        squash: bool = True,
        symmetric: bool = False,
        tied: bool = True,
        scale: float = 10.0,
        entropy_weight: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "heads": heads, "num_clusters": num_clusters}
        for name, size in sizes.items():
            checks.integer(name, size, 1, "The paper has 64 channels, 6 heads and 100 blocks.")
        checks.one_of("degree", degree, tuple(DEGREES))
        for name, flag in (("squash", squash), ("symmetric", symmetric), ("tied", tied)):
            checks.flag(name, flag, "See the docstring of DCMMBias.")
        checks.number("scale", scale, "(-inf, inf)", "It is the initial factor of the bias.")
        checks.number("entropy_weight", entropy_weight, "[0, inf)", "It is the weight of the entropy in the loss.")
        checks.parameters("num_clusters", num_clusters * (channels + num_clusters), "Take fewer.")
        checks.parameters("heads", heads * num_clusters**2, "Take fewer heads or communities.")
        self.channels, self.heads, self.num_clusters = sizes.values()
        self.degree, self.squash, self.symmetric, self.tied = degree, squash, symmetric, tied
        self.start, self.entropy_weight = float(scale), entropy_weight
        self.auxiliary_losses = AuxiliaryLosses()
        self.lin_group, self.lin_degree = nn.Linear(channels, num_clusters), nn.Linear(channels, 1)
        self.lin_key_group = None if tied else nn.Linear(channels, num_clusters)
        self.lin_key_degree = None if tied else nn.Linear(channels, 1)
        self.affinity = nn.Parameter(torch.empty(heads, num_clusters, num_clusters))
        self.scale = nn.Parameter(torch.empty(()))
        self._reset_affinity_and_scale()

    def _reset_affinity_and_scale(self) -> None:
        nn.init.normal_(self.affinity)
        nn.init.constant_(self.scale, self.start)

    def reset_parameters(self) -> None:
        """Draw the parameters again, as :class:`torch.nn.Linear` does; affinities are normal."""
        for layer in (self.lin_group, self.lin_degree, self.lin_key_group, self.lin_key_degree):
            if layer is not None:
                layer.reset_parameters()
        self._reset_affinity_and_scale()

    def predict(self, query: Tensor, key: Tensor) -> DCMM:
        """The block model of these tokens, in float32 or better, differentiable: for inspection and regularisers.

        Args:
            query: ``[H, N, C]``.
            key: ``[H, M, C]``; its values do not matter if keys are tied.

        Raises:
            TypeError, ValueError: A shape or dtype does not fit, or a tied bias has other tokens as keys.
        """
        checks.check_query_key(self, query, key, self.heads, self.channels)
        if self.tied and key.size(1) != query.size(1):
            raise ValueError(
                f"Expected 'key' of {query.size(1)} tokens, as 'query' has (got {key.size(1)}). Tied keys are the "
                "same tokens; use tied=False."
            )
        wide = torch.promote_types(query.dtype, torch.float32)
        affinity = self.affinity.to(wide)
        block = torch.sigmoid((affinity + affinity.mT) / 2 if self.symmetric else affinity)
        of_keys = of_queries = self._membership_and_degree(query, self.lin_group, self.lin_degree)
        if self.lin_key_group is not None and self.lin_key_degree is not None:
            of_keys = self._membership_and_degree(key, self.lin_key_group, self.lin_key_degree)
        return DCMM(of_queries[0], of_keys[0], block, of_queries[1], of_keys[1])

    def _membership_and_degree(self, x: Tensor, group: nn.Linear, degree: nn.Linear) -> tuple[Tensor, Tensor]:
        """Memberships ``[H, N, K]`` and degrees ``[H, N]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return group(x).to(wide).softmax(-1), DEGREES[self.degree](degree(x)[..., 0].to(wide))

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        """The bias of each edge, ``[E]``.

        Raises:
            TypeError, ValueError: As :meth:`predict`, or the graph has other heads or tokens.
        """
        check_graph(graph)
        model = self.predict(query, key)
        if (graph.heads, graph.num_queries, graph.num_keys) != (self.heads, query.size(1), key.size(1)):
            raise ValueError(
                f"Expected 'graph' over {self.heads} heads, {query.size(1)} queries and {key.size(1)} keys "
                f"(got {graph}). Build it over these tokens."
            )
        checks.same_device("query", query, graph=graph.query_ptr)
        rows = (graph.rowptr, graph.col)
        strength = schemas.edge_dot(model.query_membership @ model.block_matrix, model.key_membership, *rows)
        strength = strength.tanh() if self.squash else strength
        degrees = (self.scale * model.query_degree[..., None], model.key_degree[..., None])
        bias = (schemas.edge_dot(*degrees, *rows) * strength).to(query.dtype)
        return self._with_entropy(bias, model, graph.query_ptr, graph.key_ptr)

    @property
    def is_product(self) -> bool:
        """True if there is no tanh, so that biases are inner products of the two :meth:`factors`."""
        return not self.squash

    def factors(self, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor) -> BiasFactors:
        """Features of the tokens from which the biases of all pairs are computed.

        Args:
            query: ``[H, N, C]``.
            key: ``[H, M, C]``.
            query_ptr: Offsets of the queries, ``[B+1]``.
            key_ptr: Offsets of the keys, ``[B+1]``.

        Returns:
            For each query its degree times the scale, and its affinities to the communities, ``[H, N, 1+K]``; for each
            key its degree and its memberships, ``[H, M, 1+K]``. Without the tanh, degrees times affinities or
            memberships, ``[H, N, K]`` and ``[H, M, K]``.

        Raises:
            TypeError, ValueError: As :meth:`predict`.
        """
        model = self.predict(query, key)
        degrees = (self.scale * model.query_degree[..., None], model.key_degree[..., None])
        of_query, of_key = model.query_membership @ model.block_matrix, model.key_membership
        if self.squash:
            of_query, of_key = torch.cat([degrees[0], of_query], -1), torch.cat([degrees[1], of_key], -1)
        else:
            of_query, of_key = degrees[0] * of_query, degrees[1] * of_key
        of_query = self._with_entropy(of_query, model, query_ptr, key_ptr)
        return BiasFactors(of_query, of_key, _squashed if self.squash else _products)

    def _with_entropy(self, x: Tensor, model: DCMM, query_ptr: Tensor, key_ptr: Tensor) -> Tensor:
        """The tensor, with the entropy of the memberships as an auxiliary loss in training."""
        if not (self.entropy_weight and self.training and torch.is_grad_enabled()):
            return x
        entropies = [_mean_entropy(model.query_membership, query_ptr)]
        entropies += [] if self.tied else [_mean_entropy(model.key_membership, key_ptr)]
        loss = self.entropy_weight * torch.stack(entropies).mean()
        return self.auxiliary_losses.add(x, loss, "DCMMBias, whose entropy has a weight")

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, heads={self.heads}, num_clusters={self.num_clusters}, degree={self.degree!r}, "
            f"squash={self.squash}, symmetric={self.symmetric}, tied={self.tied}"
        )
