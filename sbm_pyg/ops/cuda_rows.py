"""What all Triton kernels share: rows of a graph, gathered vectors, random words, and how a kernel is started.

In: pointers and tiles of edges, on a CUDA device or in Triton's interpreter. Out: tiles of numbers. Not here: any op.
Importing this module imports Triton.

A kernel runs one program per row, which takes the row's edges in tiles of ``EDGES``. A tile of vectors is ``[EDGES,
width]``, its width padded to a power of two. Numbers come in any floating type and are ``WIDE`` (float32, or float64
where an input is) from then on. Places are int64.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import words

WIDEST = 512
"""Channels of a vector above which a tile does not fit the registers of a block."""

_DROPOUT = tl.constexpr(words.DROPOUT << 24)
_MIX_FIRST, _MIX_SECOND = (tl.constexpr(factor) for factor in words._MIX)

# Arguments that differ from call to call, which a kernel must not be compiled for.
VARIABLE = (
    "count", "exploration", "gap_cost", "grain", "grow", "key_blocks", "keys", "least", "numbers", "probe_count",
    "proposal_cost", "queries", "query_blocks", "scale", "seed", "segments", "sequences", "side", "writing",
)  # fmt: skip
kernel = triton.jit(do_not_specialize=VARIABLE)


# ------------------------------------------------------------------ on the host


def launch(program: Any, count: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device of its first argument; none where it would have no programs."""
    grid = count if isinstance(count, tuple) else (count,)
    if min(grid) > 0:
        with torch.cuda.device_of(arguments[0]):
            program[grid](*arguments, **options)


def takes(*given: Tensor | None) -> bool:
    """Whether kernels are made for vectors of such widths; the reference takes the others."""
    return all(0 < x.size(-1) <= WIDEST for x in given if x is not None)


def wide(*given: Tensor | None) -> torch.dtype:
    """Type that numbers are computed in: float64 if an input has it, else float32."""
    doubles = any(x is not None and x.dtype == torch.float64 for x in given)
    return torch.float64 if doubles else torch.float32


def tiles(dtype: torch.dtype, *widths: int, held: int = 1) -> dict[str, Any]:
    """Edges that a program takes at once, its warps, and the type it computes in.

    Tiles that are ``held`` together have 2,048 words, 64 in each thread of one warp: so they fit its registers, and
    sums over edges and channels stay within the warp (docs/kernels.md). Arithmetic in float64 asks for as much again.
    """
    words_of = triton.next_power_of_2(max(widths)) * (4 if dtype == torch.float64 else 1)
    edges = max(1, min(64, 2048 // (held * words_of)))
    return {"EDGES": edges, "WIDE": tl.float64 if dtype == torch.float64 else tl.float32, "num_warps": 1}


def bits(number: float) -> int:
    """A float64 as an integer. As a float, Triton would round it to float32."""
    return struct.unpack("q", struct.pack("d", number))[0]


def chances(query: Tensor, key: Tensor, dropout: float, seed: int) -> tuple[Any, ...]:
    """Words of queries and of keys, ``[H, N]`` and ``[H, M]`` or None without dropout; what :func:`kept` takes next."""
    tables: list[Tensor | None] = [None, None]
    if dropout > 0:
        for side, tokens in enumerate((query, key)):
            heads, numbers = tokens.shape[:2]
            table = torch.empty(heads, numbers, dtype=torch.uint32, device=tokens.device)
            launch(_fill, (triton.cdiv(numbers, 256), heads), table, numbers, side, seed, TILE=256, num_warps=4)
            tables[side] = table
    return *tables, round(dropout * 2**32), bits(1 / (1 - dropout))


# ------------------------------------------------------------------ in a kernel


@triton.jit
def real(number, WIDE: tl.constexpr):
    """What :func:`bits` took apart."""
    return number.to(tl.int64).to(tl.float64, bitcast=True).to(WIDE)


@triton.jit
def span(ptr, queries, keys):
    """Row of this program, the place of its head's first key, and where its edges start and stop."""
    row = tl.program_id(0).to(tl.int64)
    return row, row // queries * keys, tl.load(ptr + row), tl.load(ptr + row + 1)


@triton.jit
def tile(col, begin, stop, first, EDGES: tl.constexpr):
    """Edges from one on, which of them are there, and the places of their keys."""
    edge = begin + tl.arange(0, EDGES)
    there = edge < stop
    return edge, there, first + tl.load(col + edge, mask=there, other=0)


@triton.jit
def vector(source, row, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Row of a matrix, ``[width]``."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    return tl.load(source + row * WIDTH + channel, mask=channel < WIDTH, other=0).to(WIDE)


@triton.jit
def vectors(source, rows, there, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a matrix, ``[EDGES, width]``; zeros where there is none."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = there[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + rows[:, None] * WIDTH + channel[None, :], mask=inside, other=0).to(WIDE)


@triton.jit
def narrow(x, target):
    """Numbers in the type of a pointer, from float64 to half precision by way of float32."""
    if target.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    return x.to(target.dtype.element_ty)


@triton.jit
def put(target, row, x, WIDTH: tl.constexpr):
    """Write a row of a matrix."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    tl.store(target + row * WIDTH + channel, narrow(x, target), mask=channel < WIDTH)


@triton.jit
def total(factor, rows):
    """Sum of vectors by their factors, ``[width]``."""
    return tl.sum(factor[:, None] * rows, 0)


@triton.jit
def dots(rows, x):
    """Dot product of each vector with one, ``[EDGES]``."""
    return tl.sum(rows * x[None, :], 1)


@triton.jit
def logits(score, gate, bias, edge, there, WEIGHTED: tl.constexpr, WIDE: tl.constexpr):
    """What enters the softmax, -inf where there is no edge; and the gate, 1 where there is none.

    A gate of the form "weight" multiplies the weight, and is left out of the logit.
    """
    factor = tl.full(score.shape, 1, WIDE)
    if gate is not None:
        factor = tl.load(gate + edge, mask=there, other=1).to(WIDE)
        if not WEIGHTED:
            score *= factor
    if bias is not None:
        score += tl.load(bias + edge, mask=there, other=0).to(WIDE)
    return tl.where(there, score, float("-inf")), factor


@triton.jit
def finite(x):
    """What is subtracted from logits: 0 for -inf, where there is nothing to subtract from."""
    return tl.where(x == float("-inf"), 0, x)


@triton.jit
def kept(query_word, key_words, ends, there, least):
    """Which edges dropout keeps; see :func:`.words.dropout_keeps`."""
    return keeps(query_word ^ tl.load(key_words + ends, mask=there, other=0), least)


@triton.jit
def keeps(word, least):
    """Which of the combined words of a query and a key keep an edge."""
    word = tl.mul(word ^ word >> 16, _MIX_FIRST, sanitize_overflow=False)
    word = tl.mul(word ^ word >> 15, _MIX_SECOND, sanitize_overflow=False)
    return (word ^ word >> 16).to(tl.int64) >= least


@kernel
def _fill(table, numbers: tl.int64, side: tl.int32, seed: tl.int64, TILE: tl.constexpr):
    """Random words of the tokens of one side; see :func:`.words.dropout_words`."""
    number, head = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    block = 16 * (number // 64) + number % 16
    one, two, three, four = tl.philox(seed, block, side, 0, head | _DROPOUT)
    part = number // 16 % 4
    word = tl.where(part == 0, one, tl.where(part == 1, two, tl.where(part == 2, three, four)))
    tl.store(table + head * numbers + number, word, mask=number < numbers)
