"""What the templates of FINDINGS.md name, as text ready to print; a part that was not measured is None."""

from __future__ import annotations

import json
from functools import partial

from kvlab.base.params import Params
from kvlab.pages import format as fmt
from kvlab.pages import parts as tables
from kvlab.report import certified, claims, front, models, verdicts
from kvlab.studies.baseline import tables as baseline
from kvlab.studies.cells import tables as cell_tables
from kvlab.studies.factors import tables as factors
from kvlab.studies.layers import tables as layers
from kvlab.studies.mitigations import tables as mitigations
from kvlab.studies.noise import tables as noise
from kvlab.studies.residual import tables as residual

# The sections of the page in their order, and what each folds away.
SECTIONS = {
    "gap": "Shares of every factor, corners and interactions",
    "factors": "The same over all factors, number formats and calibrations included",
    "models": "Further models beside the first",
    "baseline": "Each engine and number format against the float32 truth",
    "agreement": "Whether numbers of two engines may stand side by side",
    "cells": "Bits, KL, perplexity and top token of every cell",
    "layers": "What each layer costs alone and on top of the others",
    "noise": "How KL grows with an error, and what rounding costs",
    "residual": "Error, rank and bytes by layer, without a model",
    "mitigations": "Where bytes are best spent",
    "calibration": "What the codec was fitted on",
    "verdict": "A word for each cell, and what it rests on",
    "certified": "The rows that the gate certifies",
    "limits": "The smallest effects that this run can tell from none",
    "identity": "Model, text, versions and recipes",
}
METHODS = {
    "bca": "BCa bootstrap over windows, nowhere inside Student's t",
    "percentile": "percentile bootstrap over windows",
    "t": "Student's t over windows",
    "mover": "made of the two models' intervals",
}


def report_context(
    params: Params,
    metrics: dict,
    verdict: dict,
    withheld: str | None,
    comparison: dict | None = None,
    claims_file: dict | None = None,
    gate_page: str = "",
) -> dict:
    """Everything that the templates name, as text ready to print; a part not measured is None.

    `gate_page` is where GATE.md is, seen from the report.
    """
    sizes, identity = metrics["sizes"], metrics["identity"]
    level = fmt.percent(sizes["confidence"])
    gap = gap_context(metrics.get("gap"), level)
    several = models.context(comparison, identity.get("slug"), partial(basis, level=level))
    told = claims.derived(metrics)
    told += comparison["claims"] if several else []
    sentences = claims_context(told)
    return {
        "title": params.report.title,
        "sections": SECTIONS,
        "unit": tables.KL_UNIT,
        "level": level,
        "sizes": {name: fmt.number(sizes[name]) for name in ("context", "eval", "resamples")},
        "alpha": fmt.plain(round(1 - sizes["confidence"], 9)),
        "withheld": withheld,
        "withheld_gap": withheld if not gap else None,
        "gap": gap,
        "factors": gap_context(metrics.get("factors"), level),
        "claims": sentences,
        "by_chance": {name: by_chance(len(found), sizes["confidence"]) for name, found in sentences.items()},
        "models": several,
        "baseline": part(metrics.get("baseline"), baseline.baseline, "kl", level),
        "peers": part(metrics.get("baseline_peers"), baseline.peers, "kl", level),
        "floor": floor_context(metrics.get("floor"), level),
        "agreement": agreement_context(metrics.get("agreement"), level),
        **cells_context(metrics.get("cells"), level),
        "layers": layers.context(metrics, partial(basis, level=level)),
        "noise": noise.context(metrics, partial(basis, level=level)),
        "residual": residual.context(metrics.get("residual"), sizes["confidence"], METHODS),
        "mitigations": mitigations.mitigations_context(metrics, partial(basis, level=level)),
        **calibration_context(metrics),
        "thresholds": thresholds(params),
        "verdict": verdict_context(verdict),
        "certified": certified.context(claims_file, identity.get("slug"), gate_page),
        "front": front.context(params, metrics, claims_file, told),
        "limits": limits(metrics),
        "open_questions": open_questions(told, verdict),
        "identity": identity_context(identity),
        "model": identity["model"],
        "corpus": identity["corpus"],
    }


def by_chance(count: int, confidence: float) -> str:
    """How many of so many effects would be resolved if there were none."""
    return fmt.number(float(round((1 - confidence) * count, 1)), 2)


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


def claims_context(found: list[dict] | None) -> dict[str, list[str]]:
    """The sentences of each section that makes claims."""
    return {name: [] for name in SECTIONS} | {group["about"]: group["sentences"] for group in claims.sections(found)}


def gap_context(gap: dict | None, level: str) -> dict | None:
    """The decomposition: a dict per measure, and the corners in words."""
    if not gap or not gap["factors"] or not gap["measures"]:
        return None
    names = sorted(gap["measures"], key=lambda name: name != "kl")  # the headline's measure first
    measures = {name: measure_context(gap["measures"][name], level) for name in names}
    return {
        "factors": gap["factors"],
        "crosses": gap["low"]["engine"] != gap["high"]["engine"] and len(gap["factors"]) > 1,
        "measured": ", ".join(f"`{gap[name]}`" for name in ("stream", "dtype") if gap.get(name)),
        "low": f"({factors.corner(gap['low'])})",
        "high": f"({factors.corner(gap['high'])})",
        "measures": measures,
        "corners": factors.corners(gap["measures"]),
    }


def measure_context(measure: dict, level: str) -> dict:
    """One measure of the decomposition."""
    interactions = factors.interactions(measure, tables.KL_UNIT) if measure.get("interactions") else None
    return tables.resolution(measure["gap"]) | {
        "gap": fmt.estimate(measure["gap"]),
        "rises": measure["gap"]["value"] > 0,
        "table": factors.decomposition(measure, tables.KL_UNIT),
        "basis": basis([measure["gap"], *(part["share"] for part in measure["parts"])], level),
        "interactions": interactions,
    }


def floor_context(floors: dict | None, level: str) -> dict | None:
    """The engines' own noise."""
    found = [given for row in (floors or {}).values() for given in row.values() if given]
    return {"table": baseline.floor(floors), "basis": basis(found, level)} if found else None


def agreement_context(agreement: dict | None, level: str) -> dict | None:
    """The float32 check of the engines."""
    if not agreement:
        return None
    found = [*agreement["identity"].values(), *(row["cross_kl"] for row in agreement["codec"].values())]
    return {
        "table": baseline.agreement(agreement),
        "basis": basis(found, level),
        "holds": agreement["holds"],
        "why": agreement["why"],
    }


def cells_context(cells: list[dict] | None, level: str) -> dict:
    """All cells, and the coded ones again by percentile, confidence and the published estimator."""
    coded = [cell for cell in cells or [] if cell["role"] == "codec"]
    every = {
        "groups": cell_tables.by_engine(cells or [], cell_tables.cells),
        "basis": basis([cell["kl_net"] for cell in cells or []], level),
    }
    return {
        "cells": every if cells else None,
        "percentiles": cell_tables.by_engine(coded, cell_tables.percentiles),
        "by_confidence": cell_tables.by_engine(coded, cell_tables.by_confidence),
        "published": cell_tables.by_engine(coded, cell_tables.published),
    }


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
        "cells": verdicts.verdicts(cells) if cells else None,
        "preconditions": verdicts.preconditions(conditions) if conditions else None,
    }


def limits(metrics: dict) -> str | None:
    """The smallest resolvable effects of every study that was run."""
    rows = []
    for study, where in (("gap", "of the gap"), ("factors", "over all factors")):
        for name, measure in ((metrics.get(study) or {}).get("measures") or {}).items():
            rows.append((f"shares {where}, `{name}`", [row["share"] for row in measure["parts"]]))
            rows.append((f"interactions {where}, `{name}`", [row["effect"] for row in measure["interactions"]]))
    keyed = {
        "baseline": ("engines without a codec, KL", "kl"),
        "baseline_peers": ("engines against each other, KL", "kl"),
        "cells": ("cells, net KL", "kl_net"),
        "layers": ("layers alone and left out, KL", "kl"),
        "additivity": ("layers together minus sum, KL", "interaction"),
        "noise": ("noise, KL", "kl"),
        "noise_slope": ("noise, slope", "slope"),
    }
    for name, (study, key) in keyed.items():
        rows.append((study, [row[key] for row in metrics.get(name) or []]))
    compared = (metrics.get("mitigations") or {}).get("comparisons") or []
    rows.append(("ways to spend bytes, KL", [row["difference"] for row in compared if not row["same"]]))
    rows = [(study, found) for study, given in rows if (found := [one for one in given if one])]
    return tables.limits(rows) if rows else None


def open_questions(told: list[dict], verdict: dict) -> list[str]:
    """The effects of factors and the verdicts that this run leaves open."""
    divided = [claim for claim in told if claim["about"] in ("gap", "factors")]
    lines = [claims.sentence(claim) for claim in divided if not claims.resolved(claim)]
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
