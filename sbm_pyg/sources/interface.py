"""The interface between graph sources and attention, and a source as a PyG transform.

In: :class:`~sbm_pyg.Tokens`. Out: a :class:`Choice`, which is a graph and what its source knows of its pairs. Not here:
the sources themselves (``patterns``, ``sampling``), attention, and how a loss reaches the probabilities
(``estimators``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from .. import ops
from ..graph import AttentionGraph, check_graph
from ..ops import checks
from ..ragged import Tokens, check_record, draw_seed, stored_ptr

__all__ = ["Choice", "EdgeProbability", "GraphSource", "SharingSource", "SourceGraph", "TiledChoice"]


class EdgeProbability(ABC):
    """The probability that a source of graphs gives to each pair of a query and a key.

    A subclass defines :meth:`on` and :meth:`expected_density`; then every estimator trains it. :class:`sbm_pyg.SBM` is
    one.
    """

    @abstractmethod
    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``, differentiable.

        Args:
            graph: Any graph over the same tokens and heads, not only one that was chosen.
        """

    @abstractmethod
    def expected_density(self) -> Tensor:
        """Mean probability over the pairs of each sequence and head, ``[B, H]``, differentiable; none is cut at 1."""

    def expected_degree(self) -> Tensor:
        """Sum of the probabilities of each query's pairs, ``[H, N]``, differentiable.

        The estimators ``"distill"`` and ``"imitate"`` alone ask for it.

        Raises:
            NotImplementedError: A subclass does not say.
        """
        raise NotImplementedError(
            f"Expected 'probability' to have an `expected_degree` (got {type(self).__name__}, which has none). "
            "Write it, or take another estimator."
        )

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """``(rate [H, N, K], member [H, M, K])`` with ``p_ij = <rate_i, member_j>``, or None where there are none.

        Kernels that know them compute probabilities beside the scores.
        """
        return None

    def check(self, graph: AttentionGraph, name: str = "graph") -> None:
        """Refuse a graph that is not over the tokens of these probabilities, as far as they know their tokens.

        Raises:
            TypeError, ValueError: It is not.
        """
        check_graph(graph, name)

    def gate(self, graph: AttentionGraph) -> Tensor:
        """Straight-through gate of each edge, ``[E]``: exactly 1, with the gradient of :meth:`on`."""
        p = self.on(graph)
        return 1 + (p - p.detach())


@dataclass(frozen=True, eq=False)
class Choice:
    """A graph, and what its source knows of it.

    Args:
        graph: The graph.
        probability: Probabilities of its pairs, or None where nothing was drawn.
        forced: Edges that are there whatever their probability is, ``[E]`` bool, or None for no edge. Of a
            :class:`~sbm_pyg.BlockGraph`, edges of blocks, as ``graph.blocks`` has them: so are the pairs of
            ``probability``.
        exploration: What the source added to each probability before it drew, in [0, 1].
        independent: Edges were drawn one by one with these probabilities. False: the graph follows them in another way,
            by rank, say.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.
    """

    graph: AttentionGraph
    probability: EdgeProbability | None = None
    forced: Tensor | None = None
    exploration: float = 0.0
    independent: bool = True

    def __post_init__(self) -> None:
        check_graph(self.graph)
        if self.probability is not None:
            check_probability(self.probability)
        checks.forced(self.forced, self.graph.blocks.col)
        checks.number("exploration", self.exploration, "[0, 1]", "It was added to every probability.")

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of sequences and heads, (B, H)."""
        return self.graph.num_sequences, self.graph.heads

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise ValueError if the graph is over other tokens."""
        graph, sizes = self.graph, (tokens.num_queries, tokens.num_keys)
        if (graph.num_queries, graph.num_keys) != sizes or not graph.same_offsets(tokens.query_ptr, tokens.key_ptr):
            raise ValueError(
                f"Expected 'source' to return a graph over N = {sizes[0]} queries and M = {sizes[1]} keys, and over "
                f"their sequences (got {graph}). Build it with the offsets of its tokens."
            )

    @property
    def is_stored(self) -> bool:
        """False if edges are drawn when their scores are computed, and :attr:`graph` only on request."""
        return True

    def stored(self) -> Choice:
        """The same choice with a stored graph."""
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, learn: bool) -> Tensor:
        """Softmax attention over the edges, ``[H, N, C']``; ``learn`` trains a model whose edges are not stored."""
        return self.graph._attend(query, key, value, scale=scale)

    def expand(self, heads: int) -> Choice:
        """The choice for so many heads, as :meth:`AttentionGraph.expand`; all have the forced edges of the one."""
        graph = self.graph.expand(heads)
        if graph is self.graph:
            return self
        return replace(self, graph=graph, forced=None if self.forced is None else self.forced.repeat(heads))

    def select(self, kept: Tensor) -> Choice:
        """The choice among the edges of a mask ``[E]`` bool, as :meth:`AttentionGraph.select`.

        Raises:
            ValueError: The graph is one of blocks, whose tokens are not chosen one by one.
        """
        if self.graph.blocks is not self.graph:
            raise ValueError(
                f"Expected a graph of tokens where edges are left out (got blocks of {self.graph.grain}). "
                "Choose with grain=1, or expand the graph and attend over that: `graph.expand_tokens()`."
            )
        return replace(self, graph=self.graph.select(kept), forced=None if self.forced is None else self.forced[kept])

    def causal(self) -> Choice:
        """The choice without edges from later keys, as :meth:`AttentionGraph.causal`."""
        if self.graph.is_causal:
            return self
        forced = None if self.forced is None else self.forced[~self.graph.blocks.later]
        return replace(self, graph=self.graph.causal(), forced=forced)

    def force(self, pattern: AttentionGraph) -> Choice:
        """The choice with the edges of a pattern added, whatever their probabilities are.

        Args:
            pattern: A graph over the same tokens, with the same heads or one. To blocks, a graph of blocks of the same
                size, causal as they are.

        Raises:
            TypeError, ValueError: It is not.
        """
        check_graph(pattern, "pattern")
        graph, forced = self.graph.union(pattern)
        if graph.grain != self.graph.grain:
            raise ValueError(
                f"Expected 'pattern' over blocks of {self.graph.grain} tokens, causal as those of the choice "
                f"(got {pattern} for {self.graph}). Choose with grain=1 to force other edges."
            )
        if self.forced is not None:
            forced = graph.blocks.union(self.graph.blocks.select(self.forced))[1] | forced
        return replace(self, graph=graph, forced=forced)


class TiledChoice(Choice):
    """A graph that nobody has stored: a layer draws its edges beside its scores, by tiles of pairs.

    It is known by its model alone. Whoever asks for :attr:`graph` or :attr:`forced` has the edges drawn once more, from
    the same random words, and stored then. They are the same but where a probability is rounded otherwise, to one word
    of 2^32, on a device whose kernels compute in float32.

    Args:
        probability: A model with :attr:`~EdgeProbability.factors`.
        ptrs: Offsets of the sequences in the queries and in the keys, ``[B+1]`` each.
        exploration: What is added to each probability, in [0, 1].
        seed: Seed of the coins.
        sequence_ids: Number of each sequence, ``[B]``.
        window: Pairs at this distance or less are edges, whatever their probability is; None for no pair.
        draw: Draws the edges: the graph, and which of them are forced.
    """

    ptrs: tuple[Tensor, Tensor]
    seed: int
    sequence_ids: Tensor
    window: int | None

    def __init__(
        self, probability: EdgeProbability, ptrs: tuple[Tensor, Tensor], exploration: float, seed: int,
        sequence_ids: Tensor, window: int | None, draw: Callable[[], tuple[AttentionGraph, Tensor | None]],
    ) -> None:  # fmt: skip
        known = {"probability": probability, "ptrs": ptrs, "exploration": exploration, "seed": seed}
        self.__dict__.update(known, sequence_ids=sequence_ids, window=window, independent=True, _draw=draw)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Rates of the queries ``[H, N, K]`` and memberships of the keys ``[H, M, K]``."""
        factors = None if self.probability is None else self.probability.factors
        assert factors is not None
        return factors

    @property
    def shape(self) -> tuple[int, int]:
        """As :attr:`Choice.shape`; nothing is drawn for it."""
        return self.ptrs[0].numel() - 1, self.factors[0].size(0)

    @cached_property
    def _drawn(self) -> tuple[AttentionGraph, Tensor | None]:
        with torch.no_grad():
            return self._draw()  # type: ignore[attr-defined]

    @property
    def graph(self) -> AttentionGraph:
        """The graph, drawn when it is first asked for."""
        return self._drawn[0]

    @property
    def forced(self) -> Tensor | None:
        """Edges of the window, ``[E]`` bool, or None."""
        return self._drawn[1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.probability}, exploration={self.exploration}, window={self.window})"

    def check_tokens(self, tokens: Tokens) -> None:
        """The model was made from the tokens, so nothing is checked."""

    @property
    def is_stored(self) -> bool:
        return False

    def stored(self) -> Choice:
        return Choice(self.graph, self.probability, self.forced, self.exploration)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, learn: bool) -> Tensor:
        rate, member = self.factors if learn else (x.detach() for x in self.factors)
        return ops.sampled_attention(
            query, key, value, rate, member, *self.ptrs, self.sequence_ids, self.seed, scale=scale,
            exploration=self.exploration, is_causal=getattr(self.probability, "is_causal", False), window=self.window,
        )  # fmt: skip

    def expand(self, heads: int) -> Choice:
        """As :meth:`Choice.expand`."""
        return self if self.factors[0].size(0) == heads else self.stored().expand(heads)

    def select(self, kept: Tensor) -> Choice:
        """As :meth:`Choice.select`."""
        return self.stored().select(kept)

    def causal(self) -> Choice:
        """As :meth:`Choice.causal`."""
        return self if getattr(self.probability, "is_causal", False) else self.stored().causal()

    def force(self, pattern: AttentionGraph) -> Choice:
        """As :meth:`Choice.force`."""
        return self.stored().force(pattern)


class GraphSource(torch.nn.Module, ABC):
    """Chooses the graph that a layer of attention runs over. Subclasses write :meth:`forward`.

    A source is a module: it may hold parameters, which learn through the probabilities of its :class:`Choice`.

    Tokens are checked when they are made, and a call checks that the graph it returns is over these tokens. So sources
    need not look at shapes, offsets and seeds themselves, and kernels trust both.

    Example:
        >>> from sbm_pyg import selectors
        >>> class Nearest(GraphSource):
        ...     def forward(self, tokens):
        ...         return Choice(selectors.top_k(tokens, 1))
        >>> Nearest()(Tokens(torch.randn(2, 10, 8))).graph.num_edges
        20
    """

    def __call__(self, tokens: Tokens) -> Choice:
        """Choose, as :meth:`forward` does.

        Raises:
            TypeError: ``tokens`` are no :class:`~sbm_pyg.Tokens`, or :meth:`forward` returned no :class:`Choice`.
            ValueError: The chosen graph is over other tokens.
        """
        check_record(tokens)
        choice = super().__call__(tokens)
        _check_choice(choice, tokens)
        return choice

    def reset_parameters(self) -> None:
        """Draw the parameters of all parts anew from torch's default generator."""
        for part in self.children():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()

    @abstractmethod
    def forward(self, tokens: Tokens) -> Choice:
        """Choose a graph over the tokens."""


class SharingSource(GraphSource):
    """A source whose pairs can compete for a share of all pairs. :class:`~sbm_pyg.ShareSchedule` sets it.

    The share is part of ``state_dict``, since it may have moved on from what the source was made with. Subclasses look
    at :attr:`share` in :meth:`forward`.
    """

    _share_of_pairs: float | None = None

    @property
    def share(self) -> float | None:
        """Share of the keys that a query may attend to, in (0, 1], or None. It may change between calls."""
        return self._share_of_pairs

    @share.setter
    def share(self, share: float | None) -> None:
        if share is not None:
            checks.number("share", share, "(0, 1]", "It is a share of the keys that a query may attend to.")
        self._share_of_pairs = share
        self._prepare()

    @property
    def can_share(self) -> bool:
        """Whether a share may be set; not where something else fixes the number of keys."""
        return True

    def _prepare(self) -> None:
        """Make ready for the share that has been set."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.share is not None:
            destination[f"{prefix}share"] = torch.tensor(self.share, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        share = state_dict.pop(f"{prefix}share", None)
        if share is not None and torch.as_tensor(share).numel() == 1:
            self.share = float(share)
        elif share is not None:
            rest[-1].append(f"Expected '{prefix}share' to be one number (got shape {[*share.shape]}).")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@functional_transform("source_graph")
class SourceGraph(BaseTransform):
    """Gives ``Data`` the edges that a source chooses by the features of its nodes (functional name: ``source_graph``).

    Nodes are queries and keys at once, by their ``x``. Sequences are those of ``ptr``, else of ``batch``, else all
    nodes are one sequence. The edges replace the former ones; with several heads, ``edge_type`` says of which head an
    edge is. Nothing is learned here, and the source is as it is: evaluation mode gives graphs without exploration.

    Args:
        source: Any source, trained or not, such as :class:`~sbm_pyg.sources.selectors.SelectorSource` or
            :class:`~sbm_pyg.sources.indexer.IndexerSource`.
        heads: Heads H that features are divided among, ``[N, H*C]``.
        is_causal: No node attends to a later one.
        seed: Integer of 64 bits that fixes what is drawn; None takes torch's default generator at each call.

    Raises:
        TypeError: ``source`` is no source, or an argument or the data has the wrong type.
        ValueError: ``Data`` has no features ``[N, H*C]``, or an argument is out of range.

    Example:
        >>> from sbm_pyg import selectors
        >>> source = selectors.SelectorSource(selectors.top_k, k=2)
        >>> SourceGraph(source)(Data(x=torch.randn(5, 3))).edge_index.shape
        torch.Size([2, 10])
    """

    def __init__(
        self, source: GraphSource, *, heads: int = 1, is_causal: bool = False, seed: int | None = None
    ) -> None:
        if not isinstance(source, GraphSource):
            raise TypeError(
                f"Expected 'source' to be a GraphSource (got {type(source).__name__}). A rule becomes one by "
                "`selectors.SelectorSource`."
            )
        self.heads = checks.integer("heads", heads, 1, "Features are divided among them.")
        checks.flag("is_causal", is_causal, "It says whether later keys are left out.")
        self.source, self.is_causal, self.seed = source, is_causal, None if seed is None else checks.seed(seed)

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        """Choose the edges."""
        if not isinstance(data, Data):
            raise TypeError(
                f"Expected 'data' to be Data (got {type(data).__name__}). Convert it with `to_homogeneous()`."
            )
        x = data.x
        if not isinstance(x, Tensor) or x.dim() != 2 or x.size(1) % self.heads:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"Expected 'data' to have features `x` [N, H*C] for {self.heads} heads (got {found}). "
                "The source chooses by them."
            )
        query, ptr = x.unflatten(1, (self.heads, -1)).transpose(0, 1), stored_ptr(data, device=x.device)
        tokens = Tokens(query, query_ptr=cast(Tensor, ptr), is_causal=self.is_causal, seed=draw_seed(self.seed))
        choice = self.source(tokens)
        return choice.expand(self.heads).graph.replace_edges(data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"


def _check_choice(choice: object, tokens: Tokens) -> None:
    """Check that a source returned a :class:`Choice` over the tokens that it was given."""
    if not isinstance(choice, Choice):
        raise TypeError(
            f"Expected 'source' to return a Choice (got {type(choice).__name__}). Wrap a graph, `Choice(graph)`."
        )
    choice.check_tokens(tokens)


def check_probability(probability: object) -> None:
    """Raise TypeError unless it is an :class:`EdgeProbability`."""
    if not isinstance(probability, EdgeProbability):
        raise TypeError(
            f"Expected 'probability' to be an EdgeProbability (got {type(probability).__name__}). An SBM is one; "
            "others are subclasses of `sbm_pyg.EdgeProbability`."
        )


def check_over(
    graph: AttentionGraph, name: str, probability: EdgeProbability, sides: tuple[int, int, int],
    query_ptr: Tensor, key_ptr: Tensor, is_causal: bool,
) -> None:  # fmt: skip
    """Refuse a graph over other tokens, heads or sequences than those of the probabilities."""
    check_graph(graph, name)
    theirs = (graph.heads, graph.num_queries, graph.num_keys)
    whose = type(probability).__name__
    if sides != theirs:
        raise ValueError(
            f"Expected '{name}' with (heads, queries, keys) = {sides} (got {theirs}). "
            f"Build it over the tokens of this {whose}."
        )
    if not graph.same_offsets(query_ptr, key_ptr):
        raise ValueError(
            f"Expected '{name}' over the sequences of this {whose} (got {graph}). Build it with the same 'ptr'."
        )
    if is_causal and not graph.is_causal:
        raise ValueError(
            f"Expected '{name}' to be causal, as this {whose} is (got {graph}). `graph.causal()` leaves later keys out."
        )


def limited(choice: Any, is_causal: bool, edge_filter: Callable[[AttentionGraph], Tensor] | None) -> Any:
    """A choice, or a graph, without the edges that the layer leaves out."""
    choice = choice.causal() if is_causal else choice
    if edge_filter is not None:
        choice = choice.select(edge_filter(choice.graph if isinstance(choice, Choice) else choice))
    return choice
