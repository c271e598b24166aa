"""FINDINGS.md: templates over numbers, with the figures beside it.

`write` turns ``metrics.json`` and ``verdict.json`` into one Markdown file. No numeral is typed into a
template; every printed number comes out of `kvlab.report.format`. What compares engines is taken out
before anything is rendered when the engines do not agree, so no sentence can leak it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jinja2

from kvlab.params import Params
from kvlab.records import write_text
from kvlab.report import figures, tables
from kvlab.report import format as fmt

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS = ("gap", "baseline", "agreement", "cells", "layers", "noise", "calibration", "verdict", "limits")
WITHHELD = "Withheld: this run may not compare engines."
TRUTH_ENGINE = "hf"
METHODS = {
    "bca": "BCa bootstrap over windows",
    "percentile": "percentile bootstrap over windows",
    "t": "Student's t over windows",
}


def write(params: Params, metrics: dict, verdict: dict, out: Path) -> None:
    """Write FINDINGS.md to `out` and all figures (SVG and CSV) to ``figures/`` beside it.

    A figure that was not measured or is withheld holds one sentence instead and is not linked.

    Parameters
    ----------
    params : Params
        Read: ``report.title`` and ``verdict`` (the thresholds that are printed).
    metrics, verdict : dict
        ``metrics.json`` and ``verdict.json``; a part that was not measured may be None, empty or absent.
    out : Path

    Raises
    ------
    NonFinite
        When the metrics or the verdict hold NaN or infinity; nothing is written then.
    Fault
        When the shares of a decomposition do not add up to its gap.
    """
    out = Path(out)
    fmt.refuse_non_finite(metrics, "metrics")
    fmt.refuse_non_finite(verdict, "verdict")
    withheld = withheld_because(metrics, verdict)
    shown = without_cross_engine(metrics) if withheld else metrics
    context = report_context(params, shown, verdict, withheld)
    drawable = {name: figures.drawable(name, shown) for name in figures.FIGURES}
    links = {name: f"figures/{name}.svg" if there else None for name, there in drawable.items()}
    # Rendered before any file is touched: a report that cannot be rendered leaves the old one whole.
    text = render("findings.md.j2", **context, figures=links)
    for name in figures.FIGURES:
        hidden = withheld and figures.drawable(name, metrics)
        figures.write(name, shown, out.parent / "figures", WITHHELD if hidden else figures.NOT_MEASURED)
    write_text(out, text)


# ----------------------------------------------------------------- what may be said across engines


def withheld_because(metrics: dict, verdict: dict) -> str | None:
    """The reason why no number that compares engines may be printed; None when they may, or there is none."""
    if not compares_engines(metrics):
        return None
    agreement = metrics.get("agreement")
    if not agreement:
        why = "; ".join(metrics.get("agreement_why") or [])
        return fmt.safe(why or "the agreement of the engines in float32 was not measured")
    if agreement["holds"] and verdict.get("cross_engine_allowed", True):
        return None
    reasons = agreement["why"] or [
        f"{row['name']}: {row['detail']}" for row in verdict.get("preconditions") or [] if not row["holds"]
    ]
    return fmt.safe("; ".join(reasons) or "the gate does not allow it").rstrip(".")


def compares_engines(metrics: dict) -> bool:
    """Whether anything in the metrics sets one engine against another."""
    gap, sigma = metrics.get("gap"), metrics.get("sigma") or {}
    return bool(
        metrics.get("agreement")
        or (gap and gap["low"]["engine"] != gap["high"]["engine"])
        or any(row["engine"] != TRUTH_ENGINE for row in metrics.get("baseline") or [])
        or sigma.get("drift")
    )


def without_cross_engine(metrics: dict) -> dict:
    """The metrics without every part that compares engines."""
    gap = metrics.get("gap")
    crosses = gap and gap["low"]["engine"] != gap["high"]["engine"]
    return metrics | {
        "gap": None if crosses else gap,
        "agreement": None,
        "baseline": [row for row in metrics.get("baseline") or [] if row["engine"] == TRUTH_ENGINE],
        "sigma": {key: value for key, value in (metrics.get("sigma") or {}).items() if key != "drift"},
    }


# ------------------------------------------------------------------------- what the templates read


def report_context(params: Params, metrics: dict, verdict: dict, withheld: str | None) -> dict:
    """Everything that the templates name, as text ready to print; a part not measured is None."""
    sizes, identity = metrics["sizes"], metrics["identity"]
    level = fmt.percent(sizes["confidence"])
    gap = gap_context(metrics.get("gap"), level)
    return {
        "title": params.report.title,
        "sections": (*SECTIONS, "identity"),
        "unit": tables.KL_UNIT,
        "level": level,
        "sizes": {name: fmt.number(sizes[name]) for name in ("context", "eval", "resamples")},
        "alpha": fmt.plain(round(1 - sizes["confidence"], 9)),
        "withheld": withheld,
        "withheld_gap": withheld if not gap else None,
        "gap": gap,
        "baseline": part(metrics.get("baseline"), tables.baseline, "kl", level),
        "floor": floor_context(metrics.get("floor"), level),
        "agreement": agreement_context(metrics.get("agreement"), level),
        **cells_context(metrics.get("cells"), level),
        "layers": layers_context(metrics, level),
        "additivity": part(metrics.get("additivity"), tables.additivity, "interaction", level),
        "noise": noise_context(metrics, level),
        **calibration_context(metrics),
        "thresholds": thresholds(params),
        "verdict": verdict_context(verdict),
        "limits": limits(metrics),
        "open_questions": open_questions(metrics, verdict),
        "identity": identity_context(identity),
        "model": identity["model"],
        "corpus": identity["corpus"],
    }


def basis(estimates: list[dict], level: str, unit: str = tables.KL_UNIT) -> str:
    """The line under a table: on how much it rests and what it can tell from zero."""
    estimates = tables.scattered([given for given in estimates if given])
    if not estimates:
        return ""
    smallest = [fmt.number(pick(given["resolvable"] for given in estimates), 2) for pick in (min, max)]
    effect = smallest[0] if smallest[0] == smallest[1] else " to ".join(smallest)
    used = {given.get("method", "bca") for given in estimates}
    methods = " or ".join(words for method, words in METHODS.items() if method in used)
    windows, tokens = (fmt.span(given[key] for given in estimates) for key in ("n_windows", "n_tokens"))
    return (
        f"*{windows} windows, {tokens} scored tokens, {level} intervals in brackets ({methods}); "
        f"the smallest effect told from zero is {effect} {unit}{'' if effect in smallest else ', by row'}.*"
    )


def part(rows: list[dict] | None, make, key: str, level: str) -> dict | None:
    """A table and the line under it; None when there are no rows."""
    if not rows:
        return None
    return {"table": make(rows), "basis": basis([row[key] for row in rows], level)}


def gap_context(gap: dict | None, level: str) -> dict | None:
    """The decomposition: a dict per measure, and the corners in words."""
    if not gap or not gap["factors"] or not gap["measures"]:
        return None
    names = sorted(gap["measures"], key=lambda name: name != "kl")  # the headline's measure first
    measures = {name: measure_context(gap["measures"][name], level) for name in names}
    return {
        "main": "kl" if "kl" in measures else next(iter(measures)),
        "factors": gap["factors"],
        "crosses": gap["low"]["engine"] != gap["high"]["engine"] and len(gap["factors"]) > 1,
        "measured": ", ".join(f"`{gap[name]}`" for name in ("stream", "dtype") if name in gap),
        "low": f"({tables.corner(gap['low'])})",
        "high": f"({tables.corner(gap['high'])})",
        "measures": measures,
        "corners": tables.corners(gap["measures"]),
    }


def measure_context(measure: dict, level: str) -> dict:
    """One measure of the decomposition."""
    parts = tables.shares(measure)
    interactions = tables.interactions(measure, tables.KL_UNIT) if measure.get("interactions") else None
    return tables.resolution(measure["gap"]) | {
        "parts": [part | {"has_percent": part["of_gap"] != fmt.DASH} for part in parts],
        "gap": fmt.estimate(measure["gap"]),
        "rises": measure["gap"]["value"] > 0,
        "table": tables.decomposition(measure, tables.KL_UNIT),
        "basis": basis([measure["gap"], *(part["share"] for part in measure["parts"])], level),
        "interactions": interactions,
    }


def floor_context(floors: dict | None, level: str) -> dict | None:
    """The engines' own noise."""
    found = [given for row in (floors or {}).values() for given in row.values() if given]
    return {"table": tables.floor(floors), "basis": basis(found, level)} if found else None


def agreement_context(agreement: dict | None, level: str) -> dict | None:
    """The float32 check of the engines."""
    if not agreement:
        return None
    found = [*agreement["identity"].values(), *(row["cross_kl"] for row in agreement["codec"].values())]
    return {
        "table": tables.agreement(agreement),
        "basis": basis(found, level),
        "holds": agreement["holds"],
        "why": agreement["why"],
    }


def cells_context(cells: list[dict] | None, level: str) -> dict:
    """All cells, and the coded ones again by percentile, confidence and the published estimator."""
    coded = [cell for cell in cells or [] if cell["role"] == "codec"]
    every = {
        "groups": tables.by_engine(cells or [], tables.cells),
        "basis": basis([cell["kl_net"] for cell in cells or []], level),
    }
    return {
        "cells": every if cells else None,
        "percentiles": tables.by_engine(coded, tables.percentiles),
        "by_confidence": tables.by_engine(coded, tables.by_confidence),
        "published": tables.by_engine(coded, tables.published),
    }


def layers_context(metrics: dict, level: str) -> dict | None:
    """Single layers, judged at one minus the confidence."""
    alpha = 1 - metrics["sizes"]["confidence"]
    return part(metrics.get("layers"), lambda rows: tables.layers(rows, alpha), "kl", level)


def noise_context(metrics: dict, level: str) -> dict | None:
    """Noise and its slopes."""
    found = part(metrics.get("noise"), tables.noise, "kl", level)
    slopes = metrics.get("noise_slope")
    return found and found | {"slopes": tables.noise_slope(slopes) if slopes else None}


def calibration_context(metrics: dict) -> dict:
    """Sigma_q by engine, the drift between engines, and the codebooks."""
    sigma = dict(metrics.get("sigma") or {})
    drift = sigma.pop("drift", None)
    by_engine = {engine: values for engine, values in sigma.items() if isinstance(values, dict)}
    books = metrics.get("codebooks") or []
    books = books.get("tables", []) if isinstance(books, dict) else books
    if tables.is_estimate(drift):
        drift = {"drift": drift}
    return {
        "sigma": tables.side_by_side(by_engine) if by_engine else None,
        "drift": tables.fields(drift) if drift else None,
        "codebooks": tables.records(books, leave_out=("file", "name")) if books else None,
    }


def thresholds(params: Params) -> dict:
    """The bounds of the verdict in per cent."""
    given = params.verdict
    return {
        "accept_ppl": fmt.percent(given.accept_ppl),
        "accept_top": fmt.percent(given.accept_top1),
        "marginal_ppl": fmt.percent(given.marginal_ppl),
        "marginal_top": fmt.percent(given.marginal_top1),
    }


def verdict_context(verdict: dict) -> dict:
    """Verdicts and what they stand on."""
    cells, conditions = verdict.get("cells"), verdict.get("preconditions")
    return {
        "publishable": verdict["publishable"],
        "cells": tables.verdicts(cells) if cells else None,
        "preconditions": tables.preconditions(conditions) if conditions else None,
    }


def limits(metrics: dict) -> str | None:
    """The smallest resolvable effects of every study that was run."""
    rows = []
    for name, measure in ((metrics.get("gap") or {}).get("measures") or {}).items():
        rows.append((f"shares of the gap, `{name}`", [row["share"] for row in measure["parts"]]))
        rows.append((f"interactions, `{name}`", [row["effect"] for row in measure["interactions"]]))
    keyed = {
        "baseline": ("engines without a codec, KL", "kl"),
        "cells": ("cells, net KL", "kl_net"),
        "layers": ("single layers, KL", "kl"),
        "additivity": ("layers together minus sum, KL", "interaction"),
        "noise": ("noise, KL", "kl"),
        "noise_slope": ("noise, slope", "slope"),
    }
    for name, (study, key) in keyed.items():
        rows.append((study, [row[key] for row in metrics.get(name) or []]))
    rows = [(study, found) for study, given in rows if (found := [one for one in given if one])]
    return tables.limits(rows) if rows else None


def open_questions(metrics: dict, verdict: dict) -> list[str]:
    """The effects and verdicts that this run leaves open."""
    lines = []
    for name, measure in ((metrics.get("gap") or {}).get("measures") or {}).items():
        effects = [(row["factor"], row["share"]) for row in measure["parts"]]
        effects.append(("the whole gap", measure["gap"]))
        for factor, given in effects:
            found = tables.resolution(given)
            if not found["resolved"]:
                lines.append(f"Whether {factor} moves `{name}` up or down{needing(found)}.")
    undecided = [row for row in verdict.get("cells") or [] if row["verdict"] == "INCONCLUSIVE"]
    needed = [row["windows_needed"] for row in undecided if row["windows_needed"] is not None]
    if needed:
        cells = "the INCONCLUSIVE cells" if len(undecided) > 1 else "the INCONCLUSIVE cell"
        lines.append(f"The verdict of {cells}: {fmt.span(needed)} windows needed.")
    return lines


def identity_context(identity: dict) -> dict:
    """Hashes, versions and machine as one table; recipes as JSON."""
    recipes = identity.get("recipes") or {}
    return {
        "table": tables.fields({key: value for key, value in identity.items() if key != "recipes"}),
        "recipes": [
            {"id": recipe_id, "json": json.dumps(recipe, indent=2, sort_keys=True)}
            for recipe_id, recipe in sorted(recipes.items())
        ],
    }


# ------------------------------------------------------------------------------------- rendering


def render(template: str, **context) -> str:
    """One template over a context, tidied."""
    return tidy(environment(TEMPLATES).get_template(template).render(context))


@functools.cache
def environment(folder: Path) -> jinja2.Environment:
    """The templates of a folder; they refuse a name nobody set."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    made.filters |= {"code": lambda name: f"`{name}`", "listing": listing}
    made.globals["needing"] = needing
    return made


def needing(effect: dict) -> str:
    """How many windows an effect that is not resolved would take."""
    if not effect["needed"]:
        return f" (this run has {effect['windows']} windows and sees no effect at all)"
    return f" (about {effect['needed']} windows needed, this run has {effect['windows']})"


def listing(names) -> str:
    """``a, b and c``."""
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last


def tidy(text: str) -> str:
    """No trailing blanks, never two empty lines in a row, one newline at the end."""
    lines = []
    for line in text.splitlines():
        line = line.rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"
