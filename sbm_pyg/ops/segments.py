"""Helpers over compressed rows: which row an edge is in, sums over rows, the order of edges by key, ranges.

In: offsets, and numbers of edges. Out: tensors on the same device. The other modules of this folder, graphs and rules
are built on these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memo import TensorMemo

EDGES_PER_CHUNK = 2**20
"""Edges that are made at a time, which bounds the memory beyond the result."""
THINGS_PER_THREAD = 128
"""Things that a thread of a GPU reduces one after the other, about, where segments are longer."""
FEW_PAIRS = 2**20
"""Pairs of padding that take no longer than a further group of sequences."""


class Rows(NamedTuple):
    """Edges of a graph in compressed rows: row ``h * N + i`` holds the keys of query i in head h.

    A :class:`sbm_pyg.AttentionGraph` has them as ``graph.rows``. In ops over blocks, a row belongs to a query block and
    ``col`` holds key blocks.
    """

    rowptr: Tensor
    """Row offsets, ``[H*N+1]`` int64."""
    col: Tensor
    """Key of each edge, ``[E]`` int32 or int64 in 0 .. M-1."""
    bias: Tensor | None = None
    """Number that is added to the logit of each edge, ``[E]``; over blocks ``[E, block_size, block_size]``."""


def edge_row(rowptr: Tensor, num_edges: int) -> Tensor:
    """Row of each edge, ``[E]`` int64."""
    return torch.repeat_interleave(rowptr.diff(), output_size=num_edges)


def cuts(before: Tensor, room: int) -> list[tuple[int, int, int, int]]:
    """Cut rows into pieces that hold about ``room`` elements.

    Args:
        before: How many things come before each row, and before the end, ``[n+1]`` int64.

    Returns:
        Of each piece its rows, from and to, and its things.
    """
    steps = torch.arange(0, max(int(before[-1]), 1), room, device=before.device)[1:]
    inner = (torch.searchsorted(before, steps, right=True) - 1).unique()
    rows = torch.cat([inner.new_zeros(1), inner[inner > 0], inner.new_tensor([before.numel() - 1])])
    return [(*row, *thing) for row, thing in zip(*(pairwise(x.tolist()) for x in (rows, before[rows])), strict=True)]


def runs(first: Tensor, count: Tensor, total: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
    """``first[i], first[i] + 1, ..., first[i] + count[i] - 1`` for each i, one after the other, ``[sum(count)]``.

    Many are made in chunks, so that little memory is used beyond the result.
    """
    ends = count.cumsum(0)
    total = int(ends[-1]) if total is None else total
    shift = first - (ends - count)
    if torch.compiler.is_compiling() or total <= EDGES_PER_CHUNK:
        many = torch.repeat_interleave(shift, count, output_size=total)
        return many.add_(torch.arange(total, device=first.device)).to(dtype)
    out, before = torch.empty(total, dtype=dtype, device=first.device), torch.cat([ends.new_zeros(1), ends])
    for low, high, begin, end in cuts(before, EDGES_PER_CHUNK):
        many = torch.repeat_interleave(shift[low:high], count[low:high], output_size=end - begin)
        out[begin:end] = many.add_(torch.arange(begin, end, device=first.device))
    return out


def compress(parts: list[tuple[Tensor, ...]], rows: int) -> tuple[Tensor, Tensor]:
    """Concatenate compressed rows from parts, each of which holds some of the rows.

    Args:
        parts: At least one. Which rows it holds, ``[r]``; how many values they have, ``[r]``; and their values, row by
            row, ``[e]``. The list is emptied, for memory's sake.
        rows: How many rows there are. Those that no part holds are empty.

    Returns:
        The offsets, ``[rows+1]``, and the values, ``[E]``.
    """
    degree = parts[0][1].new_zeros(rows)
    for row, count, _ in parts:
        degree[row] = count
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    out = parts[0][2].new_empty(int(rowptr[-1]))
    while parts:
        row, count, value = parts.pop()
        out[runs(rowptr[row], count, value.numel())] = value
    return rowptr, out


def group_by_length(query_ptr: Tensor, key_ptr: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group sequences of similar length: yield the tokens of both sides, padded with -1, and the sequences.

    All are one group if padding to the longest adds few pairs.
    """
    queries, keys = query_ptr.diff(), key_ptr.diff()
    size = torch.maximum(queries, keys).float().log2().ceil()
    if queries.numel() * queries.max() * keys.max() - (queries * keys).sum() < FEW_PAIRS:
        size = torch.zeros_like(size)
    for like in size.unique():
        (which,) = (size == like).nonzero(as_tuple=True)
        yield _padded(query_ptr, which), _padded(key_ptr, which), which


def _padded(ptr: Tensor, which: Tensor) -> Tensor:
    """The tokens of these sequences, ``[b, L]``, padded with -1."""
    start, length = ptr[which, None], ptr.diff()[which, None]
    position = torch.arange(int(length.max()), device=ptr.device)
    return torch.where(position < length, start + position, -1)


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32, or unchanged in float64, since statistics accumulate in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def segments(x: Tensor, ptr: Tensor, kind: str = "sum") -> Tensor:
    """Sum, or maximum, of each segment of ``[E, ...]``, one value after the other: the same bits in every call.

    Sums by index differ between calls on a GPU, so only devices without segment sums use them. A maximum is of numbers
    that are not negative.
    """
    if x.device.type == "cuda" and x.size(0) > THINGS_PER_THREAD * ptr.numel():
        return _reduce_twice(x, ptr, kind, THINGS_PER_THREAD)
    if x.device.type in ("cpu", "cuda"):
        return torch.segment_reduce(x, kind, offsets=ptr, axis=0, unsafe=True, initial=0)
    out, of = x.new_zeros(ptr.numel() - 1, *x.shape[1:]), edge_row(ptr, x.size(0))
    if kind == "sum":
        return out.index_add_(0, of, x)
    return out.scatter_reduce_(0, of.view(-1, *[1] * (x.dim() - 1)).expand_as(x), x, "amax")


def _reduce_twice(x: Tensor, ptr: Tensor, kind: str, size: int) -> Tensor:
    """Reduce pieces of ``size`` elements, then segments: one thread of a GPU reduces each piece.

    On an H200 the sum of 16,384 rows of 512 numbers took 1.5 ms in one piece.
    """
    first = torch.cat([ptr.new_zeros(1), (-(-ptr.diff() // size)).cumsum(0)])  # piece of each segment
    piece = torch.arange(x.size(0) // size + ptr.numel(), device=ptr.device)  # as many as there can be: some are empty
    segment = (torch.searchsorted(first, piece, right=True) - 1).clamp(max=ptr.numel() - 2)
    start = torch.minimum(ptr[segment] + size * (piece - first[segment]), ptr[segment + 1])
    for offsets in (torch.cat([start, ptr[-1:]]), first):
        x = torch.segment_reduce(x, kind, offsets=offsets, axis=0, unsafe=True, initial=0)
    return x


class _LogSoftmax(torch.autograd.Function):
    """See :func:`segment_log_softmax`. The gradient of an indexed row would sort all edges on a GPU."""

    @staticmethod
    def forward(x: Tensor, ptr: Tensor, row: Tensor) -> Tensor:
        top = x.new_full((ptr.numel() - 1,), -torch.inf).scatter_reduce_(0, row, x, "amax")
        x = x - top.nan_to_num(neginf=0.0, posinf=torch.inf)[row]
        return x - segments(x.exp(), ptr).log()[row]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out, ptr, row = ctx.saved_tensors
        return grad - out.exp() * segments(grad, ptr)[row], None, None


def segment_log_softmax(x: Tensor, ptr: Tensor) -> Tensor:
    """Logarithm of the softmax of each segment of ``[E]``, differentiable."""
    out: Tensor = _LogSoftmax.apply(upcast(x), ptr, edge_row(ptr, x.size(0)))
    return out


_ORDERS = TensorMemo()


def by_key(rowptr: Tensor, col: Tensor, heads: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of a graph ordered by head and key.

    Returns:
        Their numbers, ``[E]``, the offsets of the keys among them, ``[H*M+1]``, and the row of each, ``[E]``. They are
        kept for as long as ``col`` lives, so that all backward passes over a graph share them.
    """
    return _ORDERS.get(_sort_by_key, col, rowptr, heads, num_keys)


def _sort_by_key(col: Tensor, rowptr: Tensor, heads: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    row = edge_row(rowptr, col.numel())
    head = torch.div(row, max((rowptr.numel() - 1) // max(heads, 1), 1), rounding_mode="floor")
    small = not torch.compiler.is_compiling() and heads * num_keys < 2**31  # half the passes of a sort on a GPU
    end = torch.add(col, head, alpha=num_keys).to(torch.int32 if small else torch.int64)
    rising, order = end.sort(stable=True)
    return order, torch._convert_indices_from_coo_to_csr(rising, heads * num_keys), row[order]  # as PyG's `index2ptr`


def allowed_keys(query_ptr: Tensor, key_ptr: Tensor, num_queries: int, is_causal: bool) -> Tensor:
    """Number of keys that each query may attend to, ``[N]`` int64, from the first key of its sequence on.

    All of them, or with ``is_causal`` those whose position is not later than the query's.
    """
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    keys = key_ptr.diff()[batch]
    if not is_causal:
        return keys
    return torch.minimum(torch.arange(1, num_queries + 1, device=keys.device) - query_ptr[batch], keys)


def segment_max(src: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return src.new_full((num_rows, *src.shape[1:]), -math.inf).scatter_reduce(0, row, src, "amax")
