"""RATES.md and its figures out of what `measure` found of several models. Torch-free."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.records import atomic, write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from kvlab_pipeline.rendering import svg
from validation.rates import compare
from validation.rates.figure import TEXTS, figure

TEMPLATES = Path(__file__).parent / "templates"
COSTS = ("codec", "bits per value", "KL, nats per token", "same top token, %", "`klt` of no more bits, times its KL")
SERVED = ("text", "nominal bits", "best rival", "its bits", "bits of `klt`", "KL of `klt` over its KL")
KEPT = ("text", "codec", "its bits", "KL", "bits of `archive` at this KL", "bits saved, %")


def write(found: list[dict], out: Path) -> None:
    """Write ``RATES.md`` and ``figures/rates_*.svg``; `NonFinite` when a number is NaN or infinite."""
    fmt.refuse_non_finite(found, "rates")
    sections = []
    for one in found:
        name = f"rates_{one['model']}_{one['protocol']}.svg"
        with atomic(Path(out) / "figures" / name) as temporary:
            svg.write(figure(one), temporary)
        sections.append(section(one) | {"figure": f"figures/{name}"})
    text = environment(TEMPLATES).get_template("rates.md.j2").render(sections=sections)
    write_text(Path(out) / "RATES.md", tidy(text))


def section(one: dict) -> dict:
    """A model under a protocol, as text."""
    texts = list(dict.fromkeys(row["text"] for row in one["rows"]))
    kept = [line for text in texts for line in saved(one["rows"], text)]
    return {
        "model": one["model"],
        "protocol": one["protocol"],
        "disclosure": one["disclosure"],
        "windows": fmt.number(len(one["rows"][0]["tokens"])),
        "context": fmt.number(one["context"]),
        "eval": fmt.number(one["eval"]),
        "calibration": fmt.number(one["calibration_tokens"]),
        "costs": [(TEXTS[text], fmt.table(COSTS, costs(one["rows"], text))) for text in texts],
        "served": fmt.table(SERVED, [line for text in texts for line in served(one["rows"], text)]),
        "kept": fmt.table(KEPT, kept) if kept else "",
    }


def costs(rows: list[dict], text: str) -> list[list[str]]:
    """A line a codec, by its bits; `klt` beside it where it is a rival."""
    lines = []
    for row in sorted((row for row in rows if row["text"] == text), key=lambda row: row["bits"]):
        ours = compare.within_bits(rows, "klt", text, row["bits"]) if row["codec"] not in compare.OURS else None
        lines.append(
            [
                row["label"],
                fmt.fixed(row["bits"], 2),
                fmt.estimate(compare.kl(row).to_json()),
                fmt.estimate(compare.agreement(row).to_json(), 100),
                fmt.estimate(compare.ratio(ours, row).to_json()) if ours else fmt.DASH,
            ]
        )
    return lines


def served(rows: list[dict], text: str) -> list[list[str]]:
    """`klt` at each of its widths beside the best rival of that width that can serve."""
    lines = []
    for ours in (row for row in rows if (row["codec"], row["text"]) == ("klt", text)):
        if theirs := compare.best_served(rows, text, ours["nominal"]):
            cells = [theirs["label"], fmt.fixed(theirs["bits"], 2), fmt.fixed(ours["bits"], 2)]
            lines.append(
                [TEXTS[text], fmt.number(ours["nominal"]), *cells, fmt.estimate(compare.ratio(ours, theirs).to_json())]
            )
    return lines


def saved(rows: list[dict], text: str) -> list[list[str]]:
    """What `archive` takes at each other codec's KL."""
    lines = []
    for row in (row for row in rows if row["text"] == text and row["codec"] != "archive"):
        level = compare.kl(row)
        if (bits := compare.bits_at(rows, "archive", text, level.value)) is not None:
            cells = [fmt.fixed(row["bits"], 2), fmt.estimate(level.to_json()), fmt.fixed(bits, 2)]
            lines.append([TEXTS[text], row["label"], *cells, fmt.fixed(100 * (1 - bits / row["bits"]), 0)])
    return lines
