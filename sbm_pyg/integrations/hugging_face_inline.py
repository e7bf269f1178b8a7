"""Attention modules of ``transformers`` without an attention interface, changed to call :func:`attend`.

In: a module of BLOOM, MPT or Falcon. Out: the same module, of a subclass whose forward pass projects tokens as before
and leaves attention to its graph source. Positions of ALiBi, ``slope * place of the key``, are a bias of heads and
keys. Not here: attention (``hugging_face_attention``), and models that select attention by a name (``hugging_face``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import MptAttention

from .hugging_face_attention import NAME, attend

__all__ = ["is_inline", "take_back", "take_over"]


class SparseBloomAttention(BloomAttention):
    """BLOOM's attention over the graph of a source."""

    is_causal = True

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None,
        layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As that of the base class; weights ``[B, H, L, S]`` only if asked."""
        batch, length, _ = hidden_states.shape
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, weights = attend(
            self, query, key, value, attention_mask, self.inv_norm_factor, _rate(self.attention_dropout),
            position_bias=alibi.view(batch, self.num_heads, 1, -1), output_attentions=output_attentions, **options,
        )  # fmt: skip
        out = self.dense(out.reshape(batch, length, -1))
        return dropout_add(out, residual, self.hidden_dropout, self.training), weights


class SparseMptAttention(MptAttention):
    """MPT's attention over the graph of a source."""

    is_causal = True

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor | None, cache: Any = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, use_cache: bool = False,
        output_attentions: bool = False, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As that of the base class; weights ``[B, H, L, S]`` only if asked."""
        states, cache = self.Wqkv(hidden_states), past_key_values if cache is None else cache
        if self.clip_qkv:
            states = states.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in states.chunk(3, dim=2))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if position_bias is not None:  # of the last keys of the longest sequence
            position_bias = position_bias[None, :, :, -key.size(2) :].to(query.dtype)
        out, weights = attend(
            self, query, key, value, None if attention_mask is None else _inverse(attention_mask), self.softmax_scale,
            self.attn_dropout_p if self.training else 0.0,
            position_bias=position_bias, output_attentions=output_attentions, **options,
        )  # fmt: skip
        return self.out_proj(out.flatten(2)), weights


class SparseFalconAttention(FalconAttention):
    """Falcon's attention over the graph of a source; with ALiBi, the mask holds the positions."""

    def forward(
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor | None,
        position_ids: Tensor | None = None, layer_past: Any = None, use_cache: bool = False,
        output_attentions: bool = False, position_embeddings: tuple[Tensor, Tensor] | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As that of the base class; weights ``[B, H, L, S]`` only if asked."""
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        rate = 0.0
        if alibi is not None:
            rate = _rate(self.attention_dropout)
        elif position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, weights = attend(
            self, query, key, value, attention_mask, self.inv_norm_factor, rate,
            output_attentions=output_attentions, **options,
        )  # fmt: skip
        return self.dense(out.flatten(2)), weights


SPARSE: dict[type[nn.Module], type[nn.Module]] = {
    BloomAttention: SparseBloomAttention, MptAttention: SparseMptAttention, FalconAttention: SparseFalconAttention,
}  # fmt: skip
_INVERSES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Masks of MPT, and where they are False."""
FALCON_ATTENTION_CLASSES.setdefault(NAME, FalconAttention)  # of a config with sources, before it gets them


def is_inline(module: nn.Module) -> bool:
    """Whether a module computes attention itself, and this module defines a subclass for it."""
    return type(module) in SPARSE or type(module) in SPARSE.values()


def take_over(module: nn.Module) -> None:
    """Give a module the forward pass that calls a graph source, if this module defines one."""
    module.__class__ = SPARSE.get(type(module), type(module))


def take_back(module: nn.Module) -> None:
    """Restore the original forward pass of a module."""
    module.__class__ = {sparse: dense for dense, sparse in SPARSE.items()}.get(type(module), type(module))


def _inverse(forbidden: Tensor) -> Tensor:
    """True at pairs that attend, the same tensor for all layers that share a mask, so that it is read once."""
    if forbidden not in _INVERSES:
        _INVERSES[forbidden] = ~forbidden
    allowed: Tensor = _INVERSES[forbidden]
    return allowed


def _rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0
