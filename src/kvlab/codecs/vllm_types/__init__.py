"""The quantised types of vLLM's cache, by the names that its ``--kv-cache-dtype`` takes; and SGLang's of 4 bits."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvlab.core.codec_settings import Conditioned, Plugin, Published, Values

Format = Literal[
    *("fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4"),
    *("lloyd_max_4", "lloyd_max_3", "even_4", "even_3", "ultraquant_k", "ultraquant_v"),  # K and V apart
    "fp4_e2m1",  # SGLang's
]


class VllmStream(Conditioned):
    """A quantised type as vLLM's cache holds it, or, ``fp4_e2m1``, as SGLang's does.

    `scale` of ``fp8_e4m3`` and ``fp8_e5m2``: ``one``, which vLLM takes where a checkpoint names none, or the largest
    magnitude of a ``tensor`` (of all heads of a block) over that of the type, as one that was calibrated on this very
    text would have it. `rounding` of the two is to the nearest, as on GPUs, or towards zero, as vLLM's kernel for CPUs
    has it. `dtype` is the model's: K and V come rounded to it.
    """

    codec: Literal["vllm_types"] = "vllm_types"
    format: Format
    scale: Literal["one", "tensor"] = "one"
    rounding: Literal["nearest", "zero"] = "nearest"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


PER_TOKEN = "a scale in float32 per token and head"
NAMES: dict[str, tuple[Values, Values, str]] = {
    **{
        f"fp8_{kind}{ending}": ({"format": f"fp8_{kind}"} | more, {"format": f"fp8_{kind}"} | more, settings)
        for kind in ("e4m3", "e5m2")
        for ending, more, settings in (
            ("", {}, "scale 1"),
            ("-scaled", {"scale": "tensor"}, "a scale for every 512 tokens of a layer, from their largest magnitude"),
            ("-cpu", {"rounding": "zero"}, "scale 1, rounded towards zero, as vLLM does on CPUs"),
        )
    },
    **{
        name: ({"format": name}, {"format": name}, settings)
        for name, settings in (
            ("fp8_per_token_head", PER_TOKEN),
            ("int8_per_token_head", PER_TOKEN),
            ("int4_per_token_head", "signs and Walsh-Hadamard, then an even grid per token and head"),
            ("nvfp4", "4-bit floats with a scale in e4m3 per 16 channels"),
        )
    },
    "turboquant_k8v4": ({"format": "fp8_e4m3"}, {"format": "even_4"}, "K in e4m3 of scale 1; V on an even grid"),
    **{
        name: ({"format": f"lloyd_max_{k}"}, {"format": f"even_{v}"}, f"K by TurboQuant of {k} bits; V on an even grid")
        for name, k, v in (("turboquant_4bit_nc", 4, 4), ("turboquant_k3v4_nc", 3, 4), ("turboquant_3bit_nc", 3, 3))
    },
    "ultraquant_4bit": (
        {"format": "ultraquant_k"},
        {"format": "ultraquant_v"},
        "K turned by Walsh-Hadamard; 4-bit floats with a power of two per 32 channels",
    ),
    "fp4_e2m1": (
        {"format": "fp4_e2m1"},
        {"format": "fp4_e2m1"},
        "4-bit floats with a power of two per 16 channels",
    ),
}
"""K, V and what they are for people, by the name of the whole."""


def _cache(name: str, k: None, v: None, more: Values) -> Values:
    of_k, of_v, _ = NAMES[name]
    return {"k": VllmStream(**(of_k | more)), "v": VllmStream(**(of_v | more)), "rotary": "after"}


CODEC = Plugin(
    VllmStream,
    "kvlab.codecs.vllm_types.codec:VllmCodec",
    as_published=True,
    published={
        name: Published(
            partial(_cache, name),
            f"{'SGLang' if name == 'fp4_e2m1' else 'vLLM 0.32'}, --kv-cache-dtype {name.partition('-')[0]}",
            f"K after its rotary embedding and V: {settings}",
            "vLLM leaves the first two and the last two layers uncoded; a recipe codes every layer"
            if name.startswith("turboquant")
            else "",
            in_pipeline=True,
            fixed=True,
        )
        for name, (_, _, settings) in NAMES.items()
    },
)
