"""What the plugin in vLLM counted, and what would show nothing of vLLM's own cache; vLLM itself is not loaded."""

from __future__ import annotations

from kvlab.base.errors import CapabilityError, CodecNotActive
from kvlab.base.model import ModelInfo
from kvlab.cache.vllm_plugin import Status
from kvlab.engines.capability import AUTO
from kvlab.evals.side import Kind, Seen


def coded(before: Status, now: Status, asked: int, info: ModelInfo, itemsize: int) -> Seen:
    """What was coded from one answer of the plugin to another.

    Parameters
    ----------
    asked : int
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
    if tokens < asked:
        raise CodecNotActive(f"{tokens} tokens went through the codecs, and the requests had {asked}")
    values = tokens * info.values_per_token
    alone = values * (info.n_layers - len(now.layers)) // info.n_layers
    held = sum(_bytes(now, stream, info) - _bytes(before, stream, info) for stream in now.fires)
    return Seen(sum(fires), steps * len(fires), round(held) + alone * itemsize, values)


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
            " from the cache; choose a task that generates its answers"
        )
