"""vLLM's attention backend whose pages hold coded bytes; it takes the place of ``CPU_ATTN``.

vLLM's CPU platform answers `CPU_ATTN` whatever backend is asked for, so that is the name to register under. Each
layer's page is as large as its own tokens' bytes: vLLM keeps layers of one kind in one group also where their pages
differ, and divides its memory by the sum of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvlab.cache.pages.exact import attend_beside
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.step import ServerStep
from kvlab.core.errors import CapabilityError, CodecNotActive

SHARED = "_kvlab_step"  # where a step's tokens lie, noted on vLLM's own description of it: every layer asks


class PagesBackend(CPUAttentionBackend):
    """Pages ``[blocks, 1, block_size, bytes of a token]`` of uint8."""

    @staticmethod
    def get_impl_cls() -> type[PagesImpl]:
        """See vLLM."""
        return PagesImpl

    @staticmethod
    def get_builder_cls() -> type[PagesBuilder]:
        """See vLLM."""
        return PagesBuilder

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Pages are attended to causally alone."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """All tokens are attended to."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders alone."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec):
        """The spec itself, whose bytes `page_spec` has set: a class does not know which layer is asked about.

        Raises
        ------
        CodecNotActive
            They were not set: the model was loaded past the plugin.
        """
        if spec.state_content_bytes is None:
            raise CodecNotActive(
                "a layer of the model has no coded pages, so its cache would hold something else",
                code="not-active.no-pages",
            )
        return spec


def page_spec(spec, size: int):
    """vLLM's spec of a layer with pages of `size` bytes a token, all heads and both streams in one run."""
    return replace(spec, num_head_slots=1, state_content_bytes=size, dtype=torch.uint8)


class PagesBuilder(AttentionMetadataBuilder[ServerStep]):
    """Makes what each layer is handed of a step, once for all of them."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.impl: PagesImpl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> ServerStep:
        """See vLLM.

        Raises
        ------
        CapabilityError
            The step's attention is not causal.
        """
        common = common_attn_metadata
        found = getattr(common, SHARED, None)
        if found is None:
            if common.causal is not True:
                raise CapabilityError(
                    "attention over coded pages is causal, and vLLM asked for another", code="capability.causal"
                )
            sequences = common.num_reqs
            found = ServerStep.of(
                common.query_start_loc[: sequences + 1].tolist(),
                common.seq_lens[:sequences].tolist(),
                common.block_table_tensor,
                self.block_size,
            )
            if self.impl.pages is not None and (store := self.impl.pages.exact) is not None:
                found = store.beside(found, store.running()[:sequences])
            setattr(common, SHARED, found)
        return found


def without_padding(step: ServerStep, *parts: Tensor) -> tuple[Tensor, ...]:
    """The step's own tokens of tensors; to cut off nothing, layer by layer, would cost more than to ask."""
    return tuple(part if part.shape[0] == step.tokens else part[: step.tokens] for part in parts)


class PagesImpl(AttentionImpl):
    """Codes K and V into pages, and attends to what it reads from them.

    `pages` is set when the model has been loaded (`worker.arm`).
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes=None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"kv_cache_dtype {kv_cache_dtype!r}": kv_cache_dtype != "auto",
            "soft-capped logits": bool(logits_soft_cap),
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            "layers that share one cache": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
        }
        for what, found in refused.items():
            if found:
                raise CapabilityError(f"coded pages cannot serve a layer with {what}", code="capability.attention")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, -1
        self.pages: LayerPages | None = None

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Code the step's K and V [tokens, kv_heads, head_dim] and write them to their slots.

        What later steps read exact is kept now where every sequence has one query. Several of a sequence see tokens
        first of which theirs take the places.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM's warm-up; a step that gets here without one is found out by its count
            return
        step: ServerStep = metadata[layer.layer_name]
        pages = self._pages()
        key, value, slots = without_padding(step, key, value, slot_mapping)
        kept = (step.exact, pages.store) if step.exact and step.single else ()
        pages.write(key, value, kv_cache, slots, step.positions, *kept)

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ServerStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries [tokens, heads, head_dim] to their sequences' pages, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise CapabilityError("coded pages cannot give an output that is quantised", code="capability.quantised")
        if attn_metadata is None:  # vLLM's warm-up, which holds no one's tokens
            return output.zero_()
        pages, step = self._pages(), attn_metadata
        query, own = without_padding(step, query, output)
        store = pages.store if step.exact and step.single else None
        coded = pages.attend(kv_cache, query, step, self.scale, store)
        if step.exact:
            pages.read_exact += step.tokens
            if not step.single:
                own_kv = without_padding(step, key, value)
                attend_beside(coded, query, *own_kv, pages.store, step, self.scale)
        own.copy_(coded.mean)
        return output

    def _pages(self) -> LayerPages:
        if self.pages is None:
            raise CodecNotActive(
                "a layer was called before its pages were made ready; its cache would hold nothing",
                code="not-active.no-pages",
            )
        return self.pages
