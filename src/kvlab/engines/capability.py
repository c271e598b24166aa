"""What each engine can do right; everything else is refused before it runs.

An engine that gets a setting silently wrong is worse than one that fails. The rows below were found by
running the engines: vLLM on CPU accepts many cache dtypes and then computes garbage with them, and its
CPU attention kernel knows a fixed list of head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.errors import CapabilityError, UnknownName
from kvlab.model import ModelInfo


@dataclass(frozen=True)
class Capability:
    """What an engine computes correctly; `cpu_head_dims` are those of its CPU kernel, None means any."""

    dtypes: tuple[str, ...]
    protocols: tuple[str, ...]
    attentions: tuple[str, ...]
    cpu_head_dims: tuple[int, ...] | None


CAPABILITIES = {
    "hf": Capability(
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
        attentions=("eager", "sdpa"),
        cpu_head_dims=None,
    ),
    # vllm/v1/attention/backends/cpu_attn.py, 0.32.0
    "vllm": Capability(
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
        attentions=("default",),
        cpu_head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    ),
}


def check(engine: str, dtype: str, attention: str, info: ModelInfo, on_cpu: bool = True) -> None:
    """Refuse what `engine` would get wrong.

    Raises
    ------
    UnknownName
        The engine, dtype or attention is not in the table.
    CapabilityError
        The model's head size is not one the engine's kernels know.
    """
    able = _row(engine)
    _refuse_unlisted(f"{engine} dtype", dtype, able.dtypes)
    _refuse_unlisted(f"{engine} attention", attention, able.attentions)
    if on_cpu and able.cpu_head_dims is not None and info.head_dim not in able.cpu_head_dims:
        near = min(able.cpu_head_dims, key=lambda size: abs(size - info.head_dim))
        raise CapabilityError(
            f"{engine} cannot run head size {info.head_dim}; allowed: {', '.join(map(str, able.cpu_head_dims))}"
            f" (nearest: {near}); set engines to hf alone to measure this model"
        )


def check_protocol(engine: str, protocol: str) -> None:
    """`UnknownName` for a protocol that `engine` cannot run."""
    _refuse_unlisted(f"{engine} protocol", protocol, _row(engine).protocols)


def _row(engine: str) -> Capability:
    if engine not in CAPABILITIES:
        raise UnknownName("engine", engine, CAPABILITIES)
    return CAPABILITIES[engine]


def _refuse_unlisted(kind: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise UnknownName(kind, given, allowed)
