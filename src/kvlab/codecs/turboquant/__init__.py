"""TurboQuant as vLLM runs it (Zandieh et al. 2025, arXiv 2504.19874)."""

from __future__ import annotations

from typing import Literal

from kvlab.codecs.int import IntStream
from kvlab.core.codec_settings import Bits, Conditioned, Plugin, Published, Values


class TurboQuantStream(Conditioned):
    """TurboQuant as vLLM runs it on K: norm, Hadamard, Lloyd-Max table, `norm_correction` when it is read back."""

    codec: Literal["turboquant"] = "turboquant"
    bits: Bits
    norm_correction: bool = True


WHOLE_HEAD = 65536  # a group that holds any head


def _vllm(k: int, v: int, more: Values) -> Values:
    keys, values = {"norm_correction": True} | more, {name: x for name, x in more.items() if name != "norm_correction"}
    values = {"group": WHOLE_HEAD} | values
    return {"k": TurboQuantStream(bits=k, **keys), "v": IntStream(bits=v, **values), "rotary": "after"}


CODEC = Plugin(
    TurboQuantStream,
    "kvlab.codecs.turboquant.codec:TurboQuantCodec",
    as_published=True,
    published={
        "turboquant-vllm": Published(
            _vllm,
            "Zandieh et al. 2025, arXiv 2504.19874, as vLLM 0.32 sets its presets turboquant_4bit_nc, _k3v4_nc,"
            " _3bit_nc",
            "K after its rotary embedding: norm, Walsh-Hadamard without signs, Lloyd-Max, norm correction; V: even grid"
            " per token and head",
            "vLLM leaves the first two and the last two layers uncoded; a recipe codes every layer",
            in_pipeline=True,
        ),
    },
)
