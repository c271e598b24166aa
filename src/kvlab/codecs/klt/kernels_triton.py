"""The kernels of `served_triton`: rows to scores, to sums of V's components, and components to rows.

Every program goes through the tokens of one part of a sequence, or through one token that is written. Bits are read
where they lie in a row, a byte for each digit of a symbol: neighbouring threads have neighbouring components, whose
digits share bytes and whose tables share lines of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds(ends, part, sequence, n):
    """Where the first part of a sequence begins, where one of its parts begins and ends, and its first coded token."""
    origin, size = tl.load(ends + sequence), tl.load(ends + 2 * n + sequence)
    begin = origin + part * size
    return origin, begin, tl.minimum(begin + size, tl.load(ends + n + sequence)), tl.load(ends + 3 * n + sequence)


@triton.jit
def places(start, first, end, rows, blocks, block_size, row_bytes, TILE: tl.constexpr):
    """Positions from `start` on, which of them are `first` to `end` - 1, and their rows; the others have some row."""
    position = start + tl.arange(0, TILE)
    there = (position >= first) & (position < end)
    block = tl.load(blocks + position // block_size, mask=there, other=0)
    return position, there, rows + (block.to(tl.int64) * block_size + position % block_size) * row_bytes


@triton.jit
def components(row, digits, many, first, values, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Components float16 [tokens, CHUNK] of tokens' rows; `digits` and `first` are of the chunk's first lane.

    `many` is where it lies how many digits its symbols have at most.
    """
    lane = tl.arange(0, CHUNK)
    symbol = tl.zeros([row.shape[0], CHUNK], tl.int32)
    for digit in range(0, tl.load(many)):
        own = digits + 4 * digit * LANES + lane
        # a digit that is not there has a mask of 0: to read some byte for it takes fewer instructions than to ask
        found = tl.load(row[:, None] + tl.load(own)[None, :]).to(tl.int32)
        down, mask, up = tl.load(own + LANES), tl.load(own + 2 * LANES), tl.load(own + 3 * LANES)
        symbol |= ((found >> down[None, :]) & mask[None, :]) << up[None, :]
    return tl.load(values + (tl.load(first + lane)[None, :] + symbol))


@triton.jit(do_not_specialize=["room", "row_bytes", "block_size", "most", "runs"])
def score_kernel(
    rows,  # uint8 [slots, row_bytes]
    blocks,  # int32 [n, most]
    ends,  # int32 [4, n]
    lines,  # float16 [kv_heads, n * PER, runs, LANES]
    ends_of_lines,  # float32 [kv_heads, n * PER, runs, 2]: a constant, and what lines are parts of
    by_turn,  # float32 [kv_heads, n * PER, HEAD_DIM]
    turns,  # float32 [positions, HEAD_DIM]
    digits,
    many,
    first,
    values,
    scores,  # float32 [n, groups, ROWS, room]
    seen,  # float32 [2, n, groups, parts, ROWS]: largest score, sum of weights
    room,
    row_bytes,
    block_size,
    most,
    runs,
    PER: tl.constexpr,
    IN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
):
    """Scores of the queries of one sequence and group at one part of its tokens."""
    part, group, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts, groups, n = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    origin, begin, end, first_coded = bounds(ends, part, sequence, n)
    if begin >= end:
        return
    row, lane, pair = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, TURNS)
    real = (row < IN_GROUP * PER)[:, None]
    head = group * IN_GROUP + row // PER
    query = ((head * n + sequence) * PER + row % PER)[:, None]
    of_mean = tl.load(by_turn + query * HEAD_DIM + pair, mask=real & (pair < HEAD_DIM)[None, :], other=0.0)
    own, own_first = digits + group * DEPTH * 4 * LANES, first + group * LANES
    top = tl.full([ROWS], float("-inf"), tl.float32)
    to = scores + ((sequence * groups + group) * ROWS + row)[:, None] * room
    for start in range(begin, end, TILE):
        own_blocks = blocks + sequence * most
        position, there, at = places(start, first_coded, end, rows, own_blocks, block_size, row_bytes, TILE)
        known = there[None, :] & (pair < HEAD_DIM)[:, None]
        turn = tl.load(turns + position[None, :] * HEAD_DIM + pair[:, None], mask=known, other=0.0)
        of_run = query * runs + start // RUN
        constant = tl.load(ends_of_lines + 2 * of_run, mask=real, other=0.0)
        largest = tl.load(ends_of_lines + 2 * of_run + 1, mask=real, other=0.0)
        # as exact as float32: the mean may be far larger than what is about it
        found = tl.dot(of_mean, turn, input_precision="tf32x3") + constant
        for chunk in range(0, LANES, CHUNK):
            of_lanes = tl.load(lines + of_run * LANES + chunk + lane[None, :], mask=real, other=0.0)
            of_chunk = many + (group * LANES + chunk) // CHUNK
            z = components(at, own + chunk, of_chunk, own_first + chunk, values, LANES, CHUNK)
            found += tl.dot(of_lanes, tl.trans(z)) * largest
        found = tl.where(there[None, :], found, float("-inf"))
        top = tl.maximum(top, tl.max(found, 1))
        tl.store(to + (position - origin)[None, :], found, mask=real & there[None, :])
    tl.store(seen + ((sequence * groups + group) * parts + part) * ROWS + row, top)


@triton.jit(do_not_specialize=["room", "row_bytes", "block_size", "most", "v_first"])
def sum_kernel(
    rows,  # uint8 [slots, row_bytes]
    blocks,  # int32 [n, most]
    ends,  # int32 [4, n]
    digits,
    many,
    first,
    values,
    scores,  # float32 [n, groups, ROWS, room]
    seen,  # float32 [2, n, groups, parts, ROWS]: largest score, sum of weights
    sums,  # float32 [n, groups, parts, ROWS, LANES]
    room,
    row_bytes,
    block_size,
    most,
    v_first,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of V's components summed by weight over one part of a sequence's tokens."""
    chunk, group, sequence = tl.program_id(0) % (LANES // CHUNK), tl.program_id(1), tl.program_id(2).to(tl.int64)
    part, parts = tl.program_id(0) // (LANES // CHUNK), tl.num_programs(0) // (LANES // CHUNK)
    groups, n = tl.num_programs(1), tl.num_programs(2)
    origin, begin, end, first_coded = bounds(ends, part, sequence, n)
    if begin >= end:
        return
    row, lane = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    of_part = ((sequence * groups + group) * parts + part) * ROWS + row
    top = tl.load(seen + of_part)
    own, own_first = digits + group * DEPTH * 4 * LANES + chunk * CHUNK, first + group * LANES + chunk * CHUNK
    of_chunk = many + group * (LANES // CHUNK) + chunk
    weight, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, CHUNK], tl.float32)
    at_scores = scores + ((sequence * groups + group) * ROWS + row)[:, None] * room
    for start in range(begin, end, TILE):
        own_blocks = blocks + sequence * most
        position, there, at = places(start, first_coded, end, rows, own_blocks, block_size, row_bytes, TILE)
        found = tl.load(at_scores + (position - origin)[None, :], mask=there[None, :], other=float("-inf"))
        powers = tl.exp(found - top[:, None])
        z = components(at + v_first, own, of_chunk, own_first, values, LANES, CHUNK)
        total += tl.dot(powers.to(tl.float16), z)
        weight += tl.sum(powers, 1)
    if chunk == 0:
        tl.store(seen + n * groups * parts * ROWS + of_part, weight)
    tl.store(sums + of_part[:, None] * LANES + chunk * CHUNK + lane[None, :], total)


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    ends,  # int32 [4, n]
    seen,  # float32 [2, n, groups, parts, ROWS]
    sums,  # float32 [n, groups, parts, ROWS, LANES]
    totals,  # float32 [kv_heads, n * PER, LANES]
    log_sum,  # float32 [n, kv_heads * PER]
    parts,
    PER: tl.constexpr,
    IN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """What the queries of one sequence and group see of all its parts, a chunk of V's components."""
    sequence, group, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n, groups = tl.num_programs(0), tl.num_programs(1)
    size = tl.load(ends + 2 * n + sequence)
    count = tl.cdiv(tl.maximum(tl.load(ends + n + sequence) - tl.load(ends + sequence), 0), size)
    row, lane, part = tl.arange(0, ROWS), chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, MOST)
    of_parts = ((sequence * groups + group) * parts + part)[:, None] * ROWS + row[None, :]
    there = (part < count)[:, None]
    tops = tl.load(seen + of_parts, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    shares = tl.where(there, tl.exp(tops - top[None, :]), 0.0)
    weight = tl.sum(shares * tl.load(seen + n * groups * parts * ROWS + of_parts, mask=there, other=0.0), 0)
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for start in range(0, count, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        at = ((sequence * groups + group) * parts + number)[:, None] * ROWS + row[None, :]
        known = (number < count)[:, None]
        more = tl.exp(tl.load(seen + at, mask=known, other=float("-inf")) - top[None, :])
        found = tl.load(sums + at[:, :, None] * LANES + lane[None, None, :], mask=known[:, :, None], other=0.0)
        total += tl.sum(more[:, :, None] * found, 0)
    head, real = group * IN_GROUP + row // PER, row < IN_GROUP * PER
    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    to = totals + ((head * n + sequence) * PER + row % PER) * LANES
    tl.store(to[:, None] + lane[None, :], total / weight[:, None], mask=real[:, None])
    if chunk == 0:
        found = tl.where(some, top + tl.log(weight), float("-inf"))
        tl.store(log_sum + sequence * groups * IN_GROUP * PER + head * PER + row % PER, found, mask=real)


@triton.jit(do_not_specialize=["n", "row_bytes", "begin", "size"])
def put_kernel(
    z,  # float32 [groups, n, LANES]
    rows,  # uint8 [slots, row_bytes]
    slots,  # int64 [n]
    held,  # int32 [4, size, 8]
    first,  # int32 [groups, LANES]
    width,
    edges,  # float32
    faults,  # int32 [1]
    n,
    row_bytes,
    begin,
    size,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The bytes of one token's components, each the digits that it holds of symbols found by halving their tables."""
    token = tl.program_id(0)
    byte = tl.arange(0, BYTES)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (byte < size)[:, None]
    lane = tl.load(held + place, mask=inside, other=0)
    down = tl.load(held + size * 8 + place, mask=inside, other=0)
    mask = tl.load(held + 2 * size * 8 + place, mask=inside, other=0)
    up = tl.load(held + 3 * size * 8 + place, mask=inside, other=0)
    value = tl.load(z + ((lane // LANES).to(tl.int64) * n + token) * LANES + lane % LANES, mask=mask > 0, other=0.0)
    if tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1) > 0:
        tl.store(faults, 1)
    table, bits = tl.load(first + lane), tl.load(width + lane)
    symbol = tl.zeros_like(lane)
    for step in tl.static_range(8):
        above = symbol + (1 << (7 - step))
        edge = tl.load(edges + table + above - 1, mask=(7 - step < bits) & (mask > 0), other=float("inf"))
        symbol = tl.where(value > edge, above, symbol)
    digits = ((symbol >> up) & mask) << down
    to = rows + tl.load(slots + token) * row_bytes + begin + byte
    tl.store(to, tl.sum(digits, 1).to(tl.uint8), mask=byte < size)
