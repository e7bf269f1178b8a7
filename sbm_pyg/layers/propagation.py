"""Attention over the edges of a graph as message passing: one fused op, and PyG's edge-by-edge path.

In: queries, keys and values of all heads, and a graph. Out: tokens and, on request, the weight of each edge. The
edge-by-edge path runs if hooks or explainers of PyG need messages; it defines the result of the fused op. Not here:
projections, and graph sources (``attention``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse
from torch_geometric.utils.sparse import set_sparse_value

from ..graphs.graph import AttentionGraph, edge_list
from ..ops import checks
from ..ops.random_words import GOLDEN
from ..ops.reference.edges import dropout_mask
from ..training.estimators import AttentionCall, Estimator, NoEstimator
from .edge_features import attend_with_features, is_plain
from .normalizers import Entmax, alpha_of, attend_by_entmax, normalize

__all__ = ["OUTPUT_ONLY", "EdgeAttention", "Returns", "channel_pair", "check_tokens"]

_PROPAGATE = MessagePassing.propagate

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Query, key, value; gate and score bias of each edge, or None."""


@dataclass(frozen=True)
class Returns:
    """Extra outputs of a call, in this order; see the arguments of :meth:`AttentionConv.forward`."""

    graph: bool = False
    choice: bool = False
    attention_weights: bool = False


OUTPUT_ONLY = Returns()


class EdgeAttention(MessagePassing):
    """Base of :class:`~sbm_pyg.AttentionConv`: attention over a graph, given queries, keys and values."""

    heads: int
    first_head: int
    out_channels: int
    scale: float
    normalizer: str | Entmax
    estimator: Estimator
    score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor] | None
    lin_edge: Linear | None
    _alpha: Tensor | None = None  # read by PyG's AttentionExplainer in a hook of `message`

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Keep PyG's own `propagate` for explainers.

        PyG replaces `propagate` of the class by a faster method and keeps the previous method for explainers. In a
        subclass the previous method may be the fast method of the base class, which does not support explainers.
        """
        super()._set_jittable_templates(raise_on_error)
        type(self)._orig_propagate = _PROPAGATE

    @property
    def _message_hooks(self) -> bool:
        return bool(self._message_forward_pre_hooks or self._message_forward_hooks)

    @property
    def _explained(self) -> bool:
        """True if an explainer masks messages or hooks into them."""
        return self.explain is True or (self.explain is None and self._message_hooks)

    @property
    def _edgewise(self) -> bool:
        """True if hooks or an explainer need PyG's edge-by-edge path."""
        return has_hooks(self) or not self.fuse

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_index: Any,
        edge_filter: Any,
        edge_head: Any,
        sequence_ids: Any,
        returns: Any,
    ) -> None:
        """Check shapes and combinations of arguments; an explainer needs an explicit ``edge_index``."""
        if not isinstance(value, Tensor):
            checks.tensors(query=query, key=key, value=value)
        checks.attention_tokens(query, key, value)
        if query.shape[::2] != (self.heads, self.out_channels):
            checks.shape("query", query, (self.heads, None, self.out_channels), "[H, N, C]", "Heads come first.")
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided and edge_index.dim() == 1:
            raise ValueError(
                f"Expected 'edge_index' to be [2, E], or a graph (got {list(edge_index.shape)}). Pass the sequence of "
                "each token by name, `batch=`, and offsets as `ptr=`."
            )
        checks.kind("returns", returns, Returns, "a Returns", "See the docstring.")
        way_out = "Wrap a mask in a function."
        checks.kind("edge_filter", edge_filter, Callable | None, "a callable graph -> [E]", way_out)
        if edge_head is not None and not isinstance(edge_index, Tensor):
            raise ValueError(
                f"Expected 'edge_head' with an 'edge_index' tensor alone (got it with {type(edge_index).__name__}). "
                "An AttentionGraph holds its heads."
            )
        if sequence_ids is not None and edge_index is not None:
            raise ValueError(
                "Expected no 'sequence_ids' with a given 'edge_index' (got both). They number what a source draws, and "
                "none draws."
            )
        if self._explained and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
            got = "None, so the source would choose its own" if edge_index is None else type(edge_index).__name__
            raise ValueError(
                f"Expected 'edge_index' to be [2, E], the edges to explain (got {got}). Sample first, "
                "`graph = conv(x, return_graph=True)[1]`, and explain over `graph.edge_index` with "
                "`edge_head=graph.edge_head`; or leave the layer out with `conv.explain = False`."
            )

    def _check_edge_attr(self, edge_attr: Tensor | None, edge_index: Any, value: Tensor) -> None:
        """Check that edge features are passed, for a given graph, if and only if the layer has an ``edge_dim``."""
        if edge_attr is None or self.lin_edge is None:
            got, layer = ("none", "one") if edge_attr is None else ("some", "none")
            raise ValueError(
                f"Expected 'edge_attr' if the layer has an 'edge_dim', and only then (got {got}, and the layer has "
                f"{layer}). Use both or neither."
            )
        if edge_index is None:
            raise ValueError(
                "Expected 'edge_index' with 'edge_attr' (got None). Edges that a source chooses have no features: "
                "choose first, `graph = other(x, return_graph=True)[1]`, and pass the graph with features of its edges."
            )
        weight = self.lin_edge.weight
        checks.tensors(edge_attr=edge_attr)
        checks.shape("edge_attr", edge_attr, (None, weight.size(1)), "[E, D]", "D is the 'edge_dim' of the layer.")
        checks.shape("value", value, (None, None, self.out_channels), "[H, M, C]", "Edge features are added to it.")
        checks.same_device("value", value, edge_attr=edge_attr)
        if edge_attr.dtype != weight.dtype and not (edge_attr.is_floating_point() and converts(edge_attr, weight)):
            raise TypeError(
                f"Expected 'edge_attr' to be {weight.dtype}, as the layer's parameters are (got {edge_attr.dtype}). "
                "Convert it with `.to`."
            )

    def _sort_features(
        self,
        edge_attr: Tensor,
        edge_index: Any,
        edge_head: Tensor | None,
        whole_graph: AttentionGraph,
        graph: AttentionGraph,
    ) -> tuple[Tensor, bool]:
        """Features of the edges of ``graph``, which are the allowed edges of ``whole_graph``, in their order.

        Returns:
            The features, ``[E, D]``, or ``[E / H, D]`` if all heads share the edges; and whether heads share the edges.
        """
        if graph.block_size != 1:
            raise ValueError(
                f"Expected 'edge_index' to be a graph of tokens with 'edge_attr' (got blocks of {graph.block_size}). "
                "Call `expand_tokens()` on it."
            )
        shared = edge_head is None and getattr(edge_index, "heads", 1) == 1  # all heads have the same edges
        copies, count = self.heads if shared else 1, edge_attr.size(0)
        edges = None if isinstance(edge_index, AttentionGraph) else edge_list(edge_index)
        listed = whole_graph.num_edges // copies if edges is None else edges.size(1)
        compiling = edges is not None and torch.compiler.is_compiling()  # how many of the edges differ is then unknown
        if count != listed or not (compiling or copies * count == whole_graph.num_edges):
            raise ValueError(
                f"Expected 'edge_attr' to be [E, D] for E = {whole_graph.num_edges // copies} edges, each once (got "
                f"{list(edge_attr.shape)} for {listed} edges). Merge repeated edges by "
                "`torch_geometric.utils.coalesce`."
            )
        if compiling:  # no branch on values, but edges must never get the features of others
            once = "Expected 'edge_index' to hold each edge once with 'edge_attr'. Merge repeated edges by `coalesce`."
            torch._assert_async(whole_graph.rowptr[-1] == copies * count, once)
        if edges is not None:  # sort them from the caller's order
            edge_attr = edge_attr[whole_graph.find(edges, edge_head).argsort()]
        if graph is whole_graph:
            return edge_attr, shared
        return edge_attr[whole_graph.find(graph.edge_index, graph.edge_head) % max(count, 1)], False

    def _edges_as_keys(
        self, graph: AttentionGraph, key: Tensor, value: Tensor, feature: Tensor
    ) -> tuple[AttentionGraph, Tensor, Tensor]:
        """The inputs of equal attention with one key and value per edge, to which the projected features are added.

        Returns:
            The graph from edges to queries, and keys and values ``[H, E, C]``. An edge uses only its entries in its own
            head.
        """
        assert self.lin_edge is not None
        edge = self.lin_edge(feature).unflatten(1, (self.heads, -1)).transpose(0, 1)  # [H, E, C]
        count = max(feature.size(0), 1)
        column, source = torch.arange(graph.num_edges, device=edge.device) % count, graph.col[: feature.size(0)]
        keys, values = (x.index_select(1, source) + edge for x in (key, value))
        ends, sizes = torch.arange(2, device=edge.device), (graph.num_queries, feature.size(0))
        over = AttentionGraph._trusted(graph.rowptr, column, *sizes, graph.heads, ends * sizes[0], ends * sizes[1])
        return over, keys, values

    def _attend_with_features(
        self,
        graph: AttentionGraph,
        call: AttentionCall,
        feature: Tensor,
        shared: bool,
        bias: Tensor | None,
        dropout: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        """The output ``[N, H, C]`` and the weights ``[E, 1]`` of the edges of the graph, by the kernel for features."""
        assert self.lin_edge is not None
        count = max(feature.size(0), 1)
        edge = torch.arange(graph.num_edges, device=graph.device) % count  # the key that `_edges_as_keys` makes of each
        keep = _dropout_factor(graph.rowptr, edge, self.heads, count, dropout, seed, call.value.dtype)
        tokens, rows = (call.query, call.key, call.value), (graph.rowptr, graph.col)
        weight = self.lin_edge.weight
        out, alpha = attend_with_features(*tokens, *rows, self.scale, feature, weight, shared, bias, keep)
        return out.transpose(0, 1), alpha[:, None].to(call.value.dtype)

    def _score_bias(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor | None:
        """The score bias of each edge, ``[E]``, or None."""
        if self.score_bias is None:
            return None
        bias = self.score_bias(query, key, graph)
        checks.per_edge(graph.col, "[E]", score_bias=bias)
        return bias

    def _attend_over_edges(
        self,
        call: AttentionCall,
        edge_index: Any,
        edge_head: Tensor | None,
        edge_attr: Tensor | None,
        dropout: float,
        return_weights: bool,
    ) -> tuple[Tensor, Any, AttentionCall]:
        """Attend over the allowed edges, with the estimator's steps before and after attention.

        Returns:
            The output ``[N, H, C']``, the attention weights in the form of PyG's layers, if requested, and the call
            with the final graph and its score bias.
        """
        estimator = self.estimator if call.choice.probability is not None else NoEstimator()
        graph_before, choice = call.choice.graph, call.limit(estimator.prepare(call.choice, self.training))
        graph = choice.graph
        seed = call.seed  # of dropout and of soft masks, whose words are numbered from head 0 of this layer
        if self.first_head:
            seed = (call.seed + self.first_head * GOLDEN + 2**63) % 2**64 - 2**63
        gate, soft_mask = estimator.gate(choice), estimator.bias(choice, self.training, seed)
        checks.per_edge(graph.blocks.col, "[E]", gate=gate, bias=soft_mask)
        gate, soft_mask = (x if x is None else graph.spread(x) for x in (gate, soft_mask))
        bias = call.score_bias(call.query, call.key, graph)
        bias = soft_mask if bias is None else bias if soft_mask is None else bias + soft_mask
        query, key, value, over, shown, position = call.query, call.key, call.value, graph, None, None
        if isinstance(edge_index, Tensor | SparseTensor) and (self._explained or return_weights):
            position = graph.find(edge_list(edge_index), edge_head)  # in the graph, of each edge of the caller
        if self._explained and edge_head is None:
            shown = edge_index
        is_explained, feature, shared = self._explained, None, False
        by_messages = is_explained or self._edgewise
        if edge_attr is not None:
            feature, shared = self._sort_features(edge_attr, edge_index, edge_head, graph_before, graph)
        if feature is not None and (by_messages or self.normalizer != "softmax" or not is_plain(self.lin_edge)):
            over, key, value = self._edges_as_keys(graph, key, value, feature)
            feature = None  # which the keys and values now have
            shown = None if shown is None or position is None else torch.stack([position, edge_list(shown)[1]])
        inputs, alpha = (query, key, value, gate, bias), None
        if by_messages:
            order = position if is_explained else None
            out, alpha = self._propagate_edges(over, shown, order, inputs, dropout, seed)
        elif feature is not None:
            out, alpha = self._attend_with_features(graph, call, feature, shared, bias, dropout, seed)
        else:
            arguments = self._call_hooks(self._message_and_aggregate_forward_pre_hooks, (over, *inputs, dropout, seed))
            out = self.message_and_aggregate(*arguments)
            out = self._call_hooks(self._message_and_aggregate_forward_hooks, out, arguments)
        self._alpha, weights = None, None
        if return_weights:
            if alpha is None:
                logit = over._logits(query, key, bias, self.scale)
                alpha = normalize(self.normalizer, logit[:, None], ptr=over.rowptr)
            weights = self._pack_weights(alpha, graph, edge_index, edge_head, position, is_explained)
        call = replace(call, choice=choice, bias=bias)
        return estimator.attach(out.transpose(0, 1), call).transpose(0, 1), weights, call

    def _call_hooks(self, hooks: dict[int, Callable[..., Any]], result: Any, *arguments: Any) -> Any:
        """Call the hooks that PyG stores for a step, and return the result, which each hook may replace."""
        for hook in hooks.values():
            changed = hook(self, *arguments, result)
            result = result if changed is None else changed
        return result

    def _pack_weights(
        self,
        alpha: Tensor,
        graph: AttentionGraph,
        edge_index: Any,
        edge_head: Tensor | None,
        position: Tensor | None,
        is_in_order: bool,
    ) -> Any:
        """Attention weights as PyG's layers return them, for weights ``[E, H or 1]`` of the edges of the graph.

        Args:
            position: Index in the graph of each edge of the caller, or None if the caller passed the graph.
            is_in_order: Whether the weights are in the order of the edges of the caller.
        """
        if position is None:
            return graph.edge_index, alpha[:, 0]
        if not is_in_order:
            alpha = (alpha if edge_head is not None else alpha.view(self.heads, -1).T)[position]
        alpha = alpha if edge_head is None else alpha[:, 0]
        if not isinstance(edge_index, Tensor):
            return edge_index.set_value(alpha, layout="coo")
        if edge_index.layout == torch.sparse_coo:
            edge_index = edge_index.coalesce()
        return set_sparse_value(edge_index, alpha) if is_sparse(edge_index) else edge_index, alpha

    def _propagate_edges(
        self,
        graph: AttentionGraph,
        edge_index: Tensor | None,
        position: Tensor | None,
        inputs: Inputs,
        dropout: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        """PyG's own propagation: the output ``[N, H, C']``, and the weights ``[E, H or 1]``.

        An explainer must see the edges of the caller in the caller's order; ``position`` is the index of these edges in
        the graph. If all heads share the edges, the explainer sees the caller's ``edge_index``, with heads as channels.
        Otherwise each head gets separate edges and nodes.
        """
        distinct = graph.num_edges if edge_index is None else graph.num_edges // self.heads
        if position is not None and position.numel() != distinct:
            raise ValueError(
                f"Expected 'edge_index' without repeated edges to be explained (got {position.numel()} edges, "
                f"{distinct} distinct). Call `torch_geometric.utils.coalesce` first."
            )
        query, key, value, gate, bias = inputs
        keep = _dropout_factor(graph.rowptr, graph.col, self.heads, graph.num_keys, dropout, seed, value.dtype)
        heads, sizes = self.heads, (graph.num_keys, graph.num_queries)
        if edge_index is not None:
            tokens = [x.transpose(0, 1) for x in (query, key, value)]  # [N, H, C]
            edge = [None if x is None else x.view(heads, -1).T[position] for x in (gate, bias, keep)]  # [E, H]
        else:
            tokens = [x.flatten(0, 1)[:, None] for x in (query, key, value)]  # [H*N, 1, C]
            edge = [None if x is None else x[:, None] for x in (gate, bias, keep)]  # [E, 1]
            edges = torch.stack([graph.edge_head * graph.num_keys + graph.col, graph.edge_row])
            if position is not None:
                edges, edge = edges[:, position], [None if x is None else x[position] for x in edge]
            sizes = (heads * graph.num_keys, heads * graph.num_queries)
        query, key, value = tokens
        weights: list[Tensor] = []  # what `message` finds them to be
        out = self.propagate(
            edges if edge_index is None else edge_index, query=(None, query), key=(key, None), value=(value, None),
            gate=edge[0], score_bias=edge[1], keep=edge[2], weights=weights, size=sizes,
        )  # fmt: skip
        if edge_index is None:
            out = out.view(heads, graph.num_queries, -1).transpose(0, 1)
        return out, weights[0]

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
        """The fused path: one op that computes :meth:`message` and the sum over edges. Returns ``[N, H, C]``."""
        form = self.estimator.gate_form
        if self.normalizer == "softmax":
            out = graph._attend(query, key, value, gate, score_bias, self.scale, form, dropout, seed)
        else:
            rows, alpha = graph.rows._replace(bias=score_bias), alpha_of(self.normalizer)
            out = attend_by_entmax(query, key, value, rows, gate, self.scale, form, dropout, seed, alpha)
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
        """Weighted values of the edges, ``[E, H or 1, C]``: the reference for the fused path.

        Values per edge, ``gate``, ``score_bias`` and ``keep``, are ``[E, H or 1]`` or None. Weights before dropout,
        ``[E, H or 1]``, are added to the list ``weights``.
        """
        logit = (query_i * key_j).sum(-1) * self.scale  # [E, H or 1]
        if gate is not None:
            logit = logit * gate if self.estimator.gate_form == "score" else logit + gate.log()
        if score_bias is not None:
            logit = logit + score_bias
        alpha = normalize(self.normalizer, logit, index, ptr, size_i)
        weights.append(alpha)
        if self._message_hooks:
            self._alpha = alpha
        if keep is not None:
            alpha = alpha * keep
        return value_j * alpha[..., None]


def _dropout_factor(
    rowptr: Tensor, col: Tensor, heads: int, num_keys: int, dropout: float, seed: int, dtype: torch.dtype
) -> Tensor | None:
    """Dropout factor of each edge, ``[E]``, equal to the factor in the fused path; None without dropout."""
    if dropout == 0:
        return None
    return dropout_mask(rowptr, col, heads, num_keys, dropout, seed).to(dtype) / (1 - dropout)


def has_hooks(conv: MessagePassing) -> bool:
    """True if hooks of PyG are registered on messages or on their sums."""
    steps = ("propagate", "message", "aggregate")
    return any(getattr(conv, f"_{step}_forward{kind}_hooks") for step in steps for kind in ("_pre", ""))


def channel_pair(in_channels: Any) -> tuple[int, int]:
    """Numbers of input channels of keys and of queries."""
    pair = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
    wrong = [size for size in pair if isinstance(size, bool) or not isinstance(size, Integral) or size < -1 or not size]
    if len(pair) != 2 or wrong:
        raise ValueError(
            "Expected 'in_channels' to be a number of channels, -1 to infer it, or a pair for keys and queries "
            f"(got {in_channels!r}). It is the width of the tokens."
        )
    return int(pair[0]), int(pair[1])


def converts(tokens: Tensor, weight: Tensor) -> bool:
    """True if autocast converts both dtypes to one dtype, which requires that neither is float64."""
    return torch.is_autocast_enabled(tokens.device.type) and torch.float64 not in (tokens.dtype, weight.dtype)


def owned(out: Tensor, heads: int) -> Tensor:
    """Copy the output ``[N, H*C]`` if it is a view, since an activation may overwrite it in place.

    Without the copy, the activation could change a tensor that a kernel saved for the backward pass.
    """
    is_view = heads == 1 if torch.compiler.is_compiling() else out._is_view()
    return out.clone() if is_view and out.requires_grad else out


def check_tokens(tokens: Any, lin: torch.nn.Module) -> None:
    """Check that a projection accepts the tokens."""
    if torch.jit.is_tracing():
        raise TypeError(
            "Expected 'x' to be a tensor (got one that `torch.jit.trace` follows, which keeps the sizes of one batch). "
            "Use `torch.compile` or `torch.export`."
        )
    way_out = "Join several by `torch.cat(x)`, and pass `ptr=[0, ...]`, the offsets; a pair is (keys, queries)."
    checks.kind("x", tokens, Tensor, "a tensor, or a pair of keys and queries", way_out)
    if tokens.is_nested:
        jagged = tokens.layout == torch.jagged
        parts = "`x.values()` and `ptr=x.offsets()`" if jagged else "`torch.cat(x.unbind())` and the offsets as `ptr`"
        raise TypeError(
            f"Expected 'x' to be dense (got a nested tensor). Pass {parts}, or take an SBMMultiheadAttention."
        )
    checks.dense("x", tokens)
    if tokens.dim() == 2 and not torch.compiler.is_compiling() and tokens.size(1) < 1:
        raise ValueError(f"Expected 'x' of at least one channel (got {list(tokens.shape)}). It is [N, C_in].")
    if tokens.dim() != 2:
        raise ValueError(
            f"Expected 'x' to be [N, C_in] (got {list(tokens.shape)}). Batches are ragged: `sbm_pyg.unpad` takes "
            "padding out and gives 'ptr', and SBMMultiheadAttention takes padded tokens."
        )
    width, weight = getattr(lin, "in_channels", -1), getattr(lin, "weight", None)
    if not torch.compiler.is_compiling() and width not in (-1, tokens.size(1)):
        raise ValueError(
            f"Expected 'x' to be [N, {width}], as 'in_channels' says (got {list(tokens.shape)}). A pair is (keys, "
            "queries), as in PyG."
        )
    if not tokens.is_floating_point():
        raise TypeError(f"Expected 'x' to be floating point (got {tokens.dtype}). Embed token numbers first.")
    if not isinstance(weight, Tensor):
        return
    if tokens.device != weight.device:
        raise ValueError(
            f"Expected 'x' on {weight.device}, as the layer is (got {tokens.device}). Move one with `.to`."
        )
    if tokens.dtype == weight.dtype:
        return
    if not converts(tokens, weight):
        raise TypeError(
            f"Expected 'x' to be {weight.dtype}, as the layer's parameters are (got {tokens.dtype}). "
            "Convert it with `.to`, or run under torch.autocast, which leaves float64 alone."
        )
