"""The engine baseline in the report: the engines without a codec, and whether they may be compared."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.rendering.withheld import settling
from kvlab_pipeline.studies.baseline.numbers import PARTS, agreement_entry, baseline_entry, floor_entries, peer_entries
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim

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


# ---------------------------------------------------------------------------------------------- tables


def floor(rows: list[dict]) -> str:
    """What each engine differs from itself by."""
    found = {(row["engine"], row["run"]): row["kl"] for row in rows}
    columns = {
        f"{run.replace('_', ' ', 1)}, {KL_UNIT}": lambda engine, run=run: fmt.estimate(found.get((engine, run)))
        for run in sorted({run for _, run in found})
    }
    return tables.table(dict.fromkeys(engine for engine, _ in found), {"engine": "`{}`".format} | columns)


def distances(rows: list[dict], keys: tuple[str, ...] = ("engine", "dtype", "attention")) -> str:
    """Uncompressed runs against the float32 truth, or against whatever `keys` say."""
    columns = {key: tables.code(key) for key in keys} | {
        f"KL, {KL_UNIT}": tables.estimate("kl"),
        "perplexity change, %": tables.change("ppl_ratio"),
        "same top token, %": tables.percent("top1_agreement"),
    }
    return tables.table(rows, columns)


def peers(rows: list[dict]) -> str:
    """Uncompressed runs of two engines in the same dtype, against each other."""
    return distances(rows, ("run", "against", "dtype"))


def agreement(given: dict) -> str:
    """Float32 only: the identity cells across engines, and the codec cells measured on either engine."""
    identity, coded = given["identity"], given["codec"]

    def of_codec(tell: Callable[..., str], name: str, *how: float) -> tables.Column:
        return lambda protocol: tell((coded.get(protocol) or {}).get(name), *how)

    columns = {
        "protocol": "`{}`".format,
        "no codec: KL between engines": lambda protocol: fmt.estimate(identity.get(protocol)),
        "codec: KL between engines": of_codec(fmt.estimate, "cross_kl"),
        "codec: KL of `hf` to itself, jittered": of_codec(fmt.estimate, "jitter_kl"),
        "codec: KL on `hf`": of_codec(fmt.number, "hf_kl"),
        "codec: KL on `vllm`": of_codec(fmt.number, "vllm_kl"),
        "difference, %": of_codec(fmt.estimate, "relative_difference", 100),
        "reading": lambda protocol: (coded.get(protocol) or {}).get("state", fmt.DASH),
    }
    return tables.table(dict.fromkeys([*identity, *coded]), columns)


def agreement_context(found: dict | None, why: list[str], basis: Basis) -> dict | None:
    """The float32 check of the engines."""
    if not found:
        return None
    estimates = [*found["identity"].values(), *(row["cross_kl"] for row in found["codec"].values())]
    return {
        "table": agreement(found),
        "basis": basis(estimates),
        "state": found["state"],
        "why": why,
        "needed": settling(found),
        "bounds": {
            "codec": fmt.percent(found["bounds"]["relative"]),
            "jitter": fmt.plain(found["bounds"]["jitter_multiple"]),
            "identity": fmt.plain(found["bounds"]["identity_kl"]),
        },
        "level": basis.level,
    }


def context(metrics: dict, basis: Basis) -> dict:
    """What ``baseline.md.j2`` and ``agreement.md.j2`` name."""
    return {
        "baseline": basis.under(metrics.get("baseline"), distances, "kl"),
        "peers": basis.under(metrics.get("baseline_peers"), peers, "kl"),
        "floor": basis.under(metrics.get("floor"), floor, "kl"),
        "agreement": agreement_context(metrics.get("agreement"), metrics.get("agreement_why") or [], basis),
    }


CHAPTER = Chapter(
    parts=PARTS,
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
