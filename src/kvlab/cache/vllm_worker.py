"""The plugin where the model is: what is refused, the tap that codes, and the count of what it did."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvlab.base.errors import CapabilityError, CodecNotActive
from kvlab.base.model import ModelInfo, resolve
from kvlab.base.params import Model
from kvlab.base.recipe import RECIPE_VARIABLE, Recipe
from kvlab.cache.prepared import prepared
from kvlab.cache.recipe_file import RecipeFile, read_recipe_file
from kvlab.codec.base import Codec, Site
from kvlab.codec.kept import Kept
from kvlab.codec.names import CODECS, UNSTORED
from kvlab.codec.registry import class_of, codec_class
from kvlab.codec.seeding import generator
from kvlab.engines import capability
from kvlab.engines.base import Part
from kvlab.engines.hooks import attention_inputs, fused_projection

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STREAMS = ("k", "v")
SHARE = 0.25  # of the free memory, for a cache that was given no size


def read_recipe() -> RecipeFile:
    """The file that the environment names, its codecs fit to run where requests mix.

    Raises
    ------
    CapabilityError
        A codec shares something between tokens. vLLM puts tokens of several requests into one call and
        cuts prompts where it likes, so such a codec's result would depend on who else is being served.
    """
    path = os.environ[RECIPE_VARIABLE]
    found = read_recipe_file(path)
    for stream in STREAMS:
        chosen = getattr(found.recipe, stream)
        if not class_of(chosen).per_token:
            able = [other for other in CODECS if other not in UNSTORED and codec_class(other).per_token]
            raise CapabilityError(
                f"{path}: codec {chosen.codec!r} of stream {stream} codes tokens together, and vLLM mixes tokens of"
                f" several requests in one pass; allowed: {', '.join(able)}"
            )
        if Kept.of(chosen):
            raise CapabilityError(
                f"{path}: stream {stream} keeps tokens at the ends of a sequence as they are (sink {chosen.sink},"
                f" recent {chosen.recent}), and a pass of vLLM does not say where its tokens stand; leave both out"
            )
    return found


@dataclass(frozen=True)
class Served:
    """A recipe made ready for one model: codecs with their calibration in them, and the layers they code."""

    recipe: Recipe
    info: ModelInfo
    calibration_hash: str | None
    layers: tuple[int, ...]
    codecs: dict[str, Codec]


def prepare(config: VllmConfig) -> Served:
    """Check everything that can be checked before a weight is loaded, and build the codecs.

    Raises
    ------
    CapabilityError
        vLLM's settings would leave hooks out, or code something else than the recipe says.
    CalibrationMismatch
        The calibration is missing or another model's.
    ModelError, ParamsError
        The model is not one whose projections are known; a layer that it has not.
    """
    refuse_settings(config)
    found = read_recipe()
    served, text = config.model_config, config.model_config.hf_text_config
    revision = served.revision or getattr(served.hf_config, "_commit_hash", None)
    info = resolve(Model(path=served.model, revision=revision, n_layers=text.num_hidden_layers))
    dtype = str(served.dtype).removeprefix("torch.")
    capability.check("vllm", dtype, "default", info, on_cpu=config.device_config.device_type == "cpu")
    ready = prepared(found, info)
    codecs = {stream: ready.codec(stream) for stream in STREAMS}
    _try_out(codecs, ready.layers, info)
    return Served(ready.recipe, info, ready.calibration_hash, ready.layers, codecs)


def _try_out(codecs: dict[str, Codec], layers: tuple[int, ...], info: ModelInfo) -> None:
    """A token through every codec at every layer: what a calibration lacks is found before there are requests."""
    token = torch.randn(info.n_kv_heads, 1, info.head_dim, generator=generator("plugin"))
    for stream, codec in codecs.items():
        for layer in layers:
            codec.decode(codec.encode(token, Site(0, layer, stream)))


def refuse_settings(config: VllmConfig) -> None:
    """`CapabilityError` names the first of vLLM's settings under which the cache would not be what was asked for."""
    parallel, served = config.parallel_config, config.model_config
    own_dtype = str(served.dtype).removeprefix("torch.")
    ranks = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    split = [name for name in ranks if getattr(parallel, name) != 1]
    rules = [
        (served.enforce_eager, "compiled models drop hooks without a word; set enforce_eager=True (--enforce-eager)"),
        (not split, f"{', '.join(split)} above 1 splits the model over processes; set it to 1"),
        (config.speculative_config is None, "a draft model's cache would not be coded; leave speculation out"),
        (config.lora_config is None, "adapters change the projections that the recipe is for; leave LoRA out"),
        (
            config.kv_transfer_config is None and config.cache_config.kv_offloading_size is None,
            "a KV connector or offloading brings K and V from elsewhere, coded or not; leave kv_transfer_config and"
            " kv_offloading_size out",
        ),
        (
            config.cache_config.cache_dtype in ("auto", own_dtype),
            f"kv_cache_dtype {config.cache_config.cache_dtype!r} codes the cache a second time; set it to 'auto'",
        ),
    ]
    for allowed, reason in rules:
        if not allowed:
            raise CapabilityError(f"{RECIPE_VARIABLE} cannot be honoured: {reason}, or unset {RECIPE_VARIABLE}")


def fit_cache(config: VllmConfig) -> None:
    """Give vLLM on a CPU a KV cache of a stated size, where none was chosen.

    Left alone, vLLM reserves a share of *all* memory (`gpu_memory_utilization`, .92 by default), measures what is
    free once its own processes have taken theirs, and mostly stops there with a traceback. Whether it will cannot be
    told from here, so that the size is always set.
    """
    cache = config.cache_config
    if config.device_config.device_type != "cpu" or cache.kv_cache_memory_bytes is not None:
        return
    total, available = _memory()
    gib = max(1, int(available * SHARE) >> 30)
    cache.kv_cache_memory_bytes = gib << 30
    _logger().warning(
        "kvlab: vLLM's KV cache is set to %d GiB, of %.1f GiB of memory %.1f are free; VLLM_CPU_KVCACHE_SPACE=N sets"
        " another size.",
        gib,
        total / 2**30,
        available / 2**30,
    )


def _memory() -> tuple[int, int]:
    """Bytes of memory, all and available, as vLLM's worker reads them: of one node, within a container's limit."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return node.total_memory, node.available_memory


class ServingTap:
    """Codes K and V of the recipe's layers while a step is served, and counts.

    Outside of a step it lets everything pass: vLLM's profiling and dummy passes hold no one's tokens, and
    memory that was never written.
    """

    def __init__(self, served: Served):
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
                f"recipe {self.served.recipe.recipe_id} was not active in this pass: {'; '.join(missed)}"
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


def arm(worker) -> None:
    """Make a vLLM worker put the tap on its model once that is loaded, and check every step that it serves."""
    tap = ServingTap(prepare(worker.vllm_config))
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


def hook_on(model: torch.nn.Module, tap: ServingTap) -> None:
    """Put the tap where the recipe codes K: before its rotary embedding, or after it."""
    if tap.served.recipe.rotary == "after":
        for module, hook in attention_inputs(model, tap.served.info, tap):
            module.register_forward_pre_hook(hook)
        return
    for module, hook in fused_projection(model, tap.served.info, tap):
        module.register_forward_hook(hook)


def _logger():
    from vllm.logger import init_logger

    return init_logger("vllm.kvlab")


def _log(served: Served) -> None:
    _logger().info(
        "kvlab: recipe %s codes K (%s) and V (%s) of layers %s in every pass. Storage is simulated: vLLM's cache"
        " keeps its dtype and size.",
        served.recipe.recipe_id,
        served.recipe.k.codec,
        served.recipe.v.codec,
        ", ".join(map(str, served.layers)),
    )
