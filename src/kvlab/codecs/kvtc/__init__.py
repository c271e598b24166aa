"""KVTC: PCA over the heads of all layers, widths by dynamic programming, DEFLATE (arXiv 2511.01815)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Ends, Plugin, Published, Values


class KvtcStream(Ends):
    """KVTC: PCA over the heads of all layers, widths by dynamic programming, DEFLATE of the codes; whole caches.

    `bits` are those of a coded value before DEFLATE; `block_size` tokens are deflated together.
    """

    codec: Literal["kvtc"] = "kvtc"
    bits: float = Field(gt=0, le=8)
    block_size: int = Field(default=4096, ge=1, le=65536)


def _paper(k: float, v: float, more: Values) -> Values:
    ends = {"sink": 4, "recent": 128} | more
    return {"k": KvtcStream(bits=k, **ends), "v": KvtcStream(bits=v, **ends)}


def _sink(k: float, v: float, more: Values) -> Values:
    return _paper(k, v, {"recent": 0} | more)


CODEC = Plugin(
    KvtcStream,
    "kvlab.codecs.kvtc.codec:KvtcCodec",
    lambda stream, which: ("whole",),
    scope="cache",
    as_published=True,
    published={
        "kvtc-paper": Published(
            _paper,
            "arXiv 2511.01815",
            "K before its rotary embedding; PCA over the heads of all layers; groups of 1 to 1024 components of 0, 2, 4"
            " or 8 bits by dynamic programming; DEFLATE; first 4 and last 128 tokens exact",
            "8 bits are even steps and not fp8",
        ),
        "kvtc-sink4": Published(
            _sink,
            "the same as kvtc-paper",
            "as kvtc-paper, but the last tokens are coded as all others",
            "no exact last tokens: for comparing where a context is short, of which 128 are a large part",
        ),
    },
)
