"""The stochastic block model of attention: the record of its parameters, and the module that predicts them.

In: queries and keys, or given memberships and block matrices. Out: edge probabilities and expected numbers of edges,
all differentiable. Not here: sampling (``sampling``) and attention over the graph (``attention``).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from .. import ops
from ..graphs.graph import AttentionGraph, resolve_index
from ..graphs.ragged import Tokens, check_record, check_tensor, count_pairs, resolve_sides
from ..ops import checks, values
from ..ops.reference.density import MIN_MEAN_PROBABILITY
from ..ops.reference.sampling import probability_error
from ..ops.segments import allowed_keys, runs, upcast
from ..ops.values import can_read
from .interface import EdgeProbability, check_over

__all__ = ["SBM", "SBMHead"]

CLUSTER_INITS = ("kaiming", "orthogonal")
PARAMETERIZATIONS = ("paper", "mixed", "assortative", "overlapping")
GATED = {"paper": (True, True), "overlapping": (False, True)}
"""Whether memberships of queries, and of keys, are a sigmoid for each block; otherwise a softmax over the blocks."""
PRODUCTS = ("assortative", "overlapping")


@dataclass(frozen=True, eq=False, repr=False)
class SBM(EdgeProbability):
    r"""A mixed-membership stochastic block model between queries and keys, for each head of each sequence.

    The probability that query i attends to key j in head h is :math:`p_{ij} = Y_i S Z_j^\top`, inside a sequence;
    across sequences it is 0. Methods cost at most O(NK + K^2) per head unless their documentation states another cost.

    Args:
        query_membership: Memberships of the queries Y, ``[H, N, K]``, non-negative.
        key_membership: Memberships of the keys Z, ``[H, M, K]``, non-negative.
        block_matrix: Block matrices S, ``[H, K, K]``, non-negative; ``S[u, v]`` links query block u to key block v.
            None: the identity, which links each block only to itself and needs no matrix product.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64. One sequence if None.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64. If None, those of the queries (when N = M) or
            one sequence.
        is_causal: No query attends to a key at a later position: p is 0 there, and densities do not count such pairs.
        is_strict: No query attends to the key at its own position either. This needs ``is_causal``, and queries and
            keys with the same offsets.

    Raises:
        TypeError, ValueError: A shape, dtype, device or offset does not fit. Values are checked by :meth:`validate` and
            when sampling.

    Example:
        >>> onehot = torch.eye(2).repeat_interleave(2, 0)[None]  # four tokens in two blocks
        >>> sbm = SBM(onehot, onehot, torch.tensor([[[0.9, 0.0], [0.5, 0.9]]]))
        >>> sbm
        SBM(1 sequence, 1 head, 4 queries, 4 keys, 2 blocks)
        >>> sbm.edge_prob_dense()[0, 2]  # a token of the second block attends to all
        tensor([0.5000, 0.5000, 0.9000, 0.9000])
        >>> sbm.expected_edges()
        tensor([[9.2000]])

    Reference: Airoldi et al., JMLR 2008, in the bipartite form of Cho et al., NeurIPS 2022, section 4.1 (there B is our
    S).
    """

    query_membership: Tensor
    key_membership: Tensor
    block_matrix: Tensor = field(default=cast(Tensor, None))  # this and offsets are tensors after __post_init__
    query_ptr: Tensor = field(default=cast(Tensor, None))
    key_ptr: Tensor = field(default=cast(Tensor, None))
    is_causal: bool = field(default=False, kw_only=True)
    is_strict: bool = field(default=False, kw_only=True)
    rate: Tensor = field(init=False)
    """Memberships of the queries seen from the keys' blocks, ``Y S``, ``[H, N, K]``.

    ``p_ij`` is the dot product of ``rate_i`` and ``Z_j``.
    """
    _membership_bound: float | None = field(init=False, default=None)
    """Upper bound of query memberships that holds by construction; key memberships and blocks then lie in [0, 1],
    unless a value is NaN. None: there is no known bound, so values are checked."""

    def __post_init__(self) -> None:
        query, key, block = self.query_membership, self.key_membership, self.block_matrix
        parts = {"query_membership": query, "key_membership": key}
        parts |= {} if block is None else {"block_matrix": block}
        checks.flag("is_causal", self.is_causal, "It says whether later keys are left out.")
        checks.flag("is_strict", self.is_strict, "It says whether keys at the same position are left out, too.")
        checks.tensors(**parts)
        checks.floating(**parts)
        for name, tensor in parts.items():
            if tensor.dtype != query.dtype:
                raise TypeError(
                    f"Expected '{name}' to be {query.dtype}, as 'query_membership' is "
                    f"(got {tensor.dtype}). Convert one of them."
                )
            checks.same_device("query_membership", query, **{name: tensor})
            way_out = "Shapes are [H, N, K], [H, M, K] and [H, K, K]."
            checks.require(tensor.dim() == 3, name, "to have three dimensions", tensor.shape, way_out)
        heads, num_queries, blocks = query.shape
        if blocks < 1 or heads < 1:
            raise ValueError(
                f"Expected 'query_membership' to have at least one head and one block (got H = {heads}, K = {blocks}). "
                "Shapes are [H, N, K]."
            )
        if (key.size(0), key.size(2)) != (heads, blocks):
            raise ValueError(
                f"Expected 'key_membership' to be [{heads}, M, {blocks}] (got {list(key.shape)}). "
                "Heads and blocks must be those of 'query_membership'."
            )
        if block is not None and block.shape != (heads, blocks, blocks):
            raise ValueError(
                f"Expected 'block_matrix' to be [{heads}, {blocks}, {blocks}] (got {list(block.shape)}). "
                "Heads and blocks must be those of 'query_membership'."
            )
        query_ptr, key_ptr = self.query_ptr, self.key_ptr
        for name, ptr in (("query_ptr", query_ptr), ("key_ptr", key_ptr)):
            check_tensor(ptr, name)
        if key_ptr is None and query_ptr is not None:
            if num_queries != key.size(1) and query_ptr.numel() > 2:
                raise ValueError(
                    f"Expected 'key_ptr' where N != M (got N = {num_queries}, M = {key.size(1)} and no 'key_ptr'). "
                    "Pass the offsets of the keys."
                )
            key_ptr = query_ptr if num_queries == key.size(1) else None
        sizes, names = (num_queries, key.size(1)), ("query_ptr", "key_ptr")
        ptrs = resolve_sides(*sizes, (key_ptr, query_ptr), None, query.device, names=names)
        for name, ptr in zip(names, ptrs, strict=True):
            object.__setattr__(self, name, ptr)
        if block is None:
            del self.__dict__["block_matrix"]  # the identity, made when it is read
        object.__setattr__(self, "rate", query if block is None else query @ block)
        self._check_strict()

    @classmethod
    def _trusted(cls, query: Tensor, key: Tensor, block: Tensor | None, query_ptr: Tensor, key_ptr: Tensor) -> SBM:
        """Make a model without checks, from memberships and blocks in [0, 1] whose shapes fit each other."""
        sbm = object.__new__(cls)
        sides = {"query_membership": query, "key_membership": key, "query_ptr": query_ptr, "key_ptr": key_ptr}
        sides |= {"rate": query} if block is None else {"rate": query @ block, "block_matrix": block}
        sbm.__dict__.update(sides, is_causal=False, is_strict=False, _membership_bound=1.0)
        return sbm

    def __getattr__(self, name: str) -> Any:
        """Make the identity block matrix on first use, if the model was made without a block matrix."""
        if name != "block_matrix" or "rate" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        identity = torch.eye(self.num_clusters, dtype=self.rate.dtype, device=self.rate.device)
        self.__dict__[name] = identity.expand(self.heads, -1, -1)
        return self.__dict__[name]

    def _check_strict(self) -> None:
        """Check that a strict model is causal, and that its queries and keys have the same offsets."""
        shared = self.key_ptr is self.query_ptr and self.num_queries == self.num_keys
        if self.is_strict and not (self.is_causal and shared):
            raise ValueError(
                "Expected 'is_strict' with 'is_causal' and the same offsets of queries and keys (got "
                f"is_causal={self.is_causal}, N = {self.num_queries} and M = {self.num_keys}). Leave it out, or pass "
                "'query_ptr' alone."
            )

    def _with(self, **values: Any) -> SBM:
        """Copy with fields replaced; the new values are valid by construction."""
        other = copy(self)
        for name, value in values.items():
            object.__setattr__(other, name, value)
        return other

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.query_membership.size(0)

    @property
    def num_queries(self) -> int:
        """Number of query tokens N."""
        return self.query_membership.size(1)

    @property
    def num_keys(self) -> int:
        """Number of key tokens M."""
        return self.key_membership.size(1)

    @property
    def num_clusters(self) -> int:
        """Number of communities K."""
        return self.query_membership.size(2)

    @property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.query_ptr.numel() - 1

    def __repr__(self) -> str:
        named = {"sequence": self.num_sequences, "head": self.heads, "querie": self.num_queries, "key": self.num_keys}
        named["block"] = self.num_clusters
        parts = ", ".join(f"{count:,} {noun}{'s' * (count != 1)}" for noun, count in named.items())
        return f"SBM({parts.replace('1 querie,', '1 query,')})"

    @torch.no_grad()
    def validate(self) -> SBM:
        """Check every value and return the record.

        Memberships and blocks must be finite and non-negative, and no probability may exceed 1. Cost O(NK), and O(n m
        K) for the sequences whose cheap bound on the probabilities exceeds 1.

        Raises:
            ValueError: A value is out of range.
        """
        check_sbm(self)
        for sequence, (queries, keys) in enumerate(self._slices()):
            bound = torch.einsum("hnk,hk->hn", self.rate[:, queries], self.key_membership[:, keys].amax(1)).max()
            top = float(bound) if float(bound) <= 1 else float(self.edge_prob_dense(sequence).max())
            if top > 1 + 1e-5:
                raise ValueError(probability_error(top))
        return self

    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``, differentiable. Cost O(E K).

        Args:
            graph: Any graph over the same tokens and heads; it need not be sampled from this model.

        Raises:
            ValueError: The graph is not over these tokens and heads.
        """
        self.check(graph)
        p = ops.schemas.edge_dot(self.rate, self.key_membership, graph.rowptr, graph.col)
        return p.masked_fill(graph.edge_row % graph.num_queries == graph.col, 0) if self.is_strict else p

    def gate(self, graph: AttentionGraph) -> Tensor:
        """Straight-through gate of each edge, ``[E]``: exactly 1, with the gradient of :meth:`on`.

        Forward O(E), backward O(E K).
        """
        self.check(graph)
        factors = self.factors
        return super().gate(graph) if factors is None else ops.schemas.EdgeGate.apply(*factors, graph.rowptr, graph.col)

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """``Y S`` and ``Z``, ``[H, N, K]`` and ``[H, M, K]``, whose dot products are the probabilities.

        None if the model is strict, since pairs at the same position then have probability 0.
        """
        return None if self.is_strict else (self.rate, self.key_membership)

    def edge_prob_dense(self, sequence: int | None = None) -> Tensor:
        """Probabilities of all pairs of one sequence, ``[H, n, m]``, differentiable.

        Cost O(n m K): for inspection, not for training.

        Args:
            sequence: Number of the sequence, from 0. It may be left out if there is only one.

        Raises:
            TypeError, ValueError: There is no such sequence, ``sequence`` is missing, or memory does not hold its
                pairs.
        """
        queries, keys = self._slices()[resolve_index(sequence, self.num_sequences, "sequence")]
        pairs = self.heads * (queries.stop - queries.start) * (keys.stop - keys.start)
        way_out = "Ask for those of the edges of a graph, by `on`."
        checks.memory("sequence", pairs, self.rate.element_size(), self.rate.device, way_out, "pairs")
        p = self.rate[:, queries] @ self.key_membership[:, keys].mT
        return p.tril(-1 if self.is_strict else 0) if self.is_causal else p

    def expected_degree(self) -> Tensor:
        """Expected number of keys of each query, ``[H, N]``, differentiable."""
        ptrs = self.query_ptr, self.key_ptr
        return ops.schemas.reach_dot(self.rate, self.key_membership, *ptrs, self.is_causal, self.is_strict)

    def expected_edges(self) -> Tensor:
        """Expected number of edges, ``[B, H]``, differentiable.

        ``(1 Y) S (Z 1)`` per sequence, known before anything is sampled.
        """
        if self.is_causal:
            return self._sum(self.expected_degree()[..., None], self.query_ptr)[..., 0].T
        return (self._sum(self.rate, self.query_ptr) * self._sum(self.key_membership, self.key_ptr)).sum(-1).T

    def expected_density(self) -> Tensor:
        """Mean probability over the pairs of each sequence, ``[B, H]``, differentiable, without a cut at 1.

        It is the expected density of a drawn graph if no probability exceeds 1, as with :class:`SBMHead`, and an upper
        bound otherwise, as after :meth:`with_density`: see :meth:`cut_density`. With ``is_causal``, only allowed pairs
        count.
        """
        return self.expected_edges() / self._pairs()[:, None]

    def cut_density(self) -> Tensor:
        """Expected density of a drawn graph, ``[B, H]``, differentiable: the mean of probabilities cut at 1.

        Cost O(n m K) time, and O(n m) memory, for each sequence: for inspection, not for training.

        Raises:
            ValueError: Memory does not hold the pairs of a sequence.

        Example:
            >>> sbm = SBM(torch.tensor([[[2.0], [0.5]]]), torch.ones(1, 2, 1))
            >>> sbm.expected_density(), sbm.cut_density()
            (tensor([[1.2500]]), tensor([[0.7500]]))
        """
        dense = (upcast(self.edge_prob_dense(sequence)) for sequence in range(self.num_sequences))
        edges = [p.where(~(p > 1), 1.0).sum((1, 2)) for p in dense]  # `clamp` may have no gradient at 1
        return torch.stack(edges) / self._pairs()[:, None]

    def _pairs(self) -> Tensor:
        """Number of pairs of each sequence that may be edges, ``[B]``, at least 1."""
        pairs = count_pairs(self.query_ptr, self.key_ptr, self.is_causal)
        return (pairs - self.query_ptr.diff() if self.is_strict else pairs).clamp(min=1)

    def causal(self) -> SBM:
        """The same model in which no query attends to a later key."""
        return self if self.is_causal else self._with(is_causal=True)

    def strict(self) -> SBM:
        """The same model in which a query attends only to earlier keys."""
        if self.is_strict:
            return self
        other = self._with(is_causal=True, is_strict=True)
        other._check_strict()
        return other

    def _of_all_tokens(self) -> SBM:
        """The model with one query per key, where queries were the last tokens; added queries have rate 0.

        So the rows of the queries are those of the whole sequence, whatever depends on positions.
        """
        count = self.query_ptr.diff()
        place = runs(self.key_ptr[1:] - count, count, self.num_queries)
        shape = (self.heads, self.num_keys, self.num_clusters)
        rate = self.rate.new_zeros(shape).index_copy(1, place, self.rate)
        alike = self.rate is self.query_membership
        member = rate if alike else rate.new_zeros(shape).index_copy(1, place, self.query_membership)
        return self._with(query_membership=member, rate=rate, query_ptr=self.key_ptr)

    def limit(self, budget: float) -> SBM:
        """The model with each query's rates scaled down so that its expected number of keys is at most ``budget``.

        Gradients treat the factor as a constant.

        Args:
            budget: Positive number of keys per query and head.

        Raises:
            TypeError, ValueError: ``budget`` is not a positive number.
        """
        checks.number("budget", budget, "(0, inf]", "It is a number of edges per query; leave it out for no limit.")
        # degrees are in float32 or wider
        factor = (min(budget, 2.0**62) / self.expected_degree().detach()).clamp(max=1).to(self.rate.dtype)
        return self._scale(factor)

    def with_density(self, density: float) -> SBM:
        r"""The model in which the keys of each query compete for a fixed density.

        The rates of a query are scaled so that its expected number of keys is the fraction :math:`\rho` of its
        :math:`m_i` allowed keys, and at least one key:

        .. math:: p_{ij}' = p_{ij} \frac{\max(\rho \, m_i, 1)}{\sum_{j'} p_{ij'}} .

        Gradients flow through the sum, so keys compete: a key gains what other keys lose, and no graph becomes empty or
        full. Products above 1 are certain edges; sample with ``clamp=True``. A query gets fewer keys if some of its
        probabilities exceed 1, or if its mean probability is below 0.001, the smallest divisor. Cost O(NK).

        Args:
            density: The density :math:`\rho`, in (0, 1].

        Raises:
            TypeError, ValueError: ``density`` is not a number in (0, 1].
        """
        checks.number("density", density, "(0, 1]", "It is a part of the keys that a query may attend to.")
        return self._scale_to_density(density, self.rate.new_zeros(self.heads))[0]

    def check(self, graph: AttentionGraph, name: str = "graph") -> None:
        """Check that a graph is over the tokens, heads and sequences of this model.

        Raises:
            TypeError, ValueError: It is not.
        """
        check_over(graph, name, self, self)

    def _scale_to_density(self, density: float | Tensor, running: Tensor) -> tuple[SBM, Tensor]:
        """The model with the rates of each query scaled to a density, by :mod:`sbm_pyg.ops.reference.density`.

        Also returns expected edges before scaling and pairs of each head, ``[2, H]``, without non-finite sequences.

        Args:
            density: The density, one number or ``[H, 1]`` for the heads.
            running: Running mean of the probabilities of each head, ``[H]``; 0: each query is divided by its own mean.
        """
        of_heads = (1.0, density[:, 0]) if isinstance(density, Tensor) else (density, None)
        ends = (self.query_ptr, self.key_ptr, *of_heads, self.is_causal, self.is_strict)
        rate, factor, _, statistics = ops.schemas.scale_to_density(self.rate, self.key_membership, running, *ends)
        return self._scaled(rate, factor), statistics

    def _scale(self, factor: Tensor) -> SBM:
        """The model with the rates of each query scaled by a factor, ``[H, N]``."""
        return self._scaled(self.rate * factor[..., None], factor)

    def _scaled(self, rate: Tensor, factor: Tensor) -> SBM:
        """The model with new rates, and with memberships of queries scaled by a factor, ``[H, N]``."""
        alike = self.rate is self.query_membership
        member = rate if alike else self.query_membership * factor[..., None].to(rate.dtype)
        most = self._membership_bound and self._membership_bound / MIN_MEAN_PROBABILITY  # which divides at the most
        return self._with(query_membership=member, rate=rate, _membership_bound=most)

    def _allowed_keys(self) -> Tensor:
        """Number of keys that each query may attend to, ``[N]``."""
        allowed = allowed_keys(self.query_ptr, self.key_ptr, self.num_queries, self.is_causal)
        return allowed - 1 if self.is_strict else allowed

    def _slices(self) -> list[tuple[slice, slice]]:
        query, key = self.query_ptr.tolist(), self.key_ptr.tolist()
        return [(slice(*q), slice(*k)) for q, k in zip(pairwise(query), pairwise(key), strict=True)]

    def _sum(self, x: Tensor, ptr: Tensor) -> Tensor:
        """Sums ``[H, B, K]`` over the tokens of each sequence, in float32 or better."""
        heads, count, blocks = x.shape
        x = upcast(x)
        sequences = ptr.numel() - 1
        sequence = torch.repeat_interleave(ptr.diff(), output_size=count)
        # one sum for all heads: torch is fast along the first dimension
        row = sequence + sequences * torch.arange(heads, device=x.device)[:, None]
        total = x.new_zeros(heads * sequences, blocks).index_add(0, row.flatten(), x.flatten(0, 1))
        return total.view(heads, sequences, blocks)


del SBM.block_matrix  # a default value of the class, which would hide the one that is made when it is read


def check_model(sbm: object) -> None:
    """Raise TypeError unless the argument is an :class:`SBM`."""
    checks.kind("sbm", sbm, SBM, "an SBM", "`SBMHead` makes one, and so does `SBM(query, key, block)`.")


def check_sbm(sbm: SBM) -> float:
    """Raise ValueError unless memberships and blocks are finite and non-negative, and rates are finite.

    Values that cannot be read, as in compiled code, are not checked.

    Returns:
        An upper bound of products of memberships and blocks: :math:`K^2` times the largest membership of a query, the
        largest entry of a block matrix and the largest membership of a key, each counted as at least 1. If t is the
        smallest normal number of a precision, smaller numbers are negligible compared to sums of t times this bound.
    """
    largest = {"query_membership": 0.0, "key_membership": 0.0, "block_matrix": 1.0}  # of the identity
    tensors = {name: vars(sbm)[name].detach() for name in largest if name in vars(sbm)}
    seen = {name: x for name, x in tensors.items() if can_read(x) and x.numel()}
    bounds = torch.stack([bound for x in seen.values() for bound in torch.aminmax(x)]).tolist() if seen else []
    for name, low, high in zip(seen, bounds[::2], bounds[1::2], strict=True):
        way_out = "Look for them in the tokens ('x', or 'query' and 'key'), then for a diverged loss."
        checks.require(not math.isnan(low) and not math.isinf(high), name, "to be finite", "NaN or inf", way_out)
        if low < 0:
            raise ValueError(f"Expected '{name}' to be non-negative (got {low:.4g}). Use a sigmoid or softmax.")
        largest[name] = high
    bound = sbm.num_clusters * largest["query_membership"] * largest["block_matrix"]
    if bound > torch.finfo(sbm.rate.dtype).max and not bool(sbm.rate.isfinite().all()):
        raise ValueError(
            f"Expected 'query_membership @ block_matrix' to be finite (got a bound of {bound:.4g}). "
            "Scale memberships to at most 1."
        )
    return sbm.num_clusters**2 * math.prod([max(1.0, size) for size in largest.values()])


def product_bound(sbm: SBM) -> float:
    """As :func:`check_sbm`, but without reading values if a bound is known by construction.

    Samplers detect NaN themselves.
    """
    if sbm._membership_bound is None:
        return check_sbm(sbm)
    return sbm.num_clusters**2 * sbm._membership_bound


class SBMHead(torch.nn.Module):
    r"""Predicts the stochastic block model of each head from its queries and keys.

    Learned cluster embeddings :math:`C` and one two-layer perceptron for queries, keys and all heads give affinities
    :math:`a = \operatorname{MLP}(q) C^\top`, likewise for keys. From these,

    * ``"paper"`` (Cho et al. 2022, eq. 5-7): :math:`Y = \sigma(a + \beta)`, and S is the softmax of :math:`C C^\top`
      over all :math:`K^2` entries. Every probability lies below 1; probabilities inside a block cannot exceed 1/K if S
      is diagonal, so that edges with p near 1 need full density.
    * ``"mixed"``: :math:`Y = \operatorname{softmax}_K(a / \tau)`, and S the sigmoid of free entries that start larger
      on the diagonal: the mixed-membership block model of Airoldi et al. 2008.
    * ``"assortative"``: :math:`Y` as in ``"mixed"`` and :math:`S = I`, so that :math:`p_{ij}` is the probability that
      query and key choose the same block.
    * ``"overlapping"``: :math:`Y = \operatorname{softmax}_K(a / \tau)` for queries, :math:`Z = \sigma(a / \tau)` for
      keys, and :math:`S = I`. A query chooses one block, and a key is in any number of
      blocks: :math:`p_{ij}` is the probability that the key is in the block of the query. So a key can have low
      probability for all queries, as with ``"paper"`` and no other form.

    With ``degree_corrected`` each token has a degree that scales its probabilities:
    :math:`p_{ij} = \theta_i \theta'_j Y_i S Z_j^\top`. Degrees :math:`\theta_i = \sigma(\langle v, q_i \rangle + c)`
    lie in (0, 1), so that p stays below 1; degrees of keys use another v and c. The :class:`SBM` contains the degrees
    as factors of the memberships.

    With ``groups`` G, a head has G models of :math:`k = K^{1/G}` blocks each, and p is the product of their
    probabilities: a pair is an edge only if it is an edge in every group. The :class:`SBM` has one block for each of
    the :math:`k^G = K` ways to choose a block of each group, with the product of the memberships (docs/concepts.md).

    Cost O(NC^2 + NKC + K^2 C) per head; with groups O(NC^2 + NGkC + NK). The SBM then multiplies Y with S, O(NK^2),
    unless S is the identity.

    Args:
        channels: Channels per head C.
        heads: Number of heads H.
        num_clusters: Number of communities K of all groups together: a whole number to the power of ``groups``.
        cluster_init: Initial value of :math:`C`. ``"kaiming"``: normal with variance 2 / (K C), or 2 / (G k C) with
            groups, as in the authors' code; all probabilities then start nearly equal. ``"orthogonal"``: unit rows,
            every C of which are orthogonal; diagonal entries of S then start e times as large as the rest.
        parameterization: ``"paper"``, ``"mixed"``, ``"assortative"`` or ``"overlapping"``.
        initial_density: Probability of an edge before training, in (0, 1); 0.25 in the paper. It sets :math:`\beta`,
            the free entries of S, or the bias of overlapping memberships of keys. ``"assortative"`` ignores it: the
            probability starts at 1/K with equal memberships, and higher with sharper memberships.
        temperature: :math:`\tau` of softmax memberships, at least 1e-6; memberships get sharper as it goes to 0.
        tied: Memberships of keys are computed from the queries too, so that similar tokens start in the same blocks.
            Queries and keys must be the same tokens.
        degree_corrected: Each query and each key also has a degree. All degrees start at the fourth root of
            ``initial_density``.
        groups: Number of groups G, from 1 to 16, of ``"assortative"`` or ``"overlapping"`` memberships. Probabilities
            of each group start at the G-th root of ``initial_density``.

    Raises:
        TypeError, ValueError: An option is unknown or out of range.

    Shapes:
        - :class:`~sbm_pyg.Tokens` of N queries and M keys; returns an :class:`SBM` with K blocks.

    The authors' code exchanges queries and keys: Y comes from keys there, and Z from queries.

    Reference: Cho et al., NeurIPS 2022; for degrees, Karrer and Newman, "Stochastic blockmodels and community structure
    in networks", 2011.
    """

    head_dims: ClassVar[dict[str, int]] = {"clusters": 0, "block": 0, "degree_weight": 0, "degree_bias": 0}

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        num_clusters: int = 64,
        cluster_init: str = "orthogonal",
        *,
        parameterization: str = "overlapping",
        initial_density: float = 0.25,
        temperature: float = 1.0,
        tied: bool = False,
        degree_corrected: bool = False,
        groups: int = 1,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "heads": heads, "num_clusters": num_clusters}
        usual = "The paper has 32 channels and 128 blocks."
        channels, heads, num_clusters = (checks.integer(*size, 1, usual) for size in sizes.items())
        what, way_out = "to be 'kaiming' or 'orthogonal'", "The paper has 'kaiming'."
        checks.require(cluster_init in CLUSTER_INITS, "cluster_init", what, repr(cluster_init), way_out)
        what, way_out = f"to be one of {[*PARAMETERIZATIONS]}", "See the docstring of SBMHead."
        checks.require(parameterization in PARAMETERIZATIONS, "parameterization", what, repr(parameterization), way_out)
        checks.number("initial_density", initial_density, "(0, 1)", "It is an edge's probability at first.")
        checks.number("temperature", temperature, "[1e-06, inf]", "Memberships harden as it goes to 0.")
        checks.flag("tied", tied, "It says whether keys take the queries' memberships.")
        checks.flag("degree_corrected", degree_corrected, "It says whether tokens have degrees.")
        few = "It is a number of small models whose product is taken."
        groups = checks.integer("groups", groups, 1, few)
        checks.number("groups", groups, "[1, 16]", few)
        what, got = f"to be 'assortative' or 'overlapping' with groups={groups}", repr(parameterization)
        way_out = "Others are not products; leave out 'groups'."
        checks.require(groups <= 1 or parameterization in PRODUCTS, "parameterization", what, got, way_out)
        clusters = groups * _clusters_per_group(num_clusters, groups)
        self.channels, self.heads, self.num_clusters, self.cluster_init = channels, heads, num_clusters, cluster_init
        self.parameterization, self.initial_density = parameterization, initial_density
        self.temperature, self.tied, self.degree_corrected, self.groups = temperature, tied, degree_corrected, groups
        self.start = initial_density ** (0.5 if degree_corrected else 1)  # of Y S Z; two degrees make the rest
        self.shift = log_odds(self.start ** (1 / groups if parameterization == "overlapping" else 0.5))
        matrix = num_clusters**2 if parameterization == "mixed" else 0
        total = 2 * channels * (channels + heads) + heads * (clusters * channels + matrix)
        checks.parameters({"channels": channels, "heads": heads, "num_clusters": num_clusters}, total)
        first, second = (torch.nn.Linear(channels, channels) for _ in range(2))
        self.mlp = torch.nn.Sequential(first, torch.nn.ReLU(), second)
        self.clusters = torch.nn.Parameter(torch.empty(heads, clusters, channels))
        if parameterization == "mixed":
            self.block = torch.nn.Parameter(torch.empty(heads, num_clusters, num_clusters))
        if degree_corrected:  # of queries, and of keys
            self.degree_weight = torch.nn.Parameter(torch.empty(heads, 2, channels))
            self.degree_bias = torch.nn.Parameter(torch.empty(heads, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers of torch's default generator."""
        for layer in self.mlp:
            if isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
        blocks = self.num_clusters
        with torch.no_grad():
            if self.cluster_init == "kaiming":
                torch.nn.init.kaiming_normal_(self.clusters)  # fan-in of [H, K, C] is K * C
            else:
                # in 32 bits or more: torch has no orthogonal matrices of 16
                square = upcast(torch.empty(self.channels, self.channels))
                for head in range(self.heads):
                    for group in self.clusters[head].split(self.channels):
                        group.copy_(torch.nn.init.orthogonal_(square)[: len(group)])
            if self.parameterization == "mixed":
                # Equal memberships give the density: inside + (K - 1) outside = K density, with edges outside blocks
                # too.
                least = self.start / (2 * blocks)
                inside = min(max(0.82, (1 + self.start) / 2), blocks * self.start - (blocks - 1) * least)
                outside = max((blocks * self.start - inside) / max(blocks - 1, 1), least)
                self.block.fill_(log_odds(outside)).diagonal(dim1=1, dim2=2).fill_(log_odds(inside))
            if self.degree_corrected:
                self.degree_weight.zero_()
                self.degree_bias.fill_(log_odds(self.initial_density**0.25))

    def forward(self, tokens: Tokens) -> SBM:
        """Predict the model of the tokens; see the class.

        Raises:
            TypeError, ValueError: A shape or type does not fit.
        """
        check_record(tokens)
        query, key = tokens.query, tokens.key
        checks.check_query_key(self, query, key, self.heads, self.channels)
        if self.tied:
            if tokens.bipartite:
                raise ValueError(
                    "Expected the same tokens as queries and keys with tied memberships (got bipartite tokens, N = "
                    f"{query.size(1)} and M = {key.size(1)}). Use tied=False, or Tokens(..., bipartite=False) if they "
                    "are the same."
                )
            key = query
        query_gated, key_gated = GATED.get(self.parameterization, (False, False))
        # one pass of the perceptron for both sides
        affinity = self._affinities(query if key is query else torch.cat([query, key], 1))
        sides = (affinity, affinity) if key is query else affinity.split([query.size(1), key.size(1)], 1)
        query_side = self._memberships(sides[0], query_gated)
        alike = key is query and key_gated == query_gated
        key_side = query_side if alike else self._memberships(sides[1], key_gated)
        if self.parameterization == "paper":
            affinity = self.clusters @ self.clusters.mT  # [H, K, K]
            block = affinity.flatten(1).softmax(-1).view_as(affinity)
        elif self.parameterization == "mixed":
            block = self.block.sigmoid()
        else:
            block = None
        if self.degree_corrected:
            query_degree, key_degree = self._degrees(query, key)
            query_side, key_side = query_side * query_degree[..., None], key_side * key_degree[..., None]
        block = block if block is None else block.to(query_side.dtype)
        return SBM._trusted(query_side, key_side, block, tokens.query_ptr, tokens.key_ptr)

    def degrees(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        r"""Factors of the memberships: degrees of the queries ``[H, N]`` and of the keys ``[H, M]``, in (0, 1).

        Args:
            query, key: ``[H, N, C]`` and ``[H, M, C]``; where keys are tied, both are the queries.

        Raises:
            TypeError, ValueError: A shape or type does not fit, or the head is not ``degree_corrected``.
        """
        checks.check_query_key(self, query, key, self.heads, self.channels)
        if not self.degree_corrected:
            raise ValueError("Expected an SBMHead with degrees (got one without). Build it with degree_corrected=True.")
        return self._degrees(query, key)

    def _degrees(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.degree_weight[..., None], self.degree_bias[..., None]  # [H, 2, C, 1], [H, 2, 1]
        both = ((x @ weight[:, side])[..., 0] + bias[:, side] for side, x in enumerate((query, key)))
        query_degree, key_degree = (score.sigmoid() for score in both)
        return query_degree, key_degree

    def _affinities(self, x: Tensor) -> Tensor:
        """Affinities of tokens ``[H, N, C]`` to the clusters of all groups, ``[H, N, G k]``.

        The second layer and the clusters are folded into one linear map, which is cheap because there are few clusters.
        Layers that have hooks or were replaced are called instead.
        """
        if not _two_plain_layers(self.mlp):
            return self.mlp(x) @ self.clusters.mT / self._divisor
        second = cast(torch.nn.Linear, self.mlp[2])
        weight, bias = self.clusters @ second.weight, self.clusters @ second.bias
        if self._divisor != 1:
            weight, bias = weight / self._divisor, bias / self._divisor
        relu = torch.relu if values.are_watched() else torch.relu_  # checkpointing may keep what is overwritten
        hidden = relu(self.mlp[0](x.flatten(0, 1))).view_as(x)
        return torch.baddbmm(bias[:, None], hidden, weight.mT)

    @property
    def _divisor(self) -> float:
        """Divisor of the affinities: the temperature, or 1 with ``"paper"``."""
        return 1.0 if self.parameterization == "paper" else self.temperature

    def _memberships(self, affinity: Tensor, gated: bool) -> Tensor:
        """Memberships ``[H, N, K]``: in each group, a sigmoid per community if ``gated``, else a softmax."""
        if gated:
            affinity = affinity + self.shift
        if self.groups == 1:
            if gated:
                return affinity.sigmoid() if values.are_watched() else affinity.sigmoid_()
            return affinity.softmax(-1, dtype=affinity.dtype)  # also under autocast
        groups = affinity.unflatten(-1, (self.groups, -1))
        sides = groups.sigmoid() if gated else groups.softmax(-1, dtype=groups.dtype)
        return reduce(_outer_products, sides.unbind(-2))

    def extra_repr(self) -> str:
        return (
            f"channels={self.channels}, heads={self.heads}, num_clusters={self.num_clusters}, "
            f"cluster_init={self.cluster_init!r}, parameterization={self.parameterization!r}"
            f"{', degree_corrected=True' * self.degree_corrected}"
            f"{f', groups={self.groups}' * (self.groups > 1)}"
        )


def _two_plain_layers(mlp: torch.nn.Module) -> bool:
    """True if a perceptron consists of torch's own layers without hooks, so that its parameters can be used directly.

    Global hooks, such as those of torch's FLOP counter, are ignored.
    """
    plain = [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    if type(mlp) is not torch.nn.Sequential or [type(layer) for layer in mlp] != plain:
        return False
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    watched = any(getattr(x, kind) for x in (mlp, *mlp) for kind in kinds)
    replaced = any("forward" in vars(x) for x in (mlp, *mlp))
    return not (watched or replaced or mlp[2].bias is None)


def _outer_products(first: Tensor, second: Tensor) -> Tensor:
    """Row-wise Khatri-Rao product: ``[..., A]`` and ``[..., B]`` to ``[..., A B]``."""
    return (first[..., None] * second[..., None, :]).flatten(-2)


def _clusters_per_group(num_clusters: int, groups: int) -> int:
    """Communities of each group, ``num_clusters ** (1 / groups)``."""
    if groups == 1:
        return num_clusters
    root = round(num_clusters ** (1 / groups))
    if root**groups != num_clusters:
        low = root - (root**groups > num_clusters)
        raise ValueError(
            f"Expected 'num_clusters' to be a whole number to the power of groups={groups} (got {num_clusters}). "
            f"Take {low**groups} = {low}**{groups} or {(low + 1) ** groups} = {low + 1}**{groups}."
        )
    return root


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))
