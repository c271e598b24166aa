"""What the gate certifies, from ``claims.json``."""

from __future__ import annotations

from kvlab.core.errors import UserError
from kvlab.gate.replay import NOT_REPLAYED
from kvlab.output import format as fmt
from kvlab.output.markdown import cell
from kvlab_pipeline.gate_page.row_summary import BASELINE, BEST_TIER
from kvlab_pipeline.gate_page.summary import SCHEMA_VERSION
from kvlab_pipeline.rendering.parts import KL_UNIT


def context(claims: dict | None, model: str | None, page: str) -> dict | None:
    """Counts by tier and the certified rows of one model.

    Parameters
    ----------
    claims : dict or None
        ``claims.json``.
    model : str or None
        Slug of the page's model.
    page : str
        Where GATE.md is, seen from the report.

    Returns
    -------
    dict or None
        None where nothing was judged of this model.

    Raises
    ------
    UserError
        When it is no ``claims.json``, or of another version.
    """
    if checked(claims) is None:
        return None
    mine = [row for row in claims["rows"] if row["model"] == model]
    if not mine:
        return None
    coded = [row for row in mine if row["measured"] and row["mechanism"] != BASELINE]
    certified = [row for row in coded if row["certified"]]
    only_earned = sum(row["earned"] == BEST_TIER for row in coded) - len(certified)
    return {
        "page": page,
        "counts": tiers(mine, claims["counts"]),
        "sentence": sentence(len(certified), len(coded), measured_on(coded), only_earned),
        "table": rows(certified) if certified else None,
    }


def checked(claims: dict | None) -> dict | None:
    """The claims themselves; `UserError` where they are none, or of another version."""
    if claims is not None and (not isinstance(claims, dict) or claims.get("schema_version") != SCHEMA_VERSION):
        raise UserError(
            "--claims names no claims.json of this version; run `kvlab gate report` again", code="user.no-claims"
        )
    return claims


def tiers(found: list[dict], order: dict) -> str:
    """How many rows earned each tier, best first as the file lists them."""
    earned = [row["earned"] for row in found]
    return fmt.table(["earned", "rows"], [[tier, str(earned.count(tier))] for tier in order if tier in earned])


def sentence(certified: int, coded: int, on: str, only_earned: int = 0) -> str:
    """How many rows are certified, of how many, what they were measured on; how many lack a second measurement."""
    verb = "is" if certified == 1 else "are"
    if not coded:
        return "No row that compresses was measured."
    if coded == 1:
        said = f"The one row that compresses is {'certified' if certified else 'not certified'}"
    else:
        said = f"Of {coded} rows that compress, {fmt.number(certified) if certified else 'none'} {verb} certified"
    earns = f": {'it earns' if certified == 1 else 'they earn'} `{BEST_TIER}`" if certified else ""
    lacks = f" `{BEST_TIER}` but {NOT_REPLAYED}: {fmt.number(only_earned)}." if only_earned else ""
    return f"{said}{earns}.{lacks}" + (f" Measured on {on}." if on else "")


def measured_on(found: list[dict]) -> str:
    """Device, dtype and context of some rows; all of them where they differ."""
    said = [sorted({cell(row[name]) for row in found if row[name]}) for name in ("device", "dtype")]
    contexts = sorted({row["context_tokens"] for row in found if row["context_tokens"]})
    if contexts:
        said.append([f"{' and '.join(map(str, contexts))} tokens of context"])
    return ", ".join(" and ".join(names) for names in said if names)


def rows(certified: list[dict]) -> str:
    """The certified rows with what they cost; not how fast they are, so that a report measured again is the same."""
    headers = ["engine", "mechanism", "protocol", "stored", "bits", "bits per value"]
    headers += [f"KL, {KL_UNIT}", "same top token, %", "needles found, %"]
    lines = []
    for row in certified:
        metrics = row["metrics"]
        name = "/".join(filter(None, (row["mechanism"], row["mechanism_variant"])))
        where = (row["protocol"] or fmt.DASH, row["stored_span"] or fmt.DASH)
        numbers = (row[key] for key in ("bits", "bits_per_value"))
        quality = (
            fmt.estimate(metrics.get("kl")),
            *(rate(metrics, key) for key in ("top1_agreement", "needle_recall")),
        )
        lines.append([*map(cell, (row["engine"], name, *where)), *map(fmt.number, numbers), *quality])
    return fmt.table(headers, lines)


def rate(metrics: dict, key: str) -> str:
    """A rate in per cent."""
    return fmt.estimate(metrics.get(key), 100.0)
