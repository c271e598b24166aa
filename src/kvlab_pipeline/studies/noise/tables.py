"""Tables of the noise study, from ``noise``, ``noise_slope``, ``closure`` and ``structure`` of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import KL_UNIT, reading, resolution

GROUPS = {"all": "all layers", "coded": "coded layers", "boundary": "boundary layers"}
WHERE = {"in_forward": "as they are computed", "snapshot": "in the finished clean cache"}
STREAMS = {"k": "K", "v": "V", "kv": "K and V"}


def by_engine(rows: list[dict]) -> list[dict]:
    """One table per engine: ``[{"engine", "table"}]``."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    return [{"engine": name, "table": noise([row for row in rows if row["engine"] == name])} for name in engines]


def noise(rows: list[dict]) -> str:
    """One line per size of noise, a column per stream and layer group."""
    found = {(row["sigma"], row["stream"], row["group"]): row["kl"] for row in rows}
    columns = list(dict.fromkeys((row["stream"], row["group"]) for row in rows))
    lines = [
        [fmt.plain(sigma), *(fmt.estimate(found.get((sigma, *column))) for column in columns)]
        for sigma in sorted({row["sigma"] for row in rows})
    ]
    return fmt.table(["noise", *(f"{stream.upper()}, {GROUPS[group]}" for stream, group in columns)], lines)


def slopes(rows: list[dict]) -> str:
    """The exponent with which KL grows, and the coefficient of the square."""
    lines = [
        [
            f"`{row['engine']}`",
            row["stream"].upper(),
            GROUPS[row["group"]],
            fmt.estimate(row["slope"]),
            " to ".join(map(fmt.plain, row["range"])) if row["range"] else fmt.DASH,
            fmt.estimate(row["coefficient"]),
        ]
        for row in rows
    ]
    headers = ["engine", "stream", "noise on", "slope", "fitted over noise of", f"c of KL = c noise², {KL_UNIT}"]
    return fmt.table(headers, lines)


def closure(rows: list[dict]) -> str | None:
    """A dtype's rounding of K and V: predicted from the curve, and measured."""
    lines = [
        [
            f"`{row['engine']}`",
            STREAMS[row["stream"]],
            fmt.estimate(row["predicted"]),
            fmt.estimate(row["measured"]),
            fmt.estimate(row["ratio"]),
            "yes" if row["in_range"] else "no",
            row["reading"],
        ]
        for row in rows
        if row["against"] == "cast"
    ]
    headers = ["engine", "rounded", f"predicted KL, {KL_UNIT}", f"measured KL, {KL_UNIT}", "measured / predicted"]
    return fmt.table([*headers, "inside the fitted range", "does it close?"], lines) if lines else None


def explained(rows: list[dict]) -> str | None:
    """An engine's own run in the dtype: how much of its KL the rounding of K and V is."""
    lines = [
        [
            f"`{row['against']}`",
            fmt.estimate(row["measured"]),
            fmt.estimate(row["predicted"]),
            fmt.estimate(row["share"], 100),
            fmt.estimate(row["cast_share"], 100),
        ]
        for row in rows
        if row["against"] != "cast"
    ]
    headers = ["run", f"its KL, {KL_UNIT}", f"predicted of K and V, {KL_UNIT}", "share by the curve, %"]
    return fmt.table([*headers, "share by rounding them, %"], lines) if lines else None


def structure(rows: list[dict]) -> str | None:
    """The codec's error against one of the same size and random direction."""
    lines = [
        [
            f"`{row['engine']}`",
            STREAMS[row["stream"]],
            *(fmt.estimate(row[key]) for key in ("codec", "isotropic", "ratio")),
            ratio_reading(row["ratio"]),
        ]
        for row in rows
    ]
    headers = ["engine", "stream", f"codec's KL, {KL_UNIT}", f"random direction's KL, {KL_UNIT}", "ratio", "beside one"]
    return fmt.table(headers, lines) if lines else None


def ratio_reading(given: dict | None) -> str:
    """The last column of a table of ratios: whether it is told from 1."""
    if given is None:
        return "no ratio: the random direction costs nothing"
    found = resolution(given | {end: given[end] - 1 for end in ("value", "low", "high")})
    return "clear of one" if found["resolved"] else reading(found)


def context(metrics: dict, basis: Callable[[list[dict]], str]) -> dict | None:
    """Everything that ``noise.md.j2`` names under ``noise``; None when the study was not run.

    Parameters
    ----------
    metrics : dict
    basis : callable
        From Estimates to the line under their table.
    """
    rows = metrics.get("noise")
    if not rows:
        return None
    fitted, closing, structured = (metrics.get(name) or [] for name in ("noise_slope", "closure", "structure"))
    casts = [row for row in closing if row["against"] == "cast"]
    runs = [row for row in closing if row["against"] != "cast"]
    return {
        "protocol": rows[0]["protocol"],
        "where": WHERE[rows[0]["protocol"]],
        "groups": by_engine(rows),
        "basis": basis([row["kl"] for row in rows]),
        "slopes": slopes(fitted) if fitted else None,
        "closure": closure(closing),
        "closure_basis": basis([row["measured"] for row in casts]),
        "dtype": casts[0]["dtype"] if casts else None,
        "sigma": fmt.number(casts[0]["sigma"]) if casts else None,
        "factor": fmt.plain(casts[0]["factor"]) if casts else None,
        "explained": explained(closing),
        "explained_basis": basis([row["measured"] for row in runs]),
        "structure": structure(structured),
        "structure_basis": basis([row["codec"] for row in structured]),
    }
