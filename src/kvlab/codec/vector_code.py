"""What is stored per vector: segment, gain, residual norm, packed residual, outliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec import outliers, packing, quantizer
from kvlab.codec.outliers import Outliers
from kvlab.codec.stored import bits_for


@dataclass(frozen=True)
class Group:
    """Blocks whose vectors have the same stored size: padded width and bits of a segment."""

    index: Tensor
    width: int
    segment_bits: int


def groups(d_eff: Tensor, n_centres: Tensor) -> list[Group]:
    """Blocks by (next power of two of d_eff, bits of a segment), in ascending order of these.

    Encoder and decoder both derive it from the stored d_eff and number of centres, int64 [blocks].
    """
    exponent, segment_bits = bits_for(d_eff), bits_for(n_centres)
    key = exponent * 16 + segment_bits
    return [
        Group((key == value).nonzero().flatten(), 1 << (value // 16), value % 16)
        for value in torch.unique(key).tolist()
    ]


@dataclass(frozen=True)
class Vectors:
    """The vectors of a group, b blocks of n, as the decoder knows them.

    Parameters
    ----------
    segment : Tensor
        int64 [b, n].
    gain, norm : Tensor
        Stored precision [b, n].
    z : Tensor
        Rotated unit residuals, float32 [b, n, width]; before or after quantisation.
    """

    segment: Tensor
    gain: Tensor
    norm: Tensor
    z: Tensor


@dataclass(frozen=True)
class VectorCode:
    """The same, as stored."""

    segments: Tensor
    gains: Tensor
    norms: Tensor
    codes: Tensor
    outliers: Outliers | None

    def read(self, group: Group, table: Tensor, bits: int) -> Vectors:
        """Unpack."""
        segment = packing.unpack(self.segments, group.segment_bits, self.gains.shape[1])
        z = table[packing.unpack(self.codes, bits, group.width)]
        if self.outliers is not None:
            z = outliers.restore(z.flatten(0, 1), self.outliers).view_as(z)
        return Vectors(segment, self.gains, self.norms, z)


def write(
    vectors: Vectors, group: Group, table: Tensor, bits: int, threshold: float | None
) -> tuple[VectorCode, Vectors]:
    """Quantise and pack the vectors of a group.

    Returns
    -------
    VectorCode
        What is stored.
    Vectors
        What `VectorCode.read` will give.
    """
    codes = quantizer.quantise(vectors.z, table)
    z = table[codes]
    apart = None
    if threshold is not None:
        apart = outliers.take(vectors.z.flatten(0, 1), threshold)
        z = outliers.restore(z.flatten(0, 1), apart).view_as(z)
    code = VectorCode(
        segments=packing.pack(vectors.segment, group.segment_bits),
        gains=vectors.gain,
        norms=vectors.norm,
        codes=packing.pack(codes, bits),
        outliers=apart,
    )
    return code, Vectors(vectors.segment, vectors.gain, vectors.norm, z)
