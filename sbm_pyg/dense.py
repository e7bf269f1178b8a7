"""Dense attention, the peer that sparse layers are compared with.

In: ragged tokens. Out: tokens. Not here: graphs; none is made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ops import checks
from .propagation import check_tokens
from .ragged import pad

__all__ = ["FullAttention"]


class FullAttention(nn.Module):
    """Dense multi-head attention within each sequence.

    It is torch's scaled dot-product attention, the peer to compare sparse layers with.

    Args:
        channels: Channels of the tokens.
        head_channels: Channels per head C.
        heads: Number of heads H.
        dropout: Probability in [0, 1) that an attention weight is dropped in training.
        is_causal: No token attends to a later one.

    Raises:
        TypeError, ValueError: A size or probability is out of range.

    Shapes:
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) with L the longest sequence.
    """

    def __init__(
        self, channels: int, head_channels: int, heads: int, dropout: float = 0.0, is_causal: bool = False
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "head_channels": head_channels, "heads": heads}
        channels, head_channels, heads = (
            checks.integer(name, size, 1, "Channels count per head.") for name, size in sizes.items()
        )
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        width, device = torch.get_default_dtype().itemsize, torch.get_default_device()
        checks.memory(
            "heads", 3 * channels * heads * head_channels, width, device, "Build a smaller model.", "parameters"
        )
        checks.flag("is_causal", is_causal, "It says whether tokens attend to earlier ones alone.")
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
        """Attend, and return None for the choice if asked.

        ``seed`` and ``sequence_ids`` are taken for the sake of a common call.
        """
        if edge_index is not None:
            raise ValueError(
                "Expected no 'edge_index' with full attention (got one). It knows no graph; AttentionConv takes one."
            )
        checks.tensors(x=x, ptr=ptr)
        check_tokens(x, self.lin_query)
        checks.shape("x", x, (None, self.channels), "[N, channels]", "It has the channels of the layer.")
        padded, mask = pad(x, ptr)  # [B, L, channels], [B, L]
        query, key, value = (
            lin(padded).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, L, C]
            for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        # Padding comes after the tokens, where a causal token does not look.
        ragged = None if x.size(0) == mask.numel() or self.is_causal else mask[:, None, None]
        drop = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=ragged, dropout_p=drop, is_causal=self.is_causal
        )
        out = out.transpose(1, 2).flatten(2)[mask]
        return (out, None) if return_choice else out
