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


def _permuting(name, tables):
    """Values of the symbols at `at`, `at` + 1, ... by the table at `first`, so many vectors long, by an instruction."""

    @intrinsic
    def sixteen(_typing, table, first, symbols, at, out, to):
        def made(context, builder, signature, given):
            kinds, (table, first, symbols, at, out, to) = signature.args, given
            start = _at(context, builder, kinds[0], table, first, FLOATS)
            parts = [builder.load(builder.gep(start, [ir.IntType(32)(n)]), align=4) for n in range(tables)]
            index = builder.load(_at(context, builder, kinds[2], symbols, at, BYTES), align=1)
            given = [parts[0], builder.zext(index, WHOLES), *parts[1:]]
            kind = ir.FunctionType(FLOATS, [part.type for part in given])
            found = builder.call(get_or_insert_function(builder.module, kind, name), given)
            builder.store(found, _at(context, builder, kinds[4], out, to, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(table, types.intp, symbols, types.intp, out, types.intp), made

    return sixteen


_of_16 = _permuting("llvm.x86.avx512.permvar.sf.512", 1)
_of_32 = _permuting("llvm.x86.avx512.vpermi2var.ps.512", 2)


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
    if PERMUTES and most < LANES and first + LANES <= len(table):
        for token in range(0, count, LANES):
            _of_16(table, first, symbols, token, out, token)
    elif PERMUTES and most < 2 * LANES and first + 2 * LANES <= len(table):
        for token in range(0, count, LANES):
            _of_32(table, first, symbols, token, out, token)
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
