"""What a compiler does not make vectors of by itself: bytes turned round, digits' table values, and halves as floats.

A table of at most 32 values lies in one or two vectors of AVX-512, which take an index for each of sixteen places.
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


def _permuting(tables):
    """Values of the symbols at `at`, `at` + 1, ... by the table at `first`, so many vectors long, by an instruction."""

    @intrinsic
    def sixteen(_typing, table, first, symbols, at, out, to):
        def made(context, builder, signature, given):
            kinds, (table, first, symbols, at, out, to) = signature.args, given
            start = vector_at(context, builder, kinds[0], table, first, FLOATS)
            parts = [builder.load(builder.gep(start, [ir.IntType(32)(n)]), align=4) for n in range(tables)]
            index = builder.load(vector_at(context, builder, kinds[2], symbols, at, BYTES), align=1)
            given = [parts[0], builder.zext(index, WHOLES), *parts[1:]]
            kind = ir.FunctionType(FLOATS, [part.type for part in given])
            found = builder.call(get_or_insert_function(builder.module, kind, PERMUTE[tables]), given)
            builder.store(found, vector_at(context, builder, kinds[4], out, to, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(table, types.intp, symbols, types.intp, out, types.intp), made

    return sixteen


_of_16, _of_32 = _permuting(1), _permuting(2)


def _unpacking(digits, tables):
    """Values of `count` times 64 tokens whose symbols lie in so many digits, each ``(byte >> down & mask) << up``.

    By the table at `first`, so many vectors long, into a row of `out`. A digit is the row of `columns` that its bytes
    are, and its `down`, `mask` and `up`. Bytes are shifted by pairs, as there is no instruction that shifts single
    ones: what is not the digit's goes before that.
    """

    def made(context, builder, signature, given):
        kinds, (table, first, columns, out, row, count), each = signature.args, given[:6], given[6:]
        start = vector_at(context, builder, kinds[0], table, first, FLOATS)
        values = [builder.load(builder.gep(start, [ir.IntType(32)(n)]), align=4) for n in range(tables)]
        kind = ir.FunctionType(FLOATS, [FLOATS, WHOLES] + [FLOATS] * (tables - 1))
        permute = get_or_insert_function(builder.module, kind, PERMUTE[tables])
        ready = []
        for byte, down, mask, up in (each[4 * number : 4 * number + 4] for number in range(digits)):
            own = splat(builder, builder.trunc(builder.shl(mask, down), ir.IntType(8)), MANY)
            shifts = (splat(builder, builder.trunc(by, ir.IntType(16)), PAIRS) for by in (down, up))
            ready.append((row_at(context, builder, kinds[2], columns, byte), own, *shifts))
        to = row_at(context, builder, kinds[3], out, row)
        with for_range(builder, count, intp=count.type) as loop:
            token, index = builder.mul(loop.index, context.get_constant(types.intp, WIDE)), None
            for bytes, own, down, up in ready:
                part = builder.load(builder.bitcast(builder.gep(bytes, [token]), MANY.as_pointer()), align=1)
                part = builder.bitcast(builder.and_(part, own), PAIRS)
                part = builder.shl(builder.lshr(part, down), up)
                index = part if index is None else builder.or_(index, part)
            index = builder.bitcast(index, MANY)
            for first in range(0, WIDE, LANES):
                symbols = builder.zext(shuffled(builder, index, index, range(first, first + LANES)), WHOLES)
                place = builder.gep(to, [builder.add(token, context.get_constant(types.intp, first))])
                found = builder.call(permute, [values[0], symbols, *values[1:]])
                builder.store(found, builder.bitcast(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    def typed(table, columns, out):
        digit = types.intp, types.int32, types.int32, types.int32
        return types.void(table, types.intp, columns, out, types.intp, types.intp, *digit * digits)

    @intrinsic
    def one(_typing, table, first, columns, out, row, count, byte, down, mask, up):
        return typed(table, columns, out), made

    @intrinsic
    def two(_typing, table, first, columns, out, row, count, byte, down, mask, up, more, further, mask2, up2):
        return typed(table, columns, out), made

    return one if digits == 1 else two


_one_of_16, _two_of_16, _one_of_32, _two_of_32 = (_unpacking(digits, tables) for tables in (1, 2) for digits in (1, 2))


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
            _of_16(table, first, symbols, token, out, token)
    elif PERMUTES and most < 2 * LANES and first + 2 * LANES <= len(table):
        for token in range(0, count, LANES):
            _of_32(table, first, symbols, token, out, token)
    else:
        own = table[first:]
        for token in range(count):
            out[token] = own[symbols[token]]


@compiled
def unpack(columns, count, a, symbols, out):
    """Values of `count` tokens of all active components, float32 [active, tokens].

    `columns` and `a` are those of `tiles_numba`, and `symbols` is room for one component's, uint8 [tokens]. All have
    room for a multiple of 64 tokens, up to which values may be written. What is read of `a` is named first: to hand over all of it in each call takes
    longer than the work.
    """
    values, table, most, digit = a.values, a.table, a.most, a.digit
    byte, down, mask, up = a.byte, a.down, a.mask, a.up
    vectors = (count + WIDE - 1) // WIDE
    for number in range(len(table)):
        first, at, wide = table[number], digit[number], LANES if most[number] < LANES else 2 * LANES
        digits, more = digit[number + 1] - at, at + 1
        if not PERMUTES or most[number] >= wide or first + wide > len(values) or digits > 2:
            symbols_of(columns, count, at, digit[number + 1], byte, down, mask, up, symbols)
            look_up(values, first, most[number], symbols, count, out[number])
        elif digits == 1 and wide == LANES:
            _one_of_16(values, first, columns, out, number, vectors, byte[at], down[at], mask[at], up[at])
        elif digits == 1:
            _one_of_32(values, first, columns, out, number, vectors, byte[at], down[at], mask[at], up[at])
        else:
            one, two = (byte[at], down[at], mask[at], up[at]), (byte[more], down[more], mask[more], up[more])
            if wide == LANES:
                _two_of_16(values, first, columns, out, number, vectors, *one, *two)
            else:
                _two_of_32(values, first, columns, out, number, vectors, *one, *two)


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
