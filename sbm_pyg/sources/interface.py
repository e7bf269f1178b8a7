"""The interface between graph sources and attention, and a source as a PyG transform.

In: :class:`~sbm_pyg.Tokens`. Out: a :class:`Choice`: a graph, its edge probabilities and its forced edges. Not here:
the sources themselves (``patterns``, ``sampling``), attention, and the gradients of the probabilities (``estimators``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import Tokens, check_record, draw_seed, stored_ptr
from ..ops import checks
from ..ops.segments import upcast
from ..ops.values import can_read
from .last_rows import LastRows, RowRule

if TYPE_CHECKING:
    from ..ops.cpu.memberships import KeyMemberships

__all__ = ["Choice", "EdgeProbability", "GraphSource", "SourceGraph"]

MIN_PROBABILITY = 1e-9  # lower clamp of probabilities before a logarithm


def min_probability(p: Tensor) -> float:
    """Lower bound of probabilities before a logarithm, whose slope at this bound the dtype can represent."""
    return max(MIN_PROBABILITY, torch.finfo(p.dtype).tiny)


def log_probability(p: Tensor, least: float | None = None) -> Tensor:
    """Logarithm, in float32 or better, of probabilities clamped to ``least`` (None: :func:`min_probability`)."""
    return upcast(p).clamp(min=min_probability(p) if least is None else least).log()


class EdgeProbability(ABC):
    """The probability that a graph source assigns to each pair of a query and a key.

    A subclass, such as :class:`sbm_pyg.SBM`, defines :meth:`on` and :meth:`expected_density`. Estimators then train it.
    """

    @abstractmethod
    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``, differentiable.

        Args:
            graph: Any graph over the same tokens and heads; it need not be a chosen one.
        """

    def log_on(self, graph: AttentionGraph) -> Tensor:
        """Logarithm of the probability of each edge, up to a term for each query, ``[E]``, differentiable.

        By default the logarithm of :meth:`on`, which is minus infinity at probability 0. Override this method if
        another form is cheaper or more precise.
        """
        p = self.on(graph)
        return log_probability(p).masked_fill(p == 0, -torch.inf)

    @abstractmethod
    def expected_density(self) -> Tensor:
        """Mean probability over the pairs of each sequence and head, ``[B, H]``, differentiable, without a cut at 1."""

    def expected_degree(self) -> Tensor:
        """Sum of the probabilities of each query's pairs, ``[H, N]``, differentiable.

        Only the estimators ``"distill"`` and ``"imitate"`` use it.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(
            f"Expected 'probability' to have an `expected_degree` (got {type(self).__name__}, which does not define "
            "it). Define it, or use another estimator."
        )

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """``(rate [H, N, K], member [H, M, K])`` with ``p_ij = <rate_i, member_j>``, or None if p has no such form.

        Kernels use the two factors to compute probabilities together with the scores.
        """
        return None

    def check(self, graph: AttentionGraph, name: str = "graph") -> None:
        """Check that a graph is over the tokens of these probabilities.

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
    """The result of a graph source: a graph, and the probabilities it was drawn with.

    Args:
        graph: The graph.
        probability: Probabilities of the pairs, or None if the source draws nothing at random.
        forced: True for edges that exist regardless of their probability, ``[E]`` bool; None if no edge is forced. For
            a :class:`~sbm_pyg.BlockGraph`, this mask and ``probability`` refer to the edges of ``graph.blocks``.
        exploration: Number that the source added to each probability before drawing, in [0, 1].
        independent: Whether each edge was drawn with its probability, independently of the other edges of its query.
            False: the graph follows from the probabilities in another way, for example by rank.

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

    def _with(self, **fields: Any) -> Choice:
        """Copy with fields replaced; the new values are valid by construction."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **fields)
        return other

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of sequences and heads, (B, H)."""
        return self.graph.num_sequences, self.graph.heads

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise ValueError if the graph is not over the given tokens."""
        graph, sizes = self.graph, (tokens.num_queries, tokens.num_keys)
        other_size = (graph.num_queries, graph.num_keys) != sizes or graph.query_ptr.device != tokens.query_ptr.device
        if other_size or not graph.same_offsets(tokens.query_ptr, tokens.key_ptr):
            raise ValueError(
                f"Expected 'source' to return a graph over N = {sizes[0]} queries and M = {sizes[1]} keys, and over "
                f"their sequences (got {graph}). Build it with the offsets of its tokens."
            )
        if tokens.at_end and graph.is_causal:
            raise ValueError(
                "Expected 'source' to choose for the last tokens of sequences (got a causal graph, whose positions "
                "count from the first). Use `tokens.query_position` and `tokens.allowed_keys`."
            )

    @property
    def is_stored(self) -> bool:
        """False if the choice attends without stored edges, and builds :attr:`graph` only on request."""
        return True

    def stored(self) -> Choice:
        """The same choice with a stored graph."""
        return self

    @property
    def density(self) -> Tensor:
        """Density of the graph of each sequence and head, ``[B, H]``."""
        return self.graph.density

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float,
        bias: Callable[[int, int], Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Attend without stored edges, ``[H, N, C']``. None: the edges are stored, so the layer attends over them.

        Args:
            query, key, value: ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
            scale: Factor of the scores.
            dropout: Probability that a weight is dropped.
            bias: Function from the numbers of queries and keys of a sequence to score biases, ``[H, L, S]``, or None.
        """
        return None

    def expand(self, heads: int) -> Choice:
        """Repeat the choice, with its forced edges, for several heads, as :meth:`AttentionGraph.expand`."""
        graph = self.graph.expand(heads)
        if graph is self.graph:
            return self
        return self._with(graph=graph, forced=None if self.forced is None else self.forced.repeat(heads))

    def select(self, mask: Tensor) -> Choice:
        """Keep the edges of a mask ``[E]`` bool, as :meth:`AttentionGraph.select`.

        Raises:
            ValueError: The graph is a :class:`~sbm_pyg.BlockGraph`, whose token edges cannot be selected singly.
        """
        if self.graph.blocks is not self.graph:
            raise ValueError(
                f"Expected a graph of tokens to leave edges out of (got blocks of {self.graph.block_size}). "
                "Choose with block_size=1, or attend over `graph.expand_tokens()`."
            )
        forced = None if self.forced is None else self.forced[mask]
        return self._with(graph=self.graph.select(mask), forced=forced)

    def causal(self) -> Choice:
        """Remove edges from later keys, as :meth:`AttentionGraph.causal`."""
        if self.graph.is_causal:
            return self
        forced = None if self.forced is None else self.forced[~self.graph.blocks.later]
        return self._with(graph=self.graph.causal(), forced=forced)

    def force(self, pattern: AttentionGraph) -> Choice:
        """Add the edges of a pattern, regardless of their probabilities.

        Args:
            pattern: A graph over the same tokens, with the same heads or one. If the choice is over blocks: a graph of
                the same blocks, causal if the choice is.

        Raises:
            TypeError, ValueError: ``pattern`` is not such a graph.
        """
        check_graph(pattern, "pattern")
        graph, forced = self.graph.union(pattern)
        if graph.block_size != self.graph.block_size:
            raise ValueError(
                f"Expected 'pattern' over blocks of {self.graph.block_size} tokens, as causal as the choice "
                f"(got {pattern} for {self.graph}). Choose with block_size=1 to force other edges."
            )
        return self._forced_too(graph, forced)

    def _force_loops(self) -> Choice:
        """Add the edge from each token, or block, to itself, in a choice whose queries are its keys."""
        blocks, forced = self.graph.blocks._with_loops()
        return self._forced_too(self.graph.with_blocks(blocks), forced)

    def _forced_too(self, graph: AttentionGraph, forced: Tensor) -> Choice:
        """Return the choice over a graph with more edges. ``forced`` marks further edges to force."""
        if self.forced is not None:
            forced = graph.blocks.union(self.graph.blocks.select(self.forced))[1] | forced
        return self._with(graph=graph, forced=forced)


class GraphSource(torch.nn.Module, ABC):
    """Chooses the graph that an attention layer runs over. Subclasses define :meth:`forward`.

    If a batch has no query or no key, the graph has no edge, and :meth:`forward` is not called. Empty sequences in a
    batch that has tokens do reach :meth:`forward`.

    A source is a module: it may have parameters, which are trained through the probabilities of its :class:`Choice`.
    Tokens are validated when they are made, and each call checks that the returned graph is over them. So a source need
    not check shapes, offsets and seeds.

    Example:
        >>> from sbm_pyg import selectors
        >>> class Nearest(GraphSource):
        ...     def forward(self, tokens):
        ...         return Choice(selectors.top_k(tokens, 1))
        >>> Nearest()(Tokens(torch.randn(2, 10, 8))).graph.num_edges
        20
    """

    reads_vectors = True
    """False if the graph depends on offsets and seed only; :class:`~sbm_pyg.SourceGraph` then needs no features."""
    window: int | None = None
    """Each token attends to tokens at this distance or less, and so to itself, whatever the source chooses, where
    queries and keys are the same tokens. None: no edge is forced."""
    num_sinks: int = 0
    """Number of first tokens of each sequence that every token also attends to, under the condition of the window."""
    method: str = "bernoulli"
    """How edges are chosen, ``"bernoulli"``, ``"fastrg"`` or, by rank, ``"top_k"``. It decides which estimators can
    train the source."""

    def __call__(self, tokens: Tokens) -> Choice:
        """Call :meth:`forward`, and check what it returns.

        Raises:
            TypeError: ``tokens`` is not a :class:`~sbm_pyg.Tokens`, or :meth:`forward` did not return a
                :class:`Choice`.
            ValueError: The chosen graph is over other tokens.
        """
        check_record(tokens)
        if not torch.compiler.is_compiling() and 0 in (tokens.num_queries, tokens.num_keys):
            return Choice(graph_without_edges(tokens))
        choice = super().__call__(tokens)
        if not isinstance(choice, Choice):
            raise TypeError(f"Expected 'source' to return a Choice (got {type(choice).__name__}). Try `Choice(graph)`.")
        choice.check_tokens(tokens)
        return choice

    def reset_parameters(self) -> None:
        """Reset the parameters of all child modules, with random numbers of torch's default generator."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()

    @abstractmethod
    def forward(self, tokens: Tokens) -> Choice:
        """Choose a graph over the tokens."""

    def _row_rule(self, query: Tensor, key: Tensor) -> RowRule | None:
        """The rule by which new tokens choose keys from scores, without a graph of the batch; or None.

        Args:
            query: ``[B, H, L, C]``, the last tokens of each sequence.
            key: Keys of all tokens, of groups of heads, ``[B, G, S, C]``.
        """
        return None

    def _draw_last_rows(
        self, query: Tensor, key: Tensor, last: LastRows, kept: KeyMemberships | None, seed: int
    ) -> tuple[Tensor, Tensor, KeyMemberships] | None:
        """Rows of new tokens from memberships of keys that are kept from call to call, or None.

        Args:
            query, key: As for :meth:`_row_rule`.
            last: Positions of the new tokens.
            kept: Return value of the last call for the next one, if the cache still holds its keys.
            seed: Seed of the draws.

        Returns:
            Compressed rows in the order of sequences, heads and tokens, ``[B*H*L+1]`` and ``[E]``, and what to keep.
        """
        return None


def graph_without_edges(tokens: Any) -> AttentionGraph:
    """The graph without edges over tokens, or over the tokens of an :class:`~sbm_pyg.SBM`."""
    rowptr = tokens.query_ptr.new_zeros(tokens.heads * tokens.num_queries + 1)
    sizes = (tokens.num_queries, tokens.num_keys, tokens.heads, tokens.query_ptr, tokens.key_ptr)
    return AttentionGraph._trusted(
        rowptr, rowptr.new_empty(0), *sizes, getattr(tokens, "has_causal_graph", tokens.is_causal)
    )


@functional_transform("source_graph")
class SourceGraph(BaseTransform):
    """Replaces the edges of PyG ``Data`` by those that a source chooses over its nodes, without gradients.

    Its functional name is ``source_graph``. Each node is a query and a key at once, with the features ``x``. A source
    that does not read them, such as :class:`~sbm_pyg.sources.patterns.PatternSource`, takes data without ``x``. The
    sequences are those of ``ptr``, else of ``batch``, else all nodes are one sequence. With several heads,
    ``edge_type`` holds the head of each edge. Edges come sequence by sequence, so a ``Batch`` still separates by
    ``to_data_list()``.

    Args:
        source: Any source, used in the mode it is in: in evaluation mode it adds no exploration.
        heads: Heads H. The features ``[N, H*C]`` are divided among them; a graph of one head is repeated for all heads.
            Give a source that draws a pattern, such as ``PatternSource(random, ...)``, the same ``heads``, so that each
            head draws its own.
        is_causal: No node attends to a later one.
        seed: Integer of 64 bits that fixes random choices. None: each call draws one from torch's default generator.

    Raises:
        TypeError: ``source`` is not a source, or an argument or the data has the wrong type.
        ValueError: An argument is out of range, or the data lack nodes, or features ``[N, H*C]`` that the source reads.

    Example:
        >>> from sbm_pyg import patterns, selectors
        >>> source = selectors.SelectorSource(selectors.top_k, k=2)
        >>> SourceGraph(source)(Data(x=torch.randn(5, 3))).edge_index.shape
        torch.Size([2, 10])
        >>> SourceGraph(patterns.PatternSource(patterns.window, size=1), heads=2)(Data(num_nodes=3))
        Data(num_nodes=3, edge_index=[2, 14], edge_type=[14])
    """

    def __init__(
        self, source: GraphSource, *, heads: int = 1, is_causal: bool = False, seed: int | None = None
    ) -> None:
        way_out = "Wrap a rule in `selectors.SelectorSource`, and a pattern in `patterns.PatternSource`."
        checks.kind("source", source, GraphSource, "a GraphSource", way_out)
        self.heads = checks.integer("heads", heads, 1, "Features are divided among them.")
        checks.flag("is_causal", is_causal, "It says whether later keys are left out.")
        self.source, self.is_causal, self.seed = source, is_causal, None if seed is None else checks.seed(seed)

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        """Choose the edges."""
        checks.kind("data", data, Data, "Data", "Convert it with `to_homogeneous()`.")
        query = self._features(data) if self.source.reads_vectors else self._ones(data)
        ptr = cast(Tensor, stored_ptr(data, device=query.device))
        tokens = Tokens(query, query_ptr=ptr, is_causal=self.is_causal, seed=draw_seed(self.seed))
        return self.source(tokens).expand(self.heads).graph.replace_edges(data)

    def _features(self, data: Data) -> Tensor:
        """The features of each head, ``[H, N, C]``."""
        x = data.x
        if not isinstance(x, Tensor) or x.dim() != 2 or x.size(1) % self.heads:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"Expected 'data' to have features `x` [N, H*C] for {self.heads} heads (got {got}). "
                "The source chooses by them."
            )
        return x.unflatten(1, (self.heads, -1)).transpose(0, 1)

    def _ones(self, data: Data) -> Tensor:
        """Ones in place of features that the source does not read, ``[H, N, 1]``."""
        checks.require(data.num_nodes is not None, "data", "to have nodes", data.num_nodes, "Set `x` or `num_nodes`.")
        device = next((value.device for value in data.to_dict().values() if isinstance(value, Tensor)), None)
        return torch.ones(1, 1, 1, device=device).expand(self.heads, data.num_nodes, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"


def check_probability(probability: object) -> None:
    """Raise TypeError unless the argument is an :class:`EdgeProbability`."""
    way_out = "An SBM is one; others are subclasses of `sbm_pyg.EdgeProbability`."
    checks.kind("probability", probability, EdgeProbability, "an EdgeProbability", way_out)


def check_finite(name: str, tokens: Tokens, *made: Tensor) -> None:
    """Raise ValueError if a module maps finite tokens to NaN, from which no edges can be chosen."""
    if not can_read(tokens.query) or not bool(torch.stack([x.sum() for x in made]).isnan().any()):
        return
    if all(bool(x.isfinite().all()) for x in (tokens.query, tokens.key)) and any(bool(x.isnan().any()) for x in made):
        raise ValueError(
            f"Expected '{name}' to make finite numbers of finite tokens (got NaN). Look for NaN in its parameters, "
            "then for a diverged loss."
        )


def check_over(graph: AttentionGraph, name: str, probability: EdgeProbability, tokens: Any) -> None:
    """Check that a graph has the heads, tokens and sequences of ``tokens``, which are those of the probabilities."""
    check_graph(graph, name)
    sizes, graph_sizes = ((record.heads, record.num_queries, record.num_keys) for record in (tokens, graph))
    owner = type(probability).__name__
    if sizes != graph_sizes:
        raise ValueError(
            f"Expected '{name}' with (heads, queries, keys) = {sizes} (got {graph_sizes}). "
            f"Build it over the tokens of this {owner}."
        )
    checks.same_device(owner, tokens.query_ptr, **{name: graph.query_ptr})
    if not graph.same_offsets(tokens.query_ptr, tokens.key_ptr):
        raise ValueError(
            f"Expected '{name}' over the sequences of this {owner} (got {graph}). Build it with this 'ptr'."
        )
    if getattr(tokens, "has_causal_graph", tokens.is_causal) and not graph.is_causal:
        raise ValueError(f"Expected '{name}' to be causal, as this {owner} is (got {graph}). Take `graph.causal()`.")


def drop_forbidden_edges(choice: Any, is_causal: bool, edge_filter: Callable[[AttentionGraph], Tensor] | None) -> Any:
    """Remove the edges of a choice, or of a graph, that the options of a layer forbid."""
    choice = choice.causal() if is_causal else choice
    if edge_filter is not None:
        choice = choice.select(edge_filter(choice.graph if isinstance(choice, Choice) else choice))
    return choice
