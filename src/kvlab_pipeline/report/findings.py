"""FINDINGS.md: templates over numbers, with the figures beside it.

`write` turns ``metrics.json`` and ``verdict.json`` into one Markdown file. No numeral is typed into a
template; every printed number comes out of `kvlab.output.format`. What compares engines is taken out
before anything is rendered when the engines do not agree, so no sentence can leak it.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvlab.core.params import Params
from kvlab.core.records import read_json, write_text
from kvlab.output import format as fmt
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.rendering.withheld import withheld_because, without_cross_engine
from kvlab_pipeline.report import figures, page
from kvlab_pipeline.report.contexts import report_context

GATE_PAGE = "GATE.md"
WITHHELD = "Withheld: this run may not compare engines."


def write(
    params: Params,
    metrics: dict,
    verdict: dict,
    out: Path,
    html: Path | None = None,
    comparison: dict | None = None,
    claims: Path | None = None,
) -> None:
    """Write FINDINGS.md to `out` and all figures (SVG and CSV) to ``figures/`` beside it; to `html` the page of both.

    A figure that was not measured or is withheld holds one sentence instead and is not linked.

    Parameters
    ----------
    params : Params
        Read: ``report.title`` and ``verdict`` (the thresholds that are printed).
    metrics, verdict : dict
        ``metrics.json`` and ``verdict.json``; a part that was not measured may be None, empty or absent.
    out : Path
    html : Path, optional
        Where the same words and tables go as one page with interactive figures; its links lead to such pages.
    comparison : dict, optional
        ``comparison.json``. The first of its models sets all of them beside one another, the others link that page.
    claims : Path, optional
        ``claims.json`` of the gate, beside its GATE.md, which is linked.

    Raises
    ------
    NonFinite
        When the metrics or the verdict hold NaN or infinity; nothing is written then.
    Fault
        When the shares of a decomposition do not add up to its gap.
    UserError
        When the comparison is none, or of other models; when the claims are none.
    """
    out = Path(out)
    fmt.refuse_non_finite(metrics, "metrics")
    fmt.refuse_non_finite(verdict, "verdict")
    fmt.refuse_non_finite(comparison, "comparison")
    claimed = read_json(claims) if claims else None
    fmt.refuse_non_finite(claimed, "claims")
    withheld = withheld_because(metrics, verdict)
    shown = without_cross_engine(metrics) if withheld else metrics
    gate_page = Path(os.path.relpath(Path(claims).with_name(GATE_PAGE), out.parent)).as_posix() if claims else ""
    context = report_context(params, shown, verdict, withheld, comparison, claimed, gate_page)
    drawable = {name: figures.drawable(name, shown) for name in figures.FIGURES}
    links = {name: f"figures/{name}.svg" if there else None for name, there in drawable.items()}
    # Rendered before any file is touched: a report that cannot be rendered leaves the old one whole.
    text = render("findings.md.j2", **context, figures=links, page=out.name, fold=True)
    words = render("findings.md.j2", **context, figures=links, page=Path(html).name, fold=True) if html else None
    for name in figures.FIGURES:
        hidden = withheld and figures.drawable(name, metrics)
        figures.write(name, shown, out.parent / "figures", WITHHELD if hidden else figures.NOT_MEASURED)
    if html:
        page.write(html, words, shown)
    write_text(out, text)
