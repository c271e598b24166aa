"""The division of bits between K and V in the report."""

from __future__ import annotations

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.rendering import tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.chapter import Chapter, PageSection, estimates_of
from kvlab_pipeline.studies.columns import net_kl, subtracted
from kvlab_pipeline.studies.estimates import claim, sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.split.plan import divided, divisions
from kvlab_pipeline.studies.tidy import BITS, NATS, Compared, Estimand, Level, Several

# What each division of a codec's bits between K and V costs, and what it costs beside the most even one.

CHANGED = {"recipe"}  # all that two divisions may differ in


def split_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """An entry for each engine and division, the most even one first.

    The difference is between KLs of the same windows, token by token, so the floor cancels.
    """
    entries = []
    for engine in params.engines:
        found = {m.cell.recipe: m for m in results.select("split", "codec", engine=engine)}
        measured = [found[divided(params, k, v)] for k, v in divisions(params)]
        comparable(measured, CHANGED)
        for (k, v), one in zip(divisions(params), measured, strict=True):
            place = {"engine": engine, "protocol": one.cell.protocol, "codec": params.split.codec}
            stored = {"cell_id": one.record.cell_id, "bits_per_value": one.record.coding.bits_per_value}
            cost = {"kl": boot.mean(net_kl(results, one)).to_json()} | beside(boot, one, measured[0])
            entries.append(place | {"k_bits": k, "v_bits": v} | stored | cost)
    return entries


def beside(boot: Bootstrap, one: Measured, even: Measured) -> dict:
    """A division against the most even one."""
    if one is even:
        return {"difference": None, "compared": None}
    apart = subtracted(one.column("kl"), even.column("kl"))
    return {"difference": boot.mean(apart).to_json(), "compared": sides(one, even)}


# One division of a codec's bits between K and V.
SPLIT = Several(
    {
        "engine": Level(),
        "protocol": Level(),
        "codec": Level(),
        "k_bits": Level(),
        "v_bits": Level(),
        "cell_id": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS, "net of the identity cell's"),
        "difference": Estimand(NATS, "its KL minus that of the most even division; null for that one"),
        "compared": Compared(),
    }
)


# Whether K or V deserves more of the bits, from the part ``split`` of ``metrics.json``.


def claims(rows: list[dict]) -> list[dict]:
    """One claim for each division beside the most even one."""
    return [claim("split", subject(row), row["difference"], row["compared"]) for row in rows if row["difference"]]


def subject(row: dict) -> str:
    """A division in words."""
    division = f"K at {row['k_bits']} and V at {row['v_bits']} bits"
    return f"`{row['codec']}` with {division} in place of the even division (`{row['engine']}`)"


def table(rows: list[dict]) -> str:
    """A line for each engine and division."""
    columns = {
        "engine": tables.code("engine"),
        "bits of K": tables.plain("k_bits"),
        "bits of V": tables.plain("v_bits"),
        "bits per value": tables.number("bits_per_value"),
        f"net KL, {KL_UNIT}": tables.estimate("kl"),
        f"minus the even division, {KL_UNIT}": tables.estimate("difference", signed=True),
        "reading": tables.effect("difference"),
    }
    return tables.table(rows, columns)


def context(metrics: dict, basis: Basis) -> dict:
    """What ``split.md.j2`` names."""
    rows = metrics.get("split")
    if not rows:
        return {"split": None}
    shared = {"codec": rows[0]["codec"], "protocol": rows[0]["protocol"]}
    return {"split": shared | {"table": table(rows), "basis": basis([row["kl"] for row in rows])}}


CHAPTER = Chapter(
    parts={"split": SPLIT},
    entries=lambda measured: {"split": split_entries(measured.params, measured.results, measured.boot)},
    sections={"split": PageSection(110, "Bits divided between K and V at equal bytes", asks="bits for K or for V")},
    context=context,
    claims=lambda metrics: claims(metrics.get("split") or []),
    limits=lambda metrics: [("bits for K or for V, KL", estimates_of(metrics, "split", "difference"))],
)
