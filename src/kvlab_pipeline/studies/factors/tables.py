"""Tables of a gap between two corners and its shares, from ``gap`` and ``factors`` of ``metrics.json``."""

from __future__ import annotations

from kvlab.core.errors import Fault
from kvlab.output import format as fmt
from kvlab.output.markdown import code
from kvlab_pipeline.pages.basis import Basis
from kvlab_pipeline.pages.parts import KL_UNIT, reading, resolution
from kvlab_pipeline.pages.withheld import settling, undecided

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
        raise Fault(f"the shares add up to {total!r} and the corners differ by {corners!r}, the gap is {gap!r}")


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
    names = list(measures)
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
