"""The transformers cache that people import as ``kvlab.Cache``: from a recipe, or from a recipe file of any kind."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from kvlab.cache.files.prepared import FromFile
from kvlab.cache.files.recipe import CalibratedRecipeFile, read_recipe_file
from kvlab.cache.hf.kv_cache import Calibration, KVCache, Semantics
from kvlab.calibration.needs import needed_files
from kvlab.core.errors import CapabilityError, ParamsError, UserError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.core.recipe import STREAMS, Recipe


class Cache(KVCache):
    """K and V as a recipe's codecs store them; pass it to a transformers model as `past_key_values`::

        from kvlab import Cache, recipe
        cache = Cache(model, recipe("hadamard", bits=4))
        model.generate(**inputs, past_key_values=cache)

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A calibration is checked against the weights that it was loaded from, in a folder or in the hub's cache.
    recipe : Recipe, Path or str
        What `kvlab.recipe` makes, or a file: what `kvlab calibrate` or `kvlab recipe` wrote.
    calibration : Calibration or None
        For a recipe that needs one and is no file.
    semantics : {"serving", "in_forward"}
        What attention sees of the running call's tokens; see `KVCache`.
    **options : object
        `placement`, `window_bytes` and `compiled` of `KVCache`.

    Raises
    ------
    UserError
        The model is none, such as the name of its folder.
    ParamsError
        A calibration is given beside a file, which names its own.
    CapabilityError
        The file codes some layers only, or the cache cannot hold this model.
    CalibrationMismatch
        The calibration is missing or belongs to another model.
    StorageError
        The file is missing or damaged.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | Path | str,
        calibration: Calibration | None = None,
        semantics: Semantics = "serving",
        **options,
    ):
        if not isinstance(model, nn.Module):
            raise UserError(
                f"a Cache is for a loaded model, not {model!r}; give what AutoModelForCausalLM.from_pretrained makes",
                code="user.no-model",
            )
        if not isinstance(recipe, Recipe):
            if calibration is not None:
                raise ParamsError(
                    f"{recipe} names its calibration itself; give a recipe beside a calibration",
                    code="params.two-calibrations",
                )
            recipe, calibration = from_file(model, recipe)
        super().__init__(model, recipe, calibration, semantics, **options)


def from_file(model: nn.Module, path: Path | str) -> tuple[Recipe, FromFile | None]:
    """The recipe of a file and its calibration, for one transformers model; raises as `Cache`.

    Caches that are made of it, now or later, share what the codecs hold, as long as the file says the same.
    """
    if (name := str(path).partition("+")[0]) in STREAMS and not Path(path).exists():
        raise ParamsError(
            f"there is no file {str(path)!r}; a codec is named with kvlab.recipe({name!r}, bits=4)",
            code="params.codec-name",
        )
    file = read_recipe_file(path)
    if file.layers is not None:
        raise CapabilityError(
            f"{path} codes layers {list(file.layers)}; a transformers cache codes all, set null",
            code="capability.some-layers",
        )
    if not isinstance(file, CalibratedRecipeFile) and not needed_files(file.recipe):
        return file.recipe, None  # then the model need not be one whose weights are known
    config = model.config
    revision = getattr(config, "_commit_hash", None)  # transformers notes what it found in the hub
    info = resolve(Model(path=model.name_or_path, revision=revision, n_layers=config.num_hidden_layers), loads=False)
    return file.recipe, FromFile(file, info)
