"""One cell at a time: what it is, what its codec did, and what it cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvlab.core.errors import MissingResult
from kvlab.core.params import Params
from kvlab.core.recipe import Cell
from kvlab.stats.bootstrap import Bootstrap, Estimate
from kvlab.stats.multiple import benjamini_hochberg, sign_flip_two_sided_p
from kvlab.stats.power import effective_tokens, predicted_standard_error
from kvlab_pipeline.studies.baselines import corner_cell, identity_of
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.tidy import (
    BITS,
    COUNT,
    NATS,
    PROBABILITY,
    RATIO,
    SHARE,
    TOKENS,
    By,
    Compared,
    Estimand,
    Level,
    Several,
)

# What a cell is, what its codec did, and what it cost beside the same engine and dtype without a codec.
CELLS = Several(
    {
        "cell_id": Level(),
        "recipe_id": Level(),
        "role": Level("rerun, identity or codec"),
        "label": Level("the entry of params.yaml that it is of"),
        "engine": Level(),
        "dtype": Level(),
        "protocol": Level(),
        "stream": Level(),
        "study": Level(),
        "attention": Level(),
        "placement": Level(),
        "span": Level(),
        "origin": Level(),
        "against": Level("the label of the cell that it is to be held against; null for the studied one"),
        "difference": Estimand(
            NATS, "net KL minus that of the cell it is held against; null for the studied cell itself and for floors"
        ),
        "p_value": Estimand(
            PROBABILITY,
            "of the difference, by flipping the signs of windows (of documents, where known), in either direction",
        ),
        "q_value": Estimand(
            PROBABILITY, "corrected for all cells that are held against another (Benjamini and Hochberg)"
        ),
        "compared": Compared(),
        "variance_ratio": Level(),
        "bits_per_value": Estimand(
            BITS,
            "every stored byte of the scored windows' contexts, uncoded layers included, over the values of K and V",
        ),
        "fires": Estimand(COUNT),
        "expected_fires": Estimand(COUNT),
        "canary_kl": Estimand(NATS),
        "d_eff_mean": {"k": Estimand(COUNT), "v": Estimand(COUNT)},
        "outlier_rate": {"k": Estimand(SHARE), "v": Estimand(SHARE)},
        "whitened_error": {"k": Estimand(RATIO), "v": Estimand(RATIO)},
        "kl": Estimand(NATS),
        "kl_net": Estimand(NATS, "KL minus that of the identity cell beside it"),
        "delta_nll": Estimand(NATS),
        "ppl_ratio": Estimand(RATIO),
        "published_estimator": Estimand(
            RATIO,
            "the unweighted mean over windows of the signed relative change in perplexity, as the published study's",
        ),
        "effective_tokens": Estimand(TOKENS),
        "predicted_standard_error": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        "flips_to_wrong": Estimand(SHARE),
        "flips_to_right": Estimand(SHARE),
        "kl_percentiles": By("percentile", Estimand(NATS, "KL that the given percentage of tokens stays below")),
        # Of the tokens on which the uncompressed model gave its top token a probability in [low, high).
        "kl_by_confidence": Several(
            {"low": Level(), "high": Level(), "kl": Estimand(NATS), "n_tokens": Estimand(TOKENS)}
        ),
    }
)

PARTS = {"cells": CELLS}

PERCENTILES = ("50", "95", "99", "99.9")
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


# In what an entry of `cells` may differ from its counterpart.
CHANGED = {"recipe", "layers", "stream", "attention", "placement", "span", "origin"}


def studied_cells(params: Params, results: Results) -> list[Measured]:
    """The cells in the dtype of the gap: the factorial's under the usual calibration, and those of `cells`."""
    shared = [
        *results.select("factors", dtype=params.gap.dtype, origin=params.calibration.origin),
        *results.select("cells"),
    ]
    return sorted(shared, key=lambda m: (params.engines.index(m.cell.engine), m.cell.dtype != params.gap.dtype))


def against_studied(
    params: Params, results: Results, boot: Bootstrap, measured: Measured
) -> tuple[Estimate, float, Measured] | None:
    """KL of a cell of params.yaml minus that of its counterpart, its p-value over windows, and the counterpart.

    Each is net of its own floor, paired by token. The p-value is that of flipped signs, against either direction.
    None for the floors, and for cells in a dtype that the factorial does not have.
    """
    cell = measured.cell
    if measured.role != "codec" or cell.study != "cells" or cell.dtype not in params.gap.dtypes:
        return None
    studied = counterpart(params, results, cell)
    comparable([measured, studied], CHANGED)
    floors = [identity_of(results, one) for one in (measured, studied)]
    columns = [one.column("kl") for one in (measured, studied, *floors)]
    found = boot.combine(columns, lambda m: (m[..., 0] - m[..., 2]) - (m[..., 1] - m[..., 3]))
    one, other, *below = (column.by_document().sums for column in columns)
    apart = (one - below[0]) - (other - below[1])
    return found, sign_flip_two_sided_p(apart, draws=boot.resamples, seed=boot.seed), studied


def counterpart(params: Params, results: Results, cell: Cell) -> Measured:
    """The cell that an entry is held against: the one that it names, else the studied one."""
    other = params.cells[cell.label].against
    if other is None:
        return corner_cell(params, results, engine=cell.engine, protocol=cell.protocol, dtype=cell.dtype)
    found = results.select("cells", "codec", label=other, engine=cell.engine, protocol=cell.protocol)
    if len(found) != 1:
        raise MissingResult(
            f"{len(found)} cells {other!r} of {cell.engine}, {cell.protocol} for {cell.label!r} to meet"
        )
    return found[0]


def cell_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """Every cell of `studied_cells`, in its order.

    Every change that is held against its counterpart makes a claim, so their p-values are corrected for one another
    (`stats.multiple.benjamini_hochberg`).
    """
    found = [cell_entry(params, results, boot, measured) for measured in studied_cells(params, results)]
    claimed = [entry for entry in found if entry["p_value"] is not None]
    q_values = benjamini_hochberg([entry["p_value"] for entry in claimed]).tolist() if claimed else []
    for entry, q_value in zip(claimed, q_values, strict=True):
        entry["q_value"] = q_value
    return found


def cell_entry(params: Params, results: Results, boot: Bootstrap, measured: Measured) -> dict:
    """Everything about one cell: what it is, what its codec did, and what it cost."""
    cell, coding = measured.cell, measured.record.coding
    coded = cell.recipe.k if measured.role == "codec" else None
    apart, p_value, other = against_studied(params, results, boot, measured) or (None, None, None)
    ranks = {stream: _mean_of_counts(coding.d_eff.get(stream)) for stream in ("k", "v")}
    return {
        "cell_id": measured.record.cell_id,
        "recipe_id": measured.record.recipe_id,
        "role": measured.role,
        "label": cell.label,
        "engine": cell.engine,
        "dtype": cell.dtype,
        "protocol": cell.protocol,
        "stream": cell.stream,
        "study": cell.study,
        "attention": cell.attention,
        "placement": cell.placement,
        "span": cell.span,
        "origin": cell.origin,
        "against": params.cells[cell.label].against if cell.label in params.cells else None,
        "difference": apart and apart.to_json(),
        "p_value": p_value,
        "q_value": None,
        "compared": sides(measured, other) if other else None,
        "variance_ratio": getattr(coded, "variance_ratio", None),  # of the block codec only
        "bits_per_value": coding.bits_per_value,
        "fires": coding.fires,
        "expected_fires": coding.expected_fires,
        "canary_kl": measured.record.canary_kl,
        "d_eff_mean": ranks,
        "outlier_rate": {stream: coding.outlier_rate.get(stream) for stream in ("k", "v")},
        "whitened_error": {stream: coding.whitened_error.get(stream) for stream in ("k", "v")},
        **cell_estimates(results, boot, measured),
        "kl_percentiles": percentiles(measured),
        "kl_by_confidence": by_confidence(measured),
    }


def _mean_of_counts(counts: dict[int, int] | None) -> float | None:
    return sum(value * n for value, n in counts.items()) / sum(counts.values()) if counts else None


def cell_estimates(results: Results, boot: Bootstrap, measured: Measured) -> dict:
    """The cell's intervals.

    `kl_net` is paired with the identity cell of the same engine, dtype and protocol, and None where
    there is none. `published_estimator` is the published study's: the unweighted mean over windows of
    the signed relative change in perplexity; it is for comparison and no verdict reads it.
    `predicted_standard_error` is that of mean delta_nll as the KL predicts it (`stats.power`).
    """
    kl, delta = measured.column("kl"), measured.column("delta_nll")
    mean_kl = boot.divergence(kl)
    floor = identity_of(results, measured)
    n_eff = effective_tokens(delta, measured.column("delta_nll_squared"))
    rates = ("top1_agreement", "flips_to_wrong", "flips_to_right")
    return {
        "kl": mean_kl.to_json(),
        "kl_net": boot.difference(kl, floor.column("kl", measured.cell.windows)).to_json() if floor else None,
        "delta_nll": boot.mean(delta).to_json(),
        "ppl_ratio": boot.exp_mean(delta).to_json(),
        "published_estimator": boot.mean(delta.per_window(np.expm1)).to_json(),
        "effective_tokens": n_eff,
        "predicted_standard_error": predicted_standard_error(mean_kl.value, n_eff),
    } | {name: boot.rate(measured.column(name)).to_json() for name in rates}


def percentiles(measured: Measured) -> dict[str, float]:
    """KL that the given percentage of tokens stays below, nats."""
    values = np.percentile(measured.tokens["kl"].to_numpy(), [float(rank) for rank in PERCENTILES])
    return dict(zip(PERCENTILES, values.tolist(), strict=True))


def by_confidence(measured: Measured) -> list[dict]:
    """Mean KL by the reference's largest probability; bins are [low, high), the last one closed."""
    kl, p_max = (measured.tokens[name].to_numpy() for name in ("kl", "p_ref_max"))
    bins = np.clip(np.digitize(p_max, CONFIDENCE_EDGES) - 1, 0, len(CONFIDENCE_EDGES) - 2)
    entries = []
    for i, (low, high) in enumerate(pairwise(CONFIDENCE_EDGES)):
        inside = kl[bins == i]
        mean = float(inside.mean()) if inside.size else None
        entries.append({"low": low, "high": high, "kl": mean, "n_tokens": int(inside.size)})
    return entries
