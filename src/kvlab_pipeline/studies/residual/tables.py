"""Tables of the residual study, from the part ``residual`` of ``metrics.json``."""

from __future__ import annotations

from itertools import accumulate, product

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import HELD, not_resolved

LARGER = "larger on `vllm` by, %"
GROUPS = {"coded": "coded layers", "all": "all layers"}


def place(row: dict) -> str:
    """A layer or a group of layers, boundary layers marked."""
    if row["layer"] is None:
        return GROUPS[row["group"]]
    return f"{row['layer']}, boundary" if row["boundary"] else str(row["layer"])


def engines_of(residual: dict) -> list[str]:
    """Those whose capture was coded, in the plan's order."""
    return list(dict.fromkeys(row["engine"] for row in residual["rows"]))


def variance_ratios(residual: dict) -> list[float]:
    """Those that were coded, in the plan's order."""
    return list(dict.fromkeys(row["variance_ratio"] for row in residual["rows"]))


def errors(residual: dict) -> list[dict]:
    """Error, rank, outliers and bytes: one table per engine and variance ratio.

    Returns
    -------
    list of dict
        ``engine``, ``variance_ratio`` (text), ``table``.
    """
    found = []
    for engine, ratio in product(engines_of(residual), variance_ratios(residual)):
        rows = [row for row in residual["rows"] if (row["engine"], row["variance_ratio"]) == (engine, ratio)]
        found.append({"engine": engine, "variance_ratio": fmt.plain(ratio), "table": engine_errors(rows)})
    return found


def engine_errors(rows: list[dict]) -> str:
    """Layers of one engine at one variance ratio; a line of a group is the mean of its layers, its bytes their sum."""
    lines = [
        [
            place(row),
            row["stream"].upper(),
            fmt.estimate(row["raw_error"], 100),
            fmt.estimate(row["whitened_error"], 100),
            fmt.estimate(row["d_eff"]),
            fmt.estimate(row["outlier_rate"], 100),
            fmt.estimate(row["bits_per_value"]),
            fmt.number(round(row["frame_bytes"]["value"])),
        ]
        for row in rows
    ]
    headers = ["layer", "stream", "raw error, %", "whitened error, %", "kept rank (`d_eff`)", "outliers, %"]
    return fmt.table([*headers, "bits per value", "bytes per window"], lines)


def ranks(residual: dict) -> str:
    """How the kept ranks of single blocks scatter: the lowest, the middle and the highest."""
    lines = []
    for row in residual["rows"]:
        if row["layer"] is not None and len(row["d_eff_blocks"]) > 1:
            name = [f"`{row['engine']}`", fmt.plain(row["variance_ratio"]), row["stream"].upper(), place(row)]
            lines.append([*name, *map(fmt.whole, rank_spread(row["d_eff_blocks"]))])
    headers = ["engine", "`variance_ratio`", "stream", "layer", "lowest rank", "median", "highest", "blocks"]
    return fmt.table(headers, lines) if lines else ""


def rank_spread(blocks: dict[str, int]) -> tuple[int, int, int, int]:
    """Lowest, (lower) median and highest kept rank, and the number of blocks, of a histogram."""
    counted = sorted((int(rank), count) for rank, count in blocks.items())
    total = sum(count for _, count in counted)
    reached = accumulate(count for _, count in counted)
    median = next(rank for (rank, _), seen in zip(counted, reached, strict=True) if 2 * seen >= total)
    return counted[0][0], median, counted[-1][0], total


def ratios(residual: dict, held: bool = False) -> list[dict]:
    """Errors on one engine's capture against the other's: ``[{"variance_ratio", "table"}]``."""
    found = []
    for ratio in variance_ratios(residual):
        rows = [row for row in residual["ratios"] if row["variance_ratio"] == ratio]
        if rows:
            found.append({"variance_ratio": fmt.plain(ratio), "table": ratio_table(rows, held)})
    return found


def ratio_table(rows: list[dict], held: bool = False) -> str:
    """How much larger the error is on `vllm`'s capture, in per cent; `held` where it is open if the engines agree."""
    lines = [
        [
            place(row),
            row["stream"].upper(),
            row["measure"],
            fmt.estimate(row["ratio"], 100, 1, signed=True),
            fmt.number(row["p_value"] if row["q_value"] is None else row["q_value"], 2),
            HELD if held and row["ratio"] else reading(row),
        ]
        for row in rows
    ]
    headers = ["layer", "stream", "error", LARGER, "q-value (groups: p-value)", "reading"]
    return fmt.table(headers, lines)


def reading(row: dict) -> str:
    """What the ratio of two engines' errors says."""
    if row["ratio"] is None:
        return "no error on either"
    if row["resolved"]:
        return f"larger on `{'vllm' if row['ratio']['value'] > 1 else 'hf'}`"
    if not row["ratio"]["low"] <= 1 <= row["ratio"]["high"]:
        return "not resolved, the signs of the windows do not bear it out"
    needed = row["windows_needed"]
    count = None if needed is None or needed >= fmt.OUT_OF_REACH else fmt.whole(needed)
    return not_resolved(fmt.largest(row["ratio"], 1.0, 100), count, " %")


def basis(residual: dict, level: str, methods: dict[str, str]) -> str:
    """The line under the tables: on how much they rest. `methods` puts the names of methods into words."""
    given = [row["raw_error"] for row in residual["rows"]]
    used = {one.get("method", "bca") for one in given}
    words = " or ".join(word for method, word in methods.items() if method in used)
    windows, tokens = (fmt.span(one[key] for one in given) for key in ("n_windows", "n_tokens"))
    return (
        f"*{windows} windows of the calibration split, {tokens} coded tokens, {level} intervals in brackets ({words}).*"
    )


def pooled(residual: dict, held: bool = False) -> str:
    """The comparison over the layers that the studied recipe codes, which are all if it leaves none alone."""
    rows = [row for row in residual["ratios"] if row["layer"] is None]
    names = {row["group"] for row in rows}
    lines = [
        [
            row["stream"].upper(),
            row["measure"],
            fmt.plain(row["variance_ratio"]),
            fmt.estimate(row["ratio"], 100, 1, signed=True),
            HELD if held and row["ratio"] else reading(row),
        ]
        for row in rows
        if row["group"] == ("coded" if "coded" in names else "all")
    ]
    return fmt.table(["stream", "error", "`variance_ratio`", LARGER, "reading"], lines)


def context(
    residual: dict | None, origin: str | None, confidence: float, methods: dict[str, str], held: bool = False
) -> dict | None:
    """Everything that ``residual.md.j2`` names; None when the study was not run.

    What compares engines may have been taken out of `residual`; see `kvlab_pipeline.rendering.withheld`.
    """
    if not residual:
        return None
    residual = {"ratios": []} | residual
    engines = engines_of(residual)
    return {
        "origin": origin,
        "engines": engines,
        "several": len(engines) > 1,
        "boundary": any(row["boundary"] for row in residual["rows"]),
        "errors": errors(residual),
        "ranks": ranks(residual),
        "ratios": ratios(residual, held),
        "pooled": pooled(residual, held),
        "basis": basis(residual, fmt.percent(confidence), methods),
    }
