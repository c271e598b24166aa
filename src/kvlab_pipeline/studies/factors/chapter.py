"""The decomposition in the report: the published gap, and all factors at once."""

from __future__ import annotations

import polars as pl

from kvlab.core.errors import Fault
from kvlab.output import format as fmt
from kvlab.output.markdown import code
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import DOWN, GREY, UP, Figure, Line, Look, Mark, Panel, linear_axis, named_axis
from kvlab_pipeline.rendering.parts import KL_UNIT, reading, resolution
from kvlab_pipeline.rendering.withheld import settling, undecided
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.factors.numbers import PARTS, factors_entry, gap_entry, text_entries

# Tables of a gap between two corners and its shares, from ``gap`` and ``factors`` of ``metrics.json``.

ENGINE = "engine"
FACTORS = ("engine", "protocol", "dtype", "variance_ratio", "origin")  # in the order in which a corner names them


def corner(values: dict) -> str:
    """A corner in words: settings by their value, ratios and the calibration's origin by their name too."""
    return ", ".join(
        f"`{name}` {fmt.plain(value) if isinstance(value, float | int) else f'`{value}`'}"
        if isinstance(value, float | int) or name == "origin"
        else f"`{value}`"
        for name, value in ((name, values[name]) for name in FACTORS if name in values)
    )


def shares(measure: dict, held: bool = False) -> list[dict]:
    """Each factor's share, largest first, printed with one number of decimals.

    `held`: whether the engines agree is open, so the engine's share is not read.

    Returns
    -------
    list of dict
        ``factor``, ``share`` (text), ``of_gap`` (text, a dash unless the gap is clear of zero),
        ``resolved``, ``needed`` (windows as text, or None), ``windows``.

    Raises
    ------
    Fault
        When the shares do not add up to the gap, or the gap is not high minus low.
    """
    reconcile(measure)
    parts = sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"]))
    texts = fmt.column([*(part["share"] for part in parts), measure["gap"]])
    return [
        resolution(part["share"], held and part["factor"] == ENGINE)
        | {"factor": part["factor"], "share": text, "of_gap": of_gap(part["share"], measure["gap"])}
        for part, text in zip(parts, texts[:-1], strict=True)
    ]


def reconcile(measure: dict) -> None:
    """Refuse a decomposition whose parts are not the whole."""
    gap = measure["gap"]["value"]
    total = sum(part["share"]["value"] for part in measure["parts"])
    corners = measure["high"]["value"] - measure["low"]["value"]
    largest = max(abs(measure[name]["value"]) for name in ("low", "high", "gap"))
    allowed = 1e-9 * max(largest, *(abs(part["share"]["value"]) for part in measure["parts"]))
    if abs(total - gap) > allowed or abs(corners - gap) > allowed:
        raise Fault(
            f"the shares add up to {total!r} and the corners differ by {corners!r}, the gap is {gap!r}",
            code="fault.shares",
        )


def of_gap(share: dict, gap: dict) -> str:
    """A share in per cent of the gap; a dash when the gap itself is not told from zero."""
    if fmt.contains_zero(gap):
        return fmt.DASH
    decimals = min(1, fmt.places(100 * fmt.half_width(share) / abs(gap["value"])))
    return fmt.percent(share["value"] / gap["value"], decimals)


def decomposition(measure: dict, unit: str, held: bool = False) -> str:
    """Factors, their shares, and the sum, which is the gap; `held` as in `shares`."""
    lines = [[f"`{part['factor']}`", part["share"], part["of_gap"], reading(part)] for part in shares(measure, held)]
    texts = fmt.column([*(part["share"] for part in measure["parts"]), measure["gap"]])
    lines.append(["**sum = gap**", f"**{texts[-1]}**", "all", reading(resolution(measure["gap"]))])
    return fmt.table(["factor", f"share, {unit}", "of the gap", "reading"], lines)


def interactions(measure: dict, unit: str, held: bool = False) -> str:
    """What two factors do together beyond the sum of what each does alone; `held` as in `shares`."""
    texts = fmt.column([row["effect"] for row in measure["interactions"]])
    lines = [
        [
            " with ".join(f"`{name}`" for name in row["factors"]),
            text,
            reading(resolution(row["effect"], held and ENGINE in row["factors"])),
        ]
        for row, text in zip(measure["interactions"], texts, strict=True)
    ]
    return fmt.table(["factors", f"interaction, {unit}", "reading"], lines)


def corners(measures: dict) -> str:
    """Every corner of the factorial with each measure."""
    names = sorted(measures)
    settings = [name for name in FACTORS if name in measures[names[0]]["corners"][0]]
    columns = [fmt.column([row["value"] for row in measures[name]["corners"]]) for name in names]
    lines = [
        [*(fmt.plain(v) if isinstance(v := row[key], float | int) else f"`{v}`" for key in settings), *texts]
        for row, *texts in zip(measures[names[0]]["corners"], *columns, strict=True)
    ]
    headers = [*(f"`{key}`" for key in settings), *(f"`{name}`, {KL_UNIT}" for name in names)]
    return fmt.table(headers, lines)


def gap_context(gap: dict | None, basis: Basis, held: bool = False) -> dict | None:
    """The decomposition: a dict per measure, and the corners in words."""
    if not gap or not gap["factors"] or not gap["measures"]:
        return None
    names = sorted(gap["measures"], key=lambda name: name != "kl")  # the headline's measure first
    return {
        "factors": gap["factors"],
        "crosses": gap["low"]["engine"] != gap["high"]["engine"] and len(gap["factors"]) > 1,
        "measured": ", ".join(f"`{gap[name]}`" for name in ("stream", "dtype") if gap.get(name)),
        "low": f"({corner(gap['low'])})",
        "high": f"({corner(gap['high'])})",
        "measures": {name: measure_context(gap["measures"][name], basis, held) for name in names},
        "corners": corners(gap["measures"]),
    }


def measure_context(measure: dict, basis: Basis, held: bool = False) -> dict:
    """One measure of the decomposition; `held` as in `shares`."""
    return resolution(measure["gap"]) | {
        "gap": fmt.estimate(measure["gap"]),
        "rises": measure["gap"]["value"] > 0,
        "table": decomposition(measure, KL_UNIT, held),
        "basis": basis([measure["gap"], *(part["share"] for part in measure["parts"])]),
        "interactions": interactions(measure, KL_UNIT, held) if measure.get("interactions") else None,
    }


def context(metrics: dict, basis: Basis) -> dict:
    """What ``gap.md.j2`` and ``factors.md.j2`` name."""
    agreement = undecided(metrics)
    divided = {part: gap_context(metrics.get(part), basis, bool(agreement)) for part in ("gap", "factors")}
    divided["kernels"] = kernels(metrics.get("identity") or {}, metrics.get("gap"))
    divided["undecided"] = agreement and settling(agreement)
    return divided | {"gap_by_text": by_text(metrics.get("gap_by_text") or [])}


def kernels(identity: dict, gap: dict | None) -> str:
    """On which device's kernels the engines of a gap ran, from the record; empty where it does not cross engines."""
    if not gap or gap["low"]["engine"] == gap["high"]["engine"] or not identity.get("device"):
        return ""
    device = "CPU" if identity["device"] == "cpu" else f"`{fmt.safe(identity['device'])}`"
    return (
        f"Both engines ran {device} kernels, so the share of `{ENGINE}` is about these and says nothing of what the"
        " engines do on other devices."
    )


TEXTS = {"test": "held out of the calibration's text", "other": "another domain than the calibration's"}


def by_text(entries: list[dict]) -> str | None:
    """Each text with its corners, its gap and the shares; None where there is one text."""
    lines = [
        [
            code(entry["source"]),
            TEXTS[entry["text"]],
            *(fmt.estimate(entry[name]) for name in ("low", "high", "gap")),
            *(fmt.estimate(part["share"]) for part in entry["parts"]),
            fmt.number(entry["gap"]["n_windows"]),
        ]
        for entry in entries
    ]
    if not lines:
        return None
    shares = [f"share of `{name}`" for name in entries[0]["factors"]]
    return fmt.table(["text", "which is", "KL of the low corner", "of the high one", "gap", *shares, "windows"], lines)


# How the gap between two corners divides among the factors: a bar per factor, end to end.

HELD = "held"


def gap_shapley_table(metrics: dict) -> pl.DataFrame | None:
    """Low corner, each factor's share, high corner, of KL; `start` is where a bar begins.

    Where it is open whether the engines agree, the share of the engine is of the kind ``held``.
    """
    held = undecided(metrics) is not None
    gap = metrics.get("gap")
    measure = gap and gap["measures"].get("kl")
    if not measure or not measure["parts"]:
        return None
    rows = [bar(corner_name(gap["low"]), "corner", 0.0, measure["low"])]
    start = measure["low"]["value"]
    for part in sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"])):
        kind = HELD if held and part["factor"] == ENGINE else "share"
        rows.append(bar(part["factor"], kind, start, part["share"]))
        start += part["share"]["value"]
    rows.append(bar(corner_name(gap["high"]), "corner", 0.0, measure["high"]))
    return pl.DataFrame(rows)


def gap_shapley(table: pl.DataFrame) -> Figure:
    """From the low corner to the high one, factor by factor, each with its interval."""
    lines = marks.numbered(table)
    texts = fmt.column(lines)
    drawn = tuple(bar_mark(line, text) for line, text in zip(lines, texts, strict=True))
    ends = [line["start"] + line[key] for line in lines for key in ("value", "low", "high")]
    names = named_axis(wrapped(line["name"]) + ("" if clear(line) else f"\n({left_open(line)})") for line in lines)
    values = linear_axis(ends, f"KL to the engine's own uncompressed output, {KL_UNIT}", labelled=True)
    return Figure(
        "How the gap between the two corners divides among the factors",
        "Each factor's bar begins where the last one ended; the thin line is its interval. A hatched bar is not "
        "told from zero, or is laid to the engines while it is open whether they agree. KL is taken to the engine's "
        "own uncompressed output.",
        (Panel(names, values, drawn, connectors(lines), across=True),),
        height=32,
    )


def bar_mark(line: dict, text: str) -> Mark:
    """One bar: grey corners; what adds to the gap in one colour, what takes from it in another."""
    colour = GREY if line["kind"] == "corner" else UP if line["value"] > 0 else DOWN
    look = Look(colour, open=not clear(line), hatched=not clear(line))
    return marks.mark(line, line["row"], words(line), look, bar=0.56, start=line["start"], label=text)


def connectors(lines: list[dict]) -> tuple[Line, ...]:
    """Thin lines that carry each bar's end to the next bar's start."""
    ends = [(line["row"], line["start"] + line["value"]) for line in lines[:-1]]
    return tuple(Line((row + 0.28, row + 0.72), (end, end)) for row, end in ends)


def words(line: dict) -> list[str]:
    """What a bar says."""
    what = "KL of this corner" if line["kind"] == "corner" else "share of the gap"
    left = [] if clear(line) else [left_open(line)]
    return [line["name"], marks.quantity(what, line), *left, marks.basis(line)]


def clear(line: dict) -> bool:
    """Whether a bar is drawn solid."""
    return line["kind"] == "corner" or (line["kind"] != HELD and not fmt.contains_zero(line))


def left_open(line: dict) -> str:
    """Why a bar is not drawn solid."""
    return "engines: open" if line["kind"] == HELD else "not resolved"


def bar(name: str, kind: str, start: float, given: dict) -> dict:
    """One bar of the decomposition; all numbers in nats per token."""
    return {"name": name, "kind": kind, "start": float(start)} | marks.interval(given)


def corner_name(corner: dict) -> str:
    """A corner of the decomposition in words; ratios by their own name."""
    words = [
        f"{key} {fmt.plain(value)}" if isinstance(value, float | int) else str(value) for key, value in corner.items()
    ]
    return ", ".join(words)


def wrapped(name: str) -> str:
    """A corner's long name on two lines."""
    head, comma, tail = name.rpartition(", ")
    return f"{head},\n{tail}" if comma else name


# What the gap and the factors are said to do to KL, from the parts ``gap`` and ``factors`` of ``metrics.json``.

WHERE = {"gap": "between the published corners", "factors": "over the whole factorial"}


def claims(part: dict | None, about: str) -> list[dict]:
    """One claim for a gap and one for each factor's share of it; none where nothing varies.

    Parameters
    ----------
    part : dict or None
        A decomposition.
    about : str
        ``gap`` or ``factors``.
    """
    if not part or not part["factors"]:
        return []
    kl, where, compared = part["measures"]["kl"], WHERE[about], part["compared"]
    found = [claim(about, f"Going from low to high {where}", kl["gap"], compared, of_engine=False)]
    for one in kl["parts"]:
        name = one["factor"]
        subject = f"`{name}` going from `{part['low'][name]}` to `{part['high'][name]}`, its share {where},"
        found.append(claim(about, subject, one["share"], compared, of_engine=name == "engine"))
    return found


WHOSE = {"gap": "of the gap", "factors": "over all factors"}


def entries(measured: ChapterInputs) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {
        "gap": gap_entry(*given),
        "gap_by_text": text_entries(*given),
        "factors": factors_entry(*given),
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The shares and the interactions, measure by measure."""
    found = []
    for part, where in WHOSE.items():
        for name, measure in sorted(((metrics.get(part) or {}).get("measures") or {}).items()):
            found.append((f"shares {where}, `{name}`", [row["share"] for row in measure["parts"]]))
            found.append((f"interactions {where}, `{name}`", [row["effect"] for row in measure["interactions"]]))
    return found


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={
        "gap": PageSection(
            10, "Shares of every factor, corners and interactions", asks="the published gap and its shares"
        ),
        "factors": PageSection(
            20,
            "The same over all factors, number formats and calibrations included",
            asks="every factor at once",
        ),
    },
    context=context,
    claims=lambda metrics: [claim for part in WHOSE for claim in claims(metrics.get(part), part)],
    figures={"gap_shapley": Drawn(gap_shapley_table, gap_shapley)},
    limits=limits,
)
