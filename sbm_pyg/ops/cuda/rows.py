"""What all Triton kernels share: rows of a graph, gathered vectors, random words, and how a kernel is started.

In: pointers and tiles of edges, on a CUDA device or in Triton's interpreter. Out: tiles of numbers. Not here: any op.
Importing this module imports Triton.

A kernel runs one program per row, and several for one of very many edges (:class:`Shared`). A program takes its edges
in tiles of ``EDGES``. A tile of vectors is ``[EDGES, width]``, its width padded to a power of two. Numbers come in any
floating type and are ``WIDE`` (float32, or float64 where an input is) from then on. Places are int64.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..memo import Kept
from ..reference import random_words

WIDEST = 512
"""Channels of a vector above which a tile does not fit the registers of a block."""

WORDS, WARPS = 2048, 1
"""Words of the tiles that a program holds together, and its warps."""

LONG = 2048
"""Edges that one program takes at most; rows with more are shared by several."""

_PURPOSE_DROPOUT = tl.constexpr(random_words.DROPOUT)
_MIX_FIRST, _MIX_SECOND = (tl.constexpr(factor) for factor in random_words.MIX)

# Arguments that differ from call to call, which a kernel must not be compiled for.
VARIABLE = (
    "count", "exploration", "gap_cost", "grain", "grow", "key_blocks", "keys", "least", "numbers", "pieces",
    "probe_count", "probe_pieces", "proposal_cost", "queries", "query_blocks", "rows", "scale", "seed", "segments",
    "sequences", "side", "window", "writing",
)  # fmt: skip
kernel = triton.jit(do_not_specialize=VARIABLE)

OPTIONS = {"enable_fp_fusion": True}
"""What kernels are compiled with unless they say otherwise; without it Triton 3.9 warns, and 3.10 will not fuse."""


# ------------------------------------------------------------------ on the host


def launch(program: Any, count: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device of its first argument; none where it would have no programs."""
    grid = count if isinstance(count, tuple) else (count,)
    if min(grid) > 0:
        with torch.cuda.device_of(arguments[0]):
            program[grid](*arguments, **OPTIONS | options)


def aligned(count: int) -> int:
    """Numbers to allocate for so many, if others follow: Triton compiles anew for what begins at no 16 bytes."""
    return 4 * triton.cdiv(count, 4)


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
    The assembler gives two tiles as few as 96 registers, and three no more where numbers are large or vectors wide, and
    spills; so a limit of their own says what they may take.
    """
    double = dtype == torch.float64
    words_of = triton.next_power_of_2(max(widths)) * (4 if double else 1)
    edges = max(1, min(WORDS // 32, WORDS // (held * words_of)))
    options = {"EDGES": edges, "WIDE": tl.float64 if double else tl.float32, "num_warps": WARPS}
    large = double or words_of >= 512
    if held > 1 or (large and (len(widths) > 2 or edges == 1)):
        options["maxnreg"] = 255 if large else 136
    return options


_PIECES = Kept()


def _pieces(rowptr: Tensor, long: int) -> Tensor:
    """The running number of pieces of rows of more than so many edges, ``[rows]`` int64."""
    pieces = rowptr.new_empty(rowptr.numel() - 1)
    count = pieces.numel()
    launch(_count, triton.cdiv(count, 256), rowptr, pieces, count, LONG=long, TILE=256, num_warps=4)
    return pieces.cumsum(0)


class Shared:
    """How rows of more than ``LONG`` edges are shared, without waiting for how many there are.

    Behind the programs of the rows, which leave long ones alone, each piece of a long row has a program; a few have
    none. What several have made of a row is united by one more kernel.

    Args:
        rowptr: Offsets of the rows.
        num_edges: How many edges there are.
        given: What is summed; parts are on its device, and of the type that numbers are computed in.
    """

    def __init__(self, rowptr: Tensor, num_edges: int, *given: Tensor) -> None:
        self.long = LONG
        self.more = _PIECES.get(_pieces, rowptr, LONG) if num_edges > LONG else None
        self.programs = 2 * num_edges // LONG if num_edges > LONG else 0
        self._device, self._dtype = given[0].device, wide(*given)

    def parts(self, *width: int) -> Tensor | None:
        """Room for what each piece adds, ``[programs, *width]``."""
        if self.more is None:
            return None
        return torch.empty(self.programs, *width, device=self._device, dtype=self._dtype)

    def unite(
        self, out: Tensor, parts: Tensor | None, tops: Tensor | None = None, norms: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the long rows of ``out``: sums of their parts, or means by a softmax, and its logarithms ``lse``."""
        if self.more is not None and parts is not None:
            launch(
                _unite, self.programs, parts, tops, norms, self.more, out, lse, self.more.numel(), WIDTH=parts.size(1),
                WIDE=tiles(parts.dtype, 1)["WIDE"], num_warps=1,
            )  # fmt: skip


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
def holder(more, rows, slot):
    """The row that a piece belongs to, its first piece and the one behind its last; of no piece a row without it."""
    low, high = slot * 0, tl.where((slot < 0) | (slot >= tl.load(more + rows - 1)), 0, rows)
    while low < high:
        middle = (low + high) // 2
        before = tl.load(more + middle) <= slot
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    return low, tl.load(more + low - 1, mask=low > 0, other=0), tl.load(more + low)


@triton.jit
def part(ptr, more, place, rows, LONG: tl.constexpr):
    """Row of a program, which may be shared, where the program's edges start and stop, and the piece that it makes.

    The programs of whole rows come first, the piece of one is negative.
    """
    row, slot = place, place - rows
    first, last = slot, slot  # none
    if more is not None:  # noqa: SIM102 - decided when it is compiled, the next when it runs
        if slot >= 0:
            row, first, last = holder(more, rows, slot)
    start, stop = tl.load(ptr + row), tl.load(ptr + row + 1)
    if more is not None:
        begin = tl.minimum(start + (slot - first) * LONG, stop)
        mine = tl.where(slot < 0, stop - start <= LONG, slot < last)
        start, stop = begin, tl.where(mine, tl.minimum(begin + LONG, stop), begin)
    return row, start, stop, slot


@triton.jit
def piece(ptr, more, rows, queries, keys, LONG: tl.constexpr):
    """As :func:`span`, of rows that may be shared; and the piece that this program makes, negative for a whole row."""
    row, start, stop, slot = part(ptr, more, tl.program_id(0).to(tl.int64), rows, LONG)
    return row, row // queries * keys, start, stop, slot


@triton.jit
def makers(more, row, rows):
    """The programs that :func:`part` gives a row to: from one to before another."""
    first, last = row, row + 1
    if more is not None:
        low, high = tl.load(more + row - 1, mask=row > 0, other=0), tl.load(more + row)
        first, last = tl.where(low < high, rows + low, first), tl.where(low < high, rows + high, last)
    return first, last


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
def put(target, row, x, WIDTH: tl.constexpr, there=None):
    """Write a row of a matrix; with ``there``, only if it is true."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = channel < WIDTH if there is None else channel < tl.where(there, WIDTH, 0)
    tl.store(target + row * WIDTH + channel, narrow(x, target), mask=inside)


@triton.jit
def give(target, parts, slot, x, WIDTH: tl.constexpr):
    """Write a row, or the part of it that :func:`piece` gave to this program, whose number is that of a whole row."""
    row = tl.program_id(0).to(tl.int64)
    if parts is None:
        put(target, row, x, WIDTH)
    else:
        put(target, row, x, WIDTH, slot < 0)
        put(parts, slot, x, WIDTH, slot >= 0)


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
    one, two, three, four = tl.philox(seed, block, side, 0, head | _PURPOSE_DROPOUT)
    part = number // 16 % 4
    word = tl.where(part == 0, one, tl.where(part == 1, two, tl.where(part == 2, three, four)))
    tl.store(table + head * numbers + number, word, mask=number < numbers)


@kernel
def _count(ptr, out, count: tl.int64, LONG: tl.constexpr, TILE: tl.constexpr):
    """Pieces of each row, none of one that its own program takes."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = row < count
    edges = tl.load(ptr + row + 1, mask=there, other=0) - tl.load(ptr + row, mask=there, other=0)
    tl.store(out + row, tl.where(edges > LONG, (edges + LONG - 1) // LONG, 0), mask=there)


@kernel
def _unite(
    parts, tops, norms, more, out, lse, rows: tl.int64, WIDTH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """A shared row of its pieces: by the program of its first piece, the others do nothing."""
    slot = tl.program_id(0).to(tl.int64)
    row, first, last = holder(more, rows, slot)
    if (slot == first) & (slot < last):
        sums, norm = tl.zeros([triton.next_power_of_2(WIDTH)], WIDE), tl.full([], 0, WIDE)
        top = tl.full([], float("-inf"), WIDE)
        if tops is not None:
            for part in range(slot, last):
                top = tl.maximum(top, tl.load(tops + part))
        for part in range(slot, last):
            factor = tl.full([], 1, WIDE)
            if tops is not None:
                factor = tl.exp(tl.load(tops + part) - finite(top))
                norm += factor * tl.load(norms + part)
            sums += factor * vector(parts, part, WIDTH, WIDE)
        if tops is not None:
            sums /= tl.where(norm == 0, 1, norm)
            tl.store(lse + row, top + tl.log(norm))
        put(out, row, sums, WIDTH)
