"""The attention layer: message passing from keys to queries over a graph that a source chooses, or that it is given.

In: tokens, and any graph or none. Out: tokens. Not here: who chooses the graph (sources), how a loss reaches its
probabilities (``estimators``), and how edges are computed (``ops``); the layer joins the three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor

from . import ops
from .auxiliary import AuxiliaryLosses
from .blocks import BlockPool
from .estimators import Attended, Estimator, Local, NoEstimator, resolve_estimator
from .graph import AttentionGraph
from .normalizers import Entmax, check_normalizer
from .ops import METHODS, checks
from .propagation import NOTHING, EdgeAttention, Returns, channel_pair, check_tokens
from .ragged import Tokens, draw_seed, resolve_sides
from .sources.interface import Choice, GraphSource, TiledChoice, limited
from .sources.sampling import SBMSource
from .sources.sbm import SBMHead

__all__ = ["AttentionConv", "Returns", "SBMAttentionConv"]

Adjacency: TypeAlias = "AttentionGraph | Tensor | SparseTensor"
Sides: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class CallOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`AttentionConv.forward` that do not change what it returns."""

    edge_head: Tensor | None
    ptr: Sides | None
    batch: Sides | None
    seed: int | None
    sequence_ids: Tensor | None


CAUSAL = "It says whether queries attend to earlier keys alone."
FIXED = {"aggr": ("add", "sum"), "flow": ("source_to_target",), "decomposed_layers": (1,), "node_dim": (0, -2)}


class AttentionConv(EdgeAttention):
    r"""Multi-head attention over the edges of a graph, whoever chose it.

    Each head projects tokens to queries :math:`q`, keys :math:`k` and values :math:`v`. The graph is given in the call,
    or the source of the layer chooses it from queries and keys. Then, over the edges of each query alone,

    .. math::
        x_i' = \Big\Vert_{h} \sum_{j \in \mathcal{N}_h(i)} \operatorname{softmax}_j(q_i^\top k_j / \sqrt{C}) \, v_j .

    A query without edges gives zeros. A token that no edge touches reaches no other token, whatever it holds. The
    projections still see every token: NaN in one makes the gradients of their parameters NaN, as in every layer of
    torch. There is no padding: batches are ragged, as PyG's are. Cost O(N C_in H C + E C), and that of the source.

    Args:
        in_channels: Channels of the tokens, or of the pair (keys, queries), as PyG orders bipartite features; -1 to
            infer.
        out_channels: Channels per head C.
        heads: Number of heads H.
        source: Who chooses the graph where a call brings none. None: every call needs a graph.
        concat: Concatenate the heads (H*C output channels), or average them (C).
        bias: Biases in the three projections.
        estimator: How the loss reaches the probabilities of the source: an :class:`~sbm_pyg.estimators.Estimator`, or
            its name. None: ``"local"``, or ``"mask"`` where the normaliser is not softmax.
        is_causal: No query attends to a later key. The source chooses among the other pairs alone, densities count
            those, and later keys of a given graph are left out. As in torch, places count from the start of both sides.
        normalizer: How scores become weights: ``"softmax"``, ``"entmax15"``, ``"sparsemax"``, ``"entmax"``, which is
            alpha-entmax with an alpha for each head that learns, or an :class:`Entmax` that says where alpha starts.
            Entmax weights are mostly 0.
        score_bias: Callable ``(query [H, N, C], key [H, M, C], graph) -> [E]`` added to the scaled scores, or None.
        dropout: Probability that an attention weight is dropped in training.
        **kwargs: Of :class:`torch_geometric.nn.MessagePassing`. Weights sum to 1, so ``aggr`` is ``"add"``; keys are
            sources; tokens are ``[N, C]``, so ``node_dim`` is 0 or -2, which is the same.

    Raises:
        TypeError: An argument has the wrong type, or an unknown name.
        ValueError: An option is unknown or out of range, or two do not go together.

    Shapes:
        - tokens ``[N, C_in]``, or a pair of keys ``[M, C_in]`` and queries ``[N, C_in']``;
        - output ``[N, H*C]``, or ``[N, C]`` with ``concat=False``.

    Example:
        >>> from sbm_pyg import patterns
        >>> conv = AttentionConv(16, 8, heads=2, source=patterns.PatternSource(patterns.window, size=2))
        >>> x, ptr = torch.randn(30, 16), torch.tensor([0, 10, 30])  # two sequences
        >>> out, graph = conv(x, ptr=ptr, return_graph=True)
        >>> out.shape, graph.num_edges
        (torch.Size([30, 16]), 276)
        >>> conv(x, patterns.full(30)).shape  # the same layer over a graph that is given
        torch.Size([30, 16])

    Reference: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, over the edges of a graph.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        source: GraphSource | None = None,
        *,
        concat: bool = True,
        bias: bool = True,
        estimator: Estimator | str | None = None,
        is_causal: bool = False,
        normalizer: str | Entmax = "softmax",
        score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor] | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        unknown = [name for name in kwargs if name not in {*inspect.signature(MessagePassing).parameters} - {"kwargs"}]
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got unknown arguments {unknown}. See its docstring for those it has."
            )
        for name, fixed in FIXED.items():
            if kwargs.setdefault(name, fixed[0]) not in fixed:
                raise ValueError(
                    f"Expected '{name}' to be {fixed[0]!r} (got {kwargs[name]!r}). Attention sums from keys to "
                    "queries, over tokens [N, C]."
                )
        super().__init__(**kwargs | {"node_dim": 0})  # of tokens [N, H, C]
        heads, out_channels = (
            checks.integer(name, size, 1, f"See the docstring of {type(self).__name__}.")
            for name, size in (("heads", heads), ("out_channels", out_channels))
        )
        pair = channel_pair(in_channels)
        if source is not None and not isinstance(source, GraphSource):
            raise TypeError(
                f"Expected 'source' to be a GraphSource (got {type(source).__name__}). A graph goes into the call."
            )
        if score_bias is not None and not callable(score_bias):
            raise TypeError(
                f"Expected 'score_bias' to be a callable (query, key, graph) -> [E] (got {type(score_bias).__name__}). "
                "Wrap a tensor in a function."
            )
        check_normalizer(normalizer, heads)
        checks.flag("is_causal", is_causal, CAUSAL)
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        self.estimator = resolve_estimator(estimator, normalizer)
        width, wide = max(*pair, 1), heads * out_channels
        name, way_out = "in_channels" if width > wide else "heads", "Take fewer heads, or narrower ones."
        checks.memory(name, width * wide, 4, torch.device("cpu"), way_out, "parameters")
        self.in_channels = pair if isinstance(in_channels, tuple | list) else pair[0]
        self.out_channels, self.heads, self.concat = out_channels, heads, concat
        self.is_causal, self.dropout, self.scale = is_causal, dropout, out_channels**-0.5
        self.normalizer = Entmax(heads) if normalizer == "entmax" else normalizer
        self.source, self.score_bias = source, score_bias
        self.auxiliary_losses = AuxiliaryLosses()
        self.lin_key = Linear(pair[0], wide, bias=bias)
        self.lin_query = Linear(pair[1], wide, bias=bias)
        self.lin_value = Linear(pair[0], wide, bias=bias)

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's default generator."""
        super().reset_parameters()
        for module in (self.lin_key, self.lin_query, self.lin_value, self.source, self.score_bias, self.normalizer):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    @overload
    def forward(self, x: Sides, edge_index: Adjacency | None = None, *, return_graph: Literal[True],
                return_choice: Literal[False] = False, return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> tuple[Tensor, AttentionGraph]: ...  # fmt: skip
    @overload
    def forward(self, x: Sides, edge_index: Adjacency | None = None, *, return_graph: Literal[False] = False,
                return_choice: Literal[True], return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> tuple[Tensor, Choice]: ...  # fmt: skip
    @overload
    def forward(self, x: Sides, edge_index: Adjacency | None = None, *, return_graph: Literal[False] = False,
                return_choice: Literal[False] = False, return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, x: Sides, edge_index: Adjacency | None = None, *, return_graph: bool = False,
                return_choice: bool = False, return_attention_weights: bool = False,
                **options: Unpack[CallOptions]) -> Any: ...  # fmt: skip
    def forward(
        self,
        x: Sides,
        edge_index: Adjacency | None = None,
        *,
        edge_head: Tensor | None = None,
        ptr: Sides | None = None,
        batch: Sides | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_graph: bool = False,
        return_choice: bool = False,
        return_attention_weights: bool = False,
    ) -> Any:
        """Attend.

        Args:
            x: Tokens ``[N, C_in]``, or the pair (keys, queries).
            edge_index: The graph: an :class:`AttentionGraph` with H heads or one, any PyG adjacency (all heads share
                it; repeated edges count once), or None to let the source choose.
            edge_head: Head of each edge of ``edge_index``, ``[E]`` int64, if heads do not share the edges.
            ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: those of the graph, or
                one sequence.
            batch: The same as a sequence number per token, ``[N]``.
            seed: Fixes the graph that the source draws, and the dropout; from torch's default generator if None.
            sequence_ids: Number of each sequence, ``[B]``; see :func:`~sbm_pyg.sample_edges`. With ``seed``, a sequence
                gets the same graph in any batch. Dropout depends on where in the batch it begins, and the noise of
                "concrete" on the whole batch.
            return_graph: Also return the :class:`AttentionGraph`.
            return_choice: Also return the :class:`Choice`: the graph and its probabilities.
            return_attention_weights: Also return ``(edge_index, alpha)``, the weights before dropout. As PyG layers do,
                an adjacency comes back itself, and ``alpha`` ``[E, H]`` in the order of its edges. A sparse one has
                ``alpha`` as its values; a ``SparseTensor`` comes alone. With ``edge_head``, and over a graph, ``alpha``
                is ``[E]``.

        Returns:
            The output, or a tuple of it and what was asked for, in the order graph, choice, attention weights.

        Raises:
            TypeError: The tokens are of another type than the layer.
            ValueError: Shapes do not fit, there is neither a graph nor a source, or an explainer is at work and the
                edges are not its own.
        """
        x_key, x_query = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
        for tokens, lin in ((x_key, self.lin_key), (x_query, self.lin_query)):
            check_tokens(tokens, lin)
        query, key, value = (
            lin(tokens).view(-1, self.heads, self.out_channels).transpose(0, 1).contiguous()
            for lin, tokens in ((self.lin_query, x_query), (self.lin_key, x_key), (self.lin_value, x_key))
        )  # [H, N, C]
        return self.attend(
            query, key, value, edge_index, bipartite=x_key is not x_query, edge_head=edge_head, ptr=ptr, batch=batch,
            seed=seed, sequence_ids=sequence_ids,
            returns=Returns(return_graph, return_choice, return_attention_weights),
        )  # fmt: skip

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, edge_index: Adjacency | None = None, *,
        bipartite: bool = False, is_causal: bool = False,
        edge_filter: Callable[[AttentionGraph], Tensor] | None = None, edge_head: Tensor | None = None,
        ptr: Sides | None = None, batch: Sides | None = None, seed: int | None = None,
        sequence_ids: Tensor | None = None, returns: Returns = NOTHING,
    ) -> Any:  # fmt: skip
        """Attend with given projections, for models that have their own.

        It is what :meth:`forward` does after its projections; other arguments are as there.

        Args:
            query, key, value: ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
            bipartite: Queries and keys are different tokens, even where N = M.
            is_causal: No query attends to a later key in this call, whatever the layer says.
            edge_filter: From a graph to the mask ``[E]`` bool of the edges to keep.
            returns: What to return beside the output.
        """
        checks.flag("is_causal", is_causal, CAUSAL)
        self._check_call(query, key, value, edge_index, edge_filter, edge_head, sequence_ids, returns)
        drop = self.dropout if self.training else 0.0
        seed = draw_seed(0 if seed is None and edge_index is not None and drop == 0 else seed)
        is_causal = self.is_causal or is_causal
        limit = partial(limited, is_causal=is_causal, edge_filter=edge_filter)
        score_bias = partial(self._score_bias, query, key)
        if edge_index is None:
            ptrs = resolve_sides(query.size(1), key.size(1), ptr, batch, query.device)
            choice = self._choose(Tokens(query, key, *ptrs, bipartite, is_causal, seed, sequence_ids))
        else:
            of = (edge_index, query.size(1), key.size(1), self.heads)
            choice = Choice(AttentionGraph.over(*of, edge_head=edge_head, ptr=ptr, batch=batch))
        if isinstance(choice, TiledChoice):
            self._check_tiled(drop)
            if edge_filter is None and not returns.attention_weights and not self._edgewise:
                out = self._by_tiles(query, key, value, choice, is_causal)
                return self._made(out.transpose(0, 1), choice, None, returns)
            choice = choice.stored()
        estimator = self.estimator if choice.probability is not None else NoEstimator()
        choice = limit(estimator.prepare(choice, self.training))
        gate, soft = estimator.gate(choice), estimator.bias(choice, self.training, seed)
        gate, soft = (x if x is None else choice.graph.spread(x) for x in (gate, soft))
        bias = score_bias(choice.graph)
        bias = soft if bias is None else bias if soft is None else bias + soft
        parts = (query, key, value, gate, bias)
        out, weights = self._over(choice.graph, edge_index, edge_head, parts, drop, seed, returns.attention_weights)
        attended = Attended(query, key, value, choice, bias, self.scale, limit, score_bias, seed, sequence_ids,
                            self.training)  # fmt: skip
        out = estimator.attach(out.transpose(0, 1), attended).transpose(0, 1)
        out = self.auxiliary_losses.add(out, estimator.auxiliary_loss(attended), type(estimator).__name__)
        return self._made(out, choice, weights, returns)

    def _made(self, out: Tensor, choice: Choice, weights: Any, returns: Returns) -> Any:
        """What a call returns, of the output ``[N, H, C']`` and all else there is."""
        out = out.flatten(1) if self.concat else out.mean(1)
        if self.heads == 1 and self.concat and out.requires_grad:
            out = out.clone()  # as the kernel keeps its own, which an activation in place would overwrite
        found: list[Any] = [choice.graph] if returns.graph else []
        found += [choice] if returns.choice else []
        found += [weights] if returns.attention_weights else []
        return (out, *found) if found else out

    def _check_tiled(self, dropout: float) -> None:
        """Refuse what has to know edges one by one, with a source that stores none."""
        wrong = {
            "dropout": (dropout, dropout == 0),
            "normalizer": (self.normalizer, self.normalizer == "softmax"),
            "score_bias": (self.score_bias, self.score_bias is None),
            "estimator": (self.estimator, type(self.estimator) in (Local, NoEstimator)),
        }
        for name, (got, fits) in wrong.items():
            if not fits:
                raise ValueError(
                    f"Expected '{name}' that needs no stored edges with a source that is tiled (got {got}). Take no "
                    "dropout, softmax, no bias and the estimator 'local' or 'none'; or set `source.tiled = False`."
                )

    def _by_tiles(self, query: Tensor, key: Tensor, value: Tensor, choice: TiledChoice, is_causal: bool) -> Tensor:
        """Attend over a graph that is not stored; the output, ``[H, N, C']``."""
        rate, member = choice.factors
        if isinstance(self.estimator, NoEstimator):
            rate, member = rate.detach(), member.detach()
        return ops.sampled_attention(
            query, key, value, rate, member, *choice.ptrs, choice.sequence_ids, choice.seed, scale=self.scale,
            exploration=choice.exploration, is_causal=is_causal, window=choice.window,
        )  # fmt: skip

    def _choose(self, tokens: Tokens) -> Choice:
        """What the source chooses, in as many heads as the layer has."""
        if self.source is None:
            raise ValueError(
                "Expected 'edge_index' (got None, and the layer has no source: 'source' or 'num_blocks' is None). "
                "Pass a graph, or give the layer a source."
            )
        return self.source(tokens).expand(self.heads)

    def __repr__(self) -> str:
        source = "" if self.source is None else f", source={type(self.source).__name__}"
        source += "" if self.normalizer == "softmax" else f", normalizer={self.normalizer!r}"
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}{source})"


class SBMAttentionConv(AttentionConv):
    r"""Attention whose heads each sample their graph from a stochastic block model of their own queries and keys.

    It is an :class:`AttentionConv` whose source is an :class:`~sbm_pyg.sources.sampling.SBMSource` with an
    :class:`~sbm_pyg.SBMHead`. The parameters of the head learn from the loss through an estimator. Cost O(N C_in H C +
    NKC + E (C + K)).

    Args:
        in_channels, out_channels, heads: As :class:`AttentionConv`.
        num_blocks: Number of blocks K of each head's SBM. None: no source; every call needs a graph.
        sbm_options: Further keyword arguments of :class:`~sbm_pyg.SBMHead`, e.g. ``{"parameterization":
            "assortative"}``.
        estimator: As :class:`AttentionConv`: ``"local"``, the effect of an edge on the loss, over edges and probes;
            ``"distill"``, the same and what the attention over the graph teaches; ``"mask"``, as the authors' code has
            it; ``"paper"``, eq. 9; ``"relaxed"`` or ``"concrete"``, which train on all pairs with a soft mask, O(NM),
            and sample in evaluation only; ``"none"``. None: ``"local"``, or ``"mask"`` where the normaliser is not
            softmax or the law not Bernoulli's. See :mod:`sbm_pyg.estimators` and docs/learning.md.
        probes: With ``"local"`` or ``"distill"`` by name, expected number of pairs per query and head that are looked
            at beside the edges.
        exploration: Added to every edge probability in training only, in [0, 1]. None: 0.01, as in the paper. With
            ``"local"`` and ``"distill"``, whose probes explore without adding edges, the square of the share, or 0
            without one.
        method: Law of the sampled graph, ``"bernoulli"`` or ``"fastrg"``; see :func:`~sbm_pyg.sample_edges`.
        budget: Largest expected number of sampled keys per query and head; None for no limit.
        share: Density that the pairs of each head compete for, in (0, 1]; see :class:`~sbm_pyg.SBMSource`, and
            :class:`~sbm_pyg.ShareSchedule`, which lowers it in training. None: probabilities are as they are.
        self_loops: Each token always attends to itself.
        window: Each token always attends to tokens at this distance or less, and so to itself.
        grain: Tokens of a block. Above 1, blocks of queries attend to blocks of keys, and graphs are
            :class:`~sbm_pyg.BlockGraph`; see :class:`~sbm_pyg.SBMSource`. ``probes`` and ``budget`` count tokens.
        pool: What makes a vector of the tokens of a block: ``"mean"`` or ``"learned"``, a mean whose weights learn
            (:class:`~sbm_pyg.BlockPool`).
        detach: The block model sends no gradient to queries and keys, which then learn from attention alone. With
            ``"distill"`` they else learn to be foretold, too; where little else moves them, that is all they learn
            (docs/learning.md).
        tiled: Store no graph: edges are drawn beside the scores, one coin for each pair, and ``"local"`` looks at all
            pairs instead of probes. Time O(NM), memory O(N): for graphs that are dense, as those that begin full; see
            docs/guides/tiled.md. ``conv.source.tiled`` may change between calls.
        **kwargs: Of :class:`AttentionConv`: ``concat``, ``bias``, ``is_causal``, ``normalizer``, ``score_bias``,
            ``dropout``.

    Raises:
        TypeError, ValueError: As :class:`AttentionConv`.

    Example:
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_blocks=4)
        >>> x, ptr = torch.randn(30, 16), torch.tensor([0, 10, 30])  # two sequences
        >>> out, choice = conv(x, ptr=ptr, seed=0, return_choice=True)
        >>> out.shape, choice.graph.density.shape, choice.probability
        (torch.Size([30, 16]), torch.Size([2, 2]), SBM(2 sequences, 2 heads, 30 queries, 30 keys, 4 blocks))

    Reference: Cho et al., "Transformers meet Stochastic Block Models", NeurIPS 2022. As there, no output projection
    belongs to the layer. Unlike their code: scores are scaled, the softmax sees sampled edges only, evaluation explores
    nothing.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        num_blocks: int | None = 128,
        *,
        sbm_options: Mapping[str, Any] | None = None,
        estimator: Estimator | str | None = None,
        probes: float = 16.0,
        exploration: float | None = None,
        method: str = "bernoulli",
        budget: float | None = None,
        share: float | None = None,
        self_loops: bool = False,
        window: int | None = None,
        grain: int = 1,
        pool: str = "mean",
        detach: bool = False,
        tiled: bool = False,
        **kwargs: Any,
    ) -> None:
        checks.one_of("method", method, METHODS)
        checks.one_of("pool", pool, ("mean", "learned"))
        normalizer = kwargs.get("normalizer", "softmax")
        check_normalizer(normalizer)
        estimator = resolve_estimator(estimator, normalizer, method, probes)
        super().__init__(in_channels, out_channels, heads, estimator=estimator, **kwargs)
        self.num_blocks = num_blocks
        if sbm_options is not None and not isinstance(sbm_options, Mapping):
            raise TypeError(
                "Expected 'sbm_options' to be a dict of arguments of SBMHead "
                f"(got {type(sbm_options).__name__}). Name each option."
            )
        if num_blocks is not None:
            pooled = BlockPool(self.out_channels, self.heads) if pool == "learned" else pool
            exploration = self.estimator.exploration if exploration is None else exploration
            head = SBMHead(self.out_channels, self.heads, num_blocks, **(sbm_options or {}))
            self.source = SBMSource(
                head, method=method, exploration=exploration, budget=budget, share=share, self_loops=self_loops,
                window=window, grain=grain, pool=pooled, detach=detach, tiled=tiled,
            )  # fmt: skip

    @property
    def sbm(self) -> SBMHead | None:
        """The module that predicts the block model, or None."""
        return cast(SBMHead, self.source.head) if isinstance(self.source, SBMSource) else None
