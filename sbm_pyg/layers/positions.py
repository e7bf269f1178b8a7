r"""Relative positions in attention: rotary embeddings of queries and keys, and linear score biases.

In: queries and keys of each head, and their positions. Out: rotated queries and keys, or a bias for each pair. Not
here: position embeddings that are added to tokens (``models``), and attention.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..graphs.graph import AttentionGraph, check_graph
from ..ops import checks

__all__ = ["ALiBi", "Rotary"]


class Rotary(nn.Module):
    r"""Rotary position embedding: rotates queries and keys, so that scores depend on relative positions.

    Channels c and :math:`c + D / 2` of a vector at position t form a point in the plane, which is rotated by the angle
    :math:`t \, b^{-2 c / D}` for :math:`c < D / 2`. Values are not rotated. There are no parameters. Cost O(H N D).

    Args:
        base: The b of the angles, above 1.
        channels: Number of rotated channels D, even; other channels of a head stay unchanged. None: all.
        grid_width: Tokens per row of an image whose rows follow one another: position t is row t // grid_width and
            column t % grid_width. The first D / 4 angles are :math:`b^{-4 c / D}` times the row, and the last D / 4
            angles are the same factors times the column, so that scores depend on both displacements; D is a multiple
            of 4. For images, which have few rows, a base of about 100 is suitable. None: positions are one-dimensional.
        for_source: Graph sources see the rotated queries and keys. If False, sources see unrotated queries and keys,
            and only attention uses rotated ones.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.

    Shapes:
        - x ``[*, N, C]``, position ``[N]`` or broadcastable to ``[*, N]``; output ``[*, N, C]``.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, rotary=Rotary())
        >>> conv(torch.randn(30, 16), ptr=torch.tensor([0, 10, 30])).shape  # positions are counted in each sequence
        torch.Size([30, 16])

    Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Channels are paired as
    in GPT-NeoX and Llama: the first half of the channels with the second half, instead of neighbors.
    """

    def __init__(
        self, base: float = 10000.0, channels: int | None = None, *, grid_width: int | None = None,
        for_source: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.number("base", base, "(1, inf)", "RoFormer has 10000.")
        checks.flag("for_source", for_source, "It says whether graph sources see rotated queries and keys.")
        if channels is not None and checks.integer("channels", channels, 2, "Leave it out for all.") % 2:
            raise ValueError(f"Expected 'channels' to be even (got {channels}). Pairs of channels are rotated.")
        if grid_width is not None:
            checks.integer("grid_width", grid_width, 1, "Leave it out for tokens on a line.")
        self.base, self.channels, self.grid_width, self.for_source = float(base), channels, grid_width, for_source

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate vectors.

        Args:
            x: Queries or keys, ``[*, N, C]``.
            position: Position of each token, ``[N]`` or broadcastable to ``[*, N]``.

        Raises:
            TypeError, ValueError: A shape or type does not fit, or the number of channels is odd.
        """
        checks.tensors(x=x, position=position)
        checks.floating(x=x)
        if x.dim() < 2 or position.dim() < 1 or position.size(-1) != x.size(-2):
            raise ValueError(
                f"Expected 'position' of one number per token of 'x' [*, N, C] (got {list(position.shape)} for "
                f"{list(x.shape)}). Leave positions out to count them."
            )
        width = self._width_of(x.size(-1))
        wide = torch.promote_types(x.dtype, torch.float32)
        grid_width = self.grid_width
        places = [position] if grid_width is None else [position // grid_width, position % grid_width]
        exponent = torch.arange(0, width, 2 * len(places), device=x.device, dtype=wide) / width
        angle = torch.cat([place.to(wide)[..., None] * self.base**-exponent for place in places], dim=-1)  # [*, N, D/2]
        cos, sin = angle.cos(), angle.sin()
        first, second, unrotated = x.to(wide).split([width // 2, width // 2, x.size(-1) - width], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, unrotated], dim=-1).to(x.dtype)

    def _width_of(self, channels: int) -> int:
        """Return how many channels are rotated in heads of ``channels`` channels.

        Raises:
            ValueError: The number is odd, or no multiple of 4 for a grid, or above ``channels``.
        """
        width = channels if self.channels is None else self.channels
        if self.grid_width is not None and width % 4:
            raise ValueError(
                f"Expected a multiple of 4 channels to rotate with 'grid_width' (got {width}). Set 'channels' of "
                "Rotary."
            )
        if width % 2 or width > channels:
            what = "an even number of channels" if self.channels is None else f"at least {width} channels"
            raise ValueError(f"Expected heads of {what} (got {channels}). Set 'channels' of Rotary to rotate fewer.")
        return width

    def extra_repr(self) -> str:
        grid = "" if self.grid_width is None else f", grid_width={self.grid_width}"
        return f"base={self.base:g}, channels={self.channels}{grid}, for_source={self.for_source}"


class ALiBi(nn.Module):
    r"""Attention with linear biases: subtracts from each score the distance of its tokens times a slope of the head.

    .. math:: b_{hij} = - 2^{-8 h / H} \, |i - j|

    for head h from 1 to H, if H is a power of 2. Otherwise the first heads use the slopes of the next lower power of 2,
    and the remaining heads use slopes between these, as in the authors' code. There are no parameters. Pass this module
    as ``score_bias`` of :class:`~sbm_pyg.AttentionConv`. Positions are counted from the start of both sequences. Cost
    O(E).

    Args:
        heads: Number of heads H.

    Raises:
        TypeError, ValueError: ``heads`` is not a positive integer.

    Shapes:
        - graph with E edges; output ``[E]``, in the dtype of the queries.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, score_bias=ALiBi(2))
        >>> conv(torch.randn(10, 16)).shape
        torch.Size([10, 16])

    Reference: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
    ICLR 2022, for causal attention. Without causality, both directions have the same bias.
    """

    head_dims: ClassVar[dict[str, int]] = {"slope": 0}

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = checks.integer("heads", heads, 1, "Each head has a slope.")
        checks.memory("heads", self.heads, 16, torch.get_default_device(), "Take fewer heads.", "slopes")
        self.register_buffer("slope", self._slopes(torch.get_default_device()), persistent=False)

    slope: Tensor
    """Slope of each head, ``[H]``, in the widest dtype of the device, in a layer of any dtype."""

    def _slopes(self, device: torch.device) -> Tensor:
        power = 2 ** (self.heads.bit_length() - 1)  # the next lower power of 2
        count = torch.arange(self.heads, device=device, dtype=checks.widest(device))
        return torch.exp2(-8 / power * torch.where(count < power, count + 1, count - power + 0.5))

    def _apply(self, fn: Any, recurse: bool = True) -> ALiBi:
        """Recompute the slopes after a conversion, which may round slopes, or drop their values (`to_empty`)."""
        super()._apply(fn, recurse)
        self.slope = self._slopes(self.slope.device)
        return self

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        """The bias of each edge, ``[E]``.

        Raises:
            TypeError, ValueError: ``graph`` is not a graph of these heads.
        """
        check_graph(graph)
        checks.tensors(query=query, key=key)
        checks.floating(query=query)
        checks.same_device("query", query, key=key, graph=graph.col, slope=self.slope)
        sizes = (graph.heads, graph.num_queries, graph.num_keys)
        if sizes != (self.heads, *query.shape[1:2], *key.shape[1:2]):
            raise ValueError(
                f"Expected 'graph' of {self.heads} heads, over the tokens of 'query' and 'key' (got {graph} for "
                f"{list(query.shape)} and {list(key.shape)}). Each head has a slope."
            )
        return (-self.slope[graph.edge_head] * graph.lag.abs()).to(query.dtype)

    def dense_bias(self, num_queries: int, num_keys: int) -> Tensor:
        """The bias of each pair of a sequence, ``[H, num_queries, num_keys]``.

        Raises:
            TypeError, ValueError: A number is not an integer of at least 1, or memory does not hold the pairs.
        """
        num_queries = checks.integer("num_queries", num_queries, 1, "It is a number of tokens.")
        num_keys = checks.integer("num_keys", num_keys, 1, "It is a number of tokens.")
        pairs, device = self.heads * num_queries * num_keys, self.slope.device
        checks.memory("num_keys", pairs, 12, device, "Take shorter sequences.", "pairs")
        of_query, of_key = (torch.arange(size, device=device) for size in (num_queries, num_keys))
        return -self.slope[:, None, None] * (of_query[:, None] - of_key).abs()

    def extra_repr(self) -> str:
        return f"heads={self.heads}"
