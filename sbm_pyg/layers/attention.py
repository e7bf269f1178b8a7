"""The attention layer: message passing from keys to queries over a given graph, or one chosen by a graph source.

In: tokens, and a graph or none. Out: tokens. Not here: graph sources (``sources``), gradients of edge probabilities
(``estimators``), and kernels (``ops``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from ..graphs.graph import Adjacency, AttentionGraph
from ..graphs.ragged import Tokens, count_positions, draw_seed, resolve_sides
from ..ops import checks
from ..ops.values import require_unbatched
from ..sources.dense import BiasFactors
from ..sources.interface import Choice, GraphSource, drop_forbidden_edges
from ..sources.learned import DensitySource
from ..sources.linear_sbm import LinearSBMHead
from ..sources.sampling import SBMSource
from ..sources.sbm import SBMHead
from ..training.auxiliary import AuxiliaryLosses
from ..training.estimators import AttentionCall, Estimator, resolve_estimator
from .normalizers import Entmax, check_normalizer
from .positions import Rotary
from .propagation import OUTPUT_ONLY, EdgeAttention, Returns, channel_pair, check_tokens, owned

__all__ = ["AttentionConv", "Returns", "SBMAttentionConv", "block_model"]

OneOrTwo: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class CallOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`AttentionConv.forward` that do not affect the type of the output."""

    edge_attr: Tensor | None
    edge_head: Tensor | None
    ptr: OneOrTwo | None
    batch: OneOrTwo | None
    positions: OneOrTwo | None
    seed: int | None
    sequence_ids: Tensor | None


HEAD_OPTIONS = frozenset(inspect.signature(SBMHead).parameters) - {"channels", "heads", "num_clusters"}
CAUSAL = "It says whether queries attend to earlier keys alone."
FIXED = {
    "aggr": ("add", "sum"),
    "aggr_kwargs": (None, {}),
    "flow": ("source_to_target",),
    "decomposed_layers": (1,),
    "node_dim": (0, -2),
}


class AttentionConv(EdgeAttention):
    r"""Multi-head attention over the edges of a graph, given by the caller or chosen by a graph source.

    Each head projects tokens to queries :math:`q`, keys :math:`k` and values :math:`v`. The call passes a graph, or the
    source of the layer chooses one from queries and keys. The layer then attends over the edges of each query:

    .. math::
        x_i' = \Big\Vert_{h} \sum_{j \in \mathcal{N}_h(i)} \operatorname{softmax}_j(q_i^\top k_j / \sqrt{C}) \, v_j .

    The output of a query without edges is zero. A token without edges does not affect other tokens, even if it is NaN;
    it still makes the gradients of the projections NaN, as in every layer of torch. Batches are ragged, as in PyG,
    without padding. Cost O(N C_in H C + E C), plus the cost of the source.

    Args:
        in_channels: Channels of the tokens, or of the pair (keys, queries), as PyG orders bipartite features; -1 to
            infer.
        out_channels: Channels per head C.
        heads: Number of heads H.
        source: Graph source to use when the call does not pass a graph. None: every call needs a graph.
        concat: Concatenate the heads (H*C output channels), or average them (C).
        bias: Biases in the three projections.
        estimator: How the loss reaches the probabilities of the source: an
            :class:`~sbm_pyg.training.estimators.Estimator`, or its name. None: ``"local"``; ``"imitate"`` if the source
            selects edges by rank; ``"mask"`` if it draws them by ``"fastrg"`` or the normalizer is not softmax.
        is_causal: No query attends to a later key. The source chooses among the remaining pairs, densities count only
            these pairs, and edges of a given graph from later keys are dropped. As in torch, positions count from the
            start of both sequences.
        normalizer: Maps scores to weights: ``"softmax"``, ``"entmax15"``, ``"sparsemax"``, ``"entmax"`` (alpha-entmax
            with a learned alpha per head), or an :class:`Entmax` with its own initial alpha. Most entmax weights are 0.
        score_bias: Callable ``(query [H, N, C], key [H, M, C], graph) -> [E]`` added to the scaled scores, or None.
            Examples are :class:`~sbm_pyg.ALiBi` and :class:`~sbm_pyg.DCMMBias`. With a method ``dense_bias(L, S)
            -> [H, L, S]``, or ``factors`` as :meth:`DCMMBias.factors`, dense attention needs no stored edges.
        rotary: A :class:`~sbm_pyg.Rotary` that rotates queries and keys by their positions, or None.
        dropout: Probability that an attention weight is dropped in training.
        edge_dim: Channels D of the edge features of a given graph. A linear map without bias, ``lin_edge``, projects
            the features for each head and adds them to the key and the value of their edge, as in
            :class:`torch_geometric.nn.TransformerConv`. Each call then needs ``edge_index`` and ``edge_attr``. None:
            edges have no features.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`. ``aggr`` must be ``"add"``, since weights sum
            to 1; keys are sources; ``node_dim`` is 0 or, equivalently, -2, since tokens are ``[N, C]``.

    Raises:
        TypeError: An argument has the wrong type, or an unknown name.
        ValueError: An option is unknown or out of range, or two options exclude each other.

    Shapes:
        - tokens ``[N, C_in]``, or a pair of keys ``[M, C_in]`` and queries ``[N, C_in']``;
        - output ``[N, H*C]``, or ``[N, C]`` with ``concat=False``.

    Example:
        >>> import torch
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

    head_dims: ClassVar[dict[str, int]] = {}
    eval_seed: int | None = 0
    """Seed of calls without a seed in evaluation mode. With None, torch's default generator draws a seed, as in
    training. ``state_dict`` does not contain it. Models set a different seed in each layer."""
    first_head = 0
    """Number of head 0 among the heads of a layer that several processes share; see :class:`~sbm_pyg.HeadParallel`."""

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
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = [name for name in kwargs if name not in {*inspect.signature(MessagePassing).parameters} - {"kwargs"}]
        if unknown:
            skip = " `beta` and `root_weight` of TransformerConv mix the output with the input: add it to the output."
            skip = skip if {"beta", "root_weight"} & {*unknown} else ""
            raise TypeError(f"{type(self).__name__} got unknown arguments {unknown}. See its docstring.{skip}")
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
        checks.kind("source", source, GraphSource | None, "a GraphSource", "A graph goes into the call.")
        what = "a callable (query, key, graph) -> [E]"
        checks.kind("score_bias", score_bias, Callable | None, what, "Wrap a tensor in a function.")
        if getattr(score_bias, "heads", heads) != heads:
            raise ValueError(
                f"Expected 'score_bias' of {heads} heads, as the layer has (got {score_bias}). Make one for each head."
            )
        checks.kind("rotary", rotary, Rotary | None, "a Rotary", "Pass `sbm_pyg.Rotary()`.")
        check_normalizer(normalizer, heads)
        checks.flag("concat", concat, "With False, heads are averaged.")
        checks.flag("bias", bias, "With True, the three projections have biases.")
        checks.flag("is_causal", is_causal, CAUSAL)
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        if rotary is not None:
            rotary._width_of(out_channels)
        method = GraphSource.method if source is None else source.method
        self.estimator = resolve_estimator(estimator, normalizer, method)
        wide = heads * out_channels
        if edge_dim is not None:
            edge_dim = checks.integer("edge_dim", edge_dim, 1, "It is the number of features of an edge.")
        sizes = {"in_channels": max(pair), "out_channels": out_channels, "heads": heads, "edge_dim": edge_dim or 0}
        checks.parameters(sizes, wide * (2 * max(pair[0], 1) + max(pair[1], 1) + sizes["edge_dim"]))
        self.in_channels = pair if isinstance(in_channels, tuple | list) else pair[0]
        self.out_channels, self.heads, self.concat = out_channels, heads, concat
        self.is_causal, self.dropout, self.scale = is_causal, dropout, out_channels**-0.5
        self.normalizer = Entmax(heads) if normalizer == "entmax" else normalizer
        self.source, self.score_bias, self.rotary = source, score_bias, rotary
        self.auxiliary_losses = AuxiliaryLosses()
        self.lin_key = Linear(pair[0], wide, bias=bias)
        self.lin_query = Linear(pair[1], wide, bias=bias)
        self.lin_value = Linear(pair[0], wide, bias=bias)
        if edge_dim is not None and rotary is not None:
            raise ValueError(
                "Expected no 'rotary' with an 'edge_dim' (got both). Edge features have no position to rotate by: "
                "give the layer one of them."
            )
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, wide, bias=False)

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's default generator."""
        super().reset_parameters()
        lins = (self.lin_key, self.lin_query, self.lin_value, self.lin_edge)
        for module in (*lins, self.source, self.score_bias, self.normalizer):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    @overload
    def forward(self, x: OneOrTwo, edge_index: Adjacency | None = None, *, return_graph: Literal[True],
                return_choice: Literal[False] = False, return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> tuple[Tensor, AttentionGraph]: ...  # fmt: skip
    @overload
    def forward(self, x: OneOrTwo, edge_index: Adjacency | None = None, *, return_graph: Literal[False] = False,
                return_choice: Literal[True], return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> tuple[Tensor, Choice]: ...  # fmt: skip
    @overload
    def forward(self, x: OneOrTwo, edge_index: Adjacency | None = None, *, return_graph: Literal[False] = False,
                return_choice: Literal[False] = False, return_attention_weights: Literal[False] = False,
                **options: Unpack[CallOptions]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, x: OneOrTwo, edge_index: Adjacency | None = None, *, return_graph: bool = False,
                return_choice: bool = False, return_attention_weights: bool = False,
                **options: Unpack[CallOptions]) -> Any: ...  # fmt: skip
    def forward(
        self,
        x: OneOrTwo,
        edge_index: Adjacency | None = None,
        *,
        edge_attr: Tensor | None = None,
        edge_head: Tensor | None = None,
        ptr: OneOrTwo | None = None,
        batch: OneOrTwo | None = None,
        positions: OneOrTwo | None = None,
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
            edge_attr: Features of the edges of ``edge_index``, ``[E, D]`` with D the ``edge_dim`` of the layer, in the
                order of its edges. If heads share the edges, they share the features.
            edge_head: Head of each edge of ``edge_index``, ``[E]`` int64. None: all heads share the edges.
            ptr: Offsets of the sequences, ``[B+1]`` int64 or a list of ints, or the pair (keys, queries). None: those
                of the graph, or one sequence.
            batch: Instead of ``ptr``, the sequence number of each token, ``[N]``, sorted.
            positions: Position of each token for ``rotary``, ``[N]``, or the pair (keys, queries). None: counted from 0
                in each sequence.
            seed: Fixes the graph that the source draws, and the dropout. None: in evaluation mode :attr:`eval_seed`, so
                that calls repeat, and in training a number of torch's default generator. While attention is dense, at a
                target density of 1 or with the pattern :func:`~sbm_pyg.sources.patterns.full`, that generator always
                draws the dropout. In training, pass a different seed at each step: running means count calls with equal
                seeds as one step.
            sequence_ids: Number of each sequence, ``[B]``; see :func:`~sbm_pyg.sample_edges`. With ``seed``, a sequence
                gets the same graph in any batch. Dropout depends on the position of the sequence in the batch, and the
                noise of "concrete" on the whole batch.
            return_graph: Also return the :class:`AttentionGraph`.
            return_choice: Also return the :class:`Choice`: the graph and its probabilities.
            return_attention_weights: Also return ``(edge_index, alpha)``, the weights before dropout. As in PyG layers,
                an adjacency is returned unchanged, with ``alpha`` ``[E, H]`` in the order of its edges. A sparse
                adjacency gets ``alpha`` as its values; a ``SparseTensor`` is returned alone. With ``edge_head``, and
                over a graph, ``alpha`` is ``[E]``.

        Returns:
            The output, or a tuple of output, graph, choice and attention weights, without those not requested.

        Raises:
            TypeError: The tokens are of another type than the layer.
            ValueError: Shapes do not fit, there is neither a graph nor a source, an explainer is active and
                ``edge_index`` is not its own, or edge features are passed without ``edge_dim``, without a graph of
                tokens, or with repeated edges.
        """
        x_key, x_query = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
        for tokens, lin in ((x_key, self.lin_key), (x_query, self.lin_query)):
            check_tokens(tokens, lin)
        query, key, value = (
            lin(tokens).view(-1, self.heads, self.out_channels).transpose(0, 1).contiguous()
            for lin, tokens in ((self.lin_query, x_query), (self.lin_key, x_key), (self.lin_value, x_key))
        )  # [H, N, C]
        return self.attend(
            query, key, value, edge_index, bipartite=x_key is not x_query, edge_attr=edge_attr, edge_head=edge_head,
            ptr=ptr, batch=batch, positions=positions, seed=seed, sequence_ids=sequence_ids,
            returns=Returns(return_graph, return_choice, return_attention_weights),
        )  # fmt: skip

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, edge_index: Adjacency | None = None, *,
        bipartite: bool = False, is_causal: bool | None = None,
        edge_filter: Callable[[AttentionGraph], Tensor] | None = None, edge_attr: Tensor | None = None,
        edge_head: Tensor | None = None, ptr: OneOrTwo | None = None, batch: OneOrTwo | None = None,
        positions: OneOrTwo | None = None, seed: int | None = None, sequence_ids: Tensor | None = None,
        returns: Returns = OUTPUT_ONLY,
    ) -> Any:  # fmt: skip
        """Attend with given queries, keys and values, for models with their own projections.

        Other arguments are those of :meth:`forward`.

        Args:
            query, key, value: ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
            bipartite: Queries and keys are different tokens, even if N = M.
            is_causal: Whether this call is causal. None: as the layer is.
            edge_filter: Function from the graph to a mask ``[E]`` bool of the edges to keep.
            returns: Extra outputs.
        """
        is_causal = self.is_causal if is_causal is None else is_causal
        checks.flag("is_causal", is_causal, CAUSAL)
        checks.flag("bipartite", bipartite, "If True, queries and keys are different tokens.")
        self._check_call(query, key, value, edge_index, edge_filter, edge_head, sequence_ids, returns)
        if edge_attr is not None or self.lin_edge is not None:
            self._check_edge_attr(edge_attr, edge_index, value)
        limit = partial(drop_forbidden_edges, is_causal=is_causal, edge_filter=edge_filter)
        sides = (edge_index, edge_head, ptr, batch, positions)
        call = self._choose_graph(query, key, value, *sides, bipartite, is_causal, limit, seed, sequence_ids)
        dense_loss = None if call.choice.is_stored else self.estimator.dense_loss(call)
        needs_edges = edge_filter is not None or returns.attention_weights or self._needs_edges
        if needs_edges and not call.choice.is_stored:
            call = replace(call, choice=call.choice.stored())
        dropout = self.dropout if self.training else 0.0
        out, weights = self._attend_densely(call, dropout), None
        if out is None:
            out, weights, call = self._attend_over_edges(
                call, edge_index, edge_head, edge_attr, dropout, returns.attention_weights
            )
        out = self._train_source(out, call, dense_loss)
        return self._pack_outputs(out, call.choice, weights, returns)

    def _choose_graph(
        self, query: Tensor, key: Tensor, value: Tensor, edge_index: Adjacency | None, edge_head: Tensor | None,
        ptr: OneOrTwo | None, batch: OneOrTwo | None, positions: OneOrTwo | None, bipartite: bool, is_causal: bool,
        limit: Callable[[Any], Any], seed: int | None, sequence_ids: Tensor | None,
    ) -> AttentionCall:  # fmt: skip
        """Rotate queries and keys, and take the given graph or let the source choose one."""
        seed = draw_seed(self._default_seed(query, key, edge_index) if seed is None else seed)
        tokens, score_bias = None, self._score_bias
        if edge_index is None:
            ptrs = resolve_sides(query.size(1), key.size(1), ptr, batch, query.device)
            tokens = Tokens._trusted(query, key, *ptrs, bipartite, is_causal, seed, sequence_ids)
            query, key = self._rotate(query, key, *ptrs, positions)
            choice = self._choose(tokens, query, key)
        else:
            sizes = (query.size(1), key.size(1), self.heads)
            choice = Choice(AttentionGraph.over(edge_index, *sizes, edge_head=edge_head, ptr=ptr, batch=batch))
            ptrs = choice.graph.query_ptr, choice.graph.key_ptr
            checks.same_device("query", query, edge_index=ptrs[0])
            query, key = self._rotate(query, key, *ptrs, positions)
        if self._bias_is_product:  # and so the scores of wider queries and keys
            of_query, of_key, _ = self._bias_factors(query, key, *ptrs)
            query = torch.cat([query, (of_query / self.scale).to(query.dtype)], -1)
            key, score_bias = torch.cat([key, of_key.to(key.dtype)], -1), _no_bias
        return AttentionCall(
            query, key, value, choice, None, self.scale, limit, score_bias, seed, sequence_ids, self.training, tokens,
            self.source,
        )  # fmt: skip

    def _train_source(self, out: Tensor, call: AttentionCall, dense_loss: Tensor | None) -> Tensor:
        """Add the loss that trains the source, if it has one, to the backward pass of the output."""
        loss = dense_loss
        if loss is None and call.choice.is_stored and call.choice.probability is not None:
            loss = self.estimator.auxiliary_loss(call)
        is_needed = dense_loss is None or self.estimator.needs_loss
        return self.auxiliary_losses.add(out, loss, type(self.estimator).__name__, is_needed)

    def _default_seed(self, query: Tensor, key: Tensor, edge_index: Adjacency | None) -> int | None:
        """Seed of a call without ``seed``, or None if torch's generator is to draw the seed."""
        if not self.training and self.eval_seed is not None:
            return self.eval_seed
        if edge_index is None:
            require_unbatched(query=query, key=key)  # before torch's error about random numbers
            return None
        return None if self.training and self.dropout > 0 else 0

    def _attend_densely(self, call: AttentionCall, dropout: float) -> Tensor | None:
        """The output ``[N, H, C']`` over all pairs by torch's kernel, or None if the edges of the graph are stored."""
        if call.choice.is_stored:
            return None
        query, key, value = call.query, call.key, call.value
        assert call.tokens is not None
        bias: Any = getattr(self.score_bias, "dense_bias", None)
        if self._bias_is_product:
            bias = None
        elif hasattr(self.score_bias, "factors"):
            bias = self._bias_factors(query, key, call.tokens.query_ptr, call.tokens.key_ptr)
        out = call.choice.attend(query, key, value, scale=self.scale, dropout=dropout, bias=bias)
        return None if out is None else out.transpose(0, 1)

    def _pack_outputs(self, out: Tensor, choice: Choice, weights: Any, returns: Returns) -> Any:
        """Pack the output ``[N, H, C']`` and the requested extras in the documented order."""
        out = owned(out.flatten(1), self.heads) if self.concat else out.mean(1)
        extras: list[Any] = [choice.graph] if returns.graph else []
        extras += [choice] if returns.choice else []
        extras += [weights] if returns.attention_weights else []
        return (out, *extras) if extras else out

    @property
    def _needs_edges(self) -> bool:
        """True if dense attention needs stored edges, since torch has no dense kernel for an option of the layer."""
        has_dense_form = any(hasattr(self.score_bias, method) for method in ("dense_bias", "factors"))
        lacks_bias = self.score_bias is not None and not has_dense_form
        return self._edgewise or self.normalizer != "softmax" or lacks_bias

    def _bias_factors(self, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor) -> BiasFactors:
        """Call the method ``factors`` of the score bias."""
        bias: Any = self.score_bias
        factors: BiasFactors = bias.factors(query, key, query_ptr, key_ptr)
        return factors

    @property
    def _bias_is_product(self) -> bool:
        """True if the score bias is an inner product, which extra channels of queries and keys can express."""
        return getattr(self.score_bias, "is_product", False) and self.lin_edge is None

    def _rotate(
        self, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, positions: OneOrTwo | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions if the layer has a ``rotary``."""
        if self.rotary is None:
            if positions is not None:
                raise ValueError(
                    "Expected no 'positions' (got some, and the layer has no 'rotary'). Leave them out, or give the "
                    "layer a Rotary."
                )
            return query, key
        if isinstance(positions, tuple | list) and len(positions) != 2:
            raise ValueError(
                f"Expected 'positions' to be [N], or a pair for keys and queries (got {len(positions)} of them). Leave "
                "it out to count them."
            )
        if positions is None:
            of_key, of_query = count_positions(key_ptr, key.size(1)), count_positions(query_ptr, query.size(1))
        else:
            of_key, of_query = positions if isinstance(positions, tuple | list) else (positions, positions)
        return self.rotary(query, of_query), self.rotary(key, of_key)

    def _choose(self, tokens: Tokens, query: Tensor, key: Tensor) -> Choice:
        """The choice of the source, expanded to the heads of the layer; ``query`` and ``key`` are rotated."""
        if self.source is None:
            raise ValueError(
                "Expected 'edge_index' (got None, and the layer has no source). Pass a graph, or give the layer a "
                "source."
            )
        if self.rotary is not None and self.rotary.for_source:
            tokens = tokens.with_vectors(query, key)
        choice = self.source(tokens).expand(self.heads)
        if isinstance(self.source, DensitySource):
            self.source._warn_of_few_keys(tokens)
        return choice

    def __repr__(self) -> str:
        source = "" if self.source is None else f", source={type(self.source).__name__}"
        source += "" if self.normalizer == "softmax" else f", normalizer={self.normalizer!r}"
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}{source})"


class SBMAttentionConv(AttentionConv):
    r"""Attention whose heads each sample their graph from a stochastic block model of their own queries and keys.

    This layer is an :class:`AttentionConv` with an :class:`~sbm_pyg.SBMSource` around an :class:`~sbm_pyg.SBMHead`. The
    parameters of the head learn from the loss through an estimator; a :class:`~sbm_pyg.Sparsifier` trains layers at a
    low density. Cost O(N C_in H C + NKC + E (C + K)).

    Sixteen consecutive queries share their draws, which is two to five times as fast as independent draws, and trains
    as well. For other options of the block model and of its draws, such as blocks of tokens, use
    :func:`~sbm_pyg.make_attention`, or an :class:`AttentionConv` with a source that you construct::

        make_attention("sbm", 32, 16, 2, block_size=16, degree_corrected=True)
        AttentionConv(32, 16, 2, SBMSource(SBMHead(16, 2, degree_corrected=True), block_size=16))

    Args:
        in_channels: Channels of the tokens, or of the pair (keys, queries), as PyG orders bipartite features; -1 to
            infer.
        out_channels: Channels per head C.
        heads: Number of heads H.
        num_clusters: Number of communities K of each head's block model.
        target_density: Density that the pairs of each head compete for, in (0, 1], see :class:`~sbm_pyg.SBMSource`; 1
            is dense attention. None: probabilities are those of the block model.
        window: Each token always attends to tokens at this distance or less, in addition to its sampled keys. 0: each
            token attends to itself, so that no query is without a key. None: no edge is forced, as in the paper.
        estimator: How the loss reaches the block model: an :class:`~sbm_pyg.training.estimators.Estimator`, or its
            name. ``"local"`` uses the effect of each edge on the loss; ``"distill"`` adds dense attention on some rows;
            ``"mask"`` follows the authors' code, ``"paper"`` eq. 9; ``"relaxed"`` and ``"concrete"`` use a soft mask
            over all pairs, O(NM); ``"none"`` trains nothing. None: ``"local"``, or ``"mask"`` if the normalizer is not
            softmax. With ``"mask"`` and ``"paper"``, 0.01 is added to all probabilities in training, as in the paper.
        is_causal, normalizer, score_bias, rotary, dropout, concat, bias: As :class:`AttentionConv`.

    Raises:
        TypeError, ValueError: As :class:`AttentionConv`, :class:`~sbm_pyg.SBMHead` and :class:`~sbm_pyg.SBMSource`.

    Example:
        >>> import torch
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4)
        >>> x, ptr = torch.randn(30, 16), torch.tensor([0, 10, 30])  # two sequences
        >>> out, choice = conv(x, ptr=ptr, seed=0, return_choice=True)
        >>> out.shape, choice.graph.density.shape, choice.probability
        (torch.Size([30, 16]), torch.Size([2, 2]), SBM(2 sequences, 2 heads, 30 queries, 30 keys, 4 blocks))

    Reference: Cho et al., "Transformers meet Stochastic Block Models", NeurIPS 2022. As in the paper, there is no
    output projection. Unlike in the authors' code, scores are scaled, the softmax runs over sampled edges only,
    evaluation adds no exploration, and each token attends to itself unless ``window=None``.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        num_clusters: int = 64,
        *,
        target_density: float | None = None,
        window: int | None = 0,
        estimator: Estimator | str | None = None,
        is_causal: bool = False,
        normalizer: str | Entmax = "softmax",
        score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor] | None = None,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        concat: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads, estimator=estimator, is_causal=is_causal, normalizer=normalizer,
            score_bias=score_bias, rotary=rotary, dropout=dropout, concat=concat, bias=bias,
        )  # fmt: skip
        self.source = block_model(
            self.out_channels, self.heads, num_clusters, self.estimator, target_density=target_density, window=window
        )


def _no_bias(query: Tensor, key: Tensor, graph: AttentionGraph) -> None:
    """Score bias of a call whose scores already include the bias: None for all edges."""


def block_model(
    channels: int,
    heads: int,
    num_clusters: int = 64,
    estimator: Estimator | None = None,
    *,
    exploration: float | None = None,
    row_group: int | None = None,
    **options: Any,
) -> SBMSource:
    """The block model of an attention layer, with the options of :class:`SBMHead` and :class:`SBMSource`.

    By default the estimator sets the exploration, and 16 queries share their draws if ``method`` supports it. With
    ``parameterization="linear"`` the head is a :class:`~sbm_pyg.sources.linear_sbm.LinearSBMHead`.
    """
    of_head = {name: options.pop(name) for name in HEAD_OPTIONS & {*options}}
    if exploration is None and estimator is not None:
        exploration = estimator.exploration
    if row_group is None:
        is_bernoulli, has_tokens = options.get("method", "bernoulli") == "bernoulli", options.get("block_size", 1) == 1
        row_group = 16 if is_bernoulli and has_tokens else 1
    kind: Any = SBMHead
    if of_head.get("parameterization") == "linear":
        kind = LinearSBMHead
        del of_head["parameterization"]
    head = kind(channels, heads, num_clusters, **of_head)
    return SBMSource(head, exploration=exploration, row_group=row_group, **options)
