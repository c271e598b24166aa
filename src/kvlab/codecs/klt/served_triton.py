"""Serving on a GPU from rows of `klt` without escapes whose K was coded after its rotary embedding, in Triton.

What is computed is what `served_numba` computes for a CPU: a query is taken into K's components once for each run of
positions, no key is made, and V's components are summed by weight before one matrix makes values of the sum. A sequence
is cut into parts, which programs go through at once; what they found is joined by its largest score and the sum of its
weights (Milakov and Gimelshein 2018, arXiv 1805.02867). Components are in units of their standard deviation, and are
float16 in products.

Torch's meaning of it is in `codecs.shared.turning` and `codecs.klt.synthesis`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from kvlab.codecs.klt.kernels_triton import join_kernel, put_kernel, score_kernel, sum_kernel
from kvlab.codecs.klt.reading import digits_of
from kvlab.codecs.klt.synthesis import Synthesis
from kvlab.codecs.shared.grouping import joined, parted
from kvlab.codecs.shared.turning import RUN

# Tokens and lanes of which a program makes components at once, its warps, and its stages: of nine choices that were
# tried on an H200, this one was the fastest with 32 sequences of 8,192 tokens (kvlab 90b635f7).
TILE, CHUNK, WARPS, STAGES = 32, 32, 4, 1
SHORTEST = 128  # tokens of a part, at least; it and `RUN` are multiples of `TILE`, so no tile is of two runs
MOST_PARTS, AT_ONCE = 64, 8  # of a sequence, and how many are joined at once
LEAST = 16  # rows and columns of a matrix product


class ServedStream(NamedTuple):
    """One stream of a layer, on the device of its pages. Components with bits are a group's `lanes`.

    Parameters
    ----------
    digits : Tensor
        Byte in the row, bits down, mask and bits up the symbol of each digit, int32 [groups, digits, 4, lanes]; a mask
        of 0 where there is none.
    many : Tensor
        Digits that the symbols of each `CHUNK` lanes have at most, int32 [groups, lanes / CHUNK].
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
    many: Tensor
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
    def of(cls, plan: Synthesis) -> ServedStream:
        """That of a plan without escapes that has the way to components too."""
        widths, device = plan.widths, plan.mean.device
        active = widths > 0
        lanes = max(1, triton.cdiv(int(active.sum(1).max()), CHUNK)) * CHUNK
        pieces = digits_of(plan.planes)
        many = torch.zeros(plan.rows, dtype=torch.int64)
        for piece in pieces:
            many[piece.symbol] += 1
        # those of most digits first, so that whole chunks have none of the later ones
        component = (16 * many.view_as(widths) + widths).argsort(dim=1, descending=True, stable=True)
        component = pad(component, (0, lanes))[:, :lanes]
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
        values = torch.cat([values[begin : begin + size] for begin, size in spans])
        # both ways' rows are components
        ahead, back = (matrix.full().cpu() for matrix in (plan.forward, plan.back))
        own = component[..., None].expand(-1, -1, plan.width)
        of_lanes, to_tokens = (matrix.gather(1, own) * there[..., None] for matrix in (ahead, back))
        made = cls(
            digits=digits.unflatten(2, there.shape).permute(2, 1, 0, 3),
            many=(many[symbol] * there).unflatten(1, (-1, CHUNK)).amax(2).int(),
            held=held,
            first=((1 << width).flatten().cumsum(0).view_as(width) - (1 << width)).int(),
            width=width.int(),
            values=values.half(),
            edges=pad((values[1:] + values[:-1]) / 2, (0, 1)),
            ahead=of_lanes.mT,
            back=parted(to_tokens, plan.heads),
            rest=parted(constant[:, None] @ back, plan.heads)[:, 0],
            mean=parted(plan.mean.cpu(), plan.heads)[:, 0],
        )
        return cls(*(part.contiguous().to(device) for part in made))


class CodedSpans(NamedTuple):
    """Which coded tokens the one query of each sequence reads: those of positions `first` to `until` - 1.

    Parameters
    ----------
    blocks : Tensor
        The pages of each, int32 [n, most pages].
    ends : Tensor
        The position at which the first part of each begins, `until`, how many positions its parts have, and `first`,
        int32 [4, n]. Parts begin where tiles do, so that no tile is of two runs.
    parts, size : int
        Of the sequence that has the most parts, and positions of the largest part.
    runs : int
        Of the longest sequence (`turning.RUN`).
    """

    blocks: Tensor
    ends: Tensor
    parts: int
    size: int
    runs: int

    @classmethod
    def of(cls, blocks: Tensor, first: list[int], until: list[int], device: torch.device) -> CodedSpans:
        """That of a block table on any device. Where a sequence is cut depends on its own length alone."""
        # a sequence of which nothing is read coded has no part
        until = [end if end > begin else 0 for begin, end in zip(first, until, strict=True)]
        origin = [begin // TILE * TILE if end else 0 for begin, end in zip(first, until, strict=True)]
        counts = [end - begin for begin, end in zip(origin, until, strict=True)]
        part = [max(SHORTEST, triton.next_power_of_2(triton.cdiv(count, MOST_PARTS))) for count in counts]
        parts = max(triton.cdiv(count, own) for count, own in zip(counts, part, strict=True))
        ends = torch.tensor([origin, until, part, first], dtype=torch.int32)
        return cls(blocks.int().to(device), ends.to(device), parts, max(part), triton.cdiv(max(until), RUN))


class ServedLoops:
    """Writes and reads the rows of one layer in a GPU's memory.

    What is written is what `KltRows.encode` writes, but where a component lies within a rounding of the middle between
    two values. What is read is off by the rounding of float16 in products of components; all else is float32.

    Parameters
    ----------
    k, v : Synthesis
        Plans of both streams, without escapes, with the way to components, on the GPU.
    """

    def __init__(self, k: Synthesis, v: Synthesis):
        self.k, self.v, self.k_bytes = ServedStream.of(k), ServedStream.of(v), k.planes.bytes(1)
        self.groups = len(self.k.digits)
        self.per_group = len(self.k.mean) // self.groups
        self.constant = (self.v.mean + self.v.rest)[:, None]

    def write(self, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, faults: Tensor) -> None:
        """Code tokens float32 [heads, n, head_dim] into their slots int64 [n] of rows uint8.

        K is what is coded of it: its mean is the same at every position (`MeanByPosition.undo`). `faults`, int32 [1],
        is made 1 where a component that has bits is not finite.
        """
        for x, own, first in ((k, self.k, 0), (v, self.v, self.k_bytes)):
            size = own.held.shape[1]
            if not size:
                continue
            z = joined(x - own.mean[:, None], self.groups) @ own.ahead
            with torch.cuda.device_of(rows):
                put_kernel[len(slots),](
                    *(z, rows, slots, own.held, own.first, own.width, own.edges, faults),
                    *(z.shape[1], rows.shape[1], first, size),
                    LANES=z.shape[2],
                    BYTES=triton.next_power_of_2(size),
                )

    def attend(
        self, rows: Tensor, block_size: int, span: CodedSpans, q: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of one query of each sequence over its coded tokens.

        Parameters
        ----------
        rows : Tensor
            All pages, uint8 [slots, bytes].
        block_size : int
            Tokens of a page.
        span : CodedSpans
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
        k, v, groups = self.k, self.v, self.groups
        kv_heads, lanes = groups * self.per_group, v.back.shape[1]
        per = heads // kv_heads
        padded = max(LEAST, triton.next_power_of_2(self.per_group * per))
        parts = max(1, span.parts)
        own = q.unflatten(1, (kv_heads, per)).transpose(0, 1).flatten(1, 2)
        lines, ends = self._absorbed(own, turns[: span.runs * RUN : RUN])
        queries = lines, ends, self._mean_of(own), turns
        scores = q.new_empty(n, groups, padded, parts * span.size)
        seen, sums = q.new_empty(2, n, groups, parts, padded), q.new_empty(n, groups, parts, padded, lanes)
        totals, log_sum = q.new_empty(kv_heads, n * per, lanes), q.new_empty(n, heads)
        where = scores.shape[3], rows.shape[1], block_size, span.blocks.shape[1]
        heads_of = {"PER": per, "IN_GROUP": self.per_group}
        sizes = {"ROWS": padded, "CHUNK": CHUNK}
        programs = {"TILE": TILE, "num_warps": WARPS, "num_stages": STAGES}
        with torch.cuda.device_of(rows):  # Triton launches where torch is, and not where tensors are
            if span.parts:
                score_kernel[parts, groups, n](
                    *(rows, span.blocks, span.ends, *queries, k.digits, k.many, k.first, k.values, scores, seen),
                    *(*where, span.runs),
                    **(heads_of | sizes | programs),
                    LANES=k.back.shape[1],
                    DEPTH=k.digits.shape[1],
                    HEAD_DIM=head_dim,
                    TURNS=max(LEAST, triton.next_power_of_2(head_dim)),
                    RUN=RUN,
                )
                sum_kernel[parts * (lanes // CHUNK), groups, n](
                    *(rows, span.blocks, span.ends, v.digits, v.many, v.first, v.values, scores, seen, sums),
                    *(*where, self.k_bytes),
                    **(sizes | programs),
                    LANES=lanes,
                    DEPTH=v.digits.shape[1],
                )
            join_kernel[n, groups, lanes // CHUNK](
                *(span.ends, seen, sums, totals, log_sum, parts),
                **(heads_of | sizes),
                LANES=lanes,
                MOST=MOST_PARTS,
                AT_ONCE=AT_ONCE,
            )
        mean = torch.baddbmm(self.constant, totals, v.back)
        return mean.unflatten(1, (n, per)).transpose(0, 1).reshape(q.shape), log_sum

    def _absorbed(self, q: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """What K's lanes and a constant count for in scores of q [kv_heads, n, head_dim], by run.

        Parameters
        ----------
        turns : Tensor
            Cosines and then sines of where runs begin, float32 [runs, head_dim].

        Returns
        -------
        lines : Tensor
            In parts of the largest one, so that none leaves what a float16 holds: float16 [kv_heads, n, runs, lanes].
        ends : Tensor
            The constant and the largest, float32 [kv_heads, n, runs, 2].
        """
        (low, high), (cos, sin) = q[:, :, None].chunk(2, dim=-1), turns.chunk(2, dim=-1)
        back = torch.cat([low * cos + high * sin, high * cos - low * sin], dim=-1)
        constant = (back * self.k.rest[:, None, None]).sum(-1, keepdim=True)
        lines = torch.bmm(back.flatten(1, 2), self.k.back.mT).unflatten(1, back.shape[1:3])
        largest = lines.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return lines.div_(largest).half(), torch.cat([constant, largest], dim=-1)

    def _mean_of(self, q: Tensor) -> Tensor:
        """What cosines and sines count for in scores of q [kv_heads, n, head_dim]: K's mean.

        No matrix product: its factors may be large, and torch may be told to round those of one.
        """
        low, high = q.chunk(2, dim=-1)
        mean_low, mean_high = self.k.mean[:, None].chunk(2, dim=-1)
        return torch.cat([low * mean_low + high * mean_high, high * mean_low - low * mean_high], dim=-1)
