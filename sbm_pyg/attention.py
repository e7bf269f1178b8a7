"""The one attention layer: message passing from keys to queries over a graph that it samples, or that it is given.

In: tokens, and any graph or none. Out: tokens. Not here: how graphs are made and how edges are computed; the layer joins the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import softmax

from . import ops, patterns
from .graph import AttentionGraph
from .ragged import resolve_ptr
from .sampling import METHODS, draw_seed, sample_edges
from .sbm import SBM, SBMHead

__all__ = ["SBMAttentionConv"]

GATE_FORM = {"paper": "score", "mask": "weight", "none": "score"}
ENTMAX_ALPHA = {"entmax15": 1.5, "sparsemax": 2.0}


class SBMAttentionConv(MessagePassing):
    r"""Multi-head attention over the edges of a graph, by default one that each head samples for itself.

    Each head projects tokens to queries, keys and values. Without a graph, an :class:`~sbm_pyg.SBMHead` turns queries and keys into
    a stochastic block model, from which the head's own graph is sampled; its parameters learn through a straight-through estimator.
    Then, over the edges of each query alone,

    .. math:: x_i' = \Big\Vert_{h} \sum_{j \in \mathcal{N}_h(i)} \operatorname{softmax}_j\big(q_i^\top k_j / \sqrt{C}\big) \, v_j .

    A query without edges gives zeros. There is no padding: batches are ragged, as PyG's are. Cost O(N C_in H C + NKC + E (C + K)).

    Args:
        in_channels: Channels of the tokens, or of the pair (keys, queries), as PyG orders bipartite features; -1 to infer.
        out_channels: Channels per head C.
        heads: Number of heads H.
        num_blocks: Number of blocks K of each head's SBM. None: no SBM; every call needs a graph.
        concat: Concatenate the heads (H*C output channels), or average them (C).
        bias: Biases in the three projections.
        clusters: How the SBM's clusters start, ``"kaiming"`` or ``"orthogonal"``; see :class:`~sbm_pyg.SBMHead`.
        estimator: What an edge's probability p receives as its gradient, with P the edge's weight, g its gain and gbar the row's mean
            gain: ``"mask"``: :math:`P (g - \bar g)`, as the authors' code has it; ``"paper"``: that times the score (eq. 9);
            ``"none"``: nothing. See docs/concepts.md.
        exploration: Added to every edge probability in training only, in [0, 1].
        method: Law of the sampled graph, ``"bernoulli"`` or ``"fastrg"``; see :func:`~sbm_pyg.sample_edges`.
        budget: Largest expected number of sampled keys per query and head; None for no limit.
        self_loops: Each token always attends to itself.
        window: Each token always attends to tokens at this distance or less (and so to itself).
        normalizer: ``"softmax"``, ``"entmax15"`` or ``"sparsemax"``; the last two run edge by edge through :meth:`message`.
        score_bias: Callable ``(query [H, N, C], key [H, M, C], graph) -> [E]`` added to the scaled scores, or None.
        dropout: Probability that an attention weight is dropped in training.
        **kwargs: Of :class:`torch_geometric.nn.MessagePassing`.

    Raises:
        ValueError: An option is unknown or out of range.

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
        estimator: str = "mask",
        exploration: float = 0.01,
        method: str = "bernoulli",
        budget: float | None = None,
        self_loops: bool = False,
        window: int | None = None,
        normalizer: str = "softmax",
        score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor] | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(node_dim=0, **kwargs)
        choices = {"estimator": (estimator, GATE_FORM), "method": (method, METHODS), "normalizer": (normalizer, ("softmax", *ENTMAX_ALPHA))}
        for name, (choice, options) in choices.items():
            if choice not in options:
                raise ValueError(f"Expected '{name}' to be one of {[*options]} (got {choice!r}). See the docstring of SBMAttentionConv.")
        if not 0 <= exploration <= 1:
            raise ValueError(f"Expected 'exploration' in [0, 1] (got {exploration}). It is added to every edge probability in training.")
        if not 0 <= dropout < 1:
            raise ValueError(f"Expected 'dropout' in [0, 1) (got {dropout}). It is the probability that an attention weight is dropped.")
        if heads < 1 or out_channels < 1:
            raise ValueError(
                f"Expected 'heads' and 'out_channels' to be at least 1 (got {heads} and {out_channels}). Channels count per head."
            )
        if window is not None and window < 0:
            raise ValueError(
                f"Expected 'window' to be 0 or more (got {window}). It is the largest distance of tokens that always see each other."
            )
        self.in_channels, self.out_channels, self.heads, self.num_blocks, self.concat = (
            in_channels,
            out_channels,
            heads,
            num_blocks,
            concat,
        )
        self.estimator, self.exploration, self.method, self.budget = estimator, exploration, method, budget
        self.self_loops, self.window, self.normalizer, self.score_bias, self.dropout = (self_loops, window, normalizer, score_bias, dropout)
        self.scale = out_channels**-0.5
        self._alpha: Tensor | None = None
        key_channels, query_channels = in_channels if isinstance(in_channels, tuple) else (in_channels, in_channels)
        self.lin_key = Linear(key_channels, heads * out_channels, bias=bias)
        self.lin_query = Linear(query_channels, heads * out_channels, bias=bias)
        self.lin_value = Linear(key_channels, heads * out_channels, bias=bias)
        self.sbm = None if num_blocks is None else SBMHead(out_channels, heads, num_blocks, clusters)

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
            ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). One sequence if None.
            batch: The same as a sequence number per token, ``[N]``.
            seed: Fixes the sampled graph and the dropout; from torch's default generator if None.
            streams: Number of each sequence's random stream, ``[B]``; see :func:`~sbm_pyg.sample_edges`.
            return_graph: Also return the :class:`AttentionGraph`.
            return_sbm: Also return the :class:`SBM` it was sampled from (None with a given graph).
            return_attention_weights: Also return ``(edge_index, alpha)`` as PyG layers do: ``[2, E]`` and ``[E, H]`` for an adjacency that
                heads share, ``[E]`` over the edges of all heads otherwise.

        Returns:
            The output, or a tuple of it and what was asked for, in the order graph, SBM, attention weights.

        Raises:
            ValueError: Shapes do not fit, or there is neither a graph nor an SBM.
        """
        x_key, x_query = (x, x) if isinstance(x, Tensor) else x
        same = x_key is x_query
        key_ptr, query_ptr = self._ptr(x_key, x_query, ptr, batch)
        query, key, value = (
            lin(tokens).view(-1, self.heads, self.out_channels).transpose(0, 1)
            for lin, tokens in ((self.lin_query, x_query), (self.lin_key, x_key), (self.lin_value, x_key))
        )  # [H, N, C]
        drop = self.dropout if self.training else 0.0
        if seed is None and (edge_index is None or drop > 0):
            seed = draw_seed()

        sbm, gate = None, None
        if edge_index is None:
            graph, sbm, gate = self._sample(query, key, query_ptr, key_ptr, same, seed, streams)
        elif isinstance(edge_index, AttentionGraph):
            graph = edge_index.expand(self.heads)
            if (graph.num_queries, graph.num_keys) != (x_query.size(0), x_key.size(0)):
                raise ValueError(
                    f"Expected 'edge_index' over N = {x_query.size(0)} queries and M = {x_key.size(0)} keys (got {graph}). Build the graph with the `ptr` of these tokens."
                )
        else:
            graph = AttentionGraph.from_edge_index(edge_index, x_query.size(0), x_key.size(0), query_ptr=query_ptr, key_ptr=key_ptr).expand(
                self.heads
            )
        score_bias = None if self.score_bias is None else self.score_bias(query, key, graph)

        if self.explain and isinstance(edge_index, Tensor) and edge_index.layout == torch.strided and score_bias is None:
            out = self._propagate_shared(edge_index, query, key, value, drop, seed or 0, graph)
        elif self.fuse and not self.explain and self.normalizer == "softmax":
            out = self.message_and_aggregate(graph, query, key, value, gate, score_bias, drop, seed or 0)
        else:
            out = self._propagate_rows(graph, query, key, value, gate, score_bias, drop, seed or 0)
        out = out.flatten(1) if self.concat else out.mean(1)

        results: list[Any] = [out]
        if return_graph:
            results.append(graph)
        if return_sbm:
            results.append(sbm)
        if return_attention_weights:
            results.append(self._weights(edge_index, graph, query, key, score_bias))
        self._alpha = None
        return results[0] if len(results) == 1 else tuple(results)

    # ---------------------------------------------------------------- the graph

    def _ptr(self, x_key: Tensor, x_query: Tensor, ptr: Any, batch: Any) -> tuple[Tensor, Tensor]:
        pairs = [value if isinstance(value, tuple) else (value, value) for value in (ptr, batch)]
        query_ptr = resolve_ptr(x_query.size(0), pairs[0][1], pairs[1][1], device=x_query.device)
        if pairs[0][0] is pairs[0][1] and pairs[1][0] is pairs[1][1] and x_key.size(0) == x_query.size(0):
            return query_ptr, query_ptr
        return resolve_ptr(x_key.size(0), pairs[0][0], pairs[1][0], device=x_key.device), query_ptr

    def _sample(
        self, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, same: bool, seed: int | None, streams: Tensor | None
    ) -> tuple[AttentionGraph, SBM, Tensor | None]:
        """Graph, its model, and the straight-through gate of its edges."""
        if self.sbm is None:
            raise ValueError(
                "Expected 'edge_index' (got None, and the layer has num_blocks=None). Pass a graph, or give the layer blocks to sample its own."
            )
        sbm: SBM = self.sbm(query, key, query_ptr, key_ptr)
        if self.budget is not None:
            sbm = sbm.limit(self.budget)
        exploration = self.exploration if self.training else 0.0
        graph = sample_edges(  # p <= 1 by eq. 5-7; clamp takes what low precision rounds above
            sbm, method=self.method, exploration=exploration, clamp=True, seed=seed, streams=streams
        )
        forced = None
        if self.self_loops or self.window is not None:
            if not same:
                raise ValueError(
                    "Expected the same tokens as queries and keys with 'self_loops' or 'window' (got a pair). Union a pattern of your own and pass the graph."
                )
            graph, forced = graph.union(patterns.window(None, self.window or 0, ptr=query_ptr))
        if self.estimator == "none" or not torch.is_grad_enabled():
            return graph, sbm, None
        gate = sbm.edge_gate(graph)
        return (graph, sbm, gate if forced is None else torch.where(forced, gate.detach(), gate))  # a forced edge owes nothing to p

    # ---------------------------------------------------------------- attention over it

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
            query, key, value, graph.rowptr, graph.col, gate, score_bias, self.scale, GATE_FORM[self.estimator], dropout, seed
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
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        """The meaning: weighted values of the edges, ``[E, H or 1, C]``; ``gate``, ``score_bias`` and ``keep`` are ``[E, 1]`` or None."""
        logit = (query_i * key_j).sum(-1) * self.scale  # [E, H or 1]
        if gate is not None:
            logit = logit * gate if GATE_FORM[self.estimator] == "score" else logit + gate.log()
        if score_bias is not None:
            logit = logit + score_bias
        if self.normalizer == "softmax":
            alpha = softmax(logit, index, ptr, size_i)
        else:
            columns = [
                ops.segment_entmax(column.contiguous(), index, num_nodes=size_i, alpha=ENTMAX_ALPHA[self.normalizer])
                for column in logit.unbind(1)
            ]
            alpha = torch.stack(columns, dim=1)
        self._alpha = alpha
        if keep is not None:
            alpha = alpha * keep
        return value_j * alpha[..., None]

    def _propagate_rows(
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
        """PyG's propagation with heads as separate nodes, for each head has its own edges."""
        row = graph.edge_row
        source = graph.edge_head * graph.num_keys + graph.col
        query, key, value = (tokens.flatten(0, 1)[:, None] for tokens in (query, key, value))  # [H*N, 1, C]
        edge = [None if weight is None else weight[:, None] for weight in (gate, score_bias, self._keep(graph, dropout, seed, value))]
        size = (self.heads * graph.num_keys, self.heads * graph.num_queries)
        out = self.propagate(
            torch.stack([source, row]),
            query=(None, query),
            key=(key, None),
            value=(value, None),
            gate=edge[0],
            score_bias=edge[1],
            keep=edge[2],
            size=size,
        )
        return out.view(self.heads, graph.num_queries, -1).transpose(0, 1)

    def _propagate_shared(
        self, edge_index: Tensor, query: Tensor, key: Tensor, value: Tensor, dropout: float, seed: int, graph: AttentionGraph
    ) -> Tensor:
        """PyG's propagation with heads as channels, over the caller's own edges in the caller's order: what explainers hook into."""
        if graph.num_edges != self.heads * edge_index.size(1):
            raise ValueError(
                f"Expected 'edge_index' without repeated edges to be explained (got {edge_index.size(1)} edges, {graph.num_edges // self.heads} distinct). Call `torch_geometric.utils.coalesce` first."
            )
        keep = self._keep(graph, dropout, seed, value)
        keep = None if keep is None else keep.view(-1, self.heads)
        query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))  # [N, H, C]
        size = (graph.num_keys, graph.num_queries)
        return self.propagate(
            edge_index, query=(None, query), key=(key, None), value=(value, None), gate=None, score_bias=None, keep=keep, size=size
        )

    def _keep(self, graph: AttentionGraph, dropout: float, seed: int, like: Tensor) -> Tensor | None:
        """Factor of each edge under dropout, the same as the fused path's."""
        if dropout == 0:
            return None
        return ops.reference.dropout_mask(graph.num_edges, dropout, seed, graph.device).to(like.dtype) / (1 - dropout)

    def _weights(
        self, edge_index: Any, graph: AttentionGraph, query: Tensor, key: Tensor, score_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention weights before dropout, as PyG returns them, differentiable."""
        if self._alpha is not None and self._alpha.size(1) == 1:
            alpha = self._alpha[:, 0]
        elif self._alpha is not None:
            return edge_index, self._alpha
        else:
            logit = ops.edge_dot(query, key, graph.rowptr, graph.col) * self.scale
            alpha = softmax(logit if score_bias is None else logit + score_bias, ptr=graph.rowptr)
        if edge_index is None or isinstance(edge_index, AttentionGraph):
            return graph.edge_index, alpha
        shared = graph.head(0)
        return shared.edge_index, alpha.view(self.heads, shared.num_edges).T

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}, num_blocks={self.num_blocks})"
