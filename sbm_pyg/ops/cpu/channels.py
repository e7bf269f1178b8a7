"""Rows of channels for kernels over edges: conversion from and to tensors, and loops over strips of channels.

In: tensors ``[H, N, C]``, and inside kernels arrays or pointers. Out: arrays ``[H * N, width]``, where the width is
channels padded with zeros to a multiple of 16; and sums and copies of such rows, ``lanes`` channels at a time. A lane
count is a constant of the kernel. Not here: kernels; vectors (:mod:`.simd`).

The loops are written into each kernel that calls them, before numba infers types: so they cost what the same lines in
the kernel cost, constants stay constants, and the kernel can still be cached.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .simd import at, dots16, load, load16, peek, splat, store

# ------------------------------------------------------------------ tensors


def to_array(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    """A contiguous array in the precision that kernels compute in for the dtype of ``like``.

    Without elements for None.
    """
    tensor = like.new_empty(0) if tensor is None else tensor.detach()
    return tensor.to(torch.promote_types(like.dtype, torch.float32)).contiguous().numpy()


def to_padded_array(tensor: Tensor, like: Tensor) -> np.ndarray:
    """``[H, N, C]`` as ``[H*N, width]``, with zeros behind the channels."""
    missing = max(16, -(-tensor.shape[2] // 16) * 16) - tensor.shape[2]
    rows = to_array(torch.nn.functional.pad(tensor.detach(), (0, missing)) if missing else tensor, like)
    return rows.reshape(rows.shape[0] * rows.shape[1], rows.shape[2])


def unpad_channels(rows: Tensor, like: Tensor) -> Tensor:
    """The first channels of ``[H, N, width]``, in the number and dtype of ``like``."""
    channels = like.shape[2]
    return rows[..., :channels].to(like.dtype, copy=rows.shape[2] != channels, memory_format=torch.contiguous_format)


def lanes_of(*widths: int) -> int:
    """Channels that a kernel takes at once, for widths that are multiples of 16."""
    return next(lanes for lanes in (64, 48, 32, 16) if not any(width % lanes for width in widths))


# ------------------------------------------------------------------ loops


@njit(inline="always")
def clear(array, offset, width, number, lanes):
    """``array[offset : offset + width] = number``."""
    for c in range(0, width, lanes):
        store(array, offset + c, splat(number, lanes))


@njit(inline="always")
def copy(target, to, source, start, width, lanes):
    """``target[to : to + width] = source[start : start + width]``."""
    for c in range(0, width, lanes):
        store(target, to + c, load(source, start + c, lanes))


@njit(inline="always")
def add_dots(sums, row, offset, rows, stride, tokens, width, lanes):
    """``sums``, plus in lane k the dot product of ``row[offset:][:width]`` and ``rows[stride * tokens[k]]``."""
    for c in range(0, width, lanes):
        sums = sums + dots16(load(row, offset + c, lanes), at(rows, c), stride, tokens)
    return sums


@njit(inline="always")
def weigh(weight, edge, rows, tokens, width, c, lanes):
    """Channels ``c .. c + lanes - 1`` of the row at the other end of an edge, times the weight of the edge."""
    return peek(weight, edge) * load(rows, peek(tokens, edge) * width + c, lanes)


@njit(inline="always")
def sixteen(tokens, count, tail):
    """``tokens`` if there are sixteen; else ``tail``, filled with the tokens and then zeros."""
    if count < 16:
        store(tail, 0, load16(tokens, 0, count))
        tokens = tail
    return tokens


@njit(inline="always")
def count_below(tokens, count, limit):
    """Number of tokens below ``limit`` among ``count`` ascending tokens, the first of which is below it."""
    while peek(tokens, count - 1) >= limit:
        count -= 1
    return count
