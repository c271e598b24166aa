"""The page itself: one file that asks nothing of any network.

Every script in it is named by its hash in the page's Content-Security-Policy, which forbids all connections; so a
word of the findings could not run as a script even if it were one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

import polars as pl
from markupsafe import Markup

from kvlab.errors import Fault
from kvlab.records import write_text
from kvlab.report import figures
from kvlab.report import format as fmt
from kvlab.report.figures.interactive import marks
from kvlab.report.html.markdown import body, unique

ASSETS = Path(__file__).parent / "assets"
DIGITS = 6  # of the drawn numbers in the table beside a figure; the CSV and the <data> element hold them exactly
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)


def write(out: Path, text: str, metrics: dict, pictures: Path) -> None:
    """Write the page.

    Parameters
    ----------
    out : Path
        The file to write; nothing else is written.
    text : str
        FINDINGS.md as rendered: the page's words and tables.
    metrics : dict
        What the figures may show: ``metrics.json`` without what is withheld.
    pictures : Path
        Folder of the figures' SVGs, for readers without scripts.

    Raises
    ------
    Fault
        When the text shows a picture that is no figure of the report, or one that has nothing to draw.
    """
    write_text(Path(out), page(text, metrics, Path(pictures)))


def page(text: str, metrics: dict, pictures: Path) -> str:
    """The page as text; the same for the same arguments."""
    taken: set[str] = set()
    level = fmt.percent(metrics["sizes"]["confidence"]).replace(" ", "\N{NO-BREAK SPACE}")
    content = body(text, lambda name, alt: figure(name, alt, metrics, pictures, level, taken))
    plotly, script = plotly_js(), asset("report.js")
    return template("page.html.j2").render(
        title=content.title,
        sections=content.sections,
        body=Markup(content.html),
        policy=POLICY.format(scripts=" ".join(f"'{digest(code)}'" for code in (script, plotly))),
        style=Markup(asset("report.css")),
        script=Markup(script),
        plotly=Markup(plotly) if taken else None,
        dark=Markup(as_json(marks.DARK)),
    )


# ------------------------------------------------------------------------------------- one figure


def figure(name: str, alt: str, metrics: dict, pictures: Path, level: str, taken: set[str]) -> str:
    """One figure: caption, plot, what the keyboard reads, the drawn numbers, the still picture."""
    if name not in figures.FIGURES or not figures.drawable(name, metrics):
        raise Fault(f"the findings show the figure {name!r}, which these metrics do not draw")
    table = figures.FIGURES[name].table(metrics)
    drawn = plotted(name, table)
    return template("figure.html.j2").render(
        id=unique(f"figure-{name}", taken),
        name=name,
        alt=alt,
        level=level,
        note=drawn["layout"]["meta"]["note"],
        height=drawn["layout"]["height"],
        points=fmt.number(len(table)),
        json=Markup(as_json(drawn)),
        columns=table.columns,
        rows=[[shown(value) for value in row] for row in table.iter_rows()],
        numeric=[kind.is_numeric() for kind in table.dtypes],
        csv=data_url("text/csv", table.write_csv().encode()),
        picture=data_url("image/svg+xml", (pictures / f"{name}.svg").read_bytes()),
    )


def plotted(name: str, table: pl.DataFrame) -> dict:
    """A figure as plotly's JSON; each row of the table must be one point of it.

    Raises
    ------
    Fault
        When a drawn number could not be reached by its reader.
    """
    drawn = json.loads(figures.FIGURES[name].interactive(table).to_json())
    drawn["layout"].pop("template", None)
    rows = sorted(row for trace in drawn["data"] for row in (trace.get("meta") or {}).get("rows", []))
    if rows != list(range(len(table))):
        raise Fault(f"the interactive figure {name!r} holds rows {rows} of a table of {len(table)}")
    return drawn


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


def data_url(kind: str, content: bytes) -> str:
    """Content as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def digest(code: str) -> str:
    """A script's hash, as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}"


def asset(name: str) -> str:
    """A file of the page's own."""
    return (ASSETS / name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """plotly.js as it comes with plotly, checked to fit inside a script element."""
    from plotly.offline import get_plotlyjs

    code = get_plotlyjs()
    if "</script" in code.lower() or "<!--" in code:
        raise Fault("this plotly.js cannot stand inside a page; install the plotly of requirements/")
    return code


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
