"""Answers from vLLM, as it is, with a recipe inside it, or with its own cache in fewer bits.

A recipe runs by the plugin, which codes K and V where they appear: attention reads every token as decoded, also those
of the running pass (the protocol `in_forward`). Log-probabilities of a prompt in one pass therefore show the codec.

Of an engine's own cache this is not so in general: a first pass may attend to K and V as they were computed and store
them for later reads. vLLM's CPU attention reads them back from the cache. On other devices it is a matter of the
attention backend, and what a backend rounds otherwise looks like a codec that is read; there only answers that are
written are taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kvlab.engines.vllm.process  # noqa: F401 (sets what vLLM reads from the environment, so before vLLM itself)

# isort: split
import torch
from safetensors import SafetensorError
from vllm import LLM, SamplingParams

from kvlab.cache import vllm_plugin
from kvlab.cache.vllm_plugin import Status
from kvlab.codecs.base import Codec, Site
from kvlab.codecs.registry import build
from kvlab.core.engines import AUTO
from kvlab.core.errors import CapabilityError, CodecNotActive, ModelError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import RECIPE_VARIABLE, Recipe
from kvlab.engines.hooks import attention_layers, fused_projection, installed
from kvlab.engines.products import chosen_by_vllm
from kvlab.evals.backend import CacheUse, Kind, ScoreRequest, ScoreResult, Side, Sides, WriteRequest, WriteResult
from kvlab.evals.canary import ONE_BIT

PROTOCOL = "in_forward"
SHARE = 0.4  # of a GPU's memory: two engines stand beside one another


class VLLMSide(Side):
    """vLLM as it is; requests are answered together.

    Parameters
    ----------
    info : ModelInfo
    dtype : str
    limit : int
        Most tokens of a request with its answer.
    ends : frozenset of int
        Tokens that end a text.
    cache_dtype : str
        What its own cache is told to hold.
    """

    what = "no codec"

    def __init__(self, info: ModelInfo, dtype: str, limit: int, ends: frozenset[int], cache_dtype: str = AUTO):
        self._info, self._ends = info, ends
        self.llm = started(info, dtype, limit, cache_dtype)
        self.model = self.llm.apply_model(lambda model: model)[0]
        layer = attention_layers(self.model, info)[0].attn
        self.kv_cache_dtype = found = held_dtype(layer)
        self.cache_class = type(layer.impl).__name__.removesuffix("Impl")
        self._itemsize = layer.kv_cache.element_size()
        self._cache_dtype = cache_dtype
        if cache_dtype != AUTO:
            self.what = f"a cache of {cache_dtype}"
            if found != cache_dtype:
                raise CapabilityError(f"vLLM was asked for a cache of {cache_dtype} and holds {found}")
        self.begin()

    def refuse_blind(self, kind: Kind) -> None:
        """See `Side.refuse_blind`."""
        if torch.cuda.is_available():
            refuse_own_pass(kind, self._cache_dtype, torch.cuda.get_device_name())

    def begin(self) -> None:
        """See `Side.begin`."""
        self._tokens = 0

    def seen(self) -> CacheUse:
        """See `Side.seen`; what the cache held of all requests."""
        values = self._tokens * self._info.values_per_token
        return CacheUse(0, 0, values * self._itemsize, values)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """See `Side.score`."""
        wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        prompts = [request.context + request.continuation for request in requests]
        outputs = self._asked(prompts, [wanted] * len(prompts))
        return [scored(request, output.prompt_logprobs) for request, output in zip(requests, outputs, strict=True)]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """See `Side.write`."""
        wanted = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.tokens,
                stop=request.stops,
                stop_token_ids=sorted(self._ends),
                logprobs=0,
            )
            for request in requests
        ]
        outputs = self._asked([request.context for request in requests], wanted)
        return [written(output.outputs[0]) for output in outputs]

    def _asked(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> list:
        if not prompts:
            return []
        wanted = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(wanted, sampling, use_tqdm=len(prompts) > 1)
        # the last token that is written is never stored
        self._tokens += sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)
        return outputs


class CodedVLLMSide(VLLMSide):
    """vLLM with a recipe inside it, by the plugin.

    Parameters
    ----------
    recipe : Path
        A recipe file.
    """

    def __init__(self, info: ModelInfo, dtype: str, limit: int, ends: frozenset[int], recipe: Path, codec: str):
        with activated(recipe):
            super().__init__(info, dtype, limit, ends)
        self.what = codec

    def begin(self) -> None:
        """See `Side.begin`."""
        super().begin()
        self._before = vllm_plugin.status(self.llm)

    def seen(self) -> CacheUse:
        """See `Side.seen`; bytes are those that the codec wrote, and the engine's own of layers that it leaves alone.

        Raises
        ------
        CodecNotActive
            No pass was coded, or a layer's codec did not run in every pass.
        """
        return coded(self._before, vllm_plugin.status(self.llm), self._tokens, self._info, self._itemsize)


class TappedVLLMSide(VLLMSide):
    """Another side's engine with a codec before the rotary embedding: a canary where the plugin's codecs sit."""

    def __init__(self, plain: VLLMSide, recipe: Recipe):
        vars(self).update(vars(plain))
        self.what = "a one-bit codec"
        self._codecs: dict[str, Codec] = {stream: build(getattr(recipe, stream), None) for stream in ("k", "v")}

    def _tap(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor | None:
        codec = self._codecs.get(part)
        return None if codec is None else codec.decode(codec.encode(x, Site(0, layer, part)))

    def _asked(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> list:
        with installed(fused_projection(self.model, self._info, self._tap)):
            return super()._asked(prompts, sampling)


@chosen_by_vllm()
def started(info: ModelInfo, dtype: str, limit: int, cache_dtype: str) -> LLM:
    """An engine in this process; `ModelError` when it does not load the model."""
    if info.tensor_parallel != 1:  # the plugin knows one process
        raise CapabilityError(
            f"tensor_parallel of model {info.slug!r} is {info.tensor_parallel}; set it to 1, or choose --engine hf"
        )
    try:
        return LLM(
            model=str(info.path),
            trust_remote_code=False,
            dtype=dtype,
            kv_cache_dtype=cache_dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=limit,
            max_num_batched_tokens=max(limit, 2048),
            disable_log_stats=True,
            **({"gpu_memory_utilization": SHARE} if torch.cuda.is_available() else {}),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"vLLM cannot load {info.path}: {' '.join(str(error).split())[:300]}") from None


def held_dtype(layer) -> str:
    """What the tensors of a layer's cache hold."""
    if layer.kv_cache_dtype == AUTO:
        return str(layer.kv_cache.dtype).removeprefix("torch.")
    return layer.kv_cache_dtype


@contextmanager
def activated(recipe: Path) -> Iterator[None]:
    """The plugin's recipe, for the engines that are started inside a `with` block."""
    vllm_plugin.activate(recipe)
    try:
        yield
    finally:
        del os.environ[RECIPE_VARIABLE]


def scored(request: ScoreRequest, prompt_logprobs: list) -> ScoreResult:
    """What vLLM says of a continuation's tokens; a rank of 1 is the most likely one."""
    chosen = prompt_logprobs[len(request.context) :]
    found = [entry[token] for entry, token in zip(chosen, request.continuation, strict=True)]
    return ScoreResult([entry.logprob for entry in found], all(entry.rank == 1 for entry in found))


def written(output) -> WriteResult:
    """What vLLM wrote."""
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    return WriteResult(output.text, [entry[token].logprob for entry, token in chosen])


def sides(
    info: ModelInfo,
    dtype: str,
    limit: int,
    ends: frozenset[int],
    recipe: Path | None,
    codec: str | None,
    cache_dtype: str,
) -> Sides:
    """vLLM as it is, with a recipe or a cache dtype, and with the canaries where a codec sits.

    Raises
    ------
    CapabilityError
        The environment names a recipe, or vLLM's cache holds something else than it was told to.
    """
    if os.environ.get(RECIPE_VARIABLE):
        raise CapabilityError(f"{RECIPE_VARIABLE} is set, so the plain side would be coded too; unset it")
    plain = VLLMSide(info, dtype, limit, ends)
    if recipe is None:
        return Sides(plain, VLLMSide(info, dtype, limit, ends, cache_dtype), {})
    variant = CodedVLLMSide(info, dtype, limit, ends, recipe, codec)
    return Sides(plain, variant, {name: TappedVLLMSide(plain, canary) for name, canary in ONE_BIT.items()})


# What the plugin in vLLM counted, and what would show nothing of vLLM's own cache; vLLM itself is not loaded.


def coded(before: Status, now: Status, wanted: int, info: ModelInfo, itemsize: int) -> CacheUse:
    """What was coded from one answer of the plugin to another.

    Parameters
    ----------
    wanted : int
        Tokens that the requests in between put into the cache.
    itemsize : int
        Bytes of a value in layers that the recipe leaves alone.

    Returns
    -------
    Seen
        Bytes are those that the codecs wrote, and the engine's own of layers that they leave alone.

    Raises
    ------
    CodecNotActive
        There was no pass, a layer's codec did not run in every pass, or requests went past the codecs.
    """
    steps, tokens = now.steps - before.steps, now.tokens - before.tokens
    fires = [n - b for stream in now.fires for n, b in zip(now.fires[stream], before.fires[stream], strict=True)]
    if steps == 0 or any(count != steps for count in fires):
        raise CodecNotActive(f"vLLM made {steps} passes, in which the codecs of its layers fired {fires} times")
    if tokens < wanted:
        raise CodecNotActive(f"{tokens} tokens went through the codecs, and the requests had {wanted}")
    values = tokens * info.values_per_token
    alone = values * (info.n_layers - len(now.layers)) // info.n_layers
    held = sum(_bytes(now, stream, info) - _bytes(before, stream, info) for stream in now.fires)
    return CacheUse(sum(fires), steps * len(fires), round(held) + alone * itemsize, values)


def _bytes(status: Status, stream: str, info: ModelInfo) -> float:
    """Bytes that a stream's codecs have written so far."""
    values = status.tokens * info.n_kv_heads * info.head_dim * len(status.layers)
    return (status.bits_per_value[stream] or 0.0) * values / 8


def refuse_own_pass(kind: Kind, cache_dtype: str, accelerator: str) -> None:
    """`CapabilityError` for scoring a prompt over a cache of fewer bits on an accelerator.

    Whether attention reads back what the running pass has stored is there up to the attention backend, and a backend
    that rounds otherwise cannot be told from a cache that is read.
    """
    if kind == "score" and cache_dtype != AUTO:
        raise CapabilityError(
            f"with a cache of {cache_dtype} on {accelerator} a prompt may be scored from K and V that were never read"
            " from the cache; choose a task that generates its answers",
            code="capability.reads-nothing",
        )
