"""Sources whose edge probabilities are learned, and dense attention, in which they begin.

In: :class:`~sbm_pyg.Tokens`, and a target density. Out: a :class:`~sbm_pyg.Choice`, all pairs at a density of 1. Not
here: the probabilities themselves (``sampling``, ``indexer``), the losses that train them (``estimators``), and when a
model leaves dense attention (``sparsifier``).
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..graphs.blocks import BlockGraph
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, count_pairs, count_positions, offsets
from ..graphs.rows import index_type
from ..ops import checks
from ..ops.reference.density import MIN_MEAN_PROBABILITY
from ..ops.segments import allowed_keys, edge_row, group_by_length, runs
from ..ops.tiles import cut_blocks
from ..ops.values import can_read, can_read_without_sync
from . import patterns
from .candidates import CandidateProbability, Candidates
from .interface import Choice, EdgeProbability, GraphSource, check_finite

__all__ = [
    "DenseChoice", "DensitySource", "LearnedSource", "attend_densely", "attend_padded", "factor_for_density",
    "sample_rows", "sample_sequences",
]  # fmt: skip


CUTS = 8
"""Rounds in which probabilities are cut at 1 and the others are scaled up."""
FEW_KEYS = 4
"""Mean number of keys of a query below which a target density is warned of."""


@torch.compiler.disable  # it branches on the lengths of sequences
def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, query_ptr: Tensor, key_ptr: Tensor, *, scale: float | None = None,
    is_causal: bool = False, dropout: float = 0.0, bias: Callable[[int, int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention over all pairs of each sequence, by torch's scaled dot-product attention, ``[H, N, C']``.

    Sequences of equal length are one batch; others are padded in groups of similar length.

    Args:
        query, key, value: ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
        query_ptr, key_ptr: Offsets of the sequences, ``[B+1]`` each.
        scale: Factor of the scores; None: :math:`C^{-1/2}`.
        is_causal: No query attends to a later key; positions count from the start of both sequences.
        dropout: Probability that a weight is dropped, by torch's default generator.
        bias: Function from the numbers of queries and keys of a sequence to score biases, ``[H, L, S]``, or None.
    """
    if not torch.compiler.is_compiling() and 0 in (query.size(1), key.size(1)):
        return query.new_zeros(*query.shape[:2], value.size(2)) + value[:, :0].sum()
    attend: Any = partial(attend_padded, scale=scale, dropout_p=dropout, bias=bias)
    batch = query_ptr.numel() - 1
    if torch.compiler.is_compiling():  # an exported program has one group, of all pairs of the batch
        sides = (query_ptr, query.size(1)), (key_ptr, key.size(1))
        of_query, of_key = (edge_row(*side) for side in sides)
        at_query, at_key = (count_positions(*side) for side in sides)
        allowed = of_query[:, None] == of_key
        if is_causal:
            allowed = allowed & (at_query[:, None] >= at_key)
        of_pairs = None if bias is None else lambda *sizes: bias(*sizes)[:, at_query[:, None], at_key]
        parts = (x[None] for x in (query, key, value))
        return attend(*parts, mask=allowed[None, None], is_causal=False, bias=of_pairs)[0]
    if batch == 1 or (_equal_lengths(query_ptr, query.size(1)) and _equal_lengths(key_ptr, key.size(1))):
        parts = (x.unflatten(1, (batch, -1)).transpose(0, 1) for x in (query, key, value))  # [B, H, L, C]
        out = attend(*parts, is_causal=is_causal)
        return out.transpose(0, 1).flatten(1, 2)
    outputs, order = [], []
    for queries, keys, _ in group_by_length(query_ptr, key_ptr):
        tokens = ((query, queries), (key, keys), (value, keys))
        parts = (x[:, at.clamp(min=0)].transpose(0, 1) for x, at in tokens)
        # padding comes after the tokens, so causal queries do not attend to it where they are the keys
        mask = None if is_causal and key_ptr is query_ptr else (keys >= 0)[:, None, None]
        out = attend(*parts, mask=mask, is_causal=is_causal)
        outputs.append(out.transpose(0, 1)[:, queries >= 0])
        order.append(queries[queries >= 0])
    return torch.cat(outputs, 1)[:, torch.cat(order).argsort()]


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, mask: Tensor | None = None,
    bias: Callable[[int, int], Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention over padded sequences by torch's scaled dot-product attention, ``[B, H, L, C']``.

    Args:
        query, key, value: ``[B, H, L, C]``, ``[B, H, S, C]`` and ``[B, H, S, C']``.
        is_causal: No query attends to a later key.
        mask: True at real keys, ``[B, 1, 1, S]``. None: all are real.
        bias: As in :func:`attend_densely`.
        **options: Of torch's function.
    """
    sizes = query.size(2), key.size(2)
    if is_causal and not (mask is None and bias is None):  # torch does not take both
        tril = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        mask, is_causal = tril if mask is None else mask & tril, False
    if bias is not None:
        added = bias(*sizes).to(query.dtype)
        mask = added if mask is None else torch.where(mask, added, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, **options)


def _equal_lengths(ptr: Tensor, count: int) -> bool:
    """True if all sequences have the same length. Offsets on a device give False, since reading them would wait."""
    length, remainder = divmod(count, ptr.numel() - 1)
    return not remainder and can_read_without_sync(ptr) and bool((ptr.diff() == length).all())


# ------------------------------------------------------------------ what a source learns from


def sample_sequences(tokens: Tokens, part: float, longer_than: int = 1) -> Tokens:
    """Tokens of a sample of the sequences, at least one. Those with more than ``longer_than`` keys come first."""
    batch = tokens.query_ptr.numel() - 1
    count = math.ceil(batch * part)
    if count == batch:
        return tokens
    order = torch.randperm(batch, generator=_generator(tokens.seed)).to(tokens.query.device)
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


def sample_rows(tokens: Tokens, rows: float, block_size: int = 1) -> AttentionGraph:
    """The graph in which a sample of the queries of each sequence attend to all their keys, and others to none.

    Args:
        tokens: The tokens.
        rows: Queries of each sequence, as a multiple of the square root of its length; infinity: all.
        block_size: Tokens of a block. Above 1 the graph is a :class:`~sbm_pyg.BlockGraph`, and a sample of the blocks
            of queries attend.
    """
    ptrs, totals = (tokens.query_ptr, tokens.key_ptr), (tokens.num_queries, tokens.num_keys)
    if block_size > 1:
        cuts = cut_blocks(totals, ptrs, block_size)
        ptrs, totals = (cuts[0].ptr, cuts[1].ptr), (cuts[0].count, cuts[1].count)
    length = ptrs[0].diff()
    sequence = torch.repeat_interleave(length, output_size=totals[0])
    size = tokens.query_ptr.diff().to(checks.widest(length.device))
    sample_size = (rows * size.sqrt() / block_size).clamp(min=1)
    order = torch.rand(totals[0], generator=_generator(tokens.seed)).to(length.device).argsort()
    order = order[sequence[order].argsort(stable=True)]  # the queries of each sequence in random order
    position = torch.arange(totals[0], device=length.device) - ptrs[0][sequence]
    is_drawn = torch.empty_like(order, dtype=torch.bool)
    is_drawn[order] = position < sample_size[sequence]
    allowed = tokens.allowed_keys if block_size == 1 else allowed_keys(*ptrs, totals[0], tokens.is_causal)
    degree = torch.where(is_drawn, allowed, 0)
    col = runs(ptrs[1][sequence], degree).to(index_type(totals[1])).repeat(tokens.heads)
    rowptr = offsets(degree.repeat(tokens.heads))
    graph = AttentionGraph._trusted(rowptr, col, *totals, tokens.heads, *ptrs, tokens.has_causal_graph)
    if block_size == 1:
        return graph
    sizes = (tokens.num_queries, tokens.num_keys)
    return BlockGraph._trusted_blocks(graph, block_size, tokens.query_ptr, tokens.key_ptr, *sizes)


def factor_for_density(p: Tensor, head: Tensor, heads: int, density: float | Tensor) -> Tensor:
    """Factor for the probabilities of each head, ``[H]``, after which they have a given mean when cut at 1.

    It is at most the mean over 0.001, as with :class:`~sbm_pyg.SBMSource`.

    Args:
        p: Probabilities of pairs, ``[E]``. They are constants.
        head: Head of each pair, ``[E]`` int64.
        heads: Number of heads H.
        density: The mean, in (0, 1], one number or ``[H]``.
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


def _generator(seed: int) -> torch.Generator:
    """A generator on the CPU for one seed of 64 bits."""
    return torch.Generator().manual_seed(seed % 2**63)


# ------------------------------------------------------------------ dense attention


class DenseChoice(Choice):
    """All pairs. Torch's dense kernel attends, and edges are stored only when :attr:`graph` is first used.

    Args:
        tokens: Queries and keys.
    """

    tokens: Tokens

    def __init__(self, tokens: Tokens) -> None:
        fields = {"tokens": tokens, "probability": None, "forced": None, "exploration": 0.0, "independent": True}
        self.__dict__.update(fields)

    @cached_property
    def graph(self) -> AttentionGraph:
        """The full graph. Memory O(H N M)."""
        tokens = self.tokens
        pairs = tokens.heads * int(tokens.allowed_keys.sum())
        way_out = "Take fewer heads or shorter sequences, or do not ask for the graph."
        checks.memory("graph", pairs, 8, tokens.query.device, way_out)
        return sample_rows(tokens, math.inf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens})"

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of sequences and heads, (B, H), without storing edges."""
        return self.tokens.query_ptr.numel() - 1, self.tokens.heads

    @property
    def density(self) -> Tensor:
        """Ones, ``[B, H]``, and zeros in sequences without pairs."""
        tokens = self.tokens
        pairs = count_pairs(tokens.query_ptr, tokens.key_ptr)
        return pairs.clamp(max=1).to(checks.widest(pairs.device))[:, None].expand(self.shape)

    def check_tokens(self, tokens: Tokens) -> None:
        """Do nothing: all pairs of any tokens are edges."""

    @property
    def is_stored(self) -> bool:
        return self.tokens.at_end

    def stored(self) -> Choice:
        return Choice(self.graph)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor | None:
        tokens = self.tokens
        if tokens.at_end:  # torch's kernel counts positions from the first query
            return None
        ptrs = (tokens.query_ptr, tokens.key_ptr)
        return attend_densely(query, key, value, *ptrs, is_causal=tokens.is_causal, **options)

    def expand(self, heads: int) -> Choice:
        return self if heads == self.tokens.heads else self.stored().expand(heads)

    def select(self, mask: Tensor) -> Choice:
        return self.stored().select(mask)

    def causal(self) -> Choice:
        return self if self.tokens.is_causal else self.stored().causal()

    def force(self, pattern: AttentionGraph) -> Choice:
        """Return the choice unchanged, since it has all edges."""
        return self


class Schedule(NamedTuple):
    """Settings of a :class:`~sbm_pyg.Sparsifier` for a source that it trains."""

    sparsifier: int
    """Number of the Sparsifier, of the last one if several were made for the source."""
    density: float | None
    """Target density of calls in training mode, for dense steps and trial steps. None is that of evaluation."""
    is_dense_phase: bool
    """Whether not all steps are sparse yet."""


class DensitySource(GraphSource):
    """A source with a target density, which :class:`~sbm_pyg.Sparsifier` changes during training.

    At a target density of 1 every pair is an edge: the layer attends by torch's dense kernel, and nothing is chosen.
    ``state_dict`` contains the density of evaluation, which is empty for a number of keys ``k`` without one. Subclasses
    define :meth:`choose`. The density is None until it is set. To be dense without a Sparsifier, set
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
    """Whether :meth:`choose` gives heads the densities that budgets say."""
    schedule: Schedule | None = None
    """What a :class:`~sbm_pyg.Sparsifier` has set for training; ``state_dict`` does not contain it."""
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
        """Warn, once for a target density, if it leaves fewer than four keys to a query, in the mean over these tokens.

        Edges of a window and to sinks count, and the least number of keys ``k``. Offsets are read at the first sparse
        call alone.
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

        To set it sets that of training and of evaluation.
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
        """The target density, or that of each head where they differ, ``[H, 1]``, on a device."""
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
        """True if probabilities send no gradient to queries and keys: by the option, or in the dense phase."""
        return self.detach or (self.schedule is not None and self.schedule.is_dense_phase)

    def start_from(self, query: Tensor, key: Tensor, *, scale: float, seed: int = 0) -> None:
        """Begin with the queries and keys of a trained layer, without a step of training.

        By default parameters stay as they are. :func:`~sbm_pyg.calibrate` calls it.

        Args:
            query, key: Queries ``[H, N, C]`` and keys ``[H, M, C]``.
            scale: Factor of the scores.
            seed: Seed of random choices.
        """

    def settle(self, batches: Iterable[Tokens]) -> None:
        """Set statistics that training updates to their values over some tokens. By default do nothing."""

    def choose_among(self, tokens: Tokens, candidates: Candidates) -> Choice:
        """Choose among given pairs of one head, with a target density, a budget and numbers of keys among them.

        At a target density of 1 all of them are edges. Cost: the prediction, and O(E K) for E pairs.
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
        """Number of edges to draw for each edge of the graph."""
        return 1.0

    @property
    def _exploration(self) -> float:
        """The number that the current call adds to each probability: ``exploration`` in training, 0 in evaluation."""
        if not self.training:
            return 0.0
        density = self.target_density or 0.0
        return (self._drawn * density) ** 2 if self.exploration is None else self.exploration
