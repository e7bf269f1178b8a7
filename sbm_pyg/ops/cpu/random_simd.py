"""Sixteen random words, Bernoulli draws or positions at a time, for numba.

In: arrays and offsets into them. Out: stored words, and bit masks of sixteen lanes. These are LLVM's own vector
instructions, so they work on any machine and are one or two instructions each where it has wide registers. Not here:
kernels.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..random_words import MIX16
from .simd import I8, I16, I32, I64, WIDE, call_llvm, peek, pointer, poke, splat_number

LANES = 16
QUICK_ERROR = 2.0**-21
"""Upper bound on the error of ``quick_gaps16``: this times the sum of the gap and ``spread``."""
_BYTES, _WORDS, _LONGS, _FLOATS, _DOUBLES = (
    ir.VectorType(kind, LANES) for kind in (I8, I32, I64, ir.FloatType(), ir.DoubleType())
)


_splat16 = partial(splat_number, lanes=LANES)


def _long(number):
    return ir.Constant(_LONGS, [number] * LANES)


def _fused(builder, factor, other, term):
    """``factor * other + term``, in one rounding where the machine can."""
    return builder.fadd(builder.fmul(factor, other, flags=("contract",)), term, flags=("contract",))


def _running_sums(builder, numbers, zeros, add):
    """The sum of each lane and of those before it."""
    for step in (1, 2, 4, 8):
        order = ir.Constant(_WORDS, [LANES + lane - step if lane >= step else 0 for lane in range(LANES)])
        numbers = add(numbers, builder.shuffle_vector(zeros, numbers, order))
    return numbers


@intrinsic
def philox16(typing, counter, query_position, sequence_id, purpose, seed, out, offset):
    """Philox4x32-10 at counters ``(counter .. counter + 15, query_position, sequence_id, purpose)``.

    ``out`` is uint32 and receives 64 words from ``offset`` on: the first word of all sixteen counters, then the second,
    and so on.
    """

    def generate(context, builder, signature, args):
        # Hold sixteen counters side by side, each word of 32 bits in a lane of 64.
        low = _long(0xFFFFFFFF)
        x = [_splat16(builder, builder.and_(arg, ir.Constant(I64, 0xFFFFFFFF))) for arg in args[:4]]
        x[0] = builder.and_(builder.add(x[0], ir.Constant(_LONGS, list(range(LANES)))), low)
        key = [
            _splat16(builder, builder.and_(args[4], ir.Constant(I64, 0xFFFFFFFF))),
            _splat16(builder, builder.lshr(args[4], ir.Constant(I64, 32))),
        ]
        # Each of ten rounds takes two products of 64 bits, swaps their halves, and steps the key.
        for _ in range(10):
            a, b = builder.mul(x[0], _long(0xD2511F53)), builder.mul(x[2], _long(0xCD9E8D57))
            x = [
                builder.xor(builder.xor(builder.lshr(b, _long(32)), x[1]), key[0]),
                builder.and_(b, low),
                builder.xor(builder.xor(builder.lshr(a, _long(32)), x[3]), key[1]),
                builder.and_(a, low),
            ]
            key = [
                builder.and_(builder.add(k, _long(step)), low)
                for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
            ]
        # Write the words, the first of all counters before the second.
        for word, value in enumerate(x):
            target = builder.add(args[6], ir.Constant(I64, LANES * word))
            builder.store(
                builder.trunc(value, _WORDS), pointer(context, builder, out, args[5], target, _WORDS), align=4
            )
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, types.uint64, out, types.int64), generate


@intrinsic
def bernoulli16(typing, approx, first_bytes, offset, below, less, above, more):
    """Sixteen Bernoulli draws with probabilities that are known up to a relative error.

    ``approx`` is float32; ``first_bytes`` is uint8, a random byte for each. Returns a mask: bit k if byte k is less
    than ``floor(below p + less)``, an edge whatever the error is; bit ``16 + k`` if it is not, but does not exceed
    ``floor(above p + more)`` either, so that the error decides.
    """

    def generate(context, builder, signature, args):
        p = builder.load(pointer(context, builder, approx, args[0], args[2], _FLOATS), align=4)
        byte = builder.zext(
            builder.load(pointer(context, builder, first_bytes, args[1], args[2], _BYTES), align=1), _WORDS
        )
        low, high = (
            builder.fptosi(builder.fadd(builder.fmul(p, _splat16(builder, factor)), _splat16(builder, term)), _WORDS)
            for factor, term in (args[3:5], args[5:7])
        )
        sure = builder.icmp_signed("<", byte, low)
        maybe = builder.and_(builder.icmp_signed(">=", byte, low), builder.icmp_signed("<=", byte, high))
        masks = [builder.zext(builder.bitcast(mask, I16), I64) for mask in (sure, maybe)]
        return builder.or_(masks[0], builder.shl(masks[1], ir.Constant(I64, LANES)))

    return types.uint64(approx, first_bytes, types.int64, *(types.float32,) * 4), generate


@intrinsic
def gaps16(typing, words, offset, spread, before, end, positions):
    """The next sixteen successes, after ``before``, in a sequence of trials.

    Trials have ``log(1 / (1 - chance)) = 1 / spread``. Position k follows after a geometric number of failures, made of
    53 bits: word k from ``offset`` on and 21 bits of word ``16 + k``. ``positions`` is int32 and receives them, or
    ``end`` for those that are not below it. Returns the last one.
    """

    def generate(context, builder, signature, args):
        def double(number):
            return ir.Constant(_DOUBLES, [number] * LANES)

        # Make a uniform number of 53 bits from two words.
        fused = partial(_fused, builder)
        high, low = (
            builder.zext(
                builder.load(
                    pointer(context, builder, words, args[0], builder.add(args[1], ir.Constant(I64, k)), _WORDS),
                    align=4,
                ),
                _LONGS,
            )
            for k in (0, LANES)
        )
        bits = builder.or_(builder.shl(high, _long(21)), builder.lshr(low, _long(11)))
        u = builder.bitcast(builder.fadd(builder.uitofp(bits, _DOUBLES), double(1.0)), _LONGS)  # 1 .. 2^53
        # u = 2^exponent (1 + f) with 1 + f in sqrt(1/2) .. sqrt(2), then the series of fdlibm: log(1 + f) = f - s (f -
        # r), s = f / (2 + f)
        shifted = builder.add(u, _long(0x3FF0000000000000 - 0x3FE6A09E667F3BCD))
        exponent = builder.sub(builder.lshr(shifted, _long(52)), _long(1023 + 53))
        fraction = builder.add(builder.and_(shifted, _long(0x000FFFFFFFFFFFFF)), _long(0x3FE6A09E667F3BCD))
        f = builder.fsub(builder.bitcast(fraction, _DOUBLES), double(1.0))
        s = builder.fdiv(f, builder.fadd(f, double(2.0)))
        square, series = builder.fmul(s, s), double(0.1479819860511658591)
        factors = (0.1531383769920937332, 0.1818357216161805012, 0.2222219843214978396, 0.2857142874366239149)
        for factor in (*factors, 0.3999999999940941908, 0.6666666666666735130):
            series = fused(series, square, double(factor))
        series = builder.fmul(series, square)
        logarithm = builder.fsub(f, builder.fmul(s, builder.fsub(f, series)))
        logarithm = fused(builder.sitofp(exponent, _DOUBLES), double(0.6931471805599453), logarithm)
        # Round the logarithm times the spread down to gaps, whose running sum gives the positions.
        limit = _splat16(builder, builder.sitofp(args[4], ir.DoubleType()))
        gap = builder.fmul(logarithm, _splat16(builder, builder.fneg(args[2])))
        gap = builder.select(builder.fcmp_ordered("<", gap, limit), gap, limit)
        position = builder.fadd(call_llvm(builder, f"llvm.floor.v{LANES}f64", _DOUBLES, [gap]), double(1.0))
        position = _running_sums(builder, position, double(0.0), builder.fadd)
        position = builder.fadd(position, _splat16(builder, builder.sitofp(args[3], ir.DoubleType())))
        position = builder.select(builder.fcmp_ordered("<", position, limit), position, limit)
        position = builder.fptosi(position, _WORDS)
        builder.store(position, pointer(context, builder, positions, args[5], ir.Constant(I64, 0), _WORDS), align=4)
        return builder.sext(builder.extract_element(position, ir.Constant(I32, LANES - 1)), I64)

    return types.int64(words, types.int64, types.float64, types.int64, types.int64, positions), generate


@intrinsic
def quick_gaps16(typing, words, offset, spread, before, end, positions):
    """As :func:`gaps16`, in float32 and from the first words alone; returns -1 if rounding may have moved a position.

    ``end`` is at most 2^22.
    """

    def generate(context, builder, signature, args):
        def number(value):
            return ir.Constant(_FLOATS, [value] * LANES)

        def integer(value):
            return ir.Constant(_WORDS, [value] * LANES)

        fused = partial(_fused, builder)

        def below(one, other):
            return builder.select(builder.fcmp_ordered("<", one, other), one, other)

        word = builder.load(pointer(context, builder, words, args[0], args[1], _WORDS), align=4)
        u = builder.bitcast(fused(builder.uitofp(word, _FLOATS), number(2.0**-32), number(2.0**-33)), _WORDS)
        # u = 2^exponent (1 + f) with 1 + f in sqrt(1/2) .. sqrt(2), then the series of Cephes for log(1 + f)
        shifted = builder.add(u, integer(0x3F800000 - 0x3F3504F3))
        exponent = builder.sitofp(builder.sub(builder.lshr(shifted, integer(23)), integer(127)), _FLOATS)
        fraction = builder.add(builder.and_(shifted, integer(0x007FFFFF)), integer(0x3F3504F3))
        f = builder.fsub(builder.bitcast(fraction, _FLOATS), number(1.0))
        square, series = builder.fmul(f, f), number(7.0376836292e-2)
        factors = (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
        for factor in (*factors, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1, -0.5):
            series = fused(series, f, number(factor))
        logarithm = fused(exponent, number(0.6931471805599453), fused(series, square, f))
        # Round down both ends of the error: where they agree in all lanes, the positions are sure.
        size = _splat16(builder, builder.fptrunc(args[2], ir.FloatType()))
        gap = builder.fmul(logarithm, builder.fneg(size))
        error = builder.fmul(builder.fadd(gap, size), number(QUICK_ERROR))
        limit = _splat16(builder, builder.sitofp(args[4], ir.FloatType()))
        floor = f"llvm.floor.v{LANES}f32"
        low, high = (
            below(call_llvm(builder, floor, _FLOATS, [operation(gap, error)]), limit)
            for operation in (builder.fsub, builder.fadd)
        )
        # the second words tell more than 2^-20 of the logarithm where the first are small
        sure = builder.fcmp_ordered(">", logarithm, number(-9.0))
        sure = builder.bitcast(builder.and_(sure, builder.fcmp_ordered("==", low, high)), I16)
        position = builder.add(builder.fptosi(high, _WORDS), integer(1))
        position = _running_sums(builder, position, integer(0), builder.add)
        position = builder.add(position, _splat16(builder, builder.trunc(args[3], I32)))
        last = _splat16(builder, builder.trunc(args[4], I32))
        position = builder.select(builder.icmp_signed("<", position, last), position, last)
        builder.store(position, pointer(context, builder, positions, args[5], ir.Constant(I64, 0), _WORDS), align=4)
        end = builder.sext(builder.extract_element(position, ir.Constant(I32, LANES - 1)), I64)
        return builder.select(builder.icmp_signed("==", sure, ir.Constant(I16, -1)), end, ir.Constant(I64, -1))

    return types.int64(words, types.int64, types.float64, types.int64, types.int64, positions), generate


@intrinsic
def weigh16(typing, approx, words, offset, positions, end, scale, below, less, above, more):
    """Compare sixteen words, ``scale`` times each, with numbers known up to a relative error.

    Positions from ``end`` on do not count. ``approx`` is a vector of float32, ``positions`` is int32. Returns a mask:
    bit k if word k is less than ``below p + less``; bit ``16 + k`` if it is not, but does not exceed ``above p + more``
    either, so that the error decides.
    """

    def generate(context, builder, signature, args):
        word = builder.load(pointer(context, builder, words, args[1], args[2], _WORDS), align=4)
        word = builder.fmul(builder.uitofp(word, _FLOATS), _splat16(builder, args[5]))
        low, high = (
            builder.fadd(builder.fmul(args[0], _splat16(builder, factor)), _splat16(builder, term))
            for factor, term in (args[6:8], args[8:])
        )
        position = builder.load(pointer(context, builder, positions, args[3], ir.Constant(I64, 0), _WORDS), align=4)
        inside = builder.icmp_signed("<", position, _splat16(builder, builder.trunc(args[4], I32)))
        sure = builder.and_(inside, builder.fcmp_ordered("<", word, low))
        maybe = builder.and_(
            inside, builder.and_(builder.fcmp_ordered(">=", word, low), builder.fcmp_ordered("<=", word, high))
        )
        masks = [builder.zext(builder.bitcast(mask, I16), I64) for mask in (sure, maybe)]
        return builder.or_(masks[0], builder.shl(masks[1], ir.Constant(I64, LANES)))

    return types.uint64(approx, words, types.int64, positions, types.int64, *(types.float32,) * 5), generate


def _append(context, builder, mask, numbers, kind, out, used):
    half = builder.trunc(mask, I16)
    flags = builder.bitcast(half, ir.VectorType(ir.IntType(1), LANES))
    packed = call_llvm(builder, f"llvm.experimental.vector.compress.v{LANES}i32", _WORDS, [numbers, flags, numbers])
    builder.store(packed, pointer(context, builder, kind, out, used, _WORDS), align=4)
    return builder.add(used, builder.zext(call_llvm(builder, "llvm.ctpop.i16", I16, [half]), I64))


@intrinsic
def _append16(typing, mask, base, out, used):
    def generate(context, builder, signature, args):
        numbers = builder.add(_splat16(builder, builder.trunc(args[1], I32)), ir.Constant(_WORDS, list(range(LANES))))
        return _append(context, builder, args[0], numbers, out, *args[2:])

    return types.int64(types.uint64, types.int64, out, types.int64), generate


@intrinsic
def _pick16(typing, mask, numbers, base, out, used):
    def generate(context, builder, signature, args):
        picked = builder.load(pointer(context, builder, numbers, args[1], ir.Constant(I64, 0), _WORDS), align=4)
        picked = builder.add(picked, _splat16(builder, builder.trunc(args[2], I32)))
        return _append(context, builder, args[0], picked, out, *args[3:])

    return types.int64(types.uint64, numbers, types.int64, out, types.int64), generate


@njit(inline="always")
def append16(mask, base, out, used):
    """As :func:`append64`, for the mask's lowest 16 bits."""
    if WIDE:
        return _append16(mask, base, out, used)
    mask &= np.uint64(0xFFFF)  # the instruction that packs lanes would be code of its own for each
    while mask:
        poke(out, used, np.int32(base + lowest_bit(mask)))
        used += 1
        mask &= mask - np.uint64(1)
    return used


@njit(inline="always")
def append64(mask, base, out, used):
    """Append ``base + k`` to ``out`` for each bit k of the mask's 64; returns the new end.

    ``out`` is int32 and needs room for 64 whatever the mask says.
    """
    for k in range(0, 64, LANES):
        used = append16(mask >> np.uint64(k), base + k, out, used)
    return used


@njit(inline="always")
def pick16(mask, numbers, base, out, used):
    """Append ``base + numbers[k]`` for each bit k of the mask's sixteen; both arrays are int32.

    ``out`` needs room for sixteen whatever the mask says. Returns the new end.
    """
    if WIDE:
        used = _pick16(mask, numbers, base, out, used)
    else:
        for k in range(LANES):
            poke(out, used, np.int32(base + peek(numbers, k)))
            used += np.int64(mask >> np.uint64(k) & np.uint64(1))
    return used


@intrinsic
def below16(typing, bounds, offset, word):
    """Number of elements below the word among the sixteen uint32 from ``offset`` on."""

    def generate(context, builder, signature, args):
        numbers = builder.load(pointer(context, builder, bounds, args[0], args[1], _WORDS), align=4)
        mask = builder.bitcast(builder.icmp_unsigned("<", numbers, _splat16(builder, args[2])), I16)
        return builder.zext(call_llvm(builder, "llvm.ctpop.i16", I16, [mask]), I64)

    return types.int64(bounds, types.int64, types.uint32), generate


@intrinsic
def above16(typing, array, offset, bound):
    """Bit k is 1 if ``array[offset + k]`` exceeds a bound, bit ``16 + k`` if it equals it, for k < 16."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(context.get_value_type(array.dtype), 16)
        numbers = builder.load(pointer(context, builder, array, *args[:2], kind), align=array.dtype.bitwidth // 8)
        bounds = splat_number(builder, args[2], 16)
        masks = [builder.bitcast(builder.fcmp_ordered(order, numbers, bounds), I16) for order in (">", "==")]
        above, equal = (builder.zext(mask, I64) for mask in masks)
        return builder.or_(above, builder.shl(equal, ir.Constant(I64, 16)))

    return types.uint64(array, types.int64, array.dtype), generate


@intrinsic
def shared_masks(typing, halves, others, offset, half, other, limits, masks, upper):
    """256 bits, of which bit k is 1 if a group may reach key ``offset + k``.

    The upper half of the word of a key and a group, see :func:`.random_words.shared_words`, is compared with
    ``limits``, one for each block, a vector of float32: the bit is 0 if it exceeds the limit. ``halves`` and ``others``
    hold 16-bit words of the keys, ``half`` and ``other`` are those of the group. ``masks``, uint64, receives four
    words of bits, and ``upper``, uint16, the upper halves.
    """

    def generate(context, builder, signature, args):
        lanes = ir.VectorType(I16, 32)

        def number(value):
            return ir.Constant(lanes, [value] * 32)

        def mixed(x):
            for shift, factor in zip((8, 7), MIX16, strict=True):
                x = builder.mul(builder.xor(x, builder.lshr(x, number(shift))), number(factor))
            return builder.xor(x, builder.lshr(x, number(9)))

        # Round the limits down to 16 bits.
        most = ir.Constant(_FLOATS, [65535.0] * LANES)
        limit = builder.select(builder.fcmp_ordered("<", args[5], most), args[5], most)
        limit = builder.trunc(builder.fptoui(limit, _WORDS), ir.VectorType(I16, LANES))
        group_words = [splat_number(builder, builder.trunc(x, I16), 32) for x in args[3:5]]
        both = []
        # Mix the words of 32 keys with those of the group, and compare them with the limits of two blocks.
        for part in range(8):
            start = builder.add(args[2], ir.Constant(I64, 32 * part))
            first, second = (
                builder.add(builder.load(pointer(context, builder, kind, data, start, lanes), align=2), word)
                for kind, data, word in zip((halves, others), args[:2], group_words, strict=True)
            )
            word = mixed(builder.xor(mixed(first), second))
            target = pointer(context, builder, upper, args[7], ir.Constant(I64, 32 * part), lanes)
            builder.store(word, target, align=2)
            order = ir.Constant(ir.VectorType(I32, 32), [2 * part] * 16 + [2 * part + 1] * 16)
            reach = builder.icmp_unsigned("<=", word, builder.shuffle_vector(limit, limit, order))
            both.append(builder.zext(builder.bitcast(reach, I32), I64))
        # Join the bits to four words of 64.
        for part in range(4):
            mask = builder.or_(both[2 * part], builder.shl(both[2 * part + 1], ir.Constant(I64, 32)))
            builder.store(mask, pointer(context, builder, masks, args[6], ir.Constant(I64, part)))
        return context.get_dummy_value()

    kinds = (types.int64, types.int64, types.int64, limits, masks, upper)
    return types.void(halves, others, *kinds), generate


@intrinsic
def mask_below(typing, one, other):
    """Sixteen bits, of which bit k is 1 if lane k of ``one`` is less than that of ``other``."""

    def generate(context, builder, signature, args):
        return builder.zext(builder.bitcast(builder.fcmp_ordered("<", *args), I16), I64)

    return types.uint64(one, other), generate


@intrinsic
def words_within(typing, words, limits):
    """Sixteen bits, of which bit k is 1 if uint16 number k does not exceed limit k, a float32."""

    def generate(context, builder, signature, args):
        numbers = pointer(context, builder, words, args[0], ir.Constant(I64, 0), ir.VectorType(I16, LANES))
        numbers = builder.uitofp(builder.load(numbers, align=2), _FLOATS)
        return builder.zext(builder.bitcast(builder.fcmp_ordered("<=", numbers, args[1]), I16), I64)

    return types.uint64(words, limits), generate


@intrinsic
def words_below(typing, words, offset, end):
    """Sixteen bits, of which bit k is 1 if the int32 at ``offset + k`` is less than ``end``."""

    def generate(context, builder, signature, args):
        numbers = builder.load(pointer(context, builder, words, *args[:2], _WORDS), align=4)
        mask = builder.icmp_signed("<", numbers, _splat16(builder, builder.trunc(args[2], I32)))
        return builder.zext(builder.bitcast(mask, I16), I64)

    return types.uint64(words, types.int64, types.int64), generate


@intrinsic
def lanes_with_bit(typing, words, offset, bit):
    """Sixteen bits, of which bit k is 1 if the uint16 at ``offset + k`` has a given bit."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(I16, LANES)
        numbers = builder.load(pointer(context, builder, words, *args[:2], kind), align=2)
        one = splat_number(builder, builder.shl(ir.Constant(I16, 1), builder.trunc(args[2], I16)), LANES)
        mask = builder.icmp_unsigned("!=", builder.and_(numbers, one), ir.Constant(kind, [0] * LANES))
        return builder.zext(builder.bitcast(mask, I16), I64)

    return types.uint64(words, types.int64, types.int64), generate


@intrinsic
def lowest_bit(typing, word):
    """Position of the lowest bit of a uint64 that is not 0."""

    def generate(context, builder, signature, args):
        return call_llvm(builder, "llvm.cttz.i64", I64, [args[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.uint64), generate


@intrinsic
def count_bits(typing, word):
    """Number of bits of a uint64 that are 1."""

    def generate(context, builder, signature, args):
        return call_llvm(builder, "llvm.ctpop.i64", I64, [args[0]])

    return types.int64(types.uint64), generate


@intrinsic
def fetch(typing, array, offset):
    """Ask for the cache line of an element that is needed soon."""

    def generate(context, builder, signature, args):
        where = pointer(context, builder, array, args[0], args[1], I8)
        hints = [ir.Constant(I32, hint) for hint in (0, 3, 1)]  # to read, to keep, data
        function = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [where, *hints])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
