"""Coded pages where the model is: what is refused, each layer's pages, and the proof that they are what is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlab.cache.files.recipe import RecipeFile
from kvlab.cache.pages.exact import ExactStore, kept_exact
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import MeanByPosition, Rotation, Unturned, rotation_of
from kvlab.cache.pages.step import ServerStep
from kvlab.cache.pages.token_bytes import Rows, rows_of
from kvlab.cache.vllm import worker as vllm_worker
from kvlab.cache.vllm.settings import Rule, common, logger, own_dtype, refuse_settings
from kvlab.cache.vllm.worker import STREAMS, ReadyRecipe
from kvlab.calibration.needs import by_position
from kvlab.codecs.base import Site
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import PAGES_VARIABLE, Recipe
from kvlab.core.records import CANARY_MIN, TWO_PASSES
from kvlab.engines.capability import check_pages
from kvlab.engines.hooks import attention_layers
from kvlab.stats.divergences import token_record

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OURS = "CPU_ATTN"  # the name that the backend stands under


def read_recipe() -> RecipeFile:
    """The file that ``KVLAB_PAGES`` names; raises as `vllm.worker.read_recipe` and `kept_exact`."""
    found = vllm_worker.read_recipe(PAGES_VARIABLE)
    kept_exact(found.recipe, os.environ[PAGES_VARIABLE])
    return found


def own(config: VllmConfig) -> list[Rule]:
    """What coded pages need beside what every way of coding needs."""
    attention = config.attention_config
    forced = [attention.backend, *(attention.backend_per_kind or {}).values()]
    named = [backend if isinstance(backend, str) else backend.name for backend in forced if backend is not None]
    others = [name for name in named if name != OURS]
    device = config.device_config.device_type
    return [
        (
            device == "cpu",
            f"coded pages are served by a CPU backend, and this vLLM runs on {device}; on a GPU take kvlab.Cache in"
            " transformers",
        ),
        (not others, f"attention backend {others[0] if others else ''} was asked for; leave attention_backend out"),
        (
            not config.use_v2_model_runner,
            "coded pages were tested with vLLM's first model runner; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            config.parallel_config.decode_context_parallel_size == 1,
            "decode_context_parallel_size above 1 splits a sequence over processes; set it to 1",
        ),
    ]


def prepare(config: VllmConfig) -> ReadyRecipe:
    """Check everything that can be checked before a weight is loaded, and build the codecs.

    Raises
    ------
    CapabilityError
        vLLM's settings, or the model's attention, are not what coded pages can serve; the recipe leaves layers out,
        or its codec has no bytes of its own for each token.
    CalibrationMismatch
        The calibration is missing or another model's.
    """
    refuse_settings([*common(config), *own(config)], PAGES_VARIABLE)
    found = vllm_worker.made_ready(config, read_recipe(), by_position=True)
    info = found.info
    if len(found.layers) != info.n_layers:
        raise CapabilityError(
            f"{PAGES_VARIABLE} cannot be honoured: the recipe codes {len(found.layers)} of {info.n_layers} layers, and"
            " coded pages are those of all; leave `layers` out",
            code="capability.some-layers",
        )
    check_pages(info)
    if by_position(found.recipe) and (found.recipe.k.escape or found.recipe.v.escape):
        raise CapabilityError(
            f"{PAGES_VARIABLE} cannot be honoured: the recipe has rotary: after and escape: true, and pages are read"
            " without escapes there; give escape: false, as kvlab calibrate --rotary after does",
            code="capability.escapes-after-rope",
        )
    for stream in STREAMS:
        rows_of(found.codecs[stream], Site(0, 0, stream), info.n_kv_heads, info.head_dim)
    return found


class PagesWatch:
    """Every layer's pages, and what a step has to have done with them."""

    def __init__(self, served: ReadyRecipe, dtype: str):
        self.served, self.dtype, self.layers = served, dtype, []
        self.exact: ExactStore | None = None
        self.steps = self.tokens = 0
        self.canary, self.block_size, self.blocks = 0.0, 0, 0

    def check(self, tokens: int, coded: int | None = None) -> None:
        """After a step of so many tokens: `CodecNotActive` unless each layer coded all of them and read pages.

        That is at least the step's own tokens or, where some are read exact, the `coded` ones that it looks at; then
        each query has to have read exact tokens too.
        """
        least, exact = (tokens, 0) if coded is None else (coded, tokens)
        missed = [
            f"layer {pages.layer} ({pages.written} of {tokens} tokens written, {pages.read_back} read,"
            f" {pages.read_exact} of {exact} beside exact ones)"
            for pages in self.layers
            if pages.written != tokens or pages.read_back < least or pages.read_exact != exact
        ]
        self.forget()
        if missed:
            raise CodecNotActive(
                f"coded pages were not what this pass used: {'; '.join(missed)}", code="not-active.pass"
            )
        self.steps += 1
        self.tokens += tokens

    def forget(self) -> None:
        """Count from nothing."""
        for pages in self.layers:
            pages.forget()

    def report(self) -> dict[str, Any]:
        """The fields of `vllm_plugin.Status`, as types that any serialiser knows."""
        served, info = self.served, self.served.info
        values = info.n_kv_heads * info.head_dim * len(self.layers)
        taken = {stream: sum(getattr(pages, stream).bytes for pages in self.layers) for stream in STREAMS}
        return {
            "recipe_id": served.recipe.recipe_id,
            "model_hash": info.model_hash,
            "calibration_hash": served.calibration_hash,
            "layers": list(served.layers),
            "steps": self.steps,
            "tokens": self.tokens,
            "fires": {stream: [self.steps] * len(self.layers) for stream in STREAMS},
            "bits_per_value": {stream: 8 * taken[stream] / values for stream in STREAMS},
            "pages": {
                "bytes_per_token": sum(taken.values()),
                "plain_bytes_per_token": 2 * values * getattr(torch, self.dtype).itemsize,
                "block_size": self.block_size,
                "blocks": self.blocks,
                "canary_kl": self.canary,
                "sink": self.exact.sink if self.exact else 0,
                "recent": self.exact.recent if self.exact else 0,
                "exact_bytes": self.exact.bytes_per_request if self.exact else 0,
                "requests": self.exact.requests if self.exact else 0,
            },
        }


def arm(worker, served: ReadyRecipe) -> None:
    """Make a vLLM worker give its model coded pages once it is loaded, and check every step that it serves."""
    watch = PagesWatch(served, own_dtype(worker.vllm_config))
    load_model, execute_model = worker.load_model, worker.execute_model
    available_memory = worker.determine_available_memory

    def load_and_fill(*given, **named):
        """The worker's `load_model`, and then the layers' pages."""
        answer = load_model(*given, **named)
        watch.exact = exact_store(worker, watch.served)
        watch.layers = give_pages(worker.get_model(), watch.served, watch.exact)
        worker.kvlab_pages, worker.kvlab_status = watch, watch.report
        return answer

    def memory_left(*given, **named):
        """The worker's memory for pages, less what exact tokens take."""
        return left(available_memory(*given, **named), watch.exact)

    def execute_checked(scheduled, *given, **named):
        """The worker's `execute_model`, and then whether its tokens are in the pages."""
        tokens = scheduled.total_num_scheduled_tokens
        watch.forget()
        if watch.exact:
            watch.exact.follow(scheduled)
        answer = execute_model(scheduled, *given, **named)
        if tokens:
            watch.check(tokens, watch.exact.coded(scheduled) if watch.exact else None)
        return answer

    worker.load_model, worker.execute_model = load_and_fill, execute_checked
    worker.determine_available_memory = memory_left


def exact_store(worker, served: ReadyRecipe) -> ExactStore | None:
    """Where the recent tokens and sinks of a worker's requests are kept; None where the recipe keeps none."""
    kept, info, config = kept_exact(served.recipe, PAGES_VARIABLE), served.info, worker.vllm_config
    if not any(kept):
        return None
    store = ExactStore(
        *kept,
        config.scheduler_config.max_num_seqs,
        info.n_layers,
        info.n_kv_heads,
        info.head_dim,
        config.model_config.dtype,
    )
    store.running = lambda: worker.model_runner.input_batch.req_ids
    return store


def left(memory: int, exact: ExactStore | None) -> int:
    """Bytes for pages, of what vLLM has for its cache.

    Raises
    ------
    CapabilityError
        Exact tokens take all of it.
    """
    if exact is None:
        return memory
    if memory <= exact.nbytes:
        raise CapabilityError(
            f"exact tokens (sink {exact.sink}, recent {exact.recent}) take {exact.bytes_per_request} bytes a request,"
            f" {exact.nbytes} of max_num_seqs {exact.requests}, and vLLM's cache has {memory}: no page is left; give a"
            " smaller max_num_seqs (--max-num-seqs), or a larger cache (VLLM_CPU_KVCACHE_SPACE)",
            code="capability.no-memory-left",
        )
    return memory - exact.nbytes


def give_pages(model: torch.nn.Module, served: ReadyRecipe, exact: ExactStore | None = None) -> list[LayerPages]:
    """The pages of each layer of a loaded model, told to its attention.

    Raises
    ------
    CodecNotActive
        vLLM chose another attention backend.
    CapabilityError
        K cannot be turned back.
    """
    from kvlab.cache.pages.backend import PagesImpl, page_spec

    found, info, device = [], served.info, next(model.parameters()).device
    rotations: dict[nn.Module, Rotation] = {}
    for layer, attention in enumerate(attention_layers(model, info)):
        impl = attention.attn.impl
        if not isinstance(impl, PagesImpl):
            raise CodecNotActive(
                f"layer {layer} was loaded with {type(impl).__name__}, so its pages would not be coded;"
                f" {PAGES_VARIABLE} must be set before the model is loaded",
                code="not-active.no-pages",
            )
        rows = [
            rows_of(served.codecs[stream], Site(0, layer, stream), info.n_kv_heads, info.head_dim, device)
            for stream in STREAMS
        ]
        impl.pages = LayerPages(
            layer, *rows, turn_of(attention, served.recipe, info.head_dim, rows[0], rotations), exact
        )
        plain = attention.attn.get_kv_cache_spec
        attention.attn.get_kv_cache_spec = partial(_coded_spec, plain, page_spec, impl.pages.bytes)
        found.append(impl.pages)
    return found


def turn_of(
    attention: nn.Module, recipe: Recipe, head_dim: int, k: Rows, known: dict[nn.Module, Rotation]
) -> Rotation | MeanByPosition | Unturned:
    """What stands between K of a layer as attention sees it and as the recipe codes it; raises as `rotation_of`.

    `known` are rotations of other layers by their rotary modules, which layers share.
    """
    if recipe.rotary == "after" and not by_position(recipe):
        return Unturned()
    rotary = getattr(attention, "rotary_emb", None)
    if rotary not in known:
        known[rotary] = rotation_of(attention, head_dim)
    return MeanByPosition(known[rotary], k.plan.decoding.mean) if by_position(recipe) else known[rotary]


def _coded_spec(plain, page_spec, size: int, config: VllmConfig):
    """A layer's spec of vLLM, with coded pages."""
    return page_spec(plain(config), size)


def confirm(worker) -> None:
    """Once vLLM has its cache: are the pages those, is there one group of them, do the logits hang on them?

    Raises
    ------
    CapabilityError
        vLLM put the layers into several groups.
    CodecNotActive
        A layer's pages are of another size, or zeroing them did not move the logits.
    """
    watch, runner = worker.kvlab_pages, worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise CapabilityError(
            f"vLLM made {len(groups)} groups of KV caches of this model, and coded pages know one; this model cannot be"
            f" served with {PAGES_VARIABLE}",
            code="capability.cache-groups",
        )
    watch.blocks = runner.kv_cache_config.num_blocks
    watch.block_size = groups[0].kv_cache_spec.block_size
    attentions = [layer.attn for layer in attention_layers(worker.get_model(), watch.served.info)]
    for pages, attention in zip(watch.layers, attentions, strict=True):
        held, due = tuple(attention.kv_cache.shape), (watch.blocks, 1, watch.block_size, pages.bytes)
        if held != due or attention.kv_cache.element_size() != 1:
            raise CodecNotActive(
                f"layer {pages.layer}: vLLM's pages are {held}, coded ones are {due} bytes",
                code="not-active.page-shape",
            )
    watch.canary = canary_kl(runner, attentions, watch.block_size)
    watch.forget()
    _say(watch)


def _say(watch: PagesWatch) -> None:
    report, pages = watch.report(), watch.report()["pages"]
    logger().info(
        "kvlab: recipe %s; vLLM's pages hold the coded bytes of K (%s) and V (%s), %d bytes a token in all layers where"
        " %s takes %d: %d tokens. Zeroed pages moved the logits by KL %.2g.",
        report["recipe_id"],
        watch.served.recipe.k.codec,
        watch.served.recipe.v.codec,
        pages["bytes_per_token"],
        watch.dtype,
        pages["plain_bytes_per_token"],
        pages["blocks"] * pages["block_size"],
        pages["canary_kl"],
    )


# Do the logits hang on the coded pages? A trial text is served twice from them, and once after they were zeroed.

TOKENS = 24
SHARE = 0.01  # of what zeroed pages move


@torch.inference_mode()
def canary_kl(runner, attentions: Sequence[nn.Module], block_size: int) -> float:
    """Nats that zeroed pages move the distribution after a trial text by.

    The text is computed in one pass, then its last token alone over the pages that the pass wrote, then the same once
    more over zeros. Its block is the last one, which is left zero.

    Parameters
    ----------
    runner
        vLLM's model runner, its cache allocated.
    attentions : sequence of Module
        The layers' attention modules.
    block_size : int
        Tokens of a block.

    Raises
    ------
    CodecNotActive
        A token over the pages does not say what it says in one pass, or zeros make no difference.
    """
    config = runner.vllm_config
    tokens = min(TOKENS, block_size, config.model_config.max_model_len - 1)
    trial = PageTrial(runner, [attention.layer_name for attention in attentions], block_size, tokens)
    whole, over = trial.last_logits(0), trial.last_logits(tokens - 1)
    for attention in attentions:
        attention.kv_cache[trial.block, :, : tokens - 1] = 0
    zeroed = trial.last_logits(tokens - 1)
    for attention in attentions:
        attention.kv_cache[trial.block] = 0
    apart, moved = kl(whole, over), kl(whole, zeroed)
    # what a rounding does to a code is more than the dtype's own, and far less than pages that are not those
    allowed = max(TWO_PASSES[str(config.model_config.dtype).removeprefix("torch.")], SHARE * moved)
    if not apart <= allowed:
        raise CodecNotActive(
            f"a token over coded pages differs by KL {apart:.1e} nats from one pass; allowed: {allowed:.0e}, rounding",
            code="not-active.canary-differs",
        )
    if not moved >= CANARY_MIN:
        raise CodecNotActive(
            f"zeroed pages move the logits by KL {moved:.1e} nats only; they are not what is read",
            code="not-active.canary-unread",
        )
    return moved


class PageTrial:
    """A text of `tokens` tokens whose pages are the cache's last block."""

    def __init__(self, runner, layers: list[str], block_size: int, tokens: int):
        self.runner, self.layers, self.tokens = runner, layers, tokens
        self.block = runner.kv_cache_config.num_blocks - 1
        # of the dtype that the runner feeds: a compiled model takes its inputs without asking what they are
        ids = torch.arange(tokens) * 7919 % runner.model_config.get_vocab_size()
        self.ids = ids.to(runner.input_ids.gpu.dtype)
        self.block_size = block_size

    def last_logits(self, first: int) -> Tensor:
        """The model's logits [1, vocabulary] after the text, of which tokens from `first` on are computed."""
        from vllm.forward_context import set_forward_context

        step = ServerStep.of([0, self.tokens - first], [self.tokens], torch.tensor([[self.block]]), self.block_size)
        with set_forward_context(
            dict.fromkeys(self.layers, step),
            self.runner.vllm_config,
            num_tokens=step.tokens,
            slot_mapping=dict.fromkeys(self.layers, step.own_slots()),
        ):
            hidden = self.runner.model(
                input_ids=self.ids[first:].clone(),
                positions=step.positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return self.runner.model.compute_logits(hidden[-1:])


def kl(reference: Tensor, other: Tensor) -> float:
    """Between the distributions of two rows of logits, nats."""
    label = torch.zeros(1, dtype=torch.int64)
    return token_record(reference, other, label)["kl"].item()
