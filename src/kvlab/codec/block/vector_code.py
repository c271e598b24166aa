"""The vectors of a batch of blocks as they are stored: rotated, quantised, packed, outliers apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec import quantizer, rotation
from kvlab.codec.block import outliers
from kvlab.codec.block.analysis import Analysis
from kvlab.codec.block.outliers import Outliers
from kvlab.codec.block.stored import BlockArrays
from kvlab.codec.stream import packing
from kvlab.codec.stream.packing import bits_for


@dataclass(frozen=True)
class Group:
    """Blocks whose vectors have the same stored size: padded width and bits of a segment."""

    index: list[int]
    width: int
    segment_bits: int

    def of(self, batch: Tensor) -> Tensor:
        """Their part of a batch; the batch itself when it is all of them."""
        return batch if len(self.index) == len(batch) else batch[self.index]


def groups(analysis: Analysis) -> list[Group]:
    """The blocks of a batch by (next power of two of d_eff, bits of a segment)."""
    found: dict[tuple[int, int], list[int]] = {}
    for block, (rank, count) in enumerate(zip(analysis.frame.d_eff, analysis.centres.counts, strict=True)):
        found.setdefault((1 << bits_for(rank), bits_for(count)), []).append(block)
    return [Group(index, *key) for key, index in found.items()]


def rotated(analysis: Analysis, group: Group, seed: int) -> Tensor:
    """Residuals of a group after the rotation, float32 [b, n, width], of mean square 1 per coordinate."""
    unit = group.of(analysis.unit)
    matrix = rotation.forward(seed, group.width, unit.device)
    kept = min(group.width, unit.shape[-1])
    return unit[..., :kept] @ matrix[:kept]


def write(analysis: Analysis, table: Tensor, bits: int, threshold: float | None, seed: int) -> list[BlockArrays]:
    """Rotate, quantise and pack all blocks of a batch."""
    written: list[BlockArrays | None] = [None] * len(analysis.unit)
    for group in groups(analysis):
        z = rotated(analysis, group, seed)
        codes = packing.pack(quantizer.codes(z, table), bits)
        segments = packing.pack(group.of(analysis.segment), group.segment_bits)
        apart = [None] * len(z) if threshold is None else outliers_of(z, threshold)
        for place, block in enumerate(group.index):
            written[block] = BlockArrays(
                frame=analysis.frame.of(block),
                centres=analysis.centres.of(block, analysis.frame.d_eff[block]),
                segments=segments[place],
                scalars=analysis.scalars[block],
                codes=codes[place],
                apart=apart[place],
            )
    return written


def outliers_of(z: Tensor, threshold: float) -> list[Outliers]:
    """The outliers of each block of z [b, n, width]."""
    found = outliers.take(z.flatten(0, 1), threshold)
    counts = found.counts.view(z.shape[:2])
    sizes = counts.to(torch.int32).sum(-1).tolist()
    return [
        Outliers(*parts) for parts in zip(counts, found.places.split(sizes), found.values.split(sizes), strict=True)
    ]
