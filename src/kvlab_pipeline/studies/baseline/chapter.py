"""The engine baseline in the report: the engines without a codec, and whether they may be compared."""

from __future__ import annotations

from typing import Annotated

import polars as pl
from pydantic import Field

from kvlab.core.recipe import Attention, DType, Engine, Protocol
from kvlab.stats.equivalence import State
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.baseline.numbers import agreement_entry, baseline_entry, floor_entry, peer_entries
from kvlab_pipeline.studies.baseline.tables import context
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.entries import Compared, Entry, Interval
from kvlab_pipeline.studies.estimates import claim

# Parts of ``metrics.json`` on engines without a codec: floor, baseline, baseline_peers and agreement.


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


# Without any codec: how far each engine and dtype is from the float32 truth.


def baseline_table(metrics: dict) -> pl.DataFrame | None:
    """One row per uncompressed run: its KL to the float32 truth, nats per token."""
    rows = [
        {key: row[key] for key in ("run", "engine", "dtype", "attention")} | marks.interval(row["kl"])
        for row in metrics.get("baseline") or []
    ]
    return pl.DataFrame(rows) if rows else None


def baseline(table: pl.DataFrame) -> Figure:
    """Dots with intervals on a logarithmic axis, one row per run."""
    return marks.by_row(
        table,
        name=run_name,
        words=lambda line: [run_name(line), marks.quantity("KL", line), marks.basis(line)],
        title="Without any codec: how far each engine and dtype is from the float32 truth",
        axis=f"KL to the float32 truth, {KL_UNIT} (logarithmic)",
        note="The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
        labelled=True,
    )


def run_name(line: dict) -> str:
    """A run in words."""
    return ", ".join(line[key] for key in ("engine", "dtype", "attention"))


# Whether the codec costs the same on both engines, from the part ``agreement`` of ``metrics.json``.


def claims(agreement: dict | None) -> list[dict]:
    """What the same codec costs on vLLM beside HF in float32, under every protocol; none with one engine."""
    coded = agreement["codec"] if agreement else {}
    return [
        claim(
            "agreement",
            f"The studied codec on `vllm` in place of `hf`, in float32 (`{protocol}`),",
            entry["difference"],
            entry["compared"],
        )
        for protocol, entry in coded.items()
    ]


def entries(measured: ChapterInputs) -> dict:
    """Its parts of ``metrics.json``."""
    params, results, boot = measured.params, measured.results, measured.boot
    agreement, why = agreement_entry(params, results, boot)
    return {
        "floor": {engine: floor_entry(params, results, boot, engine) for engine in params.engines},
        "baseline": [baseline_entry(results, boot, run) for run in results.runs],
        "baseline_peers": peer_entries(params, results, boot),
        "agreement": agreement,
        "agreement_why": why,
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of engines."""
    return [
        ("engines without a codec, KL", estimates_of(metrics, "baseline", "kl")),
        ("engines against each other, KL", estimates_of(metrics, "baseline_peers", "kl")),
    ]


CHAPTER = Chapter(
    parts={
        "floor": Floor,
        "baseline": tuple[BaselineEntry, ...],
        "baseline_peers": tuple[PeerEntry, ...],
        "agreement": Annotated[
            Agreement | None,
            Field(description="Null where only one engine was measured; `agreement_why` then says so."),
        ],
        "agreement_why": tuple[str, ...],
    },
    entries=entries,
    sections={
        "baseline": PageSection(40, "Each engine and number format against the float32 truth"),
        "agreement": PageSection(
            50, "Whether numbers of two engines may stand side by side", asks="the engines against each other"
        ),
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("agreement")),
    figures={"baseline": Drawn(baseline_table, baseline)},
    limits=limits,
)
