"""PyG's graph transformer layer with ragged attention.

In: nodes of a batch of graphs and their edges. Out: nodes. Not here: attention (``attention``), attention for padded
tensors (``multihead``), and the replacement of layers in a model (``replace``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import dropout
from torch_geometric.nn import GPSConv, MessagePassing
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj

from ..ops import checks
from ..sources.patterns import PatternSource, full
from .attention import AttentionConv
from .multihead import SBMMultiheadAttention
from .named import make_attention
from .propagation import channel_pair

__all__ = ["SparseGPSConv"]


class SparseGPSConv(GPSConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GPSConv`, whose global attention runs over sampled or given graphs.

    A layer of a graph transformer adds message passing along the edges of the data and attention among all nodes of a
    graph:

    .. math:: x' = y + \operatorname{MLP}(y), \qquad y = (x + \operatorname{conv}(x)) + (x + W \operatorname{attn}(x))

    with a norm after each of the three sums. Attention is an :class:`~sbm_pyg.AttentionConv` with any source. It never
    leaves a graph of the mini-batch, and makes no dense batch: the cost is the sum of the costs of the graphs, and does
    not depend on the largest graph. Over full graphs it equals :class:`~torch_geometric.nn.conv.GPSConv` with
    ``attn_type="multihead"``, except for the dropout of attention weights, which uses other random numbers.

    Args:
        channels: Channels of the nodes.
        conv: Message passing layer, or None.
        attn: Attention among ``channels`` channels, such as ``SBMAttentionConv(channels, channels // heads, heads)``. A
            linear map takes its output to ``channels``. None: attention with ``heads`` heads over the source that
            ``attn_type`` names.
        dropout: Probability that a channel of an intermediate result is dropped in training.
        act: Activation in the MLP, a name or a function.
        act_kwargs: Arguments of the activation.
        norm: Normalization layer, a name or a function; None: no norms.
        norm_kwargs: Arguments of the normalization.
        heads: Without ``attn``: number of heads, which divides ``channels``. None: 1.
        attn_type: Without ``attn``: name of the source, as in :func:`replace_attention`. ``"multihead"``, as in PyG, is
            ``"full"``. None: ``"sbm"``, a block model.
        attn_kwargs: Without ``attn``: options of the source and of :class:`AttentionConv`, such as
            ``{"num_clusters": 16, "dropout": 0.1}``.

    Raises:
        TypeError: ``attn`` is not an :class:`~sbm_pyg.AttentionConv`, or is passed with options of one.
        ValueError: ``attn`` takes other channels, or an argument is out of range.

    Shapes:
        - nodes ``[N, channels]``; output ``[N, channels]``.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import GINEConv
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = GINEConv(nn.Linear(32, 32), edge_dim=4)
        >>> layer = SparseGPSConv(32, conv, heads=4, attn_kwargs={"num_clusters": 16})
        >>> layer = SparseGPSConv(32, conv, SBMAttentionConv(32, 8, heads=4, num_clusters=16))  # the same
        >>> edge_index, batch = torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 1, 1])
        >>> layer(torch.randn(5, 32), edge_index, batch, edge_attr=torch.randn(3, 4)).shape
        torch.Size([5, 32])

    Reference: Rampasek et al., "Recipe for a General, Powerful, Scalable Graph Transformer", NeurIPS 2022. In that
    paper attention is dense, or linear in the nodes.
    """

    def __init__(
        self,
        channels: int,
        conv: MessagePassing | None,
        attn: AttentionConv | None = None,
        dropout: float = 0.0,
        act: str = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: str | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        *,
        heads: int | None = None,
        attn_type: str | None = None,
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        channels = checks.integer("channels", channels, 1, "It is the width of the nodes.")
        checks.number("dropout", dropout, "[0, 1]", "It is the probability that a channel is dropped.")
        checks.kind("conv", conv, nn.Module | None, "a layer of PyG, or None", "Make an instance of it.")
        if attn is None:
            heads = checks.integer("heads", 1 if heads is None else heads, 1, "Each has a graph of its own.")
            if channels % heads:
                raise ValueError(f"Expected 'heads' to divide 'channels' (got {heads} and {channels}). Or pass 'attn'.")
            checks.kind("attn_type", attn_type, str | None, "the name of a source", "See `make_attention`.")
            source = {None: "sbm", "multihead": "full"}.get(attn_type, attn_type)
            attn = make_attention(cast(str, source), channels, channels // heads, heads, **attn_kwargs or {})
        elif heads is not None or attn_type is not None or attn_kwargs is not None:
            raise TypeError(
                f"Expected no options of attention with an 'attn' (got both, and a {type(attn).__name__}). It has its "
                "own: leave out 'heads', 'attn_type' and 'attn_kwargs', or 'attn'."
            )
        way_out = "Build an SBMAttentionConv, or leave it out and pass `heads=` by name."
        checks.kind("attn", attn, AttentionConv, "an AttentionConv", way_out)
        what, way_out = f"to take {channels} channels, as 'channels' says", "Nodes enter both layers."
        checks.require({*channel_pair(attn.in_channels)} <= {channels, -1}, "attn", what, attn.in_channels, way_out)
        super().__init__(channels, conv, 1, dropout, act, act_kwargs, norm, norm_kwargs)
        self.heads, self.attn_type, self.attn = attn.heads, type(attn).__name__, attn
        self.lin_out = nn.Linear(attn.out_channels * (attn.heads if attn.concat else 1), channels)

    @classmethod
    def from_gps(cls, gps: GPSConv, **options: Any) -> SparseGPSConv:
        """Construct a layer from PyG's layer: projections of the attention are copied, other modules are shared.

        Args:
            gps: PyG's layer, with ``attn_type="multihead"``.
            **options: ``source`` and its options, as in :class:`SBMMultiheadAttention`. With ``source=None`` attention
                runs over all pairs of a graph.

        Raises:
            TypeError: ``gps`` is not a layer of PyG with attention of torch.
        """
        checks.kind("gps", gps, GPSConv, "a GPSConv of PyG", "Pass the layer itself.")
        way_out = "Build it with attn_type='multihead'."
        checks.kind("gps.attn", gps.attn, nn.MultiheadAttention, "a torch.nn.MultiheadAttention", way_out)
        attention = SBMMultiheadAttention.from_torch(gps.attn, **options)
        if attention.conv.source is None:
            attention.conv.source = PatternSource(full)
        made = cls(gps.channels, gps.conv, attention.conv, gps.dropout, norm=None)
        made.lin_out = attention.out_proj
        for name in ("mlp", "norm1", "norm2", "norm3", "norm_with_batch"):
            setattr(made, name, getattr(gps, name))
        return made.train(gps.training)

    def to_gps(self) -> GPSConv:
        """Undo :meth:`from_gps`: PyG's layer, with copies of the projections of attention, and the other modules.

        Attention is then dense: the source, and options that torch's layer does not have, are dropped.

        Raises:
            ValueError: Attention has sizes that torch's layer does not support.
        """
        attn, width = self.attn, self.attn.heads * self.attn.out_channels
        what = f"with concatenated heads of {self.channels} channels together, as PyG's layer has"
        way_out = "It has no dense counterpart: leave it as it is."
        checks.require(width == self.channels and attn.concat, "attn", what, attn, way_out)
        attention = SBMMultiheadAttention(
            width, attn.heads, attn.dropout, attn.lin_query.bias is not None, batch_first=True, source=None
        )
        attention.conv, attention.out_proj = attn, self.lin_out
        made = GPSConv(self.channels, self.conv, attn.heads, self.dropout, norm=None)
        made.attn = attention.to_torch()
        for name in ("mlp", "norm1", "norm2", "norm3", "norm_with_batch"):
            setattr(made, name, getattr(self, name))
        return made.train(self.training)

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's default generator."""
        for part in (self.conv, self.attn, self.lin_out, self.mlp, self.norm1, self.norm2, self.norm3):
            reset(part)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None = None,
        *,
        attn_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Pass messages and attend.

        Args:
            x: Nodes ``[N, channels]``.
            edge_index: Edges of the data, for ``conv``.
            batch: Graph of each node, ``[N]`` int64, ascending. None: one graph, such as a sample of a large one.
            attn_kwargs: Further arguments of the call of ``attn``, see :meth:`AttentionConv.forward`: ``{"seed": 0}``,
                or ``{"edge_index": expander}`` to attend over a given graph. ``ptr``, in place of ``batch``, reaches
                only attention.
            **kwargs: Further arguments of the call of ``conv``, such as ``edge_attr``.

        Raises:
            TypeError, ValueError: As :meth:`AttentionConv.forward`.
        """
        checks.kind("attn_kwargs", attn_kwargs, Mapping | None, "a dict of arguments of 'attn'", "Name each one.")
        options = {"batch": batch} | dict(attn_kwargs or {})
        if any(options.get(name) for name in ("return_graph", "return_choice", "return_attention_weights")):
            raise ValueError(f"Expected 'attn_kwargs' without extra outputs (got {[*options]}). Call `attn` for them.")
        out = self._add(x, self.lin_out(self.attn(x, **options)), self.norm2, batch)
        if self.conv is not None:
            out = self._add(x, self.conv(x, edge_index, **kwargs), self.norm1, batch) + out
        out = out + self.mlp(out)
        return out if self.norm3 is None else self._normalize(out, self.norm3, batch)

    def _add(self, x: Tensor, h: Tensor, norm: nn.Module | None, batch: Tensor | None) -> Tensor:
        """Add the residual, and normalize the sum."""
        h = dropout(h, self.dropout, self.training) + x
        return h if norm is None else self._normalize(h, norm, batch)

    def _normalize(self, h: Tensor, norm: nn.Module, batch: Tensor | None) -> Tensor:
        return cast(Tensor, norm(h, batch=batch) if self.norm_with_batch else norm(h))
