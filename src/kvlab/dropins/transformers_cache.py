"""A recipe file as a transformers cache: the same file that the vLLM plugin takes."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from kvlab.calibration.load import needed_files
from kvlab.dropins.prepared import prepared
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
        A calibration is checked against the weights that it was loaded from, in a folder or in the hub's cache.
    path : Path or str
        What `kvlab recipe` wrote.
    **options
        `semantics`, `placement` and `keep_decoded` of `KVCache`.

    Raises
    ------
    CapabilityError
        The file codes some layers only, or the cache cannot hold this model.
    CalibrationMismatch
        The calibration is missing or belongs to another model.
    """
    file = read_recipe_file(path)
    if file.layers is not None:
        raise CapabilityError(f"{path} codes layers {list(file.layers)}; a transformers cache codes all, set null")
    if not needed_files(file.recipe):  # then the model need not be one whose weights are known
        return KVCache(model, file.recipe, None, **options)
    config = model.config
    revision = getattr(config, "_commit_hash", None)  # transformers notes what it found in the hub
    info = resolve(Model(path=model.name_or_path, revision=revision, n_layers=config.num_hidden_layers))
    return KVCache(model, file.recipe, prepared(file, info).calibration, **options)
