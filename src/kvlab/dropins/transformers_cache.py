"""A recipe file as a transformers cache: the same file that the vLLM plugin takes."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from kvlab.calibration.load import Fitted, load
from kvlab.dropins.recipe_file import read_recipe_file
from kvlab.engines.hf_cache import KVCache
from kvlab.errors import CapabilityError
from kvlab.model import resolve
from kvlab.params import Model


def kv_cache(model: nn.Module, path: Path | str, **options) -> KVCache:
    """The cache that a recipe file describes, for one transformers model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Loaded from a folder; a calibration is checked against the weights there.
    path : Path or str
        What `kvlab recipe` wrote.
    **options
        `semantics`, `placement` and `keep_decoded` of `KVCache`.

    Raises
    ------
    CapabilityError
        The file codes some layers only, or the cache cannot hold this model.
    CalibrationMismatch
        The calibration belongs to another model.
    """
    file = read_recipe_file(path)
    if file.layers is not None:
        raise CapabilityError(f"{path} codes layers {list(file.layers)}; a transformers cache codes all, set null")
    calibration = None
    if file.calibration is not None:
        info = resolve(Model(path=model.name_or_path, revision=None, n_layers=model.config.num_hidden_layers))
        calibration = load(Fitted(**dict(file.calibration)), info.model_hash)
    return KVCache(model, file.recipe, calibration, **options)
