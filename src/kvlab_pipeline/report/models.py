"""Several models beside one another: a column per model, and how their differences were made."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.core.errors import UserError
from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import HELD
from kvlab_pipeline.studies.factors.chapter import ENGINE, of_gap


def context(comparison: dict | None, slug: str | None, basis: Callable[[list[dict]], str]) -> dict | None:
    """What the section and the head of a page name; None where there is one model.

    Parameters
    ----------
    comparison : dict or None
        ``comparison.json``.
    slug : str or None
        The model of the page.
    basis : callable
        Estimates to the line under a table.

    Raises
    ------
    UserError
        When this is no comparison, or the page's model is none of those compared.
    """
    slugs = several(comparison, slug)
    if len(slugs) < 2:
        return None
    models = comparison["models"]
    first, *others = slugs
    differing = [row for row in comparison["rows"] if has_interval(row["difference"])]
    compared = {row["model"] for row in differing}
    return {
        "slug": slug,
        "first": first,
        "others": others,
        "table": beside(comparison["rows"], slugs, {model["slug"] for model in models if model["undecided"]}),
        "count": fmt.number(len(slugs)),
        "across_verdicts": "; ".join(f"`{row['factor']}` {row['verdict']}" for row in comparison["across"]),
        "across": holding(comparison["across"], slugs),
        "across_basis": basis([one["share"] for row in comparison["across"] for one in row["models"] if one["share"]]),
        "undecided": [model["slug"] for model in models if model["undecided"]],
        "basis": basis([row["estimate"] for row in comparison["rows"] if has_interval(row["estimate"])]),
        "differences": basis([row["difference"] for row in differing]),
        "paired": [model["slug"] for model in models if model["slug"] in compared and model["paired"]],
        "apart": [model["slug"] for model in models if model["slug"] in compared and not model["paired"]],
        "disclosures": disclosures(comparison),
        "withheld": {model["slug"]: model["withheld"] for model in models if model["withheld"]},
    }


def several(comparison: dict | None, slug: str | None) -> list[str]:
    """The models of a comparison; none without one. `UserError` when it is none, or not of `slug`."""
    if comparison is None:
        return []
    if not (isinstance(comparison, dict) and {"models", "rows", "claims", "across"} <= comparison.keys()):
        raise UserError("what was given as comparison is none; allowed: what `kvlab step compare --json` wrote")
    slugs = [model["slug"] for model in comparison["models"]]
    if slug not in slugs:
        raise UserError(
            f"this page is of model {slug!r}, and the comparison of {', '.join(slugs)}; run `kvlab step compare`"
        )
    return slugs


def disclosures(comparison: dict) -> dict[str, str]:
    """What has to be told of some models' weights wherever a number of theirs stands."""
    return {model["slug"]: model["disclosure"] for model in comparison["models"] if model.get("disclosure")}


def across_of(comparison: dict | None, slug: str | None) -> dict | None:
    """What the README's headline keeps of a comparison; None where there is one model. Raises as `several`."""
    slugs = several(comparison, slug)
    if len(slugs) < 2:
        return None
    return {"models": slugs, "rows": comparison["across"], "disclosures": disclosures(comparison)}


def across_context(kept: dict) -> dict:
    """The headline's table of models, from what `across_of` kept."""
    return {
        "count": fmt.number(len(kept["models"])),
        "table": holding(kept["rows"], kept["models"]),
        "disclosures": kept["disclosures"],
    }


def has_interval(given: dict | None) -> bool:
    """Whether a number was estimated, and not counted or withheld."""
    return bool(given) and given["low"] is not None


def holding(rows: list[dict], slugs: list[str]) -> str:
    """What holds across the models: per factor its part of each model's gap, how that reads, and on how many."""
    lines = [
        [f"`{row['factor']}`", *(on_model(by_model[slug]) for slug in slugs), row["verdict"]]
        for row in rows
        for by_model in [{one["model"]: one for one in row["models"]}]
    ]
    return fmt.table(["factor: its part of the gap, %", *(f"`{slug}`" for slug in slugs), "across the models"], lines)


def on_model(one: dict) -> str:
    """A factor's part of one model's gap and how its share reads."""
    return f"{fmt.estimate(one['of_gap'], 100)}, {one['reading']}" if one["share"] else one["reading"]


def beside(rows: list[dict], slugs: list[str], undecided: set[str]) -> str:
    """Quantities by row, models by column; an effect that is not told from zero says so.

    `undecided` are the models on which it is open whether the engines agree.
    """
    named = {
        row["quantity"]: row["name"] if row["unit"] in row["name"] else f"{row['name']}, {row['unit']}" for row in rows
    }
    found = {slug: {row["quantity"]: row["estimate"] for row in rows if row["model"] == slug} for slug in slugs}
    lines = [
        [name, *(cell(quantity, found[slug], slug in undecided) for slug in slugs)] for quantity, name in named.items()
    ]
    return fmt.table(["quantity", *(f"`{slug}`" for slug in slugs)], lines)


def cell(quantity: str, measured: dict[str, dict | None], undecided: bool = False) -> str:
    """One number of the table; a share also as part of its model's gap, which is without a unit."""
    given = measured.get(quantity)
    if given is None:
        return fmt.DASH
    if not has_interval(given):
        return fmt.number(given["value"])
    said = [fmt.estimate(given)]
    if quantity.startswith("kl.share") and not fmt.contains_zero(measured["kl.gap"]):
        said.append(f"{of_gap(given, measured['kl.gap'])} of the gap")
    if quantity.startswith(("kl.gap", "kl.share")) and fmt.contains_zero(given):
        said.append(f"not resolved, at most {fmt.largest(given)}")
    elif undecided and quantity == f"kl.share.{ENGINE}":
        said.append(HELD)
    return ", ".join(said)
