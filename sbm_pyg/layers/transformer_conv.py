"""PyG's graph transformer layer, with fused kernels for attention over given edges and their features.

In: nodes, edges and edge features. Out: nodes. Not here: graphs that a source chooses (``attention``), and the
replacement of layers in a model (``replace``).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import TransformerConv as _PyG
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptTensor, PairTensor, SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from ..graphs.graph import edge_list
from ..ops import checks
from .edge_features import attend_over_rows, is_plain, reorder, rows_of
from .propagation import channel_pair, check_tokens, has_hooks

__all__ = ["TransformerConv"]


class TransformerConv(_PyG):
    r"""PyG's :class:`torch_geometric.nn.TransformerConv`, several times as fast, in less memory.

    Arguments, parameters, ``state_dict``, outputs and gradients are those of PyG's layer, and a seed gives the same
    dropout. PyG stores a key and a value for each edge, O(E H C) numbers. Here, with :math:`W_e` the projection of
    features,

    .. math:: q_i \cdot (k_j + W_e e_{ij}) = q_i \cdot k_j + (W_e^\top q_i) \cdot e_{ij}, \qquad
        \sum_j a_{ij} (v_j + W_e e_{ij}) = \sum_j a_{ij} v_j + W_e \sum_j a_{ij} e_{ij},

    so each edge needs only its D features: O(E (H + D)) numbers, forward and backward. Sums run in a fixed order, so
    results repeat to the bit on one machine. Sums are in float32 for tokens in bfloat16 or float16. Edges are sorted by
    their targets once for each ``edge_index`` object; the order of a sorted :class:`~torch_geometric.EdgeIndex` is
    reused.

    PyG's code runs for explainers, hooks on messages, other aggregations than sums, ``flow="target_to_source"``,
    decomposed layers and subclasses with their own messages. Devices without a kernel compute by plain torch
    operations. ``torch.jit.script`` takes PyG's layer only.

    Args:
        in_channels, out_channels, heads, concat, beta, dropout, edge_dim, bias, root_weight: As PyG's layer.
        **kwargs: Of :class:`~torch_geometric.nn.conv.MessagePassing`.

    Raises:
        TypeError: In a call, the nodes are of another type than the layer.
        ValueError: In a call, an edge names a node that does not exist, or there are not as many features as edges.

    Example:
        >>> import torch
        >>> conv = TransformerConv(8, 4, heads=2, edge_dim=3)
        >>> x, edge_index, edge_attr = torch.randn(5, 8), torch.tensor([[0, 1, 4], [1, 2, 2]]), torch.randn(3, 3)
        >>> conv(x, edge_index, edge_attr).shape
        torch.Size([5, 8])

    Reference: Shi et al., "Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification",
    IJCAI 2021.
    """

    _orig_propagate = MessagePassing.propagate  # what PyG's explainers call
    _returns_weights = False

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        way_out, pair = "See PyG's TransformerConv.", channel_pair(in_channels)
        in_channels = pair if isinstance(in_channels, tuple | list) else pair[0]
        heads, out_channels = (
            checks.integer(name, size, 1, way_out) for name, size in (("heads", heads), ("out_channels", out_channels))
        )
        if edge_dim is not None:
            edge_dim = checks.integer("edge_dim", edge_dim, -1, "-1 infers it from the features.")
        for name, flag in (("concat", concat), ("beta", beta), ("bias", bias), ("root_weight", root_weight)):
            checks.flag(name, flag, way_out)
        checks.number("dropout", dropout, "[0, 1]", "It is the probability that an attention weight is dropped.")
        sizes = {"in_channels": max(pair), "out_channels": out_channels, "heads": heads, "edge_dim": edge_dim or 0}
        checks.parameters(sizes, heads * out_channels * (2 * max(sum(pair), 1) + max(sizes["edge_dim"], 0)))
        super().__init__(in_channels, out_channels, heads, concat, beta, dropout, edge_dim, bias, root_weight, **kwargs)

    @classmethod
    def from_pyg(cls, conv: _PyG) -> Self:
        """Make a layer that shares the parameters of a layer of PyG.

        Raises:
            TypeError: ``conv`` is not such a layer.
        """
        way_out = "Other layers compute other things."
        checks.kind("conv", conv, _PyG, "a torch_geometric.nn.TransformerConv", way_out)
        return _as(cls, conv)

    def to_pyg(self) -> _PyG:
        """Make a layer of PyG that shares the parameters of this layer."""
        return _as(_PyG, self)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Keep :meth:`propagate`, which PyG would replace by a generated method."""

    def _needs_messages(self, edge_attr: OptTensor) -> bool:
        """True if PyG's code for single messages must run."""
        steps = ("message", "aggregate", "update")
        is_overridden = any(getattr(type(self), step) is not getattr(_PyG, step) for step in steps)
        is_unusual = self.flow != "source_to_target" or self.decomposed_layers > 1
        is_unusual = is_unusual or not isinstance(self.aggr_module, SumAggregation)
        # PyG adds features to the values as they are where there is no projection, and calls hooks and adapters.
        needs_features = edge_attr is not None if self.lin_edge is None else not is_plain(self.lin_edge)
        return is_overridden or is_unusual or needs_features or bool(self.explain) or has_hooks(self)

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attend over the edges. Arguments and results are those of PyG's layer.

        Args:
            x: Nodes ``[N, C_in]``, or the pair (sources, targets).
            edge_index: Edges ``[2, E]`` from row 0 to row 1, in any order and repeated at will; or a transposed sparse
                adjacency, whose values are the edge features unless ``edge_attr`` is passed.
            edge_attr: Features of the edges ``[E, D]``.
            return_attention_weights: Any bool: also return ``(edge_index, alpha)`` with the weights ``[E, H]`` before
                dropout; a ``SparseTensor`` comes back with ``alpha`` as its values.
        """
        way_out = "With a bool, the weights are returned too."
        checks.kind("return_attention_weights", return_attention_weights, bool | None, "a bool", way_out)
        pair = x if isinstance(x, tuple | list) else (x, x)
        for tokens, lin in zip(pair, (self.lin_key, self.lin_query), strict=False):
            if not is_sparse(tokens):
                check_tokens(tokens, lin)
        self._returns_weights = isinstance(return_attention_weights, bool)
        return super().forward(x, edge_index, edge_attr, return_attention_weights)

    def propagate(self, edge_index: Adj, size: Any = None, **kwargs: Any) -> Tensor:
        query, key, value, feature = (kwargs[name] for name in ("query", "key", "value", "edge_attr"))
        if feature is None and is_sparse(edge_index):
            feature = _edge_values(edge_index)
        if self._needs_messages(feature):
            return MessagePassing.propagate(self, edge_index, size, **kwargs)
        edges = edge_list(edge_index) if is_sparse(edge_index) else edge_index
        rowptr, col, order = rows_of(edges, query.size(0), key.size(0))
        feature = self._check_feature(feature, edges)
        keep = None
        if self.training and self.dropout > 0:
            keep = dropout(query.new_ones(col.numel(), self.heads), self.dropout)
        feature, keep = (reorder(x, order) for x in (feature, keep))
        weight = None if feature is None else self.lin_edge.weight
        scale = self.out_channels**-0.5
        out, alpha = attend_over_rows(query, key, value, rowptr, col, scale, feature, weight, None, keep)
        if self._returns_weights:
            alpha = alpha.to(query.dtype)
            self._alpha = alpha if order is None else torch.empty_like(alpha).index_copy(0, order, alpha)
        return out

    def _check_feature(self, feature: OptTensor, edges: Tensor) -> OptTensor:
        """Check that there are features for each edge if the layer projects some, and return them."""
        if self.lin_edge is None:
            return None
        way_out = "The layer has an 'edge_dim': pass features of the edges."
        checks.kind("edge_attr", feature, Tensor, "a tensor", way_out)
        checks.shape("edge_attr", feature, (edges.size(1), self.lin_edge.in_channels), "[E, D]", "D is 'edge_dim'.")
        checks.floating(edge_attr=feature)
        checks.same_device("edge_index", edges, edge_attr=feature)
        return feature


def _edge_values(adjacency: Tensor | SparseTensor) -> OptTensor:
    """The features that a sparse adjacency holds, or None; values of one dimension are not features."""
    values = to_edge_index(adjacency)[1]
    return None if values.dim() == 1 else values


def _as(kind: Any, conv: _PyG) -> Any:
    """Make a layer of another class that shares parameters, buffers, hooks and options with a layer."""
    layer = object.__new__(kind)
    state = {name: x.copy() if isinstance(x, dict) else x for name, x in conv.__dict__.items()}
    state.pop("propagate", None)  # that of an explainer
    layer.__dict__.update(state)
    return layer
