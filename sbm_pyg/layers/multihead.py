"""The attention layer with the interface of :class:`torch.nn.MultiheadAttention`, for models with padded tensors.

In: padded (or nested) queries, keys and values with masks. Out: tokens in that form and, on request, the weights. Not
here: attention itself. This module removes the padding, calls an :class:`~sbm_pyg.AttentionConv` and pads the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import offsets, unmerged
from ..graphs.rows import index_type, masked_rows
from ..ops import checks
from ..ops.values import can_read
from .attention import Returns
from .named import make_attention
from .propagation import converts

__all__ = ["SBMMultiheadAttention"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _NoFastPath(Tensor):
    """A subclass of Tensor: :func:`torch.overrides.has_torch_function` is True, so torch skips its fused kernels."""


class SBMMultiheadAttention(nn.Module):
    r"""Drop-in for :class:`torch.nn.MultiheadAttention` that attends over sampled or given graphs.

    .. math:: \operatorname{MultiHead}(Q, K, V) = \Big(\Big\Vert_h \operatorname{attention}_h(Q, K, V)\Big) W^\top + b

    with the attention of :class:`AttentionConv`, whose softmax runs over the edges of each query. Padding is removed
    before attention and added after it, so its values do not matter. With a block model, the cost is O(N E_q^2 + NKC +
    E (C + K)) for N real tokens, independent of the padded length.

    Args:
        embed_dim: Channels of queries and of the output, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        dropout: Probability that an attention weight is dropped in training.
        bias: Biases in the four projections.
        add_bias_kv, add_zero_attn: Not supported; must be False.
        kdim: Channels of the keys; ``embed_dim`` if None.
        vdim: Channels of the values; ``embed_dim`` if None.
        batch_first: Batched tensors are ``[B, L, channels]``; otherwise ``[L, B, channels]``, as in torch.
        device, dtype: Device and dtype of the parameters.
        source: The graph source, by name: ``"sbm"``, a block model; ``"indexer"``, an
            :class:`~sbm_pyg.sources.indexer.IndexerSource`, which chooses by rank; a pattern of
            :mod:`~sbm_pyg.sources.patterns` such as ``"window"``; a rule of :mod:`~sbm_pyg.sources.selectors` such as
            ``"top_k"``; or your own, see :func:`~sbm_pyg.register_source`. None: no source, and attention is dense
            unless the call passes a graph.
        **options: Options of the source and of :class:`AttentionConv`, such as ``num_clusters`` of a block model,
            ``estimator``, ``window`` or ``score_bias``, see :func:`~sbm_pyg.make_attention`.

    Raises:
        TypeError: A size is not an integer, a flag is not a bool, ``dtype`` is not floating, or an option is unknown.
        ValueError: ``embed_dim`` is not a multiple of ``num_heads``, or an argument is out of range or not supported.

    Shapes:
        - query ``[B, L, embed_dim]``, key ``[B, S, kdim]``, value ``[B, S, vdim]`` with ``batch_first``, ``[L, B,
          ...]`` without, ``[L, ...]`` for one sequence, or nested, ``[B, *, ...]``. The output is shaped as the query.

    Example:
        >>> attention = SBMMultiheadAttention(32, num_heads=4, batch_first=True, num_clusters=8)
        >>> x, padding = torch.randn(2, 10, 32), torch.arange(10) >= torch.tensor([[10], [7]])
        >>> out, weights = attention(x, x, x, key_padding_mask=padding, seed=0)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))

    Reference: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Cho et al., "Transformers meet Stochastic
    Block Models", NeurIPS 2022. Unlike in torch's layer, the output of padded queries in self-attention is zero,
    weights are returned before dropout, masks only forbid pairs and do not add to scores, and the output of a query
    without keys is the bias of the output projection instead of NaN.
    """

    in_proj_bias = None
    """Always None, so that :class:`torch.nn.TransformerEncoderLayer` does not replace the layer by a fused kernel."""
    _qkv_same_embed_dim = False
    """Always False, so that :class:`torch.nn.TransformerEncoder` does not convert its inputs to nested tensors."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        source: str | None = "sbm",
        **options: Any,
    ) -> None:
        super().__init__()
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        embed_dim, num_heads, kdim, vdim = (
            checks.integer(name, size, 1, "It counts channels or heads.")
            for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim))
        )
        _check_flags(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
            raise TypeError(f"Expected 'dtype' to be one of {[*DTYPES]} (got {dtype!r}). Attention supports these.")
        if device is not None:
            checks.device(device)
        what, way_out = "to be a multiple of 'num_heads'", "Each head takes embed_dim / num_heads channels."
        checks.require(not embed_dim % num_heads, "embed_dim", what, f"{embed_dim} and {num_heads}", way_out)
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            checks.require(not value, name, "to be False", "True", "Append a token to keys and values.")
        if not options.pop("concat", True):
            raise ValueError("Expected no 'concat' (got False). The output projection needs the concatenated heads.")
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.kdim, self.vdim = kdim, vdim
        head_channels = embed_dim // num_heads
        checks.parameters(
            {"embed_dim": embed_dim, "kdim": kdim, "vdim": vdim}, embed_dim * (2 * embed_dim + kdim + vdim)
        )
        sizes = ((self.kdim, embed_dim), head_channels, num_heads)
        self.conv = make_attention(source, *sizes, bias=bias, dropout=dropout, **options)
        if self.vdim != self.kdim:
            self.conv.lin_value = Linear(self.vdim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.to(device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention, **options: Any) -> SBMMultiheadAttention:
        """Construct a layer with copies of the projections of a torch layer; copies of frozen projections are frozen.

        Args:
            attention: Torch's layer.
            **options: ``source`` and its options, as in the constructor.

        Raises:
            TypeError: ``attention`` is not a layer of torch, or an option is unknown or one that it sets.
            ValueError: It appends a bias or zeros to its keys, or ``source`` is unknown.
        """
        what = "a torch.nn.MultiheadAttention"
        checks.kind("attention", attention, nn.MultiheadAttention, what, "Pass the layer itself.")
        weight = attention.out_proj.weight
        arguments: dict[str, Any] = {
            **{name: getattr(attention, name) for name in ("embed_dim", "num_heads", "dropout", "kdim", "vdim")},
            **{name: getattr(attention, name) for name in ("add_zero_attn", "batch_first")},
            "bias": attention.out_proj.bias is not None,
            "add_bias_kv": attention.bias_k is not None,
            "device": weight.device,
            "dtype": weight.dtype,
        }
        fixed = sorted({*arguments} & {*options})
        checks.require(not fixed, "options", f"without {fixed}", "them", "The layer of torch sets them.", TypeError)
        made = cls(**arguments, **options)
        lins = (made.conv.lin_query, made.conv.lin_key, made.conv.lin_value)
        with torch.no_grad():
            for parameter, targets in _paired_parameters(attention, lins, made.out_proj):
                for target, part in zip(targets, parameter.chunk(len(targets)), strict=True):
                    target.copy_(part).requires_grad_(parameter.requires_grad)
        return made.train(attention.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Torch's layer with copies of the projections, frozen if they are; the inverse of :meth:`from_torch`.

        Attention is then dense: the source, and options that torch's layer does not have, are dropped.
        """
        weight, lins = self._weight, (self.conv.lin_query, self.conv.lin_key, self.conv.lin_value)
        bias = any(lin.bias is not None for lin in (*lins, self.out_proj))
        made = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, bias,
            kdim=self.kdim, vdim=self.vdim, batch_first=self.batch_first, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        for target, parts in _paired_parameters(made, lins, self.out_proj):
            with torch.no_grad():
                target.copy_(torch.cat([part.detach() for part in parts]))
            target.requires_grad_(any(part.requires_grad for part in parts))
        return made.train(self.training)

    def reset_parameters(self) -> None:
        """Draw all parameters again from torch's default generator."""
        self.conv.reset_parameters()
        self.out_proj.reset_parameters()

    _reset_parameters = reset_parameters  # torch's name, which layers of PyG call

    @property
    def dropout(self) -> float:
        """Probability that an attention weight is dropped in training."""
        return self.conv.dropout

    @dropout.setter
    def dropout(self, dropout: float) -> None:
        self.conv.dropout = dropout

    @property
    def head_dim(self) -> int:
        """Channels per head C."""
        return self.conv.out_channels

    @property
    def in_proj_weight(self) -> Tensor:
        """The query projection as a :class:`_NoFastPath`, so that torch's encoders skip their fused kernels."""
        return self._weight.as_subclass(_NoFastPath)

    @property
    def _weight(self) -> Tensor:
        """The weight of the query projection, or the first parameter of a wrapped projection."""
        lin = self.conv.lin_query
        return cast(Tensor, lin.weight) if hasattr(lin, "weight") else next(lin.parameters())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        graph: AttentionGraph | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_graph: bool = False,
        sparse_weights: bool = False,
    ) -> tuple[Any, ...]:
        """Attend over a graph that the source samples, or over a given one.

        Args:
            query: ``[B, L, embed_dim]``, ``[L, B, embed_dim]`` or, for one sequence, ``[L, embed_dim]``.
            key: Likewise, S tokens of ``kdim`` channels. If it is the same tensor as the query, or in the same memory,
                the call is self-attention, and padding is removed from the queries too.
            value: Likewise, S tokens of ``vdim`` channels.
            key_padding_mask: ``[B, S]`` (or ``[S]``): True, or minus infinity, at padded keys; False, or 0, at real
                keys. A sequence may consist of padding; its queries then attend to no key.
            need_weights: Return the weights, at another O(E C), and O(B L S) memory, or O(B H L S) without averaging.
            attn_mask: ``[L, S]`` or ``[B*H, L, S]``: True, or minus infinity, where a query must not attend; False, or
                0, elsewhere. These edges are removed from the graph after sampling.
            average_attn_weights: Average the weights over the heads.
            is_causal: Without ``attn_mask``, no query attends to a later key. With ``attn_mask``, a hint that the mask
                is causal; a wrong hint is ignored. A layer made with the option ``is_causal`` is causal in each call,
                for any value of this argument and of the mask.
            graph: The graph to attend over, of H heads or one; nodes are the real tokens (see :func:`~sbm_pyg.unpad`).
            seed: Fixes the sampled graph and the dropout, as in :meth:`AttentionConv.forward`. None: in evaluation mode
                ``conv.eval_seed``, and in training a number of torch's default generator.
            sequence_ids: Number of each sequence, ``[B]``; see :func:`~sbm_pyg.sample_edges`.
            return_graph: Also return the :class:`AttentionGraph` over the real tokens.
            sparse_weights: Return the weights as a sparse tensor that stores the edges, in O(E) memory. Hooks and other
                utilities of torch that change the outputs of modules do not take sparse tensors.

        Returns:
            The output, shaped as the query, and the weights before dropout or None: ``[B, L, S]``, or ``[B, H, L, S]``
            without averaging, without B for one sequence, and 0 where there is no edge. With ``return_graph``, also the
            graph.

        Raises:
            TypeError: An argument is not a tensor, bool or graph, tokens do not have the layer's dtype, or a mask is
                neither boolean nor floating.
            ValueError: Shapes, devices or the graph do not fit, a mask holds other values, ``sequence_ids`` were passed
                and nothing is sampled, or memory does not hold the weights.
        """
        _check_flags(need_weights=need_weights, average_attn_weights=average_attn_weights)
        _check_flags(is_causal=is_causal, return_graph=return_graph, sparse_weights=sparse_weights)
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        self._check_tensors({"query": query, "key": key, "value": value}, masks, graph)
        if sequence_ids is not None and (graph is not None or self.conv.source is None):
            raise ValueError(
                "Expected no 'sequence_ids' if no graph is sampled (got a 'graph', or source=None). Leave them out."
            )
        self_attention, batched, nested = _is_self_attention(query, key), query.dim() == 3, query.is_nested
        query, key, value, real_query, real_key = self._padded(query, key, value, key_padding_mask)
        if is_causal and attn_mask is not None and _is_causal_mask(attn_mask, query.size(1), key.size(1)):
            attn_mask = None
        is_causal = self.conv.is_causal or (is_causal and attn_mask is None)
        # Padding among the keys of cross-attention shifts their positions: then a mask makes the graph causal.
        is_shifted = not self_attention and real_key is not None
        forbidden = self._forbidden(attn_mask, is_causal and is_shifted, query, key)  # [B or 1, H or 1, L, S]
        causal = is_causal and not is_shifted
        keys = PaddedSequences(key, real_key)
        layout = PaddedBatch(keys if self_attention else PaddedSequences(query, real_query), keys)
        edge_filter = None
        if graph is not None:
            self._check_graph(graph, layout)
        if graph is None and self.conv.source is None:
            graph = layout.dense_graph(forbidden, causal)
        elif forbidden is not None:
            edge_filter = partial(layout.allowed, forbidden)
        projections, conv = ((query, layout.query), (key, layout.key), (value, layout.key)), self.conv
        q, k, v = (
            lin(side.unpad(tokens)).view(-1, self.num_heads, self.head_dim).transpose(0, 1)  # [H, N, C]
            for lin, (tokens, side) in zip((conv.lin_query, conv.lin_key, conv.lin_value), projections, strict=True)
        )
        how: dict[str, Any] = {"bipartite": not self_attention, "is_causal": causal, "edge_filter": edge_filter}
        how["ptr"] = layout.query.ptr if self_attention else (layout.key.ptr, layout.query.ptr)
        returns = Returns(graph=True, attention_weights=need_weights)
        how |= {"seed": seed, "sequence_ids": sequence_ids, "returns": returns}
        attended, used, *extras = conv.attend(q, k, v, graph, **how)
        attended = self.out_proj(attended)
        if nested:
            out = torch.nested.as_nested_tensor([*attended.split(layout.query.ptr.diff().tolist())])
        else:
            out = layout.query.pad(attended)
            out = out[0] if not batched else out if self.batch_first else out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = layout.weights(used, extras[0][1], average_attn_weights, sparse_weights, batched)
        return (out, weights, used) if return_graph else (out, weights)

    def _check_tensors(
        self, tokens: dict[str, Tensor], masks: dict[str, Tensor | None], graph: AttentionGraph | None
    ) -> None:
        """Check types, devices, dimensions and dtypes of the arguments."""
        like = self._weight
        tensors: dict[str, Any] = tokens | {name: mask for name, mask in masks.items() if mask is not None}
        for name, x in tensors.items():
            if not (name in tokens and isinstance(x, Tensor) and x.is_nested):
                checks.dense(name, x)
            if x.device != like.device:
                raise ValueError(
                    f"Expected '{name}' on {like.device}, as the layer is (got {x.device}). Move it with `.to(device)`."
                )
        dims = tokens["query"].dim()
        for name, x in tokens.items():
            what = "to have 3 dimensions, or 2 for one sequence, like the other tokens"
            way_out = "See the docstring of SBMMultiheadAttention."
            checks.require(x.dim() == dims and dims in (2, 3), name, what, x.dim(), way_out)
            same = x.dtype == like.dtype or not like.is_floating_point()  # quantized weights check their inputs
            if not (same or (x.dtype in DTYPES and converts(x, like))):
                raise TypeError(
                    f"Expected '{name}' to be {like.dtype}, as the layer is (got {x.dtype}). "
                    "Convert one of them with `.to`."
                )
        if graph is None:
            return
        check_graph(graph)
        if graph.device != like.device:
            raise ValueError(
                f"Expected 'graph' on {like.device}, as the layer is (got {graph.device}). Move it with `.to(device)`."
            )

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The three tensors as ``[B, length, channels]``, and masks of real queries and keys (None: all are real)."""
        tensors = {"query": query, "key": key, "value": value}
        real: dict[str, Tensor | None] = dict.fromkeys(tensors)
        for name, x in tensors.items():
            if x.is_nested:
                tensors[name], real[name] = _from_nested(x, name)
            elif query.dim() == 2:
                tensors[name] = x[None]
            elif not self.batch_first:
                tensors[name] = x.transpose(0, 1)
        batch, keys = tensors["query"].size(0), tensors["key"].shape[1:2]
        for (name, x), channels in zip(tensors.items(), (self.embed_dim, self.kdim, self.vdim), strict=True):
            fits = x.size(0) == batch and x.size(2) == channels
            if not fits or (name == "value" and x.shape[1:2] != keys):
                raise ValueError(
                    f"Expected '{name}' to be [B, length, {channels}] with the B sequences of 'query', and as many "
                    f"keys as values (got {list(x.shape)} with batch_first). "
                    "See the docstring of SBMMultiheadAttention."
                )
        same = key.is_nested == value.is_nested
        if same and key.is_nested:
            same = torch.equal(cast(Tensor, real["key"]), cast(Tensor, real["value"]))
        checks.require(same, "value", "to be nested like 'key'", "other lengths", "Each key has one value.")
        if key_padding_mask is not None:
            if key.is_nested:
                raise ValueError(
                    "Expected no 'key_padding_mask' with a nested 'key' (got both). Nested tensors need none."
                )
            if query.dim() == 2:
                key_padding_mask = key_padding_mask[None]
            if key_padding_mask.shape != (batch, *keys):
                raise ValueError(
                    f"Expected 'key_padding_mask' to be {[batch, *keys]} (got {list(key_padding_mask.shape)}). "
                    "It is True at padded keys."
                )
            real["key"] = ~_as_bool(key_padding_mask, "key_padding_mask")
        return tensors["query"], tensors["key"], tensors["value"], real["query"], real["key"]

    def _check_graph(self, graph: AttentionGraph, layout: PaddedBatch) -> None:
        total, keys = layout.query.total, layout.key.total
        if torch.compiler.is_compiling():  # compiled code checks when it runs
            same = (graph.query_ptr == layout.query.ptr).all() & (graph.key_ptr == layout.key.ptr).all()
            torch._assert_async(same, "Expected 'graph' over the sequences of the real tokens.")
            torch._check(graph.num_queries == total)
            torch._check(graph.num_keys == keys)
        if graph.heads not in (1, self.num_heads):
            raise ValueError(
                f"Expected 'graph' to have 1 or {self.num_heads} heads (got {graph.heads}). "
                "Take one with `graph.head(h)` first."
            )
        sizes, ptrs = (graph.num_queries, graph.num_keys), (layout.query.ptr, layout.key.ptr)
        if sizes != (total, keys) or not graph.same_offsets(*ptrs):
            raise ValueError(
                f"Expected 'graph' over the sequences of N = {total} real queries and M = {keys} real keys "
                f"(got {graph}). Build it with the `ptr` that `sbm_pyg.unpad` gives."
            )

    def _forbidden(self, attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
        """Pairs that must not attend, ``[B or 1, H or 1, L, S]`` bool, or None."""
        batch, length, keys = query.size(0), query.size(1), key.size(1)
        later = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
        if attn_mask is None:
            return later
        if attn_mask.shape not in ((length, keys), (batch * self.num_heads, length, keys)):
            raise ValueError(
                f"Expected 'attn_mask' to be {[length, keys]} or {[batch * self.num_heads, length, keys]} "
                f"(got {list(attn_mask.shape)}). It is True where a query must not attend."
            )
        first = (1, 1) if attn_mask.dim() == 2 else (batch, self.num_heads)
        forbidden = _as_bool(attn_mask, "attn_mask").view(*first, length, keys)
        return forbidden if later is None else forbidden | later


def _paired_parameters(
    attention: nn.MultiheadAttention, lins: Sequence[nn.Module], out_proj: nn.Linear
) -> list[tuple[Tensor, list[Tensor]]]:
    """Pairs of a parameter of torch's layer and the parameter with the same values in separate projections."""
    weights, biases = ([getattr(lin, name) for lin in lins] for name in ("weight", "bias"))
    apart = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    pairs = [
        (attention.in_proj_weight, weights),
        (attention.in_proj_bias, biases),
        *((parameter, [weight]) for parameter, weight in zip(apart, weights, strict=True)),
        (attention.out_proj.weight, [out_proj.weight]),
        (attention.out_proj.bias, [out_proj.bias]),
    ]
    return [(parameter, parts) for parameter, parts in pairs if not any(x is None for x in (parameter, *parts))]


def _is_self_attention(query: Tensor, key: Tensor) -> bool:
    """True if queries and keys are one tensor, or views of one memory, as activation checkpointing makes them."""
    if query is key:
        return True
    if query.is_nested or key.is_nested or torch.compiler.is_compiling() or not (can_read(query) and can_read(key)):
        return False
    memory = (query.shape, query.stride(), query.dtype, query.device)
    return memory == (key.shape, key.stride(), key.dtype, key.device) and 0 != query.data_ptr() == key.data_ptr()


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        checks.flag(name, value, "Check the order of the arguments.")


def _is_causal_mask(mask: Tensor, queries: int, keys: int) -> bool:
    """True if a mask ``[L, L]`` forbids all later keys and nothing else, or if its values cannot be read."""
    if mask.shape != (queries, keys) or queries != keys:
        return False
    return not can_read(mask) or torch.equal(_as_bool(mask, "attn_mask"), torch.ones_like(mask).triu(1).bool())


def _as_bool(mask: Tensor, name: str) -> Tensor:
    """A boolean mask: True where the mask is True or minus infinity."""
    if mask.dtype == torch.bool:
        return mask
    way_out = "Convert it with `.bool()`, True = leave out; if it is 1 for tokens and 0 for padding, pass `mask == 0`."
    checks.require(mask.is_floating_point(), name, "to be boolean or floating", mask.dtype, way_out, TypeError)
    masked = mask == -torch.inf
    is_valid = (masked | (mask == 0)).all()
    if not can_read(mask):
        torch._assert_async(is_valid, f"Expected '{name}' to hold 0 and minus infinity alone.")
    elif not is_valid:
        raise ValueError(
            f"Expected '{name}' to hold 0 and minus infinity alone (got other values). "
            "Pass `mask == 0` of a mask with 1 for tokens; use the option `score_bias` to add to the scores of edges."
        )
    return masked


def _from_nested(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Pad a nested tensor to ``[B, length, channels]``; also return the mask of its real tokens, ``[B, length]``."""
    if x.layout != torch.strided:
        raise ValueError(
            f"Expected '{name}' to be padded, or nested with the strided layout (got layout {x.layout}). "
            "Pad it with `torch.nested.to_padded_tensor`, "
            "or give its `values()` and `offsets()` to SBMAttentionConv as tokens and `ptr`."
        )
    lengths, channels = zip(*(part.shape for part in x.unbind()), strict=True)
    way_out = "Convert them to one width."
    checks.require(len({*channels}) <= 1, name, "to have equal channels in all sequences", channels, way_out)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    return padded, torch.arange(padded.size(1), device=x.device) < torch.tensor(lengths, device=x.device)[:, None]


class PaddedSequences:
    """Positions of the real tokens of queries or keys in a padded tensor. With ``real=None`` there is no padding.

    Args:
        padded: ``[B, length, ...]``.
        real: True at real tokens, ``[B, length]`` bool, or None.
    """

    def __init__(self, padded: Tensor, real: Tensor | None = None) -> None:
        batch, self.length = padded.shape[:2]
        self.shape, self.real = (batch, self.length), real
        if real is None:
            self.slots, self.total = None, batch * self.length
            self.ptr = torch.arange(batch + 1, device=padded.device) * self.length
            return
        self.slots, self.ptr = unmerged(real.flatten()).nonzero()[:, 0], offsets(real.sum(1))  # [N], [B+1]
        self.total = self.slots.numel()
        if torch.compiler.is_compiling():
            torch._check(self.total >= 2)  # inductor specialises sizes of 1

    def unpad(self, padded: Tensor) -> Tensor:
        """The real tokens, ``[N, ...]``, of padded ones ``[B, length, ...]``."""
        tokens = padded.flatten(0, 1)
        return tokens if self.slots is None else tokens[self.slots]

    def pad(self, tokens: Tensor) -> Tensor:
        """Padded tokens, ``[B, length, ...]``, with zeros as padding."""
        if self.slots is not None:
            padded = tokens.new_zeros(self.shape[0] * self.length, *tokens.shape[1:])
            tokens = padded.index_copy(0, self.slots, tokens)
        return tokens.unflatten(0, self.shape)

    def slot(self, token: Tensor) -> Tensor:
        """Indices of real tokens among all padded ones."""
        return token if self.slots is None else self.slots[token]


class PaddedBatch:
    """Queries and keys of a padded batch."""

    def __init__(self, query: PaddedSequences, key: PaddedSequences) -> None:
        self.query, self.key = query, key

    def coordinates(self, graph: AttentionGraph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sequence, head, query and key of each edge in the padded tensors, four times ``[E]``."""
        key, query = graph.edge_index
        query, key = self.query.slot(query), self.key.slot(key)
        return query // self.query.length, graph.edge_head, query % self.query.length, key % self.key.length

    def allowed(self, forbidden: Tensor, graph: AttentionGraph) -> Tensor:
        """Mask ``[E]`` of the edges outside the forbidden pairs ``[B or 1, H or 1, L, S]``."""
        sequence, head, query, key = self.coordinates(graph)
        return ~forbidden[sequence % forbidden.size(0), head % forbidden.size(1), query, key]

    def dense_graph(self, forbidden: Tensor | None, is_causal: bool) -> AttentionGraph:
        """All pairs of real tokens that are not forbidden."""
        batch, length, keys = *self.query.shape, self.key.length
        real = self.key.real
        if real is None:
            real = torch.ones(batch, keys, dtype=torch.bool, device=self.key.ptr.device)
        number = real.flatten().cumsum(0).view(batch, keys) - 1  # of each real key among all
        slot = self.query.slot(torch.arange(self.query.total, device=real.device))
        sequence, position = slot // length, slot % length  # [N]
        heads = 1 if forbidden is None else forbidden.size(1)

        def rows(row: Tensor) -> tuple[Tensor, Tensor]:
            query = row % self.query.total
            row_sequence = sequence[query]
            pairs = real[row_sequence]
            if is_causal:
                pairs = pairs & (torch.arange(keys, device=real.device) <= position[query, None])
            if forbidden is not None:
                pairs = pairs & ~forbidden[row_sequence % forbidden.size(0), row // self.query.total, position[query]]
            return pairs, number[row_sequence]

        count, way_out = heads * self.query.total, "Give the layer a source, or pass a graph."
        numbers = number.new_empty(0, dtype=index_type(self.key.total))
        rowptr, col = masked_rows(rows, count, count * keys, "query", way_out, numbers)
        sizes = (self.query.total, self.key.total, heads, self.query.ptr, self.key.ptr)
        return AttentionGraph._trusted(rowptr, col, *sizes, is_causal)

    def weights(self, graph: AttentionGraph, alpha: Tensor, average: bool, sparse: bool, batched: bool) -> Tensor:
        """Weights of the edges: ``[B, L, S]``, averaged over heads, or ``[B, H, L, S]``; without B for one sequence."""
        batch, length, keys = *self.query.shape, self.key.length
        apart = graph.heads == 1 or (not average and batch == 1)  # edges are sorted, with one edge a pair
        size = [batch] * batched + [graph.heads] * (not average) + [length, keys]
        count, way_out = graph.num_edges * (110 if apart or not sparse else 160), "a sparser graph."
        if not sparse:
            count, way_out = count + math.prod(size) * alpha.element_size(), f"sparse_weights=True, or {way_out}"
        checks.memory("need_weights", count, 1, graph.device, f"Pass need_weights=False, {way_out}", "bytes")
        sequence, head, query, key = self.coordinates(graph)
        alpha = alpha / graph.heads if average else alpha
        if not sparse:
            row = sequence if average else sequence * graph.heads + head
            pair = (row * length + query) * keys + key
            return alpha.new_zeros(math.prod(size)).index_add(0, pair, alpha).view(size)
        index = torch.stack([sequence] * batched + [head] * (not average) + [query, key])
        return torch.sparse_coo_tensor(
            index, alpha, size, check_invariants=False, is_coalesced=apart or None
        ).coalesce()
