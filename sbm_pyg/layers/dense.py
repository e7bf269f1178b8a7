"""Dense attention, the baseline of sparse layers.

In: ragged tokens. Out: tokens. Not here: graphs; this layer makes none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import checks
from ..ops.reference.segments import group_by_length
from ..ragged import offsets, pad, resolve_ptr
from ..sources.learned import attend_padded
from .positions import ALiBi, Rotary
from .propagation import check_tokens

__all__ = ["FullAttention"]

MAX_PADDED_PAIRS = 2**20  # above it, sequences are grouped by length


class FullAttention(nn.Module):
    """Dense multi-head attention within each sequence, by torch's scaled dot-product attention.

    Args:
        channels: Channels of the tokens.
        head_channels: Channels per head C.
        heads: Number of heads H.
        dropout: Probability in [0, 1) that an attention weight is dropped in training.
        is_causal: No token attends to a later one.
        rotary: Rotates queries and keys by their positions, or None.
        score_bias: An :class:`~sbm_pyg.ALiBi`, or None.

    Raises:
        TypeError, ValueError: A size or probability is out of range, or another argument has the wrong type.

    Shapes:
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) for B sequences of similar length L. If
          padding would take long, sequences are grouped by length, unless the code is compiled.
    """

    def __init__(
        self, channels: int, head_channels: int, heads: int, dropout: float = 0.0, is_causal: bool = False, *,
        rotary: Rotary | None = None, score_bias: ALiBi | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"channels": channels, "head_channels": head_channels, "heads": heads}.items()
        channels, head_channels, heads = (checks.integer(*size, 1, "Channels count per head.") for size in sizes)
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        checks.parameters("heads", 3 * channels * heads * head_channels)
        checks.flag("is_causal", is_causal, "With True, no token attends to a later one.")
        checks.kind("rotary", rotary, Rotary | None, "a Rotary", "Pass `sbm_pyg.Rotary()`.")
        checks.kind("score_bias", score_bias, ALiBi | None, "an ALiBi", "Other biases need an AttentionConv.")
        if rotary is not None:
            rotary._width_of(head_channels)
        if score_bias is not None and score_bias.heads != heads:
            raise ValueError(f"Expected 'score_bias' of {heads} heads (got {score_bias.heads}). Each head has a slope.")
        self.channels, self.heads, self.dropout, self.is_causal = channels, heads, dropout, is_causal
        self.rotary, self.score_bias = rotary, score_bias
        self.lin_query = nn.Linear(channels, heads * head_channels)
        self.lin_key = nn.Linear(channels, heads * head_channels)
        self.lin_value = nn.Linear(channels, heads * head_channels)

    def forward(
        self,
        x: Tensor,
        edge_index: None = None,
        *,
        ptr: Tensor,
        positions: Tensor | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_choice: bool = False,
    ) -> Tensor | tuple[Tensor, None]:
        """Attend within each sequence; with ``return_choice``, return the output and None.

        ``positions`` are those of the tokens for ``rotary``, ``[N]``; None: counted from 0 in each sequence. ``seed``
        and ``sequence_ids`` are ignored; they keep the signature of :class:`AttentionConv`.
        """
        if edge_index is not None:
            raise ValueError("Expected no 'edge_index' with full attention (got one). Pass it to an AttentionConv.")
        checks.tensors(x=x, ptr=ptr)
        check_tokens(x, self.lin_query)
        checks.shape("x", x, (None, self.channels), "[N, channels]", "It has the channels of the layer.")
        if positions is not None:
            checks.tensors(positions=positions)
            checks.shape("positions", positions, (x.size(0),), "[N]", "It is one number per token.")
        attend = self._attend
        if not torch.compiler.is_compiling():  # compiled code cannot have a variable number of groups
            ptr = resolve_ptr(x.size(0), ptr, device=x.device)
            attend = self._attend if _padding(ptr) < MAX_PADDED_PAIRS else self._attend_by_length
        out = attend(x, ptr, positions)
        return (out, None) if return_choice else out

    def _attend_by_length(self, x: Tensor, ptr: Tensor, positions: Tensor | None) -> Tensor:
        """Attend within groups of sequences of similar length, one group after the other."""
        groups = [*group_by_length(ptr, ptr)]
        order = torch.cat([tokens[tokens >= 0] for tokens, _, _ in groups])
        ptrs = [offsets(ptr.diff()[which]) for _, _, which in groups]
        sizes = [int(each[-1]) for each in ptrs]
        grouped = x[order].split(sizes)
        places = [None] * len(ptrs) if positions is None else positions[order].split(sizes)
        return torch.cat([self._attend(*group) for group in zip(grouped, ptrs, places, strict=True)])[order.argsort()]

    def _attend(self, x: Tensor, ptr: Tensor, positions: Tensor | None) -> Tensor:
        """Attend within sequences padded to the length of the longest."""
        padded, mask = pad(x, ptr)  # [B, L, channels], [B, L]
        query, key, value = (
            lin(padded).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, L, C]
            for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        if self.rotary is not None:
            at = torch.arange(mask.size(1), device=x.device) if positions is None else pad(positions, ptr)[0][:, None]
            query, key = self.rotary(query, at), self.rotary(key, at)
        # Padding comes after the tokens, so causal tokens do not attend to it.
        real = None if x.size(0) == mask.numel() or self.is_causal else mask[:, None, None]
        drop = self.dropout if self.training else 0.0
        bias = None if self.score_bias is None else self.score_bias.dense_bias
        out = attend_padded(query, key, value, mask=real, is_causal=self.is_causal, bias=bias, dropout_p=drop)
        return out.transpose(1, 2).flatten(2)[mask]


def _padding(ptr: Tensor) -> int:
    """Number of pairs of tokens that padding to the longest sequence adds."""
    lengths = ptr.diff()
    return int(lengths.numel() * lengths.max() ** 2 - lengths.square().sum())
