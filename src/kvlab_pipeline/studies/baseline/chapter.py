"""The engine baseline in the report: the engines without a codec, and whether they may be compared."""

from __future__ import annotations

from typing import get_args

import polars as pl

from kvlab.stats.equivalence import State
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.baseline.numbers import agreement_entry, baseline_entry, floor_entries, peer_entries
from kvlab_pipeline.studies.baseline.tables import context
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.tidy import (
    COUNT,
    NATS,
    RATIO,
    SHARE,
    WINDOWS,
    By,
    Compared,
    Estimand,
    Level,
    Sentences,
    Several,
    Single,
    VerdictField,
)

# How far a run without a codec is from what it is compared with, on the same tokens.
DISTANCE = {"kl": Estimand(NATS), "ppl_ratio": Estimand(RATIO), "top1_agreement": Estimand(SHARE)}
FLOOR = Several(
    {
        "engine": Level(),
        "run": Level("rerun: once more; identity_PROTOCOL: with a codec that changes nothing"),
        "kl": Estimand(NATS, "of the engine to itself"),
    }
)
# An engine as it is, against the float32 truth (transformers with sdpa attention).
BASELINE = Several({"run": Level(), "engine": Level(), "dtype": Level(), "attention": Level()} | DISTANCE)
# An engine as it is, against the other engine in the same dtype.
PEERS = Several({"run": Level(), "against": Level(), "dtype": Level()} | DISTANCE)

STATES = VerdictField(
    get_args(State),
    "equivalent only where whole intervals lie inside the bounds, differ where they lie outside, else open",
)
# The studied codec in float32 on both engines, under one protocol.
CODED = {
    "cross_kl": Estimand(NATS, "between the two engines, both coded"),
    "jitter_kl": Estimand(NATS, "between transformers, coded, and itself with K and V moved by a rounding error"),
    "beyond_jitter": Estimand(NATS, "cross_kl minus a multiple of jitter_kl"),
    "beyond_band": Estimand(NATS, "cross_kl minus a part of the codec's own KL"),
    "jitters": Estimand(
        COUNT, "rounding errors of each window over which an engine's own KL is averaged, beside the one without"
    ),
    "hf_kl": Estimand(NATS),
    "vllm_kl": Estimand(NATS),
    "relative_difference": Estimand(
        RATIO, "what the codec costs on vLLM over what it costs on transformers, minus one"
    ),
    "difference": Estimand(NATS, "what the codec costs on vLLM minus what it costs on transformers"),
    "compared": Compared(),
    "state": STATES,
}
# Whether the engines compute the same function in float32: an equivalence test.
AGREEMENT = Single(
    {
        "identity": By("protocol", Estimand(NATS, "between the engines with a codec that changes nothing")),
        "codec": By("protocol", CODED),
        "state": STATES,
        "windows_needed": Estimand(
            WINDOWS, "at which nothing would be open, power 80 %, post hoc; null where nothing is, or none settles it"
        ),
        "bounds": {
            "identity_kl": Estimand(NATS, "that the KL without a codec must be below"),
            "relative": Estimand(
                RATIO, "what the codec's KL may differ by, and what the KL between the coded runs may be, over its own"
            ),
            "jitter_multiple": Estimand(RATIO, "how many times jitter_kl the KL between the coded runs may be instead"),
        },
    }
)


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
        "floor": [row for engine in params.engines for row in floor_entries(params, results, boot, engine)],
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
        "floor": FLOOR,
        "baseline": BASELINE,
        "baseline_peers": PEERS,
        "agreement": AGREEMENT,
        "agreement_why": Sentences("what differs or is open, or why the agreement is null: one engine was measured"),
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
