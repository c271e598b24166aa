"""Whether the table in `metrics.json` holds the numbers of a file before version 5, which nested them, and no others.

    python tests/goldens/same_values.py OLD.json NEW.json

Every number with an interval has to be there as often as before: value, ends, windows. Of counts without an interval
every value of a part has to be there, as an estimand or as a level. What has another name is listed. Ends with 1 when a
number is lost or new.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NOT_NUMBERS = ("schema_version", "identity", "settings", "sizes", "codebooks", "digest")  # the same in both
# Said twice before: in `sizes`, by the rows of the windows, and in a part of its own.
ELSEWHERE = {("residual", "context"), ("gap", "n_tokens")}
ELSEWHERE |= {("sigma", f"trace_difference_{of}") for of in ("median", "max")}
ENDS = ("value", "low", "high", "n_windows")


def leaves(data: object, name: str = "") -> Iterator[tuple[str, tuple]]:
    """The numbers of nested data by the last name above them: four of an interval, one of a count."""
    if isinstance(data, dict) and {"value", "low", "high"} <= data.keys():
        yield name, tuple(data[end] for end in ENDS)
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, name)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield name, (data,)


def before(metrics: dict) -> Counter:
    """The numbers of a nested file by part."""
    shown = {part: held for part, held in metrics.items() if part not in NOT_NUMBERS}
    for row in each_row(shown):
        row.pop("compared", None)  # cells by their names; what they store is of the cells
    return Counter((part, name, found) for part, held in shown.items() for name, found in leaves(held))


def each_row(data: object) -> Iterator[dict]:
    """Every mapping in nested data."""
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from each_row(value)


def now(metrics: dict) -> tuple[Counter, set]:
    """The numbers of the table by part, and those among its levels."""
    numbers, levels = Counter(), set()
    for row in metrics["estimates"]:
        part, name = row["part"].partition(".")[0], row["estimand"].rpartition(".")[2]
        found = tuple(row.get(end) for end in ENDS) if "low" in row else (row["value"],)
        if found != (None,):
            numbers[part, name, found] += 1
        levels |= {(part, found) for _, found in leaves(row["levels"])}
        levels |= {(part, (float(key),)) for key in row["levels"].values() if str(key).isdigit()}
    return numbers, levels


def compared(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """What differs, and what is named otherwise."""
    (mine, levels), theirs = now(new), before(old)
    given, kept = with_interval(theirs), with_interval(mine)
    differ = [f"lost: {found}" for found in given - kept] + [f"new: {found}" for found in kept - given]
    there = {(part, found) for part, _, found in mine} | levels
    counts = [(part, name, found) for part, name, found in theirs if len(found) == 1 and (part, name) not in ELSEWHERE]
    differ += [f"lost: {part}, {name} {found}" for part, name, found in counts if (part, found) not in there]
    names, named = ({(part, name) for part, name, found in side if len(found) > 1} for side in (theirs, mine))
    return sorted(differ), [f"{part}: {name}" for part, name in sorted(names - named)]


def with_interval(numbers: Counter) -> Counter:
    """Those that have one, whatever their name."""
    found = Counter()
    for (_, _, number), count in numbers.items():
        found[number] += count if len(number) > 1 else 0
    return +found


def main() -> None:
    old, new = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    differ, renamed = compared(old, new)
    print(f"{sum(before(old).values())} numbers before, {len(new['estimates'])} rows now, {len(differ)} differ")
    print("named otherwise:", *(renamed or ["nothing"]), sep="\n  ")
    print(*differ[:20], sep="\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
