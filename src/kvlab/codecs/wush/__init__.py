"""WUSH-KV: the transform that balances what varies and what weighs, in closed form (Chen et al. 2026)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Ends, Plugin, Published, Values


class WushStream(Ends):
    """WUSH: a head turned and stretched so that all coordinates vary and weigh alike, then even levels per token.

    `center` subtracts the calibrated mean of each head first, which the published codec does not.
    """

    codec: Literal["wush"] = "wush"
    bits: Bits
    center: bool = False
    block_size: int = Field(default=512, ge=1, le=65536)


def _flat(k: int, v: int, more: Values) -> Values:
    return {"k": WushStream(bits=k, **more), "v": WushStream(bits=v, **more)}


CODEC = Plugin(
    WushStream,
    "kvlab.codecs.wush.codec:WushCodec",
    ("components",),
    as_published=True,
    published={
        "wush": Published(
            _flat,
            "Chen et al. 2026, WUSH-KV, with its quantiser QuEST INT (transform: Chen et al. 2025, arXiv 2512.00956)",
            "K before its rotary embedding, V; even levels per token and head; every token coded",
            "the paper turns K after its rotary embedding, weighs it by Sigma_q as it is there, and keeps its first and"
            " last tokens exact",
            in_pipeline=True,
        ),
    },
)
