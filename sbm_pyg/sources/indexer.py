r"""Sources that select keys by small learned scores of all pairs, by rank or by sampling.

In: :class:`~sbm_pyg.Tokens`. Out: a :class:`~sbm_pyg.Choice` with a graph that follows the scores, and probabilities
through which an estimator trains them. Not here: the estimators, and rules without parameters (``selectors``).

======================  ================  ==================================================================
graph                   estimator         what it is
======================  ================  ==================================================================
``select="top_k"``      ``"imitate"``     the indexer of DeepSeek-V3.2: a divergence from the attention
``select="top_k"``      ``"none"``        the same, without training
``select="bernoulli"``  ``"local"``       a Bernoulli draw for each pair; the task loss trains the probability
``select="bernoulli"``  ``"distill"``     the same draws; dense attention on some rows trains them, too
======================  ================  ==================================================================

All pairs are scored, tile by tile, in O(H N M S D) time with S small heads of D channels. Only attention is linear in
the number of edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import ops
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, check_record, draw_seed, resolve_sequence_ids
from ..ops import checks
from ..ops.reference import sampling as reference_sampling
from ..ops.reference.pairs import index_scores, small_heads
from ..ops.segments import upcast
from ..ops.tiles import PairTile, pair_tiles
from ..ops.values import require_values
from . import patterns, starts
from .candidates import CandidateProbability, Candidates
from .interface import Choice, EdgeProbability, check_finite, check_over
from .last_rows import RowRule, scores_of_groups
from .learned import LearnedSource
from .pairs import check_vectors, graph_of_best, graph_of_rows, number_of_keys, select_pairs, show_nan
from .sbm import log_odds

__all__ = ["IndexProbability", "Indexer", "IndexerSource", "KeyScorer"]

SELECT = ("bernoulli", "top_k")
IndexParts = tuple[Tensor, Tensor, Tensor]
"""Small queries ``[H, N, S, D]``, their weights ``[H, N, S]``, and small keys ``[H, M, D]``, which score pairs."""


def _uniform(parameters: list[nn.Parameter], channels: int) -> None:
    for parameter in parameters:
        nn.init.uniform_(parameter, -(channels**-0.5), channels**-0.5)


class Indexer(nn.Module):
    r"""Scores pairs of queries and keys with a few small heads: the lightning indexer of DeepSeek-V3.2.

    .. math:: I_{ij} = \sum_{s=1}^{S} w_s(q_i) \, \mathrm{ReLU}(\langle A_s q_i, B k_j \rangle)

    The weights are linear in the query, and all small heads share one projection B of the keys. Each attention head has
    its own indexer.

    Args:
        channels: Channels of a head of the attention C.
        heads: Number of heads of the attention H.
        index_heads: Small heads S.
        index_channels: Channels of a small head D.

    Raises:
        TypeError, ValueError: A size is not an int or below 1.

    Shapes:
        - queries ``[H, N, C]`` and keys ``[H, M, C]``;
        - output ``[H, N, S, D]``, ``[H, N, S]`` and ``[H, M, D]``, which an :class:`IndexProbability` takes.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, where all heads share one indexer of the token representations.
    """

    head_dims: ClassVar[dict[str, int]] = {"query_weight": 0, "key_weight": 0, "head_weight": 0, "head_bias": 0}

    def __init__(self, channels: int, heads: int = 1, index_heads: int = 2, index_channels: int = 8) -> None:
        super().__init__()
        sizes = {"channels": channels, "heads": heads, "index_heads": index_heads, "index_channels": index_channels}
        for name, size in sizes.items():
            checks.integer(name, size, 1, "It is a size of the indexer.")
        self.channels, self.heads, self.index_heads, self.index_channels = sizes.values()
        checks.parameters(sizes, heads * (channels + 1) * index_heads * (index_channels + 1))
        self.query_weight = nn.Parameter(torch.empty(heads, channels, index_heads * index_channels))
        self.key_weight = nn.Parameter(torch.empty(heads, channels, index_channels))
        self.head_weight = nn.Parameter(torch.empty(heads, channels, index_heads))
        self.head_bias = nn.Parameter(torch.empty(heads, 1, index_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters as :class:`torch.nn.Linear` does."""
        _uniform([self.query_weight, self.key_weight, self.head_weight, self.head_bias], self.channels)

    def forward(self, query: Tensor, key: Tensor) -> IndexParts:
        """Project queries and keys."""
        check_vectors(query, key, self.heads, self.channels)
        size = (self.index_heads, self.index_channels)
        small = (query @ self.query_weight.to(query.dtype)).unflatten(2, size) * size[1] ** -0.5
        weight = query @ self.head_weight.to(query.dtype) + self.head_bias.to(query.dtype)
        return small, weight, key @ self.key_weight.to(key.dtype)

    @torch.no_grad()
    def start_from(self, query: Tensor, key: Tensor, *, scale: float) -> None:
        r"""Initialize the parameters from a trained layer: the D main directions of its scores replace random values.

        Two small heads of opposite signs make scores that are linear, :math:`\mathrm{ReLU}(u) - \mathrm{ReLU}(-u) = u`,
        which approximate ``scale`` times the scores of the layer best in the mean square. With one small head, only
        positive scores are approximated. Further small heads start with a weight of 0.

        Args:
            query, key: Queries ``[H, N, C]`` and keys ``[H, M, C]``.
            scale: Factor of the scores.
        """
        rank = min(self.index_channels, self.channels)
        of_query, of_key = starts.low_rank_scores(query.float(), key.float(), rank)
        of_query = of_query * scale * self.index_channels**0.5
        self.reset_parameters()
        weight = self.query_weight.view(self.heads, self.channels, self.index_heads, self.index_channels)
        for small, sign in enumerate((1, -1)[: self.index_heads]):
            weight[:, :, small, :rank] = sign * of_query
            weight[:, :, small, rank:] = 0
        self.key_weight[..., :rank] = of_key
        self.head_weight.zero_()
        self.head_bias.zero_()
        self.head_bias[..., 0] = 1
        self.head_bias[..., 1:2] = -1

    def _score_rows(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores of a few queries ``[B, H, L, C]`` with keys of groups of heads ``[B, G, S, C]``, ``[B, H, L, S]``.

        The projection of the keys is applied to the queries instead, so that keys are read without being projected.
        """
        rows = query.transpose(0, 1).flatten(1, 2)  # [H, B*L, C]
        small, weight, _ = self(rows, rows[:, :0])
        sizes = (self.heads, query.size(0), query.size(2), self.index_heads)
        small = (small.flatten(1, 2) @ self.key_weight.to(small.dtype).mT).view(*sizes, -1)
        small = small.permute(1, 0, 2, 3, 4).flatten(2, 3)  # [B, H, L*S, C]
        scores = scores_of_groups(small, key).relu_().unflatten(2, sizes[2:])
        weight = upcast(weight.view(sizes).transpose(0, 1))
        return (weight[..., None, :] @ scores).squeeze(3)

    def extra_repr(self) -> str:
        small = f"index_heads={self.index_heads}, index_channels={self.index_channels}"
        return f"{self.channels}, heads={self.heads}, {small}"


class KeyScorer(nn.Module):
    r"""Scores keys with a perceptron, independently of the query: :math:`I_{ij} = b^\top \mathrm{ReLU}(A k_j + a)`.

    All queries then rank the keys in the same order; in a causal graph each query ranks the keys up to its position.

    Args:
        channels: Channels of a head of the attention C.
        heads: Number of heads H; each has its own perceptron.
        hidden: Width of the perceptron.

    Raises:
        TypeError, ValueError: A size is not an int or below 1.

    Shapes:
        - the same as for :class:`Indexer`, with two small heads of one channel, so that scores can have either sign.

    Reference: the key selection of "HAX", NeurIPS 2025, which ranks keys by such a score.
    """

    head_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, "out_weight": 0}

    def __init__(self, channels: int, heads: int = 1, hidden: int = 32) -> None:
        super().__init__()
        sizes = {"channels": channels, "heads": heads, "hidden": hidden}
        for name, size in sizes.items():
            checks.integer(name, size, 1, "It is a size of the perceptron.")
        checks.parameters(sizes, heads * hidden * (channels + 2))
        self.channels, self.heads, self.hidden = channels, heads, hidden
        self.weight = nn.Parameter(torch.empty(heads, channels, hidden))
        self.bias = nn.Parameter(torch.empty(heads, 1, hidden))
        self.out_weight = nn.Parameter(torch.empty(heads, hidden, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters as :class:`torch.nn.Linear` does."""
        _uniform([self.weight, self.bias], self.channels)
        _uniform([self.out_weight], self.hidden)

    def forward(self, query: Tensor, key: Tensor) -> IndexParts:
        """Score the keys."""
        check_vectors(query, key, self.heads, self.channels)
        hidden = torch.relu(key @ self.weight.to(key.dtype) + self.bias.to(key.dtype))
        sign = query.new_tensor([1.0, -1.0]).expand(*query.shape[:2], 2)  # ReLU(u) - ReLU(-u) = u
        return sign[..., None], sign, hidden @ self.out_weight.to(key.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}, hidden={self.hidden}"


class IndexProbability(EdgeProbability):
    r"""Edge probabilities from small scores :math:`I_{ij}`.

    With degrees :math:`d_i`, the keys of a query compete, and pairs with p above 1 are certain edges:

    .. math:: p_{ij} = d_i \, \frac{\exp I_{ij}}{\sum_{j'} \exp I_{ij'}} .

    The sum runs over all keys that the query may attend to. Without degrees, pairs are independent of each other,
    :math:`p_{ij} = \sigma(I_{ij} + b)`.

    Args:
        tokens: The tokens of the scores; only their number, offsets and causality are used.
        query: Small queries, ``[H, N, S, D]``.
        weight: Weights of the small heads, ``[H, N, S]``.
        key: Small keys, ``[H, M, D]``.
        degree: Expected number of keys of each query, ``[N]`` or ``[H, N]``, positive. None: pairs do not compete.
        bias: The b of each head, ``[H]``, or None for 0. It has no effect with degrees.

    Raises:
        TypeError, ValueError: An argument has the wrong type or shape.

    Example:
        >>> tokens = Tokens(torch.randn(1, 5, 8))
        >>> probability = IndexProbability(tokens, *Indexer(8)(tokens.query, tokens.key))
        >>> probability.sample(seed=0).num_edges <= 25, probability.top_k(2).num_edges
        (True, 10)
    """

    def __init__(
        self,
        tokens: Tokens,
        query: Tensor,
        weight: Tensor,
        key: Tensor,
        *,
        degree: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        check_record(tokens)
        checks.tensors(query=query, weight=weight, key=key)
        checks.floating(query=query, weight=weight, key=key)
        checks.same_device("query", query, weight=weight, key=key, tokens=tokens.query_ptr)
        heads, count = tokens.heads, tokens.num_queries
        checks.shape("query", query, (heads, count, None, None), "[H, N, S, D]", "An Indexer makes it.")
        small, channels = query.shape[2:]
        checks.shape("weight", weight, (heads, count, small), "[H, N, S]", "It weighs the small heads.")
        key_sizes = (heads, tokens.num_keys, channels)
        checks.shape("key", key, key_sizes, "[H, M, D]", "It has the channels of a small head.")
        require_values(query, "query")
        way_out = "They score."
        checks.require(min(small, channels) >= 1, "query", "of at least one head and channel", query.shape, way_out)
        is_shared = not isinstance(degree, Tensor) or degree.dim() == 1
        of_degree = ((count,), "[N]") if is_shared else ((heads, count), "[H, N]")
        for name, x, shape, words in (("degree", degree, *of_degree), ("bias", bias, (heads,), "[H]")):
            if x is not None:
                checks.tensors(**{name: x})
                checks.floating(**{name: x})
                checks.shape(name, x, shape, words, "It is one number of each.")
        wide = torch.promote_types(query.dtype, torch.float32)
        self.query, self.weight, self.key = (x.to(wide) for x in (query, weight, key))
        self.degree, self.bias = None if degree is None else degree.expand(heads, -1), bias
        packed = torch.cat([self.query.flatten(2), self.weight], 2)
        self.tokens = tokens.with_vectors(packed, self.key)
        self._known: dict[RowReduction, Tensor] = {}
        self._traced: dict[RowReduction, Tensor] = {}

    def __repr__(self) -> str:
        sizes = f"{self.tokens.heads} heads, {self.tokens.num_queries} queries, {self.tokens.num_keys} keys"
        return f"{type(self).__name__}({sizes}, {'independent' if self.degree is None else 'competing'})"

    def score(self, graph: AttentionGraph) -> Tensor:
        """Scores of the edges of a graph, ``[E]``, differentiable. Cost O(E S D).

        Args:
            graph: A graph over these tokens and heads.

        Raises:
            TypeError, ValueError: It is not.
        """
        self.check(graph)
        return ops.schemas.index_score(self.query, self.weight, self.key, graph.rowptr, graph.col)

    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``, differentiable.

        Cost O(E S D), plus O(H N M S D) once for the sums if there are degrees.
        """
        score = self.score(graph)
        if self.degree is None:
            return torch.sigmoid(score if self.bias is None else score + self.bias[graph.edge_head])
        degree = self.degree.to(score.dtype).flatten()
        return degree[graph.edge_row] * (score - self.log_total.flatten()[graph.edge_row]).exp()

    def log_on(self, graph: AttentionGraph) -> Tensor:
        """As :meth:`EdgeProbability.log_on`. With degrees this returns the scores, which need no sum over all keys."""
        return self.score(graph) if self.degree is not None else super().log_on(graph)

    @property
    def log_total(self) -> Tensor:
        """Logarithm of the sum of all exponentials of a query, ``[H, N]``, differentiable."""
        return self._reduce_rows(_LOG_SUM_EXP)

    def expected_degree(self) -> Tensor:
        """Sum of the probabilities of each query's pairs, ``[H, N]``, differentiable, without a cut at 1."""
        if self.degree is not None:
            return self.degree.to(self.query.dtype)
        return self._reduce_rows(_PROBABILITY_SUM)

    def expected_density(self) -> Tensor:
        """Mean probability over the pairs of each sequence and head, ``[B, H]``, without a cut at 1."""
        tokens, degree = self.tokens, self.expected_degree()
        edges = degree.new_zeros(tokens.query_ptr.numel() - 1, tokens.heads)
        edges = edges.index_add(0, tokens.query_sequence, degree.T)
        pairs = torch.zeros_like(tokens.query_ptr[1:]).index_add(0, tokens.query_sequence, tokens.allowed_keys)
        return edges / pairs.clamp(min=1)[:, None]

    def check(self, graph: AttentionGraph, name: str = "graph") -> None:
        """Check that a graph is over these tokens, heads and sequences.

        Raises:
            TypeError, ValueError: It is not.
        """
        check_over(graph, name, self, self.tokens)

    @torch.no_grad()
    def top_k(self, k: int | Tensor) -> AttentionGraph:
        """Each query attends to the keys of its k largest scores; the lower key wins a tie.

        Args:
            k: Keys of each query, at least 1; one number, ``[N]`` or ``[H, N]`` int64.

        Raises:
            TypeError, ValueError: ``k`` has the wrong type, shape or range, or memory does not hold the edges.
        """
        return graph_of_best(self.tokens, k, self.query, self.weight, self.key)

    @torch.no_grad()
    def sample(
        self, *, exploration: float = 0.0, seed: int | None = None, sequence_ids: Tensor | None = None
    ) -> AttentionGraph:
        """Make each pair an edge by an independent Bernoulli draw with its probability.

        The random word of a pair depends on the seed, the number of its sequence, and the head, query and key within
        it. So a sequence has the same graph in any batch, up to rounding in torch's matrix products.

        Args:
            exploration: Added to each probability, in [0, 1].
            seed: Integer of 64 bits. None: drawn from torch's default generator.
            sequence_ids: As :func:`~sbm_pyg.sample_edges`.

        Raises:
            TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.
        """
        checks.number("exploration", exploration, "[0, 1]", "It is added to every probability.")
        tokens, seed = self.tokens, draw_seed(seed)
        ids = resolve_sequence_ids(sequence_ids, tokens.query_ptr.numel() - 1, tokens.query_ptr.device)
        ids = ids[tokens.query_sequence]
        head = torch.arange(tokens.heads, device=ids.device)[:, None, None]

        totals = []

        def toss(scores: Tensor, possible: Tensor, tile: PairTile) -> Tensor:
            query = tile.query
            if self.degree is None:
                p = _probability(scores, self.bias)
            else:
                total = scores.logsumexp(3, keepdim=True)
                totals.append((tile, total[..., 0]))
                p = scores.sub_(total).exp_().mul_(self.degree.to(scores.dtype)[:, query][..., None]).nan_to_num_(0.0)
            threshold = p.add_(exploration).clamp_(max=1).mul_(possible).mul_(2.0**32)
            position = tokens.query_position[query]
            return reference_sampling.bernoulli_draws(threshold.long(), position, ids[query], head, seed)

        small = self.query.size(2)
        graph = graph_of_rows(tokens, *select_pairs(tokens, toss, lambda query, key: index_scores(query, key, small)))
        if totals:
            self._known[_LOG_SUM_EXP] = _in_order(totals)
        return graph

    def _reduce_rows(self, rule: RowReduction) -> Tensor:
        """Reduce the scores of all pairs of a query to one value, ``[H, N]``, differentiable."""
        if rule not in self._known:
            with torch.no_grad():
                parts = []
                for tile in _tiles(self.tokens):
                    scores, _ = _tile_scores(self.tokens, tile, self.query.size(2))
                    parts.append((tile, rule.value(scores, self.bias)))
                self._known[rule] = _in_order(parts)
        if not torch.is_grad_enabled():
            return self._known[rule]
        if rule not in self._traced:  # one backward pass over all pairs, for any number of uses
            inputs = (self.tokens.query, self.tokens.key, self.bias)
            self._traced[rule] = _Reduced.apply(*inputs, self._known[rule], self.tokens, self.query.size(2), rule)
        return self._traced[rule]


def _tiles(tokens: Tokens) -> Iterator[PairTile]:
    return pair_tiles(tokens.heads, tokens.query_ptr, tokens.key_ptr, tokens.allowed_keys)


def _tile_scores(tokens: Tokens, tile: PairTile, small: int) -> tuple[Tensor, Tensor]:
    """Scores of the pairs of a tile, and the mask of allowed pairs. Forbidden pairs get the lowest finite score."""
    scores = index_scores(tokens.query[:, tile.query], tokens.key[:, tile.key.clamp(min=0)], small)
    possible = tile.possible & ~scores.isnan()
    return scores.masked_fill_(~possible, torch.finfo(scores.dtype).min), possible


class RowReduction(NamedTuple):
    """A reduction of rows of scores ``[H, b, r, L]``, given a bias per head, and its derivative in each score."""

    value: Callable[[Tensor, Tensor | None], Tensor]
    slope: Callable[[Tensor, Tensor | None, Tensor], Tensor]


def _probability(scores: Tensor, bias: Tensor | None) -> Tensor:
    return torch.sigmoid(scores if bias is None else scores + bias[:, None, None, None])


def _probability_slope(scores: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
    p = _probability(scores, bias)
    return p * (1 - p)


_LOG_SUM_EXP = RowReduction(
    lambda scores, bias: scores.logsumexp(3), lambda scores, bias, value: (scores - value).exp_()
)
_PROBABILITY_SUM = RowReduction(lambda scores, bias: _probability(scores, bias).sum(3), _probability_slope)


def _in_order(parts: list[tuple[PairTile, Tensor]]) -> Tensor:
    """Gather row values of tiles, ``[H, b, r]``, in the order of the queries, ``[H, N]``."""
    token = torch.cat([tile.query[tile.valid] for tile, _ in parts])
    return torch.cat([value[:, tile.valid] for tile, value in parts], 1)[:, token.argsort()]


class _Reduced(torch.autograd.Function):
    """Attaches a backward pass to the reduced rows; it recomputes the scores of all pairs tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, key: Tensor, bias: Any, value: Tensor, tokens: Tokens, small: int, rule: RowReduction
    ) -> Tensor:
        ctx.save_for_backward(packed, key, bias, value, tokens.query_ptr, tokens.key_ptr)
        ctx.tokens, ctx.small, ctx.rule = tokens, small, rule
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, key, bias, value, *_ = ctx.saved_tensors  # saved offsets raise an error if they were modified
        tokens, grad_packed, grad_key = ctx.tokens, torch.zeros_like(packed), torch.zeros_like(key)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for tile in _tiles(tokens):
            scores, possible = _tile_scores(tokens, tile, ctx.small)
            slope = ctx.rule.slope(scores, bias, value[:, tile.query, None]).mul_(grad[:, tile.query, None])
            slope.masked_fill_(~possible, 0)
            if grad_bias is not None and ctx.rule is _PROBABILITY_SUM:
                grad_bias += slope.sum((1, 2, 3))
            keys = key[:, tile.key.clamp(min=0)]
            dot, other = scores, torch.empty_like(scores)
            to_keys, to_queries, to_weights = torch.zeros_like(keys), [], []
            for query, weight in small_heads(packed[:, tile.query], ctx.small):
                torch.relu_(torch.matmul(query, keys.mT, out=dot))
                to_weights.append(torch.mul(slope, dot, out=other).sum(3, keepdim=True))
                torch.mul(slope, weight, out=other)
                to_dot = torch.ops.aten.threshold_backward.grad_input(other, dot, 0, grad_input=other)
                to_queries.append(to_dot @ keys)
                to_keys += to_dot.mT @ query
            grad_packed.index_add_(1, tile.query.flatten(), torch.cat(to_queries + to_weights, 3).flatten(1, 2))
            grad_key.index_add_(1, tile.key.clamp(min=0).flatten(), to_keys.flatten(1, 2))
        return grad_packed, grad_key, grad_bias, None, None, None, None


class IndexerSource(LearnedSource):
    """Selects edges by small learned scores: by rank or by Bernoulli draws.

    Args:
        scorer: An :class:`Indexer`, a :class:`KeyScorer`, or a module like them.
        select: ``"top_k"``: each query attends to the keys of its largest scores. The scores get no gradient of the
            task loss; the estimator ``"imitate"``, the default of the layer, trains them. ``"bernoulli"``: each pair is
            an edge with its probability, see :class:`IndexProbability`, and the task loss trains the scores. A training
            step then takes some 15 times as long.
        k: Keys of each query with ``"top_k"``, at least 1; with a target density, the least number of keys. None: 1.
        target_density: Density that the keys of each query compete for, in (0, 1]; 1 is dense attention. A
            :class:`~sbm_pyg.Sparsifier` sets it. None: with ``"top_k"`` 1, or ``k`` keys if there is a ``k``; with
            ``"bernoulli"`` pairs do not compete.
        initial_density: Probability of an edge before training if pairs do not compete, in (0, 1). It sets a learned
            bias of each head.
        exploration: Added to each probability with ``"bernoulli"``, in training only, in [0, 1]. None: the square of
            the target density, or 0 without one.
        detach: Stop gradients from the scores to queries and keys, as in DeepSeek-V3.2.
        window: Each token also attends to tokens at this distance or less, and so to itself, where queries and keys are
            the same tokens. None: no window. Its edges come on top of the target density.
        num_sinks: Each token also attends to so many first tokens of its sequence, under the same condition.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or ``"bernoulli"`` has a ``k``.

    Example:
        >>> from sbm_pyg import AttentionConv
        >>> conv = AttentionConv(16, 8, heads=2, source=IndexerSource(Indexer(8, heads=2), target_density=0.25))
        >>> out, choice = conv(torch.randn(20, 16), seed=0, return_choice=True)
        >>> out.shape, choice.graph
        (torch.Size([20, 16]), AttentionGraph(1 sequence, 2 heads, 20 queries, 20 keys, 200 edges, density 25.0%))

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for the scores and for ``"top_k"`` with ``"imitate"``.
    Bernoulli draws trained with the task loss are our own.
    """

    head_dims: ClassVar[dict[str, int]] = {"bias": 0}
    has_head_budgets = True

    def __init__(
        self,
        scorer: nn.Module,
        *,
        select: str = "top_k",
        k: int | None = None,
        target_density: float | None = None,
        initial_density: float = 0.5,
        exploration: float | None = None,
        detach: bool = False,
        window: int | None = None,
        num_sinks: int = 0,
    ) -> None:
        super().__init__()
        checks.kind("scorer", scorer, nn.Module, "a module such as Indexer", "Make one.")
        checks.one_of("select", select, SELECT)
        if k is not None:
            k = checks.integer("k", k, 1, "It is the number of keys of each query.")
        what = "with select='top_k' alone"
        way_out = "Bernoulli draws have no fixed number of keys; set 'target_density'."
        checks.require(select == "top_k" or k is None, "k", what, f"k={k}, select={select!r}", way_out)
        checks.number("initial_density", initial_density, "(0, 1)", "It is the probability of an edge before training.")
        if exploration is not None:
            checks.number("exploration", exploration, "[0, 1]", "It is added to every probability in training.")
        checks.flag("detach", detach, "It says whether scores send no gradient to queries and keys.")
        self.scorer, self.select, self.k, self.exploration = scorer, select, k, exploration
        self.method = select
        self.target_density = 1.0 if self._needs_density and target_density is None else target_density
        self.initial_density, self.detach = initial_density, detach
        self.window, self.num_sinks = patterns.check_window(window), patterns.check_sinks(num_sinks)
        independent = select == "bernoulli" and target_density is None
        self.bias = nn.Parameter(torch.empty(getattr(scorer, "heads", 1))) if independent else None
        self._reset_bias()

    @property
    def _needs_density(self) -> bool:
        return self.select == "top_k" and self.k is None

    def _reset_bias(self) -> None:
        if self.bias is not None:
            nn.init.constant_(self.bias, log_odds(self.initial_density))

    def reset_parameters(self) -> None:
        """Reset the parameters of the scorer, and the bias to its initial value."""
        super().reset_parameters()
        self._reset_bias()

    def start_from(self, query: Tensor, key: Tensor, *, scale: float, seed: int = 0) -> None:
        """Initialize the scorer from a trained layer, if it has a method ``start_from`` as :class:`Indexer` does."""
        start: Any = getattr(self.scorer, "start_from", None)
        if start is not None:
            start(query, key, scale=scale)

    def predict(self, tokens: Tokens) -> IndexProbability:
        """The probabilities of all pairs, with the target density if it is set."""
        count = self._count(tokens)
        degree = None if count is None else count.to(torch.promote_types(tokens.query.dtype, torch.float32))
        query, weight, key = self.scorer(tokens.query, tokens.key)
        if degree is not None and self.bias is not None:  # DistributedDataParallel waits for its gradient, which is 0
            weight = weight + 0 * self.bias[:, None, None]
        return IndexProbability(tokens, query, weight, key, degree=degree, bias=self.bias)

    def _count(self, tokens: Tokens) -> Tensor | None:
        """Number of keys of each query, ``[N]`` or ``[H, N]``, or None."""
        density, allowed = self._densities(tokens.query.device), tokens.allowed_keys
        if density is not None:
            return torch.minimum((density * allowed).clamp(min=self.k or 1), allowed.clamp(min=1))
        return None if self.k is None else allowed.clamp(max=self.k)

    def choose(self, tokens: Tokens) -> Choice:
        """Choose by rank, or by Bernoulli draws."""
        probability = self.predict(tokens)
        check_finite("scorer", tokens, probability.query, probability.weight, probability.key)
        if self.select == "top_k":
            count = number_of_keys(self.k, self._densities(tokens.query.device), tokens.allowed_keys)
            choice = Choice(probability.top_k(count), probability, independent=False)
        else:
            exploration = self._exploration
            graph = probability.sample(exploration=exploration, seed=tokens.seed, sequence_ids=tokens.sequence_ids)
            choice = Choice(show_nan(tokens, graph), probability, exploration=exploration)
        return patterns.with_forced(choice, self.window, self.num_sinks, tokens)

    @torch.no_grad()
    def _row_rule(self, query: Tensor, key: Tensor) -> RowRule | None:
        scorer = self.scorer
        is_own = type(self) is IndexerSource and type(scorer) is Indexer
        if not is_own or self.select != "top_k" or self.target_density == 1:
            return None
        assert isinstance(scorer, Indexer)
        return RowRule(
            scorer._score_rows(query, key), self.k, self._densities(query.device), self.window, self.num_sinks
        )

    def _select_among(self, probability: CandidateProbability, candidates: Candidates, tokens: Tokens) -> Choice:
        if self.select == "bernoulli":
            return super()._select_among(probability, candidates, tokens)
        graph = candidates.graph
        count = number_of_keys(self.k, self.target_density, graph.degree[0])
        count = torch.as_tensor(count, device=graph.device).expand(graph.num_queries)
        rowptr, edge = ops.schemas.segment_top_k(probability.on_candidates.detach(), graph.rowptr, count)
        return Choice(graph._with(rowptr, graph.col[edge], 1), probability, independent=False)

    def extra_repr(self) -> str:
        names = ("k", "target_density", "exploration", "window", *["num_sinks"] * bool(self.num_sinks))
        options = (f"{n}={v}" for n in names if (v := getattr(self, n)) is not None)
        return ", ".join([f"select={self.select!r}", *options])
