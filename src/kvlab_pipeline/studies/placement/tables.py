"""The study of placement as a page prints it. Torch-free."""

from __future__ import annotations

from kvlab.output.format import number, plain
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import TitledTable
from kvlab_pipeline.studies.placement.record import KINDS, PlacementRecord

TITLE = "Where a chunk lies, and what that changes"
ABOUT = """\
After a restore or an eviction, a chunk may lie in any block of the pool. The pager hands attention its rows in the
order of their positions, whichever block they lie in, so that nothing can hang on that. A cache that is read as its
blocks lie sums the same numbers in another order, and rounds otherwise. This page holds both against a run whose
blocks are in order, and measures what the second one costs: how far logits move, whether a token flips, and whether a
flip can be told from a bug."""

CONTROLS = {
    "tie": "two rows of the output projection that differ by 1e-6: the last token is tied with another",
    "shift": "positions from the middle of the text on are one too many",
}


def tables(record: PlacementRecord) -> list[TitledTable]:
    """What moved, which rows flipped, what the verdicts were, and the controls."""
    return [moved(record), margins(record), verdicts(record), controls(record)]


def moved(record: PlacementRecord) -> TitledTable:
    """Both ways of reading."""
    settings = record.settings
    text = (
        f"{settings.orders} random orders of {record.blocks} blocks of {settings.chunk_tokens} tokens, shared out "
        f"among {settings.windows} texts; logits after each of {record.context} tokens and after each of "
        f"{settings.decode} decoded ones, {record.dtype}."
    )
    columns = {
        "rows are read": lambda way: way[0],
        "runs": lambda way: str(way[1].runs),
        "runs that differ in any bit": lambda way: str(way[1].differing),
        "largest difference of a logit": lambda way: number(way[1].largest),
    }
    ways = [("by position", record.logical), ("as the blocks lie", record.slot)]
    return TitledTable("Read by position, and as the blocks lie", text, columns, ways)


def margins(record: PlacementRecord) -> TitledTable:
    """Flips against leads."""
    text = (
        f"Rows of the {len(record.judged)} runs that were judged, read as the blocks lie, by the lead of their most "
        "likely token over the next one in the reference run. A token can flip only where its lead is less than twice "
        f"what logits move by. The smallest lead of any row was {number(record.least_margin)}."
    )
    columns = {
        "lead, in logits": lambda one: (
            f"{plain(one.low)} {'and more' if one.high is None else f'to {plain(one.high)}'}"
        ),
        "rows": cols.number("rows"),
        "flips": cols.number("flips"),
    }
    return TitledTable("Flips by the lead of the token", text, columns, record.margins)


def verdicts(record: PlacementRecord) -> TitledTable:
    """What the classifier said."""
    text = (
        f"The first {record.calibrated} runs moved logits by {number(record.noise)} at most. The others are judged by "
        f"{plain(record.factor)} times that, {number(record.limit)}: a flip of a token with a larger lead is a seam "
        "bug, and so is a logit that is off by more; any other flip is a near tie. Noise and verdicts come from "
        "different runs, as every flip of a run is within reach of its own noise."
    )
    columns = {"verdict": str, "runs": lambda kind: str(sum(one.kind == kind for one in record.judged))}
    return TitledTable("Near tie or seam bug", text, columns, KINDS)


def controls(record: PlacementRecord) -> TitledTable:
    """Whether the classifier is right where the answer is known."""
    text = (
        "A control passes when a token flipped in at least one of its runs, and every run with a flip was judged as it "
        "should be."
    )
    columns = {
        "what was made": lambda one: CONTROLS[one.name],
        "has to be": cols.text("expected"),
        "runs": cols.number("runs"),
        "with a flip": cols.number("flipped"),
        "judged so": cols.number("right"),
        "largest lead of a flip": cols.number("lead"),
        "control": lambda one: "passed" if one.passed else "**not passed**",
    }
    return TitledTable("Controls", text, columns, record.controls)
