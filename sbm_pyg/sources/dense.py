"""Attention over all pairs of ragged tokens, without edges.

In: queries, keys and values, and the offsets of their sequences. Out: tokens; or the choice of all pairs, whose graph
is made only on request. Not here: when a source chooses all pairs (``learned``, ``patterns``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..graphs.blocks import BlockGraph
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, count_pairs, count_positions, offsets
from ..graphs.rows import index_type
from ..ops import checks
from ..ops.all_pairs import PairFunction, attend_by_rows
from ..ops.segments import allowed_keys, edge_row, group_by_length, runs
from ..ops.tiles import cut_blocks
from ..ops.values import can_read_without_sync
from .interface import Choice

__all__ = ["BiasFactors", "DenseChoice", "attend_densely", "attend_padded", "sample_rows", "seeded"]


class BiasFactors(NamedTuple):
    """A score bias that is computed from features of the query and the key, so that no array of all pairs is stored."""

    of_query: Tensor
    """Features of each query, ``[H, N, D]``."""
    of_key: Tensor
    """Features of each key, ``[H, M, D']``."""
    of_pairs: PairFunction
    """Function that maps features of queries and keys to score biases, see :func:`.attend_by_rows`."""


@torch.compiler.disable  # it branches on the lengths of sequences
def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, query_ptr: Tensor, key_ptr: Tensor, *, scale: float | None = None,
    is_causal: bool = False, dropout: float = 0.0, bias: Callable[[int, int], Tensor] | BiasFactors | None = None,
) -> Tensor:  # fmt: skip
    """Attention over all pairs of each sequence, ``[H, N, C']``.

    Calls torch's scaled dot-product attention, or :func:`.attend_by_rows` if ``bias`` is :class:`BiasFactors`.
    Sequences of equal length form one batch; sequences of different lengths are padded in groups of similar length.

    Args:
        query, key, value: ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
        query_ptr, key_ptr: Offsets of the sequences, ``[B+1]`` each.
        scale: Factor of the scores; None: :math:`C^{-1/2}`.
        is_causal: No query attends to a later key; positions count from the start of both sequences.
        dropout: Probability that a weight is dropped, by torch's default generator.
        bias: Function from the numbers of queries and keys of a sequence to score biases, ``[H, L, S]``; or
            :class:`BiasFactors`; or None.
    """
    if not torch.compiler.is_compiling() and 0 in (query.size(1), key.size(1)):
        return query.new_zeros(*query.shape[:2], value.size(2)) + value[:, :0].sum()
    scale = query.size(2) ** -0.5 if scale is None else scale
    factors = bias if isinstance(bias, BiasFactors) else None
    of_sizes = None if isinstance(bias, BiasFactors) else bias
    sides = [(query, query_ptr), (key, key_ptr), (value, key_ptr)]
    attend: Any = partial(attend_padded, scale=scale, dropout=dropout, bias=of_sizes)
    batch = query_ptr.numel() - 1
    if torch.compiler.is_compiling():  # an exported program has one group, of all pairs of the batch
        of_query, of_key = (edge_row(ptr, x.size(1)) for x, ptr in sides[:2])
        at_query, at_key = (count_positions(ptr, x.size(1)) for x, ptr in sides[:2])
        allowed = of_query[:, None] == of_key
        if is_causal:
            allowed = allowed & (at_query[:, None] >= at_key)
        biases = None if factors is None else factors.of_pairs(factors.of_query, factors.of_key)
        if of_sizes is not None:
            biases = of_sizes(query.size(1), key.size(1))[:, at_query[:, None], at_key]
        attend = partial(attend, bias=None if biases is None else lambda *_: biases)
        return attend(*(x[None] for x, _ in sides), mask=allowed[None, None], is_causal=False)[0]
    if factors is not None:
        sides += [(factors.of_query, query_ptr), (factors.of_key, key_ptr)]
        attend = partial(attend_by_rows, of_pairs=factors.of_pairs, scale=scale, dropout=dropout)
    if batch == 1 or (_equal_lengths(query_ptr, query.size(1)) and _equal_lengths(key_ptr, key.size(1))):
        parts = (x.unflatten(1, (batch, -1)).transpose(0, 1) for x, _ in sides)  # [B, H, L, C]
        out = attend(*parts, is_causal=is_causal)
        return out.transpose(0, 1).flatten(1, 2)
    outputs, order = [], []
    for queries, keys, _ in group_by_length(query_ptr, key_ptr):
        # a sequence is padded with its first token, so that no other sequence affects it
        padded = [(x, queries if ptr is query_ptr else keys) for x, ptr in sides]
        parts = (x[:, torch.where(at < 0, at[:, :1], at).clamp(min=0)].transpose(0, 1) for x, at in padded)
        # padding comes after the tokens, so causal queries do not attend to it where they are the keys
        mask = None if is_causal and key_ptr is query_ptr else (keys >= 0)[:, None, None]
        out = attend(*parts, mask=mask, is_causal=is_causal)
        outputs.append(out.transpose(0, 1)[:, queries >= 0])
        order.append(queries[queries >= 0])
    return torch.cat(outputs, 1)[:, torch.cat(order).argsort()]


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, mask: Tensor | None = None,
    dropout: float = 0.0, bias: Callable[[int, int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention over padded sequences by torch's scaled dot-product attention, ``[B, H, L, C']``.

    Args:
        query, key, value: ``[B, H, L, C]``, ``[B, H, S, C]`` and ``[B, H, S, C']``.
        is_causal: No query attends to a later key.
        mask: True at real keys, ``[B, 1, 1, S]``. None: all are real.
        scale, dropout, bias: As in :func:`attend_densely`.
    """
    sizes = query.size(2), key.size(2)
    if is_causal and not (mask is None and bias is None):  # torch does not take both
        tril = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        mask, is_causal = tril if mask is None else mask & tril, False
    if bias is not None:
        added = bias(*sizes).to(query.dtype)
        mask = added if mask is None else torch.where(mask, added, -math.inf)
    how: Any = {"attn_mask": mask, "dropout_p": dropout, "is_causal": is_causal, "scale": scale}
    width = value.size(3)
    if query.size(3) > width:  # fused kernels take one width
        value = F.pad(value, (0, query.size(3) - width))
    return F.scaled_dot_product_attention(query, key, value, **how)[..., :width]


def _equal_lengths(ptr: Tensor, count: int) -> bool:
    """True if all sequences have the same length; always False on a GPU, where reading the offsets would wait."""
    length, remainder = divmod(count, ptr.numel() - 1)
    return not remainder and can_read_without_sync(ptr) and bool((ptr.diff() == length).all())


def sample_rows(tokens: Tokens, rows: float, block_size: int = 1) -> AttentionGraph:
    """The graph in which sampled queries of each sequence attend to all their keys, and the other queries to no key.

    Args:
        tokens: The tokens.
        rows: Queries of each sequence, as a multiple of the square root of its length; infinity: all.
        block_size: Tokens of a block. Above 1 the graph is a :class:`~sbm_pyg.BlockGraph`, and a sample of the blocks
            of queries attend.
    """
    ptrs, totals = (tokens.query_ptr, tokens.key_ptr), (tokens.num_queries, tokens.num_keys)
    if block_size > 1:
        cuts = cut_blocks(totals, ptrs, block_size)
        ptrs, totals = (cuts[0].ptr, cuts[1].ptr), (cuts[0].count, cuts[1].count)
    length = ptrs[0].diff()
    sequence = torch.repeat_interleave(length, output_size=totals[0])
    size = tokens.query_ptr.diff().to(checks.widest(length.device))
    sample_size = (rows * size.sqrt() / block_size).clamp(min=1)
    order = torch.rand(totals[0], generator=seeded(tokens.seed)).to(length.device).argsort()
    order = order[sequence[order].argsort(stable=True)]  # the queries of each sequence in random order
    position = torch.arange(totals[0], device=length.device) - ptrs[0][sequence]
    is_drawn = torch.empty_like(order, dtype=torch.bool)
    is_drawn[order] = position < sample_size[sequence]
    allowed = tokens.allowed_keys if block_size == 1 else allowed_keys(*ptrs, totals[0], tokens.is_causal)
    degree = torch.where(is_drawn, allowed, 0)
    col = runs(ptrs[1][sequence], degree).to(index_type(totals[1])).repeat(tokens.heads)
    rowptr = offsets(degree.repeat(tokens.heads))
    graph = AttentionGraph._trusted(rowptr, col, *totals, tokens.heads, *ptrs, tokens.has_causal_graph)
    if block_size == 1:
        return graph
    sizes = (tokens.num_queries, tokens.num_keys)
    return BlockGraph._trusted_blocks(graph, block_size, tokens.query_ptr, tokens.key_ptr, *sizes)


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU for one seed of 64 bits."""
    return torch.Generator().manual_seed(seed % 2**63)


class DenseChoice(Choice):
    """The choice of all pairs. Torch's dense kernel attends, and the first use of :attr:`graph` stores the edges.

    Args:
        tokens: Queries and keys.
    """

    tokens: Tokens

    def __init__(self, tokens: Tokens) -> None:
        fields = {"tokens": tokens, "probability": None, "forced": None, "exploration": 0.0, "independent": True}
        self.__dict__.update(fields)

    @cached_property
    def graph(self) -> AttentionGraph:
        """The full graph. Memory O(H N M)."""
        tokens = self.tokens
        pairs = tokens.heads * int(tokens.allowed_keys.sum())
        way_out = "Take fewer heads or shorter sequences, or do not ask for the graph."
        checks.memory("graph", pairs, 8, tokens.query.device, way_out)
        return sample_rows(tokens, math.inf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens})"

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of sequences and heads, (B, H), without storing edges."""
        return self.tokens.query_ptr.numel() - 1, self.tokens.heads

    @property
    def density(self) -> Tensor:
        """Density, ``[B, H]``, which is 1, or 0 for a sequence without pairs."""
        tokens = self.tokens
        pairs = count_pairs(tokens.query_ptr, tokens.key_ptr)
        return pairs.clamp(max=1).to(checks.widest(pairs.device))[:, None].expand(self.shape)

    def check_tokens(self, tokens: Tokens) -> None:
        """Do nothing: all pairs of any tokens are edges."""

    @property
    def is_stored(self) -> bool:
        return self.tokens.at_end

    def stored(self) -> Choice:
        return Choice(self.graph)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor | None:
        tokens = self.tokens
        if tokens.at_end:  # torch's kernel counts positions from the first query
            return None
        ptrs = (tokens.query_ptr, tokens.key_ptr)
        return attend_densely(query, key, value, *ptrs, is_causal=tokens.is_causal, **options)

    def expand(self, heads: int) -> Choice:
        return self if heads == self.tokens.heads else self.stored().expand(heads)

    def select(self, mask: Tensor) -> Choice:
        return self.stored().select(mask)

    def causal(self) -> Choice:
        return self if self.tokens.is_causal else self.stored().causal()

    def force(self, pattern: AttentionGraph) -> Choice:
        """Return the choice unchanged, since it has all edges."""
        return self
