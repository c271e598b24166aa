"""REPORT.md: templates over what was read, reproduced and estimated. No numeral is typed into a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.output import format as fmt
from kvlab.output.rendering import environment, listing, tidy
from kvlab.stats.bootstrap import FEWEST_FOR_BCA
from kvlab_pipeline.rendering.parts import needing, resolution
from validation.published import phases, rank, tables
from validation.published.families import READ, REFUSED, UNKNOWN, SourceFile
from validation.published.mismatch import DIFFERS, NOT_RECORDED, GroupComparison, comparisons, indistinct
from validation.published.own import answer
from validation.published.reanalyse import BOOTSTRAP, CellDifference, Figures, copies, differences, figures
from validation.published.rows import Check, PublishedCell
from validation.published.tables import Numbers, code, plain, points, printed
from validation.published.verdicts import RULES

TEMPLATES = Path(__file__).parent / "templates"
MOST_DIFFERENCES = 15  # rows of differences printed; all of them are in differences.csv
MOST_WRONG = 20


@dataclass(frozen=True)
class Study:
    """The folder, read and estimated."""

    sources: list[SourceFile]
    cells: list[PublishedCell]
    checks: list[Check]
    figures: list[Figures]
    differences: list[CellDifference]
    comparisons: list[GroupComparison]

    @classmethod
    def of(cls, sources: list[SourceFile]) -> Study:
        """Everything that the sources allow."""
        cells = [cell for source in sources for cell in source.contents.cells]
        checks = [check for source in sources for check in source.contents.checks]
        rows = [figures(cell) for cell in cells]
        return cls(sources, cells, checks, rows, differences(cells), comparisons(cells))

    def gathered(self, what: str) -> list:
        """``layers``, ``errors``, ``grids`` or ``sigmas`` of all files."""
        return [one for source in self.sources for one in getattr(source.contents, what)]

    def with_role(self, *roles: str) -> list[Figures]:
        """Figures of the cells in a role."""
        return [row for row in self.figures if row.cell.role in roles]


def render(study: Study, metrics: dict | None) -> str:
    """The whole report as Markdown."""
    return tidy(environment(TEMPLATES).get_template("report.md.j2").render(context(study, metrics)))


def context(study: Study, metrics: dict | None) -> dict:
    """Everything that the templates name, as text."""
    numbers = Numbers(study.sources)
    return {
        "files": tables.files(study.sources),
        "counts": counts(study),
        "reproduced": reproduced(study, numbers),
        "mismatch": [mismatch(one, numbers) for one in study.comparisons],
        "indistinct": [listing([numbers.cell(cell) for cell in group]) for group in indistinct(study.cells)],
        "cells": cells(study, numbers),
        "differences": difference_context(study, numbers),
        "ranks": [rank_context(one, numbers) for one in rank.ranks(study.cells, study.gathered("sigmas"))],
        **phase_context(study, numbers),
        "open": open_questions(study, numbers),
        "own": answer(metrics, study.figures, numbers),
        "level": fmt.percent(BOOTSTRAP.confidence),
        "resamples": fmt.number(BOOTSTRAP.resamples),
        "fewest": fmt.number(FEWEST_FOR_BCA),
        "rule": {
            name: [
                {"word": word, "change": fmt.percent(change), "top1": fmt.percent(top1)} for word, change, top1 in rule
            ]
            for name, rule in RULES.items()
        },
    }


def counts(study: Study) -> dict:
    """How many files were read, and what became of the others."""
    status = [source.status for source in study.sources]
    return {
        "read": fmt.number(status.count(READ)),
        "unknown": [code(one.file) for one in study.sources if one.status == UNKNOWN],
        "refused": [code(one.file) for one in study.sources if one.status == REFUSED],
        "cells": fmt.number(len(study.cells)),
        "windows": fmt.span(len(cell.windows) for cell in study.cells) if study.cells else "",
    }


def reproduced(study: Study, numbers: Numbers) -> dict:
    """How many of the files' own numbers their rows give."""
    wrong = [one for one in study.checks if not one.agrees]
    return {
        "checked": fmt.number(len(study.checks)),
        "agree": fmt.number(len(study.checks) - len(wrong)),
        "all": not wrong,
        "any": bool(study.checks),
        "printed": fmt.number(sum(one.printed for one in study.checks)),
        "wrong": tables.wrong(wrong, numbers, MOST_WRONG) if wrong else None,
        "more": fmt.number(len(wrong) - MOST_WRONG) if len(wrong) > MOST_WRONG else None,
    }


def mismatch(one: GroupComparison, numbers: Numbers) -> dict:
    """Two sides of a comparison in words."""
    crosses = [name for name in ("engine", "protocol") if getattr(one.a, name) != getattr(one.b, name)]
    return {
        "claim": plain(one.claim),
        "a": tables.side(one.a),
        "b": tables.side(one.b),
        "cells": [numbers.cell(cell) for side in (one.a, one.b) for cell in side.cells],
        "crosses": listing(crosses) if crosses else "nothing",
        "differs": [difference_in_words(field, one) for field in one.named(DIFFERS)],
        "unrecorded": [code(field.name) for field in one.named(NOT_RECORDED)],
        "table": tables.fields(one),
    }


def difference_in_words(field, comparison: GroupComparison) -> str:
    """``name`` (value against value)."""
    values = [tables.values(field, which, comparison) for which in (0, 1)]
    return f"{code(field.name)} ({values[0]} against {values[1]})"


def cells(study: Study, numbers: Numbers) -> dict:
    """The tables of codec cells, channels and divergences."""
    coded = study.with_role("codec", "identity")
    whole = [row for row in coded if not row.cell.claim.startswith("channel ")]
    channel = [row for row in coded if row.cell.claim.startswith("channel ") and row.cell.role == "codec"]
    return {
        "whole": tables.cells(whole, numbers) if whole else None,
        "channels": tables.channels(channel, numbers) if channel else None,
        "kl": tables.divergences(study.figures, numbers),
        "copies": [listing([numbers.cell(cell) for cell in group]) for group in copies(study.cells)],
        "few": any(1 < row.n_windows < FEWEST_FOR_BCA for row in coded),
        "bytes": [
            f"{numbers.cell(row.cell)}: {fmt.number(row.coded_bytes / 1e6, 4)} MB"
            for row in coded
            if row.coded_bytes is not None
        ],
    }


def difference_context(study: Study, numbers: Numbers) -> dict:
    """Differences, those that cross engine or protocol first."""
    ordered = sorted(study.differences, key=lambda one: not one.crosses)
    crossing = [one for one in ordered if one.crosses]
    return {
        "table": tables.differences(ordered[:MOST_DIFFERENCES], numbers) if ordered else None,
        "total": fmt.number(len(ordered)),
        "more": fmt.number(len(ordered) - MOST_DIFFERENCES) if len(ordered) > MOST_DIFFERENCES else None,
        "open": fmt.number(sum(fmt.contains_zero(one.change.to_json()) for one in ordered)),
        "open_top1": fmt.number(sum(fmt.contains_zero(one.top1.to_json()) for one in ordered if one.top1)),
        "by_number": any(not one.same_text for one in crossing),
    }


def rank_context(one: rank.EstimatedRank, numbers: Numbers) -> dict:
    """An estimated rank in words."""
    blocks = [size / 1e3 for size in one.bytes_per_block]
    return {
        "cell": numbers.cell(one.cell),
        "ranks": fmt.span(one.ranks),
        "full": fmt.number(one.full),
        "kilobytes": f"{fmt.number(min(blocks), 3)} to {fmt.number(max(blocks), 3)}",
        "ratio": tables.value(one.cell.facts.variance_ratio) if one.cell.facts.variance_ratio is not None else None,
    }


# -------------------------------------------------------------------------------------------- phases


def phase_context(study: Study, numbers: Numbers) -> dict:
    """Engines, noise, layers, codec error, grids and Sigma_q."""
    engines, noise = study.with_role("engine"), study.with_role("noise")
    slopes = phases.slopes(study.cells)
    gaps = phases.engine_differences(study.cells)
    return {
        "engines": tables.engines(engines, numbers) if engines else None,
        "noise": tables.noise(noise, numbers) if noise else None,
        "slopes": tables.slopes(slopes, numbers) if slopes else None,
        "noise_gaps": tables.noise_gaps(gaps, numbers) if gaps else None,
        "saturation": fmt.plain(phases.SATURATION),
        "layers": [layer_context(one, study, numbers) for one in study.gathered("layers")],
        "errors": [tables.layer_errors(one, numbers) for one in study.gathered("errors")],
        "grids": [grid_context(one) for one in study.gathered("grids")],
        "sigmas": [sigma_context(one) for one in study.gathered("sigmas")],
    }


def layer_context(layers, study: Study, numbers: Numbers) -> dict:
    """Single layers: sums where a boundary set is known."""
    row = phases.layer_sums(layers, study.cells)
    known = row.boundary is not None
    return {
        "file": code(layers.file),
        "n_layers": fmt.number(len(layers.effects)),
        "windows": fmt.number(layers.n_windows),
        "table": tables.layer_sums(row) if known else None,
        "boundary_from": code(row.boundary_file) if row.boundary_file else None,
        "whole": numbers.cell(row.whole) if known and row.whole else None,
        "whole_change": points(row.whole_change) if known and row.whole_change else None,
        "hidden": known and row.whole_change is not None and hides(row),
        "top1_lost": printed(row.top1_lost, signed=False) if known and row.top1_lost is not None else None,
    }


def hides(row: phases.LayerSums) -> bool:
    """Whether the interval of the whole, with that of the sum, reaches past the interaction.

    The half-widths are combined as independent, root of the sum of squares.
    """
    joint = (row.whole_change.resolvable**2 + (row.half_width or 0.0) ** 2) ** 0.5
    return abs(row.interaction) <= joint


def grid_context(grid) -> dict:
    """A grid, and how strong its variance_ratio is."""
    rows = phases.knobs(grid)
    return {
        "file": code(grid.file),
        "model": plain(grid.model),
        "n_rows": fmt.number(len(grid.rows)),
        "table": tables.knobs(rows) if rows else None,
        "worse": any(row.mean_high > row.mean_low for row in rows),
    }


def sigma_context(sigma) -> dict:
    """A Sigma_q sidecar."""
    spreads = phases.sigma_spreads(sigma)
    lines = [[name, *(fmt.number(float(value), 4) for value in given)] for name, given in spreads.items()]
    return {
        "file": code(sigma.file),
        "table": fmt.table(["over layers and heads", "smallest", "median", "largest"], lines) if lines else None,
    }


# ------------------------------------------------------------------------------- what remains open


def open_questions(study: Study, numbers: Numbers) -> list[str]:
    """What the files do not settle; every line comes from an interval or a field that is not there."""
    lines = [confounded(one) for one in study.comparisons if one.named(DIFFERS)]
    lines += [unknown(one) for one in study.comparisons if one.named(NOT_RECORDED)]
    lines += [undecided(one, numbers) for one in closest(study.differences)]
    lines += [streams_line(one, numbers) for one in study.differences if not one.crosses]
    lines += [own_sign(study)]
    for one in study.gathered("layers"):
        lines += layer_lines(phases.layer_sums(one, study.cells), code(one.file))
    lines += [noise_line(study)]
    lines += [bootstrap_line(study)]
    return [line for line in lines if line]


def confounded(one: GroupComparison) -> str:
    """Two sides that differ in more than what they compare."""
    named = listing([difference_in_words(field, one) for field in one.named(DIFFERS)])
    return (
        f"What {tables.side(one.b)} costs more than {tables.side(one.a)} ({plain(one.claim)}) cannot be put down to "
        f"engine or protocol: the sides also differ in {named}."
    )


def unknown(one: GroupComparison) -> str:
    """Fields that one side never records."""
    named = listing([code(field.name) for field in one.named(NOT_RECORDED)])
    return (
        f"Whether {tables.side(one.a)} and {tables.side(one.b)} ({plain(one.claim)}) agree in {named}: "
        "at least one side does not record it."
    )


def closest(rows: Sequence[CellDifference]) -> list[CellDifference]:
    """The differences that cross engine or protocol and are not told from zero, at most one table's worth."""
    return [one for one in rows if one.crosses and fmt.contains_zero(one.change.to_json())][:MOST_DIFFERENCES]


def undecided(one: CellDifference, numbers: Numbers) -> str:
    """A difference whose interval holds zero."""
    found = resolution(one.change.to_json())
    return (
        f"Whether {numbers.cell(one.b)} costs more than {numbers.cell(one.a)}: {points(one.change)} points over "
        f"{found['windows']} windows ({needing(found['needed'])}).{other_ways(one)}"
    )


def other_ways(one: CellDifference) -> str:
    """What the same two cells do differ in, where their mean changes do not."""
    units = {"delta_nll": (one.delta_nll, 1.0, "nats per token"), "top-1 agreement": (one.top1, 100.0, "points")}
    clear = [
        f"{name} ({points(given, scale)} {unit})"
        for name, (given, scale, unit) in units.items()
        if given and not fmt.contains_zero(given.to_json())
    ]
    return f" They do differ in {listing(clear)}." if clear else ""


def streams_line(one: CellDifference, numbers: Numbers) -> str | None:
    """Which of K and V costs more."""
    if {one.a.facts.stream, one.b.facts.stream} != {"k", "v"} or not fmt.contains_zero(one.change.to_json()):
        return None
    return (
        f"Which of K and V carries more of the cost: {numbers.cell(one.b)} minus {numbers.cell(one.a)} is "
        f"{points(one.change)} points.{other_ways(one)}"
    )


def own_sign(study: Study) -> str | None:
    """Cells whose own cost is not told from zero."""
    coded = [row for row in study.with_role("codec") if row.change_t and row.n_windows < FEWEST_FOR_BCA]
    vague = [row for row in coded if fmt.contains_zero(row.change_t.to_json())]
    if not vague:
        return None
    return (
        f"Whether perplexity rises at all, by the published estimator, in {fmt.number(len(vague))} of "
        f"{fmt.number(len(coded))} codec cells of fewer than {fmt.number(FEWEST_FOR_BCA)} windows: the t interval "
        "holds zero."
    )


def layer_lines(row: phases.LayerSums, name: str) -> list[str]:
    """Sums over layers."""
    if row.boundary is None:
        return [f"Sums over boundary and other layers of {name}: no cell in the folder records the boundary set."]
    lines = []
    if row.half_width is not None and abs(row.other_sum) <= row.half_width:
        lines.append(
            f"Whether the layers outside the boundary cost anything together ({name}): their sum is "
            f"{printed(row.other_sum)} points; the scatter between them alone makes it uncertain by "
            f"{printed(row.half_width, signed=False)}. The passages of each layer are not in the file, so its own "
            "noise cannot be had."
        )
    if row.whole_change is not None and hides(row):
        lines.append(
            f"Whether damage compounds across layers ({name}): together minus sum is {printed(row.interaction)} "
            f"points, the cell that codes them together has {points(row.whole_change)} %."
        )
    return lines


def noise_line(study: Study) -> str | None:
    """Engines under equal noise."""
    gaps = phases.engine_differences(study.cells)
    vague = [size for size, _, _, gap in gaps if fmt.contains_zero(gap.to_json())]
    if not vague:
        return None
    return (
        f"Whether one engine minds noise more than the other: the difference in `delta_nll` holds zero at "
        f"{fmt.number(len(vague))} of {fmt.number(len(gaps))} sizes."
    )


def bootstrap_line(study: Study) -> str | None:
    """Bootstraps over too few windows."""
    few = [row for row in study.figures if row.change_bootstrap and row.n_windows < FEWEST_FOR_BCA]
    if not few:
        return None
    windows = fmt.span(row.n_windows for row in few)
    return (
        f"Anything from the bootstrap intervals of {fmt.number(len(few))} cells: over {windows} windows a bootstrap "
        "is too narrow, whatever its kind. Read the t intervals there."
    )
