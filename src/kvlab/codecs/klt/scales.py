"""The scales that single vectors are coded at: large ones, and those at a text's first token.

Tables fit vectors as the calibration met them. One that is several times as large as they are would be clipped in all
of its components at once; it is coded divided by a scale of `UPWARD`. And the token that attention rests on when it
has nothing to look for holds nearly the same K and V in every text, far from all others: it is coded about a mean of
its own, multiplied up until the little that is left of it fills the tables (`ABOUT_SINK`).

A vector's level is the mean square of its standardised components, each weighed by its share of the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

ABOUT_SINK = tuple(2.0**-step for step in range(15))
PLAIN = len(ABOUT_SINK)
UPWARD = tuple(2 ** (step / 4) for step in range(1, 17))
SCALES = torch.tensor((*ABOUT_SINK, 1.0, *UPWARD), dtype=torch.float32, device="cpu")
"""By the number that a vector stores, float32 [32]: the first ones about the second mean, the last ones about the
first. The one between them, `PLAIN`, says that no table was used at all (`plain`)."""
SCALE_BITS = 5
LOUD = 1.4  # level from which a vector is tried at a scale
NEAR = 0.5  # a vector nearer to the second mean than this part of its level is tried about it


def steps_up(level: Tensor) -> Tensor:
    """Place in `UPWARD`, from 1, of the scale that brings a level down to 1; 0 for none, int64."""
    return (2 * level.clamp(min=1e-30).log2()).round().clamp(0, len(UPWARD)).long()


def steps_down(level: Tensor) -> Tensor:
    """Place in `ABOUT_SINK` of the least scale that leaves a level below 1; -1 where it is above, int64."""
    found = (-0.5 * level.clamp(min=1e-30).log2()).floor()
    return found.clamp(-1, len(ABOUT_SINK) - 1).long()
