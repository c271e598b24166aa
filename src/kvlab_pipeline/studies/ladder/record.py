"""What the ladder's rungs need beside their bytes, and how much there is to gain: the file of it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from kvlab.calibration.needs import needs_calibration
from kvlab.core.codec_settings import Frozen
from kvlab.core.params import Params
from kvlab.core.recipe import Engine, Recipe
from kvlab.core.records import Provenance
from kvlab.core.testimony import Testimony
from kvlab_pipeline.studies.ladder.plan import rungs
from kvlab_pipeline.studies.record import read_record

GAIN_WINDOWS = 16  # scored windows whose K and V the coding gain is measured on; none of a longer ladder's tells more


class Artefact(Frozen):
    """The calibration that a rung reads, as files of `kvlab calibrate` and in memory.

    Parameters
    ----------
    recipe_id : str
    whole_bytes, decoder_bytes : int
        Of the file that encodes and decodes, and of what decodes alone.
    resident_bytes : int
        Of what stays in the memory of a process that encodes and decodes.
    """

    recipe_id: str
    whole_bytes: int = Field(ge=0)
    decoder_bytes: int = Field(ge=0)
    resident_bytes: int = Field(ge=0)


class Gain(Frozen):
    """Coding gain of one stream on one window, in dB, the mean over layers and KV heads; see `facts.gains`.

    Parameters
    ----------
    tokens : {"all", "later"}
        All of the context, or all but the first one, where attention sinks are.
    over_even : float
        Over as many bits for every dimension of the metric's own frame.
    over_plain : float
        Over as many bits for every dimension of the values as they are, by a codec that knows neither metric nor mean.
    """

    stream: Literal["k", "v"]
    window: int
    tokens: Literal["all", "later"]
    over_even: float
    over_plain: float


class FittedGain(Frozen):
    """The same on the text that was calibrated on, by the calibration's own moments; from them alone, no interval."""

    stream: Literal["k", "v"]
    over_even: float
    over_plain: float


class Facts(Frozen):
    """The JSON of ``kvlab step ladder``.

    Parameters
    ----------
    provenance : Provenance
    origin : Engine
        Whose capture was calibrated on.
    calibration_tokens : int
    values_per_token : int
        Of K and V, all layers.
    context : int
        Tokens of a window that the gain is measured on.
    artefacts : tuple of Artefact
        Of every rung that reads a calibration.
    fitted : tuple of FittedGain
    gains : tuple of Gain
    """

    provenance: Provenance
    origin: Engine
    calibration_tokens: int
    values_per_token: int
    context: int
    artefacts: tuple[Artefact, ...]
    fitted: tuple[FittedGain, ...]
    gains: tuple[Gain, ...]


class WindowScore(Frozen):
    """One codec on one window: sums over its scored tokens.

    Parameters
    ----------
    calibration_tokens : int
        That the calibration saw, whether or not the codec reads any.
    kl_sum : float
        Nats.
    agreeing : int
        Tokens whose top prediction stays.
    """

    label: str
    text: Literal["test", "other"]
    context: int
    calibration_tokens: int
    bits_per_value: float
    window: int
    kl_sum: float = Field(ge=0)
    agreeing: int
    tokens: int = Field(ge=1)


class Further(Frozen):
    """The JSON of ``kvlab step ladder_further``; `eval` as of the windows.

    `left_out` are contexts that were asked for and that the model has no positions for, `witnessed` what a second
    computation of some codecs' last windows came to.
    """

    provenance: Provenance
    origin: Engine
    eval: int
    left_out: tuple[int, ...] = ()
    scores: tuple[WindowScore, ...]
    witnessed: tuple[Testimony, ...]


def wanted_further(params: Params) -> bool:
    """Whether the parameters ask for it."""
    return bool(params.ladder.growth or params.ladder.contexts)


def parts(shares: Sequence[float], windows: int) -> list[int]:
    """The first so many of the calibration's windows that shares of it are, each once; the whole is none of them."""
    return sorted({count for share in shares if (count := max(2, round(share * windows))) < windows})


def calibrated_rungs(params: Params) -> list[Recipe]:
    """The recipes of the ladder that read a calibration, each once."""
    found = {recipe.recipe_id: recipe for _, recipe in rungs(params)}
    return [one for one in found.values() if any(map(needs_calibration, (one.k, one.v)))]


def gain_windows(params: Params) -> int:
    """How many scored windows the gain is measured on, of `test`."""
    return min(GAIN_WINDOWS, params.ladder.windows)


def read_facts(path: Path | str) -> Facts:
    """The record of ``kvlab step ladder``; `StorageError` when it is none."""
    return read_record(path, Facts, "ladder")


def read_further(path: Path | str) -> Further:
    """The record of ``kvlab step ladder_further``; `StorageError` when it is none."""
    return read_record(path, Further, "ladder_further")
