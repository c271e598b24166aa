"""`tiles_numba.vectors` for tensors on a GPU, in Triton: rows of `klt` to components, a program for each vector.

Not run on a GPU so far: it is tested in Triton's interpreter, on a CPU (``TRITON_INTERPRET=1``), where it says bit for
bit what torch says, and nothing is known of its speed. Bits of escapes are read where they lie in the row, since a
program cannot index the symbols that it holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.codecs.klt import bits, escapes, reading, scales

COUNT_END = tl.constexpr(escapes.COUNT_BITS)
SCALE_END = tl.constexpr(escapes.COUNT_BITS + scales.SCALE_BITS)
SIZE_END = tl.constexpr(escapes.PLAIN_BITS)
VALUE_BITS = tl.constexpr(bits.VALUE_BITS)
PLAIN = tl.constexpr(scales.PLAIN)
MOST_BITS = tl.constexpr(8)  # of a symbol
TOO_MANY = tl.constexpr(reading.TOO_MANY)
NO_PLAIN = tl.constexpr(reading.NO_PLAIN)
IMPOSSIBLE = tl.constexpr(reading.IMPOSSIBLE)


@triton.jit
def number_at(row, places, first, last, MOST: tl.constexpr):
    """The number whose bits, lowest first, lie in the row at `places` `first` to `last`, at most `MOST` of them."""
    lane = tl.arange(0, MOST)
    there = lane < last - first
    place = tl.load(places + first + lane, mask=there, other=0)
    byte = tl.load(row + place // 8, mask=there, other=0).to(tl.int32)
    return tl.sum((byte >> (place % 8) & 1) << lane, 0)


@triton.jit
def value_at(row, places, first):
    """The number that `bits.bits_of_value` made the bits of."""
    half = number_at(row, places, first, first + VALUE_BITS, VALUE_BITS)
    root = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return root * tl.abs(root)


@triton.jit
def is_finite(value):
    """Neither NaN nor infinite."""
    return tl.abs(value) < float("inf")


@triton.jit
def symbols_at(row, digits, rows, own, inside, DIGITS: tl.constexpr):
    """Symbols int32 of the components `own` of a layer's `rows`: first bits, masks and shifts are beside each other."""
    found = tl.zeros_like(own)
    for digit in tl.static_range(DIGITS):
        at = digits + digit * rows + own
        place = tl.load(at, mask=inside, other=0)
        mask = tl.load(at + DIGITS * rows, mask=inside, other=0)
        up = tl.load(at + 2 * DIGITS * rows, mask=inside, other=0)
        byte = tl.load(row + place // 8, mask=inside, other=0).to(tl.int32)
        found |= (byte >> (place % 8) & mask) << up
    return found


@triton.jit
def plain_vector(row, size, places, wide, bits, tables, back, WIDTH, MOST, LANES: tl.constexpr, PART: tl.constexpr):
    """Components of a vector without tables, of one group's `plain_of`; `PART` coefficients are made at a time."""
    lane = tl.arange(0, LANES)
    more, fewer = tl.load(bits), tl.load(bits + 1)
    z = tl.zeros([LANES], tl.float32)
    for start in range(0, WIDTH, PART):
        own = start + tl.arange(0, PART)
        narrow = (own >= wide).to(tl.int32)
        held = tl.where(narrow == 1, fewer, more)
        first = tl.minimum(own, wide) * more + (own - wide) * narrow * fewer
        index = tl.zeros([PART], tl.int32)
        for bit in tl.static_range(MOST_BITS):
            there = (bit < held) & (own < WIDTH)
            place = tl.load(places + first + bit, mask=there, other=0)
            byte = tl.load(row + place // 8, mask=there, other=0).to(tl.int32)
            index |= (byte >> (place % 8) & 1) << bit
        value = tl.load(tables + narrow * MOST + index, mask=own < WIDTH, other=0.0) * size
        there = (own < WIDTH)[:, None] & (lane < WIDTH)[None, :]
        way = tl.load(back + own[:, None] * WIDTH + lane[None, :], mask=there, other=0.0)
        z += tl.sum(value[:, None] * way, 0)
    return z


@triton.jit
def components_kernel(
    rows,  # uint8 [slots, row_bytes]
    slots,  # int64 [tokens]
    out,  # float32 [groups, tokens, WIDTH + 1]
    faults,  # int32 [groups, tokens], zeros
    digits,  # int32 [3, DIGITS, groups * WIDTH]: first bit, mask, shift
    table,  # float32 [groups * WIDTH, TABLE]
    flags,  # int32 [groups]: the bit that says whether a vector was escaped
    tails,  # int32 [groups, TAIL]: where an escape's bits lie
    lost,  # uint8 [groups, ROOM + 1, WIDTH]
    start,  # int32 [groups, ROOM + 1, WIDTH]
    heap,  # float32
    scale_of,  # float32 [32]
    plain_places,  # int32 [groups, PLAIN_BITS]
    plain_wide,  # int32 [groups]
    plain_held,  # int32 [groups, 2]
    plain_tables,  # float32 [groups, 2, PLAIN_TABLE]
    plain_back,  # float32 [groups, WIDTH, WIDTH]
    row_bytes,
    first,
    tokens,
    WIDTH,
    TABLE,
    TAIL,
    ROOM,
    INDEX_BITS,
    PLAIN_BITS,
    PLAIN_TABLE,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    DIGITS: tl.constexpr,
    ESCAPES: tl.constexpr,
    PLAIN_THERE: tl.constexpr,
):
    """Components of one token and group, and 1 after those of a vector about the second mean."""
    token, group = tl.program_id(0), tl.program_id(1)
    row = rows + tl.load(slots + token) * row_bytes + first
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    own = group * WIDTH + lane
    symbol = symbols_at(row, digits, tl.num_programs(1) * WIDTH, own, inside, DIGITS)
    z = tl.load(table + own * TABLE + symbol, mask=inside, other=0.0)
    vector = (group * tokens + token).to(tl.int64)
    to = out + vector * (WIDTH + 1)
    about_second = 0.0
    if ESCAPES:
        places = tails + group * TAIL
        escaped = number_at(row, flags, group, group + 1, 2) == 1
        count = number_at(row, places, 0, COUNT_END, 8)
        number = tl.where(count == 0, number_at(row, places, COUNT_END, SCALE_END, 8), PLAIN)
        about_second = tl.where(escaped & (number < PLAIN), 1.0, 0.0)
        if escaped:
            if count > ROOM:
                tl.store(faults + vector, TOO_MANY)
            elif (count == 0) & (number == PLAIN):
                if PLAIN_THERE:
                    size = value_at(row, places, SCALE_END)
                    if is_finite(size):
                        z = plain_vector(
                            row,
                            size,
                            plain_places + group * PLAIN_BITS,
                            tl.load(plain_wide + group),
                            plain_held + group * 2,
                            plain_tables + group * 2 * PLAIN_TABLE,
                            plain_back + group * WIDTH * WIDTH,
                            WIDTH,
                            PLAIN_TABLE,
                            LANES,
                            PART,
                        )
                    else:
                        tl.store(faults + vector, IMPOSSIBLE)
                else:
                    tl.store(faults + vector, NO_PLAIN)
            else:
                at = (group * (ROOM + 1) + count) * WIDTH + lane
                known = symbol >> tl.load(lost + at, mask=inside, other=0).to(tl.int32)
                node = tl.load(start + at, mask=inside, other=0) + known
                z = tl.load(heap + node, mask=inside, other=0.0) * tl.load(scale_of + number)
                for pair in range(count):
                    where = COUNT_END + pair * (INDEX_BITS + VALUE_BITS)
                    index = number_at(row, places, where, where + INDEX_BITS, 16)
                    value = value_at(row, places, where + INDEX_BITS)
                    if (index >= WIDTH) | (is_finite(value) == 0):
                        tl.store(faults + vector, IMPOSSIBLE)
                    z = tl.where(lane == index, value, z)
    tl.store(to + lane, z, mask=inside)
    tl.store(to + WIDTH, about_second)
