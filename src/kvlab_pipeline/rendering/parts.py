"""What tables of several studies share: how an effect is read, and records of scalar fields as Markdown tables.

Nothing is computed here but units. A study's own tables are in its ``chapter.py``.
"""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab.output.markdown import cell

KL_UNIT = "nats per token"
HELD = "open, as whether the engines agree"


def resolution(given: dict, held: bool = False) -> dict:
    """Whether an effect is told from zero, how large it may be when it is not, and the windows it would take.

    `held` is for an effect of the engine where it is open whether the engines agree: it counts as not resolved.
    """
    open_ = fmt.contains_zero(given)
    needed = fmt.windows_for_sign(given) if open_ else None
    return {
        "resolved": not open_ and not held,
        "held": held,
        "largest": fmt.largest(given),
        "needed": None if needed is None else fmt.whole(needed),
        "windows": fmt.whole(given["n_windows"]),
    }


def reading(effect: dict) -> str:
    """The last column of a table of effects."""
    if effect["resolved"]:
        return "clear of zero"
    if effect["held"]:
        return HELD
    return not_resolved(effect["largest"], effect["needed"])


def not_resolved(largest: str, needed: str | None, unit: str = "") -> str:
    """The reading of an effect that is not resolved: how large it may be, unless it cannot vary, and what it takes."""
    bound = f"at most {largest}{unit}, " if largest != fmt.number(0.0) else ""
    return f"not resolved, {bound}{needing(needed)}"


def needing(needed: str | None) -> str:
    """How many windows an effect that is not resolved would take, in words."""
    return f"about {needed} windows needed ({fmt.POST_HOC})" if needed else "no effect to be seen"


def is_estimate(value: object) -> bool:
    """Whether this is a value with an interval."""
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def anything(value: object) -> str:
    """A setting or a measured number of a part whose fields may grow."""
    if is_estimate(value):
        return fmt.estimate(value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: fmt.DASH}[value]
    return fmt.number(value) if isinstance(value, float | int) else str(cell(value))


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


def scattered(estimates: list[dict]) -> list[dict]:
    """Those whose interval has a width: a value that cannot vary, such as the truth's, resolves nothing."""
    return [given for given in estimates if fmt.half_width(given) > 0] or estimates


def limits(rows: list[tuple[str, list[dict]]]) -> str:
    """Per study: windows, tokens, and the range of the smallest effects that it can tell from zero."""
    lines = []
    for study, estimates in rows:
        values = [fmt.half_width(given) for given in scattered(estimates)]
        low, high = fmt.number(min(values), 2), fmt.number(max(values), 2)
        counts = [fmt.span(given[key] for given in estimates) for key in ("n_windows", "n_tokens")]
        lines.append([study, low if low == high else f"{low} to {high}", *counts])
    return fmt.table(["study", "smallest effect told from zero", "windows", "scored tokens"], lines)
