"""What a compiler does not make vectors of by itself: table values of sixteen tokens at once, and halves made floats.

A table of at most 32 values lies in one or two vectors of AVX-512, which take an index for each of sixteen places.
Where the processor has none, the same is a plain loop. Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from kvlab.codecs.shared.compiled import compiled

LANES = 16
FLOATS, WHOLES, BYTES, HALVES = (
    ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.HalfType())
)


def has_permutes() -> bool:
    """Whether numba compiles for the processor that this is, and that has AVX-512."""
    chosen = config.CPU_NAME or config.CPU_FEATURES is not None
    return not chosen and bool(llvm.get_host_cpu_features().get("avx512f"))


PERMUTES = has_permutes()


def _at(context, builder, kind, array, index, vector):
    """The address of an array's element, as that of a vector."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


@intrinsic
def _sixteen(_typing, table, first, pair, symbols, at, out, to):
    """Values of the symbols at `at`, `at` + 1, ... by the table at `first`, of two vectors where it is a `pair`."""

    def made(context, builder, signature, given):
        kinds, (table, first, pair, symbols, at, out, to) = signature.args, given
        low = _at(context, builder, kinds[0], table, first, FLOATS)
        index = builder.load(_at(context, builder, kinds[3], symbols, at, BYTES), align=1)
        index, below = builder.zext(index, WHOLES), builder.load(low, align=4)
        slot = _at(context, builder, kinds[5], out, to, FLOATS)
        with builder.if_else(pair) as (two, one):
            with two:
                high = builder.load(builder.gep(low, [ir.IntType(32)(1)]), align=4)
                both = ir.FunctionType(FLOATS, [FLOATS, WHOLES, FLOATS])
                both = get_or_insert_function(builder.module, both, "llvm.x86.avx512.vpermi2var.ps.512")
                builder.store(builder.call(both, [below, index, high]), slot, align=4)
            with one:
                single = ir.FunctionType(FLOATS, [FLOATS, WHOLES])
                single = get_or_insert_function(builder.module, single, "llvm.x86.avx512.permvar.sf.512")
                builder.store(builder.call(single, [below, index]), slot, align=4)
        return context.get_dummy_value()

    return types.void(table, types.intp, types.boolean, symbols, types.intp, out, types.intp), made


@intrinsic
def _widened(_typing, halves, at, factor, out, to):
    """Sixteen numbers in float16, as their bits, times a factor."""

    def made(context, builder, signature, given):
        kinds, (halves, at, factor, out, to) = signature.args, given
        bits = builder.load(_at(context, builder, kinds[0], halves, at, HALVES), align=2)
        wide = builder.fpext(bits, FLOATS)
        times = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), factor, ir.IntType(32)(0))
        times = builder.shuffle_vector(times, ir.Constant(FLOATS, ir.Undefined), ir.Constant(WHOLES, [0] * LANES))
        builder.store(builder.fmul(wide, times), _at(context, builder, kinds[3], out, to, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(halves, types.intp, types.float32, out, types.intp), made


@compiled
def look_up(table, first, most, symbols, count, out):
    """Values of `count` symbols uint8 by the table whose first value is at `first` and whose last one `most` after it.

    `symbols` and `out`, float32, have room for a multiple of sixteen.
    """
    last = first + (LANES if most < LANES else 2 * LANES)
    if PERMUTES and most < 2 * LANES and last <= len(table):
        for token in range(0, count, LANES):
            _sixteen(table, first, most >= LANES, symbols, token, out, token)
    else:
        own = table[first:]
        for token in range(count):
            out[token] = own[symbols[token]]


@compiled
def floats_of(halves, factor, out):
    """Numbers in float16, given as their bits, uint16 [n], times a factor, into float32 [n]."""
    whole = len(out) // LANES * LANES
    for at in range(0, whole, LANES):
        _widened(halves, at, factor, out, at)
    if whole < len(out):
        bits, numbers = np.zeros(LANES, np.uint16), np.empty(LANES, np.float32)
        bits[: len(out) - whole] = halves[whole:]
        _widened(bits, 0, factor, numbers, 0)
        out[whole:] = numbers[: len(out) - whole]
