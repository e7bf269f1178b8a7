"""Common parts of the Triton kernels: rows of a graph, gathered vectors, random words, and the start of a kernel.

In: pointers and tiles of edges, on a CUDA device or in Triton's interpreter. Out: tiles of numbers. Not here: any op.
Importing this module imports Triton.

A kernel runs one program per row, and several for a row of very many edges (:class:`SplitRows`). A program takes its
edges in tiles of ``EDGES``. A tile of vectors is ``[EDGES, width]``, its width padded to a power of two. Numbers come
in any floating type, and are converted to ``ACC_TYPE`` (float32, or float64 if an input has it). Offsets are int64.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import random_words
from ..memo import TensorMemo

MAX_CHANNELS = 512
"""Channels of a vector, at most: wider tiles do not fit the registers of a program."""

TILE_WORDS, TILE_WARPS = 2048, 1
"""32-bit registers of tile data per program, and warps per program."""

MAX_EDGES_PER_PROGRAM = 2048
"""Edges of one program, at most; several programs share a row with more."""

_PURPOSE_DROPOUT = tl.constexpr(random_words.DROPOUT)
_MIX_FIRST, _MIX_SECOND = (tl.constexpr(factor) for factor in random_words.MIX)

# Arguments that differ from call to call. Kernels are not compiled anew for their values.
UNSPECIALISED = (
    "block_size", "count", "exploration", "gap_cost", "grow", "heads", "key_blocks", "keys", "least", "numbers",
    "pieces", "probe_count", "probe_pieces", "proposal_cost", "queries", "query_blocks", "row_group", "rows", "scale",
    "seed", "segments", "sequences", "side", "start_word", "writing",
)  # fmt: skip
triton_kernel = triton.jit(do_not_specialize=UNSPECIALISED)

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Default options of all kernels. Without this one Triton 3.9 warns, and 3.10 will not fuse."""


# ------------------------------------------------------------------ on the host


def launch(program: Any, count: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device of its first argument, unless it has no programs."""
    grid = count if isinstance(count, tuple) else (count,)
    if min(grid) > 0:
        with torch.cuda.device_of(arguments[0]):
            program[grid](*arguments, **LAUNCH_OPTIONS | options)


def aligned_size(count: int) -> int:
    """Padded size of ``count`` numbers that keeps the next array aligned to 16 bytes, so that Triton compiles once."""
    return 4 * triton.cdiv(count, 4)


def supports(*tensors: Tensor | None) -> bool:
    """True if kernels support vectors of these widths; the reference computes all other widths."""
    return all(0 < x.size(-1) <= MAX_CHANNELS for x in tensors if x is not None)


def accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Dtype that kernels compute in: float64 if an input is float64, else float32."""
    doubles = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if doubles else torch.float32


def tile_options(dtype: torch.dtype, *widths: int, held: int = 1) -> dict[str, Any]:
    """Launch options: edges that a program takes at once, its warps, and the type that it computes in.

    Tiles that are ``held`` together have 2,048 words, 64 in each thread of one warp: so they fit its registers, and
    sums over edges and channels stay within the warp (docs/kernels.md). Arithmetic in float64 asks for as much again.
    The assembler gives two tiles as few as 96 registers, and three no more where numbers are large or vectors wide, and
    spills; so a limit of their own says what they may take.
    """
    double = dtype == torch.float64
    # A tile has as many edges as its vectors leave room for in the registers of one warp.
    words_of = triton.next_power_of_2(max(widths)) * (4 if double else 1)
    edges = max(1, min(TILE_WORDS // 32, TILE_WORDS // (held * words_of)))
    options = {"EDGES": edges, "ACC_TYPE": tl.float64 if double else tl.float32, "num_warps": TILE_WARPS}
    # State how many registers two tiles, or large numbers, may take: by itself the assembler spills.
    large = double or words_of >= 512
    if held > 1 or (large and (len(widths) > 2 or edges == 1)):
        options["maxnreg"] = 255 if large else 136
    return options


_PIECE_ENDS = TensorMemo()


def _count_pieces(rowptr: Tensor, max_edges: int) -> Tensor:
    """Cumulative number of pieces, ``[rows]`` int64. Rows of at most ``max_edges`` edges add none."""
    pieces, options = rowptr.new_empty(rowptr.numel() - 1), {"TILE": 256, "num_warps": 4}
    count = pieces.numel()
    launch(_count_pieces_kernel, triton.cdiv(count, 256), rowptr, pieces, count, MAX_EDGES=max_edges, **options)
    return pieces.cumsum(0)


class SplitRows:
    """Rows of more than ``MAX_EDGES_PER_PROGRAM`` edges, split among programs without waiting for their number.

    Behind the programs of rows, which skip long ones, each piece of a long row has a program; a few programs have no
    piece. One more kernel merges the results for the pieces of a row.

    Args:
        rowptr: Offsets of the rows.
        num_edges: How many edges there are.
        tensors: Summands; parts are on their device, in the type that kernels compute in.
    """

    def __init__(self, rowptr: Tensor, num_edges: int, *tensors: Tensor) -> None:
        self.max_edges = MAX_EDGES_PER_PROGRAM
        long, most = num_edges > MAX_EDGES_PER_PROGRAM, MAX_EDGES_PER_PROGRAM
        self.piece_ends = _PIECE_ENDS.get(_count_pieces, rowptr, most) if long else None
        self.programs = 2 * num_edges // most if long else 0
        self._device, self._dtype = tensors[0].device, accumulate_dtype(*tensors)

    def parts(self, *width: int) -> Tensor | None:
        """Memory for the sums of each piece, ``[programs, *width]``, where two widths are heads and channels."""
        if self.piece_ends is None:
            return None
        return torch.empty(self.programs, *width, device=self._device, dtype=self._dtype)

    def merge(
        self, out: Tensor, parts: Tensor | None, tops: Tensor | None = None, norms: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the long rows of ``out``: sums of their parts, or means by a softmax, and its logarithms ``lse``."""
        if self.piece_ends is not None and parts is not None:
            rows, heads = self.piece_ends.numel(), parts.size(1) if parts.dim() == 3 else 1
            launch(
                _merge_kernel, self.programs * heads, parts, tops, norms, self.piece_ends, out, lse, rows, heads,
                WIDTH=parts.size(-1), ACC_TYPE=tile_options(parts.dtype, 1)["ACC_TYPE"], num_warps=1,
            )  # fmt: skip


def float_bits(number: float) -> int:
    """A float64 as an integer. As a float, Triton would round it to float32."""
    return struct.unpack("q", struct.pack("d", number))[0]


def dropout_arguments(query: Tensor, key: Tensor, dropout: float, seed: int) -> tuple[Any, ...]:
    """Words of queries ``[H, N]`` and keys ``[H, M]``, or None; the threshold; and the factor of kept weights."""
    tables: list[Tensor | None] = [None, None]
    if dropout > 0:
        for side, tokens in enumerate((query, key)):
            heads, numbers = tokens.shape[:2]
            table = torch.empty(heads, numbers, dtype=torch.uint32, device=tokens.device)
            grid = (triton.cdiv(numbers, 256), heads)
            launch(_dropout_words_kernel, grid, table, numbers, side, seed, TILE=256, num_warps=4)
            tables[side] = table
    return *tables, round(float(dropout) * 2**32), float_bits(1 / (1 - dropout))


# ------------------------------------------------------------------ in a kernel


@triton.jit
def from_bits(number, ACC_TYPE: tl.constexpr):
    """Convert an integer of :func:`float_bits` back to its number."""
    return number.to(tl.int64).to(tl.float64, bitcast=True).to(ACC_TYPE)


@triton.jit
def row_span(ptr, queries, keys):
    """Row of this program, the first key of its head, and where its edges start and stop."""
    row = tl.program_id(0).to(tl.int64)
    return row, row // queries * keys, tl.load(ptr + row), tl.load(ptr + row + 1)


@triton.jit
def row_of_piece(piece_ends, rows, slot):
    """Row of a piece, and the range of the pieces of that row; a row without the piece if it does not exist."""
    low, high = slot * 0, tl.where((slot < 0) | (slot >= tl.load(piece_ends + rows - 1)), 0, rows)
    # Bisect the running numbers of pieces.
    while low < high:
        middle = (low + high) // 2
        before = tl.load(piece_ends + middle) <= slot
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    return low, tl.load(piece_ends + low - 1, mask=low > 0, other=0), tl.load(piece_ends + low)


@triton.jit
def work_item_of(ptr, piece_ends, program, rows, MAX_EDGES: tl.constexpr):
    """Row of a program, where the program's edges start and stop, and its piece.

    Programs of whole rows come first, and have a negative piece.
    """
    row, slot = program, program - rows
    first, last = slot, slot  # no piece
    # Programs behind those of the rows look for their piece of a long row.
    if piece_ends is not None:  # noqa: SIM102 - decided when it is compiled, the next when it runs
        if slot >= 0:
            row, first, last = row_of_piece(piece_ends, rows, slot)
    start, stop = tl.load(ptr + row), tl.load(ptr + row + 1)
    # A whole row that is long, and a slot without a piece, get no edges.
    if piece_ends is not None:
        begin = tl.minimum(start + (slot - first) * MAX_EDGES, stop)
        has_edges = tl.where(slot < 0, stop - start <= MAX_EDGES, slot < last)
        start, stop = begin, tl.where(has_edges, tl.minimum(begin + MAX_EDGES, stop), begin)
    return row, start, stop, slot


@triton.jit
def work_item(ptr, piece_ends, rows, queries, keys, MAX_EDGES: tl.constexpr):
    """As :func:`row_span`, for rows that may be split; and the piece of this program, negative for a whole row."""
    row, start, stop, slot = work_item_of(ptr, piece_ends, tl.program_id(0).to(tl.int64), rows, MAX_EDGES)
    return row, row // queries * keys, start, stop, slot


@triton.jit
def programs_of_row(piece_ends, row, rows):
    """The range of the programs that share a row, without its end."""
    first, last = row, row + 1
    if piece_ends is not None:
        low, high = tl.load(piece_ends + row - 1, mask=row > 0, other=0), tl.load(piece_ends + row)
        first, last = tl.where(low < high, rows + low, first), tl.where(low < high, rows + high, last)
    return first, last


@triton.jit
def load_edges(col, begin, stop, first, EDGES: tl.constexpr):
    """Edges from ``begin`` on, a mask of those that exist, and their keys."""
    edge = begin + tl.arange(0, EDGES)
    exists = edge < stop
    return edge, exists, first + tl.load(col + edge, mask=exists, other=0)


@triton.jit
def load_vector(source, row, WIDTH: tl.constexpr, ACC_TYPE: tl.constexpr):
    """A row of a matrix, ``[width]``."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    return tl.load(source + row * WIDTH + channel, mask=channel < WIDTH, other=0).to(ACC_TYPE)


@triton.jit
def gather(source, rows, exists, WIDTH: tl.constexpr, ACC_TYPE: tl.constexpr):
    """Some rows of a matrix, ``[EDGES, width]``; zeros where the mask is false."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    return tl.load(source + rows[:, None] * WIDTH + channel[None, :], mask=inside, other=0).to(ACC_TYPE)


@triton.jit
def cast_like(x, target):
    """Convert numbers to the type of a pointer; float64 becomes half precision by way of float32."""
    if target.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    return x.to(target.dtype.element_ty)


@triton.jit
def store_vector(target, row, x, WIDTH: tl.constexpr, exists=None):
    """Write a row of a matrix; with ``exists``, only if it is true."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = channel < WIDTH if exists is None else channel < tl.where(exists, WIDTH, 0)
    tl.store(target + row * WIDTH + channel, cast_like(x, target), mask=inside)


@triton.jit
def store_row(target, parts, slot, x, WIDTH: tl.constexpr):
    """Write the sums of this program: to its row of ``target``, or for a piece of a row to ``parts``."""
    row = tl.program_id(0).to(tl.int64)
    if parts is None:
        store_vector(target, row, x, WIDTH)
    else:
        store_vector(target, row, x, WIDTH, slot < 0)
        store_vector(parts, slot, x, WIDTH, slot >= 0)


@triton.jit
def weighted_sum(factor, rows):
    """Sum of vectors times their factors, ``[width]``."""
    return tl.sum(factor[:, None] * rows, 0)


@triton.jit
def dot_rows(rows, x):
    """Dot product of each vector with one, ``[EDGES]``."""
    return tl.sum(rows * x[None, :], 1)


@triton.jit
def gated_logits(score, gate, bias, edge, exists, WEIGHTED: tl.constexpr, ACC_TYPE: tl.constexpr):
    """Logits, -inf where there is no edge; and the gate, 1 without one.

    A gate of the form "weight" multiplies the weight, and is left out of the logit.
    """
    factor = tl.full(score.shape, 1, ACC_TYPE)
    # Multiply the score by a gate of the form ``score``, and add the bias.
    if gate is not None:
        factor = tl.load(gate + edge, mask=exists, other=1).to(ACC_TYPE)
        if not WEIGHTED:
            score = score * factor + 0.0  # not fused with the subtraction of a maximum, from which it would then differ
    if bias is not None:
        score += tl.load(bias + edge, mask=exists, other=0).to(ACC_TYPE)
    return tl.where(exists, score, float("-inf")), factor


@triton.jit
def finite(x):
    """Replace -inf by 0, so that the maximum of an empty row can be subtracted from logits."""
    return tl.where(x == float("-inf"), 0, x)


@triton.jit
def keeps_edges(query_word, key_words, ends, exists, least):
    """True for the edges that dropout keeps; see :func:`.random_words.dropout_keeps`."""
    return keeps_words(query_word ^ tl.load(key_words + ends, mask=exists, other=0), least)


@triton.jit
def keeps_words(word, least):
    """True for edges that dropout keeps, by the exclusive or of the words of their query and key."""
    return mix_words(word) >= least


@triton.jit
def mix_words(word):
    """A permutation of 32-bit words in which each bit depends on all, as int64."""
    word = tl.mul(word ^ word >> 16, _MIX_FIRST, sanitize_overflow=False)
    word = tl.mul(word ^ word >> 15, _MIX_SECOND, sanitize_overflow=False)
    return (word ^ word >> 16).to(tl.int64)


@triton_kernel
def _dropout_words_kernel(table, numbers: tl.int64, side: tl.int32, seed: tl.int64, TILE: tl.constexpr):
    """Random words of queries, or of keys; see :func:`.random_words.dropout_words`."""
    # Each counter makes four words, which lie sixteen numbers apart.
    number, head = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    block = 16 * (number // 64) + number % 16
    one, two, three, four = tl.philox(seed, block, side, 0, head | _PURPOSE_DROPOUT)
    quarter = number // 16 % 4
    word = tl.where(quarter == 0, one, tl.where(quarter == 1, two, tl.where(quarter == 2, three, four)))
    tl.store(table + head * numbers + number, word, mask=number < numbers)


@triton_kernel
def _count_pieces_kernel(ptr, out, count: tl.int64, MAX_EDGES: tl.constexpr, TILE: tl.constexpr):
    """Number of pieces of each row, 0 for rows of one program."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = row < count
    edges = tl.load(ptr + row + 1, mask=exists, other=0) - tl.load(ptr + row, mask=exists, other=0)
    tl.store(out + row, tl.where(edges > MAX_EDGES, (edges + MAX_EDGES - 1) // MAX_EDGES, 0), mask=exists)


@triton_kernel
def _merge_kernel(
    parts, tops, norms, piece_ends, out, lse, rows: tl.int64, heads: tl.int64, WIDTH: tl.constexpr,
    ACC_TYPE: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a row and head, in the program of the first piece; other programs do nothing."""
    program = tl.program_id(0).to(tl.int64)
    slot, head = program // heads, program % heads
    row, first, last = row_of_piece(piece_ends, rows, slot)
    if (slot == first) & (slot < last):
        sums, norm = tl.zeros([triton.next_power_of_2(WIDTH)], ACC_TYPE), tl.full([], 0, ACC_TYPE)
        top = tl.full([], float("-inf"), ACC_TYPE)
        # Find the largest logit of all pieces, so that their sums get one scale.
        if tops is not None:
            for piece in range(slot, last):
                top = tl.maximum(top, tl.load(tops + piece * heads + head))
        # Add the sums of the pieces, in their order.
        for piece in range(slot, last):
            factor = tl.full([], 1, ACC_TYPE)
            if tops is not None:
                factor = tl.exp(tl.load(tops + piece * heads + head) - finite(top))
                norm += factor * tl.load(norms + piece * heads + head)
            sums += factor * load_vector(parts, piece * heads + head, WIDTH, ACC_TYPE)
        # Divide by the sum of the weights, and write its logarithm.
        if tops is not None:
            sums /= tl.where(norm == 0, 1, norm)
            tl.store(lse + row * heads + head, top + tl.log(norm))
        store_vector(out, row * heads + head, sums, WIDTH)
