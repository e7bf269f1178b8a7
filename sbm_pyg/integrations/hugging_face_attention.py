"""The attention of ``transformers`` over the graphs of sources: what it calls for masks, and what it calls in layers.

In: padded queries, keys and values ``[B, H, L, C]`` of an attention module, and the mask. Out: tokens and weights in
that form. Not here: which modules have a source (``hugging_face``), and attention itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from ..graph import AttentionGraph
from ..layers.attention import AttentionConv, Returns
from ..layers.multihead import PaddedBatch, PaddedSequences
from ..ops.reference.segments import runs
from ..ragged import Tokens, draw_seed, offsets
from ..sources import patterns, selectors
from ..sources.interface import GraphSource
from ..sources.learned import DensitySource

__all__ = ["NAME", "GraphAttention", "PairMask", "attend", "make_mask"]

NAME = "sbm"
"""Name of the implementation, of the options in a config, and of the part of an attention module."""
NO_CACHE = "Pass use_cache=False, which computes all tokens in each step."


class PairMask:
    """Which pairs may attend, as sequences: padding by position, and earlier tokens alone or all.

    Args:
        is_causal: No query attends to a later key.
        offset: Number of tokens before the first query, whose keys are in a cache.
        real: True at real keys, ``[B, S]`` bool; None: all of them.
    """

    def __init__(self, is_causal: bool, offset: int, real: Tensor | None) -> None:
        self.is_causal, self.offset = is_causal, offset
        self.real = None if real is None or bool(real.all()) else real
        self._sides: dict[Any, PaddedSequences] = {}

    def side(self, tokens: Tensor) -> PaddedSequences:
        """Positions of the real ones of keys ``[B, S, ...]``, computed once for all layers on a device."""
        known = (tokens.shape[:2], tokens.device)
        if known not in self._sides:
            real = None if self.real is None else self.real[:, : tokens.size(1)].to(tokens.device)
            self._sides[known] = PaddedSequences(tokens, real, "attention_mask")
        return self._sides[known]

    @property
    def ndim(self) -> int:
        """No number, since only a static cache makes masks before the model does, and reads them."""
        raise ValueError(
            "Expected a cache that grows (got a static one, for which masks are made ahead). Leave out "
            "'cache_implementation', or pass use_cache=False."
        )

    def dense(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The mask over all pairs, ``[B or 1, 1, L or 1, S]`` bool, or None if all may attend."""
        mask = None if self.real is None else self.real[:, None, None].to(query.device)
        if self.is_causal:
            last = torch.arange(query.size(2), device=query.device) + self.offset
            earlier = (torch.arange(key.size(2), device=query.device) <= last[:, None])[None, None]
            mask = earlier if mask is None else mask & earlier
        return mask


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, **options: Any,
) -> PairMask | Tensor:  # fmt: skip
    """What ``transformers`` calls in a forward pass: a :class:`PairMask`, or ``[B, 1, L, S]`` bool for other pairs."""
    is_plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if not is_plain or int(kv_offset) or (attention_mask is not None and attention_mask.dim() != 2):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
        assert mask is not None
        return mask
    real = attention_mask
    if real is not None and real.size(1) < kv_length:  # a cache with space for later tokens
        real = nn.functional.pad(real, (0, kv_length - real.size(1)))
    return PairMask(mask_function is causal_mask_function, int(q_offset), real)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: PairMask | Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    output_attentions: bool | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What ``transformers`` calls in a layer: the output ``[B, L, H, C']``, and weights ``[B, H, L, S]`` if asked."""
    if not hasattr(module, NAME):
        raise ValueError(
            f"Expected 'model' with graph sources for attn_implementation='sbm' (got none in {type(module).__name__}). "
            "Call `sbm_pyg.integrations.hugging_face.replace_attention(model)`."
        )
    for name in ("softcap", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(
                f"Expected attention without '{name}' (got it from {type(module).__name__}). Choose another model, or "
                "another attn_implementation."
            )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary positions are float32, which torch's attention casts by itself
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    heads = query.size(1)
    key, value = (x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1) for x in (key, value))
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = PairMask(is_causal, key.size(2) - query.size(2) if is_causal else 0, None)
    part: GraphAttention | None = getattr(module, NAME)
    asked = _active_collector.get() or {}  # some models do not pass the argument on
    return_weights = bool(output_attentions) or any("attentions" in key for key in asked)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    if part is None:
        mask = attention_mask if isinstance(attention_mask, Tensor) else attention_mask.dense(query, key)
        if return_weights:
            return attend_eagerly(query, key, value, mask, scaling, dropout)
        # repeated heads have no groups
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
    if not isinstance(attention_mask, PairMask):
        raise ValueError(
            f"Expected 'attention_mask' [B, S] of padding (got one of pairs, {list(attention_mask.shape)}, in "
            f"{type(module).__name__}, as for packed sequences). Pass [B, S], or another attn_implementation."
        )
    part.conv.scale, part.conv.dropout = scaling, dropout
    return part(query, key, value, attention_mask, return_weights)


def attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """Dense attention that returns its weights."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).nan_to_num(0.0)  # padded queries may have no keys
    out = nn.functional.dropout(weights, dropout) @ value
    return out.transpose(1, 2).contiguous(), weights


class GraphAttention(nn.Module):
    """The part of an attention module of ``transformers`` with the graph source.

    The target density of the source is the extra state, which ``from_pretrained`` can load.

    Args:
        conv: Attention layer without projections.
    """

    def __init__(self, conv: AttentionConv) -> None:
        super().__init__()
        self.conv = conv
        self.is_complete = False
        """Whether the weights have been loaded or initialized."""
        self.register_state_dict_post_hook(_drop_density)

    def reset_if_missing(self) -> None:
        """Reset all parameters, if some of them are not those of the constructor or of a file."""
        tensors = [*self.parameters(), *self.buffers()]
        if not self.is_complete and not all(getattr(each, "_is_hf_initialized", False) for each in tensors):
            with torch.no_grad():
                for buffer in self.buffers():
                    buffer.zero_()
                self.conv.reset_parameters()
            self.__dict__.pop("_extra_state", None)
        self.is_complete = True

    def get_extra_state(self) -> Tensor:
        """The target density, or NaN."""
        source = self.conv.source
        density = source.state_dict().get("target_density") if isinstance(source, DensitySource) else None
        if density is None or not density.numel():
            return torch.tensor(math.nan, dtype=torch.float64)
        return density

    def set_extra_state(self, state: Tensor) -> None:
        """Set the target density."""
        source, is_none = self.conv.source, math.isnan(float(state))  # as with a number of keys
        if isinstance(source, DensitySource) and not (is_none and source._needs_density):
            source._restore_density(None if is_none else float(state))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: PairMask, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over the graph of the source, ``[B, L, H, C']``, and the weights ``[B, H, L, S]`` or None."""
        if query.shape[1::2] != (self.conv.heads, self.conv.out_channels):
            raise ValueError(
                f"Expected queries [B, H, L, C] of {self.conv.heads} heads and {self.conv.out_channels} channels, as "
                f"the attributes of the module tell (got {list(query.shape)}). Set them before `replace_attention`."
            )
        length, keys = query.size(2), key.size(2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, L, H, C]
        total = mask.offset + length if mask.is_causal else keys
        key, value = key[:, :total], value[:, :total]  # without the free places of a cache
        keys_side = mask.side(key)
        is_self = length == total
        query_side = keys_side if is_self else PaddedSequences(query)
        flat = [
            side.unpad(x).transpose(0, 1) for side, x in ((query_side, query), (keys_side, key), (keys_side, value))
        ]  # [H, N, C]
        returns = Returns(graph=return_weights, attention_weights=return_weights)
        attend: Any = partial(self.conv.attend, *flat, returns=returns)
        if is_self:
            out = attend(is_causal=mask.is_causal, ptr=keys_side.ptr)
        else:
            ptrs = (keys_side.ptr, query_side.ptr)
            if mask.is_causal:
                self._check_cached(length, total)
            try:
                graph = self._graph_of_last(flat, *ptrs) if mask.is_causal else None
                out = attend(edge_index=graph, bipartite=True, ptr=ptrs)
            except ValueError as error:  # of a source of a user that chooses among tokens, not for queries
                raise ValueError(f"{error} {NO_CACHE}") from error
        weights = None
        if return_weights:
            out, graph, (_, alpha) = out
            sequence, head, row, col = PaddedBatch(query_side, keys_side).coordinates(graph)
            shape = (query.size(0), self.conv.heads, length, keys)
            weights = alpha.new_zeros(shape).index_put((sequence, head, row, col), alpha)
        return query_side.pad(out.unflatten(1, (self.conv.heads, -1))), weights

    def _check_cached(self, length: int, total: int) -> None:
        """Raise ValueError unless the rows of the source, and the new tokens, allow earlier keys in a cache."""
        source: Any = self.conv.source
        if length > 1:
            raise ValueError(f"Expected one new token per step with a cache (got {length} of {total}). {NO_CACHE}")
        rule = source.rule.rule if isinstance(source, patterns.PatternSource | selectors.SelectorSource) else None
        depends = isinstance(source, selectors.RoutingSource) or rule not in (None, selectors.top_k)
        if depends or getattr(source, "block_size", 1) > 1:
            raise ValueError(
                "Expected a source whose rows do not depend on each other, with 'block_size' 1, for a cache (got "
                f"{type(source).__name__}). {NO_CACHE}"
            )

    def _graph_of_last(self, flat: list[Tensor], key_ptr: Tensor, query_ptr: Tensor) -> AttentionGraph | None:
        """The graph of one new token per sequence, whose earlier keys are in a cache; None: the layer asks its source.

        All keys are allowed, so nothing is causal. The edges of a window, which the source does not force for other
        tokens than the keys, are to the last keys.
        """
        source: Any = self.conv.source
        windows = [
            part.window for part in source.modules() if isinstance(part, GraphSource) and part.window is not None
        ]
        if not windows or (isinstance(source, DensitySource) and source.target_density == 1):
            return None
        tokens = Tokens(flat[0], flat[1], query_ptr, key_ptr, True, seed=draw_seed())
        choice = source(tokens).expand(self.conv.heads)
        first = torch.maximum(key_ptr[1:] - 1 - max(windows), key_ptr[:-1])
        count = key_ptr[1:] - first
        sizes = (query_ptr.numel() - 1, flat[1].size(1), 1, query_ptr, key_ptr)
        return choice.graph | AttentionGraph._trusted(offsets(count), runs(first, count), *sizes)


def _drop_density(part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave the target density to the extra state."""
    state.pop(f"{prefix}conv.source.target_density", None)
