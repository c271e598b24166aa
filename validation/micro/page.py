"""BENCH.md of the micro-benchmark, out of what `run` found. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from kvlab.base.records import write_text
from kvlab.pages import format as fmt
from kvlab.pages.rendering import environment, tidy
from validation.micro.row import published

TEMPLATES = Path(__file__).parent / "templates"
TIMES = (
    "id",
    "module",
    "operation",
    "shape",
    "ours, us",
    "rival",
    "rival, us",
    "rival / ours",
    "the original here, us",
    "note",
)
VALUES = ("id", "module", "what", "shape", "ours", "the original here", "note")


def write(found: dict, path: Path) -> None:
    """Write the page; `NonFinite` when a number is NaN or infinite."""
    fmt.refuse_non_finite(found, "micro-benchmark")
    write_text(Path(path), tidy(environment(TEMPLATES).get_template("micro.md.j2").render(context(found))))


def context(found: dict) -> dict:
    """Everything that the template names, as text."""
    rows = found["rows"]
    return {
        "machine": found["machine"],
        "times": fmt.table(TIMES, [_time(row) for row in rows if row["kind"] == "time"]),
        "values": fmt.table(VALUES, [_value(row) for row in rows if row["kind"] == "value"]),
        "failed": [f"{row['id']}: {row['said']}" for row in rows if row["kind"] == "failed"],
        "summary": summary(rows),
        "missing": ", ".join(sorted(published().keys() - {row["id"].partition("-")[0] for row in rows})),
    }


def summary(rows: list[dict]) -> str:
    """How many rows are ahead of what, in one sentence."""
    timed = [row for row in rows if row["kind"] == "time"]
    known = [(row, float(published()[row["id"]]["orig_here"])) for row in timed if row["id"] in published()]
    against = [row for row in timed if row["rival_us"] is not None]
    ahead = sum(row["ours_us"] < orig for row, orig in known)
    near = sum(row["ratio"][0] >= 0.9 for row in against)
    return (
        f"Ahead of the original's time here in {ahead} of {len(known)} rows of its size; at least 0.9 times as fast as "
        f"the rival in {near} of {len(against)}."
    )


def _time(row: dict) -> list[str]:
    seed = published()[row["id"].partition("-")[0]]
    rival = row["rival_us"] is not None
    value, low, high = row["ratio"] if rival else (None, None, None)
    return [
        row["id"],
        seed["module"],
        seed["op"],
        row["shape"],
        fmt.number(row["ours_us"]),
        row["rival"],
        fmt.number(row["rival_us"]) if rival else "–",
        f"{fmt.number(value)} [{fmt.number(low)}, {fmt.number(high)}]" if rival else "–",
        seed["orig_here"] if row["id"] in published() else "–",
        row["note"],
    ]


def _value(row: dict) -> list[str]:
    seed = published()[row["id"].partition("-")[0]]
    orig = seed["orig_here"] if row["id"] in published() else "–"
    return [row["id"], seed["module"], seed["op"], row["shape"], fmt.number(row["value"]), orig, row["note"]]
