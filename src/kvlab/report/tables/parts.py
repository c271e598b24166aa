"""From the parts of ``metrics.json`` and ``verdict.json`` to the report's Markdown tables.

Every function takes one part of the metrics and returns one table; nothing is computed here but
units (a ratio as a change in per cent) and the share of a part in its whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from kvlab.errors import Fault
from kvlab.report import format as fmt

KL_UNIT = "nats per token"
FACTORS = ("engine", "protocol", "dtype", "variance_ratio", "origin")  # in the order in which a corner names them


def corner(values: dict) -> str:
    """A corner in words: settings by their value, ratios and the calibration's origin by their name too."""
    return ", ".join(
        f"`{name}` {fmt.plain(value) if isinstance(value, float | int) else f'`{value}`'}"
        if isinstance(value, float | int) or name == "origin"
        else f"`{value}`"
        for name, value in ((name, values[name]) for name in FACTORS if name in values)
    )


# -------------------------------------------------------------------------------- decomposition


def shares(measure: dict) -> list[dict]:
    """Each factor's share, largest first, printed with one number of decimals.

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
        resolution(part["share"])
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


def resolution(given: dict) -> dict:
    """Whether an effect is told from zero, and the windows it would take when it is not."""
    open_ = fmt.contains_zero(given)
    needed = fmt.windows_for_sign(given) if open_ else None
    return {
        "resolved": not open_,
        "needed": None if needed is None else fmt.whole(needed),
        "windows": fmt.whole(given["n_windows"]),
    }


def of_gap(share: dict, gap: dict) -> str:
    """A share in per cent of the gap; a dash when the gap itself is not told from zero."""
    if fmt.contains_zero(gap):
        return fmt.DASH
    decimals = min(1, fmt.places(100 * fmt.half_width(share) / abs(gap["value"])))
    return fmt.percent(share["value"] / gap["value"], decimals)


def reading(effect: dict) -> str:
    """The last column of a table of effects."""
    if effect["resolved"]:
        return "clear of zero"
    needed = f"about {effect['needed']} windows needed" if effect["needed"] else "no effect to be seen"
    return f"not resolved, {needed}"


def decomposition(measure: dict, unit: str) -> str:
    """Factors, their shares, and the sum, which is the gap."""
    lines = [[f"`{part['factor']}`", part["share"], part["of_gap"], reading(part)] for part in shares(measure)]
    texts = fmt.column([*(part["share"] for part in measure["parts"]), measure["gap"]])
    lines.append(["**sum = gap**", f"**{texts[-1]}**", "all", reading(resolution(measure["gap"]))])
    return fmt.table(["factor", f"share, {unit}", "of the gap", "reading"], lines)


def interactions(measure: dict, unit: str) -> str:
    """What two factors do together beyond the sum of what each does alone."""
    texts = fmt.column([row["effect"] for row in measure["interactions"]])
    lines = [
        [" with ".join(f"`{name}`" for name in row["factors"]), text, reading(resolution(row["effect"]))]
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


# ----------------------------------------------------------------------------- engines, codec off


def floor(floors: dict) -> str:
    """What each engine differs from itself by."""
    names = list(dict.fromkeys(name for row in floors.values() for name in row))
    lines = [[f"`{engine}`", *(fmt.estimate(row.get(name)) for name in names)] for engine, row in floors.items()]
    return fmt.table(["engine", *(f"{name.replace('_', ' ', 1)}, {KL_UNIT}" for name in names)], lines)


def baseline(rows: list[dict], keys: tuple[str, ...] = ("engine", "dtype", "attention")) -> str:
    """Uncompressed runs against the float32 truth, or against whatever `keys` say."""
    lines = [
        [
            *(f"`{row[key]}`" for key in keys),
            fmt.estimate(row["kl"]),
            fmt.estimate(row["ppl_ratio"], 100, 1),
            fmt.estimate(row["top1_agreement"], 100),
        ]
        for row in rows
    ]
    headers = [*keys, f"KL, {KL_UNIT}", "perplexity change, %", "same top token, %"]
    return fmt.table(headers, lines)


def peers(rows: list[dict]) -> str:
    """Uncompressed runs of two engines in the same dtype, against each other."""
    return baseline(rows, ("run", "against", "dtype"))


def agreement(given: dict) -> str:
    """Float32 only: the identity cells across engines, and the codec cells measured on either engine."""
    protocols = list(dict.fromkeys([*given["identity"], *given["codec"]]))
    lines = []
    for protocol in protocols:
        coded = given["codec"].get(protocol) or {}
        lines.append(
            [
                f"`{protocol}`",
                fmt.estimate(given["identity"].get(protocol)),
                fmt.estimate(coded.get("cross_kl")),
                fmt.estimate(coded.get("jitter_kl")),
                fmt.number(coded.get("hf_kl")),
                fmt.number(coded.get("vllm_kl")),
                fmt.estimate(coded.get("relative_difference"), 100),
            ]
        )
    headers = ["protocol", "no codec: KL between engines", "codec: KL between engines"]
    headers += ["codec: KL of `hf` to itself, jittered"]
    headers += ["codec: KL on `hf`", "codec: KL on `vllm`", "difference, %"]
    return fmt.table(headers, lines)


# -------------------------------------------------------------------------------------- cells


def by_engine(cells: Iterable[dict], make: Callable[[list[dict]], str]) -> list[dict]:
    """One table per engine and dtype: ``[{"engine", "dtype", "table"}]``."""

    def key(cell: dict) -> tuple[str, str]:
        return cell["engine"], cell["dtype"]

    ordered = sorted(cells, key=key)
    return [
        {"engine": engine, "dtype": dtype, "table": make(list(group))}
        for (engine, dtype), group in groupby(ordered, key)
    ]


def name(cell: dict) -> list[str]:
    """The first columns of every table of cells."""
    return [cell["label"], f"`{cell['protocol']}`", fmt.plain(cell["variance_ratio"])]


NAME = ["cell", "protocol", "`variance_ratio`"]


def cells(rows: list[dict]) -> str:
    """What each cell costs and what it stores."""
    lines = [
        [
            *name(row),
            fmt.number(row["bits_per_value"]),
            pair(row["d_eff_mean"]),
            fmt.estimate(row["kl_net"]),
            fmt.estimate(row["difference"], signed=True),
            fmt.estimate(row["ppl_ratio"], 100, 1),
            fmt.estimate(row["top1_agreement"], 100),
            fmt.estimate(row["flips_to_wrong"], 100),
            fmt.estimate(row["flips_to_right"], 100),
        ]
        for row in rows
    ]
    headers = [*NAME, "bits per value", "kept rank, K / V", f"net KL, {KL_UNIT}", "beside its counterpart"]
    headers += ["perplexity change, %"]
    headers += ["same top token, %", "right to wrong, %", "wrong to right, %"]
    return fmt.table(headers, lines)


def pair(streams: dict | None) -> str:
    """K and V side by side."""
    values = streams or {}
    return " / ".join(fmt.number(values.get(stream)) for stream in ("k", "v"))


def percentiles(rows: list[dict]) -> str:
    """KL of the ordinary token and of the worst ones."""
    ranks = sorted({rank for row in rows for rank in row["kl_percentiles"]}, key=float)
    lines = [[*name(row), *(fmt.number(row["kl_percentiles"].get(rank)) for rank in ranks)] for row in rows]
    headers = ["median" if float(rank) == 50 else f"{rank} %" for rank in ranks]
    return fmt.table([*NAME, *headers], lines)


def by_confidence(rows: list[dict]) -> str:
    """KL where the uncompressed model was unsure, and where it was sure."""
    edges = sorted({(bin_["low"], bin_["high"]) for row in rows for bin_ in row["kl_by_confidence"]})
    lines = []
    for row in rows:
        found = {(bin_["low"], bin_["high"]): bin_["kl"] for bin_ in row["kl_by_confidence"]}
        lines.append([*name(row), *(fmt.number(found.get(edge)) for edge in edges)])
    headers = [f"{fmt.plain(low)} to {fmt.plain(high)}" for low, high in edges]
    return fmt.table([*NAME, *headers], lines)


def published(rows: list[dict]) -> str:
    """The published study's estimator beside ours."""
    lines = [
        [*name(row), fmt.estimate(row["published_estimator"], 100), fmt.estimate(row["ppl_ratio"], 100, 1)]
        for row in rows
    ]
    headers = [*NAME, "published estimator, %", "perplexity change, %"]
    return fmt.table(headers, lines)


# ------------------------------------------------------------------------ calibration and others


def is_estimate(value: object) -> bool:
    """Whether this is a value with an interval."""
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def anything(value: object) -> str:
    """A setting or a measured number of a part whose fields may grow."""
    if is_estimate(value):
        return fmt.estimate(value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: fmt.DASH}[value]
    return fmt.number(value) if isinstance(value, float | int) else str(value)


def is_scalar(value: object) -> bool:
    """Whether a value fits into a table's cell."""
    return is_estimate(value) or value is None or isinstance(value, str | float | int)


def words(key: str) -> str:
    """A field's name as a heading."""
    return key.replace("_", " ")


def records(rows: list[dict], leave_out: tuple[str, ...] = ()) -> str:
    """Any list of records as a table of its scalar fields, words before numbers."""
    keys = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if key not in leave_out and all(is_scalar(row.get(key)) for row in rows)
    ]
    texts = [key for key in keys if all(isinstance(row.get(key), str) for row in rows)]
    keys = texts + [key for key in keys if key not in texts]
    lines = [[anything(row.get(key)) for key in keys] for row in rows]
    return fmt.table([words(key) for key in keys], lines)


def side_by_side(columns: dict[str, dict]) -> str:
    """Some engines' scalar fields, one row per field."""
    keys = [
        key
        for key in dict.fromkeys(key for fields in columns.values() for key in fields)
        if all(is_scalar(fields.get(key)) for fields in columns.values())
    ]
    lines = [[words(key), *(anything(fields.get(key)) for fields in columns.values())] for key in keys]
    return fmt.table(["quantity", *(f"`{column}`" for column in columns)], lines)


def flat(data: dict, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The scalar leaves of nested data, named by their path."""
    found = []
    for key, value in data.items():
        if is_scalar(value):
            found.append((words(".".join((*path, str(key)))), anything(value)))
        elif isinstance(value, dict):
            found += flat(value, (*path, str(key)))
    return found


def fields(data: dict) -> str:
    """Nested fields as a table of two columns."""
    return fmt.table(["what", "value"], flat(data))


def verdicts(rows: list[dict]) -> str:
    """The words, what they rest on, and what would settle an open one."""
    lines = [
        [
            *name(row)[:2],
            f"`{row['engine']}`",
            f"`{row['dtype']}`",
            name(row)[2],
            f"**{row['verdict']}**",
            fmt.whole(row["windows_needed"]),
            "; ".join(row["reasons"]) or fmt.DASH,
        ]
        for row in rows
    ]
    headers = ["cell", "protocol", "engine", "dtype", "`variance_ratio`", "verdict", "windows needed", "reasons"]
    return fmt.table(headers, lines)


def preconditions(rows: list[dict]) -> str:
    """What had to hold before any number was worth a verdict."""
    lines = [[row["name"], "yes" if row["holds"] else "**no**", row["detail"] or fmt.DASH] for row in rows]
    return fmt.table(["condition", "holds", "detail"], lines)


def scattered(estimates: list[dict]) -> list[dict]:
    """Those whose interval has a width: a value that cannot vary, such as the truth's, resolves nothing."""
    return [given for given in estimates if given["resolvable"] > 0] or estimates


def limits(rows: list[tuple[str, list[dict]]]) -> str:
    """Per study: windows, tokens, and the range of the smallest effects that it can tell from zero."""
    lines = []
    for study, estimates in rows:
        values = [given["resolvable"] for given in scattered(estimates)]
        low, high = fmt.number(min(values), 2), fmt.number(max(values), 2)
        counts = [fmt.span(given[key] for given in estimates) for key in ("n_windows", "n_tokens")]
        lines.append([study, low if low == high else f"{low} to {high}", *counts])
    return fmt.table(["study", "smallest effect told from zero", "windows", "scored tokens"], lines)
