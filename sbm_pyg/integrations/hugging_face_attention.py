"""The attention of ``transformers`` over the graphs of sources.

In: padded queries, keys and values ``[B, H, L, C]`` of an attention module, and the mask. Out: padded tokens and
weights. Not here: which modules have a source (``hugging_face``), masks (``hugging_face_masks``), and attention itself.
"""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary
from transformers.utils.output_capturing import _active_collector

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, draw_seed
from ..layers.attention import AttentionConv, Returns
from ..layers.multihead import PaddedBatch
from ..ops import schemas
from ..sources import patterns
from ..sources.interface import GraphSource
from ..sources.learned import DensitySource
from .hugging_face_masks import PACKED, MaskBias, MaskPairs, complete_pairs, packed_sequences, read_mask, unread_pairs

if TYPE_CHECKING:
    from ..ops.cpu.memberships import KeyMemberships

__all__ = ["HARMLESS", "NAME", "READ", "GraphAttention", "attend", "note_cache"]

NAME = "sbm"
"""Name of the implementation, of the options in a config, and of the part of an attention module."""
NO_CACHE = "Pass use_cache=False and no assistant model: each step then computes all tokens."
READ = {
    "dropout", "scaling", "is_causal", "position_bias", "output_attentions", "s_aux", *PACKED,
    "attention_mask", "query", "key", "value", "module",
}  # fmt: skip
"""Arguments of an attention call that :func:`attend` reads."""
HARMLESS = {
    "sliding_window",  # the mask holds it
    "max_length_q", "max_length_k", "position_ids", "position_embeddings", "cache_position", "deterministic",
    "use_cache", "past_key_values", "cache", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "return_dict", "return_loss", "token_type_ids", "mm_token_type_ids", "logits_to_keep", "labels", "input_ids",
    "pixel_values", "inputs_embeds",
}  # fmt: skip
"""Other arguments, which change no weight of the attention of a model."""
CACHES = ("past_key_values", "cache", "layer_past")
"""Arguments of an attention module that hold its cache."""
FEW = 64
"""Up to so many new tokens of a sequence get their rows by scores of all keys at once."""
_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What layers have kept of the keys in the layers of caches."""


# ------------------------------------------------------------------ caches


@torch.compiler.disable
def note_cache(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
    """Hook before an attention module that stores the layer of its cache for :class:`GraphAttention`."""
    part: GraphAttention | None = getattr(module, NAME, None)
    if part is None:
        return
    cache = next((options[name] for name in CACHES if options.get(name) is not None), None)
    layers, number = getattr(cache, "layers", ()), getattr(module, "layer_idx", None)
    part.__dict__.pop("kept", None)
    if number is not None and number < len(layers) and not module.training:
        kept = _KEPT.get(layers[number])
        if kept is None or kept.part() is not part:
            kept = _KEPT[layers[number]] = KeptKeys(part)
        kept.check(getattr(layers[number], "keys", None))
        part.__dict__["kept"] = kept


class KeptKeys:
    """Memberships that a layer computed for keys in a cache, valid while keys and parameters stay unchanged.

    A cropped cache holds a view of the tensor that the layer has seen. A cache that was reordered, or appended to by
    other code, holds another tensor or another version of the tensor, and memberships are computed again.
    """

    def __init__(self, part: GraphAttention) -> None:
        self.part, self.modules = weakref.ref(part), [weakref.ref(x) for x in part.modules() if x._parameters]
        self.memberships: KeyMemberships | None = None
        self.seen: tuple[Any, ...] | None = None
        self.storage: StorageWeakRef | None = None

    def state(self, keys: Tensor) -> tuple[Any, ...]:
        """Value that changes if a tensor of keys or the parameters of the layer are changed."""
        modules = (reference() for reference in self.modules)
        tensors = (x for module in modules if module is not None for x in module._parameters.values() if x is not None)
        versions = [(id(x), 0 if x.is_inference() else x._version) for x in tensors]
        return (keys._version, keys.data_ptr(), keys.size(0), keys.stride(), *versions)

    def check(self, keys: Tensor | None) -> None:
        """Clear the memberships, unless the cache still holds the keys that the layer has seen."""
        is_kept = keys is not None and not keys.is_inference() and self.storage is not None
        if is_kept and keys is not None:
            is_kept = StorageWeakRef(keys.untyped_storage()) == self.storage and self.state(keys) == self.seen
        if not is_kept:
            self.memberships = None

    def memberships_before(self, count: int) -> KeyMemberships | None:
        """Memberships of the first keys, at most ``count``."""
        if self.memberships is not None:
            self.memberships.count = min(self.memberships.count, count)
        return self.memberships

    def note(self, keys: Tensor) -> None:
        """Record the keys that the layer has seen."""
        self.storage, self.seen = StorageWeakRef(keys.untyped_storage()), self.state(keys)


# ------------------------------------------------------------------ attention


@torch.compiler.disable  # it branches on the values of masks
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    position_bias: Tensor | None = None, output_attentions: bool | None = None, s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention function of ``transformers``: the output ``[B, L, H, C']``, and weights ``[B, H, L, S]`` on request.

    ``s_aux`` ``[H]`` holds learned sinks: in each row, the score of an extra key whose value is zero.
    """
    if not hasattr(module, NAME):
        raise ValueError(
            f"Expected 'model' with graph sources for attn_implementation='sbm' (got none in {type(module).__name__}). "
            "Call `sbm_pyg.integrations.hugging_face.replace_attention(model)`."
        )
    unknown = sorted(name for name, x in options.items() if x is not None and name not in READ | HARMLESS)
    if unknown:
        raise ValueError(
            f"Expected attention without {unknown} (got them from {type(module).__name__}). They may change what its "
            "tokens attend to: leave them out, or choose another attn_implementation."
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary positions are float32, which torch's attention casts by itself
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    part: GraphAttention | None = getattr(module, NAME)
    kept = None if part is None else part.__dict__.pop("kept", None)
    sizes = query.size(2), key.size(2)
    if attention_mask is None:
        if is_causal is None:  # eager cross attention, which stays dense, does not look at the attribute
            is_causal = part is not None and getattr(module, "is_causal", False)
        pairs = unread = MaskPairs(is_causal, sizes[1] - sizes[0] if is_causal else 0)
    else:
        unread = unread_pairs(attention_mask, sizes[0])
        pairs = unread if part is None else read_mask(attention_mask, *sizes)
    sequence = packed_sequences(options, query, key)
    pairs, unread = (complete_pairs(x, sequence, position_bias) for x in (pairs, unread))
    requested = _active_collector.get() or {}  # some models do not pass the argument on
    return_weights = bool(output_attentions) or any("attentions" in name for name in requested)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    if part is None or part.attends_densely(pairs):
        mask = unread.dense(*sizes, query.device)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
        if return_weights or s_aux is not None:
            key, value = _for_heads(query.size(1), key, value)
            out, weights = attend_eagerly(query, key, value, mask, scaling, dropout, s_aux)
            return out, weights if return_weights else None
        has_groups = key.size(1) != query.size(1)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=has_groups
        )
        return out.transpose(1, 2).contiguous(), None
    part.conv.scale, part.conv.dropout = scaling, dropout
    return part(query, key, value, pairs, return_weights, s_aux, kept)


def _for_heads(heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys or values of groups of heads, ``[B, G, S, C]``, repeated for each head, ``[B, H, S, C]``."""
    return tuple(x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1) for x in tensors)


def attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention that returns its weights."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], 3)
    weights = scores.softmax(-1)[..., : key.size(2)].nan_to_num(0.0)  # padded queries may have no keys
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

    @property
    def keeps_memberships(self) -> bool:
        """Whether the source draws rows of new tokens from memberships of keys that are kept from call to call."""
        source = self.conv.source
        return source is not None and type(source)._draw_last_rows is not GraphSource._draw_last_rows

    def reset_if_missing(self) -> None:
        """Reset all parameters, if some were not set by the constructor or from a file."""
        tensors = [*self.parameters(), *self.buffers()]
        if not self.is_complete and not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
            with torch.no_grad():
                for buffer in self.buffers():
                    buffer.zero_()
                self.conv.reset_parameters()
            self.__dict__.pop("_extra_state", None)
        self.is_complete = True

    def get_extra_state(self) -> Tensor:
        """The target density, or NaN, and the budgets of the heads, if set."""
        source = self.conv.source
        density = source.state_dict().get("target_density") if isinstance(source, DensitySource) else None
        if density is None or not density.numel():
            density = torch.tensor(math.nan, dtype=torch.float64)
        if not isinstance(source, DensitySource) or source.head_budgets is None:
            return density
        return torch.cat([density[None], source.head_budgets.to(density)])

    def set_extra_state(self, state: Tensor) -> None:
        """Set the target density and the budgets."""
        source, density = self.conv.source, float(state.flatten()[0])
        if not isinstance(source, DensitySource):
            return
        is_none = math.isnan(density)  # as with a number of keys
        if not (is_none and source._needs_density):
            source._restore_density(None if is_none else density)
        source.head_budgets = state[1:].float() if state.dim() else None
        if source.head_budgets is not None:
            source.head_budgets._is_hf_initialized = True  # type: ignore[attr-defined]

    def attends_densely(self, pairs: MaskPairs) -> bool:
        """Whether the choice is all pairs and the mask is not plain, so that torch's dense kernel can attend."""
        source: Any = self.conv.source
        is_full = isinstance(source, DensitySource) and source.target_density == 1
        is_full |= isinstance(source, patterns.PatternSource) and source.rule.rule is patterns.full
        is_simple = pairs.has_plain_rows and not (pairs.is_causal and pairs.offset)
        learns = self.conv.estimator.learns(self.training)
        return is_full and not is_simple and not learns and self.conv.normalizer == "softmax"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pairs: MaskPairs, return_weights: bool,
        sinks: Tensor | None = None, kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend over the graph of the source, ``[B, L, H, C']``, and the weights ``[B, H, L, S]`` or None."""
        if query.shape[1::2] != (self.conv.heads, self.conv.out_channels):
            raise ValueError(
                f"Expected queries [B, H, L, C] of {self.conv.heads} heads and {self.conv.out_channels} channels, as "
                f"the attributes of the module tell (got {list(query.shape)}). Set them before `replace_attention`."
            )
        if pairs.is_causal and pairs.offset and pairs.has_plain_rows and pairs.sequence is None and not return_weights:
            new = self._attend_from_new_tokens(query, key, value, pairs, sinks, kept)
            if new is not None:
                return new, None
        length, keys = query.size(2), key.size(2)
        total = pairs.offset + length if pairs.is_causal else keys
        key, value = _for_heads(query.size(1), key, value)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, L, H, C]
        key, value = key[:, :total], value[:, :total]  # without the free places of a cache
        keys_side = pairs.side(key)
        query_side = keys_side if length == total else pairs.query_side(query)
        flat = [
            side.unpad(x).transpose(0, 1) for side, x in ((query_side, query), (keys_side, key), (keys_side, value))
        ]  # [H, N, C]
        batch, conv, edge_filter = PaddedBatch(query_side, keys_side), self.conv, None
        if not pairs.has_plain_rows:
            bias = MaskBias(batch, pairs)
            edge_filter = None if pairs.allowed is None else bias.allowed
            conv = copy.copy(conv)  # which shares its parameters
            conv.__dict__.update(score_bias=bias, _score_bias=bias)
        returns = Returns(graph=return_weights or sinks is not None, attention_weights=return_weights)
        attend: Any = partial(conv.attend, *flat, returns=returns, edge_filter=edge_filter)
        if query_side is keys_side:
            out = attend(is_causal=pairs.is_causal, ptr=keys_side.ptr)
        else:
            ptrs, graph = (keys_side.ptr, query_side.ptr), None
            try:
                if pairs.is_causal:
                    graph = self._last_rows(flat[0], flat[1], *ptrs)
                out = attend(edge_index=graph, bipartite=True, ptr=ptrs)
            except ValueError as error:  # of a source that needs the queries of earlier tokens
                raise ValueError(f"{error} {NO_CACHE}") from error
        weights = None
        extras: list[Any] = []
        if returns.graph:
            out, *extras = out
        out = out.unflatten(1, (self.conv.heads, -1))  # [N, H, C']
        if sinks is not None:
            share = _share_of_edges(sinks, conv, flat[0], flat[1], extras[0])
            out = out * share.T[..., None]
        if return_weights:
            chosen, (_, alpha) = extras
            alpha = alpha if sinks is None else alpha * share.flatten()[chosen.edge_row]
            sequence, head, row, col = batch.coordinates(chosen)
            shape = (query.size(0), self.conv.heads, length, keys)
            weights = alpha.new_zeros(shape).index_put((sequence, head, row, col), alpha)
        return query_side.pad(out), weights

    def _attend_from_new_tokens(
        self, query: Tensor, key: Tensor, value: Tensor, pairs: MaskPairs, sinks: Tensor | None, kept: KeptKeys | None
    ) -> Tensor | None:
        """The output ``[B, L, H, C']`` of a few new tokens; None if their rows need a graph of the batch."""
        conv, source, total = self.conv, self.conv.source, pairs.offset + query.size(2)
        is_plain = conv.normalizer == "softmax" and conv.score_bias is None and not conv._edgewise
        learns = self.training or (sinks is not None and torch.is_grad_enabled())
        if learns or not is_plain or query.size(2) > FEW or torch.is_autocast_enabled(query.device.type):
            return None
        assert source is not None
        rule, last = source._row_rule(query, key[:, :, :total]), pairs.last_rows(query)
        log_sum: Tensor | None
        if rule is None:
            if kept is None or key.is_inference() or conv.eval_seed is None:
                return None
            drawn = source._draw_last_rows(query, key, last, kept.memberships_before(pairs.offset), conv.eval_seed)
            if drawn is None:
                return None
            rowptr, col, kept.memberships = drawn
            kept.note(key)
            out, log_sum = last.attend_over(rowptr, col, query, key, value, conv.scale)
        else:
            rule = rule if sinks is None else rule._replace(are_products=False)
            out, log_sum = last.attend(rule, query, key, value, conv.scale)
        if sinks is not None and log_sum is not None:
            out = out * (log_sum - sinks[:, None]).sigmoid().to(out.dtype)[..., None]
        return out.transpose(1, 2).contiguous()

    def _last_rows(self, query: Tensor, key: Tensor, key_ptr: Tensor, query_ptr: Tensor) -> AttentionGraph:
        """The rows of the last tokens of each sequence, whose earlier keys are in a cache."""
        assert self.conv.source is not None
        seed = draw_seed(None if self.training else self.conv.eval_seed)
        tokens = Tokens._trusted(query, key, query_ptr, key_ptr, True, True, seed, None, at_end=True)
        choice = self.conv.source(tokens).expand(self.conv.heads)
        return tokens._drop_later(choice).graph


def _share_of_edges(sinks: Tensor, conv: AttentionConv, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
    """What the edges of each row have of the weight, next to a sink, ``[H, N]``, differentiable.

    It is the sigmoid of the logarithm of the sum of their exponentials, less the score of the sink, ``[H]``.
    """
    graph = graph.expand_tokens()
    bias = conv._score_bias(query, key, graph)
    logits = graph._logits(query, key, bias, conv.scale)
    with torch.no_grad():
        more = (graph.rowptr, graph.col, None, bias, conv.scale, "score", 0.0, 0)
        total = schemas.edge_attention(query, key, key[..., :1].contiguous(), *more)[1]
    total = total.clamp(min=torch.finfo(total.dtype).min)  # of rows without edges
    row = graph.edge_row
    sums = torch.zeros_like(total.flatten()).index_add(0, row, (logits - total.flatten()[row]).exp().to(total.dtype))
    total = total + sums.clamp(min=torch.finfo(sums.dtype).tiny).log().view_as(total)  # with gradients; sums are 1
    return (total - sinks[:, None]).sigmoid().to(query.dtype)


def _drop_density(part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove target density and budgets from a state dict, since the extra state contains both."""
    for name in ("target_density", "head_budgets"):
        state.pop(f"{prefix}conv.source.{name}", None)
