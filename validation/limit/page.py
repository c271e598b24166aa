"""LIMIT.md out of what `measure` found. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy

TEMPLATES = Path(__file__).parent / "templates"
HALF_A_BIT = 0.5
DISTANCES = ("codec", "bits per value", "limit at its error", "excess, bits", "error over the least at its bits")
WHAT = {
    "metadata": "headers, digests, token ids; scales and zeros of a codec that stores them",
    "cells and fit": "whole bits, cells of a fixed number of bits and no entropy coding, a calibration on other text,"
    " sources that are not Gaussian",
    "attention": "every token gets as many bits, whatever attention it may expect",
    "prediction": "what the layers below say is coded again",
    "cells": "scalar cells with a dead zone, entropy coded, in place of an ideal code; a trellis would take most of it",
    "steps of tokens": "steps of tokens in half octaves",
    "noise in the loop": "layers are predicted from decoded layers, and not from the originals",
    "fit and shape": "a calibration on other text than is coded, and sources that are not Gaussian",
}
MENDS = {
    "metadata": "larger blocks or longer contexts",
    "cells and fit": "axes and tables fitted to the model, and entropy coding",
    "attention": "bits that may differ between tokens",
    "prediction": "prediction across layers, which a forward cannot have",
    "cells": "a trellis in place of scalar cells",
    "steps of tokens": "steps that are nearer to the weights",
    "noise in the loop": "finer layers below, whose bits cost more than they gain",
    "fit and shape": "more calibration text, of more kinds",
}


def write(data: dict, out: Path) -> None:
    """Write ``LIMIT.md``; `NonFinite` when a number is NaN or infinite."""
    fmt.refuse_non_finite(data, "limit")
    text = environment(TEMPLATES).get_template("limit.md.j2").render(context(data))
    write_text(Path(out) / "LIMIT.md", tidy(text))


def context(data: dict) -> dict:
    """Everything that the template names, as text."""
    names = [name for name in WHAT if any(name in row["parts"] for row in data["rows"])]
    return {
        "model": data["model"]["name"],
        "disclosure": data["model"]["disclosure"],
        "text": data["text"],
        "windows": fmt.number(data["windows"]),
        "context": fmt.number(data["context"]),
        "calibration": data["calibration"],
        "distances": fmt.table(DISTANCES, [_cells(row) for row in data["rows"]]),
        "parts": [(name, WHAT[name]) for name in names],
        "splits": fmt.table(["codec", *names], [[row["label"], *_parts(row, names)] for row in data["rows"]]),
        "next": [next_half_bit(row) for row in data["rows"]],
    }


def next_half_bit(row: dict) -> str:
    """The largest parts of a codec's excess, as many as make up half a bit, and what each would take."""
    total, said = 0.0, []
    for name, bits in sorted(row["parts"].items(), key=lambda pair: -pair[1]):
        if total >= HALF_A_BIT or bits <= 0:
            break
        total += bits
        said.append(f"{fmt.fixed(bits, 2)} of {name} ({MENDS[name]})")
    return f"`{row['label']}`: {'; '.join(said)}; together {fmt.fixed(total, 2)} bits."


def _cells(row: dict) -> list[str]:
    excess, times = row["bits"] - row["limit"], row["error"] / row["error_at_limit"]
    return [row["label"], *(fmt.fixed(value, 2) for value in (row["bits"], row["limit"], excess)), fmt.number(times)]


def _parts(row: dict, names: list[str]) -> list[str]:
    return [fmt.fixed(row["parts"][name], 2) if name in row["parts"] else fmt.DASH for name in names]
