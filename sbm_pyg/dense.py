"""Dense attention, the baseline of sparse layers.

In: ragged tokens. Out: tokens. Not here: graphs; this layer makes none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ops import checks
from .propagation import check_tokens
from .ragged import pad, resolve_ptr
from .sources.learned import attend_densely

__all__ = ["FullAttention"]


class FullAttention(nn.Module):
    """Dense multi-head attention within each sequence, by torch's scaled dot-product attention.

    Args:
        channels: Channels of the tokens.
        head_channels: Channels per head C.
        heads: Number of heads H.
        dropout: Probability in [0, 1) that an attention weight is dropped in training.
        is_causal: No token attends to a later one.

    Raises:
        TypeError, ValueError: A size or probability is out of range.

    Shapes:
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) for B sequences of similar length L.
          Sequences of other lengths are padded in groups of similar length, or all to the longest in compiled code.
    """

    def __init__(
        self, channels: int, head_channels: int, heads: int, dropout: float = 0.0, is_causal: bool = False
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "head_channels": head_channels, "heads": heads}.items()
        channels, head_channels, heads = (checks.integer(*size, 1, "Channels count per head.") for size in sizes)
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        width, device = torch.get_default_dtype().itemsize, torch.get_default_device()
        count = 3 * channels * heads * head_channels
        checks.memory("heads", count, width, device, "Build a smaller model.", "parameters")
        checks.flag("is_causal", is_causal, "With True, no token attends to a later one.")
        self.channels, self.heads, self.dropout, self.is_causal = channels, heads, dropout, is_causal
        self.lin_query = nn.Linear(channels, heads * head_channels)
        self.lin_key = nn.Linear(channels, heads * head_channels)
        self.lin_value = nn.Linear(channels, heads * head_channels)

    def forward(
        self,
        x: Tensor,
        edge_index: None = None,
        *,
        ptr: Tensor,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_choice: bool = False,
    ) -> Tensor | tuple[Tensor, None]:
        """Attend within each sequence; with ``return_choice``, return the output and None.

        ``seed`` and ``sequence_ids`` are ignored; they keep the signature of :class:`AttentionConv`.
        """
        if edge_index is not None:
            raise ValueError("Expected no 'edge_index' with full attention (got one). Pass it to an AttentionConv.")
        checks.tensors(x=x, ptr=ptr)
        check_tokens(x, self.lin_query)
        checks.shape("x", x, (None, self.channels), "[N, channels]", "It has the channels of the layer.")
        how: dict[str, Any] = {"is_causal": self.is_causal}
        if torch.compiler.is_compiling():  # compiled code cannot have a variable number of groups
            padded, mask = pad(x, ptr)  # [B, L, channels], [B, L]
            # Padding comes after the tokens, so causal tokens do not attend to it.
            how["attn_mask"] = None if x.size(0) == mask.numel() or self.is_causal else mask[:, None, None]
        else:
            padded, ptr = x[None], resolve_ptr(x.size(0), ptr, device=x.device)
        query, key, value = (
            lin(padded).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, L, C]
            for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        drop = self.dropout if self.training else 0.0
        if torch.compiler.is_compiling():
            out = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, **how).transpose(1, 2)[mask]
        else:
            out = attend_densely(query[0], key[0], value[0], ptr, ptr, dropout=drop, **how).transpose(0, 1)
        out = out.flatten(1)
        return (out, None) if return_choice else out
