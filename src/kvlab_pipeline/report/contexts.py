"""What the templates of FINDINGS.md name, as text ready to print; a part that was not measured is None."""

from __future__ import annotations

import json

from kvlab.core.params import Params
from kvlab.output import format as fmt
from kvlab_pipeline.rendering import parts as tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.report import certified, claims, front, models
from kvlab_pipeline.studies.cells.chapter import name as cell_name
from kvlab_pipeline.studies.chapter import PageSection
from kvlab_pipeline.studies.register import chapters

# The sections that no study brings, among those of the studies.
OWN = {
    "models": PageSection(30, "Further models beside the first", asks="further models beside the first"),
    "calibration": PageSection(1000, "What the codec was fitted on"),
    "verdict": PageSection(1010, "A word for each cell, and what it rests on"),
    "certified": PageSection(1020, "The rows that the gate certifies"),
    "limits": PageSection(1030, "The smallest effects that this run can tell from none"),
    "identity": PageSection(1040, "Model, text, versions and recipes"),
}


def sections() -> dict[str, PageSection]:
    """The sections of the page in their order."""
    found = OWN | {name: section for chapter in chapters().values() for name, section in chapter.sections.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].place))


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
    basis = Basis(sizes["confidence"])
    several = models.context(comparison, identity.get("slug"), basis)
    measured = {}
    for chapter in chapters().values():
        measured |= chapter.context(metrics, basis)
    told = claims.derived(metrics)
    told += comparison["claims"] if several else []
    sentences: dict[str, list[str]] = {name: [] for name in sections()}
    sentences |= {group["about"]: group["sentences"] for group in claims.sections(told)}
    return {
        "title": params.report.title,
        "sections": {name: section.folded for name, section in sections().items()},
        "unit": tables.KL_UNIT,
        "level": basis.level,
        "sizes": {name: fmt.number(sizes[name]) for name in ("context", "eval", "resamples")},
        "alpha": fmt.plain(round(1 - sizes["confidence"], 9)),
        "withheld": withheld,
        "withheld_gap": None if measured["gap"] else withheld,
        **measured,
        "claims": sentences,
        "by_chance": {name: by_chance(len(found), sizes["confidence"]) for name, found in sentences.items()},
        "models": several,
        **calibration_context(metrics),
        "thresholds": thresholds(params),
        "verdict": verdict_context(verdict),
        "certified": certified.context(claims_file, identity.get("slug"), gate_page),
        "front": front.context(metrics, claims_file, told, questions()),
        "limits": limits(metrics),
        "open_questions": open_questions(told, verdict),
        "identity": identity_context(identity),
        "model": identity["model"],
        "corpus": identity["corpus"],
        "disclosure": identity.get("disclosure"),
        "calibrated_on": (metrics.get("settings") or {}).get("corpus", {}).get("source"),
    }


def by_chance(count: int, confidence: float) -> str:
    """How many of so many effects would be resolved if there were none."""
    return fmt.number(float(round((1 - confidence) * count, 1)), 2)


def calibration_context(metrics: dict) -> dict:
    """Sigma_q by engine, the drift between engines, and the codebooks."""
    by_engine, drift = metrics.get("sigma"), metrics.get("sigma_drift")
    books = metrics.get("codebooks")
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
        "cells": verdicts(cells) if cells else None,
        "preconditions": preconditions(conditions) if conditions else None,
    }


def verdicts(rows: list[dict]) -> str:
    """The words, what they rest on, and what would settle an open one."""
    lines = [
        [
            *cell_name(row)[:2],
            f"`{row['engine']}`",
            f"`{row['dtype']}`",
            cell_name(row)[2],
            f"**{row['verdict']}**",
            fmt.whole(row["windows_needed"]),
            "; ".join(row["reasons"]) or fmt.DASH,
        ]
        for row in rows
    ]
    headers = ["cell", "protocol", "engine", "dtype", "`variance_ratio`", "verdict", "windows needed", "reasons"]
    return fmt.table(headers, lines)


def preconditions(rows: list[dict]) -> str:
    """What had to hold before any number was worth a verdict."""
    lines = [[row["name"], "yes" if row["holds"] else "**no**", row["detail"] or fmt.DASH] for row in rows]
    return fmt.table(["condition", "holds", "detail"], lines)


def questions() -> dict[str, str]:
    """What the claims of each section are about, in words."""
    return {name: section.asks for name, section in sections().items() if section.asks}


def limits(metrics: dict) -> str | None:
    """The smallest resolvable effects of every study that was run."""
    rows = [row for chapter in chapters().values() for row in chapter.limits(metrics)]
    rows = [(what, found) for what, given in rows if (found := [one for one in given if one])]
    return tables.limits(rows) if rows else None


def open_questions(told: list[dict], verdict: dict) -> list[str]:
    """The effects of factors and the verdicts that this run leaves open."""
    divided = [claim for claim in told if claim["about"] in ("gap", "factors")]
    lines = [claims.sentence(claim) for claim in divided if not claims.resolved(claim)]
    undecided = [row for row in verdict.get("cells") or [] if row["verdict"] == "INCONCLUSIVE"]
    needed = [row["windows_needed"] for row in undecided if row["windows_needed"] is not None]
    if needed:
        cells = "the INCONCLUSIVE cells" if len(undecided) > 1 else "the INCONCLUSIVE cell"
        lines.append(f"The verdict of {cells}: {fmt.span(needed)} windows needed ({fmt.POST_HOC}).")
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
