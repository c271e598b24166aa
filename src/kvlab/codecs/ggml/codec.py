"""Blocks of 32 values as ggml stores them: the layouts and rounding rules of its reference quantisation.

Facts of ggml's types (`block_q4_0` and its like): what a scale is taken from, that it is rounded to float16 only where
it is stored, how codes are rounded and where their bits lie. Held against the compiled library byte by byte.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlab.codecs.base import Arrays, Stats, finite, stored
from kvlab.codecs.ggml import LEAST_RUN
from kvlab.codecs.shared import fp16, rotation
from kvlab.codecs.shared.token_blocks import TokenBlockCodec

BLOCK = 32
WIDTH = {"q8_0": 8, "q5_1": 5, "q5_0": 5, "q4_1": 4, "q4_0": 4, "iq4_nl": 4}  # bits of a code
OFFSET = ("q5_1", "q4_1")  # types with a least value beside the step
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of iq4_nl
NOTHING = 1e-15  # a block of iq4_nl that is nowhere larger is stored as zeros


class GgmlCodec(TokenBlockCodec):
    """Every 32 neighbouring channels of one token of one head as one block of a ggml type.

    A head that blocks do not fill ends in a block filled up with its last value, which counts; llama.cpp refuses it.
    """

    per_token: ClassVar[bool] = True

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """The blocks' bytes, uint8 [heads, n, blocks, bytes of one]."""
        missing = -rows.shape[-1] % BLOCK
        turned = pad(self._turned(rows), (0, missing), mode="replicate") if missing else self._turned(rows)
        cells = turned.unflatten(-1, (-1, BLOCK))
        codes, *scales = _quantised(cells, self.recipe.type)
        halves = [fp16.nearest(one, "scale of a block", layer)[..., None].view(torch.uint8) for one in scales]
        data = torch.cat((*halves, _packed(codes, WIDTH[self.recipe.type])), dim=-1)
        return (data,), Stats(n_coefficients=cells.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The values that the blocks stand for."""
        heads, tokens, head_dim = shape
        kind, width = self.recipe.type, WIDTH[self.recipe.type]
        front = 4 if kind in OFFSET else 2
        size = front + BLOCK * width // 8
        (data,) = stored(arrays, (torch.uint8, (heads, tokens, -(-head_dim // BLOCK), size)))
        step, *least = data[..., :front].contiguous().view(torch.float16).float().split(1, dim=-1)
        values = step * _levels(_unpacked(data[..., front:], width), kind)
        values = finite(values + least[0] if least else values, "a block of ggml")
        return self._turned(values.flatten(-2)[..., :head_dim])

    def _turned(self, rows: Tensor) -> Tensor:
        """Runs of coordinates turned; the matrix is its own inverse."""
        run = min(rows.shape[-1] & -rows.shape[-1], self.recipe.rotation)  # the lowest bit is the largest power of two
        if run < LEAST_RUN:
            return rows
        return (rotation.hadamard(rows.unflatten(-1, (-1, run))) / run**0.5).flatten(-2)


def _quantised(cells: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Codes, uint8 [..., 32], and what a block stores beside them in float16: its step, and its least value if any."""
    if kind == "iq4_nl":
        return _nonlinear(cells)
    top = 2 ** WIDTH[kind] - 1
    if kind in OFFSET:
        least, most = cells.amin(-1), cells.amax(-1)
        step = (most - least) / top
        levels = (cells - least[..., None]) * _inverse(step) + 0.5
        return _whole(levels.trunc(), 0, top), step, least
    if kind == "q8_0":
        step = cells.abs().amax(-1) / 127
        levels = cells * _inverse(step)
        away = levels.trunc()  # to nearest, halves away from zero
        away += ((levels - away).abs() >= 0.5) * levels.sign()
        return _whole(away, -127, 127), step
    zero = 2 ** (WIDTH[kind] - 1)
    step = _farthest(cells) / -zero
    return _whole((cells * _inverse(step) + (zero + 0.5)).trunc(), 0, top), step


def _nonlinear(cells: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of 16 levels, and the step that fits them best where a value is weighed by its square."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=cells.device)
    far = _farthest(cells)
    scaled = cells * _inverse(far / LEVELS[0])
    above = torch.searchsorted(table, scaled.contiguous(), right=True).clamp_(1, len(LEVELS) - 1)
    codes = above - (scaled - table[above - 1] < table[above] - scaled).long()
    levels, weight = table[codes], cells.square()
    fit, norm = (_in_order(weight * levels * other) for other in (cells, levels))
    step = torch.where((norm > 0) & (far.abs() >= NOTHING), fit / norm, 0)
    return codes.to(torch.uint8), step


def _in_order(terms: Tensor) -> Tensor:
    """The sum over the last axis, one after the other in float32, as a loop adds them up."""
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


def _farthest(cells: Tensor) -> Tensor:
    """The value of largest magnitude of each block with its sign, the first of equals."""
    return cells.gather(-1, cells.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _inverse(step: Tensor) -> Tensor:
    """1 / step [..., 1] of the step before it is rounded, 0 of none."""
    return torch.where(step == 0, 0, 1 / step)[..., None]


def _whole(levels: Tensor, low: int, high: int) -> Tensor:
    """As bytes; where a step is too small to be divided by, as 0, which the stored step of 0 makes nothing of."""
    return levels.nan_to_num(0).clamp_(low, high).to(torch.int16).to(torch.uint8)


def _packed(codes: Tensor, width: int) -> Tensor:
    """Codes [..., 32] as bytes: fifth bits in four bytes first, then value i and value i + 16 in one byte."""
    if width == 8:
        return codes
    low, high = (codes & 15).chunk(2, dim=-1)
    data = low | high << 4
    if width == 4:
        return data
    fifth = ((codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1)
    return torch.cat((fifth.to(torch.uint8), data), dim=-1)


def _unpacked(data: Tensor, width: int) -> Tensor:
    """Codes of `_packed`, uint8 [..., 32]."""
    if width == 8:
        return data
    nibbles = data[..., -BLOCK // 2 :]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    if width == 4:
        return codes
    fifth = data[..., :4, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1
    return codes | fifth.flatten(-2) << 4


def _levels(codes: Tensor, kind: str) -> Tensor:
    """What codes stand for in steps, float32."""
    if kind == "iq4_nl":
        return torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)[codes.long()]
    if kind == "q8_0":
        return codes.view(torch.int8).float()
    return codes.float() - (0 if kind in OFFSET else 2 ** (WIDTH[kind] - 1))
