"""Sixteen random words, coins or positions at a time, as numba values.

In: arrays and offsets into them. Out: stored words, and bit masks of sixteen lanes. These are LLVM's own vector instructions, so they
work on any machine and are one or two instructions each where it has wide registers. Not here: kernels.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

LANES = 16
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTES, _WORDS, _LONGS, _FLOATS = (ir.VectorType(kind, LANES) for kind in (_I8, _I32, _I64, ir.FloatType()))


def _call(builder, name, result, arguments):
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(function, arguments)


def _splat(builder, number):
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


def _pointer(context, builder, array_type, array, offset, kind):
    return builder.bitcast(builder.gep(make_array(array_type)(context, builder, array).data, [offset]), kind.as_pointer())


@intrinsic
def philox16(typing, counter, row, stream, purpose, seed, out, offset):
    """Philox4x32-10 at counters ``(counter .. counter + 15, row, stream, purpose)``: word k of all sixteen, then word k + 1.

    ``out`` is uint32 and receives 64 words from ``offset`` on.
    """

    def generate(context, builder, signature, args):
        def wide(number):
            return ir.Constant(_LONGS, [number] * LANES)

        low = wide(0xFFFFFFFF)
        x = [_splat(builder, builder.and_(arg, ir.Constant(_I64, 0xFFFFFFFF))) for arg in args[:4]]
        x[0] = builder.and_(builder.add(x[0], ir.Constant(_LONGS, list(range(LANES)))), low)
        key = [
            _splat(builder, builder.and_(args[4], ir.Constant(_I64, 0xFFFFFFFF))),
            _splat(builder, builder.lshr(args[4], ir.Constant(_I64, 32))),
        ]
        for _ in range(10):
            a, b = builder.mul(x[0], wide(0xD2511F53)), builder.mul(x[2], wide(0xCD9E8D57))
            x = [
                builder.xor(builder.xor(builder.lshr(b, wide(32)), x[1]), key[0]),
                builder.and_(b, low),
                builder.xor(builder.xor(builder.lshr(a, wide(32)), x[3]), key[1]),
                builder.and_(a, low),
            ]
            key = [builder.and_(builder.add(k, wide(step)), low) for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        for word, value in enumerate(x):
            target = builder.add(args[6], ir.Constant(_I64, LANES * word))
            builder.store(builder.trunc(value, _WORDS), _pointer(context, builder, out, args[5], target, _WORDS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, types.uint64, out, types.int64), generate


@intrinsic
def toss16(typing, approx, coins, offset, below, less, above, more):
    """Sixteen coins against sixteen probabilities known up to a relative error.

    ``approx`` is float32; ``coins`` is uint8, one random byte for each. Returns a mask: bit k where byte k lies
    below ``floor(below p + less)``, an edge whatever the error is; bit ``16 + k`` where it does not, but not above ``floor(above p + more)``
    either, so that the error decides.
    """

    def generate(context, builder, signature, args):
        p = builder.load(_pointer(context, builder, approx, args[0], args[2], _FLOATS), align=4)
        coin = builder.zext(builder.load(_pointer(context, builder, coins, args[1], args[2], _BYTES), align=1), _WORDS)
        low, high = (
            builder.fptosi(builder.fadd(builder.fmul(p, _splat(builder, factor)), _splat(builder, term)), _WORDS)
            for factor, term in (args[3:5], args[5:7])
        )
        sure = builder.icmp_signed("<", coin, low)
        maybe = builder.and_(builder.icmp_signed(">=", coin, low), builder.icmp_signed("<=", coin, high))
        masks = [builder.zext(builder.bitcast(mask, _I16), _I64) for mask in (sure, maybe)]
        return builder.or_(masks[0], builder.shl(masks[1], ir.Constant(_I64, LANES)))

    return types.uint64(approx, coins, types.int64, *(types.float32,) * 4), generate


@intrinsic
def append16(typing, mask, base, out, used):
    """Append ``base + k`` to ``out`` for each bit k of the mask's sixteen; returns the new end.

    ``out`` is int32 and needs room for sixteen whatever the mask says.
    """

    def generate(context, builder, signature, args):
        half = builder.trunc(args[0], _I16)
        flags = builder.bitcast(half, ir.VectorType(ir.IntType(1), LANES))
        places = builder.add(_splat(builder, builder.trunc(args[1], _I32)), ir.Constant(_WORDS, list(range(LANES))))
        packed = _call(builder, f"llvm.experimental.vector.compress.v{LANES}i32", _WORDS, [places, flags, places])
        builder.store(packed, _pointer(context, builder, out, args[2], args[3], _WORDS), align=4)
        return builder.add(args[3], builder.zext(_call(builder, "llvm.ctpop.i16", _I16, [half]), _I64))

    return types.int64(types.uint64, types.int64, out, types.int64), generate


@intrinsic
def below16(typing, bounds, offset, word):
    """How many of the sixteen uint32 from ``offset`` on lie below the word."""

    def generate(context, builder, signature, args):
        some = builder.load(_pointer(context, builder, bounds, args[0], args[1], _WORDS), align=4)
        mask = builder.bitcast(builder.icmp_unsigned("<", some, _splat(builder, args[2])), _I16)
        return builder.zext(_call(builder, "llvm.ctpop.i16", _I16, [mask]), _I64)

    return types.int64(bounds, types.int64, types.uint32), generate


@intrinsic
def lowest_bit(typing, word):
    """Position of the lowest bit of a uint64 that is not 0."""

    def generate(context, builder, signature, args):
        return _call(builder, "llvm.cttz.i64", _I64, [args[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.uint64), generate


@intrinsic
def fetch(typing, array, offset):
    """Ask for the cache line of an element that is needed soon."""

    def generate(context, builder, signature, args):
        where = _pointer(context, builder, array, args[0], args[1], _I8)
        hints = [ir.Constant(_I32, hint) for hint in (0, 3, 1)]  # to read, to keep, data
        function = ir.FunctionType(ir.VoidType(), [where.type, _I32, _I32, _I32])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [where, *hints])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
