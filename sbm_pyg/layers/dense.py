"""Dense attention, the baseline of sparse layers.

In: ragged tokens. Out: tokens. Not here: graphs; this layer makes none.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..graphs.ragged import count_positions, resolve_ptr
from ..ops import checks
from ..sources.dense import attend_densely
from .positions import ALiBi, Rotary
from .propagation import check_tokens, owned

__all__ = ["FullAttention"]


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
          padding would take long, sequences are grouped by length.
    """

    def __init__(
        self, channels: int, head_channels: int, heads: int, dropout: float = 0.0, is_causal: bool = False, *,
        rotary: Rotary | None = None, score_bias: ALiBi | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"channels": channels, "head_channels": head_channels, "heads": heads}.items()
        channels, head_channels, heads = (checks.integer(*size, 1, "Channels count per head.") for size in sizes)
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
        checks.parameters(dict(sizes), 3 * channels * heads * head_channels)
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
        ptr = resolve_ptr(x.size(0), ptr, device=x.device)
        query, key, value = (
            lin(x).unflatten(1, (self.heads, -1)).transpose(0, 1)  # [H, N, C]
            for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        if self.rotary is not None:
            at = count_positions(ptr, x.size(0)) if positions is None else positions
            query, key = self.rotary(query, at), self.rotary(key, at)
        bias = None if self.score_bias is None else self.score_bias.dense_bias
        drop = self.dropout if self.training else 0.0
        out = attend_densely(query, key, value, ptr, ptr, is_causal=self.is_causal, dropout=drop, bias=bias)
        out = owned(out.transpose(0, 1).flatten(1), self.heads)
        return (out, None) if return_choice else out
