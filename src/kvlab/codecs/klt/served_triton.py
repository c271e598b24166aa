"""Serving on a GPU from rows of `klt` without escapes whose K was coded after its rotary embedding, in Triton.

What is computed is what `served_numba` computes for a CPU: a query is taken into K's components once, no key is made,
and V's components are summed by weight before one matrix makes values of the sum. A sequence is cut into parts, which
programs go through at once, a tile of tokens at a time; what they found is joined by its largest score and the sum of
its weights (Milakov and Gimelshein 2018, arXiv 1805.02867). Components are in units of their standard deviation, and
are float16 in products.

Torch's meaning of it is in `codecs.shared.turning` and `codecs.klt.synthesis`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.codecs.klt.reading import digits_of
from kvlab.codecs.klt.synthesis import Synthesis
from kvlab.codecs.shared.grouping import joined, parted

TILE, CHUNK = 32, 32  # tokens and lanes of which a program makes components at once
WARPS, STAGES = 4, 1  # of a program: with more of either it has too few registers
SHORTEST = 128  # tokens of a part: fewer cost more to join than they save
MOST_PARTS = 64  # of a sequence
LEAST = 16  # rows and columns of a matrix product


class Served(NamedTuple):
    """One stream of a layer, on the device of its pages. Components with bits are a group's `lanes`.

    Parameters
    ----------
    digits : Tensor
        Byte in the row, bits down, mask and bits up the symbol of each digit, int32 [groups, digits, 4, lanes]; a mask
        of 0 where there is none.
    held : Tensor
        Of each place of a byte the lane that it holds a digit of, counted over all groups, bits down, mask and bits up,
        int32 [4, bytes, 8]; a mask of 0 where there is none.
    first, width : Tensor
        Where the values of each lane begin in the next two, and its bits, int32 [groups, lanes].
    values, edges : Tensor
        Values of components, float16; the numbers halfway to the next value, float32 [values].
    ahead : Tensor
        Tokens to lanes, float32 [groups, group's dimensions, lanes].
    back : Tensor
        Lanes to tokens, float32 [heads, lanes, head_dim].
    rest : Tensor
        Of a token what the components without bits are, float32 [heads, head_dim].
    mean : Tensor
        Of tokens, float32 [heads, head_dim].
    """

    digits: Tensor
    held: Tensor
    first: Tensor
    width: Tensor
    values: Tensor
    edges: Tensor
    ahead: Tensor
    back: Tensor
    rest: Tensor
    mean: Tensor

    @classmethod
    def of(cls, plan: Synthesis) -> Served:
        """That of a plan without escapes that has the way to components too."""
        widths, device = plan.widths, plan.mean.device
        active = widths > 0
        lanes = triton.cdiv(int(active.sum(1).max()), CHUNK) * CHUNK
        pieces = digits_of(plan.planes)
        many = torch.zeros(plan.rows, dtype=torch.int64)
        for piece in pieces:
            many[piece.symbol] += 1
        # those of most digits first, so that whole chunks have none of the later ones
        component = (16 * many.view_as(widths) + widths).argsort(dim=1, descending=True, stable=True)
        component = torch.nn.functional.pad(component, (0, lanes))[:, :lanes]
        there = torch.arange(lanes) < active.sum(1, keepdim=True)
        lane_of = torch.zeros(plan.rows, dtype=torch.int64)
        symbol = component + plan.width * torch.arange(plan.groups)[:, None]
        lane_of[symbol[there]] = torch.arange(there.numel()).view_as(there)[there]

        digits = torch.zeros(4, int(many.max()), there.numel(), dtype=torch.int32)
        held = torch.zeros(4, plan.planes.bytes(1), 8, dtype=torch.int32)
        seen = torch.zeros(there.numel(), dtype=torch.int64)
        for piece in pieces:
            lane, mask = lane_of[piece.symbol], torch.full_like(piece.up, (1 << piece.size) - 1)
            digits[:, seen[lane], lane] = torch.stack([piece.byte, piece.down, mask, piece.up]).int()
            seen[lane] += 1
            place = piece.down // piece.size
            held[:, piece.byte, place] = torch.stack([lane, piece.down, mask, piece.up]).int()
        values, begins = plan.trees.values.cpu(), plan.trees.first.cpu()
        constant = torch.where(active, 0, values[begins])
        width = torch.where(there, widths.gather(1, component), 0)
        # tables in the order of lanes, so that neighbours read from the same lines of the cache
        spans = zip(begins.gather(1, component).flatten().tolist(), (1 << width).flatten().tolist(), strict=True)
        tables = [values[begin : begin + size] for begin, size in spans]
        values = torch.cat(tables)
        # both ways' rows are components
        ahead, back = (matrix.full().cpu() for matrix in (plan.forward, plan.back))
        own = component[..., None].expand(-1, -1, plan.width)
        of_lanes, to_tokens = (matrix.gather(1, own) * there[..., None] for matrix in (ahead, back))
        made = cls(
            digits=digits.unflatten(2, there.shape).permute(2, 1, 0, 3),
            held=held,
            first=((1 << width).flatten().cumsum(0).view_as(width) - (1 << width)).int(),
            width=width.int(),
            values=values.half(),
            edges=torch.nn.functional.pad((values[1:] + values[:-1]) / 2, (0, 1)),
            ahead=of_lanes.mT,
            back=parted(to_tokens, plan.heads),
            rest=parted(constant[:, None] @ back, plan.heads)[:, 0],
            mean=parted(plan.mean.cpu(), plan.heads)[:, 0],
        )
        return cls(*(part.contiguous().to(device) for part in made))


class Span(NamedTuple):
    """Which coded tokens the one query of each sequence reads: those of positions `first` to `until` - 1.

    Parameters
    ----------
    blocks : Tensor
        The pages of each, int32 [n, most pages].
    ends : Tensor
        `first`, `until`, and how many tokens a part of each has, int32 [3, n].
    parts, size : int
        Of the sequence that has the most parts, and tokens of the largest part.
    """

    blocks: Tensor
    ends: Tensor
    parts: int
    size: int

    @classmethod
    def of(cls, blocks: Tensor, first: list[int], until: list[int], device: torch.device) -> Span:
        """That of a block table on any device. Where a sequence is cut depends on its own length alone."""
        counts = [max(0, end - begin) for begin, end in zip(first, until, strict=True)]
        part = [max(SHORTEST, triton.next_power_of_2(triton.cdiv(count, MOST_PARTS))) for count in counts]
        parts = max(triton.cdiv(count, own) for count, own in zip(counts, part, strict=True))
        return cls(blocks.int().to(device), torch.tensor([first, until, part], dtype=torch.int32).to(device), parts, max(part))


class ServedLoops:
    """Writes and reads the rows of one layer in a GPU's memory; all but products of components is float32.

    Parameters
    ----------
    k, v : Synthesis
        Plans of both streams, without escapes, with the way to components, on the GPU.
    """

    def __init__(self, k: Synthesis, v: Synthesis):
        self.k, self.v, self.k_bytes = Served.of(k), Served.of(v), k.planes.bytes(1)
        heads, half = len(self.k.mean), self.k.mean.shape[1] // 2
        low, high = (torch.diag_embed(part) for part in self.k.mean.split(half, dim=1))
        turned = torch.cat([torch.cat([low, high], 2), torch.cat([-high, low], 2)], 1)  # cos, sin to R_t mean
        lanes = self.k.back.mT
        self.absorb = torch.cat([lanes, turned.mT, self.k.rest[..., None]], 2).contiguous()
        groups = len(self.k.digits)
        self.of_turned = joined(turned, groups) @ self.k.ahead
        self.of_mean = joined(self.v.mean[:, None], groups) @ self.v.ahead
        self.constant = (self.v.mean + self.v.rest)[:, None]
        self.groups, self.per_group = groups, heads // groups

    def write(self, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, turns: Tensor, faults: Tensor) -> None:
        """Code tokens [heads, n, head_dim], K as attention sees it, into their slots int64 [n] of rows uint8.

        `turns` are cosines and then sines of their positions, float32 [n, head_dim]. `faults`, int32 [1], is made 1
        where a component is not finite.
        """
        turned = turns @ self.of_turned
        of_k = torch.baddbmm(turned, joined(k.float(), self.groups), self.k.ahead, beta=-1)
        of_v = torch.baddbmm(self.of_mean, joined(v.float(), self.groups), self.v.ahead, beta=-1)
        for z, own, first in ((of_k, self.k, 0), (of_v, self.v, self.k_bytes)):
            size = own.held.shape[1]
            put_kernel[len(slots),](
                *(z, rows, slots, own.held, own.first, own.width, own.edges, faults),
                *(z.shape[1], rows.shape[1], first, size),
                LANES=z.shape[2],
                BYTES=triton.next_power_of_2(size),
            )

    def attend(self, rows: Tensor, block_size: int, span: Span, q: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of one query of each sequence over its coded tokens.

        Parameters
        ----------
        rows : Tensor
            All pages, uint8 [slots, bytes].
        block_size : int
            Tokens of a page.
        span : Span
            Which tokens.
        q : Tensor
            Scaled, float32 [n, heads, head_dim].
        turns : Tensor
            Cosines and then sines of all positions, float32 [positions, head_dim].

        Returns
        -------
        mean, log_sum : Tensor
            See `cache.pages.attention.Attended`.
        """
        n, heads, head_dim = q.shape
        kv_heads = self.groups * self.per_group
        per = heads // kv_heads
        queries = q.unflatten(1, (kv_heads, per)).transpose(0, 1).flatten(1, 2) @ self.absorb
        lanes = self.v.back.shape[1]
        totals, log_sum = q.new_empty(kv_heads, n * per, lanes), q.new_empty(n, heads)
        shared = {"PER": per, "IN_GROUP": self.per_group}
        shared["ROWS"] = padded = max(LEAST, triton.next_power_of_2(self.per_group * per))
        parts = max(1, span.parts)
        seen = q.new_empty(2, n, self.groups, parts, padded)
        scores = q.new_empty(n, self.groups, padded, parts * span.size)
        sums = q.new_empty(n, self.groups, parts, padded, lanes)
        where = rows.shape[1], block_size, span.blocks.shape[1]
        shaped = {"TILE": TILE, "CHUNK": CHUNK, "num_warps": WARPS, "num_stages": STAGES}
        if span.parts:
            score_kernel[parts, self.groups, n](
                *(rows, span.blocks, span.ends, queries, turns, self.k.digits, self.k.first, self.k.values),
                *(scores, seen, scores.shape[3], *where),
                **shared,
                **shaped,
                LANES=self.k.back.shape[1],
                DEPTH=self.k.digits.shape[1],
                HEAD_DIM=head_dim,
                TURNS=max(LEAST, triton.next_power_of_2(head_dim)),
            )
            sum_kernel[parts * (lanes // CHUNK), self.groups, n](
                *(rows, span.blocks, span.ends, self.v.digits, self.v.first, self.v.values),
                *(scores, seen, sums, scores.shape[3], *where, self.k_bytes),
                ROWS=padded,
                **shaped,
                LANES=lanes,
                DEPTH=self.v.digits.shape[1],
            )
        join_kernel[n, self.groups, lanes // CHUNK](
            span.ends, seen, sums, totals, log_sum, parts, **shared, LANES=lanes, CHUNK=CHUNK, MOST=MOST_PARTS
        )
        mean = torch.baddbmm(self.constant, totals, self.v.back)
        return mean.unflatten(1, (n, per)).transpose(0, 1).reshape(q.shape), log_sum


@triton.jit
def places(start, end, blocks, block_size, row_bytes, TILE: tl.constexpr):
    """Positions from `start` on, which of them are below `end`, and where their rows begin."""
    position = start + tl.arange(0, TILE)
    there = position < end
    block = tl.load(blocks + position // block_size, mask=there, other=0)
    return position, there, (block.to(tl.int64) * block_size + position % block_size) * row_bytes


@triton.jit
def components(rows, at, there, digits, first, values, DEPTH: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Components float16 [tokens, CHUNK] of rows that begin `at`; `digits` and `first` are of the chunk's first lane."""
    lane = tl.arange(0, CHUNK)
    symbol = tl.zeros([at.shape[0], CHUNK], tl.int32)
    for digit in tl.static_range(DEPTH):
        own = digits + 4 * digit * LANES + lane
        byte, down, mask = tl.load(own), tl.load(own + LANES), tl.load(own + 2 * LANES)
        held = there[:, None] & (mask > 0)[None, :]
        found = tl.load(rows + (at[:, None] + byte[None, :]), mask=held, other=0).to(tl.int32)
        symbol |= ((found >> down[None, :]) & mask[None, :]) << tl.load(own + 3 * LANES)[None, :]
    return tl.load(values + (tl.load(first + lane)[None, :] + symbol))


@triton.jit
def score_kernel(
    rows,  # uint8 [slots, row_bytes]
    blocks,  # int32 [n, most]
    ends,  # int32 [3, n]
    queries,  # float32 [kv_heads, n * PER, LANES + HEAD_DIM + 1]
    turns,  # float32 [positions, HEAD_DIM]
    digits,
    first,
    values,
    scores,  # float32 [n, groups, ROWS, room]
    seen,  # float32 [2, n, groups, parts, ROWS]: largest score, sum of weights
    room,
    row_bytes,
    block_size,
    most,
    PER: tl.constexpr,
    IN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scores of the queries of one sequence and group at one part of its tokens."""
    part, group, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts, groups, n = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    size, before = tl.load(ends + 2 * n + sequence), tl.load(ends + sequence)
    begin = before + part * size
    end = tl.minimum(begin + size, tl.load(ends + n + sequence))
    if begin >= end:
        return
    row, lane, pair = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, TURNS)
    real = (row < IN_GROUP * PER)[:, None]
    head = group * IN_GROUP + row // PER
    query = queries + ((head * n + sequence) * PER + row % PER)[:, None] * (LANES + HEAD_DIM + 1)
    largest = tl.full([ROWS], 1e-30, tl.float32)  # so that no query leaves what a float16 holds
    for chunk in range(0, LANES, CHUNK):
        lines = tl.load(query + chunk + lane[None, :], mask=real, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(lines), 1))
    by_turn = tl.load(query + LANES + pair[None, :], mask=real & (pair < HEAD_DIM)[None, :], other=0.0)
    constant = tl.load(query + LANES + HEAD_DIM, mask=real, other=0.0)
    own, own_first = digits + group * DEPTH * 4 * LANES, first + group * LANES
    top = tl.full([ROWS], float("-inf"), tl.float32)
    to = scores + ((sequence * groups + group) * ROWS + row)[:, None] * room
    for start in range(begin, end, TILE):
        position, there, at = places(start, end, blocks + sequence * most, block_size, row_bytes, TILE)
        known = there[None, :] & (pair < HEAD_DIM)[:, None]
        turn = tl.load(turns + position[None, :] * HEAD_DIM + pair[:, None], mask=known, other=0.0)
        # as exact as float32: the mean may be far larger than what is about it
        found = tl.dot(by_turn, turn, input_precision="tf32x3") + constant
        for chunk in range(0, LANES, CHUNK):
            lines = tl.load(query + chunk + lane[None, :], mask=real, other=0.0)
            z = components(rows, at, there, own + chunk, own_first + chunk, values, DEPTH, LANES, CHUNK)
            found += tl.dot((lines / largest[:, None]).to(tl.float16), tl.trans(z)) * largest[:, None]
        found = tl.where(there[None, :], found, float("-inf"))
        top = tl.maximum(top, tl.max(found, 1))
        tl.store(to + (position - before)[None, :], found, mask=real & there[None, :])
    tl.store(seen + ((sequence * groups + group) * parts + part) * ROWS + row, top)
@triton.jit
def sum_kernel(
    rows,  # uint8 [slots, row_bytes]
    blocks,  # int32 [n, most]
    ends,  # int32 [3, n]
    digits,
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
    chunk, group, sequence = tl.program_id(0) % (LANES // CHUNK), tl.program_id(1), tl.program_id(2)
    part, parts = tl.program_id(0) // (LANES // CHUNK), tl.num_programs(0) // (LANES // CHUNK)
    groups, n = tl.num_programs(1), tl.num_programs(2)
    size, before = tl.load(ends + 2 * n + sequence), tl.load(ends + sequence)
    begin = before + part * size
    end = tl.minimum(begin + size, tl.load(ends + n + sequence))
    if begin >= end:
        return
    row, lane = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    of_part = ((sequence * groups + group) * parts + part) * ROWS + row
    top = tl.load(seen + of_part)
    own, own_first = digits + group * DEPTH * 4 * LANES + chunk * CHUNK, first + group * LANES + chunk * CHUNK
    weight, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, CHUNK], tl.float32)
    at_scores = scores + ((sequence * groups + group) * ROWS + row)[:, None] * room
    for start in range(begin, end, TILE):
        position, there, at = places(start, end, blocks + sequence * most, block_size, row_bytes, TILE)
        found = tl.load(at_scores + (position - before)[None, :], mask=there[None, :], other=float("-inf"))
        powers = tl.exp(found - top[:, None])
        z = components(rows, at + v_first, there, own, own_first, values, DEPTH, LANES, CHUNK)
        total += tl.dot(powers.to(tl.float16), z)
        weight += tl.sum(powers, 1)
    if chunk == 0:
        tl.store(seen + n * groups * parts * ROWS + of_part, weight)
    tl.store(sums + of_part[:, None] * LANES + chunk * CHUNK + lane[None, :], total)


@triton.jit
def join_kernel(
    ends,  # int32 [3, n]
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
):
    """What the queries of one sequence and group see of all its parts, a chunk of V's components."""
    sequence, group, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    for number in range(0, count):
        at = ((sequence * groups + group) * parts + number) * ROWS + row
        more = tl.exp(tl.load(seen + at) - top)
        total += more[:, None] * tl.load(sums + at[:, None] * LANES + lane[None, :])
    head, real = group * IN_GROUP + row // PER, row < IN_GROUP * PER
    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    to = totals + ((head * n + sequence) * PER + row % PER) * LANES
    tl.store(to[:, None] + lane[None, :], total / weight[:, None], mask=real[:, None])
    if chunk == 0:
        found = tl.where(some, top + tl.log(weight), float("-inf"))
        tl.store(log_sum + sequence * groups * IN_GROUP * PER + head * PER + row % PER, found, mask=real)


@triton.jit
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
    value = tl.load(z + (lane // LANES * n + token) * LANES + lane % LANES, mask=mask > 0, other=0.0)
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
