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
    """What an engine computes correctly; `head_dims` None means any."""

    dtypes: tuple[str, ...]
    protocols: tuple[str, ...]
    attentions: tuple[str, ...]
    head_dims: tuple[int, ...] | None


CAPABILITIES = {
    "hf": Capability(
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
        attentions=("eager", "sdpa"),
        head_dims=None,
    ),
    # vllm/v1/attention/backends/cpu_attn.py, 0.32.0
    "vllm": Capability(
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
        attentions=("default",),
        head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    ),
}


def check(engine: str, dtype: str, attention: str, info: ModelInfo, protocol: str | None = None) -> None:
    """Refuse what `engine` would get wrong.

    Raises
    ------
    UnknownName
        The engine, dtype, protocol or attention is not in the table.
    CapabilityError
        The model's head size is not one the engine's kernels know.
    """
    if engine not in CAPABILITIES:
        raise UnknownName("engine", engine, CAPABILITIES)
    able = CAPABILITIES[engine]
    for kind, given, allowed in (
        ("dtype", dtype, able.dtypes),
        ("attention", attention, able.attentions),
        ("protocol", protocol, able.protocols),
    ):
        if given is not None and given not in allowed:
            raise UnknownName(f"{engine} {kind}", given, allowed)
    if able.head_dims is not None and info.head_dim not in able.head_dims:
        near = min(able.head_dims, key=lambda size: abs(size - info.head_dim))
        raise CapabilityError(
            f"{engine} cannot run head size {info.head_dim}; allowed: {', '.join(map(str, able.head_dims))}"
            f" (nearest: {near}); set engines to hf alone to measure this model"
        )
