"""Rows of other edges, in plain torch: the union of two graphs, a graph with self-loops, and rows of some queries.

In and out: the tensors of ``union_rows``, ``add_loops`` and ``select_rows``. Not here: whether graphs are over the same
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..segments import edge_row, runs


def union_rows(
    rowptr: Tensor, col: Tensor, other_rowptr: Tensor, other_col: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The union of the edges of two graphs over the same rows and keys, and a mask of the edges of the other.

    Both have ascending keys in each row, without repeats, and so has the union. Cost O(S + E + E' log E) with S rows.
    """
    pairs, other_pairs = (
        edge_row(ptr, keys.numel()).mul_(num_keys).add_(keys)
        for ptr, keys in ((rowptr, col), (other_rowptr, other_col))
    )  # numbers of pairs, ascending
    position = torch.searchsorted(pairs, other_pairs)
    is_new = torch.cat([pairs, pairs.new_full((1,), -1)])[position] != other_pairs
    new_before = torch.nn.functional.pad(is_new.cumsum(0), (1, 0))
    slot = position + new_before[:-1]  # in the union, of each edge of the other graph
    new = is_new.nonzero()[:, 0]
    size, new_slot = pairs.numel() + new.numel(), slot[new]
    from_other, from_other_alone = (
        torch.zeros(size, dtype=torch.bool, device=col.device).index_fill_(0, slots, True) for slots in (slot, new_slot)
    )
    dtype = torch.promote_types(col.dtype, other_col.dtype)
    union = col.new_empty(size, dtype=dtype).masked_scatter(~from_other_alone, col.to(dtype))
    union = union.index_copy(0, new_slot, other_col[new].to(dtype))
    return rowptr + new_before[other_rowptr], union, from_other


def add_loops(
    rowptr: Tensor, col: Tensor, num_keys: int, *, union: Callable[..., Any] = union_rows
) -> tuple[Tensor, Tensor, Tensor]:
    """The union with the edges from each key to the query of its number, in every head, and a mask of these edges."""
    loop_ptr = torch.arange(rowptr.numel(), device=col.device)
    keys = (loop_ptr[:-1] % max(num_keys, 1)).to(col.dtype)
    out: tuple[Tensor, Tensor, Tensor] = union(rowptr, col, loop_ptr, keys, num_keys)
    return out


def select_rows(rowptr: Tensor, col: Tensor, is_selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of the queries of a mask, ``[N]``, and their numbers among all edges; other rows are empty."""
    degree = rowptr.diff() * is_selected.repeat((rowptr.numel() - 1) // max(is_selected.numel(), 1))
    edge = runs(rowptr[:-1], degree)
    return torch.nn.functional.pad(degree.cumsum(0), (1, 0)), col[edge], edge
