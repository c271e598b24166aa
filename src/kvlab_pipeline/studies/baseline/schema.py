"""Parts of ``metrics.json`` on engines without a codec: floor, baseline, baseline_peers and agreement."""

from __future__ import annotations

from kvlab.core.recipe import Attention, DType, Engine, Protocol
from kvlab.stats.equivalence import State
from kvlab_pipeline.studies.entries import Compared, Entry, Interval


class Distance(Entry):
    """How far a run without a codec is from what it is compared with, on the same tokens."""

    run: str
    dtype: DType
    kl: Interval
    """Nats per token."""
    ppl_ratio: Interval
    top1_agreement: Interval


class BaselineEntry(Distance):
    """An engine as it is, against the float32 truth (transformers with sdpa attention)."""

    engine: Engine
    attention: Attention


class PeerEntry(Distance):
    """An engine as it is, against the other engine in the same dtype."""

    against: str


class CodecAgreement(Entry):
    """The studied codec in float32 on both engines, under one protocol; KL in nats per token."""

    cross_kl: Interval
    """Between the two engines, both coded."""
    jitter_kl: Interval
    """Between transformers, coded, and itself with K and V moved by a rounding error."""
    beyond_jitter: Interval
    """`cross_kl` minus a multiple of `jitter_kl`."""
    beyond_band: Interval
    """`cross_kl` minus a part of the codec's own KL."""
    jitters: int = 0
    """Rounding errors of each window over which each engine's own KL is averaged, beside the result without one."""
    hf_kl: float
    vllm_kl: float
    relative_difference: Interval
    """What the codec costs on vLLM over what it costs on transformers, minus one."""
    difference: Interval
    """What the codec costs on vLLM minus what it costs on transformers."""
    compared: Compared
    state: State
    """``equivalent`` only where whole intervals lie inside the bounds, ``differ`` where they lie outside, else open."""


class AgreementBounds(Entry):
    """What the tests of the engines' agreement ask for."""

    identity_kl: float
    """Nats per token that the KL without a codec must be below."""
    relative: float
    """What the codec's KL may differ by, and what the KL between the coded runs may be, over the codec's own."""
    jitter_multiple: float
    """How many times `jitter_kl` the KL between the coded runs may be instead."""


class Agreement(Entry):
    """Whether the engines compute the same function in float32: an equivalence test."""

    identity: dict[Protocol, Interval]
    """KL between the engines with a codec that changes nothing."""
    codec: dict[Protocol, CodecAgreement]
    state: State
    """That of the weakest test under any protocol."""
    why: tuple[str, ...]
    """What differs, or what is open."""
    windows_needed: int | None
    """At which nothing would be open, with a power of 80 % and post hoc; null where nothing is, or none settles it."""
    bounds: AgreementBounds


Floor = dict[Engine, dict[str, Interval]]
"""KL of each engine to itself: run again (rerun), and with a codec that changes nothing (identity, by protocol)."""
