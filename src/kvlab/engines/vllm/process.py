"""What one process holds of a model in vLLM: an engine in this process, so that hooks reach the live model.

The environment variables must be set before the first import of vllm. A pass must not reuse or split what
the hooks should see whole: prefix caching is switched off, and the token budget of a step holds a window.

Of a split model (vLLM's tensor parallelism) each process is a whole engine that holds some heads of every layer.
The tap is on rank 0 alone and sees all heads, so a codec that shares something between heads is as exact as in one
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # hooks reach only a model in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner computes prompt logits in pieces
}
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
SETTINGS = {
    CACHE_SPACE: "1",  # GiB, of engines that are not told how much they need, as those of `kvlab eval`
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `jobs.threads` decides; bound threads of two jobs share a core
}
BLOCK = 256  # tokens, at least as many as vLLM's backends put into a block
os.environ.update(REQUIRED)
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from kvlab.core.engines import AUTO  # noqa: E402
from kvlab.core.errors import CapabilityError, CodecNotActive, ModelError  # noqa: E402
from kvlab.core.model import ModelInfo  # noqa: E402
from kvlab.core.recipe import Placement  # noqa: E402
from kvlab.core.testimony import Pool, Proof  # noqa: E402
from kvlab.engines.base import (  # noqa: E402
    ContextCache,
    Part,
    Reading,
    Storage,
    Tap,
    context_of,
    proof_of,
    refuse_broken_weights,
)
from kvlab.engines.capability import CODED  # noqa: E402
from kvlab.engines.hooks import attention_inputs, attention_layers, fused_projection, installed  # noqa: E402
from kvlab.engines.products import chosen_by_vllm  # noqa: E402
from kvlab.engines.vllm import prefix, reading  # noqa: E402


class Loaded:
    """What one process holds: an engine of vLLM and its live model, which is all of it or a part of a split one.

    A cache of `CODED` is what the plugin makes of vLLM's own, where ``KVLAB_PAGES`` is set.
    """

    def __init__(self, info: ModelInfo, dtype: str, max_tokens: int, cache_dtype: str, rank: type | None = None):
        share = 0.5 if cache_dtype == AUTO else 0.2  # of a GPU: one of another cache stands beside the plain one
        self._asked = {AUTO: dtype, CODED: "uint8"}.get(cache_dtype, cache_dtype)
        self._part, self._bytes = own_part(info), cache_bytes(own_part(info), dtype, max_tokens)
        # a split model has scheduler and layers in several processes, where a context cannot be handed over; and what
        # is handed over would not be coded
        self.takes_prefixes = info.tensor_parallel == 1 and cache_dtype != CODED
        try:
            # on a CPU vLLM prefers the variable to what the engine is told
            with without(CACHE_SPACE), chosen_by_vllm():
                self.llm = LLM(
                    model=str(info.path),
                    trust_remote_code=False,
                    dtype=dtype,
                    kv_cache_dtype=AUTO if cache_dtype == CODED else cache_dtype,
                    enforce_eager=True,
                    enable_prefix_caching=False,
                    max_model_len=max_tokens + 1,
                    max_num_batched_tokens=max(max_tokens + 1, 2048),
                    max_num_seqs=1,
                    kv_cache_memory_bytes=self._bytes,
                    disable_log_stats=True,
                    skip_tokenizer_init=True,
                    **({"gpu_memory_utilization": share} if torch.cuda.is_available() else {}),
                    tensor_parallel_size=info.tensor_parallel,
                    distributed_executor_backend=rank,
                    **({"kv_transfer_config": prefix.CONFIG} if self.takes_prefixes else {}),
                )
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"vLLM cannot load {info.path}: {' '.join(str(error).split())[:300]}") from None
        self.model = self.llm.apply_model(lambda model: model)[0]
        refuse_broken_weights(self.model, info)
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], first: int, tap: Tap | None, placement: Placement) -> torch.Tensor | None:
        """Logits of one prompt from position `first` on, with the tap at its place; None beside rank 0."""
        after_rope = placement == "post_rope"
        find_places = attention_inputs if after_rope else fused_projection
        places = find_places(self.model, self._part, tap) if tap else []
        with installed(places, before=after_rope):
            return self._scored(ids, first, computed=len(ids))

    @torch.inference_mode()
    def logits_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement) -> torch.Tensor:
        """Logits of the tokens after a given K and V, which the prompt starts from."""
        layers, context = attention_layers(self.model, self._part), context_of(cache)
        if placement == "pre_rope":
            cache = {key: self._turned(layers[key[0]], x) if key[1] == "k" else x for key, x in cache.items()}
        with prefix.filled(cache, [layer.attn for layer in layers]):
            return self._scored(ids, context, computed=len(ids) - context)

    def _scored(self, ids: Sequence[int], first: int, computed: int) -> torch.Tensor | None:
        """The model's logits of a prompt's last rows; `CodecNotActive` unless one step computed `computed` tokens."""
        # vLLM gives away no full-vocabulary logits of a prompt: they are made as it would make them, by the model's
        # own head from what the model returns, of the rows that are asked for alone
        rows = slice(first - len(ids), -1)
        found = []

        def head(_model, _inputs, hidden: torch.Tensor) -> None:
            if len(hidden) == computed:
                found.append(self.model.compute_logits(hidden[rows]))

        with installed([(self.model, head)]):
            self.llm.generate({"prompt_token_ids": list(ids)}, self._sampling, use_tqdm=False)
        if len(found) != 1:
            raise CodecNotActive(
                f"vLLM did not compute {computed} tokens of a prompt in one step: nothing measured",
                code="not-active.several-steps",
            )
        return found[0]

    def _turned(self, attention: torch.nn.Module, k: torch.Tensor) -> torch.Tensor:
        """K [heads, tokens, head_dim] after the layer's own rotary embedding, at positions from 0 on."""
        heads, tokens, dim = k.shape
        flat = k.transpose(0, 1).reshape(tokens, heads * dim).clone()  # vLLM's embedding writes over what it is given
        turned = attention.rotary_emb(torch.arange(tokens, device=k.device), torch.empty_like(flat), flat)[1]
        return turned.view(tokens, heads, dim).transpose(0, 1)

    def proof(self) -> Proof:
        """See `Engine.proof`."""
        backend = attention_layers(self.model, self._part)[0].attn.impl
        return proof_of(self.model, type(backend), self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    def reading(self) -> AbstractContextManager[Reading | None]:
        """See `Engine.reading`."""
        return reading.reading([layer.attn for layer in attention_layers(self.model, self._part)])

    def storage(self) -> Storage:
        """What the cache's tensors hold.

        Raises
        ------
        CapabilityError
            vLLM stores something else than it was asked for.
        """
        layer = attention_layers(self.model, self._part)[0].attn
        held, own = layer.kv_cache, layer.kv_cache_dtype == AUTO
        found = str(held.dtype).removeprefix("torch.") if own else layer.kv_cache_dtype
        native = own and self._asked != "uint8"
        if found != self._asked or (held.element_size() > 1) != native:
            raise CapabilityError(
                f"vLLM was asked for a cache of {self._asked} and holds {found} in {held.element_size()} bytes a value",
                code="capability.cache-dtype",
            )
        return Storage(found, type(layer.impl).__name__.removesuffix("Impl"), held.element_size())

    def pool(self) -> Pool:
        """The cache as vLLM counts it: the pages of its layers' specs, and how many of them it made.

        Raises
        ------
        CapabilityError
            Layers have blocks of different lengths, or their tensors are not as large as vLLM's pages.
        """
        config = self.llm.llm_engine.vllm_config
        layers = [layer.attn for layer in attention_layers(self.model, self._part)]
        specs, blocks = [layer.get_kv_cache_spec(config) for layer in layers], config.cache_config.num_gpu_blocks
        tokens = {spec.block_size for spec in specs}
        for layer, spec in zip(layers, specs, strict=True):
            if layer.kv_cache.nbytes != blocks * spec.page_size_bytes or len(tokens) != 1:
                raise CapabilityError(
                    f"vLLM counts {blocks} pages of {spec.page_size_bytes} bytes and {sorted(tokens)} tokens a layer,"
                    f" and holds {layer.kv_cache.nbytes} bytes"
                )
        return Pool(
            block_tokens=specs[0].block_size,
            block_bytes=sum(spec.page_size_bytes for spec in specs),
            block_values=specs[0].block_size * self._part.values_per_token,
            cache_blocks=blocks,
            cache_memory_bytes=self._bytes,
        )

    def close(self) -> None:
        """Shut the engine core down."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def without(variable: str) -> Iterator[None]:
    """The environment without a variable."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def cache_bytes(part: ModelInfo, dtype: str, max_tokens: int) -> int:
    """Memory for the KV cache of one window with room to spare: left to itself vLLM fills a GiB or more with zeros."""
    spare = 4  # times what the tokens take: blocks that are begun, those that vLLM keeps for itself, padded heads
    return spare * (max_tokens + BLOCK) * part.values_per_token * getattr(torch, dtype).itemsize


def own_part(info: ModelInfo) -> ModelInfo:
    """The model as one process holds it: its share of the heads."""
    ranks = info.tensor_parallel
    return replace(info, n_heads=info.n_heads // ranks, n_kv_heads=info.n_kv_heads // ranks)


def executor(rank: int, meeting: str) -> type:
    """vLLM's executor of one process of a split model; they find each other in the file `meeting`.

    vLLM's own way is a port in the environment. It names their shared memory then alike in every run, so that two
    runs meet in it, and a run that was killed leaves what stops the next.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Rank(ExecutorWithExternalLauncher):
        """See `executor`."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{meeting}", rank, rank

    return Rank


class WholeTap:
    """Shows rank 0's tap the heads of all processes, and gives each process its part of the answer."""

    def __init__(self, tap: Tap | None):
        from vllm.distributed.parallel_state import get_tp_group

        self._tap, self._group = tap, get_tp_group()

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """See `Tap`; every process calls it at the same place."""
        whole = self._group.all_gather(x.contiguous(), dim=0)
        answer = self._tap(layer, part, whole) if self._tap else None
        answered = self._group.broadcast(x.new_tensor([answer is not None]))
        if not answered:
            return None
        whole = whole if answer is None else answer.to(x.dtype).contiguous()
        return self._group.broadcast(whole).chunk(self._group.world_size)[self._group.rank_in_group]
