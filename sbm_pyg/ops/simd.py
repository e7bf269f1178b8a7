"""Vectors of floats as numba values: what a compiled kernel needs to keep a row of numbers in registers.

In: arrays, offsets into them, and the number of lanes as a constant. Out: values of type ``<lanes x dtype>`` that numba
carries through variables, loops and calls. They are LLVM's own vectors, so any number of lanes works on any machine: 32
lanes of float32 are two registers with AVX-512, eight with NEON. Not here: kernels.
"""

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model
from numba.np.arrayobj import make_array

_EXACT = ("contract",)  # a * b + c may become one instruction
_SUM = ("contract", "reassoc", "nsz")  # and a sum may be taken in any order


class Vector(types.Type):
    """The type of ``lanes`` numbers of one dtype."""

    def __init__(self, dtype, lanes):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        element = manager.lookup(kind.dtype).get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, kind.lanes))


def _i32(values):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), list(values))


def _splat(builder, number, lanes):
    """All lanes equal to one LLVM number."""
    kind = ir.VectorType(number.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _i32([0] * lanes))


def _constant(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def _data(context, builder, kind, value):
    """LLVM pointer to the first element of an array, or the pointer itself."""
    return value if isinstance(kind, types.CPointer) else make_array(kind)(context, builder, value).data


def _address(context, builder, array_type, array, offset, kind):
    """Pointer to a vector in an array, for an offset counted in elements."""
    data = _data(context, builder, array_type, array)
    return builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())


def _below(builder, count, lanes):
    """Mask of the lanes whose number is less than ``count`` (an LLVM i64)."""
    return builder.icmp_signed("<", _i32(range(lanes)), _splat(builder, builder.trunc(count, ir.IntType(32)), lanes))


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _suffix(kind):
    names = {ir.FloatType: "f32", ir.DoubleType: "f64"}
    return f"v{kind.count}{names.get(type(kind.element), kind.element)}"


def _width(array, count):
    return array.dtype.bitwidth // 8


@intrinsic(prefer_literal=True)
def load(typing, array, offset, lanes):
    """``array[offset : offset + lanes]`` as a vector."""
    result = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, args):
        kind = context.get_value_type(result)
        where = _address(context, builder, array, args[0], args[1], kind)
        return builder.load(where, align=array.dtype.bitwidth // 8)

    return result(array, types.int64, lanes), generate


@intrinsic
def store(typing, array, offset, vector):
    """``array[offset : offset + lanes] = vector``."""

    def generate(context, builder, signature, args):
        where = _address(context, builder, array, args[0], args[1], args[2].type)
        builder.store(args[2], where, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic(prefer_literal=True)
def load_some(typing, array, offset, count, lanes):
    """Like :func:`load`, but reads only the first ``count`` lanes; the others are 0."""
    result = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, args):
        kind = context.get_value_type(result)
        where = _address(context, builder, array, args[0], args[1], kind)
        align = ir.Constant(ir.IntType(32), array.dtype.bitwidth // 8)
        mask = _below(builder, args[2], kind.count)
        return _call(builder, f"llvm.masked.load.{_suffix(kind)}.p0", kind, [where, align, mask, ir.Constant(kind, None)])

    return result(array, types.int64, types.int64, lanes), generate


@intrinsic
def store_some(typing, array, offset, count, vector):
    """Like :func:`store`, but writes only the first ``count`` lanes."""

    def generate(context, builder, signature, args):
        kind = args[3].type
        where = _address(context, builder, array, args[0], args[1], kind)
        align = ir.Constant(ir.IntType(32), array.dtype.bitwidth // 8)
        mask = _below(builder, args[2], kind.count)
        _call(builder, f"llvm.masked.store.{_suffix(kind)}.p0", ir.VoidType(), [args[3], where, align, mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, vector), generate


@intrinsic(prefer_literal=True)
def splat(typing, number, lanes):
    """A vector with the same number in every lane."""
    result = Vector(number, lanes.literal_value)

    def generate(context, builder, signature, args):
        return _splat(builder, args[0], lanes.literal_value)

    return result(number, lanes), generate


@intrinsic
def first(typing, count, vector, other):
    """The first ``count`` lanes of ``vector`` and the number ``other`` in the rest."""

    def generate(context, builder, signature, args):
        lanes = vector.lanes
        return builder.select(_below(builder, args[0], lanes), args[1], _splat(builder, args[2], lanes))

    return vector(types.int64, vector, vector.dtype), generate


@intrinsic
def total(typing, vector):
    """Sum over the lanes."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        name = f"llvm.vector.reduce.fadd.{_suffix(kind)}"
        function = ir.FunctionType(kind.element, [kind.element, kind])
        function = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(function, [ir.Constant(kind.element, 0.0), args[0]], fastmath=_SUM)

    return vector.dtype(vector), generate


@intrinsic
def highest(typing, vector):
    """Largest of 16 lanes; lanes that are NaN do not count."""

    def generate(context, builder, signature, args):
        result = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(result, result, _i32([lane ^ step for lane in range(16)]))
            result = builder.select(builder.fcmp_ordered(">", other, result), other, result)
        return builder.extract_element(result, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), generate


@intrinsic
def maximum(typing, one, two):
    """Lane by lane the larger; the second where the first is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return one(one, two), generate


@intrinsic
def exp(typing, vector):
    """e to the power of every lane. float32: within 2 units in the last place, 0 below -87.3, no overflow above 88."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        if vector.dtype == types.float64:
            return _call(builder, f"llvm.exp.{_suffix(kind)}", kind, args)

        def number(x):
            return _constant(kind, ir.Constant(kind.element, x).constant)

        def times(a, b):
            return builder.fmul(a, b, flags=_EXACT)

        def plus(a, b):
            return builder.fadd(a, b, flags=_EXACT)

        x = args[0]
        x = builder.select(builder.fcmp_ordered(">", x, number(88.0)), number(88.0), x)
        small = builder.fcmp_ordered("<", x, number(-87.3))
        # x = n log 2 + r; the sum with 1.5 * 2^23 leaves the rounded n in the low bits, and must not be reordered
        shifted = builder.fadd(times(x, number(1.4426950408889634)), number(12582912.0))
        n = builder.fsub(shifted, number(12582912.0))
        r = plus(times(n, number(-0.693145751953125)), x)
        r = plus(times(n, number(-1.428606765330187e-06)), r)
        result = number(1 / 720)
        for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            result = plus(times(result, r), number(factor))
        bits = ir.VectorType(ir.IntType(32), kind.count)
        power = builder.shl(builder.bitcast(shifted, bits), _constant(bits, 23))
        result = builder.bitcast(builder.add(builder.bitcast(result, bits), power), kind)
        return builder.select(small, number(0.0), result)

    return vector(vector), generate


@intrinsic
def dots(typing, vector, array, tokens):
    """Sixteen dot products: of ``vector`` with the rows ``tokens[0 : 16]`` of ``array``, lane by lane.

    The rows' partial sums meet in a tree of 15 two-way merges, each of which adds one half of two vectors to the other:
    a third of the shuffles that sixteen separate horizontal sums would take.
    """
    result = Vector(vector.dtype, 16)

    def generate(context, builder, signature, args):
        row, data, index = args
        i64 = ir.IntType(64)
        lanes = row.type.count
        kind = ir.VectorType(row.type.element, 16)
        pieces = [builder.shuffle_vector(row, row, _i32(range(c, c + 16))) for c in range(0, lanes, 16)]
        index = _data(context, builder, tokens, index)

        def partial(lane):
            token = builder.load(builder.gep(index, [ir.Constant(i64, lane)]))
            token = builder.mul(builder.sext(token, i64), ir.Constant(i64, lanes))
            result = None
            for c, piece in enumerate(pieces):
                where = builder.add(token, ir.Constant(i64, 16 * c))
                where = _address(context, builder, array, data, where, kind)
                other = builder.load(where, align=array.dtype.bitwidth // 8)
                product = builder.fmul(piece, other, flags=_EXACT)
                result = product if result is None else builder.fadd(result, product, flags=_EXACT)
            return result

        def merged(lane, bits):
            """Sums of the products of all tokens that agree with ``lane`` but for ``bits``, over as many lanes."""
            if not bits:
                return partial(lane)
            bit, rest = bits[0], bits[1:]
            one, two = merged(lane, rest), merged(lane | bit, rest)
            stay = _i32([lane if not lane & bit else lane + 16 for lane in range(16)])
            move = _i32([lane ^ bit if not lane & bit else (lane ^ bit) + 16 for lane in range(16)])
            return builder.fadd(builder.shuffle_vector(one, two, stay), builder.shuffle_vector(one, two, move))

        return merged(0, (8, 2, 1, 4))  # on x86 the most frequent merges, 4 and 1, are a blend and one shuffle

    return result(vector, array, tokens), generate


def _arithmetic(python, instruction):
    """Let numba apply a python operator to two vectors, or to a number and a vector."""

    @intrinsic
    def apply(typing, left, right):
        result = left if isinstance(left, Vector) else right

        def generate(context, builder, signature, args):
            values = [
                value if isinstance(kind, Vector) else _splat(builder, value, result.lanes)
                for value, kind in zip(args, signature.args, strict=True)
            ]
            return getattr(builder, instruction)(*values, flags=_EXACT)

        take = [kind if isinstance(kind, Vector) else result.dtype for kind in (left, right)]
        return result(*take), generate

    @overload(python)
    def operation(left, right):
        if isinstance(left, Vector) or isinstance(right, Vector):
            return lambda left, right: apply(left, right)


for _operation in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _arithmetic(*_operation)


@intrinsic
def peek(typing, array, offset):
    """``array[offset]`` for an offset that is known not to be negative: no wrap-around code."""

    def generate(context, builder, signature, args):
        data = _data(context, builder, array, args[0])
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.int64), generate


@intrinsic
def poke(typing, array, offset, number):
    """``array[offset] = number``, likewise."""

    def generate(context, builder, signature, args):
        data = _data(context, builder, array, args[0])
        builder.store(args[2], builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), generate


@intrinsic
def prefetch(typing, array, offset):
    """Ask for the cache line of ``array[offset]``."""

    def generate(context, builder, signature, args):
        data = _data(context, builder, array, args[0])
        where = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = lambda x: ir.Constant(ir.IntType(32), x)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def at(typing, array, offset):
    """Pointer to ``array[offset]``, to be used in place of an array; unlike arrays, pointers cost nothing to assign."""

    def generate(context, builder, signature, args):
        return builder.gep(_data(context, builder, array, args[0]), [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate
