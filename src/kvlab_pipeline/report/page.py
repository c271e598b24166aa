"""The page itself: one file that asks nothing of any network.

Its one script is named by its hash in the page's Content-Security-Policy, which forbids all connections; so a word of
the findings could not run as a script even if it were one. The figures stand in the page as drawings, so they are
there without scripts too; the script lets a reader point at a mark or step through the marks by key.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from markupsafe import Markup

from kvlab.core.errors import Fault
from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.rendering.figure import DARK
from kvlab_pipeline.rendering.html import body, unique
from kvlab_pipeline.report import figures

ASSETS = Path(__file__).parent / "assets"
DIGITS = 6  # of the drawn numbers in the table beside a figure; the CSV and the <data> element hold them exactly
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src 'unsafe-inline'; connect-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)


def write(out: Path, text: str, metrics: dict) -> None:
    """Write the page.

    Parameters
    ----------
    out : Path
        The file to write; nothing else is written.
    text : str
        FINDINGS.md as rendered: the page's words and tables.
    metrics : dict
        What the figures may show: ``metrics.json`` without what is withheld.

    Raises
    ------
    Fault
        When the text shows a picture that is no figure of the report, or one that has nothing to draw.
    """
    write_text(Path(out), page(text, metrics))


def page(text: str, metrics: dict) -> str:
    """The page as text; the same for the same arguments."""
    taken: set[str] = set()
    level = fmt.percent(metrics["sizes"]["confidence"]).replace(" ", "\N{NO-BREAK SPACE}")
    content = body(text, lambda name, alt: figure(name, alt, metrics, level, taken))
    script = asset("report.js")
    return template("page.html.j2").render(
        title=content.title,
        sections=content.sections,
        body=Markup(content.html),
        policy=POLICY.format(script=digest(script)),
        colours={light.removeprefix("#"): f"light-dark({light}, {dark})" for light, dark in DARK.items()},
        style=Markup(asset("report.css")),
        script=Markup(script),
    )


# ------------------------------------------------------------------------------------- one figure


def figure(name: str, alt: str, metrics: dict, level: str, taken: set[str]) -> str:
    """One figure: caption, drawing for wide and for narrow windows, what its marks say, the drawn numbers."""
    if name not in figures.FIGURES or not figures.drawable(name, metrics):
        raise Fault(
            f"the findings show the figure {name!r}, which these metrics do not draw", code="fault.unknown-figure"
        )
    table = figures.FIGURES[name].table(metrics)
    drawn = figures.described(name, table)
    anchor = unique(f"figure-{name}", taken)
    csv = base64.b64encode(table.write_csv().encode()).decode()
    return template("figure.html.j2").render(
        id=anchor,
        name=name,
        alt=alt,
        level=level,
        note=drawn.note,
        points=fmt.number(len(table)),
        wide=Markup(svg.inline(drawn, f"{anchor}-wide", svg.WIDE)),
        narrow=Markup(svg.inline(drawn, f"{anchor}-narrow", svg.NARROW)),
        words=Markup(as_json([mark.words for mark in sorted(drawn.marks, key=lambda mark: mark.row)])),
        columns=table.columns,
        rows=[[shown(value) for value in row] for row in table.iter_rows()],
        numeric=[kind.is_numeric() for kind in table.dtypes],
        csv=f"data:text/csv;base64,{csv}",
    )


def shown(value: object) -> dict:
    """A cell of the drawn numbers: its text, and the exact number for what reads the page."""
    if isinstance(value, bool):
        return {"text": "yes" if value else "no", "exact": None}
    if isinstance(value, float):
        return {"text": fmt.number(value, DIGITS), "exact": repr(value)}
    return {"text": fmt.number(value) if isinstance(value, int) or value is None else str(value), "exact": None}


# ---------------------------------------------------------------------------------------- pieces


def as_json(data: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end one."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def digest(code: str) -> str:
    """A script's hash, as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}"


def asset(name: str) -> str:
    """A file of the page's own."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def environment():
    """The page's templates; whatever is put into them is escaped unless it was made here."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        lstrip_blocks=True,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def template(name: str):
    """One of the page's templates."""
    return environment().get_template(name)
