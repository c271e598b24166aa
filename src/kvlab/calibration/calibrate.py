"""A whole calibration in one go, in memory: windows through an engine, and what codecs read of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from kvlab.calibration.archive import fit_archive
from kvlab.calibration.biases import projection_biases
from kvlab.calibration.capture import WindowStatistics, observe
from kvlab.calibration.components import FIELDS, Fitting
from kvlab.calibration.load import Calibrated, TableKey
from kvlab.calibration.metrics import Angles, ErrorMetrics
from kvlab.calibration.moments import STREAMS
from kvlab.calibration.needs import by_position, coded_by, reads
from kvlab.calibration.sigma import second_moments
from kvlab.calibration.tables import fit_table, residual_pool
from kvlab.calibration.whole import fit_whole
from kvlab.codecs.block import BlockStream
from kvlab.codecs.registry import fit_class
from kvlab.codecs.shared import whitening
from kvlab.codecs.shared.components import Components
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Placement, Recipe, digest
from kvlab.core.records import fingerprint
from kvlab.engines.base import Engine

SAMPLE, RIDGE = 16, 1e-3


def calibrate(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    recipes: Sequence[Recipe],
    *,
    corpus_hash: str,
    context: int | None = None,
    ridge: float = RIDGE,
    sample: int = SAMPLE,
    layers: Sequence[int] | None = None,
    placement: Placement = "pre_rope",
) -> Calibrated:
    """Fit what `recipes` read, and nothing else, to what an engine computes on some windows; no file is written.

    Parameters
    ----------
    engine : Engine
        Running; it is not closed.
    windows : sequence of sequence of int
        Token ids, all windows of one length of at least 3 tokens. They are gone through once.
    recipes : sequence of Recipe
        What will be coded.
    corpus_hash : str
        What names the windows in the result.
    context : int, optional
        First tokens of a window whose K and V count; by default all. Queries count at all positions.
    ridge : float
        Added to each channel of Sigma_q and of the metrics, times its own second moment.
    sample : int
        Windows whose K and V are held in memory, in bfloat16, for the quantiles of components and for the block
        codec's tables; evenly spread over all.
    layers : sequence of int, optional
        Coded layers, from which the block codec's tables are pooled; by default all.
    placement : {"pre_rope", "post_rope"}
        Where K will be coded, for those tables; Sigma_q is fitted for both.

    Raises
    ------
    UserError
        The windows are none or of several lengths, or shorter than the context.
    NonFinite
        Q, K or V holds NaN or infinity.
    CalibrationMismatch
        There are too few tokens.
    NotPositiveDefinite
        A second moment has no Cholesky factor; `ridge` must be larger.
    """
    if context is None:
        context = len(windows[0]) if windows else 0
    observed = observe(engine, windows, context, corpus_hash, sample, beside=looked_at(recipes))
    return fitted(observed, engine.info, recipes, ridge, layers, placement)


def fitted(
    observed: WindowStatistics,
    info: ModelInfo,
    recipes: Sequence[Recipe],
    ridge: float = RIDGE,
    layers: Sequence[int] | None = None,
    placement: Placement = "pre_rope",
) -> Calibrated:
    """The same of windows that were observed before, in memory or as a file (`Captured`)."""
    layers = range(info.n_layers) if layers is None else layers
    sigma = second_moments(observed, info.n_layers)
    whiteners = {
        at: {layer: whitening.fit(moment, ridge) for layer, moment in found.items()} for at, found in sigma.items()
    }
    metrics = ErrorMetrics(info, observed.context)
    fitting = Fitting(observed, whiteners["pre_rope"], metrics, ridge)
    components = _components(fitting, info, recipes)
    turned = {layer: fitting.turned(layer) for layer in _layers(info, "k")} if any(map(by_position, recipes)) else {}
    archive = fit_archive(observed, fitting, info) if asks_for_archive(recipes) else None
    whole = {codec: fit_whole(codec, observed, info, recipes) for codec in _whole_codecs(recipes)}
    outputs = _outputs(observed, recipes)
    due = {kind for recipe in recipes for stream in STREAMS for kind in reads(getattr(recipe, stream), stream)}
    biases = projection_biases(info, observed.context) if "bias" in due else {}
    tables = _tables(observed, recipes, whiteners, layers, placement, metrics.angles)
    own = _own(observed, info, recipes)
    sigma_hash = fingerprint(*(t.numpy() for w in whiteners["pre_rope"].values() for t in (w.chol, w.inv_chol)))
    everything = [t for at in whiteners.values() for w in at.values() for t in (w.chol, w.inv_chol)]
    everything += [t for by_layer in components.values() for one in by_layer.values() for t in _tensors(one)]
    everything += [t for one in turned.values() for t in _tensors(one)]
    everything += [t for by_layer in own.values() for one in by_layer.values() for t in vars(one).values()]
    everything += [bias for by_layer in biases.values() for bias in by_layer.values()]
    everything += archive.tensors.values() if archive else []
    everything += [t for one in whole.values() for t in one.tensors.values()] + list(outputs.values())
    return Calibrated(
        whiteners=whiteners["pre_rope"],
        own=own,
        rotated=whiteners["post_rope"],
        tables=tables,
        components=components,
        turned=turned,
        archive=archive,
        whole=whole,
        biases=biases,
        outputs=outputs,
        origin=observed.metadata["engine"],
        corpus_hash=observed.metadata["corpus_hash"],
        sigma_hash=sigma_hash,
        calibration_hash=fingerprint(*(t.numpy() for t in (*everything, *tables.values()))),
    )


def asks_for_archive(recipes: Sequence[Recipe]) -> bool:
    """Whether one of the recipes is of kvlab's own codec that sees all layers at once."""
    return any("archive" in reads(recipe.k, "k") for recipe in recipes)


def looked_at(recipes: Sequence[Recipe]) -> list[str]:
    """What recipes need to be looked at beside moments of each layer: attributes of `WindowStatistics`."""
    whole = _whole_codecs(recipes)
    due = {
        "across": asks_for_archive(recipes),
        "joint": "kvtc" in whole,
        "rows": "aquakv" in whole,
        "outputs": any("outputs" in reads(getattr(recipe, stream), stream) for recipe in recipes for stream in STREAMS),
    }
    return [name for name, is_due in due.items() if is_due]


def _whole_codecs(recipes: Sequence[Recipe]) -> list[str]:
    """Codecs of whole caches of other people among those of recipes, each once."""
    return list(dict.fromkeys(recipe.k.codec for recipe in recipes if "whole" in reads(recipe.k, "k")))


def _components(fitting: Fitting, info: ModelInfo, recipes: Sequence[Recipe]) -> dict[str, dict[int, Components]]:
    own = {"k": [recipe.k for recipe in recipes if not by_position(recipe)], "v": [recipe.v for recipe in recipes]}
    due = [s for s in STREAMS if any("components" in reads(stream, s) for stream in own[s])]
    return {stream: {layer: fitting.components(layer, stream) for layer in _layers(info, stream)} for stream in due}


def _layers(info: ModelInfo, stream: str) -> Iterable[int]:
    """All layers, told as they are fitted."""
    return tqdm(range(info.n_layers), desc=f"components {stream.upper()}", unit="layer")


def _own(
    observed: WindowStatistics, info: ModelInfo, recipes: Sequence[Recipe]
) -> dict[tuple[str, str], dict[int, Any]]:
    """What codecs fit by themselves to the sample, by stream and codec, and by layer."""
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for recipe, which in product(recipes, STREAMS):
        stream = coded_by(getattr(recipe, which))
        if "own" in reads(stream, which) and (which, stream.codec) not in found:
            fit = fit_class(stream.codec)
            samples = {layer: observed.layer(layer, which).transpose(0, 1) for layer in range(info.n_layers)}
            found[which, stream.codec] = {layer: fit.of(rows) for layer, rows in samples.items()}
    return found


def _outputs(observed: WindowStatistics, recipes: Sequence[Recipe]) -> dict[int, torch.Tensor]:
    """Second moments of what attention makes of V, where a recipe asks for them; `CapabilityError` without any."""
    if "outputs" not in looked_at(recipes):
        return {}
    if observed.outputs is None:
        raise CapabilityError(
            "oscar that follows outputs is fitted on what attention makes of V, of which the pipeline's captures hold"
            " nothing; use `kvlab calibrate`",
            code="capability.not-captured",
        )
    return observed.outputs.second_moments()


def _tables(
    observed: WindowStatistics,
    recipes: Sequence[Recipe],
    whiteners: dict[Placement, dict[int, Whitener]],
    layers: Sequence[int],
    placement: Placement,
    angles: Sequence[Angles],
) -> dict[TableKey, torch.Tensor]:
    found: dict[TableKey, torch.Tensor] = {}
    for recipe, which in product(recipes, STREAMS):
        stream = coded_by(getattr(recipe, which))
        at = placement if which == "k" else "pre_rope"
        key = (which, at, digest(stream))
        if isinstance(stream, BlockStream) and "table" in reads(stream, which) and key not in found:
            turn = angles if at == "post_rope" else None
            pool = residual_pool(stream, which, observed, whiteners[at], layers, turn, which.upper())
            found[key] = torch.tensor(fit_table(stream, which, pool)["centroids"])
    return found


def _tensors(components: Components) -> list[torch.Tensor]:
    return [getattr(components, name) for name in FIELDS]
