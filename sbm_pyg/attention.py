"""The one attention layer: message passing from keys to queries over a graph that it samples, or that it is given.

In: tokens, and any graph or none. Out: tokens. Not here: how graphs are made and how edges are computed; the layer joins the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse, softmax
from torch_geometric.utils.sparse import set_sparse_value

from . import estimators, ops, patterns
from .graph import AttentionGraph, edge_list
from .ops import checks
from .ragged import resolve_ptr
from .sampling import draw_seed, sample_edges
from .sbm import SBM, SBMHead

__all__ = ["SBMAttentionConv"]

ENTMAX_ALPHA = {"entmax15": 1.5, "sparsemax": 2.0}


class SBMAttentionConv(MessagePassing):
    r"""Multi-head attention over the edges of a graph, by default one that each head samples for itself.

    Each head projects tokens to queries, keys and values. Without a graph, an :class:`~sbm_pyg.SBMHead` turns queries and keys into
    a stochastic block model, from which the head's own graph is sampled; its parameters learn through a straight-through estimator.
    Then, over the edges of each query alone,

    .. math:: x_i' = \Big\Vert_{h} \sum_{j \in \mathcal{N}_h(i)} \operatorname{softmax}_j\big(q_i^\top k_j / \sqrt{C}\big) \, v_j .

    A query without edges gives zeros. A token that no edge touches reaches no output and no gradient of another token, whatever it holds. The
    projections still see every token: NaN in one makes the gradients of their parameters NaN, as in every layer of torch. There is no padding: batches are ragged, as PyG's are. Cost O(N C_in H C + NKC + E (C + K)).

    Args:
        in_channels: Channels of the tokens, or of the pair (keys, queries), as PyG orders bipartite features; -1 to infer.
        out_channels: Channels per head C.
        heads: Number of heads H.
        num_blocks: Number of blocks K of each head's SBM. None: no SBM; every call needs a graph.
        concat: Concatenate the heads (H*C output channels), or average them (C).
        bias: Biases in the three projections.
        clusters: How the SBM's clusters start, ``"kaiming"`` or ``"orthogonal"``; see :class:`~sbm_pyg.SBMHead`.
        sbm_options: Further keyword arguments of :class:`~sbm_pyg.SBMHead`, e.g. ``{"parameterization": "assortative"}``.
        estimator: What an edge's probability receives as its gradient: ``"local"``, the effect of that edge on the loss, over edges and
            probes; ``"mask"``, as the authors' code has it; ``"paper"``, eq. 9; ``"relaxed"`` or ``"concrete"``, which train on all pairs
            with a soft mask, O(NM), and sample in evaluation only; ``"none"``. None: ``"local"``, or ``"mask"`` where the normaliser is
            not softmax or the law not Bernoulli's, for which ``"local"`` is derived. See :mod:`sbm_pyg.estimators` and docs/learning.md.
        probes: With ``"local"``, expected number of pairs per query and head that are looked at beside the edges, keys at equal distances
            from a random start.
        exploration: Added to every edge probability in training only, in [0, 1]. None: 0.01, as in the paper, or 0 with ``"local"``, whose
            probes explore without adding edges.
        method: Law of the sampled graph, ``"bernoulli"`` or ``"fastrg"``; see :func:`~sbm_pyg.sample_edges`.
        budget: Largest expected number of sampled keys per query and head; None for no limit.
        self_loops: Each token always attends to itself.
        window: Each token always attends to tokens at this distance or less (and so to itself).
        normalizer: ``"softmax"``, ``"entmax15"`` or ``"sparsemax"``; the last two run edge by edge through :meth:`message`.
        score_bias: Callable ``(query [H, N, C], key [H, M, C], graph) -> [E]`` added to the scaled scores, or None.
        dropout: Probability that an attention weight is dropped in training.
        **kwargs: Of :class:`torch_geometric.nn.MessagePassing`; weights sum to 1, so ``aggr`` is ``"add"``, and keys are sources.

    Raises:
        ValueError: An option is unknown or out of range, or two do not go together.

    Shapes:
        - tokens ``[N, C_in]``, or a pair of keys ``[M, C_in]`` and queries ``[N, C_in']``;
        - output ``[N, H*C]``, or ``[N, C]`` with ``concat=False``.

    Example:
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_blocks=4)
        >>> x, ptr = torch.randn(30, 16), torch.tensor([0, 10, 30])  # two sequences
        >>> out, graph = conv(x, ptr=ptr, seed=0, return_graph=True)
        >>> out.shape, graph.density.shape
        (torch.Size([30, 16]), torch.Size([2, 2]))
        >>> conv(x, patterns.window(30, 2)).shape  # the same layer on a given graph
        torch.Size([30, 16])

    Reference: Cho et al., "Transformers meet Stochastic Block Models", NeurIPS 2022. As there, no output projection belongs to the
    layer. Unlike their code: scores are scaled, the softmax sees sampled edges only, evaluation explores nothing.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        num_blocks: int | None = 128,
        *,
        concat: bool = True,
        bias: bool = True,
        clusters: str = "kaiming",
        sbm_options: Mapping[str, Any] | None = None,
        estimator: str | None = None,
        probes: float = 16.0,
        exploration: float | None = None,
        method: str = "bernoulli",
        budget: float | None = None,
        self_loops: bool = False,
        window: int | None = None,
        normalizer: str = "softmax",
        score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor] | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        for name, fixed in (("aggr", ("add", "sum")), ("flow", ("source_to_target",)), ("decomposed_layers", (1,))):
            if kwargs.setdefault(name, fixed[0]) not in fixed:
                raise ValueError(
                    f"Expected '{name}' to be {fixed[0]!r} (got {kwargs[name]!r}). Attention is a weighted sum from keys to queries."
                )
        super().__init__(node_dim=0, **kwargs)
        if estimator is None:
            estimator = "local" if normalizer == "softmax" and method == "bernoulli" else "mask"
        if exploration is None:
            exploration = 0.0 if estimator == "local" else 0.01
        for name, size, least in (
            ("heads", heads, 1),
            ("out_channels", out_channels, 1),
            ("window", window, 0),
            ("num_blocks", num_blocks, 1),
        ):
            if size is not None or name in ("heads", "out_channels"):
                checks.integer(name, size, least, "See the docstring of SBMAttentionConv.")
        pair = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
        if len(pair) != 2 or not all(isinstance(width, int) and (width == -1 or width > 0) for width in pair) or True in pair:
            raise ValueError(
                f"Expected 'in_channels' to be a number of channels, -1 to infer it, or a pair for keys and queries (got {in_channels!r}). It is the width of the tokens."
            )
        if score_bias is not None and not callable(score_bias):
            raise TypeError(
                f"Expected 'score_bias' to be a callable (query, key, graph) -> [E] (got {type(score_bias).__name__}). Wrap a tensor in a function."
            )
        choices = {
            "estimator": (estimator, estimators.ESTIMATORS),
            "method": (method, ops.METHODS),
            "normalizer": (normalizer, ("softmax", *ENTMAX_ALPHA)),
        }
        for name, (choice, options) in choices.items():
            if choice not in options:
                raise ValueError(f"Expected '{name}' to be one of {[*options]} (got {choice!r}). See the docstring of SBMAttentionConv.")
        checks.number("exploration", exploration, "[0, 1]", "It is added to every edge probability in training.")
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        checks.number("probes", probes, "[0, inf]", "It is an expected number of pairs per query and head.")
        if budget is not None:
            checks.number("budget", budget, "(0, inf]", "It is an expected number of keys per query and head; None sets no limit.")
        if normalizer != "softmax" and estimator in ("local", *estimators.RELAXATIONS):
            raise ValueError(
                f"Expected 'estimator' to be 'mask', 'paper' or 'none' with normalizer={normalizer!r} (got {estimator!r}). The others are derived for softmax."
            )
        if estimator == "local" and method != "bernoulli":
            raise ValueError(
                f"Expected 'estimator' other than 'local' with method={method!r} (got 'local'). It is derived for 'bernoulli'."
            )
        width, wide = max(*pair, 1), heads * out_channels
        name, way_out = "in_channels" if width > wide else "heads", "Take fewer heads, or narrower ones."
        checks.memory(name, width * wide, 4, torch.device("cpu"), way_out, "parameters")
        if sbm_options is not None and not isinstance(sbm_options, Mapping):
            raise TypeError(
                f"Expected 'sbm_options' to be a dict of arguments of SBMHead (got {type(sbm_options).__name__}). Name each option."
            )
        self.in_channels, self.out_channels, self.heads, self.num_blocks, self.concat = (
            in_channels,
            out_channels,
            heads,
            num_blocks,
            concat,
        )
        self.estimator, self.probes, self.exploration, self.method, self.budget = estimator, probes, exploration, method, budget
        self.temperature = 1.0  # of the "concrete" estimator; a trainer anneals it
        self.self_loops, self.window, self.normalizer, self.score_bias, self.dropout = (self_loops, window, normalizer, score_bias, dropout)
        self.scale = out_channels**-0.5
        self._alpha: Tensor | None = None  # where PyG's AttentionExplainer looks for the weights, from a hook of `message`
        key_channels, query_channels = pair
        self.lin_key = Linear(key_channels, heads * out_channels, bias=bias)
        self.lin_query = Linear(query_channels, heads * out_channels, bias=bias)
        self.lin_value = Linear(key_channels, heads * out_channels, bias=bias)
        self.sbm = None if num_blocks is None else SBMHead(out_channels, heads, num_blocks, clusters, **(sbm_options or {}))

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's default generator."""
        super().reset_parameters()
        for module in (self.lin_key, self.lin_query, self.lin_value, self.sbm):
            if module is not None:
                module.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: AttentionGraph | Tensor | SparseTensor | None = None,
        *,
        edge_head: Tensor | None = None,
        ptr: Tensor | tuple[Tensor, Tensor] | None = None,
        batch: Tensor | tuple[Tensor, Tensor] | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_graph: bool = False,
        return_sbm: bool = False,
        return_attention_weights: bool = False,
    ) -> Any:
        """Attend.

        Args:
            x: Tokens ``[N, C_in]``, or the pair (keys, queries).
            edge_index: The graph: an :class:`AttentionGraph` with H heads or one, any PyG adjacency (all heads share it; repeated edges
                count once), or None to sample one per head.
            edge_head: Head of each edge of ``edge_index``, ``[E]`` int64, if heads do not share the edges.
            ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: those of the graph, or one sequence.
            batch: The same as a sequence number per token, ``[N]``.
            seed: Fixes the sampled graph and the dropout; from torch's default generator if None.
            streams: Number of each sequence's random stream, ``[B]``, where a graph is sampled; see :func:`~sbm_pyg.sample_edges`. Graphs and
                probes follow it. Dropout and the noise of the estimator "concrete" count the edges of the whole batch.
            return_graph: Also return the :class:`AttentionGraph`.
            return_sbm: Also return the :class:`SBM` it was sampled from (None with a given graph).
            return_attention_weights: Also return ``(edge_index, alpha)``, the weights before dropout. As PyG layers do, an adjacency comes
                back itself, and ``alpha`` ``[E, H]`` in the order of its edges (a sparse one with ``alpha`` as its values; a ``SparseTensor`` comes alone); with ``edge_head``,
                and over the edges of all heads of a graph, ``alpha`` is ``[E]``.

        Returns:
            The output, or a tuple of it and what was asked for, in the order graph, SBM, attention weights.

        Raises:
            ValueError: Shapes do not fit, there is neither a graph nor an SBM, or an explainer is at work and the edges are not its own.
        """
        x_key, x_query = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
        for tokens, lin in ((x_key, self.lin_key), (x_query, self.lin_query)):
            if isinstance(tokens, Tensor):
                checks.dense("x", tokens)
            else:
                raise TypeError(f"Expected 'x' to be a tensor, or a pair of keys and queries (got {type(tokens).__name__}). Convert it.")
            if tokens.dim() != 2:
                raise ValueError(
                    f"Expected 'x' to be [N, C_in] (got {list(tokens.shape)}). Batches are ragged: `sbm_pyg.unpad` takes padding out and gives 'ptr', and "
                    "SBMMultiheadAttention takes padded tokens."
                )
            width = getattr(lin, "in_channels", -1)
            if not torch.compiler.is_compiling() and width not in (-1, tokens.size(1)):
                raise ValueError(
                    f"Expected 'x' to be [N, {width}], as 'in_channels' says (got {list(tokens.shape)}). A pair is (keys, queries), as in PyG."
                )
            weight = getattr(lin, "weight", None)
            if not tokens.is_floating_point():
                raise TypeError(f"Expected 'x' to be floating point (got {tokens.dtype}). Embed token numbers first.")
            if isinstance(weight, Tensor) and tokens.dtype != weight.dtype and not torch.is_autocast_enabled(tokens.device.type):
                raise TypeError(
                    f"Expected 'x' to be {weight.dtype}, as the layer's parameters are (got {tokens.dtype}). Convert it with `.to`, or run under torch.autocast."
                )
        query, key, value = (
            lin(tokens).view(-1, self.heads, self.out_channels).transpose(0, 1).contiguous()
            for lin, tokens in ((self.lin_query, x_query), (self.lin_key, x_key), (self.lin_value, x_key))
        )  # [H, N, C]
        return self.attend(
            query,
            key,
            value,
            edge_index,
            bipartite=x_key is not x_query,
            edge_head=edge_head,
            ptr=ptr,
            batch=batch,
            seed=seed,
            streams=streams,
            return_graph=return_graph,
            return_sbm=return_sbm,
            return_attention_weights=return_attention_weights,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_index: AttentionGraph | Tensor | SparseTensor | None = None,
        *,
        bipartite: bool = False,
        edge_filter: Callable[[AttentionGraph], Tensor] | None = None,
        edge_head: Tensor | None = None,
        ptr: Tensor | tuple[Tensor, Tensor] | None = None,
        batch: Tensor | tuple[Tensor, Tensor] | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_graph: bool = False,
        return_sbm: bool = False,
        return_attention_weights: bool = False,
    ) -> Any:
        """What :meth:`forward` does after the projections, for models that have their own.

        Args:
            query: ``[H, N, C]``.
            key: ``[H, M, C]``.
            value: ``[H, M, C']``.
            edge_index: The graph, or None to sample one per head.
            bipartite: Queries and keys are different tokens, even where N = M.
            edge_filter: From a graph to the mask ``[E]`` bool of the edges to keep, e.g. for causality; not together with an adjacency.

        The other arguments and the results are those of :meth:`forward`.
        """
        explained = self._check_explained(edge_index)
        checks.tensors(query=query, key=key, value=value)
        checks.shape("query", query, (self.heads, None, self.out_channels), "[H, N, C]", "Heads come first.")
        checks.shape("key", key, (self.heads, None, self.out_channels), "[H, M, C]", "Heads come first.")
        checks.shape("value", value, (self.heads, key.size(1), None), "[H, M, C']", "It has the heads and tokens of 'key'.")
        checks.same_device("query", query, key=key, value=value)
        if edge_filter is not None and not callable(edge_filter):
            raise TypeError(
                f"Expected 'edge_filter' to be a callable graph -> [E] (got {type(edge_filter).__name__}). Wrap a mask in a function."
            )
        key_ptr, query_ptr = self._ptr(key.size(1), query.size(1), ptr, batch, query.device)
        drop = self.dropout if self.training else 0.0
        if seed is None and edge_index is not None and drop == 0:
            seed = 0  # nothing is drawn
        seed = draw_seed(seed)

        sbm, forced, place = None, None, None
        if edge_head is not None and not isinstance(edge_index, Tensor):
            raise ValueError(
                f"Expected 'edge_head' with an 'edge_index' tensor alone (got it with {type(edge_index).__name__}). An AttentionGraph holds its heads."
            )
        if streams is not None and edge_index is not None:
            raise ValueError(
                "Expected no 'streams' with a given 'edge_index' (got both). They number the random graphs that the layer samples, and it samples none."
            )
        if edge_index is None:
            graph, sbm, forced = self._sample(query, key, query_ptr, key_ptr, not bipartite, seed, streams)
        elif isinstance(edge_index, AttentionGraph):
            graph = edge_index.expand(self.heads)
            if (graph.num_queries, graph.num_keys) != (query.size(1), key.size(1)):
                raise ValueError(
                    f"Expected 'edge_index' over N = {query.size(1)} queries and M = {key.size(1)} keys (got {graph}). Build the graph with the `ptr` of these tokens."
                )
            if not (ptr is None and batch is None) and not graph.same_offsets(query_ptr, key_ptr):
                raise ValueError(
                    f"Expected 'edge_index' over the sequences of 'ptr' or 'batch' (got {graph}). Build the graph with the `ptr` of these tokens, or it may "
                    "join what the offsets keep apart."
                )
        else:
            edges, heads = edge_list(edge_index), 1 if edge_head is None else self.heads
            graph = AttentionGraph.from_edge_index(
                edges, query.size(1), key.size(1), edge_head=edge_head, heads=heads, query_ptr=query_ptr, key_ptr=key_ptr
            )
            if explained or return_attention_weights:
                place = graph.find(edges, edge_head)
            graph = graph.expand(self.heads)
        if edge_filter is not None:
            if place is not None:
                raise ValueError(
                    "Expected no 'edge_filter' with an adjacency whose weights are asked for (got both). Filter the adjacency."
                )
            kept = edge_filter(graph)
            graph, forced = graph.select(kept), None if forced is None else forced[kept]
        score_bias = self._biased(query, key, graph)
        gate = None
        if sbm is not None and self.estimator in estimators.GATE_FORM and torch.is_grad_enabled():
            gate = estimators.straight_through(sbm, graph, forced)
        if sbm is not None and self._relaxed:
            soft = self._relaxation(sbm, graph, seed)
            soft = soft if forced is None else soft.masked_fill(forced, 0)
            score_bias = soft if score_bias is None else score_bias + soft

        weights: list[Tensor] = []  # what `message` finds them to be
        if explained and edge_head is None:
            assert isinstance(edge_index, Tensor)
            assert place is not None
            out = self._propagate_shared(edge_index, place, graph, query, key, value, score_bias, drop, seed, weights)
        elif explained or self._hooks or not self.fuse or self.normalizer != "softmax":
            out = self._propagate_rows(graph, place if explained else None, query, key, value, gate, score_bias, drop, seed, weights)
        else:
            out = self._fused(graph, query, key, value, gate, score_bias, drop, seed)
        if sbm is not None and self.estimator == "local" and torch.is_grad_enabled():
            out = self._local_expectation(out, query, key, value, sbm, graph, forced, score_bias, edge_filter, seed, streams)
        out = out.flatten(1) if self.concat else out.mean(1)
        if self.heads == 1 and self.concat and out.requires_grad:
            out = out.clone()  # as the kernel keeps its own, which an activation in place would overwrite

        results: list[Any] = [out]
        if return_graph:
            results.append(graph)
        if return_sbm:
            results.append(sbm)
        if return_attention_weights:
            results.append(self._weights(edge_index, edge_head, place, graph, query, key, score_bias, weights, ordered=explained))
        self._alpha = None
        return results[0] if len(results) == 1 else tuple(results)

    # ---------------------------------------------------------------- the graph

    @property
    def _message_hooks(self) -> bool:
        return bool(self._message_forward_pre_hooks or self._message_forward_hooks)

    @property
    def _hooks(self) -> bool:
        """Whether anybody looks at a step of PyG's propagation, which the fused path does not take."""
        others = (
            self._propagate_forward_pre_hooks,
            self._propagate_forward_hooks,
            self._aggregate_forward_pre_hooks,
            self._aggregate_forward_hooks,
        )
        return self._message_hooks or any(others)

    def _biased(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor | None:
        """What ``score_bias`` adds to the score of each edge, ``[E]``."""
        bias = None if self.score_bias is None else self.score_bias(query, key, graph)
        ops.checks.shape("score_bias", bias, graph.col.shape, "[E]", "It returns one number per edge of the graph that it is given.")
        return bias

    def _check_explained(self, edge_index: Any) -> bool:
        """Whether an explainer is at work (it masks messages, or hooks into them), which must then be over the edges that it knows."""
        explained = self.explain is True or (self.explain is None and self._message_hooks)
        if explained and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
            got = "None, so the layer would sample its own" if edge_index is None else type(edge_index).__name__
            raise ValueError(
                f"Expected 'edge_index' to be [2, E], the edges to explain (got {got}). Sample first, `graph = conv(x, return_graph=True)[1]`, and "
                "explain over `graph.edge_index` with `edge_head=graph.edge_head`; or leave the layer out with `conv.explain = False`."
            )
        return explained

    def _ptr(self, num_keys: int, num_queries: int, ptr: Any, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        for name, value in (("ptr", ptr), ("batch", batch)):
            if isinstance(value, tuple) and len(value) != 2:
                raise ValueError(f"Expected '{name}' to be a tensor, or a pair for keys and queries (got {len(value)} of them).")
        pairs = [value if isinstance(value, tuple) else (value, value) for value in (ptr, batch)]
        query_ptr = resolve_ptr(num_queries, pairs[0][1], pairs[1][1], device=device)
        if pairs[0][0] is pairs[0][1] and pairs[1][0] is pairs[1][1] and num_keys == num_queries:
            return query_ptr, query_ptr
        return resolve_ptr(num_keys, pairs[0][0], pairs[1][0], device=device), query_ptr

    def _sample(
        self, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, same: bool, seed: int, streams: Tensor | None
    ) -> tuple[AttentionGraph, SBM, Tensor | None]:
        """Graph, its model, and which edges are there whatever the model says (None: no edge)."""
        if self.sbm is None:
            raise ValueError(
                "Expected 'edge_index' (got None, and the layer has 'num_blocks' None). Pass a graph, or give the layer blocks to sample its own."
            )
        sbm: SBM = self.sbm(query, key, query_ptr, key_ptr)
        if self.budget is not None:
            sbm = sbm.limit(self.budget)
        if self._relaxed:
            graph = estimators.draw_probes(sbm, math.inf, seed=seed)[0]  # all pairs
        else:
            graph = sample_edges(  # p <= 1 in every parameterisation; clamp takes what low precision rounds above
                sbm, method=self.method, exploration=self._explored, clamp=True, seed=seed, streams=streams
            )
        forced = None
        if self.self_loops or self.window is not None:
            if not same:
                raise ValueError(
                    "Expected the same tokens as queries and keys with 'self_loops' or 'window' (got a pair). Union a pattern of your own and pass the graph."
                )
            graph, forced = graph.union(patterns.window(query.size(1), self.window or 0, ptr=query_ptr))
        return graph, sbm, forced

    @property
    def _explored(self) -> float:
        return self.exploration if self.training else 0.0

    # ---------------------------------------------------------------- gradients to the model

    @property
    def _relaxed(self) -> bool:
        return self.training and self.estimator in estimators.RELAXATIONS

    def _relaxation(self, sbm: SBM, graph: AttentionGraph, seed: int) -> Tensor:
        if self.estimator == "relaxed":
            return estimators.relaxed_bias(sbm, graph, self._explored)
        return estimators.concrete_bias(sbm, graph, self.temperature, seed=seed, exploration=self._explored)

    def _local_expectation(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sbm: SBM,
        graph: AttentionGraph,
        forced: Tensor | None,
        score_bias: Tensor | None,
        edge_filter: Callable[[AttentionGraph], Tensor] | None,
        seed: int,
        streams: Tensor | None,
    ) -> Tensor:
        """The output ``[N, H, C]`` with a gradient to the model."""
        probes, chance = estimators.draw_probes(sbm, self.probes, seed=seed, streams=streams)
        if edge_filter is not None:
            probes = probes.select(edge_filter(probes))
        probe_bias = None if score_bias is None else self._biased(query, key, probes)
        return estimators.local_expectation(
            out.transpose(0, 1), query, key, value, sbm, graph, probes, chance, bias=score_bias, probe_bias=probe_bias, forced=forced,
            scale=self.scale, exploration=self._explored,
        ).transpose(0, 1)  # fmt: skip

    # ---------------------------------------------------------------- attention over it

    def _fused(self, *arguments: Any) -> Tensor:
        """:meth:`message_and_aggregate` with the hooks that PyG has for it."""
        for before in self._message_and_aggregate_forward_pre_hooks.values():
            changed = before(self, arguments)
            arguments = arguments if changed is None else changed
        out = self.message_and_aggregate(*arguments)
        for after in self._message_and_aggregate_forward_hooks.values():
            changed = after(self, arguments, out)
            out = out if changed is None else changed
        return out

    def message_and_aggregate(
        self,
        graph: AttentionGraph,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None,
        score_bias: Tensor | None,
        dropout: float,
        seed: int,
    ) -> Tensor:
        """The fused path: one op over compressed rows; the same contract as :meth:`message` and a sum. Returns ``[N, H, C]``."""
        out, _ = ops.edge_attention(
            query,
            key,
            value,
            graph.rowptr,
            graph.col,
            gate,
            score_bias,
            self.scale,
            estimators.GATE_FORM.get(self.estimator, "score"),
            dropout,
            seed,
        )
        return out.transpose(0, 1)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        gate: Tensor | None,
        score_bias: Tensor | None,
        keep: Tensor | None,
        weights: list[Tensor],
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        """The meaning: weighted values of the edges, ``[E, H or 1, C]``; ``gate``, ``score_bias`` and ``keep`` are ``[E, H or 1]`` or None.

        Weights before dropout, ``[E, H or 1]``, are added to the list ``weights``.
        """
        logit = (query_i * key_j).sum(-1) * self.scale  # [E, H or 1]
        if gate is not None:
            logit = logit * gate if estimators.GATE_FORM[self.estimator] == "score" else logit + gate.log()
        if score_bias is not None:
            logit = logit + score_bias
        if self.normalizer == "softmax":
            alpha = _softmax(logit, index, ptr, size_i)
        else:
            columns = [
                ops.segment_entmax(column.contiguous(), index, num_nodes=size_i, alpha=ENTMAX_ALPHA[self.normalizer])
                for column in logit.unbind(1)
            ]
            alpha = torch.stack(columns, dim=1)
        weights.append(alpha)
        if self._message_hooks:
            self._alpha = alpha
        if keep is not None:
            alpha = alpha * keep
        return value_j * alpha[..., None]

    def _propagate_rows(
        self,
        graph: AttentionGraph,
        place: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None,
        score_bias: Tensor | None,
        dropout: float,
        seed: int,
        weights: list[Tensor],
    ) -> Tensor:
        """PyG's propagation with heads as separate nodes, for each head has its own edges; in the graph's order, or as ``place`` says."""
        row = graph.edge_row
        source = graph.edge_head * graph.num_keys + graph.col
        query, key, value = (tokens.flatten(0, 1)[:, None] for tokens in (query, key, value))  # [H*N, 1, C]
        edge = [None if weight is None else weight[:, None] for weight in (gate, score_bias, self._keep(graph, dropout, seed, value))]
        if place is not None:
            self._check_distinct(graph.num_edges, place)
            row, source = row[place], source[place]
            edge = [None if weight is None else weight[place] for weight in edge]
        size = (self.heads * graph.num_keys, self.heads * graph.num_queries)
        out = self.propagate(
            torch.stack([source, row]),
            query=(None, query),
            key=(key, None),
            value=(value, None),
            gate=edge[0],
            score_bias=edge[1],
            keep=edge[2],
            weights=weights,
            size=size,
        )
        return out.view(self.heads, graph.num_queries, -1).transpose(0, 1)

    def _propagate_shared(
        self,
        edge_index: Tensor,
        place: Tensor,
        graph: AttentionGraph,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_bias: Tensor | None,
        dropout: float,
        seed: int,
        weights: list[Tensor],
    ) -> Tensor:
        """PyG's propagation with heads as channels, over the caller's own edges in the caller's order: what explainers hook into."""
        self._check_distinct(graph.num_edges // self.heads, place)
        edge = [
            None if weight is None else weight.view(self.heads, -1).T[place]
            for weight in (score_bias, self._keep(graph, dropout, seed, value))
        ]  # [E, H]
        query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))  # [N, H, C]
        size = (graph.num_keys, graph.num_queries)
        return self.propagate(
            edge_index,
            query=(None, query),
            key=(key, None),
            value=(value, None),
            gate=None,
            score_bias=edge[0],
            keep=edge[1],
            weights=weights,
            size=size,
        )

    @staticmethod
    def _check_distinct(distinct: int, place: Tensor) -> None:
        if distinct != place.numel():
            raise ValueError(
                f"Expected 'edge_index' without repeated edges to be explained (got {place.numel()} edges, {distinct} distinct). Call `torch_geometric.utils.coalesce` first."
            )

    def _keep(self, graph: AttentionGraph, dropout: float, seed: int, like: Tensor) -> Tensor | None:
        """Factor of each edge under dropout, the same as the fused path's."""
        if dropout == 0:
            return None
        return ops.reference.dropout_mask(graph.num_edges, dropout, seed, graph.device).to(like.dtype) / (1 - dropout)

    def _weights(
        self,
        edge_index: Any,
        edge_head: Tensor | None,
        place: Tensor | None,
        graph: AttentionGraph,
        query: Tensor,
        key: Tensor,
        score_bias: Tensor | None,
        weights: list[Tensor],
        ordered: bool,
    ) -> Any:
        """Attention weights before dropout, as PyG returns them, differentiable. ``ordered``: message passing left them in the caller's order."""
        if weights:
            (alpha,) = weights  # [E, H or 1]
        else:
            logit = ops.edge_dot(query, key, graph.rowptr, graph.col) * self.scale
            alpha = _softmax(logit if score_bias is None else logit + score_bias, ptr=graph.rowptr)[:, None]
        if place is None:
            return graph.edge_index, alpha[:, 0]
        if not ordered:
            alpha = (alpha if edge_head is not None else alpha.view(self.heads, -1).T)[place]
        alpha = alpha if edge_head is None else alpha[:, 0]
        if not isinstance(edge_index, Tensor):
            return edge_index.set_value(alpha, layout="coo")
        if edge_index.layout == torch.sparse_coo:
            edge_index = edge_index.coalesce()
        return set_sparse_value(edge_index, alpha) if is_sparse(edge_index) else edge_index, alpha

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}, num_blocks={self.num_blocks})"


def _softmax(logit: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None) -> Tensor:
    """PyG's, but an edge whose logit is minus infinity is none, even where that leaves a row without edges."""
    forbidden = logit == -torch.inf
    alpha = softmax(logit.masked_fill(forbidden, torch.finfo(logit.dtype).min), index, ptr, num_nodes)
    return alpha.masked_fill(forbidden, 0)
