"""Parts of ``metrics.json`` on engines without a codec: floor, baseline, baseline_peers and agreement."""

from __future__ import annotations

from kvlab.base.recipe import Attention, DType, Engine, Protocol
from kvlab.studies.entries import Compared, Entry, Interval


class Distance(Entry):
    """How far a run without a codec is from what it is compared with, on the same tokens."""

    run: str
    dtype: DType
    kl: Interval
    """Nats per token."""
    ppl_ratio: Interval
    top1_agreement: Interval


class BaselineEntry(Distance):
    """An engine as it is, against the float32 truth (transformers with eager attention)."""

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
    hf_kl: float
    vllm_kl: float
    relative_difference: Interval
    """What the codec costs on vLLM over what it costs on transformers, minus one."""
    difference: Interval
    """What the codec costs on vLLM minus what it costs on transformers."""
    compared: Compared


class Agreement(Entry):
    """Whether the engines compute the same function in float32."""

    identity: dict[Protocol, Interval]
    """KL between the engines with a codec that changes nothing."""
    codec: dict[Protocol, CodecAgreement]
    holds: bool
    why: tuple[str, ...]
    """What speaks against it."""


Floor = dict[Engine, dict[str, Interval]]
"""KL of each engine to itself: run again (rerun), and with a codec that changes nothing (identity, by protocol)."""
