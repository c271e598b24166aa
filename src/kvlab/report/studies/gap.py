"""The gap between the two published studies, divided among the factors in which they differ."""

from __future__ import annotations

from itertools import product

from kvlab.params import Params
from kvlab.report.gather import Results, comparable
from kvlab.report.studies.counterparts import LEVELS, codec_cell
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.power import windows_for_sign
from kvlab.stats.shapley import corner_index, interactions, pairs, shapley


def gap_entry(params: Params, results: Results, boot: Bootstrap) -> dict:
    """The gap between the low and the high corner, divided among the factors by Shapley value.

    A factor with one level (one engine measured, one protocol, equal ratios) is dropped; the corners
    still name it. KL is not net of the floor here: both corners carry their engine's.
    """
    levels = gap_levels(params)
    factors = [name for name, values in levels.items() if len(values) > 1]
    corners = [dict(zip(levels, choice, strict=True)) for choice in product(*levels.values())]
    cells = [
        codec_cell(params, results, c["engine"], c["protocol"], params.gap.dtype, c["variance_ratio"]) for c in corners
    ]
    comparable(cells, factors)
    index = [corner_index([corner[name] != levels[name][0] for name in factors]) for corner in corners]
    order = [index.index(i) for i in range(len(corners))]
    measures = {}
    for quantity in ("kl", "delta_nll"):
        columns = [cells[i].column(quantity) for i in order]
        measures[quantity] = decompose(boot, columns, factors, [corners[i] for i in order])
    return {
        "factors": factors,
        "dtype": params.gap.dtype,
        "stream": "kv",
        "low": {name: values[0] for name, values in levels.items()},
        "high": {name: values[-1] for name, values in levels.items()},
        "measures": measures,
    }


def gap_levels(params: Params) -> dict[str, list]:
    """Levels of each factor, low first; only those that were measured."""
    levels: dict[str, list] = {
        name: [level for level in both if level in getattr(params, f"{name}s")] for name, both in LEVELS.items()
    }
    return levels | {"variance_ratio": list(dict.fromkeys(params.gap.variance_ratios))}


def decompose(boot: Bootstrap, columns: list[Column], factors: list[str], corners: list[dict]) -> dict:
    """Corner values, gap, each factor's share and each pair's interaction, all over the same resamples.

    Parameters
    ----------
    boot : Bootstrap
    columns : list of Column, paired
        By corner index (`stats.shapley`).
    factors : list of str
        By bit of the corner index.
    corners : list of dict
        The levels of each corner, in the order of `columns`.
    """
    values = boot.combine_many(columns, lambda m: m)
    shares = boot.combine_many(columns, shapley) if factors else []
    effects = boot.combine_many(columns, interactions) if len(factors) > 1 else []
    names = [[factors[i], factors[j]] for i, j in pairs(len(factors))]
    return {
        "low": values[0].to_json(),
        "high": values[-1].to_json(),
        "gap": boot.difference(columns[-1], columns[0]).to_json(),
        "parts": [
            {"factor": name, "share": share.to_json(), "windows_needed": windows_for_sign(share)}
            for name, share in zip(factors, shares, strict=True)
        ],
        "interactions": [{"factors": n, "effect": e.to_json()} for n, e in zip(names, effects, strict=True)],
        "corners": [corner | {"value": value.to_json()} for corner, value in zip(corners, values, strict=True)],
    }
