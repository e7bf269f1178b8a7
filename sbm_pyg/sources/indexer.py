r"""Choosers that learn which keys a query needs: small scores of all pairs, sampled or ranked.

In: :class:`~sbm_pyg.Tokens`. Out: a :class:`~sbm_pyg.Choice`, whose graph follows the scores and whose
probabilities let an estimator train them. Not here: the estimators, and rules without parameters (``selectors``).

=====================  ================  ===================================================================
graph                  estimator         what it is
=====================  ================  ===================================================================
``select="coins"``     ``"local"``       each pair is a coin, and the loss of the task trains its probability
``select="coins"``     ``"distill"``     the same, and the attention over the graph teaches it
``select="top_k"``     ``"imitate"``     the indexer of DeepSeek-V3.2: a divergence from the attention
``select="top_k"``     ``"none"``        a frozen one
=====================  ================  ===================================================================

Scores look at all pairs, some rows at a time: O(H N M S D) with S small heads of D channels, and no array of N x M.
What grows with the number of edges alone is the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import ops
from ..graph import AttentionGraph
from ..ops import checks
from ..ops.reference import sampling as reference_sampling
from ..ops.values import require_values
from ..ragged import Tokens, check_record, count_pairs, draw_seed, resolve_sequence_ids
from . import patterns
from .interface import Choice, EdgeProbability, SharingSource, check_over
from .pairs import Part, graph_of_rows, largest, parts, share_of, streamed

__all__ = ["IndexProbability", "Indexer", "IndexerSource", "KeyScorer"]

SELECT = ("coins", "top_k")
IndexParts = tuple[Tensor, Tensor, Tensor]
"""What scores pairs: queries ``[H, N, S, D]``, their weights ``[H, N, S]`` and keys ``[H, M, D]``."""


def _uniform(parameters: list[nn.Parameter], channels: int) -> None:
    for parameter in parameters:
        nn.init.uniform_(parameter, -(channels**-0.5), channels**-0.5)


class Indexer(nn.Module):
    r"""Scores pairs of queries and keys by a few small heads, the lightning indexer of DeepSeek-V3.2.

    .. math:: I_{ij} = \sum_{s=1}^{S} w_s(q_i) \, \mathrm{ReLU}(\langle A_s q_i, B k_j \rangle)

    with weights linear in the query, and one projection B of the keys for all small heads. Each head of the attention
    has an indexer of its own.

    Args:
        channels: Channels of a head of the attention C.
        heads: Number of heads of the attention H.
        index_heads: Small heads S.
        index_channels: Channels of a small head D.

    Raises:
        TypeError, ValueError: A size is no int or below 1.

    Shapes:
        - queries ``[H, N, C]`` and keys ``[H, M, C]``;
        - output ``[H, N, S, D]``, ``[H, N, S]`` and ``[H, M, D]``, which an :class:`IndexProbability` takes.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025. There the indexer reads the tokens, and all heads share it.
    """

    def __init__(self, channels: int, heads: int = 1, index_heads: int = 4, index_channels: int = 16) -> None:
        super().__init__()
        given = {"channels": channels, "heads": heads, "index_heads": index_heads, "index_channels": index_channels}
        for name, size in given.items():
            checks.integer(name, size, 1, "It is a size of the indexer.")
        self.channels, self.heads, self.index_heads, self.index_channels = given.values()
        self.query_weight = nn.Parameter(torch.empty(heads, channels, index_heads * index_channels))
        self.key_weight = nn.Parameter(torch.empty(heads, channels, index_channels))
        self.head_weight = nn.Parameter(torch.empty(heads, channels, index_heads))
        self.head_bias = nn.Parameter(torch.empty(heads, 1, index_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as those of :class:`torch.nn.Linear`."""
        _uniform([self.query_weight, self.key_weight, self.head_weight, self.head_bias], self.channels)

    def forward(self, query: Tensor, key: Tensor) -> IndexParts:
        """Project both sides."""
        _check_sides(query, key, self.heads, self.channels)
        size = (self.index_heads, self.index_channels)
        small = (query @ self.query_weight.to(query.dtype)).unflatten(2, size) * size[1] ** -0.5
        weight = query @ self.head_weight.to(query.dtype) + self.head_bias.to(query.dtype)
        return small, weight, key @ self.key_weight.to(key.dtype)

    def extra_repr(self) -> str:
        """Its sizes."""
        return (
            f"{self.channels}, heads={self.heads}, index_heads={self.index_heads}, index_channels={self.index_channels}"
        )


class KeyScorer(nn.Module):
    r"""Scores keys by a perceptron, whoever asks: :math:`I_{ij} = b^\top \mathrm{ReLU}(A k_j + a)`.

    All queries then want the same keys, the best so far in a causal graph.

    Args:
        channels: Channels of a head of the attention C.
        heads: Number of heads H; each has a perceptron of its own.
        hidden: Width of the perceptron.

    Raises:
        TypeError, ValueError: A size is no int or below 1.

    Shapes:
        - as :class:`Indexer`, with two small heads of one channel, which make a score of any sign.

    Reference: the key selection of "HAX", NeurIPS 2025, which ranks keys by such a score.
    """

    def __init__(self, channels: int, heads: int = 1, hidden: int = 32) -> None:
        super().__init__()
        for name, size in (("channels", channels), ("heads", heads), ("hidden", hidden)):
            checks.integer(name, size, 1, "It is a size of the perceptron.")
        self.channels, self.heads, self.hidden = channels, heads, hidden
        self.weight = nn.Parameter(torch.empty(heads, channels, hidden))
        self.bias = nn.Parameter(torch.empty(heads, 1, hidden))
        self.out_weight = nn.Parameter(torch.empty(heads, hidden, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as those of :class:`torch.nn.Linear`."""
        _uniform([self.weight, self.bias], self.channels)
        _uniform([self.out_weight], self.hidden)

    def forward(self, query: Tensor, key: Tensor) -> IndexParts:
        """Score the keys."""
        _check_sides(query, key, self.heads, self.channels)
        hidden = torch.relu(key @ self.weight.to(key.dtype) + self.bias.to(key.dtype))
        sign = query.new_tensor([1.0, -1.0]).expand(*query.shape[:2], 2)  # ReLU(u) - ReLU(-u) = u
        return sign[..., None], sign, hidden @ self.out_weight.to(key.dtype)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.channels}, heads={self.heads}, hidden={self.hidden}"


def _check_sides(query: Tensor, key: Tensor, heads: int, channels: int) -> None:
    checks.tensors(query=query, key=key)
    checks.floating(query=query, key=key)
    for name, x in (("query", query), ("key", key)):
        checks.shape(name, x, (heads, None, channels), "[H, N, C]", "They are those of the heads that it was made for.")


class IndexProbability(EdgeProbability):
    r"""Probabilities of pairs that follow small scores :math:`I_{ij}`.

    Where queries share out degrees :math:`d_i`, their keys compete, and what exceeds 1 is a certain edge:

    .. math:: p_{ij} = d_i \, \frac{\exp I_{ij}}{\sum_{j'} \exp I_{ij'}} .

    The sum runs over all keys that the query may attend to. Without degrees pairs are apart,
    :math:`p_{ij} = \sigma(I_{ij} + b)`.

    Args:
        tokens: The tokens that the scores are of; only their number, offsets and causality matter here.
        query: Small queries, ``[H, N, S, D]``.
        weight: Weights of the small heads, ``[H, N, S]``.
        key: Small keys, ``[H, M, D]``.
        degree: Keys that each query shares out, ``[N]``, positive. None: pairs are apart.
        bias: The b of each head, ``[H]``, or None for 0; without effect where there are degrees.

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
        wanted = (heads, tokens.num_keys, channels)
        checks.shape("key", key, wanted, "[H, M, D]", "It has the channels of a small head.")
        require_values(query, "query")
        if min(small, channels) < 1:
            raise ValueError(
                f"Expected 'query' of at least one small head and channel (got {list(query.shape)}). They make scores."
            )
        for name, x, shape, words in (("degree", degree, (count,), "[N]"), ("bias", bias, (heads,), "[H]")):
            if x is not None:
                checks.tensors(**{name: x})
                checks.floating(**{name: x})
                checks.shape(name, x, shape, words, "It is one number of each.")
        wide = torch.promote_types(query.dtype, torch.float32)
        self.query, self.weight, self.key = (x.to(wide) for x in (query, weight, key))
        self.degree, self.bias = degree, bias
        packed = torch.cat([self.query.flatten(2), self.weight], 2)
        self.tokens = tokens.with_vectors(packed, self.key)
        self._known: dict[Rule, Tensor] = {}
        self._traced: dict[Rule, Tensor] = {}

    def __repr__(self) -> str:
        sizes = f"{self.tokens.heads} heads, {self.tokens.num_queries} queries, {self.tokens.num_keys} keys"
        return f"{type(self).__name__}({sizes}, {'apart' if self.degree is None else 'competing'})"

    def score(self, graph: AttentionGraph) -> Tensor:
        """Scores of the edges of a graph, ``[E]``, differentiable. Cost O(E S D).

        Args:
            graph: A graph over these tokens and heads.

        Raises:
            TypeError, ValueError: It is not.
        """
        self.check(graph)
        total = self.query.new_zeros(graph.num_edges)
        for query, weight in zip(self.query.unbind(2), self.weight.unbind(2), strict=True):
            dot = ops.edge_dot(query.contiguous(), self.key, graph.rows)
            total = total + torch.relu(dot) * weight.flatten()[graph.edge_row]
        return total

    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``, differentiable.

        Cost O(E S D), and O(H N M S D) for the sums of degrees, once.
        """
        score = self.score(graph)
        if self.degree is None:
            return torch.sigmoid(score if self.bias is None else score + self.bias[graph.edge_head])
        degree = self.degree.to(score.dtype).repeat(self.tokens.heads)
        return degree[graph.edge_row] * (score - self.log_total.flatten()[graph.edge_row]).exp()

    @property
    def log_total(self) -> Tensor:
        """Logarithm of the sum of all exponentials of a query, ``[H, N]``, differentiable."""
        return self._reduce(_LOG_TOTAL)

    def expected_degree(self) -> Tensor:
        """Sum of the probabilities of each query's pairs, ``[H, N]``, differentiable, before any is cut at 1."""
        if self.degree is not None:
            return self.degree.to(self.query.dtype).expand(self.tokens.heads, -1)
        return self._reduce(_COINS)

    def expected_density(self) -> Tensor:
        """Mean probability over the pairs of each sequence and head, ``[B, H]``, before any is cut at 1."""
        tokens, degree = self.tokens, self.expected_degree()
        edges = degree.new_zeros(tokens.query_ptr.numel() - 1, tokens.heads)
        edges = edges.index_add(0, tokens.query_sequence, degree.T)
        return edges / count_pairs(tokens.query_ptr, tokens.key_ptr, tokens.is_causal)[:, None]

    def check(self, graph: AttentionGraph, name: str = "graph") -> None:
        """Refuse a graph that is not over these tokens, heads and sequences.

        Raises:
            TypeError, ValueError: It is not.
        """
        tokens = self.tokens
        sizes = (tokens.heads, tokens.num_queries, tokens.num_keys)
        check_over(graph, name, self, sizes, tokens.query_ptr, tokens.key_ptr, tokens.is_causal)

    @torch.no_grad()
    def top_k(self, k: int | Tensor) -> AttentionGraph:
        """Each query attends to the keys of its largest scores, equal ones by the lower key.

        Args:
            k: Keys of each query, at least 1; or of each, ``[N]`` int64.

        Raises:
            TypeError, ValueError: ``k`` has the wrong type, shape or range, or memory does not hold the edges.
        """
        if isinstance(k, Tensor):
            if k.dtype != torch.int64:
                raise TypeError(f"Expected 'k' to be int64 (got {k.dtype}). It counts keys.")
            checks.shape("k", k, (self.tokens.num_queries,), "[N]", "It is the number of keys of each query.")
        else:
            k = min(checks.integer("k", k, 1, "It is the number of keys of each query."), self.tokens.num_keys)
        return graph_of_rows(self.tokens, *streamed(self.tokens, largest(k), self._scores, most=k))

    @torch.no_grad()
    def sample(
        self, *, exploration: float = 0.0, seed: int | None = None, sequence_ids: Tensor | None = None
    ) -> AttentionGraph:
        """Each pair is a coin of its own: an edge with its probability.

        Which words a pair looks at follows from the seed, the number of its sequence, and head, query and key within
        it. So a sequence has the same graph in any batch, up to the rounding of torch's products.

        Args:
            exploration: Added to each probability, in [0, 1].
            seed: 64 bits; from torch's default generator if None.
            sequence_ids: As :func:`~sbm_pyg.sample_edges`.

        Raises:
            TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.
        """
        checks.number("exploration", exploration, "[0, 1]", "It is added to every probability.")
        tokens, seed = self.tokens, draw_seed(seed)
        ids = resolve_sequence_ids(sequence_ids, tokens.query_ptr.numel() - 1, tokens.query_ptr.device)
        stream = ids[tokens.query_sequence]
        head = torch.arange(tokens.heads, device=stream.device)[:, None, None]

        totals = []

        def toss(scores: Tensor, possible: Tensor, part: Part) -> Tensor:
            query = part.query
            if self.degree is None:
                p = _coin(scores, self.bias)
            else:
                total = scores.logsumexp(3, keepdim=True)
                totals.append((part, total[..., 0]))
                p = scores.sub_(total).exp_().mul_(self.degree.to(scores.dtype)[query][..., None]).nan_to_num_(0.0)
            threshold = p.add_(exploration).clamp_(max=1).mul_(possible).mul_(2.0**32)
            position = tokens.query_position[query]
            return reference_sampling.bernoulli_draws(threshold.long(), position, stream[query], head, seed)

        graph = graph_of_rows(tokens, *streamed(tokens, toss, self._scores))
        if totals:
            self._known[_LOG_TOTAL] = _in_order(totals)
        return graph

    def _scores(self, packed: Tensor, key: Tensor) -> Tensor:
        return _scores(packed, key, self.query.size(2))

    def _reduce(self, rule: Rule) -> Tensor:
        """A number for each query, ``[H, N]``, differentiable, from the scores of its pairs."""
        if rule not in self._known:
            with torch.no_grad():
                found = []
                for part in parts(self.tokens):
                    scores, _ = _part(self.tokens, part, self.query.size(2))
                    found.append((part, rule.value(scores, self.bias)))
                self._known[rule] = _in_order(found)
        if not torch.is_grad_enabled():
            return self._known[rule]
        if rule not in self._traced:  # one backward pass over all pairs, however often it is asked for
            inputs = (self.tokens.query, self.tokens.key, self.bias)
            self._traced[rule] = _Reduced.apply(*inputs, self._known[rule], self.tokens, self.query.size(2), rule)
        return self._traced[rule]


def _heads(packed: Tensor, small: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries ``[H, b, r, D]`` and weights ``[H, b, r, 1]`` of each small head, of packed ``[H, b, r, S D + S]``."""
    query, weight = packed.split([packed.size(3) - small, small], 3)
    return zip(query.chunk(small, 3), weight.split(1, 3), strict=True)


def _scores(packed: Tensor, key: Tensor, small: int) -> Tensor:
    """Scores ``[H, b, r, L]`` of packed queries and keys ``[H, b, L, D]``."""
    # Fresh memory for each head would cost more than the products.
    total, part = (packed.new_empty(*packed.shape[:3], key.size(2)) for _ in range(2))
    for number, (query, weight) in enumerate(_heads(packed, small)):
        each = part if number else total
        torch.relu_(torch.matmul(query, key.mT, out=each)).mul_(weight)
        total = total.add_(part) if number else total
    return total


def _part(tokens: Tokens, part: Part, small: int) -> tuple[Tensor, Tensor]:
    """Scores of the pairs of a part, the least number where there is none, and which pairs there are."""
    scores = _scores(tokens.query[:, part.query], tokens.key[:, part.key.clamp(min=0)], small)
    possible = part.possible & ~scores.isnan()
    return scores.masked_fill_(~possible, torch.finfo(scores.dtype).min), possible


class Rule(NamedTuple):
    """What becomes of the scores of a row, ``[H, b, r, L]``, and of the bias of a head, and its slope in each score."""

    value: Callable[[Tensor, Tensor | None], Tensor]
    slope: Callable[[Tensor, Tensor | None, Tensor], Tensor]


def _coin(scores: Tensor, bias: Tensor | None) -> Tensor:
    return torch.sigmoid(scores if bias is None else scores + bias[:, None, None, None])


def _coin_slope(scores: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
    p = _coin(scores, bias)
    return p * (1 - p)


_LOG_TOTAL = Rule(lambda scores, bias: scores.logsumexp(3), lambda scores, bias, value: (scores - value).exp_())
_COINS = Rule(lambda scores, bias: _coin(scores, bias).sum(3), _coin_slope)


def _in_order(found: list[tuple[Part, Tensor]]) -> Tensor:
    """Numbers ``[H, N]`` in the order of the queries, from those of parts ``[H, b, r]``."""
    token = torch.cat([part.query[part.there] for part, _ in found])
    return torch.cat([value[:, part.there] for part, value in found], 1)[:, token.argsort()]


class _Reduced(torch.autograd.Function):
    """Numbers of rows that are known, with their gradient to all pairs: a part at a time, from scores computed anew."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        key: Tensor,
        bias: Tensor | None,
        value: Tensor,
        tokens: Tokens,
        small: int,
        rule: Rule,
    ) -> Tensor:
        ctx.save_for_backward(packed, key, bias, value, tokens.query_ptr, tokens.key_ptr)
        ctx.tokens, ctx.small, ctx.rule = tokens, small, rule
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, key, bias, value, *_ = ctx.saved_tensors  # which tell whether offsets were written into
        tokens, grad_packed, grad_key = ctx.tokens, torch.zeros_like(packed), torch.zeros_like(key)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for part in parts(tokens):
            scores, possible = _part(tokens, part, ctx.small)
            slope = ctx.rule.slope(scores, bias, value[:, part.query, None]).mul_(grad[:, part.query, None])
            slope.masked_fill_(~possible, 0)
            if grad_bias is not None and ctx.rule is _COINS:
                grad_bias += slope.sum((1, 2, 3))
            keys = key[:, part.key.clamp(min=0)]
            dot, other = scores, torch.empty_like(scores)
            to_keys, to_queries, to_weights = torch.zeros_like(keys), [], []
            for query, weight in _heads(packed[:, part.query], ctx.small):
                torch.relu_(torch.matmul(query, keys.mT, out=dot))
                to_weights.append(torch.mul(slope, dot, out=other).sum(3, keepdim=True))
                torch.mul(slope, weight, out=other)
                to_dot = torch.ops.aten.threshold_backward.grad_input(other, dot, 0, grad_input=other)
                to_queries.append(to_dot @ keys)
                to_keys += to_dot.mT @ query
            grad_packed.index_add_(1, part.query.flatten(), torch.cat(to_queries + to_weights, 3).flatten(1, 2))
            grad_key.index_add_(1, part.key.clamp(min=0).flatten(), to_keys.flatten(1, 2))
        return grad_packed, grad_key, grad_bias, None, None, None, None


class IndexerSource(SharingSource):
    """Chooses by small scores that learn: coins or ranks.

    Args:
        scorer: An :class:`Indexer`, a :class:`KeyScorer`, or a module like them.
        select: ``"coins"``: each pair is an edge with its probability, see :class:`IndexProbability`. ``"top_k"``: each
            query takes its largest scores, and the task's loss does not reach them: train it with ``"imitate"``.
        k: Keys of each query with ``"top_k"``, at least 1. None: as the share says.
        share: Density that the keys of each query compete for, in (0, 1], at least one key each. It is what
            :class:`~sbm_pyg.ShareSchedule` lowers. None, with coins: pairs are apart, and begin at ``density``.
        density: Where coins that are apart begin, in (0, 1), by a bias of each head that learns.
        exploration: Added to the probabilities of coins in training only, in [0, 1]. None: the square of the share, or
            0 without one.
        detach: No gradient goes on from the scores to queries and keys, as in DeepSeek-V3.2.
        window: Each token also attends to tokens at this distance or less, and so to itself. None: no window.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or ``"top_k"`` has neither ``k`` nor ``share``.

    Example:
        >>> from sbm_pyg import AttentionConv
        >>> conv = AttentionConv(16, 8, heads=2, source=IndexerSource(Indexer(8, heads=2), share=0.25))
        >>> out, choice = conv(torch.randn(20, 16), seed=0, return_choice=True)
        >>> out.shape, choice.probability
        (torch.Size([20, 16]), IndexProbability(2 heads, 20 queries, 20 keys, competing))

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for the scores and for ``"top_k"`` with ``"imitate"``. Coins that
    the task's own loss trains are ours.
    """

    def __init__(
        self,
        scorer: nn.Module,
        *,
        select: str = "coins",
        k: int | None = None,
        share: float | None = None,
        density: float = 0.5,
        exploration: float | None = None,
        detach: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(scorer, nn.Module):
            raise TypeError(
                f"Expected 'scorer' to be a module such as Indexer (got {type(scorer).__name__}). Make one."
            )
        checks.one_of("select", select, SELECT)
        if k is not None:
            k = checks.integer("k", k, 1, "It is the number of keys of each query.")
        if (select == "top_k") != (k is not None) and not (select == "top_k" and share is not None):
            raise ValueError(
                f"Expected 'k' with select='top_k' alone, or 'share' (got k={k}, share={share}, select={select!r}). "
                "Coins have no fixed number of keys."
            )
        checks.number("density", density, "(0, 1)", "It is where the probabilities of coins begin.")
        if exploration is not None:
            checks.number("exploration", exploration, "[0, 1]", "It is added to every probability in training.")
        checks.flag("detach", detach, "It says whether scores send no gradient to queries and keys.")
        self.scorer, self.select, self.k, self.share, self.exploration = scorer, select, k, share, exploration
        self.density, self.detach, self.window = density, detach, patterns.check_window(window)
        apart = select == "coins" and share is None
        self.bias = nn.Parameter(torch.empty(getattr(scorer, "heads", 1))) if apart else None
        self._reset_bias()

    @property
    def can_share(self) -> bool:
        """As :attr:`~sbm_pyg.SharingSource.can_share`: not with a number of keys ``k``."""
        return self.k is None

    def _prepare(self) -> None:
        if self.share is not None and not self.can_share:
            raise ValueError(
                f"Expected no 'share' beside k={self.k} (got {self.share}). Each says how many keys a query takes."
            )

    def _reset_bias(self) -> None:
        if self.bias is not None:
            nn.init.constant_(self.bias, math.log(self.density / (1 - self.density)))

    def reset_parameters(self) -> None:
        """Draw the parameters of the scorer anew, and take the bias back to its start."""
        super().reset_parameters()
        self._reset_bias()

    def forward(self, tokens: Tokens) -> Choice:
        """As :meth:`GraphSource.forward`."""
        vectors = (tokens.query, tokens.key)
        small = self.scorer(*(x.detach() for x in vectors) if self.detach else vectors)
        count = None
        if self.k is not None:
            count = tokens.allowed_keys.clamp(max=self.k)
        elif self.share is not None:
            count = (self.share * tokens.allowed_keys).clamp(min=1)
        degree = None if count is None else count.to(torch.promote_types(tokens.query.dtype, torch.float32))
        probability = IndexProbability(tokens, *small, degree=degree, bias=self.bias)
        if self.select == "top_k":
            wanted = count if self.share is None else share_of(self.share, tokens.allowed_keys)
            assert wanted is not None
            choice = Choice(probability.top_k(wanted), probability, independent=False)
        else:
            by_share = (self.share or 0.0) ** 2 if self.exploration is None else self.exploration
            exploration = by_share if self.training else 0.0
            graph = probability.sample(exploration=exploration, seed=tokens.seed, sequence_ids=tokens.sequence_ids)
            choice = Choice(graph, probability, exploration=exploration)
        return patterns.with_window(choice, self.window, tokens.bipartite)

    def extra_repr(self) -> str:
        """Its options."""
        names = ("k", "share", "exploration", "window")
        return ", ".join(
            [f"select={self.select!r}", *(f"{n}={v}" for n in names if (v := getattr(self, n)) is not None)]
        )
