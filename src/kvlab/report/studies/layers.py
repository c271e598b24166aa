"""Coding one layer at a time, and whether the single layers add up to all of them together."""

from __future__ import annotations

from itertools import product

import numpy as np

from kvlab.params import Params
from kvlab.report.gather import Measured, Results, comparable
from kvlab.report.studies.counterparts import identity_of
from kvlab.stats.bootstrap import Bootstrap
from kvlab.stats.multiple import benjamini_hochberg, sign_flip_p


def layer_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """KL of coding one layer at a time, with q-values over the layers of one engine and protocol.

    KL is never negative, so "no effect" cannot mean KL = 0. The null hypothesis is that coding the
    layer is exchangeable, window by window, with the engine's identity cell of the same dtype and
    protocol; the test flips signs of the paired window differences (`stats.multiple.sign_flip_p`).
    Where there is no such identity cell there is no q-value, nor for all layers together.
    """
    entries = []
    for engine, protocol in product(params.engines, params.layers.protocols):
        singles, joint = layer_cells(results, engine, protocol)
        p_values = [layer_p(results, boot, measured) for measured in singles]
        tested = all(p is not None for p in p_values)
        q_values = benjamini_hochberg(p_values).tolist() if tested else [None] * len(singles)
        for measured, q_value in zip([*singles, joint], [*q_values, None], strict=True):
            entry = {
                "engine": engine,
                "protocol": protocol,
                "label": measured.cell.label,
                "layer": None if measured is joint else measured.cell.layers[0],
                "kl": boot.mean(measured.column("kl")).to_json(),
                "q_value": q_value,
                "bits_per_value": measured.record.coding.bits_per_value,
            }
            entries.append(entry)
    return entries


def layer_cells(results: Results, engine: str, protocol: str) -> tuple[list[Measured], Measured]:
    """The single layers in order, and the cell of all layers (which may be the only layer)."""
    found = results.select("layers", engine=engine, protocol=protocol)
    comparable(found, {"layers"})
    joint = max(found, key=lambda m: len(m.cell.layers))
    singles = [m for m in found if len(m.cell.layers) == 1]
    return sorted(singles, key=lambda m: m.cell.layers), joint


def layer_p(results: Results, boot: Bootstrap, measured: Measured) -> float | None:
    """p-value of one layer against the identity cell; None where there is none."""
    floor = identity_of(results, measured)
    if floor is None:
        return None
    difference = measured.column("kl").means - floor.column("kl", measured.cell.windows).means
    return sign_flip_p(difference, draws=boot.resamples, seed=boot.seed)


def additivity_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """All layers together against the sum of the single layers, paired by window.

    Each KL is net of the identity cell's where there is one: a sum over layers would otherwise count
    the engine's own noise once per layer. The ratio is None when the sum is not clear of zero.
    """
    entries = []
    for engine, protocol in product(params.engines, params.layers.protocols):
        singles, joint = layer_cells(results, engine, protocol)
        floor = identity_of(results, joint)
        columns = [measured.column("kl") for measured in (joint, *singles)]
        columns += [floor.column("kl", joint.cell.windows)] if floor else []
        n = len(singles)

        def parts(means, n=n, net=floor is not None):
            noise = means[..., -1] if net else 0.0
            return means[..., 0] - noise, means[..., 1 : n + 1].sum(-1) - n * noise

        total = boot.combine(columns, lambda m, parts=parts: parts(m)[1])
        ratio = boot.combine(columns, lambda m, parts=parts: np.divide(*parts(m))) if total.low > 0 else None
        entry = {
            "engine": engine,
            "protocol": protocol,
            "joint": boot.combine(columns, lambda m, parts=parts: parts(m)[0]).to_json(),
            "sum": total.to_json(),
            "ratio": ratio.to_json() if ratio else None,
            "interaction": boot.combine(columns, lambda m, parts=parts: np.subtract(*parts(m))).to_json(),
        }
        entries.append(entry)
    return entries
