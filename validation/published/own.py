"""This project's own answer to the published question, out of ``metrics.json``, beside the published cells."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.rendering.withheld import undecided, withheld_because
from kvlab_pipeline.studies.factors import chapter as report_tables
from validation.published.reanalyse import Figures
from validation.published.tables import Numbers, points, printed

SHARED = ("engine", "protocol", "variance_ratio")  # what the published files record of a corner
MEASURE = "kl"


def answer(metrics: dict | None, rows: Sequence[Figures], numbers: Numbers) -> dict:
    """What the template names: ``state`` (``given``, ``absent``, ``withheld`` or ``empty``) and the tables."""
    if metrics is None:
        return {"state": "absent"}
    gap = metrics.get("gap")
    if (why := withheld_because(metrics, {})) is not None:
        return {"state": "withheld", "why": why}
    if not gap or MEASURE not in gap.get("measures", {}):
        return {"state": "empty"}
    measure = gap["measures"][MEASURE]
    sizes, identity = metrics.get("sizes") or {}, metrics.get("identity") or {}
    shares = sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"]))
    of_gap = report_tables.of_gap(shares[0]["share"], measure["gap"])
    return {
        "state": "given",
        "model": identity.get("model", "not recorded"),
        "corpus": identity.get("corpus", "not recorded"),
        "windows": fmt.number(sizes.get("windows")),
        "factors": [part["factor"] for part in measure["parts"]],
        "largest": shares[0]["factor"],
        "of_gap": None if fmt.contains_zero(measure["gap"]) else of_gap,
        "shares": report_tables.decomposition(measure, KL_UNIT, undecided(metrics) is not None),
        "corners": corners(metrics, gap, rows, numbers),
    }


def corners(metrics: dict, gap: dict, rows: Sequence[Figures], numbers: Numbers) -> str:
    """The two corners: ours, and every published cell with the same engine, protocol and variance_ratio."""
    lines = []
    for which in ("low", "high"):
        corner = gap[which]
        words = report_tables.corner({name: corner[name] for name in SHARED if name in corner})
        own = own_cell(metrics, gap, corner)
        lines.append(
            [
                words,
                "this project",
                fmt.estimate(gap["measures"][MEASURE][which]),
                fmt.DASH if own is None else fmt.estimate(own["ppl_ratio"], 100, 1, signed=True),
                fmt.DASH if own is None else fmt.estimate(own["top1_agreement"], 100),
            ]
        )
        for row in published_at(corner, rows):
            lines.append(
                [
                    words,
                    f"published: {numbers.cell(row.cell)}",
                    points(row.kl, 1, 0, signed=False) if row.cell.kl_kind == "full" else fmt.DASH,
                    points(row.ratio, 100, 1) if row.ratio else printed(row.change),
                    points(row.top1, 100, 0, signed=False),
                ]
            )
    headers = ["corner", "measured by", "KL, nats per token", "exp(mean `delta_nll`) - 1, %", "same top token, %"]
    return fmt.table(headers, lines)


def own_cell(metrics: dict, gap: dict, corner: dict) -> dict | None:
    """Our cell of the factorial at a corner, when exactly one of the gap's stream and dtype is there."""
    wanted = corner | {name: gap[name] for name in ("stream", "dtype") if name in gap} | {"role": "codec"}
    found = [
        cell
        for cell in metrics.get("cells") or []
        if all(cell.get(name) == given for name, given in wanted.items())
        and cell.get("study", "factors") == "factors"
        and "ppl_ratio" in cell
        and "top1_agreement" in cell
    ]
    return found[0] if len(found) == 1 else None


def published_at(corner: dict, rows: Sequence[Figures]) -> list[Figures]:
    """Published codec cells that record the corner's settings, K and V both coded as far as anyone says."""
    return [
        row
        for row in rows
        if row.cell.role == "codec"
        and row.cell.facts.stream in (None, "kv")
        and all(getattr(row.cell.facts, name, None) == corner[name] for name in SHARED if name in corner)
    ]
