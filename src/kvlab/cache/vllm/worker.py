"""The plugin where the model is: what is refused, the tap that codes, and the count of what it did."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvlab.cache.files.prepared import prepared
from kvlab.cache.files.recipe import RecipeFile, read_recipe_file
from kvlab.cache.vllm.settings import common, compiled, logger, own_dtype, refuse_settings
from kvlab.codecs.base import Codec, Site
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.registry import class_of, codec_class
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import CapabilityError, CodecNotActive, ParamsError, StorageError
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Model
from kvlab.core.recipe import PAGES_VARIABLE, RECIPE_VARIABLE, Recipe
from kvlab.engines import capability
from kvlab.engines.base import Part
from kvlab.engines.hooks import attention_inputs, fused_projection

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STREAMS = ("k", "v")


def read_recipe(variable: str = RECIPE_VARIABLE) -> RecipeFile:
    """The file that the environment names by `variable`, its codecs fit to run where requests mix.

    Raises
    ------
    CapabilityError
        A codec shares something between tokens. vLLM puts tokens of several requests into one call and
        cuts prompts where it likes, so such a codec's result would depend on who else is being served.
        Or it keeps tokens exact, which coded pages alone can do.
    """
    path = os.environ[variable]
    try:
        found = read_recipe_file(path)
    except (StorageError, ParamsError) as error:  # whoever starts vLLM sees no flag that the file could be of
        raise type(error)(f"{variable}: {error}", code=error.code) from None
    refuse_mixed(found.recipe, path)
    if variable == RECIPE_VARIABLE:
        refuse_ends(found.recipe, path)
    return found


def refuse_mixed(recipe: Recipe, path: str) -> None:
    """`CapabilityError` for a recipe that cannot run where requests mix; see `read_recipe`."""
    for stream in STREAMS:
        chosen = getattr(recipe, stream)
        if not class_of(chosen).per_token:
            able = [other for other in TENSORWISE if other not in UNSTORED and codec_class(other).per_token]
            raise CapabilityError(
                f"{path}: codec {chosen.codec!r} of stream {stream} codes tokens together, and vLLM mixes tokens of"
                f" several requests in one pass; allowed: {', '.join(able)}",
                code="capability.tokens-together",
            )


def refuse_ends(recipe: Recipe, path: str) -> None:
    """`CapabilityError` for a recipe that keeps tokens exact: what codes K and V as they appear cannot."""
    for stream in STREAMS:
        chosen = getattr(recipe, stream)
        if ExactTokens.of(chosen):
            raise CapabilityError(
                f"{path}: stream {stream} keeps tokens at the ends of a sequence as they are (sink {chosen.sink},"
                f" recent {chosen.recent}), and a pass of vLLM does not say where its tokens stand; leave both out, or"
                f" serve from coded pages ({PAGES_VARIABLE})",
                code="capability.ends",
            )


@dataclass(frozen=True)
class ReadyRecipe:
    """A recipe made ready for one model: codecs with their calibration in them, and the layers they code."""

    recipe: Recipe
    info: ModelInfo
    calibration_hash: str | None
    layers: tuple[int, ...]
    codecs: dict[str, Codec]


def prepare(config: VllmConfig) -> ReadyRecipe:
    """Check everything that can be checked before a weight is loaded, and build the codecs; raises as `made_ready`."""
    refuse_settings([*compiled(config), *common(config)], RECIPE_VARIABLE)
    return made_ready(config, read_recipe())


def made_ready(config: VllmConfig, found: RecipeFile, by_position: bool = False) -> ReadyRecipe:
    """A recipe file made ready for the model that vLLM is about to load; `by_position` as of `prepared`.

    Raises
    ------
    CapabilityError
        vLLM computes this model wrongly.
    CalibrationMismatch
        The calibration is missing or another model's.
    ModelError, ParamsError
        The model is not one whose projections are known; a layer that it has not.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    revision = model.revision or getattr(model.hf_config, "_commit_hash", None)
    info = resolve(Model(path=model.model, revision=revision, n_layers=text.num_hidden_layers), loads=False)
    capability.check("vllm", own_dtype(config), "default", info, on_cpu=config.device_config.device_type == "cpu")
    ready = prepared(found, info, by_position=by_position)
    codecs = {stream: ready.codec(stream, ends=False) for stream in STREAMS}
    _try_out(codecs, ready.layers, info)
    return ReadyRecipe(ready.recipe, info, ready.calibration_hash, ready.layers, codecs)


def _try_out(codecs: dict[str, Codec], layers: tuple[int, ...], info: ModelInfo) -> None:
    """A token through every codec at every layer: what a calibration lacks is found before there are requests.

    `klt` has then made what it codes with, and lets go of what that was made from.
    """
    token = torch.randn(info.n_kv_heads, 1, info.head_dim, generator=generator("plugin"))
    for stream, codec in codecs.items():
        for layer in layers:
            codec.decode(codec.encode(token, Site(0, layer, stream)))
        if isinstance(codec, KltCodec):
            codec.let_go()


class ServingTap:
    """Codes K and V of the recipe's layers while a step is served, and counts.

    Outside of a step it lets everything pass: vLLM's profiling and dummy passes hold no one's tokens, and
    memory that was never written.
    """

    def __init__(self, served: ReadyRecipe):
        self.served = served
        self.steps = self.tokens = 0
        self.fires: Counter[tuple[str, int]] = Counter()
        self._nbytes: Counter[str] = Counter()
        self._values: Counter[str] = Counter()
        self._seen: Counter[tuple[str, int]] | None = None

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """See `Tap`."""
        if self._seen is None or part not in STREAMS or layer not in self.served.layers:
            return None
        codec = self.served.codecs[part]
        encoded = codec.encode(x, Site(self.steps, layer, part))
        self.fires[part, layer] += 1
        self._seen[part, layer] += x.shape[1]
        self._values[part] += x.numel()
        self._nbytes[part] += sum(array.nbytes for arrays in (encoded.shared, *encoded.blocks) for array in arrays)
        return codec.decode(encoded)

    def open_step(self) -> None:
        """A pass with requests in it begins."""
        self._seen = Counter()

    def close_step(self, tokens: int) -> None:
        """It has ended; `CodecNotActive` unless every coded layer's K and V had all its tokens in the codec."""
        seen, self._seen = self._seen, None
        missed = [
            f"{stream} of layer {layer} ({seen[stream, layer]} of {tokens} tokens)"
            for layer in self.served.layers
            for stream in STREAMS
            if seen[stream, layer] < tokens
        ]
        if missed:
            raise CodecNotActive(
                f"recipe {self.served.recipe.recipe_id} was not active in this pass: {'; '.join(missed)}",
                code="not-active.pass",
            )
        self.steps += 1
        self.tokens += tokens

    def abandon_step(self) -> None:
        """It has failed."""
        self._seen = None

    def report(self) -> dict[str, Any]:
        """The fields of `vllm_plugin.Status`, as types that any serialiser knows."""
        served = self.served
        return {
            "recipe_id": served.recipe.recipe_id,
            "model_hash": served.info.model_hash,
            "calibration_hash": served.calibration_hash,
            "layers": list(served.layers),
            "steps": self.steps,
            "tokens": self.tokens,
            "fires": {s: [self.fires[s, layer] for layer in served.layers] for s in STREAMS},
            "bits_per_value": {s: 8 * self._nbytes[s] / self._values[s] if self._values[s] else None for s in STREAMS},
        }


def arm(worker, served: ReadyRecipe) -> None:
    """Make a vLLM worker put the tap on its model once that is loaded, and check every step that it serves."""
    tap = ServingTap(served)
    load_model, execute_model = worker.load_model, worker.execute_model

    def load_and_hook(*given, **named):
        """The worker's `load_model`, and then the tap on what it loaded."""
        answer = load_model(*given, **named)
        hook_on(worker.get_model(), tap)
        worker.kvlab_status = tap.report
        _log(tap.served)
        return answer

    def execute_checked(scheduled, *given, **named):
        """The worker's `execute_model`, and then whether all its tokens passed the tap."""
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            return execute_model(scheduled, *given, **named)
        tap.open_step()
        try:
            answer = execute_model(scheduled, *given, **named)
        except BaseException:  # an interrupt too: whatever it is goes on, after this
            tap.abandon_step()
            raise
        tap.close_step(tokens)
        return answer

    worker.load_model, worker.execute_model = load_and_hook, execute_checked


def confirm(worker) -> None:
    """Nothing to look at once vLLM has its cache: it is vLLM's own."""


def hook_on(model: torch.nn.Module, tap: ServingTap) -> None:
    """Put the tap where the recipe codes K: before its rotary embedding, or after it."""
    if tap.served.recipe.rotary == "after":
        for module, hook in attention_inputs(model, tap.served.info, tap):
            module.register_forward_pre_hook(hook)
        return
    for module, hook in fused_projection(model, tap.served.info, tap):
        module.register_forward_hook(hook)


def _log(served: ReadyRecipe) -> None:
    logger().info(
        "kvlab: recipe %s codes K (%s) and V (%s) of layers %s in every pass. Storage is simulated: vLLM's cache"
        " keeps its dtype and size.",
        served.recipe.recipe_id,
        served.recipe.k.codec,
        served.recipe.v.codec,
        ", ".join(map(str, served.layers)),
    )
