"""Everything that an engine would not do right is refused before it runs (`EngineInfo.able` says what it can).

An engine that gets a setting silently wrong is worse than one that fails.
"""

from __future__ import annotations

from kvlab.core.engines import AUTO, Capability
from kvlab.core.errors import CapabilityError, UnknownName
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import ENGINES, RECIPE_VARIABLE

CODED = "coded"  # in place of a cache dtype: pages of coded bytes, by `kvlab.cache.pages`
FP8_STEP = 32  # of the head size, in the CPU kernel for an fp8 cache


def check(
    engine: str, dtype: str, attention: str, info: ModelInfo, on_cpu: bool = True, cache_dtype: str = AUTO
) -> None:
    """Refuse what `engine` would get wrong.

    Raises
    ------
    UnknownName
        The engine, dtype, attention or cache dtype is not in the table.
    CapabilityError
        The model's head size is not one the engine's kernels know, its heads do not divide by its parts, its layers
        differ in their windows where the engine knows one for all, or this processor cannot read such a cache.
    """
    able = _row(engine)
    _refuse_unlisted(f"{engine} dtype", dtype, able.dtypes)
    _refuse_unlisted(f"{engine} attention", attention, able.attentions)
    check_cache_dtype(engine, cache_dtype)
    if info.architecture in able.one_window and len(set(info.windows)) > 1:
        raise CapabilityError(
            f"{engine} runs {info.architecture} with a window in all layers or in none, and here"
            f" {sum(map(bool, info.windows))} of {info.n_layers} have one; set engines to hf alone",
            code="capability.mixed-windows",
        )
    if able.splits:
        _refuse_uneven(info)
    if on_cpu and able.cpu_head_dims is not None and info.head_dim not in able.cpu_head_dims:
        near = min(able.cpu_head_dims, key=lambda size: abs(size - info.head_dim))
        raise CapabilityError(
            f"{engine} cannot run head size {info.head_dim}; allowed: {', '.join(map(str, able.cpu_head_dims))}"
            f" (nearest: {near}); set engines to hf alone to measure this model",
            code="capability.head-size",
        )
    if on_cpu and cache_dtype != AUTO:
        _refuse_fp8(cache_dtype, info)


def check_pages(info: ModelInfo) -> None:
    """`CapabilityError` for a model that coded pages cannot serve: attention over them sees all tokens."""
    if any(info.windows):
        raise CapabilityError(
            f"pages of {info.slug} cannot be coded: {sum(map(bool, info.windows))} of {info.n_layers} layers see a"
            f" window of tokens, and attention over coded pages sees all; {RECIPE_VARIABLE} codes such a model",
            code="capability.window",
        )


def _refuse_uneven(info: ModelInfo) -> None:
    """Each process must hold whole KV heads, each of them once: vLLM would copy heads where there are too few."""
    ranks, heads = info.tensor_parallel, info.n_kv_heads
    if heads % ranks or info.n_heads % ranks:
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and info.n_heads % n == 0]
        raise CapabilityError(
            f"tensor_parallel of model {info.slug!r} is {ranks}, which does not divide its {heads} KV heads;"
            f" allowed: {', '.join(map(str, allowed))}",
            code="capability.split",
        )


def _refuse_fp8(cache_dtype: str, info: ModelInfo) -> None:
    """What vLLM's CPU kernel asks of an fp8 cache."""
    if info.head_dim % FP8_STEP:
        raise CapabilityError(
            f"vllm's {cache_dtype} cache cannot hold head size {info.head_dim} on a CPU; allowed: multiples of"
            f" {FP8_STEP}; leave it out of mechanisms.cache_dtypes"
        )
    import torch  # here alone, so that all else is refused before it is loaded

    processor = torch.backends.cpu.get_cpu_capability()
    if processor != "AVX512":
        raise CapabilityError(
            f"vllm's {cache_dtype} cache needs AVX-512, and this processor has {processor}; leave it out of"
            " mechanisms.cache_dtypes",
            code="capability.processor",
        )


def check_cache_dtype(engine: str, cache_dtype: str) -> None:
    """`UnknownName` for what the cache of `engine` cannot be told to store."""
    _refuse_unlisted(f"{engine} cache dtype", cache_dtype, _row(engine).cache_dtypes)


def check_protocol(engine: str, protocol: str) -> None:
    """`UnknownName` for a protocol that `engine` cannot run."""
    _refuse_unlisted(f"{engine} protocol", protocol, _row(engine).protocols)


def _row(engine: str) -> Capability:
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    return ENGINES[engine].able


def _refuse_unlisted(kind: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise UnknownName(kind, given, allowed)
