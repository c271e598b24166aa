"""Vectors of sixteen numbers for loops that numba compiles: their types, and the way from an array to them.

For intrinsics, which are written in LLVM's own terms. Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

from llvmlite import ir

LANES = 16
FLOATS, WHOLES, BYTES, HALVES = (
    ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.HalfType())
)
WIDE = 64  # bytes of the widest vector
MANY, PAIRS = ir.VectorType(ir.IntType(8), WIDE), ir.VectorType(ir.IntType(16), WIDE // 2)


def vector_at(context, builder, kind, array, index, vector):
    """The address of an array's element, as that of a vector."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def row_at(context, builder, kind, array, row):
    """The address of a row of an array [rows, columns]."""
    made = context.make_array(kind)(context, builder, array)
    start = builder.mul(row, builder.extract_value(made.strides, 0))
    bytes = builder.gep(builder.bitcast(made.data, ir.IntType(8).as_pointer()), [start])
    return builder.bitcast(bytes, made.data.type)


def splat(builder, number, kind):
    """A vector of one number."""
    nothing = ir.Constant(kind, ir.Undefined)
    return shuffled(builder, builder.insert_element(nothing, number, ir.IntType(32)(0)), nothing, [0] * kind.count)


def shuffled(builder, one, other, places):
    """The elements at `places` of two vectors, those of the second after those of the first."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(places)))
