"""REPORT.md and planted.json out of what was measured. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.records import write_json, write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from validation.planted.claims import ALL

TEMPLATES = Path(__file__).parent / "templates"
NAMES = {"hf": "transformers", "vllm": "vLLM"}
DIGITS = 5  # of a planted value: what it is compared with carries as many


def write(data: dict, out: Path) -> None:
    """Write ``planted.json`` and ``REPORT.md``.

    Raises
    ------
    NonFinite
        When a number is NaN or infinite.
    """
    fmt.refuse_non_finite(data, "planted")
    write_json(out / "planted.json", data | {"holds": not failures(data)})
    text = environment(TEMPLATES).get_template("planted.md.j2").render(context(data))
    write_text(out / "REPORT.md", tidy(text))


def failures(data: dict) -> int:
    """Values outside their intervals, paths with too few inside, controls not found out, coverages outside the band."""
    values = [value for case in data["cases"] for value in case["values"]]
    return sum(not one["holds"] for one in (*values, *data["paths"], *data["controls"], *data["coverage"]["entries"]))


def context(data: dict) -> dict:
    """Everything that the template names, as text."""
    values = [value for case in data["cases"] for value in case["values"]]
    everything = next(way for way in data["paths"] if way["path"] == ALL)
    entries = data["coverage"]["entries"]
    enforced = [entry["coverage"]["value"] for entry in entries if entry["enforced"]]
    low, high = data["coverage"]["band"]
    return {
        "failures": failures(data),
        "failed": fmt.number(failures(data)),
        "values": fmt.number(len(values)),
        "inside": fmt.number(sum(value["holds"] for value in values)),
        "chance": fmt.number(everything["values"]),
        "alone": fmt.number(everything["inside"]),
        "expected": span(everything["expected"]),
        "paths": paths_table(data["paths"]),
        "controls": controls_table(data["controls"]),
        "confidence": fmt.percent(data["confidence"]),
        "joint": fmt.percent(data["joint_confidence"], 3),
        "model": data["model_hash"],
        "corpus": data["corpus_hash"],
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items())),
        **{name: fmt.number(data[name]) for name in ("context", "eval", "windows", "exact_windows", "resamples")},
        "engines": " and ".join(NAMES[engine] for engine in data["engines"]),
        "dtypes": " and ".join(data["dtypes"]),
        "cases": [case_context(case) for case in data["cases"]],
        "band": f"{fmt.percent(low)} to {fmt.percent(high)}",
        "covered": f"{fmt.percent(min(enforced), 1)} to {fmt.percent(max(enforced), 1)}",
        "repeats": fmt.number(data["coverage"]["repeats"]),
        "draws": fmt.number(data["coverage"]["resamples"]),
        "tokens": fmt.number(data["coverage"]["tokens"]),
        "many": fmt.number(data["coverage"]["windows"]),
        "few": [fmt.number(count) for count in data["coverage"]["few"]],
        "shared": fmt.percent(data["coverage"]["shared"]),
        "distributions": distributions_table(data["coverage"]["distributions"]),
        "coverage": coverage_table(entries, data["coverage"]["windows"]),
        "coverage_few": {fmt.number(n): coverage_table(entries, n) for n in data["coverage"]["few"]},
    }


def span(ends: list[int]) -> str:
    """Two counts and what lies between."""
    return " to ".join(map(fmt.number, ends))


def paths_table(paths: list[dict]) -> str:
    """How many planted values lie inside their plain intervals, by what of the pipeline they went through."""
    rows = [
        (
            way["path"],
            fmt.number(way["values"]),
            fmt.number(way["inside"]) if way["holds"] else f"**{fmt.number(way['inside'])}**",
            span(way["expected"]),
        )
        for way in paths
    ]
    return fmt.table(("through", "values", "inside", "expected"), rows)


def controls_table(controls: list[dict]) -> str:
    """What became of exchanged labels."""
    rows = [
        (
            f"`{one['factor']}`: {one['levels'][0]} and {one['levels'][1]}",
            "refused" if one["refused"] else "**read**",
            f"{fmt.number(one['missed'])} of {fmt.number(one['values'])}",
            f"{fmt.number(one['plain'])} of {fmt.number(one['values'])}",
            fmt.percent(one["row"], 1),
            "yes" if one["holds"] else "**no**",
        )
        for one in controls
    ]
    anew = ("ids made anew: missed", "outside plain intervals", "furthest row off by")
    return fmt.table(("exchanged", "ids as they were", *anew, "found out"), rows)


def case_context(case: dict) -> dict:
    """One case: its table, and what was measured about the planting."""
    rows = [
        (
            value["name"],
            fmt.number(float(value["planted"]), DIGITS),
            found(value),
            value["unit"],
            "yes" if value["holds"] else "**no**",
        )
        for value in case["values"]
    ]
    return {
        "name": case["name"],
        "about": case["about"],
        "table": fmt.table(("planted", "value", "found", "unit", "inside"), rows),
        "facts": [f"{name}: {fmt.number(value)}" for name, value in case["facts"].items()],
    }


def found(value: dict) -> str:
    """What the pipeline made of a planted value, with its interval."""
    estimate = value["estimate"]
    if estimate["method"] == "at least":
        return f"{fmt.number(estimate['value'])} (at least the planted)"
    if estimate["method"] == "rounding" and not value["planted"]:
        return f"{fmt.number(estimate['value'])} (allowed: {fmt.number(fmt.half_width(estimate), 2)})"
    return fmt.estimate(estimate)


def distributions_table(distributions: list[dict]) -> str:
    """What the synthetic tables were drawn from."""
    rows = [
        (one["name"], one["like"], f"{one['windows']['name']} {fmt.plain(one['windows']['parameter'])}",
         f"{one['tokens']['name']} {fmt.plain(one['tokens']['parameter'])}")
        for one in distributions
    ]  # fmt: skip
    return fmt.table(("distribution", "like", "factor of a window", "factor of a token"), rows)


def coverage_table(entries: list[dict], windows: int) -> str:
    """Coverage by statistic and distribution at one number of windows."""
    chosen = [entry for entry in entries if entry["windows"] == windows]
    names = list(dict.fromkeys(entry["distribution"] for entry in chosen))
    statistics = list(dict.fromkeys(entry["statistic"] for entry in chosen))
    by = {(entry["statistic"], entry["distribution"]): entry for entry in chosen}
    rows = [(name, *(coverage_text(by[name, column]) for column in names)) for name in statistics]
    return fmt.table(("statistic", *names), rows)


def coverage_text(entry: dict) -> str:
    """A coverage in per cent with its own interval, and what missed on either side."""
    value, low, high = (fmt.percent(entry["coverage"][name], 1) for name in ("value", "low", "high"))
    text = f"{value} [{low}, {high}]"
    return text if entry["holds"] else f"**{text}**"
