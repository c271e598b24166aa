"""What each division of a codec's bits between K and V costs, and what it costs beside the most even one."""

from __future__ import annotations

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import Measured, Results, comparable
from kvlab_pipeline.studies.net import net_kl, subtracted
from kvlab_pipeline.studies.split.plan import divided, divisions

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
