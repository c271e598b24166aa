"""The study of placement as a page prints it. Torch-free."""

from __future__ import annotations

from kvlab.output.format import number, plain
from kvlab_pipeline.studies.placement.record import KINDS, PlacementRecord
from kvlab_pipeline.studies.table import Table

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


def tables(record: PlacementRecord) -> list[Table]:
    """What moved, which rows flipped, what the verdicts were, and the controls."""
    return [moved(record), margins(record), verdicts(record), controls(record)]


def moved(record: PlacementRecord) -> Table:
    """Both ways of reading."""
    settings = record.settings
    text = (
        f"{settings.orders} random orders of {record.blocks} blocks of {settings.chunk_tokens} tokens, shared out "
        f"among {settings.windows} texts; logits after each of {record.context} tokens and after each of "
        f"{settings.decode} decoded ones, {record.dtype}."
    )
    rows = [
        (way, str(found.runs), str(found.differing), number(found.largest))
        for way, found in (("by position", record.logical), ("as the blocks lie", record.slot))
    ]
    header = ("rows are read", "runs", "runs that differ in any bit", "largest difference of a logit")
    return Table("Read by position, and as the blocks lie", text, header, tuple(rows))


def margins(record: PlacementRecord) -> Table:
    """Flips against leads."""
    text = (
        f"Rows of the {len(record.judged)} runs that were judged, read as the blocks lie, by the lead of their most "
        "likely token over the next one in the reference run. A token can flip only where its lead is less than twice "
        f"what logits move by. The smallest lead of any row was {number(record.least_margin)}."
    )
    rows = [
        (
            plain(one.low) if one.high is None else f"{plain(one.low)} to {plain(one.high)}",
            str(one.rows),
            str(one.flips),
        )
        for one in record.margins
    ]
    rows[-1] = (f"{rows[-1][0]} and more", *rows[-1][1:])
    return Table("Flips by the lead of the token", text, ("lead, in logits", "rows", "flips"), tuple(rows))


def verdicts(record: PlacementRecord) -> Table:
    """What the classifier said."""
    text = (
        f"The first {record.calibrated} runs moved logits by {number(record.noise)} at most. The others are judged by "
        f"{plain(record.factor)} times that, {number(record.limit)}: a flip of a token with a larger lead is a seam "
        "bug, and so is a logit that is off by more; any other flip is a near tie. Noise and verdicts come from "
        "different runs, as every flip of a run is within reach of its own noise."
    )
    rows = [(kind, str(sum(one.kind == kind for one in record.judged))) for kind in KINDS]
    return Table("Near tie or seam bug", text, ("verdict", "runs"), tuple(rows))


def controls(record: PlacementRecord) -> Table:
    """Whether the classifier is right where the answer is known."""
    text = (
        "A control passes when a token flipped in at least one of its runs, and every run with a flip was judged as it "
        "should be."
    )
    rows = [
        (
            CONTROLS[one.name],
            one.expected,
            str(one.runs),
            str(one.flipped),
            str(one.right),
            number(one.lead),
            "passed" if one.passed else "**not passed**",
        )
        for one in record.controls
    ]
    header = ("what was made", "has to be", "runs", "with a flip", "judged so", "largest lead of a flip", "control")
    return Table("Controls", text, header, tuple(rows))
