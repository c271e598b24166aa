"""What a compiler does not make vectors of by itself: bytes turned round, digits' table values, and halves as floats.

A table lies in one to sixteen vectors of AVX-512, which take an index for each of sixteen places.
Where the processor has none, the same is a plain loop. Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types, uint8
from numba.core.cgutils import for_range, get_or_insert_function
from numba.extending import intrinsic

from kvlab.codecs.shared.compiled import compiled
from kvlab.codecs.shared.lanes_numba import (
    BYTES,
    FLOATS,
    HALVES,
    LANES,
    MANY,
    PAIRS,
    WHOLES,
    WIDE,
    row_at,
    shuffled,
    splat,
    vector_at,
)


def has_permutes() -> bool:
    """Whether numba compiles for the processor that this is, and that has AVX-512."""
    chosen = config.CPU_NAME or config.CPU_FEATURES is not None
    return not chosen and bool(llvm.get_host_cpu_features().get("avx512f"))


PERMUTES = has_permutes()
PERMUTE = {1: "llvm.x86.avx512.permvar.sf.512", 2: "llvm.x86.avx512.vpermi2var.ps.512"}  # by vectors of a table


def permuted(builder, values, index):
    """Of a table in 1, 2, 4, ... vectors the values at an index each; bits above those of the table are ignored.

    The instruction takes one vector or two; of more, the highest bit says which half.
    """
    half = len(values) // 2
    if half > 1:
        one, other = (permuted(builder, part, index) for part in (values[:half], values[half:]))
        high = builder.and_(index, splat(builder, ir.IntType(32)(half * LANES), WHOLES))
        return builder.select(builder.icmp_unsigned("!=", high, ir.Constant(WHOLES, None)), other, one)
    kind = ir.FunctionType(FLOATS, [FLOATS, WHOLES] + [FLOATS] * (len(values) - 1))
    permute = get_or_insert_function(builder.module, kind, PERMUTE[len(values)])
    return builder.call(permute, [values[0], index, *values[1:]])


@intrinsic
def _of_16(_typing, table, first, symbols, at, out):
    """Sixteen values of symbols by the table at `first`, one vector long."""

    def made(context, builder, signature, given):
        kinds, (table, first, symbols, at, out) = signature.args, given
        values = [builder.load(vector_at(context, builder, kinds[0], table, first, FLOATS), align=4)]
        index = builder.load(vector_at(context, builder, kinds[2], symbols, at, BYTES), align=1)
        found = permuted(builder, values, builder.zext(index, WHOLES))
        builder.store(found, vector_at(context, builder, kinds[4], out, at, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(table, types.intp, symbols, types.intp, out), made


def _unpacking(digits, tables):
    """Values of `count` times 64 tokens whose symbols lie in digits from `at` on (`tiles_numba.Active`), so many.

    By the table at `first`, so many vectors long, into a row of `out`. Bytes are shifted by pairs, as there is no
    instruction that shifts single ones: what is not the digit's goes before that.
    """

    def made(context, builder, signature, given):
        kinds, (table, first, columns, out, row, count, *arrays, at) = signature.args, given
        start = vector_at(context, builder, kinds[0], table, first, FLOATS)
        values = [builder.load(builder.gep(start, [ir.IntType(32)(n)]), align=4) for n in range(tables)]
        own = [
            context.make_array(kind)(context, builder, one).data for kind, one in zip(kinds[6:10], arrays, strict=True)
        ]
        ready = []
        for number in range(digits):
            digit = builder.add(at, context.get_constant(types.intp, number))
            byte, down, mask, up = (builder.load(builder.gep(data, [digit])) for data in own)
            shifts = (splat(builder, builder.zext(by, ir.IntType(16)), PAIRS) for by in (down, up))
            place = row_at(context, builder, kinds[2], columns, builder.zext(byte, row.type))
            ready.append((place, splat(builder, builder.shl(mask, down), MANY), *shifts))
        to = row_at(context, builder, kinds[3], out, row)
        with for_range(builder, count, intp=count.type) as loop:
            token, symbols = builder.mul(loop.index, context.get_constant(types.intp, WIDE)), None
            for bytes, mask, down, up in ready:
                part = builder.load(builder.bitcast(builder.gep(bytes, [token]), MANY.as_pointer()), align=1)
                part = builder.bitcast(builder.and_(part, mask), PAIRS)
                part = builder.shl(builder.lshr(part, down), up)
                symbols = part if symbols is None else builder.or_(symbols, part)
            symbols = builder.bitcast(symbols, MANY)
            for first in range(0, WIDE, LANES):
                index = builder.zext(shuffled(builder, symbols, symbols, range(first, first + LANES)), WHOLES)
                place = builder.gep(to, [builder.add(token, context.get_constant(types.intp, first))])
                place = builder.bitcast(place, FLOATS.as_pointer())
                builder.store(permuted(builder, values, index), place, align=4)
        return context.get_dummy_value()

    @intrinsic
    def several(_typing, table, first, columns, out, row, count, byte, down, mask, up, at):
        places = types.intp, types.intp
        return types.void(table, types.intp, columns, out, *places, byte, down, mask, up, types.intp), made

    return several


# by the bits of a symbol: 1, 2 or 4 are a digit, 8 too, and others two or three of these
_narrow, _of_3, _of_5, _of_6, _of_7, _of_8 = (
    _unpacking(digits, tables) for digits, tables in ((1, 1), (2, 1), (2, 2), (2, 4), (3, 8), (1, 16))
)


@intrinsic
def _widened(_typing, halves, at, factor, out, to):
    """Sixteen numbers in float16, as their bits, times a factor."""

    def made(context, builder, signature, given):
        kinds, (halves, at, factor, out, to) = signature.args, given
        bits = builder.load(vector_at(context, builder, kinds[0], halves, at, HALVES), align=2)
        wide = builder.fpext(bits, FLOATS)
        builder.store(
            builder.fmul(wide, splat(builder, factor, FLOATS)),
            vector_at(context, builder, kinds[3], out, to, FLOATS),
            align=4,
        )
        return context.get_dummy_value()

    return types.void(halves, types.intp, types.float32, out, types.intp), made


@intrinsic
def _turned(_typing, rows, slots, token, first, columns, byte):
    """Sixteen bytes of sixteen tokens, from `byte` after `first` on: each byte's side by side, into rows of `columns`.

    Four times, what lies eight apart comes to lie side by side.
    """

    def made(context, builder, signature, given):
        kinds, (rows, slots, token, first, columns, byte) = signature.args, given
        own, at = context.make_array(kinds[1])(context, builder, slots).data, builder.add(first, byte)
        each, parts = [context.get_constant(types.intp, number) for number in range(LANES)], []
        for number in each:
            slot = builder.load(builder.gep(own, [builder.add(token, number)]))
            place = builder.gep(row_at(context, builder, kinds[0], rows, slot), [at])
            parts.append(builder.load(builder.bitcast(place, BYTES.as_pointer()), align=1))
        half = LANES // 2
        low = [place for number in range(half) for place in (number, number + LANES)]
        high = [place + half for place in low]
        for _ in range(4):
            parts = [shuffled(builder, parts[n], parts[n + half], own) for n in range(half) for own in (low, high)]
        for number, part in zip(each, parts, strict=True):
            place = builder.gep(row_at(context, builder, kinds[4], columns, builder.add(byte, number)), [token])
            builder.store(part, builder.bitcast(place, BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(rows, slots, types.intp, types.intp, columns, types.intp), made


@compiled
def turned_round(rows, slots, first, columns):
    """Bytes of tokens from `first` of their rows on, each byte's side by side, into uint8 [bytes, tokens or more]."""
    bytes, whole = len(columns), len(slots) // LANES * LANES if len(columns) >= LANES else 0
    for token in range(0, whole, LANES):
        for byte in range(0, bytes, LANES):
            _turned(rows, slots, token, first, columns, min(byte, bytes - LANES))
    for token in range(whole, len(slots)):
        row = rows[slots[token], first : first + bytes]
        for at in range(bytes):
            columns[at, token] = row[at]


@compiled
def symbols_of(columns, count, first, last, byte, down, mask, up, out):
    """Symbols of `count` tokens that lie in digits `first` to `last` of `tiles_numba.Active`, into uint8 [tokens]."""
    for digit in range(first, last):
        bytes, own = columns[byte[digit]], mask[digit]
        low, high = down[digit] & 7, up[digit] & 7  # as they are; a compiler that knows it shifts bytes
        if digit == first:
            for token in range(count):
                out[token] = uint8(uint8(uint8(bytes[token] >> low) & own) << high)
        else:
            for token in range(count):
                out[token] |= uint8(uint8(uint8(bytes[token] >> low) & own) << high)


@compiled
def look_up(table, first, most, symbols, count, out):
    """Values of `count` symbols uint8 by the table whose first value is at `first` and whose last one `most` after it.

    `symbols` and `out`, float32, have room for a multiple of sixteen.
    """
    if PERMUTES and most < LANES and first + LANES <= len(table):
        for token in range(0, count, LANES):
            _of_16(table, first, symbols, token, out)
    else:
        own = table[first:]
        for token in range(count):
            out[token] = own[symbols[token]]


@compiled
def unpack(columns, count, a, symbols, out):
    """Values of `count` tokens of all active components, float32 [active, tokens].

    `columns` and `a` are those of `tiles_numba`, and `symbols` is room for one component's, uint8 [tokens]. All have
    room for a multiple of 64 tokens, up to which values may be written. What is read of `a` is named first: to hand
    over all of it in each call takes longer than the work.
    """
    values, table, most, digit = a.values, a.table, a.most, a.digit
    byte, down, mask, up = a.byte, a.down, a.mask, a.up
    vectors = (count + WIDE - 1) // WIDE
    for number in range(len(table)):
        first, at, last, wide = table[number], digit[number], most[number], max(LANES, most[number] + 1)
        if not PERMUTES or first + wide > len(values):
            symbols_of(columns, count, at, digit[number + 1], byte, down, mask, up, symbols)
            look_up(values, first, last, symbols, count, out[number])
        elif last == 7:
            _of_3(values, first, columns, out, number, vectors, byte, down, mask, up, at)
        elif last < LANES:
            _narrow(values, first, columns, out, number, vectors, byte, down, mask, up, at)
        elif last == 31:
            _of_5(values, first, columns, out, number, vectors, byte, down, mask, up, at)
        elif last == 63:
            _of_6(values, first, columns, out, number, vectors, byte, down, mask, up, at)
        elif last == 127:
            _of_7(values, first, columns, out, number, vectors, byte, down, mask, up, at)
        else:
            _of_8(values, first, columns, out, number, vectors, byte, down, mask, up, at)


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


@compiled
def matrix_of(halves, factors, rows, out):
    """Rows of a matrix in float16, given as its bits, uint16 [groups, width, width], each times its factor, float32.

    `rows` count over all groups, as `factors` [groups, width] do; `out` is [len(rows) or more, width].
    """
    width = out.shape[1]
    flat, each, to = halves.reshape(-1), factors.reshape(-1), out.reshape(-1)
    whole = width // LANES * LANES
    for number in range(len(rows)):
        row = rows[number]
        for at in range(0, whole, LANES):
            _widened(flat, row * width + at, each[row], to, number * width + at)
        if whole < width:
            floats_of(flat[row * width : (row + 1) * width], each[row], out[number])
