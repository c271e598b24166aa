"""What `kvlab recommend` found as one HTML file that needs nothing beside it: lines, pictures, every number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kvlab.advice.verdicts import BROKEN, LOSSES, OPEN, bound

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 380, 64, 44, 16
MOST_BITS = 17.0
LEAST_KL = 1e-7
COLOURS = {"safe": "#1a7f37", "small": "#0969da", "noticeable": "#bf8700", BROKEN: "#cf222e", OPEN: "#6e7781"}
COLUMNS = ("format", "engines", "bits", "KL", "95 %", "median", "99 %", "99.9 %", "same top token", "verdict")
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .15rem .7rem .15rem 0; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap; }
pre { background: #8882; padding: .6rem; overflow-x: auto; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.scroll { overflow-x: auto; }
"""


def page(found: Mapping, command: str) -> str:
    """The page.

    Parameters
    ----------
    found : mapping
        What `kvlab recommend --json` writes.
    command : str
        What was typed.
    """
    floor = found["floor"]["kl"]["value"]
    halves = found["windows"]
    about = (
        f"{halves['choose']} windows of {found['context']} coded and {found['eval']} predicted tokens of"
        f" {found['text']} chose, {halves['confirm']} others confirm; transformers, {found['dtype']},"
        f" {found['device']}."
    )
    parts = [
        f"<h1>{_text(found['model'])}: which cache format</h1>",
        f"<p>{_text(found['disclosure'] or '')}</p><p>{_text(about)}</p>",
        f"<pre>{_text(command)}</pre>",
        *(_line(line) for line in found["lines"]),
        "<h2>KL over bits per value</h2>",
        "<p>Every format over a finished cache, with its 95 % interval. The dashed line is the noise floor, K and V"
        " rounded to bfloat16; thin lines end the verdicts.</p>",
        scatter(found["finished"], floor),
        *(
            f"<h2>Loss by layer: {_text(name)} in {_text(line['engine'])}</h2>"
            "<p>KL where that layer alone is coded, on two windows.</p>" + by_layer(losses)
            for line in found["lines"]
            for name, losses in line["losses"].items()
        ),
        "<h2>Every format over a finished cache</h2>",
        table(found["finished"]),
        "<h2>Candidates as their engines read them</h2>",
        table(found["served"]),
    ]
    title = f"{_text(found['model'])}: which cache format"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _line(line: Mapping) -> str:
    """An engine's line, its cost on text that chose nothing, and what nobody measured."""
    chosen, kl = line["chosen"], line["confirmed"] and line["confirmed"]["kl"]
    said = "none of its formats is surely what was asked for"
    if chosen:
        held = {"yes": "confirmed", "no": "not confirmed: do not take it", OPEN: "not settled"}[line["holds"]]
        said = (
            f"{chosen['format']}, {chosen['bits_per_value']:.2f} bits per value, {held} on text that chose nothing:"
            f" KL {kl['value']:.2g}, 95 % {kl['low']:.2g} to {kl['high']:.2g}"
        )
    return (
        f"<h2>{_text(line['engine'])}</h2><p>{_text(said)}.</p><pre>{_text(line['paste'])}</pre>"
        f"<p>Held against: {_text(line['formats_held_against'])}. Not measured: {_text(line['not_measured'])}.</p>"
    )


def scatter(rows: Sequence[Mapping], floor: float) -> str:
    """KL, on a logarithm, over bits per value; the noise floor and the ends of the verdicts."""
    tallest = max([row["kl"]["high"] for row in rows] + [bound("noticeable")])
    low, high = math.floor(math.log10(max(floor, LEAST_KL))), math.ceil(math.log10(tallest))

    def x(bits: float) -> float:
        return LEFT + (WIDTH - LEFT) * bits / MOST_BITS

    def y(kl: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(max(kl, 10.0**low))) / (high - low)

    drawn = [_mark(f"10^{power}", 0, y(10.0**power) + 4) for power in range(low, high + 1)]
    drawn += [_mark(str(bits), x(bits) - 4, HEIGHT - BOTTOM + 18) for bits in range(2, 17, 2)]
    drawn.append(_mark("bits per value", x(7), HEIGHT - 6))
    for end, name in [(bound(loss, floor), loss) for loss in LOSSES]:
        drawn.append(_rule(y(end), f'stroke="{COLOURS[name]}" stroke-width=".7"'))
        drawn.append(_mark(name, WIDTH - 70, y(end) + 12, f'fill="{COLOURS[name]}"'))
    drawn.append(_rule(y(floor), 'stroke="currentColor" stroke-dasharray="4 3"'))
    for row in rows:
        kl, at = row["kl"], x(row["bits_per_value"])
        colour = COLOURS[row["verdict"]]
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{y(kl["low"]):.1f}" y2="{y(kl["high"]):.1f}"'
        told = f"{row['format']}: {row['bits_per_value']:.2f} bits, KL {kl['value']:.2g}"
        drawn.append(
            f'<g><title>{_text(told)}</title><line {ends} stroke="{colour}"/>'
            f'<circle cx="{at:.1f}" cy="{y(kl["value"]):.1f}" r="4" fill="{colour}"/></g>'
        )
        drawn.append(_mark(row["format"], at + 6, y(kl["value"]) + 4, 'font-size="9"'))
    return _svg(drawn)


def by_layer(losses: Mapping[str, float]) -> str:
    """A bar for each layer; the layers that are coded alone, by number."""
    most, layers = max(losses.values()) or 1.0, sorted(losses, key=int)
    step = (WIDTH - LEFT) / len(layers)
    drawn = [_mark(f"{most:.2g}", 0, TOP + 8)]
    for place, layer in enumerate(layers):
        size, left = (HEIGHT - TOP - BOTTOM) * losses[layer] / most, LEFT + place * step
        drawn.append(
            f'<rect x="{left:.1f}" y="{HEIGHT - BOTTOM - size:.1f}" width="{0.8 * step:.1f}" height="{size:.1f}"'
            f' fill="{COLOURS["small"]}"><title>layer {_text(layer)}: {losses[layer]:.2g}</title></rect>'
        )
        drawn.append(_mark(layer, left, HEIGHT - BOTTOM + 16, 'font-size="9"'))
    return _svg(drawn)


def table(rows: Iterable[Mapping]) -> str:
    """Rows with their intervals and quantiles."""
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in COLUMNS)}</tr>"]
    for row in rows:
        kl, told = row["kl"], row["verdict"]
        cells = [
            row["format"],
            ", ".join(row["engines"]),
            f"{row['bits_per_value']:.2f}",
            f"{kl['value']:.2g}",
            f"{kl['low']:.2g} to {kl['high']:.2g}",
            *(f"{value:.2g}" for value in row["quantiles"].values()),
            f"{100 * row['top1']['value']:.1f} %",
            told if told != OPEN else f"{told}: {row['possible'][0]} to {row['possible'][-1]}",
        ]
        lines.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _svg(parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH + 40} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _rule(height: float, more: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" {more}/>'


def _mark(said: str, x: float, y: float, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{_text(said)}</text>'


def _text(value: object) -> str:
    return escape(str(value))
