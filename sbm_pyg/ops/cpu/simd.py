"""Vectors of numbers as numba values, so that a kernel keeps a row of numbers in registers.

In: arrays, offsets into them, and the number of lanes as a constant. Out: values of type ``<lanes x dtype>`` that numba
carries through variables, loops and calls. They are LLVM's own vectors, so any number of lanes works on any machine: 32
lanes of float32 are two registers with AVX-512, eight with NEON. Offsets count elements. Not here: kernels.

| function | what it is |
|---|---|
| ``at(array, offset)`` | pointer to an element; every function takes it in place of an array |
| ``peek(array, offset)``, ``poke(array, offset, x)`` | read and write one number |
| ``load``, ``store`` | read and write a vector |
| ``load16``, ``store16`` | the same for the first of sixteen numbers |
| ``scratch(array, count)`` | room for numbers of one kernel |
| ``splat(x, lanes)`` | the same number in all lanes |
"""

from __future__ import annotations

import operator

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model
from numba.np.arrayobj import make_array

from ..random_words import MIX

NEGLIGIBLE_LOGIT = -40.0
"""A logit this far below the largest of its row adds nothing to a sum. Its products would be subnormal, and slow."""
_EXACT = ("contract",)  # a * b + c may become one instruction
_SUM = ("contract", "reassoc", "nsz")  # and a sum may be taken in any order
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def has_features(*names):
    """True if the processor that numba compiles for, which is the one that it runs on, has these features."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return False
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name) for name in names)


WIDE = has_features("avx512f")
"""True if registers hold 16 float32 numbers, and there are instructions that take masks (AVX-512)."""


HAS_BFLOAT16 = has_features("avx512bf16")
"""True if there is an instruction that multiplies pairs of numbers in bfloat16 and adds them up in float32."""


class Vector(types.Type):
    """The type of ``lanes`` numbers of one dtype."""

    def __init__(self, dtype, lanes):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), kind.lanes))


# ------------------------------------------------------------------ pieces of LLVM code


def _order(lanes):
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def splat_number(builder, number, lanes):
    kind = ir.VectorType(number.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, _order([0] * lanes))


def pointer(context, builder, kind, array, offset, vector=None):
    """Pointer to a number, or to a vector of numbers, in an array or behind a pointer."""
    data = array if isinstance(kind, types.CPointer) else make_array(kind)(context, builder, array).data
    address = builder.gep(data, [offset])
    return address if vector is None else builder.bitcast(address, vector.as_pointer())


def _below(builder, count, lanes):
    """Mask of the lanes whose number is less than ``count``."""
    return builder.icmp_signed("<", _order(list(range(lanes))), splat_number(builder, builder.trunc(count, I32), lanes))


def call_llvm(builder, name, result, arguments, **flags):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **flags)


def _suffix(kind):
    element = {ir.FloatType: "f32", ir.DoubleType: "f64"}.get(type(kind.element), kind.element)
    return f"v{kind.count}{element}"


def _item_size(kind):
    return kind.dtype.bitwidth // 8


# ------------------------------------------------------------------ memory


@intrinsic
def at(typing, array, offset):
    """Pointer to ``array[offset]``, for use in place of an array. Unlike arrays, pointers cost nothing to assign."""

    def generate(context, builder, signature, args):
        return pointer(context, builder, array, *args)

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def aligned_pointer(typing, array):
    """Pointer to the first element at a multiple of 256 bytes, which is among the first 64."""

    def generate(context, builder, signature, args):
        data = pointer(context, builder, array, args[0], ir.Constant(I64, 0))
        address = builder.and_(builder.add(builder.ptrtoint(data, I64), ir.Constant(I64, 255)), ir.Constant(I64, -256))
        return builder.inttoptr(address, data.type)

    return types.CPointer(array.dtype)(array), generate


@intrinsic(prefer_literal=True)
def scratch(typing, array, count):
    """Pointer to room for ``count`` numbers (a constant) of the dtype of ``array``, aligned, for one kernel."""
    result = types.CPointer(array.dtype)

    def generate(context, builder, signature, args):
        room = cgutils.alloca_once(builder, ir.ArrayType(context.get_value_type(array.dtype), count.literal_value))
        room.align = 64
        return builder.bitcast(room, context.get_value_type(result))

    return result(array, count), generate


@intrinsic
def peek(typing, array, offset):
    """``array[offset]`` for an offset that is known not to be negative: no code for wrapping around."""

    def generate(context, builder, signature, args):
        return builder.load(pointer(context, builder, array, *args))

    return array.dtype(array, types.int64), generate


@intrinsic
def poke(typing, array, offset, number):
    """``array[offset] = number``, likewise."""

    def generate(context, builder, signature, args):
        builder.store(args[2], pointer(context, builder, array, *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), generate


@intrinsic(prefer_literal=True)
def load(typing, array, offset, lanes):
    """``array[offset : offset + lanes]`` as a vector; ``lanes`` is a constant."""
    result = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, args):
        address = pointer(context, builder, array, *args[:2], context.get_value_type(result))
        return builder.load(address, align=_item_size(array))

    return result(array, types.int64, lanes), generate


@intrinsic
def store(typing, array, offset, vector):
    """``array[offset : offset + lanes] = vector``."""

    def generate(context, builder, signature, args):
        builder.store(args[2], pointer(context, builder, array, *args[:2], args[2].type), align=_item_size(array))
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def load16(typing, array, offset, count):
    """The first ``count`` of ``array[offset : offset + 16]``, and 0 in the other lanes, which are not read."""
    result = Vector(array.dtype, 16)

    def generate(context, builder, signature, args):
        kind = context.get_value_type(result)
        address = pointer(context, builder, array, *args[:2], kind)
        size, mask = ir.Constant(I32, _item_size(array)), _below(builder, args[2], 16)
        arguments = [address, size, mask, ir.Constant(kind, None)]
        return call_llvm(builder, f"llvm.masked.load.{_suffix(kind)}.p0", kind, arguments)

    return result(array, types.int64, types.int64), generate


@intrinsic
def store16(typing, array, offset, count, vector):
    """``array[offset : offset + count] = vector[:count]`` for at most 16."""

    def generate(context, builder, signature, args):
        kind = args[3].type
        address = pointer(context, builder, array, *args[:2], kind)
        arguments = [args[3], address, ir.Constant(I32, _item_size(array)), _below(builder, args[2], 16)]
        call_llvm(builder, f"llvm.masked.store.{_suffix(kind)}.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, vector), generate


@intrinsic
def transpose16(typing, out, to, pitch, array, start, width):
    """``out[to + pitch * c + i] = array[start + width * i + c]`` for sixteen rows i and sixteen columns c.

    Four times, every two rows swap half of their numbers: first those 8 rows apart, then 4, 2 and 1.
    """

    def generate(context, builder, signature, args):
        kind = ir.VectorType(context.get_value_type(array.dtype), 16)

        def address(kind_of, data, begin, step, number):
            offset = builder.add(begin, builder.mul(step, ir.Constant(I64, number)))
            return pointer(context, builder, kind_of, data, offset, kind)

        rows = [builder.load(address(array, *args[3:], i), align=_item_size(array)) for i in range(16)]
        # Swap the halves of every two rows that differ in one bit of their number.
        for bit in (8, 4, 2, 1):
            low = _order([k - bit + 16 if k & bit else k for k in range(16)])
            high = _order([k + 16 if k & bit else k + bit for k in range(16)])
            for i in range(16):
                if not i & bit:
                    one, two = rows[i], rows[i | bit]
                    rows[i], rows[i | bit] = (builder.shuffle_vector(one, two, order) for order in (low, high))
        for c, row in enumerate(rows):
            builder.store(row, address(out, *args[:3], c), align=_item_size(array))
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64, array, types.int64, types.int64), generate


# ------------------------------------------------------------------ arithmetic


@intrinsic(prefer_literal=True)
def splat(typing, number, lanes):
    """A vector with the same number in every lane."""
    result = Vector(number, lanes.literal_value)

    def generate(context, builder, signature, args):
        return splat_number(builder, args[0], result.lanes)

    return result(number, lanes), generate


@intrinsic
def narrowed(typing, vector):
    """The vector in float32."""
    result = Vector(types.float32, vector.lanes)

    def generate(context, builder, signature, args):
        is_wide = vector.dtype == types.float64
        return builder.fptrunc(args[0], context.get_value_type(result)) if is_wide else args[0]

    return result(vector), generate


@intrinsic
def first(typing, count, vector, other):
    """The first ``count`` lanes of ``vector``, and the number ``other`` in the rest."""

    def generate(context, builder, signature, args):
        tail = splat_number(builder, args[2], vector.lanes)
        return builder.select(_below(builder, args[0], vector.lanes), args[1], tail)

    return vector(types.int64, vector, vector.dtype), generate


@intrinsic
def but_first(typing, count, vector, other):
    """The number ``other`` in the first ``count`` lanes, and ``vector`` in the rest."""

    def generate(context, builder, signature, args):
        start = splat_number(builder, args[2], vector.lanes)
        return builder.select(_below(builder, args[0], vector.lanes), start, args[1])

    return vector(types.int64, vector, vector.dtype), generate


@intrinsic
def maximum(typing, one, two):
    """Lane by lane the larger; the second where the first is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return one(one, one), generate


@intrinsic
def where_above(typing, one, bound, number, other):
    """A number in the lanes where ``one`` is larger than the number ``bound``, and ``other`` in the rest."""

    def generate(context, builder, signature, args):
        above = builder.fcmp_ordered(">", args[0], splat_number(builder, args[1], one.lanes))
        return builder.select(above, splat_number(builder, args[2], one.lanes), args[3])

    return one(one, one.dtype, one.dtype, one), generate


@intrinsic
def highest(typing, vector):
    """The largest of 16 lanes, of which none is NaN."""

    def generate(context, builder, signature, args):
        result = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(result, result, _order([lane ^ step for lane in range(16)]))
            result = builder.select(builder.fcmp_ordered(">", other, result), other, result)
        return builder.extract_element(result, ir.Constant(I32, 0))

    return vector.dtype(vector), generate


@intrinsic
def lane_sum(typing, vector):
    """Sum over the lanes."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        arguments = [ir.Constant(kind.element, 0.0), args[0]]
        return call_llvm(builder, f"llvm.vector.reduce.fadd.{_suffix(kind)}", kind.element, arguments, fastmath=_SUM)

    return vector.dtype(vector), generate


@intrinsic
def exp(typing, vector):
    """e to the power of every lane.

    In float32 the error is below 3 units in the last place, and the result is 0 below ``NEGLIGIBLE_LOGIT``, and at most
    exp(88).
    """

    def generate(context, builder, signature, args):
        kind = args[0].type
        if vector.dtype == types.float64:
            return call_llvm(builder, f"llvm.exp.{_suffix(kind)}", kind, args)

        def polynomial(x, *factors):
            result = _all(kind, factors[0])
            for factor in factors[1:]:
                result = builder.fadd(builder.fmul(result, x, flags=_EXACT), _all(kind, factor), flags=_EXACT)
            return result

        x = builder.select(builder.fcmp_ordered(">", args[0], _all(kind, 88.0)), _all(kind, 88.0), args[0])
        # x = n log 2 + r with an integer n, which the sum with 1.5 * 2^23 rounds and leaves in the low bits
        magic = polynomial(x, 1.4426950408889634, 12582912.0)
        n = builder.fsub(magic, _all(kind, 12582912.0))
        r = x
        for part in (-0.693145751953125, -1.428606765330187e-06):
            r = builder.fadd(builder.fmul(n, _all(kind, part), flags=_EXACT), r, flags=_EXACT)
        result = polynomial(r, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
        bits = ir.VectorType(I32, kind.count)
        power = builder.shl(builder.bitcast(magic, bits), _all(bits, 23))
        result = builder.bitcast(builder.add(builder.bitcast(result, bits), power), kind)
        return builder.select(builder.fcmp_ordered("<", x, _all(kind, NEGLIGIBLE_LOGIT)), _all(kind, 0.0), result)

    return vector(vector), generate


@intrinsic
def dots16(typing, vector, array, stride, tokens):
    """Sixteen dot products: of ``vector`` with the rows ``array[stride * tokens[k]]``, k = 0 .. 15, one in each lane.

    The products meet in a tree of 15 two-way merges, each of which adds one half of two vectors to the other half: a
    third of the shuffles that sixteen separate sums over lanes would take. An array of uint32 holds two numbers of
    bfloat16 in each element.
    """
    result, pairs = Vector(vector.dtype, 16), array.dtype == types.uint32

    def generate(context, builder, signature, args):
        row, data, step, index = args
        kind = context.get_value_type(result)
        words = ir.VectorType(I32, 16)
        starts = (
            [c + half for c in range(0, vector.lanes, 32) for half in (0, 1)] if pairs else range(0, vector.lanes, 16)
        )
        # Cut the vector into pieces of sixteen; of pairs, even and odd numbers lie apart.
        pieces = [builder.shuffle_vector(row, row, _order([c + (1 + pairs) * k for k in range(16)])) for c in starts]

        def halves(address):
            """Load sixteen pairs, and return their first numbers and their second numbers."""
            both = builder.load(builder.bitcast(address, words.as_pointer()), align=4)
            return [
                builder.bitcast(bits, kind)
                for bits in (builder.shl(both, _all(words, 16)), builder.and_(both, _all(words, 0xFFFF0000)))
            ]

        def products(lane):
            token = builder.load(pointer(context, builder, tokens, index, ir.Constant(I64, lane)))
            start = builder.mul(builder.sext(token, I64), step)
            partial, numbers = None, []
            for c, piece in enumerate(pieces):
                if not (pairs and c % 2):
                    address = builder.add(start, ir.Constant(I64, 16 * (c // 2 if pairs else c)))
                    address = pointer(context, builder, array, data, address, kind)
                    numbers += halves(address) if pairs else [builder.load(address, align=_item_size(array))]
                product = builder.fmul(piece, numbers[c], flags=_EXACT)
                partial = product if partial is None else builder.fadd(product, partial, flags=_EXACT)
            return partial

        def merged(lane, bits):
            """Sums over the lanes that differ by ``bits``, for the tokens that differ from ``lane`` by ``bits``."""
            if not bits:
                return products(lane)
            one, two = merged(lane, bits[1:]), merged(lane | bits[0], bits[1:])
            stay = [k + 16 if k & bits[0] else k for k in range(16)]
            move = [stay[k] ^ bits[0] for k in range(16)]
            return builder.fadd(*(builder.shuffle_vector(one, two, _order(order)) for order in (stay, move)))

        sums = merged(0, (8, 2, 1, 4))  # innermost the merges that are a blend and one shuffle with AVX-512
        # keeps neighbors from mixing: registers run out
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return sums

    return result(vector, array, types.int64, tokens), generate


class _BFloat16(ir.Type):
    """LLVM's type of a number in bfloat16, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat16)

    def __hash__(self):
        return hash(_BFloat16)


@intrinsic
def pairs_of(typing, one, two):
    """Words of two numbers in bfloat16, from sixteen of each in float32, which are rounded to the nearest.

    No number is below zero, and -0 becomes 0. The lower half of a word is the first number.
    """
    result = Vector(types.uint32, 16)

    def generate(context, builder, signature, args):
        words, rounded = ir.VectorType(I32, 16), []
        for arg in args:
            bits = builder.and_(builder.bitcast(arg, words), _all(words, 0x7FFFFFFF))
            odd = builder.and_(builder.lshr(bits, _all(words, 16)), _all(words, 1))
            rounded.append(builder.add(builder.add(bits, _all(words, 0x7FFF)), odd))
        low, high = builder.lshr(rounded[0], _all(words, 16)), builder.and_(rounded[1], _all(words, 0xFFFF0000))
        return builder.or_(low, high)

    return result(one, two), generate


@intrinsic
def maximum_of_pairs(typing, one, two):
    """The larger number of bfloat16 in each half of the words, none of which is negative."""

    def generate(context, builder, signature, args):
        halves = [builder.bitcast(arg, ir.VectorType(I16, 32)) for arg in args]
        larger = builder.select(builder.icmp_unsigned(">", *halves), *halves)
        return builder.bitcast(larger, args[0].type)

    return one(one, one), generate


@intrinsic
def add_products_of_pairs(typing, sums, pairs, offset, pair):
    """Adds the products of two numbers to each of sixteen sums, which are float32.

    ``pairs[offset : offset + 16]`` and ``pair`` are uint32, each two numbers in bfloat16. Products are exact, and sums
    are rounded as those of float32 are; numbers below 2^-126 may count as 0.
    """

    def generate(context, builder, signature, args):
        words, halves = ir.VectorType(I32, 16), ir.VectorType(_BFloat16(), 32)
        loaded = builder.load(pointer(context, builder, pairs, *args[1:3], words), align=4)
        factors = loaded, splat_number(builder, args[3], 16)
        if HAS_BFLOAT16:
            inputs = [args[0], *(builder.bitcast(x, halves) for x in factors)]
            return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", args[0].type, inputs)
        total = args[0]
        for select, other in ((builder.shl, 16), (builder.and_, 0xFFFF0000)):
            one, two = (builder.bitcast(select(x, _all(words, other)), args[0].type) for x in factors)
            total = builder.fadd(builder.fmul(one, two, flags=_EXACT), total, flags=_EXACT)
        return total

    return sums(sums, pairs, types.int64, types.uint32), generate


@intrinsic
def keep16(typing, words, tokens, query_word, least, grow):
    """``grow`` in the lanes k where the mixed word of ``words[tokens[k]]`` and the query's exceeds ``least``, else 0.

    Words are uint32, mixed as :func:`sbm_pyg.ops.reference.edges.dropout_mask` does.
    """
    result = Vector(grow, 16)

    def generate(context, builder, signature, args):
        kind = ir.VectorType(I32, 16)
        word = ir.Constant(kind, ir.Undefined)
        # Gather the words of the keys, and mix each with that of the query.
        for lane in range(16):
            token = builder.load(pointer(context, builder, tokens, args[1], ir.Constant(I64, lane)))
            token = token if token.type == I64 else builder.sext(token, I64)
            one = builder.load(pointer(context, builder, words, args[0], token))
            word = builder.insert_element(word, one, ir.Constant(I32, lane))
        word = builder.xor(word, splat_number(builder, args[2], 16))
        for shift, factor in zip((16, 15), MIX, strict=True):
            word = builder.mul(builder.xor(word, builder.lshr(word, _all(kind, shift))), _all(kind, factor))
        word = builder.xor(word, builder.lshr(word, _all(kind, 16)))
        keep = builder.icmp_unsigned(">", word, splat_number(builder, args[3], 16))
        number = context.get_value_type(result)
        return builder.select(keep, splat_number(builder, args[4], 16), ir.Constant(number, [0.0] * 16))

    return result(words, tokens, types.uint32, types.uint32, grow), generate


def _arithmetic(python, instruction):
    """Let numba apply a python operator to two vectors, or to a vector and a number."""

    @intrinsic
    def apply(typing, one, two):
        result = one if isinstance(one, Vector) else two
        kinds = [kind if isinstance(kind, Vector) else result.dtype for kind in (one, two)]

        def generate(context, builder, signature, args):
            vectors = [
                arg if isinstance(kind, Vector) else splat_number(builder, arg, result.lanes)
                for arg, kind in zip(args, kinds, strict=True)
            ]
            return getattr(builder, instruction)(*vectors, flags=_EXACT)

        return result(*kinds), generate

    @overload(python)
    def operation(one, two):
        if isinstance(one, Vector) or isinstance(two, Vector):
            return lambda one, two: apply(one, two)


for _operation in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    _arithmetic(*_operation)
