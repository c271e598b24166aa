"""KL against bytes: uniform spending as a curve, and what favouring layers makes of as many."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import INK, Axis, Figure, Key, Line, Look, Mark, Panel, colour_of, log_axis
from kvlab_pipeline.pages.parts import KL_UNIT

PLACE = ("engine", "protocol", "arm")
# shape and words of each way to spend; those of klt are drawn open
MARKS = {
    "uniform": ("circle", "uniform"),
    "moved": ("square", "other boundary layers"),
    "greedy": ("diamond", "boundary layers from none"),
    "extended": ("triangle", "boundary layers extended"),
    "hot": ("star", "hot layers"),
    "klt uniform": ("circle", "klt, uniform"),
    "klt boundary": ("square", "klt, boundary layers"),
    "klt hot": ("star", "klt, hot layers"),
}


def mitigations_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, protocol and arm: KL, bits per value, the favoured layers; `kind` is a key of `MARKS`."""
    rows = [
        {key: row[key] for key in PLACE}
        | {
            "kind": "uniform" if row["arm"].startswith("uniform") else row["arm"],
            "layers": " ".join(map(str, row["layers"])) or "none",
            "bits_per_value": row["bits_per_value"],
        }
        | marks.interval(row["kl"])
        for row in (metrics.get("mitigations") or {}).get("arms") or []
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def mitigations(table: pl.DataFrame) -> Figure:
    """KL on a logarithmic axis over bits per value, a panel per protocol, engines by colour, arms by shape."""
    lines = marks.numbered(table)
    protocols, engines, kinds = marks.each(lines, "protocol", "engine", "kind")
    low, high = table["bits_per_value"].min(), table["bits_per_value"].max()
    room = 0.06 * (high - low) or 1.0
    places = Axis((low - room, high + room), "bits per value of the whole cache")
    values = log_axis(lines, f"KL, {KL_UNIT} (logarithmic)")
    panels = [
        panel([line for line in lines if line["protocol"] == one], engines, places, values, one) for one in protocols
    ]
    keys = [Key(one, line=Line((), (), colour_of(one), 2.0)) for one in engines if len(engines) > 1]
    keys += [Key(MARKS[kind][1], look(kind, INK)) for kind in kinds]
    return Figure(
        "Where bytes are spent: uniformly (line), or on favoured layers",
        "The line is uniform spending on the studied codec; between its points it is read as it is drawn. "
        "A mark below the line spends its bytes better, one above it worse. Marks of klt are open.",
        tuple(panels),
        columns=len(protocols),
        keys=tuple(keys),
        height=255,
    )


def panel(lines: list[dict], engines: list[str], places: Axis, values: Axis, title: str) -> Panel:
    """One protocol: each engine's curve of uniform spending, and its arms."""
    drawn, curves = [], []
    for engine in engines:
        mine, scale = [line for line in lines if line["engine"] == engine], smaller(engines, engine)
        drawn += [arm_mark(line, scale) for line in mine]
        curve = curve_of([line for line in mine if line["value"] > 0])
        ends = (tuple(line[key] for line in curve) for key in ("bits_per_value", "value"))
        curves.append(Line(*ends, colour_of(engine), 1.6 * scale))
    return Panel(places, values, tuple(drawn), tuple(curves), title=title)


def arm_mark(line: dict, scale: float) -> Mark:
    """One way to spend."""
    return marks.mark(line, line["bits_per_value"], words(line), look(line["kind"], colour_of(line["engine"]), scale))


def look(kind: str, colour: str, scale: float = 1.0) -> Look:
    """An arm's mark."""
    return Look(colour, MARKS[kind][0], scale * (0.75 if kind == "uniform" else 1.1), open=kind.startswith("klt"))


def smaller(engines: list[str], engine: str) -> float:
    """By how much an engine's marks are scaled: each engine's are drawn over the last one's, which stay seen."""
    return (1.5, 0.9, 0.6)[min(engines.index(engine), 2)] if len(engines) > 1 else 1.0


def curve_of(lines: list[dict]) -> list[dict]:
    """The points of uniform spending on the studied codec, fewest bytes first."""
    return sorted((line for line in lines if line["kind"] == "uniform"), key=lambda line: line["bits_per_value"])


def words(line: dict) -> list[str]:
    """What an arm's mark says."""
    favoured = [] if line["layers"] == "none" else [f"layers {line['layers']}"]
    return [
        MARKS[line["kind"]][1] if line["kind"] != "uniform" else line["arm"],
        *favoured,
        f"{line['engine']}, {line['protocol']}",
        f"{fmt.number(line['bits_per_value'], 4)} bits per value",
        marks.quantity("KL", line),
        marks.basis(line),
    ]
