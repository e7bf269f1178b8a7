"""The attention of ``transformers`` over the graphs of sources: what it calls for masks, and what it calls in layers.

In: padded queries, keys and values ``[B, H, L, C]`` of an attention module, and the mask. Out: tokens and weights in
that form. Not here: which modules have a source (``hugging_face``), and attention itself.
"""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask
from transformers.utils.output_capturing import _active_collector

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, draw_seed
from ..layers.attention import AttentionConv, Returns
from ..layers.multihead import PaddedBatch, PaddedSequences
from ..ops import schemas
from ..sources import patterns
from ..sources.interface import GraphSource
from ..sources.last_rows import LastRows
from ..sources.learned import DensitySource

if TYPE_CHECKING:
    from ..ops.cpu.memberships import KeyMemberships

__all__ = [
    "HARMLESS", "NAME", "READ", "GraphAttention", "MaskBias", "MaskPairs", "PairMask", "attend", "make_mask",
    "note_cache", "read_mask",
]  # fmt: skip

NAME = "sbm"
"""Name of the implementation, of the options in a config, and of the part of an attention module."""
NO_CACHE = "Pass use_cache=False and no assistant model: each step then computes all tokens."
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
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
FORBIDDEN = -1e4
"""Numbers up to this one in a mask forbid a pair, as the smallest number of any type and minus infinity do."""
FEW = 64
"""Up to so many new tokens of a sequence get their rows by scores of all keys at once."""
_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What layers have kept of the keys in the layers of caches."""
_PAIRS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What masks that all layers of a model share have been found to say, with the version of the tensor."""


# ------------------------------------------------------------------ masks


@dataclass(eq=False)
class MaskPairs:
    """Which pairs of padded queries and keys attend, and what is added to their scores.

    Args:
        is_causal: No query attends to a later key.
        offset: Number of tokens before the first query, whose keys are in a cache.
        real: True at real keys, ``[B, S]`` bool; None: all of them.
        sequence: Number of the sequence of each key, ``[B, S]``, where sequences are packed in a row; None: one a row.
        allowed: True at pairs that attend, ``[B or 1, H or 1, L or 1, S]`` bool; None: all that the above allow.
        bias: What is added to scores, ``[B or 1, H or 1, L or 1, S]``, or None.
    """

    is_causal: bool = False
    offset: int = 0
    real: Tensor | None = None
    sequence: Tensor | None = None
    allowed: Tensor | None = None
    bias: Tensor | None = None
    _sides: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def has_plain_rows(self) -> bool:
        """Whether the mask is one of padding and of order, without other pairs and without a bias."""
        return self.allowed is None and self.bias is None

    def side(self, tokens: Tensor) -> PaddedSequences:
        """Positions of the real ones of keys ``[B, S, ...]``, computed once for all layers on a device."""
        place = (tokens.shape[:2], tokens.device)
        if place not in self._sides:
            keys = tokens.size(1)
            real = None if self.real is None else self.real[:, :keys].to(tokens.device).expand(tokens.size(0), -1)
            side = PaddedSequences(tokens, real)
            if self.sequence is not None:
                slots = torch.arange(side.total, device=tokens.device) if side.slots is None else side.slots
                sequence = self.sequence[:, :keys].to(tokens.device).expand(tokens.size(0), -1).flatten()[slots]
                begins = ((slots // keys).diff() != 0) | (sequence.diff() != 0)
                ends = (slots.new_tensor([side.total]),)
                side.ptr = torch.cat([slots.new_zeros(1), begins.nonzero()[:, 0] + 1, *ends])
            self._sides[place] = side
        return self._sides[place]

    def query_side(self, tokens: Tensor) -> PaddedSequences:
        """Positions of the real ones of queries ``[B, L, ...]``, which are the last keys if the mask is causal."""
        real = None
        if self.is_causal and self.real is not None:
            real = _unless_all(self.real[:, self.offset : self.offset + tokens.size(1)].to(tokens.device))
        place = ("queries", tokens.shape[:2], tokens.device)
        if place not in self._sides:
            real = None if real is None else real.expand(tokens.size(0), -1)
            self._sides[place] = PaddedSequences(tokens, real)
        return self._sides[place]

    def last_rows(self, query: Tensor) -> LastRows:
        """Positions of new tokens ``[B, H, L, C]`` among all keys up to the last of them, for all layers."""
        batch, _, length, _ = query.shape
        place = ("last rows", batch, length, query.device)
        if place not in self._sides:
            keys = self.offset + length
            real = None if self.real is None else self.real[:, :keys].to(query.device).expand(batch, -1)
            self._sides[place] = LastRows(batch, length, keys, real, query.device)
        rows: LastRows = self._sides[place]
        return rows

    def with_bias(self, bias: Tensor | None) -> MaskPairs:
        """These pairs of the same sequences with another bias."""
        other = replace(self, bias=bias)
        other._sides = self._sides
        return other

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask over all pairs, ``[B or 1, H or 1, L or 1, S]``, bool or with the bias; None if all attend."""
        parts = [] if self.allowed is None else [self.allowed[..., :keys]]
        parts += [] if self.real is None else [self.real[:, None, None, :keys]]
        if self.sequence is not None:
            parts.append(self.sequence[:, None, :keys, None] == self.sequence[:, None, None, :keys])
        if self.is_causal:
            last = torch.arange(queries, device=device) + self.offset
            parts.append((torch.arange(keys, device=device) <= last[:, None])[None, None])
        mask = None
        for part in parts:
            mask = part.to(device) if mask is None else mask & part.to(device)
        if self.bias is None:
            return mask
        bias = self.bias[..., :keys]
        return bias if mask is None else torch.where(mask, bias, torch.finfo(bias.dtype).min)


class PairMask(Tensor):
    """A mask ``[B, 1, L, S]`` that takes no memory before something reads it: a layer with a source does not.

    Any operation on it is one on the dense mask: 0 at pairs that attend, and the smallest number of its type at others,
    as eager attention has it, so that every model can read it.
    """

    pairs: MaskPairs

    @staticmethod
    def __new__(cls, pairs: MaskPairs, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PairMask:
        mask: PairMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.pairs = pairs
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(PairMask, PairMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> Tensor:
        """The mask as an ordinary tensor."""
        mask = self.pairs.dense(self.size(2), self.size(3), self.device)
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros if mask is None else zeros.masked_fill(~mask, torch.finfo(self.dtype).min)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PairMask({list(self.shape)})"


@torch.compiler.disable  # it reads values of the mask
def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32, device: Any = "cpu", **options: Any,
) -> Tensor:  # fmt: skip
    """Make the mask of a forward pass of ``transformers``: a :class:`PairMask` if it can be one, else an eager mask."""
    is_plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if not is_plain or int(kv_offset) or (attention_mask is not None and attention_mask.dim() != 2):
        options |= {"allow_is_bidirectional_skip": False, "dtype": dtype, "device": device}
        lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
        return eager_mask(*lengths, mask_function, attention_mask, **options)
    real = attention_mask
    if real is not None and real.size(1) < kv_length:  # a cache with space for later tokens
        real = nn.functional.pad(real, (0, kv_length - real.size(1)))
    real = None if real is None or bool(real.all()) else real.bool()
    pairs = MaskPairs(mask_function is causal_mask_function, int(q_offset), real)
    return PairMask(pairs, (batch_size, 1, q_length, kv_length), dtype, torch.device(device))


def read_mask(mask: Tensor, queries: int, keys: int) -> MaskPairs:
    """What a mask says, ``[B or 1, H or 1, L or 1, S]`` of bool or of numbers that are added to scores.

    A mask of padding, of earlier keys, of packed sequences, or of several of these becomes offsets of sequences. Any
    other one becomes a mask of pairs. Cost O(B H L S), once for all layers that get the same tensor. The
    result holds no view of the mask, so both are freed with it.
    """
    if isinstance(mask, PairMask) and mask.size(2) == queries:
        return mask.pairs
    size = (queries, keys)
    cached = None if mask.is_inference() else _PAIRS.get(mask)
    if cached is None or cached[:2] != (mask._version, size):
        cached = (0 if mask.is_inference() else mask._version, size, _read_values(mask, queries, keys))
        if not mask.is_inference() and not mask.requires_grad:
            _PAIRS[mask] = cached
    pairs: MaskPairs = cached[2]
    return pairs


def _read_values(mask: Tensor, queries: int, keys: int) -> MaskPairs:
    """As :func:`read_mask`."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.size(-1) < keys or mask.size(2) not in (1, queries):
        raise ValueError(
            f"Expected 'attention_mask' of {queries} queries and {keys} keys (got {list(mask.shape)}). Pass [B, S] of "
            "padding, or [B, 1, L, S]."
        )
    values = mask[..., :keys]
    allowed = values.clone() if mask.dtype == torch.bool else values > FORBIDDEN
    bias = None
    if mask.dtype != torch.bool:
        added = torch.where(allowed, values, 0)
        bias = added if mask.requires_grad or bool(added.any()) else None
    if allowed.size(2) == 1 and allowed.size(1) == 1 and queries != 1:
        return MaskPairs(real=_unless_all(allowed[:, 0, 0]), bias=bias)
    place = torch.arange(keys, device=mask.device)
    shared = allowed[:, 0] if bool((allowed == allowed[:, :1]).all()) else None  # [B, L, S]
    if shared is None:
        is_causal = queries == keys and not bool(allowed.triu(1).any())
        return MaskPairs(is_causal, allowed=allowed, bias=bias)
    real = shared.any(1)  # [B, S]
    first = shared.long().argmax(-1)  # [B, L], first key of each query
    if queries == keys:
        sequence = torch.where(real, first, 0)
        in_order = bool((first.diff(dim=1)[real[:, 1:] & real[:, :-1]] >= 0).all())
        together = (sequence[:, :, None] == sequence[:, None]) & real[:, None]
        for is_causal in (True, False) if in_order else ():
            pairs = together & (place <= place[:, None]) if is_causal else together
            if bool((pairs == shared)[real].all()):  # padded queries may have any keys
                begins = torch.where(real, first, first.new_full((), -1)).amax(1)
                is_packed = bool((begins[:, None] != first)[real].any())
                return MaskPairs(is_causal, 0, _unless_all(real), sequence if is_packed else None, bias=bias)
        return MaskPairs(not bool(shared.triu(1).any()), allowed=allowed, bias=bias)
    if bool((shared == shared[:, :1]).all()) and queries != 1:
        return MaskPairs(real=_unless_all(real), bias=bias)
    total = int(real.any(0).nonzero().amax()) + 1 if bool(real.any()) else keys
    earlier = place <= torch.arange(total - queries, total, device=mask.device)[:, None]
    if bool((shared == (real[:, None] & earlier)).all()):
        return MaskPairs(True, total - queries, _unless_all(real), bias=bias)
    return MaskPairs(allowed=allowed, bias=bias)


def _as_it_is(mask: Tensor, queries: int) -> MaskPairs:
    """Return the pairs of a mask without reading its values."""
    if isinstance(mask, PairMask):
        if mask.size(2) == queries:
            return mask.pairs
        mask = mask.dense()  # of one query, for all
    mask = mask[(None,) * (4 - mask.dim())]
    return MaskPairs(allowed=mask) if mask.dtype == torch.bool else MaskPairs(bias=mask)


def _unless_all(real: Tensor) -> Tensor | None:
    """The mask ``[B, S]`` of real keys, or None if all are."""
    return None if bool(real.all()) else real


def _completed(pairs: MaskPairs, sequence: Tensor | None, bias: Tensor | None) -> MaskPairs:
    """MaskPairs of sequences that are packed in a row, and with a bias of positions; None: as they are."""
    if sequence is not None:
        within = None if pairs.sequence is None else sequence * pairs.sequence.size(1) + pairs.sequence
        pairs = replace(pairs, sequence=sequence if within is None else within)
    if bias is not None:
        pairs = pairs.with_bias(bias if pairs.bias is None else bias + pairs.bias)
    return pairs


def _packed_sequences(options: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """Number of the sequence of each token in a row, ``[B, S]``, of offsets and numbers that a call passes, or None."""
    ends, of_keys, numbers = (options.get(name) for name in PACKED)
    if ends is None and of_keys is None and numbers is None:
        return None
    batch, length = query.size(0), query.size(2)
    sequence = torch.zeros(batch, length, dtype=torch.long, device=query.device) if numbers is None else numbers.long()
    ends = of_keys if ends is None else ends
    if ends is not None:
        is_same = of_keys is None or (of_keys.shape == ends.shape and bool((of_keys == ends).all()))
        if batch != 1 or key.size(2) != length or not is_same or int(ends[-1]) != length:
            raise ValueError(
                f"Expected '{PACKED[0]}' to be offsets of sequences packed in one row of {length} tokens, the same for "
                f"queries and keys (got {ends.tolist()} for {batch} rows of {length} queries and {key.size(2)} keys). "
                "Pack a whole batch in one row, or pad it."
            )
        place = torch.arange(length, device=query.device)
        sequence = sequence * ends.numel() + torch.searchsorted(ends.to(place), place, right=True)
    return sequence


# ------------------------------------------------------------------ caches


@torch.compiler.disable
def note_cache(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
    """The hook before an attention module, which keeps the layer of its cache for :class:`GraphAttention`."""
    part: GraphAttention | None = getattr(module, NAME, None)
    if part is None:
        return
    cache = next((x for x in (options.get("past_key_values"), options.get("cache")) if x is not None), None)
    layers, number = getattr(cache, "layers", ()), getattr(module, "layer_idx", None)
    part.__dict__.pop("kept", None)
    if number is not None and number < len(layers) and not module.training:
        kept = _KEPT.get(layers[number])
        if kept is None or kept.part() is not part:
            kept = _KEPT[layers[number]] = KeptKeys(part)
        kept.check(getattr(layers[number], "keys", None))
        part.__dict__["kept"] = kept


class KeptKeys:
    """What a layer has computed of the keys in a layer of a cache, as long as both stay as they are.

    A cache that is cropped holds a view of the tensor that the layer has seen. One that is reordered, or that others
    have appended to, holds another tensor, or another version of it, and everything is computed anew.
    """

    def __init__(self, part: GraphAttention) -> None:
        self.part, self.modules = weakref.ref(part), [weakref.ref(x) for x in part.modules() if x._parameters]
        self.memberships: KeyMemberships | None = None
        self.seen: tuple[Any, ...] | None = None
        self.storage: StorageWeakRef | None = None

    def state(self, keys: Tensor) -> tuple[Any, ...]:
        """What tells whether a tensor of keys and the parameters of the layer have been changed."""
        modules = (reference() for reference in self.modules)
        tensors = (x for module in modules if module is not None for x in module._parameters.values() if x is not None)
        versions = [(id(x), 0 if x.is_inference() else x._version) for x in tensors]
        return (keys._version, keys.data_ptr(), keys.size(0), keys.stride(), *versions)

    def check(self, keys: Tensor | None) -> None:
        """Forget all, unless the cache still holds what the layer has seen."""
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
        """Note the keys that the layer has seen."""
        self.storage, self.seen = StorageWeakRef(keys.untyped_storage()), self.state(keys)


# ------------------------------------------------------------------ attention


@torch.compiler.disable  # it branches on the values of masks
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    position_bias: Tensor | None = None, output_attentions: bool | None = None, s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What ``transformers`` calls in a layer: the output ``[B, L, H, C']``, and weights ``[B, H, L, S]`` if asked.

    ``s_aux`` ``[H]`` holds learned sinks: one more score of each row, of a key whose value is zero.
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
        unread = _as_it_is(attention_mask, sizes[0])
        pairs = unread if part is None else read_mask(attention_mask, *sizes)
    sequence = _packed_sequences(options, query, key)
    pairs, unread = (_completed(x, sequence, position_bias) for x in (pairs, unread))
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


class MaskBias:
    """The score bias of the edges that a mask over all pairs has; pairs that it forbids get a large negative number.

    Args:
        batch: Positions of queries and keys in the padded tensors.
        pairs: The mask.
    """

    is_of_batch = True
    """It reads numbers of tokens, so a loss on a part of the sequences does not suit it."""

    def __init__(self, batch: PaddedBatch, pairs: MaskPairs) -> None:
        self.batch, self.pairs = batch, pairs

    def at(self, numbers: Tensor, graph: AttentionGraph) -> Tensor:
        """Numbers ``[B or 1, H or 1, L or 1, S]`` at the edges of a graph, ``[E]``."""
        sequence, head, query, key = self.batch.coordinates(graph)
        places = (sequence, head, query)
        return numbers[(*(at % size for at, size in zip(places, numbers.shape[:3], strict=True)), key)]

    def allowed(self, graph: AttentionGraph) -> Tensor:
        """True at the edges that attend, ``[E]`` bool."""
        assert self.pairs.allowed is not None
        return self.at(self.pairs.allowed.to(graph.col.device), graph)

    def __call__(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        bias = query.new_zeros(graph.col.numel())
        if self.pairs.bias is not None:
            bias = self.at(self.pairs.bias.to(query), graph)
        if self.pairs.allowed is not None:
            bias = torch.where(self.allowed(graph), bias, FORBIDDEN)
        return bias


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
        """Reset all parameters, if some of them are not those of the constructor or of a file."""
        tensors = [*self.parameters(), *self.buffers()]
        if not self.is_complete and not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
            with torch.no_grad():
                for buffer in self.buffers():
                    buffer.zero_()
                self.conv.reset_parameters()
            self.__dict__.pop("_extra_state", None)
        self.is_complete = True

    def get_extra_state(self) -> Tensor:
        """The target density, or NaN, and the budgets of the heads, if there are some."""
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
        """Whether torch's dense kernel computes what the source would: all pairs, of a mask that is no simple one."""
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
        """The output ``[B, L, H, C']`` of a few new tokens, whose rows need no graph of the batch; None if they do."""
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
    """Remove target density and budgets from a state dict, since the extra state has them."""
    for name in ("target_density", "head_budgets"):
        state.pop(f"{prefix}conv.source.{name}", None)
