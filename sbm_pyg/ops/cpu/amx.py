"""Products of bfloat16 matrices in the tile registers of a processor (Intel AMX), for numba.

In: sixteen rows and sixty-four columns of bfloat16 bits, packed as the instruction takes them. Out: float32 sums.
``AVAILABLE`` is True on machines with tile registers; on others nothing here may be compiled. Not here: kernels, and
packing.

A tile holds 16 rows of 64 bytes. ``TDPBF16PS`` adds to a tile of 16 x 16 float32 the product of 16 rows of 32 numbers
with 16 columns of 32, 8,192 multiplications at once; the columns lie in pairs: numbers 2 r and 2 r + 1 of all sixteen
make row r.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .simd import I8, I64, has_features, pointer

DEPTH = 32
"""Numbers of a row that one instruction takes."""
_SUMS, _ROWS, _COLUMNS = range(4), 4, 5  # numbers of the registers


AVAILABLE = has_features("amx-tile", "amx-bf16") and torch.cpu._init_amx()  # which asks the system for their use


def _call_x86(builder, name, arguments):
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _tile_number(number):
    return ir.Constant(I8, number)


@intrinsic
def open_tiles(typing):
    """Shape all registers of this thread as 16 rows of 64 bytes; before the first product."""

    def generate(context, builder, signature, args):
        layout = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]  # palette, bytes per row (uint16), rows
        config = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I8, 64), layout))
        _call_x86(builder, "ldtilecfg", [builder.bitcast(config, I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def close_tiles(typing):
    """Release the registers of this thread; after the last product."""

    def generate(context, builder, signature, args):
        _call_x86(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply_tiles(typing, rows, columns, offset, depth, out, out_offset, width):
    """``out[r * width + out_offset + j] = sum_k rows[r, k] columns[k, j]`` for 16 rows r and 64 columns j.

    ``rows`` is uint16 ``[16, depth]``, ``columns`` uint16 from ``offset`` on, for each 32 numbers four tiles of sixteen
    columns; both hold the bits of bfloat16. ``depth`` is a multiple of 32, ``width`` counts the float32 of a row of
    ``out``.
    """

    def generate(context, builder, signature, args):
        rows_, columns_, offset_, depth_, out_, offset_out, width_ = args

        def constant(number):
            return ir.Constant(I64, number)

        for tile in _SUMS:
            _call_x86(builder, "tilezero", [_tile_number(tile)])
        pitch = builder.mul(depth_, constant(2))
        with cgutils.for_range(builder, builder.udiv(depth_, constant(DEPTH)), intp=I64) as loop:
            some = builder.mul(loop.index, constant(DEPTH))
            _call_x86(
                builder, "tileloadd64", [_tile_number(_ROWS), pointer(context, builder, rows, rows_, some, I8), pitch]
            )
            for tile in _SUMS:
                register = _tile_number(_COLUMNS + tile % 2)
                start = builder.add(offset_, builder.add(builder.mul(some, constant(64)), constant(tile * 16 * DEPTH)))
                _call_x86(
                    builder,
                    "tileloadd64",
                    [register, pointer(context, builder, columns, columns_, start, I8), constant(64)],
                )
                _call_x86(builder, "tdpbf16ps", [_tile_number(tile), _tile_number(_ROWS), register])
        for tile in _SUMS:
            target = pointer(context, builder, out, out_, builder.add(offset_out, constant(16 * tile)), I8)
            _call_x86(builder, "tilestored64", [_tile_number(tile), target, builder.mul(width_, constant(4))])
        return context.get_dummy_value()

    return types.void(rows, columns, types.int64, types.int64, out, types.int64, types.int64), generate
