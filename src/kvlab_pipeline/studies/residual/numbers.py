"""The codec's own error on each engine's capture, and whether the engines differ in it.

Windows are those of the calibration split; every interval draws them with replacement, and both engines' alike.
An error is a sum of squares; relative, it is divided by the squared deviation of K or V from its heads' means.
A group of layers is never one sum: the layer of the largest values would decide it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.codecs.block.studied import coded_layers
from kvlab.core.errors import MissingResult, MixedIdentity, StaleResult
from kvlab.core.params import Params
from kvlab.core.records import Provenance
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.multiple import benjamini_hochberg, sign_flip_two_sided_p
from kvlab.stats.power import power_factor, windows_needed
from kvlab_pipeline.studies.baselines import LEVELS
from kvlab_pipeline.studies.residual.record import (
    KEY,
    RESIDUAL,
    STREAMS,
    ResidualRecord,
    coded_windows,
    read_residual,
    recipes,
)
from kvlab_pipeline.studies.tidy import (
    BITS,
    BYTES,
    COUNT,
    PROBABILITY,
    RATIO,
    SHARE,
    WINDOWS,
    By,
    Estimand,
    Level,
    Several,
    Single,
)

# The codec's own error on each engine's capture, by layer and by group of layers, and the engines' beside one another.
PLACE = {
    "variance_ratio": Level(),
    "stream": Level(),
    "group": Level("layer, coded (all but the boundary layers) or all"),
    "layer": Level("null for a group of layers"),
    "boundary": Level(),
}

ERRORS = Single(
    {
        "rows": Several(
            {"engine": Level(), "recipe_id": Level()}
            | PLACE
            | {
                "raw_error": Estimand(RATIO, "squared error over the squared deviation from the heads' means"),
                "whitened_error": Estimand(RATIO, "the same, weighed by Sigma_q; null for V"),
                "d_eff": Estimand(COUNT, "kept rank"),
                "outlier_rate": Estimand(SHARE),
                "bits_per_value": Estimand(BITS),
                "frame_bytes": Estimand(BYTES, "of a window"),
                "d_eff_blocks": By("rank", Estimand(COUNT, "blocks that kept this rank")),
                "d_eff_shares": Several({"d_eff": Level(), "blocks": Estimand(COUNT), "share": Estimand(SHARE)}),
            }
        ),
        "ratios": Several(
            PLACE
            | {
                "measure": Level("of the error: raw or whitened"),
                "ratio": Estimand(RATIO, "the squared error on vLLM's capture over that on transformers', by window"),
                "p_value": Estimand(PROBABILITY),
                "q_value": Estimand(PROBABILITY),
                "resolved": Level("whether interval and q-value, of a group the p-value, both say so"),
                "windows_needed": Estimand(WINDOWS),
            }
        ),
    }
)

PARTS = {"residual": ERRORS}

QUANTITIES = tuple(name for name in RESIDUAL if name not in KEY)
ESTIMATES = ("raw_error", "whitened_error", "d_eff", "outlier_rate", "bits_per_value", "frame_bytes")
MEASURES = {"k": ("raw", "whitened"), "v": ("raw",)}  # Sigma_q is a metric of K; V has none


@dataclass(frozen=True, eq=False)
class ResidualResult:
    """One engine's result; `rows` sorted by variance ratio, stream, window and layer."""

    record: ResidualRecord
    rows: pl.DataFrame

    @cached_property
    def _by_setting(self) -> dict[tuple, pl.DataFrame]:
        """The rows by variance ratio and stream: they are read a quantity at a time."""
        return self.rows.partition_by("variance_ratio", "stream", as_dict=True)

    def sums(self, ratio: float, stream: str, quantity: str) -> np.ndarray:
        """A quantity of the table, float64 [windows, layers]."""
        shape = (self.record.windows, self.record.n_layers)
        return self._by_setting[ratio, stream][quantity].to_numpy().astype(np.float64).reshape(shape)

    def columns(self, ratio: float, stream: str, quantity: str, layers: Sequence[int]) -> list[Column]:
        """A quantity of some layers, each summed by window."""
        sums = self.sums(ratio, stream, quantity)
        return [self.column(sums[:, layer]) for layer in layers]

    def column(self, sums: np.ndarray) -> Column:
        """Sums [windows] as a column; two engines' are paired when they coded the same tokens of as many windows."""
        windows, context = self.record.windows, self.record.context
        key = f"{context} tokens of {windows} windows"
        return Column(np.asarray(sums, np.float64), np.ones(windows), tuple(range(windows)), key, windows * context)

    def blocks(self, ratio: float, stream: str, layers: Sequence[int]) -> dict[int, np.ndarray]:
        """Blocks of some layers by kept rank: int64 [windows] for each."""
        found: dict[int, np.ndarray] = {}
        for ranks in self.record.d_eff:
            if (ranks.variance_ratio, ranks.stream) == (ratio, stream) and ranks.layer in layers:
                for rank, counts in ranks.blocks.items():
                    found[rank] = found.get(rank, 0) + np.array(counts)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class ResidualGroup:
    """A layer, or several that are reported as one: ``coded`` (all but the boundary layers) or ``all``."""

    name: str
    layers: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        """Its number when it is a single one."""
        return self.layers[0] if self.name == "layer" else None


# --------------------------------------------------------------------------------------- reading


def read_residuals(params: Params, paths: Sequence[Path], measured: Provenance | None) -> dict[str, ResidualResult]:
    """Every captured engine's result, each once, whole and of one identity; none is due where one engine is captured.

    Parameters
    ----------
    measured : Provenance or None
        Of the results that stand beside it in the report; None when there are none.

    Raises
    ------
    MissingResult
        The capture of an engine was not coded.
    StaleResult
        A result is not one that these parameters plan, is there twice, or lacks rows.
    MixedIdentity
        Results of several models, windows, calibrations, versions or devices.
    """
    found: dict[str, ResidualResult] = {}
    for path in paths:
        record, rows = read_residual(path)
        if record.engine in found:
            raise StaleResult(
                f"{path}: a second residual study of engine {record.engine!r}; remove one", code="stale.twice"
            )
        refuse_unplanned(params, record, path)
        found[record.engine] = ResidualResult(record, on_grid(record, rows, path))
        refuse_other_ranks(found[record.engine], path)
    due = params.calibration.engines if len(params.calibration.engines) > 1 else ()
    for engine in due:
        if engine not in found:
            raise MissingResult(
                f"the residual study of engine {engine!r} is missing; run `kvlab step residual` on its capture",
                code="missing-result.engine",
            )
    refuse_mixed([one.record for one in found.values()], measured)
    return {engine: found[engine] for engine in params.calibration.engines if engine in found}


def refuse_unplanned(params: Params, record: ResidualRecord, path: Path) -> None:
    """`StaleResult` unless a record is what these parameters plan; names the first thing that is not."""
    planned = {
        "engine": (record.engine in params.calibration.engines, record.engine),
        "origin": (record.origin == params.calibration.origin, record.origin),
        "recipes": (record.recipes == recipes(params), ", ".join(r.recipe_id for r in record.recipes)),
        "context": (record.context == params.windows.context, record.context),
        "windows": (record.windows == coded_windows(params), record.windows),
        "n_layers": (record.n_layers == params.model.n_layers, record.n_layers),
        "boundary_layers": (record.boundary_layers == params.codec.boundary_layers, record.boundary_layers),
    }
    for name, (holds, given) in planned.items():
        if not holds:
            raise StaleResult(
                f"{path}: {name} {given} is not planned by these parameters;"
                " run `kvlab step residual` on the capture again",
                code="stale.not-planned",
            )


def on_grid(record: ResidualRecord, rows: pl.DataFrame, path: Path) -> pl.DataFrame:
    """The rows sorted; `StaleResult` unless each ratio, stream, window and layer is there once."""
    ratios = sorted(recipe.variance_ratio for recipe in record.recipes)
    expected = list(product(ratios, STREAMS, range(record.windows), range(record.n_layers)))
    order = ["variance_ratio", "stream", "window", "layer"]
    rows = rows.sort(order)
    if rows.select(order).rows() != expected:
        raise StaleResult(
            f"{path} has {rows.height} rows where {len(expected)} are due, one for each of {len(ratios)} variance"
            f" ratios, K and V, {record.windows} windows and {record.n_layers} layers; run `kvlab step residual` again",
            code="stale.other-rows",
        )
    return rows


def refuse_other_ranks(found: ResidualResult, path: Path) -> None:
    """`StaleResult` unless the record's histograms count the table's blocks and ranks."""
    for recipe, stream, layer in product(found.record.recipes, STREAMS, range(found.record.n_layers)):
        ratio = recipe.variance_ratio
        blocks = found.blocks(ratio, stream, (layer,))
        expected = [
            found.sums(ratio, stream, name)[:, layer].astype(int).tolist() for name in ("n_blocks", "d_eff_sum")
        ]
        nothing = np.zeros(found.record.windows, dtype=int)
        if any(counts.shape != nothing.shape for counts in blocks.values()):
            raise StaleResult(
                f"{path}: its histograms are not of {nothing.size} windows; run `kvlab step residual` again",
                code="stale.other-histograms",
            )
        counted = [sum(blocks.values(), nothing), sum((rank * n for rank, n in blocks.items()), nothing)]
        if [given.tolist() for given in counted] != expected:
            raise StaleResult(
                f"{path}: layer {layer} {stream} at variance_ratio {ratio:g} has other blocks or ranks in the"
                " record than in the table; run `kvlab step residual` again",
                code="stale.other-histograms",
            )


def refuse_mixed(records: Iterable[ResidualRecord], measured: Provenance | None) -> None:
    """`MixedIdentity` unless all were made of one model, corpus and calibration, with one set of versions.

    A calibration that only the other results read does not count, nor does one that they did not read.
    """
    values: dict[str, set[str]] = {}

    def note(name: str, value: object) -> None:
        values.setdefault(name, set()).add(str(value))

    for given in [*(record.provenance for record in records), *([measured] if measured else [])]:
        for name in ("model", "model_hash", "corpus_hash", "device"):
            note(name, getattr(given, name))
        for origin, sigma in given.calibration.items():
            note(f"calibration.{origin}", sigma)
        note("versions", _listed(given.versions))
    for record in records:
        note("versions of the captures", _listed(record.captured_with))
        note("dtype of the captures", record.dtype)
    several = {name: found for name, found in values.items() if len(found) > 1}
    if several:
        raise MixedIdentity(several)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


# ------------------------------------------------------------------------------------- estimates


def residual_entries(params: Params, paths: Sequence[Path], measured: Provenance | None, boot: Bootstrap) -> dict:
    """The part ``residual`` of ``metrics.json``.

    Parameters
    ----------
    paths : sequence of Path
        The JSON records of ``kvlab step residual``, one per captured engine, each with its parquet beside it.
    measured : Provenance or None
        Of the other results.

    Returns
    -------
    dict
        ``rows``: one per engine, variance ratio, stream, and layer or group of layers. ``ratios``: the squared
        error on vLLM's capture over that on transformers', empty unless both were captured.

    Raises
    ------
    kvlab.core.errors.Fault, kvlab.core.errors.UserError
        What `read_residuals` refuses; fewer than two windows.
    """
    found = read_residuals(params, paths, measured)
    groups = groups_of(params)
    return {
        "rows": [
            row_entry(params, boot, one, recipe, stream, group)
            for one in found.values()
            for recipe, stream, group in product(recipes(params), STREAMS, groups)
        ],
        "ratios": ratio_entries(params, boot, found, groups),
    }


def groups_of(params: Params) -> list[ResidualGroup]:
    """Each layer, those that the studied recipe codes, and all; a group of the same layers is not repeated."""
    everything, coded = tuple(range(params.model.n_layers)), coded_layers(params)
    groups = [ResidualGroup("layer", (layer,)) for layer in everything]
    groups += [ResidualGroup("coded", coded)] if coded and coded != everything else []
    return [*groups, ResidualGroup("all", everything)]


def place_entry(params: Params, ratio: float, stream: str, group: ResidualGroup) -> dict:
    """The fields that say what a row is about."""
    boundary = group.layer in params.codec.boundary_layers if group.layer is not None else None
    place = {"variance_ratio": ratio, "stream": stream, "group": group.name, "layer": group.layer}
    return place | {"boundary": boundary}


def row_entry(
    params: Params, boot: Bootstrap, found: ResidualResult, recipe, stream: str, group: ResidualGroup
) -> dict:
    """One engine's errors, ranks, outliers and bytes of a layer or a group.

    Of a group, errors are the mean of its layers' relative errors and ``frame_bytes`` the sum of its frames, per
    window. ``whitened_error`` is None for V, ``outlier_rate`` where the recipe stores no outliers.
    ``d_eff_shares`` is the histogram with intervals, of all layers together only.
    """
    ratio = recipe.variance_ratio
    columns = [c for name in QUANTITIES for c in found.columns(ratio, stream, name, group.layers)]
    numbers = boot.combine_many(columns, lambda means: estimates(means, len(group.layers)))
    made = {name: number.to_json() for name, number in zip(ESTIMATES, numbers, strict=True)}
    if "whitened" not in MEASURES[stream]:
        made["whitened_error"] = None
    if getattr(recipe.stream(stream), "outlier_threshold", None) is None:
        made["outlier_rate"] = None
    blocks = found.blocks(ratio, stream, group.layers)
    return (
        {"engine": found.record.engine, "recipe_id": recipe.recipe_id}
        | place_entry(params, ratio, stream, group)
        | made
        | {"d_eff_blocks": {str(rank): int(counts.sum()) for rank, counts in blocks.items()}}
        | {"d_eff_shares": share_entries(boot, found, blocks) if group.name == "all" else None}
    )


def share_entries(boot: Bootstrap, found: ResidualResult, blocks: dict[int, np.ndarray]) -> list[dict]:
    """The histogram of kept ranks with intervals: each rank's blocks, and their share of all."""
    total = found.column(sum(blocks.values(), np.zeros(found.record.windows)))
    shares = []
    for rank, counts in blocks.items():
        share = boot.ratio(found.column(counts), total).within(0.0, 1.0)
        shares.append({"d_eff": rank, "blocks": int(counts.sum()), "share": share.to_json()})
    return shares


def estimates(means: np.ndarray, n_layers: int) -> np.ndarray:
    """`ESTIMATES` [..., 6] from the means of `QUANTITIES`, layer by layer [..., quantities * layers]."""
    by_name = means.reshape(*means.shape[:-1], len(QUANTITIES), n_layers)
    of = {name: by_name[..., number, :] for number, name in enumerate(QUANTITIES)}
    total = {name: values.sum(-1) for name, values in of.items()}
    coefficients = np.maximum(total["n_coefficients"], 1)  # a codec that quantises nothing has no outliers
    return np.stack(
        [
            (of["raw_error_sq"] / of["raw_signal_sq"]).mean(-1),
            (of["whitened_error_sq"] / of["whitened_signal_sq"]).mean(-1),
            total["d_eff_sum"] / total["n_blocks"],
            total["n_outliers"] / coefficients,
            8 * total["bytes"] / total["values"],
            total["bytes"],
        ],
        axis=-1,
    )


# ------------------------------------------------------------------------------ between engines


def ratio_entries(
    params: Params, boot: Bootstrap, found: dict[str, ResidualResult], groups: list[ResidualGroup]
) -> list[dict]:
    """Squared error on one engine's capture over that on the other's, paired by window; none with one engine.

    A q-value corrects the p-value of a single layer for the layers of its variance ratio, stream and measure.
    ``resolved`` asks for both: an interval to one side of 1, and a q-value (of a group: a p-value) of at most
    one minus the confidence. The codec is discontinuous, so two engines differ much in a few windows and not at
    all in the others, and of such a scatter an interval alone believes too much.
    """
    low, high = LEVELS["engine"]
    if not {low, high} <= set(found):
        return []
    rows = []
    for recipe, stream in product(recipes(params), STREAMS):
        for measure in MEASURES[stream]:
            name, ratio = f"{measure}_error_sq", recipe.variance_ratio
            columns = [
                [found[engine].columns(ratio, stream, name, group.layers) for engine in (high, low)] for group in groups
            ]
            p_values = [difference_p(boot, *pair) for pair in columns]
            singles = [group.name == "layer" for group in groups]
            q_values = iter(corrected([p for p, single in zip(p_values, singles, strict=True) if single]))
            for group, pair, p_value, single in zip(groups, columns, p_values, singles, strict=True):
                place = place_entry(params, ratio, stream, group) | {"measure": measure}
                rows.append(place | ratio_entry(boot, *pair, p_value, next(q_values) if single else None))
    return rows


def no_error(over: list[Column], under: list[Column]) -> bool:
    """Whether a codec made no error in some window: then there is no ratio."""
    return not all((column.sums > 0).all() for column in (*over, *under))


def difference_p(boot: Bootstrap, over: list[Column], under: list[Column]) -> float | None:
    """p-value that two engines' errors are exchangeable, by the mean log ratio of the layers in each window.

    See `stats.multiple.sign_flip_two_sided_p`.
    """
    if no_error(over, under):
        return None
    logs = np.mean([np.log(a.sums / b.sums) for a, b in zip(over, under, strict=True)], axis=0)
    return sign_flip_two_sided_p(logs, draws=boot.resamples, seed=boot.seed)


def corrected(p_values: list[float | None]) -> list[float | None]:
    """q-values of those that were tested (`stats.multiple.benjamini_hochberg`)."""
    tested = [p for p in p_values if p is not None]
    q_values = iter(benjamini_hochberg(tested).tolist() if tested else [])
    return [None if p is None else next(q_values) for p in p_values]


def ratio_entry(
    boot: Bootstrap, over: list[Column], under: list[Column], p_value: float | None, q_value: float | None
) -> dict:
    """The ratio of two engines' errors; of several layers the geometric mean of theirs, None without an error.

    ``windows_needed`` is how many would move the interval to one side of 1; None when it lies there, or when
    nothing is to be seen.
    """
    entry = {"ratio": None, "p_value": p_value, "q_value": q_value, "resolved": False, "windows_needed": None}
    if no_error(over, under):
        return entry
    n = len(over)
    found = boot.combine([*over, *under], lambda m: np.exp((np.log(m[..., :n]) - np.log(m[..., n:])).mean(-1)))
    clear = not found.low <= 1 <= found.high
    likely = (p_value if q_value is None else q_value) <= 1 - boot.confidence
    width = found.value - found.low if found.value > 1 else found.high - found.value
    needed = (
        None if clear else windows_needed(width, abs(found.value - 1), found.n_windows, power_factor(found.confidence))
    )
    return entry | {"ratio": found.to_json(), "resolved": clear and likely, "windows_needed": needed}
