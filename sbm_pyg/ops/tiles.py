"""Parts of all pairs of queries and keys that are computed at a time: blocks of tokens, and tiles of pairs.

In: offsets of sequences, and scores. Out: where each block begins; tiles of pairs; masks of the largest scores. Not
here: graphs, and rules that keep pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from .memo import TensorMemo
from .segments import group_by_length
from .values import can_read_without_sync

SCORES_PER_TILE = {"cpu": 2**23}
"""Scores that are computed at a time, by kind of device."""
SCORES_PER_TILE_ELSEWHERE = 2**26
"""The same for other devices, where few large operations are fastest. A tile has a few tensors of 256 MiB."""


def rows_per_tile(device: torch.device, scores: int) -> int:
    """Number of rows, each with so many scores in all heads and sequences, that are computed at a time; at least 1."""
    return max(1, SCORES_PER_TILE.get(device.type, SCORES_PER_TILE_ELSEWHERE) // max(1, scores))


class Cut:
    """The blocks of queries, or of keys: where each begins, and how many tokens it has.

    Args:
        ptr: Offsets of the sequences, ``[B+1]``.
        total: Number of tokens N.
        block_size: Tokens of a block.
        count: Number of blocks n. None: it is read from the device.
    """

    def __init__(self, ptr: Tensor, total: int, block_size: int, count: int | None = None) -> None:
        counts = -(-ptr.diff() // block_size)  # rounded up, for any block_size
        self.ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [B+1], of the blocks
        self.tokens = ptr.clone()  # offsets of the tokens, which no later change of `ptr` reaches
        self.total, self.block_size = total, block_size
        self.count = int(self.ptr[-1]) if count is None else count
        self.whole = self.count * block_size == total  # no block is short

    @cached_property
    def sequence(self) -> Tensor:
        """The sequence of each block, ``[n]``."""
        return torch.repeat_interleave(self.ptr.diff(), output_size=self.count)

    @cached_property
    def position(self) -> Tensor:
        """Number of each block in its sequence, ``[n]``."""
        return torch.arange(self.count, device=self.ptr.device) - self.ptr[self.sequence]

    @cached_property
    def first(self) -> Tensor:
        """First token of each block, ``[n]``."""
        return self.tokens[self.sequence] + self.block_size * self.position

    @cached_property
    def length(self) -> Tensor:
        """Number of tokens of each block, ``[n]``."""
        return (self.tokens[1:][self.sequence] - self.first).clamp(max=self.block_size)

    @cached_property
    def table(self) -> Tensor:
        """First token, length, and number in its sequence of each block, ``[3, n]``."""
        return torch.stack([self.first, self.length, self.position])

    @cached_property
    def slot(self) -> Tensor:
        """Index of each token among the slots of all blocks, ``[N]``."""
        block = torch.repeat_interleave(self.length, output_size=self.total)
        return block * self.block_size + torch.arange(self.total, device=self.ptr.device) - self.first[block]

    def split(self, x: Tensor) -> Tensor:
        """Blocks ``[H*n, block_size, C]`` of tokens ``[H, N, C]``; slots without a token hold zeros."""
        if self.whole:
            return x.reshape(x.size(0) * self.count, self.block_size, x.size(2))
        slots = x.new_zeros(x.size(0), self.count * self.block_size, x.size(2))
        return slots.index_copy_(1, self.slot, x).view(x.size(0) * self.count, self.block_size, x.size(2))

    def join(self, x: Tensor, heads: int) -> Tensor:
        """Tokens ``[H, N, C]`` of blocks ``[H*n, block_size, C]``."""
        x = x.reshape(heads, self.count * self.block_size, x.size(2))
        return x if self.whole else x.index_select(1, self.slot)


_CUTS = TensorMemo()


def _cached_cut(ptr: Tensor, total: int, block_size: int, count: int | None) -> Cut:
    """A cut that is cached with ``ptr``, since pooling, attention, its backward pass and effects share the cut."""
    if torch.compiler.is_compiling():
        return Cut(ptr, total, block_size, count)
    return _CUTS.get(partial(Cut, count=count), ptr, total, block_size)


def cut_blocks(
    totals: tuple[int, int], ptrs: tuple[Tensor, Tensor], block_size: int, counts: Sequence[int | None] = (None, None)
) -> tuple[Cut, Cut]:
    """Cut queries and keys into blocks: one cut for both if they are the same tokens."""
    query_cut = _cached_cut(ptrs[0], totals[0], block_size, counts[0])
    same = ptrs[1] is ptrs[0] and totals[0] == totals[1]
    return query_cut, query_cut if same else _cached_cut(ptrs[1], totals[1], block_size, counts[1])


def cut_rows(
    rowptr: Tensor, query: Tensor, key: Tensor, ptrs: tuple[Tensor, Tensor], block_size: int
) -> tuple[Cut, Cut]:
    """:func:`cut_blocks`, and the number of query blocks that the rows describe."""
    counts = (rowptr.numel() - 1) // query.size(0), None
    return cut_blocks((query.size(1), key.size(1)), ptrs, block_size, counts)


@dataclass(frozen=True)
class PairTile:
    """Some queries of b sequences of similar length, with all keys of these sequences."""

    query: Tensor  # [b, r] tokens; 0 where invalid
    key: Tensor  # [b, L] tokens; -1 where the sequence is shorter
    valid: Tensor  # [b, r], False for padding of the queries
    possible: Tensor  # [b, r, L], False for pairs that cannot be edges

    def select(
        self, scores: Tensor, keep: PairRule, row: Tensor, dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, ...]:
        """Select the pairs that a rule keeps. Returns an argument of :func:`.segments.compress`.

        Args:
            scores: Scores of the pairs, ``[H, b, r, L]``, which are overwritten: those that are NaN, or of impossible
                pairs, become minus infinity.
            keep: The rule. The first pair of a row whose score is NaN is kept as well, so that NaN shows.
            row: Row of each query and head, ``[H, N]``.
            dtype: Of the keys.
        """
        undefined = scores.isnan().logical_and_(self.possible)
        possible = self.possible & ~undefined
        is_edge = keep(scores.masked_fill_(~possible, -torch.inf), possible, self)
        if scores.size(-1) and not (can_read_without_sync(undefined) and not bool(undefined.any())):
            first = undefined.to(torch.uint8).argmax(-1, keepdim=True)
            is_edge = is_edge.scatter(-1, first, is_edge.gather(-1, first) | undefined.gather(-1, first))
        return self.rows(is_edge, self.key.to(dtype)[:, None].expand_as(is_edge)[is_edge], row)

    def rows(self, is_edge: Tensor, key: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of :func:`.segments.compress` for this tile.

        Args:
            is_edge: Mask of the pairs that are edges, ``[H, b, r, L]``.
            key: Keys of these edges, ``[e]``.
            row: Row of each query and head, ``[H, N]``.
        """
        return row[:, self.query[self.valid]].flatten(), is_edge.sum(-1)[:, self.valid].flatten(), key


PairRule = Callable[[Tensor, Tensor, PairTile], Tensor]
"""From scores ``[H, b, r, L]``, the mask of possible pairs and their tile to the mask of the pairs to keep."""


def pair_tiles(heads: int, query_ptr: Tensor, key_ptr: Tensor, limit: Tensor) -> Iterator[PairTile]:
    """Iterate over all pairs in tiles of bounded size: some rows of all sequences of similar length.

    Args:
        heads: Number of heads.
        query_ptr, key_ptr: Offsets of the sequences, ``[B+1]`` each.
        limit: Number of leading keys of its sequence that a query may attend to, ``[N]``.
    """
    for queries, keys, _ in group_by_length(query_ptr, key_ptr):
        position = torch.arange(keys.size(1), device=keys.device)
        for tile in queries.split(rows_per_tile(keys.device, heads * keys.numel()), dim=1):
            valid, query = tile >= 0, tile.clamp(min=0)
            yield PairTile(query, keys, valid, (position < limit[query][..., None]) & valid[..., None])


def best_of(scores: Tensor, possible: Tensor, count: int | Tensor) -> Tensor:
    """Mask of the largest possible scores along the last axis; the lower index wins a tie.

    Args:
        scores: ``[..., m]``, without NaN, and ``-inf`` where not possible.
        possible: Mask of the scores to choose from, ``[..., m]``.
        count: How many to choose, at least 1; one number or ``[...]``. Rows with fewer possible scores choose all.
    """
    if not scores.size(-1):
        return torch.zeros_like(scores, dtype=torch.bool)
    count = torch.as_tensor(count, device=scores.device).clamp(max=scores.size(-1))
    best = scores.topk(int(count.max()), dim=-1).values
    least = best.gather(-1, (count - 1).expand(scores.shape[:-1])[..., None])
    above, equal = scores > least, (scores == least) & possible
    left = count[..., None] - above.sum(-1, keepdim=True, dtype=torch.int32)  # six times as fast as int64
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))
