"""Dense attention, the peer that sparse layers are compared with.

In: ragged tokens. Out: tokens. Not here: graphs; none is made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ops import checks
from .ops.reference.segments import group_by_length
from .propagation import check_tokens
from .ragged import offsets, pad, resolve_ptr

__all__ = ["FullAttention"]

MUCH = 2**20  # pairs of padding, which take longer than to group sequences by their length


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
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) for B sequences of like length L. Where
          padding would be much, sequences of other lengths are computed apart, unless the code is compiled.
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
        attend = self._attend
        if not torch.compiler.is_compiling():  # which knows no number of groups before it runs
            ptr = resolve_ptr(x.size(0), ptr, device=x.device)
            attend = self._attend if _padding(ptr) < MUCH else self._attend_by_length
        out = attend(x, ptr)
        return (out, None) if return_choice else out

    def _attend_by_length(self, x: Tensor, ptr: Tensor) -> Tensor:
        """Attend within sequences of like length, one group of them after the other."""
        groups = [*group_by_length(ptr, ptr)]
        order = torch.cat([tokens[tokens >= 0] for tokens, _, _ in groups])
        ptrs = [offsets(ptr.diff()[which]) for _, _, which in groups]
        parts = x[order].split([int(each[-1]) for each in ptrs])
        return torch.cat([self._attend(*part) for part in zip(parts, ptrs, strict=True)])[order.argsort()]

    def _attend(self, x: Tensor, ptr: Tensor) -> Tensor:
        """Attend within sequences that are padded to the longest of them."""
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
        return out.transpose(1, 2).flatten(2)[mask]


def _padding(ptr: Tensor) -> int:
    """Pairs of tokens that padding to the longest sequence adds."""
    lengths = ptr.diff()
    return int(lengths.numel() * lengths.max() ** 2 - lengths.square().sum())
