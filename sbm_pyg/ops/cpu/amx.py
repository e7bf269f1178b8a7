"""Products of bfloat16 matrices on a processor's tile registers (Intel AMX), as numba values.

In: sixteen rows and sixty-four columns of bfloat16 bits, packed as the instruction wants them. Out: float32 sums.
``AVAILABLE`` says whether this machine has tiles; where it has not, nothing here may be compiled. Not here: kernels,
and packing.

A tile holds 16 rows of 64 bytes. ``TDPBF16PS`` adds to a tile of 16 x 16 float32 the product of 16 rows of 32 numbers
with 16 columns of 32, 8,192 multiplications at once; the columns lie in pairs: numbers 2 r and 2 r + 1 of all sixteen
make row r.
"""

from __future__ import annotations

import llvmlite.binding
import torch
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

DEPTH = 32  # numbers of a row that one instruction takes
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_SUMS, _ROWS, _COLUMNS = range(4), 4, 5  # which register holds what


def _available() -> bool:
    """Whether numba compiles for a processor with tiles, and the system lets this process use them."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return False
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("amx-tile") and features.get("amx-bf16") and torch.cpu._init_amx())


AVAILABLE = _available()


def _call(builder, name, arguments):
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _bytes(context, builder, array_type, array, offset):
    """Address of an element."""
    return builder.bitcast(
        builder.gep(make_array(array_type)(context, builder, array).data, [offset]), _I8.as_pointer()
    )


def _tile(number):
    return ir.Constant(_I8, number)


@intrinsic
def open_tiles(typing):
    """Shape all registers of this thread as 16 rows of 64 bytes; before the first product."""

    def generate(context, builder, signature, args):
        layout = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]  # palette, bytes per row (uint16), rows
        config = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_I8, 64), layout))
        _call(builder, "ldtilecfg", [builder.bitcast(config, _I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def close_tiles(typing):
    """Give the registers of this thread back; after the last product."""

    def generate(context, builder, signature, args):
        _call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply_tiles(typing, rows, columns, offset, depth, out, place, width):
    """``out[r * width + place + j] = sum_k rows[r, k] columns[k, j]`` for 16 rows r and 64 columns j.

    ``rows`` is uint16 ``[16, depth]``, ``columns`` uint16 from ``offset`` on, for each 32 numbers four tiles of sixteen
    columns; both hold the bits of bfloat16. ``depth`` is a multiple of 32, ``width`` counts the float32 of a row of
    ``out``.
    """

    def generate(context, builder, signature, args):
        rows_, columns_, offset_, depth_, out_, place_, width_ = args

        def constant(number):
            return ir.Constant(_I64, number)

        for tile in _SUMS:
            _call(builder, "tilezero", [_tile(tile)])
        pitch = builder.mul(depth_, constant(2))
        with cgutils.for_range(builder, builder.udiv(depth_, constant(DEPTH)), intp=_I64) as loop:
            some = builder.mul(loop.index, constant(DEPTH))
            _call(builder, "tileloadd64", [_tile(_ROWS), _bytes(context, builder, rows, rows_, some), pitch])
            for tile in _SUMS:
                register = _tile(_COLUMNS + tile % 2)
                start = builder.add(offset_, builder.add(builder.mul(some, constant(64)), constant(tile * 16 * DEPTH)))
                _call(
                    builder, "tileloadd64", [register, _bytes(context, builder, columns, columns_, start), constant(64)]
                )
                _call(builder, "tdpbf16ps", [_tile(tile), _tile(_ROWS), register])
        for tile in _SUMS:
            target = _bytes(context, builder, out, out_, builder.add(place_, constant(16 * tile)))
            _call(builder, "tilestored64", [_tile(tile), target, builder.mul(width_, constant(4))])
        return context.get_dummy_value()

    return types.void(rows, columns, types.int64, types.int64, out, types.int64, types.int64), generate
