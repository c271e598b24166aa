"""The tables of PLACEMENT.md. Torch-free."""

from __future__ import annotations

from kvlab.output.format import number, plain
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import table_if_any
from kvlab_pipeline.studies.placement.record import KINDS, PlacementRecord

CONTROLS = {
    "tie": "two rows of the output projection that differ by 1e-6: the last token is tied with another",
    "shift": "positions from the middle of the text on are one too many",
}


def parts(record: PlacementRecord) -> dict[str, str | None]:
    """What the template places, by name."""
    ways = {"by position": record.logical, "as the blocks lie": record.slot}
    return {
        "moved": table_if_any(
            ways,
            {
                "rows are read": str,
                "runs": lambda way: number(ways[way].runs),
                "runs that differ in any bit": lambda way: number(ways[way].differing),
                "largest difference of a logit": lambda way: number(ways[way].largest),
            },
        ),
        "margins": table_if_any(
            record.margins,
            {
                "lead, in logits": lambda one: (
                    f"{plain(one.low)} {'and more' if one.high is None else f'to {plain(one.high)}'}"
                ),
                "rows": cols.number("rows"),
                "flips": cols.number("flips"),
            },
        ),
        "verdicts": table_if_any(
            KINDS, {"verdict": str, "runs": lambda kind: number(sum(one.kind == kind for one in record.judged))}
        ),
        "controls": table_if_any(
            record.controls,
            {
                "what was made": lambda one: CONTROLS[one.name],
                "has to be": cols.text("expected"),
                "runs": cols.number("runs"),
                "with a flip": cols.number("flipped"),
                "judged so": cols.number("right"),
                "largest lead of a flip": cols.number("lead"),
                "control": lambda one: "passed" if one.passed else "**not passed**",
            },
        ),
    }
