"""The masks of ``transformers``: the pairs of tokens that masks allow, and the biases that masks add to scores.

In: a mask of any form that a model passes, or a rule for one. Out: :class:`MaskPairs`, from which tokens and score
biases are made. Not here: attention (``hugging_face_attention``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask

from ..graphs.graph import AttentionGraph
from ..layers.multihead import PaddedBatch, PaddedSequences
from ..sources.last_rows import LastRows

__all__ = [
    "PACKED", "MaskBias", "MaskPairs", "PairMask", "complete_pairs", "make_mask", "packed_sequences", "read_mask",
    "unread_pairs",
]  # fmt: skip

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
FORBIDDEN = -1e4
"""Numbers up to this one in a mask forbid a pair, as the smallest number of any type and minus infinity do."""
_PAIRS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What masks that all layers of a model share have been found to say, with the version of the tensor."""


@dataclass(eq=False)
class MaskPairs:
    """The pairs of padded queries and keys that attend, and the score biases of these pairs.

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
        """Whether the mask consists of padding and causality only, without other pairs and without a bias."""
        return self.allowed is None and self.bias is None

    def side(self, tokens: Tensor) -> PaddedSequences:
        """Positions of the real keys among padded keys ``[B, S, ...]``, computed once for all layers on a device."""
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
        """Copy with another bias."""
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
    """A mask ``[B, 1, L, S]`` that takes no memory until it is read; layers with a source do not read it.

    Operations on it run on the dense mask: 0 at pairs that attend, and the smallest number of its dtype at other pairs,
    as in eager attention, so that every model can read it.
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
    """Make the mask of a forward pass of ``transformers``: a :class:`PairMask` if possible, else an eager mask."""
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
    """Read a mask, ``[B or 1, H or 1, L or 1, S]``, of bool or of numbers that are added to scores.

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


def unread_pairs(mask: Tensor, queries: int) -> MaskPairs:
    """Return the pairs of a mask without reading its values."""
    if isinstance(mask, PairMask):
        if mask.size(2) == queries:
            return mask.pairs
        mask = mask.dense()  # of one query, for all
    mask = mask[(None,) * (4 - mask.dim())]
    return MaskPairs(allowed=mask) if mask.dtype == torch.bool else MaskPairs(bias=mask)


def _unless_all(real: Tensor) -> Tensor | None:
    """The mask ``[B, S]`` of real keys, or None if all keys are real."""
    return None if bool(real.all()) else real


def complete_pairs(pairs: MaskPairs, sequence: Tensor | None, bias: Tensor | None) -> MaskPairs:
    """MaskPairs of sequences that are packed in a row, and with a bias of positions; None: as they are."""
    if sequence is not None:
        within = None if pairs.sequence is None else sequence * pairs.sequence.size(1) + pairs.sequence
        pairs = replace(pairs, sequence=sequence if within is None else within)
    if bias is not None:
        pairs = pairs.with_bias(bias if pairs.bias is None else bias + pairs.bias)
    return pairs


def packed_sequences(options: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
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


class MaskBias:
    """The score bias of the edges that a mask over all pairs has; pairs that it forbids get a large negative number.

    Args:
        batch: Positions of queries and keys in the padded tensors.
        pairs: The mask.
    """

    is_of_batch = True
    """The bias indexes tokens of the whole batch, so a loss on some of the sequences cannot use it."""

    def __init__(self, batch: PaddedBatch, pairs: MaskPairs) -> None:
        self.batch, self.pairs = batch, pairs

    def at(self, numbers: Tensor, graph: AttentionGraph) -> Tensor:
        """Values of ``[B or 1, H or 1, L or 1, S]`` at the edges of a graph, ``[E]``."""
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
