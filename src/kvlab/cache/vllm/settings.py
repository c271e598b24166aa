"""vLLM's settings as the plugin sees them: which are refused, and how large a cache is where nobody said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvlab.core.errors import CapabilityError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARE = 0.25  # of the free memory, for a cache that was given no size
Rule = tuple[bool, str]
"""Whether a setting is allowed, and what is said where it is not."""


def compiled(config: VllmConfig) -> list[Rule]:
    """What a plugin that hangs on a model's hooks needs."""
    return [
        (
            config.model_config.enforce_eager,
            "compiled models drop hooks without a word; set enforce_eager=True (--enforce-eager)",
        )
    ]


def common(config: VllmConfig) -> list[Rule]:
    """What every way of coding vLLM's cache needs."""
    parallel, cache = config.parallel_config, config.cache_config
    ranks = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    split = [name for name in ranks if getattr(parallel, name) != 1]
    return [
        (not split, f"{', '.join(split)} above 1 splits the model over processes; set it to 1"),
        (config.speculative_config is None, "a draft model's cache would not be coded; leave speculation out"),
        (config.lora_config is None, "adapters change the projections that the recipe is for; leave LoRA out"),
        (
            config.kv_transfer_config is None and cache.kv_offloading_size is None,
            "a KV connector or offloading brings K and V from elsewhere, coded or not; leave kv_transfer_config and"
            " kv_offloading_size out",
        ),
        (
            cache.cache_dtype in ("auto", own_dtype(config)),
            f"kv_cache_dtype {cache.cache_dtype!r} codes the cache a second time; set it to 'auto'",
        ),
    ]


def own_dtype(config: VllmConfig) -> str:
    """The dtype that the model computes in."""
    return str(config.model_config.dtype).removeprefix("torch.")


def refuse_settings(rules: Iterable[Rule], variable: str) -> None:
    """`CapabilityError` names the first of vLLM's settings under which the cache would not be what was asked for."""
    for allowed, reason in rules:
        if not allowed:
            raise CapabilityError(
                f"{variable} cannot be honoured: {reason}, or unset {variable}", code="capability.vllm-setting"
            )


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
    logger().warning(
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


def logger():
    """vLLM's own, so that its settings rule what is said."""
    from vllm.logger import init_logger

    return init_logger("vllm.kvlab")
