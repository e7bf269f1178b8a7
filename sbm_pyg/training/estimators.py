r"""Gradient estimators: how the loss reaches the edge probabilities of a chosen graph.

In: a :class:`~sbm_pyg.Choice` and the attention over its graph. Out: gates, biases, or an output with a backward pass
that sends a gradient to the probabilities :math:`p`. Not here: graph sources, and attention.

With weights :math:`P_{ij}`, gains :math:`g_{ij} = (\partial L / \partial o_i) \cdot v_j`, scores :math:`s_{ij}` and the
mean gain :math:`\bar g_i = \sum_j P_{ij} g_{ij}` of a row:

==================  ============================================================================  ==================
estimator           :math:`\partial L / \partial p_{ij}`                                          over
==================  ============================================================================  ==================
``"local"``         :math:`\Delta_{ij}`, the loss with the edge minus without it, weighted         edges and probes
``"distill"``       as ``"local"``, plus the gradient of :func:`.row_distillation`                edges, probes, rows
``"imitate"``       the gradient of :func:`.distillation`, over the selected keys or over all     edges
``"mask"``          :math:`P_{ij} (g_{ij} - \bar g_i)`                                            edges
``"paper"``         :math:`P_{ij} (g_{ij} - \bar g_i) \, s_{ij}` (eq. 9)                          edges
``"relaxed"``       the gradient through softmax(s + log p); training samples no graph            all pairs
``"concrete"``      the gradient through softmax(s + log m), m a relaxed Bernoulli variable       all pairs
``"none"``          0                                                                             nothing
score function      :math:`(L - b) \, \partial \log \Pr(A) / \partial p_{ij}`, added to the loss  all pairs
==================  ============================================================================  ==================

``"local"`` supports method ``"bernoulli"`` only. docs/concepts.md derives the estimators, and
docs/learning_appendix.md compares them by experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, draw_seed, resolve_sequence_ids
from ..sources.interface import Choice, EdgeProbability, GraphSource
from ..sources.learned import LearnedSource
from .gradients import (
    OVER,
    attach_expectation,
    check_pairs,
    concrete_bias,
    distillation,
    draw_probes,
    probes_of,
    relaxed_bias,
    row_distillation,
    straight_through,
)

__all__ = [
    "ESTIMATORS", "AttentionCall", "Concrete", "Distill", "Estimator", "Imitate", "Local", "Mask", "NoEstimator",
    "Paper", "Relaxed",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of the attention layer: the arguments of an estimator.

    Args:
        query, key, value: ``[H, N, C]``, ``[H, M, C]``, ``[H, M, C']``, after rotation by positions if the layer has a
            ``rotary``.
        choice: The graph of the call, and its probabilities.
        bias: Score bias of the edges of the graph, ``[E]``, or None.
        scale: Factor of the scores.
        limit: Drops from a graph, or a choice, the edges that the layer does not allow, such as later keys.
        score_bias: Function ``(query, key, graph)`` that computes the score bias of each edge, ``[E]`` or None.
        seed: Seed of the choice.
        sequence_ids: Number of each sequence, ``[B]`` int64, or None.
        training: True if the layer is in training mode.
        tokens: Tokens that the source was called with; None if the graph was given.
        source: The source, or None if the graph was given.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    choice: Choice
    bias: Tensor | None
    scale: float
    limit: Callable[[Any], Any]
    score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor | None]
    seed: int
    sequence_ids: Tensor | None
    training: bool
    tokens: Tokens | None = None
    source: GraphSource | None = None


class Estimator:
    """Base class of gradient estimators. Subclasses override the steps that they need; by default, a step does nothing.

    The layer calls :meth:`prepare`, :meth:`gate` and :meth:`bias` before attention, and :meth:`attach` and
    :meth:`auxiliary_loss` after it, if the choice has probabilities.
    """

    exploration: float | None = 0.01
    """Default exploration of the source in training. None stands for the source's own default."""
    gate_form = "score"
    """Quantity that :func:`sbm_pyg.ops.edge_attention` multiplies by the gate, ``"score"`` or ``"weight"``."""
    softmax_only = False
    """True if the estimator is derived for softmax only."""
    methods: tuple[str, ...] = (*ops.METHODS, "top_k")
    """Sampling methods of sources for which the estimator is derived."""
    needs_loss = False
    """True if training without :func:`~sbm_pyg.auxiliary_loss` is an error even while attention is dense."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def check(self, normalizer: object, method: str = "bernoulli") -> None:
        """Raise ValueError if the estimator does not support a normalizer or a sampling method."""
        name = type(self).__name__
        if self.softmax_only and normalizer != "softmax":
            raise ValueError(
                f"Expected 'estimator' to be 'mask', 'paper' or 'none' with normalizer={normalizer!r} (got {name}). "
                "The others are derived for softmax."
            )
        if method not in self.methods:
            raise ValueError(
                f"Expected 'estimator' to support method {method!r}, by which the source draws edges (got {name} for "
                f"{', '.join(self.methods)}). Take 'mask' or 'none', or 'imitate' with 'top_k'; an IndexerSource draws "
                "with select='bernoulli'."
            )

    def learns(self, training: bool) -> bool:
        """True if the estimator needs calls in this mode (training or evaluation), even while attention is dense."""
        return training and torch.is_grad_enabled()

    def prepare(self, choice: Choice, training: bool) -> Choice:
        """The choice to attend over; by default the choice of the source."""
        return choice

    def gate(self, choice: Choice) -> Tensor | None:
        """Gate of each edge of ``choice.graph.blocks``, ``[E]``, or None."""
        return None

    def bias(self, choice: Choice, training: bool, seed: int) -> Tensor | None:
        """Score bias of each edge of ``choice.graph.blocks``, ``[E]``, or None."""
        return None

    def attach(self, out: Tensor, call: AttentionCall) -> Tensor:
        """The output, ``[H, N, C']``, with a backward pass that also sends a gradient to the probabilities."""
        return out

    def auxiliary_loss(self, call: AttentionCall) -> Tensor | None:
        """The loss that this call adds to :func:`sbm_pyg.auxiliary_loss`, a scalar, or None."""
        return None

    def dense_loss(self, call: AttentionCall) -> Tensor | None:
        """The loss of a call while attention is dense; by default :func:`.row_distillation`, without edges."""
        return _distill_rows(call)


class NoEstimator(Estimator):
    """``"none"``: no loss sends a gradient to the probabilities."""

    def dense_loss(self, call: AttentionCall) -> Tensor | None:
        """Return None: nothing is trained."""
        return None


class Mask(Estimator):
    """``"mask"``: a straight-through gate that multiplies weights, as in the authors' code."""

    gate_form = "weight"

    def gate(self, choice: Choice) -> Tensor | None:
        """Ones, ``[E]``, with the gradient of the probabilities; None if gradients are disabled."""
        if choice.probability is None or not torch.is_grad_enabled():
            return None
        return straight_through(choice.probability, choice.graph.blocks, choice.forced)


class Paper(Mask):
    """``"paper"``: a straight-through gate that multiplies scores, eq. 9 of Cho et al."""

    gate_form = "score"


class Local(Estimator):
    """``"local"``: the local expectation gradient, over edges and probes; see :func:`.attach_local_expectation`.

    Args:
        probes: Expected number of probes per query and head, in [0, inf]. The effect of a probe is computed even if it
            is not an edge.
        rows: Fraction of the queries whose edges and probes get a gradient in a call, in (0, 1]. Queries are sampled at
            random, and their gradients are divided by this fraction, so the expectation is that of all queries. A
            smaller fraction takes less time, and the gradient is noisier.
    """

    exploration = None  # probes explore, so no edges need to be added
    softmax_only = True
    methods = ("bernoulli",)

    def __init__(self, probes: float = 16.0, rows: float = 0.25) -> None:
        ops.checks.number("probes", probes, "[0, inf]", "It is the expected number of probes per query and head.")
        ops.checks.number("rows", rows, "(0, 1]", "It is a part of the queries.")
        self.probes, self.rows = probes, rows

    def attach(self, out: Tensor, call: AttentionCall) -> Tensor:
        choice = call.choice
        if choice.probability is None or not torch.is_grad_enabled():
            return out
        if not choice.independent:
            raise ValueError(
                f"Expected 'estimator' other than {type(self).__name__} with a source that selects edges by rank (got "
                "edges that were not drawn independently). Take 'imitate', or a source that samples."
            )
        graph, bias, forced, queries = choice.graph, call.bias, choice.forced, None
        seed, ids = draw_seed(call.seed), resolve_sequence_ids(call.sequence_ids, graph.num_sequences, graph.device)
        if self.rows < 1:
            blocks = graph.blocks
            queries = ops.schemas.sample_queries(blocks.query_ptr, ids, blocks.num_queries, float(self.rows), seed)
        probes, chance = probes_of(graph, self.probes, seed, ids, queries)
        probes = call.limit(probes)
        if queries is not None:
            blocks, edge = graph.blocks._select_queries(queries)
            graph = graph.with_blocks(blocks)
            forced = None if forced is None else forced[edge]
        with torch.no_grad():  # the effects treat it as a constant
            probe_bias = call.score_bias(call.query, call.key, probes)
            if queries is not None and bias is not None:  # of tokens, also where edges join blocks
                bias = bias[edge] if graph.block_size == 1 else call.score_bias(call.query, call.key, graph)
        choice.probability.check(graph.blocks)
        return attach_expectation(
            (out, call.query, call.key, call.value), choice.probability, graph, probes, (bias, probe_bias),
            (chance, forced, call.scale, choice.exploration, 1 / self.rows),
        )  # fmt: skip


class Imitate(Estimator):
    """``"imitate"``: trains the probabilities to match the attention over the graph, without the task loss.

    In training mode, the auxiliary loss is ``weight`` times :func:`.distillation`. The training loop adds it to its
    loss; see :func:`sbm_pyg.auxiliary_loss`.

    Args:
        weight: Weight of the distillation loss, in [0, inf).
        over: Keys over which the probabilities of a query are normalized, as in :func:`.distillation`. ``"selected"``:
            keys of the graph. The indexer of DeepSeek-V3.2 is trained in this way, first on a full graph, then on the
            keys of its largest scores. ``"all"``: all keys, so that training also lowers the probability of keys
            outside the graph.
    """

    exploration = None
    softmax_only = True
    needs_loss = True

    def __init__(self, weight: float = 1.0, over: str = "selected") -> None:
        ops.checks.number("weight", weight, "[0, inf)", "It is the weight of the auxiliary loss.")
        ops.checks.one_of("over", over, OVER)
        self.weight, self.over = weight, over

    def auxiliary_loss(self, call: AttentionCall) -> Tensor | None:
        """As :meth:`Estimator.auxiliary_loss`; None in evaluation mode, or if gradients are disabled."""
        choice = call.choice
        if choice.probability is None or not call.training or not torch.is_grad_enabled():
            return None
        how: dict[str, Any] = {"bias": call.bias, "scale": call.scale, "over": self.over}
        return self.weight * distillation(call.query, call.key, choice.probability, choice.graph, **how)


class Distill(Local):
    """``"distill"``: :class:`Local`, plus :func:`.row_distillation` as an auxiliary loss.

    :class:`~sbm_pyg.Sparsifier` uses it in place of :class:`Local`. Over a sampled graph, where the task also trains
    the probabilities, the loss uses a quarter of the rows that it uses while attention is dense.

    Args:
        weight: Weight of the distillation loss, in [0, inf).
        probes, rows: As :class:`Local`.
    """

    needs_loss = True

    def __init__(self, weight: float = 1.0, probes: float = 16.0, rows: float = 0.25) -> None:
        super().__init__(probes, rows)
        self.weight = Imitate(weight).weight

    def dense_loss(self, call: AttentionCall) -> Tensor | None:
        """As :meth:`Estimator.dense_loss`."""
        return _distill_rows(call, self.weight)

    def auxiliary_loss(self, call: AttentionCall) -> Tensor | None:
        """As :meth:`Estimator.auxiliary_loss`; None in evaluation mode, or if gradients are disabled."""
        return _distill_rows(call, self.weight, rows=0.25, part=1 / 16)


class Relaxed(Estimator):
    """``"relaxed"``: trains on all pairs with a soft mask, O(NM), and samples in evaluation only."""

    softmax_only = True
    numbers = 5
    """Numbers per pair that training holds in memory, in addition to the key of the pair."""

    def prepare(self, choice: Choice, training: bool) -> Choice:
        """The choice of all pairs in training; the given choice in evaluation."""
        if not training:
            return choice
        blocks = choice.graph.blocks
        check_pairs(blocks, self.numbers, 4)
        pairs, _ = draw_probes(blocks, math.inf, seed=0)
        forced = None if choice.forced is None else pairs.union(blocks.select(choice.forced))[1]
        return replace(choice, graph=choice.graph.with_blocks(pairs), forced=forced)

    def bias(self, choice: Choice, training: bool, seed: int) -> Tensor | None:
        """Logarithm of each pair's mask, ``[E]``, in training."""
        if choice.probability is None or not training:
            return None
        soft = self._soft(choice.probability, choice, seed)
        return soft if choice.forced is None else soft.masked_fill(choice.forced, 0)

    def _soft(self, probability: EdgeProbability, choice: Choice, seed: int) -> Tensor:
        return relaxed_bias(probability, choice.graph.blocks, choice.exploration)


class Concrete(Relaxed):
    """``"concrete"``: as :class:`Relaxed`, with a relaxed Bernoulli variable in place of the probability.

    Args:
        temperature: Temperature of the relaxed variables, positive. A trainer may lower it during training.
    """

    numbers = 8

    def __init__(self, temperature: float = 1.0) -> None:
        ops.checks.number("temperature", temperature, "(0, inf)", "Lower temperatures are closer to 0 or 1.")
        self.temperature = temperature

    def _soft(self, probability: EdgeProbability, choice: Choice, seed: int) -> Tensor:
        blocks = choice.graph.blocks
        return concrete_bias(probability, blocks, self.temperature, seed=seed, exploration=choice.exploration)


def _distill_rows(call: AttentionCall, weight: float = 1.0, **sample: float) -> Tensor | None:
    """The weighted :func:`.row_distillation` of a call; None if the source has no parameters to train."""
    if not isinstance(call.source, LearnedSource) or not call.training or not torch.is_grad_enabled():
        return None
    assert call.tokens is not None
    seen = call.tokens.query is call.query and call.tokens.key is call.key
    scored = None if seen else call.tokens.with_vectors(call.query, call.key)
    how: dict[str, Any] = {"scale": call.scale, "scored": scored, "score_bias": call.score_bias}
    if getattr(call.score_bias, "is_of_batch", False):  # it reads numbers of tokens, which a part of them lacks
        sample["part"] = 1.0
    return weight * row_distillation(call.source, call.tokens, **how, **sample)


ESTIMATORS: dict[str, type[Estimator]] = {
    "local": Local, "distill": Distill, "imitate": Imitate, "mask": Mask, "paper": Paper, "relaxed": Relaxed,
    "concrete": Concrete, "none": NoEstimator,
}  # fmt: skip
"""Each estimator by its name."""


def resolve_estimator(
    estimator: Estimator | str | None, normalizer: object, method: str = "bernoulli", probes: float = 16.0
) -> Estimator:
    """The estimator with a name; an :class:`Estimator` is returned unchanged.

    Args:
        estimator: An estimator, its name, or None: ``"local"`` if it supports the normalizer and the method;
            ``"imitate"`` with ``"top_k"``; else ``"mask"``.
        normalizer: Normalizer of the attention, ``"softmax"`` or another.
        method: How the source draws edges, :attr:`~sbm_pyg.GraphSource.method`.
        probes: Probes of ``"local"`` and ``"distill"``.
    """
    local = Local(probes)
    if estimator is None:
        others = Imitate() if normalizer == "softmax" and method == "top_k" else Mask()
        estimator = local if normalizer == "softmax" and method in Local.methods else others
    elif isinstance(estimator, str):
        ops.checks.one_of("estimator", estimator, tuple(ESTIMATORS))
        kind = ESTIMATORS[estimator]
        estimator = kind(probes=probes) if issubclass(kind, Local) else kind()
    if not isinstance(estimator, Estimator):
        raise TypeError(
            f"Expected 'estimator' to be an Estimator or a name (got {type(estimator).__name__}). "
            f"Names are {[*ESTIMATORS]}."
        )
    estimator.check(normalizer, method)
    return estimator
