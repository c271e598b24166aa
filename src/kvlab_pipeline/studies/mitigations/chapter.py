"""Ways to spend bytes in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import INK, Axis, Figure, LegendKey, Line, Look, Panel, colour_of, log_axis
from kvlab_pipeline.rendering.parts import KL_UNIT, not_resolved
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.mitigations.numbers import PARTS, mitigation_entries
from kvlab_pipeline.studies.mitigations.plan import read_choice

# KL against bytes: uniform spending as a curve, and what favouring layers makes of as many.

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
    keys = [LegendKey(one, line=Line((), (), colour_of(one), 2.0)) for one in engines if len(engines) > 1]
    keys += [LegendKey(MARKS[kind][1], look(kind, INK)) for kind in kinds]
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
        for line in mine:
            arm = look(line["kind"], colour_of(engine), scale)
            drawn.append(marks.mark(line, line["bits_per_value"], words(line), arm))
        curve = [line for line in mine if line["kind"] == "uniform" and line["value"] > 0]
        curve.sort(key=lambda line: line["bits_per_value"])
        ends = (tuple(line[key] for line in curve) for key in ("bits_per_value", "value"))
        curves.append(Line(*ends, colour_of(engine), 1.6 * scale))
    return Panel(places, values, tuple(drawn), tuple(curves), title=title)


def look(kind: str, colour: str, scale: float = 1.0) -> Look:
    """An arm's mark."""
    return Look(colour, MARKS[kind][0], scale * (0.75 if kind == "uniform" else 1.1), open=kind.startswith("klt"))


def smaller(engines: list[str], engine: str) -> float:
    """By how much an engine's marks are scaled: each engine's are drawn over the last one's, which stay seen."""
    return (1.5, 0.9, 0.6)[min(engines.index(engine), 2)] if len(engines) > 1 else 1.0


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


def entries(measured: ChapterInputs) -> dict:
    """Its part of ``metrics.json``."""
    choice = read_choice(measured.sources.choice)
    return {"mitigations": mitigation_entries(measured.params, measured.results, measured.boot, choice)}


def claimed(metrics: dict) -> list[dict]:
    """One claim for each way to spend that is another cell than its rival."""
    left_uncoded = (metrics.get("settings") or {}).get("codec", {}).get("boundary_layers", ())
    return claims(metrics.get("mitigations"), len(left_uncoded))


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of favouring layers."""
    compared = (metrics.get("mitigations") or {}).get("comparisons") or []
    return [("ways to spend bytes, KL", [row["difference"] for row in compared if not row["same"]])]


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={"mitigations": PageSection(100, "Where bytes are best spent", asks="ways to spend bytes")},
    context=lambda metrics, basis: {"mitigations": mitigations_context(metrics, basis)},
    claims=claimed,
    figures={"mitigations": Drawn(mitigations_table, mitigations)},
    limits=limits,
)


# Where bytes are better spent, from the part ``mitigations`` of ``metrics.json``.

UNIT = "times that of uniform spending"
SUBJECTS = {
    "moved": "Leaving another set of layers uncoded, {many} `params.yaml` names: {layers}",
    "greedy": "Leaving the layers uncoded that a greedy search finds: {layers}",
    "extended": "Leaving more layers uncoded: {layers}",
    "hot": "One bit more for K on {layers}",
    "klt boundary": "`klt` with uncoded layers: {layers}",
    "klt hot": "`klt` with one bit more for K on {layers}",
}


def claims(mitigations: dict | None, before: int) -> list[dict]:
    """One claim for each arm of an engine and protocol that is another cell than its rival and than another arm.

    Parameters
    ----------
    mitigations : dict or None
    before : int
        How many layers params.yaml leaves uncoded.
    """
    found, claimed = [], set()
    for row in (mitigations or {}).get("comparisons") or []:
        arm = row["engine"], row["protocol"], row["compared"][0][0]["cell_id"]
        if row["same"] or arm in claimed:
            continue
        claimed.add(arm)
        subject = f"{arm_words(row['arm'], row['layers'], before)} (`{row['engine']}`, `{row['protocol']}`)"
        subject += f", {against_words(row)}"
        found.append(claim("mitigations", subject, row["ratio"], row["compared"], null=1.0, unit=UNIT))
    return found


def arm_words(name: str, layers: Sequence[int], before: int) -> str:
    """What an arm does to its layers; a search may have found fewer than params.yaml names."""
    many = "as many as" if len(layers) == before else "fewer than" if len(layers) < before else "more than"
    return SUBJECTS[name].format(layers=layer_words(layers), many=many)


def layer_words(layers: Sequence[int]) -> str:
    """Layers in words."""
    if not layers:
        return "no layer"
    *head, last = map(str, layers)
    return f"layers {', '.join(head)} and {last}" if head else f"layer {last}"


def against_words(row: dict) -> str:
    """What an arm is held against, and how their bytes compare."""
    if row["beyond"] is None:
        return "against uniform spending of as many bytes,"
    than = {"above": "fewer", "below": "more"}[row["beyond"]]
    return f"against `{row['against']}`, which takes {than} bytes,"


# Tables of the mitigations, from the part ``mitigations`` of ``metrics.json``.

WORDS = {
    "moved": "boundary layers, found from none, no more than before",
    "greedy": "boundary layers, found from none",
    "extended": "boundary layers, extended",
    "hot": "one bit more for K",
    "klt boundary": "`klt`: uncoded layers",
    "klt hot": "`klt`: one bit more for K",
}


def arm(row: dict) -> str:
    """What an arm does, in words; a uniform one by its name."""
    return WORDS.get(row["arm"], row["arm"])


def layers(numbers: list[int]) -> str:
    """Favoured layers; a dash for none."""
    return ", ".join(map(str, numbers)) or fmt.DASH


def favoured(row: dict) -> str:
    """The layers of a row."""
    return layers(row["layers"])


def chosen(rows: list[dict]) -> str:
    """What each search chose, and its drop in KL on the split that chose it and on the other one."""
    columns = {
        "way to spend": arm,
        "layers": favoured,
        "KL saved on the calibration split, %": lambda row: fmt.number(100 * row["calib"]),
        "on the test split, %": tables.percent("test"),
    }
    return tables.table(rows, columns)


def path(steps: list[dict]) -> str:
    """A greedy search step by step, from the top."""
    lines = [["none yet", fmt.number(steps[0]["kl"]), fmt.number(steps[0]["bits_per_value"], 4)]]
    for before, after in pairwise(steps):
        new = sorted(set(after["layers"]) - set(before["layers"]))
        lines.append([f"layer {layers(new)}", fmt.number(after["kl"]), fmt.number(after["bits_per_value"], 4)])
    headers = ["left uncoded", f"KL on the calibration split, {KL_UNIT}", "bits per value"]
    return fmt.table(headers, lines)


def by_place(rows: list[dict], table: Callable[[list[dict]], str]) -> list[dict]:
    """One table per engine and protocol: ``engine``, ``protocol``, ``table``."""
    places = dict.fromkeys((row["engine"], row["protocol"]) for row in rows)
    return [
        {
            "engine": engine,
            "protocol": protocol,
            "table": table([row for row in rows if (row["engine"], row["protocol"]) == (engine, protocol)]),
        }
        for engine, protocol in places
    ]


def comparisons(rows: list[dict]) -> str:
    """Every favouring arm against uniform spending."""
    columns = {
        "way to spend": arm,
        "layers": favoured,
        "bits per value": tables.number("bits_per_value", 4),
        "against": against,
        "KL, times the other's": tables.estimate("ratio"),
        f"KL minus the other's, {KL_UNIT}": tables.estimate("difference", signed=True),
        "reading": verdict,
    }
    return tables.table(rows, columns)


def against(row: dict) -> str:
    """What an arm is held against; its bytes where they are others."""
    if row["beyond"] is None:
        return row["against"]
    return f"{row['against']}, at {fmt.number(row['against_bits_per_value'], 4)} bits per value"


def verdict(row: dict) -> str:
    """Whether an arm is better or worse than uniform spending, and with more bytes or fewer."""
    if row["same"]:
        return "one and the same cell"
    ratio, needed = row["ratio"], row["windows_needed"]
    if not ratio["low"] <= 1 <= ratio["high"]:
        said = "better" if ratio["value"] < 1 else "worse"
    else:
        count = None if needed is None or needed >= fmt.OUT_OF_REACH else fmt.whole(needed)
        said = not_resolved(fmt.largest(ratio, 1.0, 100), count, " %")
    return said + {None: "", "above": "; takes more bytes", "below": "; takes fewer bytes"}[row["beyond"]]


def arms(rows: list[dict]) -> str:
    """What every arm costs."""
    columns = {
        "way to spend": arm,
        "layers": favoured,
        "bits per value": tables.number("bits_per_value", 4),
        f"net KL, {KL_UNIT}": tables.estimate("kl_net"),
        f"`delta_nll`, {KL_UNIT}": tables.estimate("delta_nll", signed=True),
    }
    return tables.table(rows, columns)


def mitigations_context(metrics: dict, basis: Basis) -> dict | None:
    """What ``mitigations.md.j2`` names under ``mitigations``; None when the study was not run."""
    found = metrics.get("mitigations")
    if not found:
        return None
    choice, rows = found["choice"], found["comparisons"]
    judged = [row["test"] for row in found["generalises"] if row["test"]]
    return {
        "choice": {key: choice[key] for key in ("engine", "dtype", "protocol")},
        "windows": fmt.number(choice["windows"]),
        "budget": fmt.plain(choice["budget"]),
        "chosen": chosen(found["generalises"]),
        "judged": bool(judged),
        "greedy": path([step for step in choice["searches"] if step["search"] == "greedy"]),
        "comparisons": by_place(rows, comparisons),
        "beyond": any(row["beyond"] == "above" for row in rows),
        "basis": basis([row["difference"] for row in rows if not row["same"]]),
        "arms": by_place(found["arms"], arms),
        "arms_basis": basis([row["kl_net"] for row in found["arms"]]),
    }
