"""The parts of ``metrics.json`` that the ladder brings: every rung, and which to use at how many bits."""

from __future__ import annotations

from typing import Literal

from kvlab.core.recipe import Protocol, Span
from kvlab_pipeline.studies.entries import Compared, Entry, Interval

Source = Literal["test", "other"]


class OffsetBin(Entry):
    """Mean KL of the scored tokens that lie from `first` to `last` tokens after the end of the context."""

    first: int
    last: int
    kl: Interval


class RungEntry(Entry):
    """One codec at one setting on one text, over every layer's K and V, in float32."""

    text: Source
    """`test` is held out of the text that calibrates, `other` is of another domain."""
    label: str
    codec: str
    """The family: rungs of one codec are no rivals of each other."""
    whole: bool
    """Whether it codes finished caches alone, all layers at once: it is held against all, and is no rival of others."""
    protocol: Protocol
    span: Span
    cell_id: str
    recipe_id: str
    calibrated: bool
    """Whether the codec reads anything that was fitted to text."""
    bits_per_value: float
    """Every byte written for the context, also for tokens of it that a recipe keeps as they are; no calibration."""
    kl: Interval
    top1_agreement: Interval
    by_offset: tuple[OffsetBin, ...]
    rival: str | None
    """The rung of another codec with the least KL among those that store no more, or, of one that is `whole`, that fit
    the same half bit; null where there is none."""
    difference: Interval | None
    """KL minus the rival's, on the same tokens."""
    compared: Compared | None


class AnswerEntry(Entry):
    """Which rung to use on one text at up to so many bits per value."""

    text: Source
    whole: bool
    """Of all rungs, for a cache that is kept; else of those that a model can run with."""
    at_most: float
    label: str
    bits_per_value: float
    kl: Interval
    tried: int
    """Rungs that store no more than `at_most`."""
    ties: tuple[str, ...]
    """Those of them whose KL is not told from its: intervals of all differences hold together at the file's level."""


class AblationEntry(Entry):
    """`klt` with a part taken out, on one text, on the windows that it and its counterpart both score."""

    text: Source
    label: str
    against: str
    cell_id: str
    bits_per_value: float
    kl: Interval
    difference: Interval
    """KL minus that of `against`."""
    times: Interval
    """KL over that of `against`."""
    compared: Compared


class StateAt(Entry):
    """Bits per value of a whole cache of so many tokens."""

    tokens: int
    bits_per_value: float


class StateEntry(Entry):
    """What a rung's cache takes with its calibration and its exact tokens."""

    label: str
    recipe_id: str
    text: Source
    """On which it is set beside `instead`."""
    rate: float
    """Bits per value of a coded token."""
    exact_tokens: float
    """Kept as they are in 16 bits: those of the recipe, and under `snapshot` those between context and scored token."""
    whole_bytes: int
    decoder_bytes: int
    """The calibration as a file: the whole one, and what decodes alone."""
    resident_bytes: int
    """What its codecs hold in memory to encode and decode, which `at` counts."""
    at: tuple[StateAt, ...]
    even_with_bfloat16: float | None
    """Tokens from which on it stores no more than 16 bits a value; null for never."""
    instead: str | None
    """Of a calibrated rung: the one without calibration of no more KL that stores least; null where there is none."""
    even_with_instead: float | None
    """Tokens from which on it stores no more than that one."""


class GainEntry(Entry):
    """Coding gain of K or of V, in dB, the mean over layers and KV heads; 6.02 dB are one bit per value."""

    text: Source
    stream: Literal["k", "v"]
    tokens: Literal["all", "later"]
    """`later` leaves the first token of each window out, where attention sinks are."""
    over_even: Interval
    """Over as many bits for every dimension of the metric's own frame."""
    over_plain: Interval
    """Over as many bits for every dimension of the values as they are."""
    fitted_over_even: float
    fitted_over_plain: float
    """The same by the calibration's own moments, all tokens."""


class FurtherEntry(Entry):
    """A codec at a longer context, or `klt` fitted on a part of the calibration, on one text."""

    what: Literal["growth", "context"]
    text: Source
    label: str
    context: int
    calibration_tokens: int
    bits_per_value: float
    kl: Interval
    top1_agreement: Interval
    against: str | None
    """`growth`: the same codec with the whole calibration; `context`: the first codec there. Null for that one."""
    times: Interval | None
    """KL over that of `against`, on the same tokens."""
