"""Numbers and tables as text: the only place where a measured number becomes a numeral."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence

from kvlab.core.errors import Fault, NonFinite
from kvlab.stats.bootstrap import USUAL_CONFIDENCE, Estimate
from kvlab.stats.power import POWER, power_factor, windows_needed

DASH = "–"
POST_HOC = f"{100 * POWER:g} % power, post hoc"  # beside every number of windows that an effect would take
SMALL, LARGE = 1e-3, 1e5  # outside, numbers are written with an exponent
MOST_PLACES = 12
OUT_OF_REACH = 1e9  # windows; more text than there is
NUMERIC = re.compile(rf"(\*\*)?([-+]?\d|{DASH}|all$)")


def places(half_width: float) -> int:
    """Decimals that show two significant digits of an interval's half width (at most 12)."""
    if half_width <= 0:
        return MOST_PLACES
    return min(MOST_PLACES, max(0, 1 - math.floor(math.log10(half_width))))


def fixed(value: float, decimals: int, signed: bool = False) -> str:
    """`value` with a number of decimals; a rounded zero carries no sign."""
    text = f"{value:{'+' if signed else ''}.{decimals}f}"
    return text.lstrip("+-") if not text.strip("+-0.") else text


def number(value: float | int | None, digits: int = 3) -> str:
    """A number without an interval to `digits` significant digits; integers whole; None as a dash."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if SMALL <= abs(value) < LARGE:
        return fixed(value, max(0, digits - 1 - exponent))
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(power)}"


def plain(value: float | int | None) -> str:
    """A setting, such as a ratio, as short as it was given; None as a dash."""
    return DASH if value is None else f"{value:g}"


def percent(fraction: float | None, decimals: int | None = None) -> str:
    """A fraction in per cent; as short as it was given when `decimals` is None."""
    if fraction is None:
        return DASH
    value = 100 * fraction
    return f"{value:g} %" if decimals is None else f"{fixed(value, decimals)} %"


def estimate(given: Estimate | dict | None, scale: float = 1.0, shift: float = 0.0, signed: bool = False) -> str:
    """An Estimate as ``value [low, high]``, digits chosen by the interval's width.

    Parameters
    ----------
    given : Estimate, dict or None
        The dict has at least ``value``, ``low``, ``high``; None is a dash.
    scale, shift : float
        What is printed is ``scale * (number - shift)``; per cent of a change is ``100, 1``. A negative scale
        turns the interval round.
    signed : bool
        Print a plus sign too.
    """
    if given is None:
        return DASH
    given = given.to_json() if isinstance(given, Estimate) else given
    ends = ("low", "high") if scale > 0 else ("high", "low")
    numbers = [scale * (given[name] - shift) for name in ("value", *ends)]
    value, low, high = written(numbers, (numbers[2] - numbers[1]) / 2, signed)
    return value if low == high == value else f"{value} [{low}, {high}]"


def written(numbers: Sequence[float], half_width: float, signed: bool = False) -> list[str]:
    """Numbers that belong together, with one number of decimals and, where needed, one exponent."""
    largest = max(abs(number) for number in numbers)
    if largest < sys.float_info.min:
        return ["0"] * len(numbers)
    if half_width <= 0:
        half_width = largest * 1e-2
    if SMALL <= largest < LARGE:
        return [fixed(number, places(half_width), signed) for number in numbers]
    exponent = math.floor(math.log10(largest))
    decimals = min(places(half_width / 10.0**exponent), 4)
    return [f"{fixed(number / 10.0**exponent, decimals, signed)}e{exponent}" for number in numbers]


def column(estimates: Iterable[dict], signed: bool = False) -> list[str]:
    """Estimates that are to be added by eye: one number of decimals for the whole column.

    The narrowest interval chooses the digits, but no interval is shown to more than five of them.
    """
    estimates = list(estimates)
    numbers = [given[name] for given in estimates for name in ("value", "low", "high")]
    widths = [half for given in estimates if (half := half_width(given)) > 0]
    narrow = max(min(widths), max(widths) * 1e-3) if widths else 0.0
    texts = written(numbers, narrow, signed)
    return [f"{texts[i]} [{texts[i + 1]}, {texts[i + 2]}]" for i in range(0, len(texts), 3)]


def half_width(given: dict) -> float:
    """Half the width of an Estimate's interval."""
    return (given["high"] - given["low"]) / 2


def contains_zero(given: dict) -> bool:
    """Whether zero lies inside an Estimate's interval, its ends included."""
    return given["low"] <= 0 <= given["high"]


def windows_for_sign(given: dict) -> int | None:
    """Windows that would show an effect of this size with a power of 80 %; None when none is to be seen.

    An effect that is zero, or a rounding error beside its interval, has no such number.
    """
    width = given["value"] - given["low"] if given["value"] > 0 else given["high"] - given["value"]
    factor = power_factor(given.get("confidence", USUAL_CONFIDENCE))
    needed = windows_needed(width, abs(given["value"]), given["n_windows"], factor)
    return needed if needed is not None and needed < OUT_OF_REACH else None


def largest(given: dict, null: float = 0.0, scale: float = 1.0) -> str:
    """The largest effect that an interval leaves possible, in either direction: what it is shown to be below."""
    ends = [scale * abs(given[end] - null) for end in ("low", "high")]
    return written([max(ends)], abs(scale) * half_width(given))[0]


def windows(given: dict) -> str:
    """On how many windows an interval rests, and of how many documents they are where these are what is resampled."""
    documents = given.get("n_documents")
    return f"{given['n_windows']} windows{f' of {documents} documents' if documents else ''}"


def whole(count: int | None) -> str:
    """A count, to three significant digits when it is large: it is an extrapolation."""
    if count is None:
        return DASH
    return str(count) if count < LARGE else number(float(count))


def span(values: Iterable[int]) -> str:
    """The range of some counts: one number when they are equal."""
    low, high = min(values := list(values)), max(values)
    return str(low) if low == high else f"{low} to {high}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns of words are set flush left, columns of numbers flush right.

    Raises
    ------
    Fault
        The rows have another number of cells than there are headers: numbers would stand under the wrong ones.
    """
    lines = [[safe(cell) for cell in line] for line in (headers, *rows)]
    marks = ["---:" if numeric(column) else "---" for column in zip(*lines[1:], strict=True)]
    if marks and len(marks) != len(headers):
        raise Fault(f"a table with the {len(headers)} headers {list(headers)} has rows of {len(marks)} cells")
    lines.insert(1, marks or ["---"] * len(headers))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, dashes and ``all`` only, and at least one number."""
    return all(NUMERIC.match(cell) for cell in cells) and any(not cell.startswith(DASH) for cell in cells)


def safe(cell: object) -> str:
    """Text that cannot break out of its cell."""
    return " ".join(str(cell).replace("|", "\\|").split())


def refuse_non_finite(data: object, origin: str) -> None:
    """Raise `NonFinite` with the place of the first NaN or infinity inside nested JSON data."""
    if isinstance(data, dict):
        for key, value in data.items():
            refuse_non_finite(value, f"{origin}.{key}")
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            refuse_non_finite(value, f"{origin}[{index}]")
    elif isinstance(data, float) and not math.isfinite(data):
        raise NonFinite(f"{origin} is {data}; a report over it was not written")
