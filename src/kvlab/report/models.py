"""Several models beside one another: a column per model, and how their differences were made."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.base.errors import UserError
from kvlab.pages import format as fmt
from kvlab.studies.factors.tables import of_gap


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
    if comparison is None:
        return None
    if not (isinstance(comparison, dict) and {"models", "rows", "claims"} <= comparison.keys()):
        raise UserError("what was given as comparison is none; allowed: what `kvlab step compare --json` wrote")
    models = comparison["models"]
    slugs = [model["slug"] for model in models]
    if slug not in slugs:
        raise UserError(
            f"this page is of model {slug!r}, and the comparison of {', '.join(slugs)}; run `kvlab step compare`"
        )
    if len(slugs) < 2:
        return None
    first, *others = slugs
    differing = [row for row in comparison["rows"] if has_interval(row["difference"])]
    compared = {row["model"] for row in differing}
    return {
        "slug": slug,
        "first": first,
        "others": others,
        "table": beside(comparison["rows"], slugs),
        "basis": basis([row["estimate"] for row in comparison["rows"] if has_interval(row["estimate"])]),
        "differences": basis([row["difference"] for row in differing]),
        "paired": [model["slug"] for model in models if model["slug"] in compared and model["paired"]],
        "apart": [model["slug"] for model in models if model["slug"] in compared and not model["paired"]],
        "disclosures": {model["slug"]: model["disclosure"] for model in models if model.get("disclosure")},
        "withheld": {model["slug"]: model["withheld"] for model in models if model["withheld"]},
    }


def has_interval(given: dict | None) -> bool:
    """Whether a number was estimated, and not counted or withheld."""
    return bool(given) and given["low"] is not None


def beside(rows: list[dict], slugs: list[str]) -> str:
    """Quantities by row, models by column; an effect that is not told from zero says so."""
    named = {
        row["quantity"]: row["name"] if row["unit"] in row["name"] else f"{row['name']}, {row['unit']}" for row in rows
    }
    found = {slug: {row["quantity"]: row["estimate"] for row in rows if row["model"] == slug} for slug in slugs}
    lines = [[name, *(cell(quantity, found[slug]) for slug in slugs)] for quantity, name in named.items()]
    return fmt.table(["quantity", *(f"`{slug}`" for slug in slugs)], lines)


def cell(quantity: str, measured: dict[str, dict | None]) -> str:
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
        said.append("not resolved")
    return ", ".join(said)
