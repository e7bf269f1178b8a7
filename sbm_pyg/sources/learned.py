"""Sources whose edge probabilities are learned, and which begin in dense attention.

In: :class:`~sbm_pyg.Tokens`, and a target density. Out: a :class:`~sbm_pyg.Choice`, all pairs at a density of 1. Not
here: dense attention itself (``dense``), the probabilities (``sampling``, ``indexer``), the losses that train them
(``estimators``), and when a model leaves dense attention (``sparsifier``).
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..graphs.ragged import Tokens, count_pairs, offsets
from ..ops import checks
from ..ops.reference.density import MIN_MEAN_PROBABILITY
from ..ops.segments import runs
from ..ops.values import can_read
from . import patterns
from .candidates import CandidateProbability, Candidates
from .dense import DenseChoice, seeded
from .interface import Choice, EdgeProbability, GraphSource, check_finite

__all__ = ["DensitySource", "LearnedSource", "factor_for_density", "sample_sequences"]


CUTS = 8
"""Rounds in which probabilities are cut at 1 and the others are scaled up."""
FEW_KEYS = 4
"""Mean number of keys of a query below which a target density is warned of."""


# ------------------------------------------------------------------ what a source learns from


def sample_sequences(tokens: Tokens, part: float, longer_than: int = 1) -> Tokens:
    """Tokens of a sample of sequences, at least one. Sequences with over ``longer_than`` keys are taken first."""
    batch = tokens.query_ptr.numel() - 1
    count = math.ceil(batch * part)
    if count == batch:
        return tokens
    order = torch.randperm(batch, generator=seeded(tokens.seed)).to(tokens.query.device)
    is_short = tokens.key_ptr.diff()[order] <= longer_than
    which = order[is_short.argsort(stable=True)[:count]]

    def take(x: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
        length = ptr.diff()[which]
        return x[:, runs(ptr[which], length)], offsets(length)

    query, query_ptr = take(tokens.query, tokens.query_ptr)
    shared = tokens.key is tokens.query
    key, key_ptr = (query, query_ptr) if shared else take(tokens.key, tokens.key_ptr)
    if tokens.key_ptr is tokens.query_ptr:
        key_ptr = query_ptr
    return Tokens(query, key, query_ptr, key_ptr, tokens.bipartite, tokens.is_causal, tokens.seed, None, tokens.at_end)


def factor_for_density(p: Tensor, head: Tensor, heads: int, density: float | Tensor) -> Tensor:
    """Factor for the probabilities of each head, ``[H]``, that gives them a required mean after they are cut at 1.

    The factor is at most the required mean divided by 0.001, as in :class:`~sbm_pyg.SBMSource`.

    Args:
        p: Probabilities of pairs, ``[E]``; no gradient reaches them.
        head: Head of each pair, ``[E]`` int64.
        heads: Number of heads H.
        density: The required mean, in (0, 1], one number or ``[H]``.
    """
    p, zeros, tiny = p.detach(), p.new_zeros(heads), torch.finfo(p.dtype).tiny
    mean = torch.as_tensor(density, dtype=p.dtype, device=p.device)
    edges = mean * zeros.index_add(0, head, torch.ones_like(p))  # expected
    factor = edges / zeros.index_add(0, head, p).clamp(min=tiny)
    for _ in range(CUTS):  # each round finds pairs that are above 1 by the factor of the one before
        is_cut = p * factor[head] >= 1
        left = edges - zeros.index_add(0, head, is_cut.to(p.dtype))
        total = zeros.index_add(0, head, p.masked_fill(is_cut, 0))
        factor = torch.where((left > 0) & (total > 0), left / total.clamp(min=tiny), factor)
    return factor.minimum(mean / MIN_MEAN_PROBABILITY)


class Schedule(NamedTuple):
    """Settings of a :class:`~sbm_pyg.Sparsifier` for a source that it trains."""

    sparsifier: int
    """Number that identifies the Sparsifier; the last Sparsifier, if several were made for the source."""
    density: float | None
    """Target density of calls in training mode, for dense steps and trial steps. None is that of evaluation."""
    is_dense_phase: bool
    """Whether some training steps are still dense."""


class DensitySource(GraphSource):
    """A source with a target density, which :class:`~sbm_pyg.Sparsifier` changes during training.

    At a target density of 1 every pair is an edge: the layer attends by torch's dense kernel, and nothing is chosen.
    ``state_dict`` contains the density of evaluation, as an empty tensor for a source with ``k`` keys and no density.
    Subclasses define :meth:`choose`. The density is None until it is set. To be dense without a Sparsifier, set
    ``self.target_density = 1.0`` in ``__init__``.

    Example:
        >>> from sbm_pyg import Sparsifier, patterns
        >>> class Middle(DensitySource):
        ...     def choose(self, tokens):
        ...         size = max(1, round(self.target_density * tokens.num_keys / 2))
        ...         return Choice(patterns.window(tokens.num_keys, size, ptr=tokens.key_ptr))
        >>> source = Middle()
        >>> sparsifier = Sparsifier(source, density=0.2, total_steps=1000)
        >>> source(Tokens(torch.randn(2, 10, 8)))  # dense at first
        DenseChoice(Tokens(1 sequences, 2 heads, 10 queries, 10 keys))
    """

    head_budgets: Tensor | None
    """Density of each head as a multiple of the target density, ``[H]``, positive; None if heads are alike.

    A head whose product is above 1 is dense. :func:`~sbm_pyg.calibrate` sets them, and ``state_dict`` contains them.
    """
    has_head_budgets: ClassVar[bool] = False
    """Whether :meth:`choose` follows the density budget of each head."""
    schedule: Schedule | None = None
    """Training settings of a :class:`~sbm_pyg.Sparsifier`, which ``state_dict`` does not contain."""
    _density: float | None = None
    _checked_density: float | None = None  # whose number of keys has been looked at

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("head_budgets", None)

    @abstractmethod
    def choose(self, tokens: Tokens) -> Choice:
        """Choose a graph of the target density."""

    def forward(self, tokens: Tokens) -> Choice:
        return DenseChoice(tokens) if self.target_density == 1 else self.choose(tokens)

    def _warn_of_few_keys(self, tokens: Tokens) -> None:
        """Warn once per target density if queries get fewer than four keys on average over these tokens.

        The average includes edges of a window and to sinks, and the least number of keys ``k``. Offsets are read only
        at the first sparse call.
        """
        density = self.target_density
        if density in (None, 1, self._checked_density) or torch.compiler.is_compiling() or not can_read(tokens.key_ptr):
            return
        self._checked_density = density
        ptrs = (tokens.query_ptr, tokens.key_ptr)
        counts = tokens.allowed_keys if tokens.at_end else count_pairs(*ptrs, tokens.is_causal)
        allowed = float(counts.sum()) / max(tokens.num_queries, 1)
        near = 0 if self.window is None else (2 - tokens.is_causal) * self.window + 1
        forced = near + self.num_sinks if tokens.are_same else 0
        keys = max(density * allowed, getattr(self, "k", None) or 0) + forced
        if keys < min(FEW_KEYS, allowed):
            warnings.warn(
                f"A target density of {density:.3g} leaves a query {keys:.1f} keys in the mean, of {allowed:.1f} that "
                "it may attend to. Set a larger density, a wider 'window', more 'num_sinks', or a 'k' if the source "
                "has one.",
                UserWarning,
                stacklevel=2,
            )

    @property
    def target_density(self) -> float | None:
        """Density of the graphs among all allowed pairs, in (0, 1], or None. It may change between calls.

        Setting this attribute sets the densities of training and of evaluation.
        """
        scheduled = self.schedule.density if self.training and self.schedule is not None else None
        return self._density if scheduled is None else scheduled

    @target_density.setter
    def target_density(self, density: float | None) -> None:
        if density is not None:
            checks.number("target_density", density, "(0, 1]", "It is a fraction of the pairs; 1 is dense attention.")
        elif self._needs_density:
            raise ValueError(
                "Expected 'target_density' to be a number in (0, 1] without a 'k' (got None). One of them fixes the "
                "number of keys of a query; 1 is dense attention."
            )
        self._density = density
        if self.schedule is not None:
            self.schedule = self.schedule._replace(density=None)
        self._prepare()

    def _densities(self, device: torch.device) -> float | Tensor | None:
        """The target density as one number, or ``[H, 1]`` on a device if heads have different densities."""
        density, budgets = self.target_density, self.head_budgets
        if density is None or budgets is None:
            return density
        return (density * budgets.to(device, checks.widest(device))).clamp(max=1)[:, None]

    @property
    def _needs_density(self) -> bool:
        """Whether the source needs a target density to know how many edges to draw."""
        return False

    def _prepare(self) -> None:
        """Update the source after its target density was set."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._density is not None:
            destination[f"{prefix}target_density"] = torch.tensor(self._density, dtype=torch.float64, device="cpu")
        elif getattr(self, "k", None) is not None:  # which alone says how many edges there are
            destination[f"{prefix}target_density"] = torch.empty(0, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        if f"{prefix}head_budgets" in state_dict:
            self.head_budgets = state_dict[f"{prefix}head_budgets"].detach().clone()
        density = state_dict.pop(f"{prefix}target_density", None)
        if density is not None and torch.as_tensor(density).numel() <= 1:
            self._restore_density(float(density) if torch.as_tensor(density).numel() else None)
        elif density is not None:
            arguments[-1].append(f"Expected '{prefix}target_density' to be one number (got shape {[*density.shape]}).")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _restore_density(self, density: float | None) -> None:
        """Set the target density that a file holds, and keep the schedule of the Sparsifier."""
        schedule = self.schedule
        self.target_density = density
        self.schedule = schedule


class LearnedSource(DensitySource):
    """A source with learned edge probabilities, and a target density for its graphs.

    At a target density of 1 the layer attends by torch's dense kernel, samples nothing, and trains the probabilities on
    a sample of query rows. Subclasses define :meth:`predict` and :meth:`choose`.

    Example:
        >>> from sbm_pyg import SBM, SBMAttentionConv, Sparsifier, sample_edges
        >>> class Linear(LearnedSource):
        ...     def __init__(self, channels, num_clusters):
        ...         super().__init__()
        ...         self.query, self.key = (torch.nn.Linear(channels, num_clusters) for _ in range(2))
        ...     def predict(self, tokens):
        ...         members = self.query(tokens.query).softmax(-1), self.key(tokens.key).sigmoid()
        ...         return SBM(*members, query_ptr=tokens.query_ptr, key_ptr=tokens.key_ptr)
        ...     def choose(self, tokens):
        ...         sbm = self.predict(tokens).with_density(self.target_density)
        ...         return Choice(sample_edges(sbm, clamp=True, seed=tokens.seed), sbm)
        >>> source = Linear(8, 4)
        >>> sparsifier = Sparsifier(source, density=0.2, total_steps=1000)
        >>> source(Tokens(torch.randn(2, 10, 8)))  # dense at first
        DenseChoice(Tokens(1 sequences, 2 heads, 10 queries, 10 keys))
    """

    exploration: float | None = None
    """Added to each probability in training. None is the square of the target density, or 0 without one."""
    detach = False
    """Stop gradients from the probabilities to queries and keys."""
    block_size = 1
    """Tokens of a block of the graph."""

    @abstractmethod
    def predict(self, tokens: Tokens) -> EdgeProbability:
        """The probabilities of all pairs. Nothing is sampled, and they need not have the target density."""

    def forward(self, tokens: Tokens) -> Choice:
        return super().forward(tokens.detached() if self._detaches and self.target_density != 1 else tokens)

    @property
    def _detaches(self) -> bool:
        """True if probabilities send no gradient to queries and keys, by ``detach`` or in the dense phase."""
        return self.detach or (self.schedule is not None and self.schedule.is_dense_phase)

    def start_from(self, query: Tensor, key: Tensor, *, scale: float, seed: int = 0) -> None:
        """Initialize the parameters from queries and keys of a trained layer, without a training step.

        By default parameters stay unchanged. :func:`~sbm_pyg.calibrate` calls this method.

        Args:
            query, key: Queries ``[H, N, C]`` and keys ``[H, M, C]``.
            scale: Factor of the scores.
            seed: Seed of random choices.
        """

    def settle(self, batches: Iterable[Tokens]) -> None:
        """Set statistics that training updates to their values over some tokens. By default do nothing."""

    def choose_among(self, tokens: Tokens, candidates: Candidates) -> Choice:
        """Choose among given pairs of one head; target density, budget and number of keys refer to these pairs.

        At a target density of 1 all given pairs are edges. Cost: the prediction, and O(E K) for E pairs.
        """
        if self.target_density == 1:
            return Choice(candidates.graph)
        seen = tokens.detached() if self._detaches else tokens
        density, budget = self.target_density, getattr(self, "budget", None)
        density, budget = (x if x is None else x * self._drawn for x in (density, budget))
        probability = CandidateProbability(self.predict(seen), candidates.graph, density, budget)
        check_finite("source", tokens, probability.on_candidates)
        choice = self._select_among(probability, candidates, tokens)
        return patterns.with_forced(choice, self.window, self.num_sinks, tokens)

    def _select_among(self, probability: CandidateProbability, candidates: Candidates, tokens: Tokens) -> Choice:
        """Draw each pair with its probability; subclasses select in another way."""
        p, exploration = probability.on_candidates.detach(), self._exploration
        return Choice(candidates.draw(p + exploration), probability, exploration=exploration)

    @property
    def _drawn(self) -> float:
        """Number of edges that are drawn for each edge that the graph keeps."""
        return 1.0

    @property
    def _exploration(self) -> float:
        """The number that the current call adds to each probability: ``exploration`` in training, 0 in evaluation."""
        if not self.training:
            return 0.0
        density = self.target_density or 0.0
        return (self._drawn * density) ** 2 if self.exploration is None else self.exploration
