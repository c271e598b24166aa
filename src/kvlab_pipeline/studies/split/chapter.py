"""The division of bits between K and V in the report."""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab_pipeline.pages.basis import Basis
from kvlab_pipeline.pages.parts import KL_UNIT, reading, resolution
from kvlab_pipeline.studies.chapter import Chapter, Section, estimates_of
from kvlab_pipeline.studies.split.claims import claims
from kvlab_pipeline.studies.split.numbers import split_entries
from kvlab_pipeline.studies.split.schema import SplitEntry


def table(rows: list[dict]) -> str:
    """A line for each engine and division."""
    lines = [
        [
            f"`{row['engine']}`",
            fmt.plain(row["k_bits"]),
            fmt.plain(row["v_bits"]),
            fmt.number(row["bits_per_value"]),
            fmt.estimate(row["kl"]),
            fmt.estimate(row["difference"], signed=True),
            reading(resolution(row["difference"])) if row["difference"] else fmt.DASH,
        ]
        for row in rows
    ]
    headers = ["engine", "bits of K", "bits of V", "bits per value", f"net KL, {KL_UNIT}"]
    return fmt.table([*headers, f"minus the even division, {KL_UNIT}", "reading"], lines)


def context(metrics: dict, basis: Basis) -> dict:
    """What ``split.md.j2`` names."""
    rows = metrics.get("split")
    if not rows:
        return {"split": None}
    shared = {"codec": rows[0]["codec"], "protocol": rows[0]["protocol"]}
    return {"split": shared | {"table": table(rows), "basis": basis([row["kl"] for row in rows])}}


CHAPTER = Chapter(
    parts={"split": tuple[SplitEntry, ...]},
    entries=lambda measured: {"split": split_entries(measured.params, measured.results, measured.boot)},
    sections={"split": Section(110, "Bits divided between K and V at equal bytes", asks="bits for K or for V")},
    context=context,
    claims=lambda metrics: claims(metrics.get("split") or []),
    limits=lambda metrics: [("bits for K or for V, KL", estimates_of(metrics, "split", "difference"))],
)
