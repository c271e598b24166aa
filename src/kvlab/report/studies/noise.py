"""Gaussian noise in place of a codec: KL by its size, and the exponent of their power law."""

from __future__ import annotations

from itertools import product

import numpy as np

from kvlab.params import Params
from kvlab.report.gather import Measured, Results, comparable
from kvlab.report.studies.counterparts import identity_of
from kvlab.stats.bootstrap import Bootstrap, Estimate
from kvlab.stats.slope import linear_range, log_log_slope


def noise_entry(boot: Bootstrap, measured: Measured) -> dict:
    """KL of one size of Gaussian noise on one stream."""
    return {
        "engine": measured.cell.engine,
        "stream": measured.cell.stream,
        "sigma": measured.cell.recipe.k.sigma,
        "kl": boot.mean(measured.column("kl")).to_json(),
    }


def noise_slope_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """Exponent of KL against sigma per engine and stream, over the range where a power law holds.

    The range is chosen by `stats.slope.linear_range`; None where fewer than two points lie in it.
    """
    entries = []
    for engine, stream in product(params.engines, params.noise.streams):
        found = results.select("noise", engine=engine, stream=stream)
        found = sorted(found, key=lambda m: m.cell.recipe.k.sigma)
        comparable(found, {"sigma"})
        floor = identity_of(results, found[0])
        level = boot.mean(floor.column("kl", found[0].cell.windows)).value if floor else 0.0
        columns = [measured.column("kl") for measured in found]
        sigmas = np.array([measured.cell.recipe.k.sigma for measured in found])
        inside = np.flatnonzero(linear_range(sigmas, [boot.mean(c).value for c in columns], level))
        slope: Estimate | None = None
        if inside.size >= 2:
            slope = log_log_slope(boot, sigmas[inside], [columns[i] for i in inside])
        entry = {
            "engine": engine,
            "stream": stream,
            "slope": slope.to_json() if slope else None,
            "range": [float(sigmas[inside[0]]), float(sigmas[inside[-1]])] if slope else None,
        }
        entries.append(entry)
    return entries
