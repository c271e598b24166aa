"""Step sizes: one quality for a whole cache, and an exponent for every token of a layer.

An error at a token counts by the square of the attention that the token gets (w below), and at a given rate the least
damage is done where all tokens do the same: where the square of the step goes as 1 / w. But w is only what is expected
of queries to come, so that it decides three quarters of that (`TRUST`), and no token's step is more than twice that
of a middling one.

Everything is counted in 64ths of an octave: a step is ``2**(-(quality + 32 * exponent) / 64)``, in roots of nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.archive.exact import power_of_two

OCTAVE = 64
HALF = OCTAVE // 2
TRUST = 0.75  # 1, .6 and .5 were no better on SmolLM2 and two texts
LEAST, MOST = -2, 16  # half octaves that a token's step may be above and below the cache's
EMERGENCY = -32  # a token so large that its symbols would not fit takes coarser steps, to this
QUALITIES = range(2 * OCTAVE, 25 * OCTAVE)  # beyond, rebuilt components would leave their grid
POINT = 8  # binary places of a reconstruction point
FINE = 12  # octaves between the cache's step and the grid that components are rebuilt on
MOST_COMPONENT = 30  # bits of a component on that grid
MANTISSA = 16
MANTISSAS = torch.tensor([round(2 ** (i / OCTAVE) * (1 << MANTISSA)) for i in range(OCTAVE)], dtype=torch.float64)


def trusted(expected: Tensor) -> Tensor:
    """log2 of what an error at a token counts, as far as steps go by it, float64 of the shape of `expected`.

    Parameters
    ----------
    expected : Tensor
        Squared attention that each token may expect, mean over queries [..., tokens]; NaN of one that none will see,
        as it has left a layer's window: it takes the coarsest step, and the others' do not go by it.
    """
    level = torch.log2(expected.double().clamp(min=2.0**-40))
    return (TRUST * (level - level.nanmean(-1, keepdim=True))).clamp(LEAST, MOST).nan_to_num(LEAST)


def exponents(expected: Tensor) -> Tensor:
    """Half octaves by which tokens' steps are finer, int32 of the shape of `expected`; see `trusted`."""
    return trusted(expected).round().int()


def log_steps(quality: int, exponent: Tensor) -> Tensor:
    """Of each token, log2 of its step in 64ths, int32 [tokens]."""
    return -quality - HALF * exponent


def rebuilt(magnitude: Tensor, quality: int, exponent: Tensor) -> Tensor:
    """Components on their grid, whole numbers in float64, of points in units of 2**-`POINT` steps [tokens, width].

    The grid's unit is ``2**-(quality // 64 + 12)``.
    """
    place = FINE * OCTAVE - quality % OCTAVE - HALF * exponent.long()
    octave = place.div(OCTAVE, rounding_mode="floor")
    scale = MANTISSAS[place % OCTAVE] * power_of_two(octave - POINT - MANTISSA)
    most = float(1 << MOST_COMPONENT)
    return (magnitude * scale[:, None]).round_().clamp_(-most, most)


def places_of(quality: int) -> int:
    """Binary places of the grid that `rebuilt` gives."""
    return quality // OCTAVE + FINE
