"""Rows of other edges, on the CPU: the keys of each row are copied once.

In and out: the tensors of ``union_rows``, ``add_loops`` and ``select_rows``. Not here: the reference
(:mod:`sbm_pyg.ops.reference.union`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..reference import union as reference_union
from .sampling import even_ranges
from .simd import load16, poke, store16
from .threads import numba_kernel, run, task_count


@njit(inline="always")
def copy_keys(target, to, source, start, count):
    """``target[to : to + count] = source[start : start + count]``, sixteen at a time."""
    for k in range(0, count, 16):
        store16(target, to + k, count - k, load16(source, start + k, count - k))


@numba_kernel
def _lower_bound(keys, first, last, key):
    """The first index in ``first .. last`` whose key is at least ``key``; keys ascend."""
    while first < last:
        middle = (first + last) // 2
        if keys[middle] < key:
            first = middle + 1
        else:
            last = middle
    return first


@numba_kernel
def _count_new(first, last, rowptr, col, other_rowptr, other_col, new):
    """Count the keys of each row of the other graph that this graph lacks."""
    for row in range(first, last):
        begin, end, count = rowptr[row], rowptr[row + 1], 0
        for edge in range(other_rowptr[row], other_rowptr[row + 1]):
            begin = _lower_bound(col, begin, end, other_col[edge])
            if begin == end or col[begin] != other_col[edge]:
                count += 1
        new[row] = count


@numba_kernel
def _merge(first, last, rowptr, col, other_rowptr, other_col, union_rowptr, union, from_other):
    for row in range(first, last):
        begin, end, shift = rowptr[row], rowptr[row + 1], union_rowptr[row] - rowptr[row]
        for edge in range(other_rowptr[row], other_rowptr[row + 1]):
            # Copy the keys below the other graph's next key, then that key.
            place = _lower_bound(col, begin, end, other_col[edge])
            copy_keys(union, begin + shift, col, begin, place - begin)
            union[place + shift] = other_col[edge]
            from_other[place + shift] = True
            is_new = place == end or col[place] != other_col[edge]
            begin, shift = (place, shift + 1) if is_new else (place + 1, shift)
        copy_keys(union, begin + shift, col, begin, end - begin)


def union_rows(
    rowptr: Tensor, col: Tensor, other_rowptr: Tensor, other_col: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(col.dtype, other_col.dtype)
    graphs = [x.contiguous().numpy() for x in (rowptr, col.to(dtype), other_rowptr, other_col.to(dtype))]
    rows, edges = rowptr.numel() - 1, col.numel() + other_col.numel()
    union_rowptr, new = np.zeros(rows + 1, np.int64), np.empty(rows, np.int64)
    pieces = even_ranges(rows, task_count(rows + edges, 3))
    run(_count_new, [(*piece, *graphs, new) for piece in pieces])
    np.cumsum(new, out=union_rowptr[1:])
    union_rowptr += graphs[0]
    union, from_other = np.empty(union_rowptr[-1], graphs[1].dtype), np.zeros(union_rowptr[-1], np.bool_)
    run(_merge, [(*piece, *graphs, union_rowptr, union, from_other) for piece in pieces])
    return torch.from_numpy(union_rowptr), torch.from_numpy(union), torch.from_numpy(from_other)


add_loops = partial(reference_union.add_loops, union=union_rows)


@numba_kernel
def _count_rows(first, last, rowptr, is_selected, selected_rowptr):
    for row in range(first, last):
        count = rowptr[row + 1] - rowptr[row] if is_selected[row % is_selected.size] else 0
        selected_rowptr[row + 1] = selected_rowptr[row] + count


@numba_kernel
def _copy_rows(first, last, rowptr, col, selected_rowptr, selected, number):
    for row in range(first, last):
        start, count = selected_rowptr[row], selected_rowptr[row + 1] - selected_rowptr[row]
        copy_keys(selected, start, col, rowptr[row], count)
        for edge in range(count):
            poke(number, start + edge, rowptr[row] + edge)


def select_rows(rowptr: Tensor, col: Tensor, is_selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, offset, keys, mask = rowptr.numel() - 1, *(x.contiguous().numpy() for x in (rowptr, col, is_selected))
    selected_rowptr = np.zeros(rows + 1, np.int64)
    run(_count_rows, [(0, rows, offset, mask, selected_rowptr)])
    selected, number = np.empty(selected_rowptr[-1], keys.dtype), np.empty(selected_rowptr[-1], np.int64)
    pieces = even_ranges(rows, task_count(rows + number.size, 3))
    run(_copy_rows, [(*piece, offset, keys, selected_rowptr, selected, number) for piece in pieces])
    return torch.from_numpy(selected_rowptr), torch.from_numpy(selected), torch.from_numpy(number)
