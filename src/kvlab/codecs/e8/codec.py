"""The E8 lattice: D8 and D8 shifted by one half, 0.65 dB finer than Z at equal bits."""

from __future__ import annotations

from typing import ClassVar

from kvlab.codecs.shared.lattice import LatticeCodec


class E8Codec(LatticeCodec):
    """Words of eight coordinates, two boxes of D8 points half a step apart."""

    dim: ClassVar[int] = 8
    boxes: ClassVar[int] = 2
    # for 1..8 bits, in standard deviations: the least error on Gaussian coordinates, found by search
    steps: ClassVar[tuple[float, ...]] = (1.516, 0.999, 0.586, 0.335, 0.189, 0.1056, 0.0571, 0.036)
