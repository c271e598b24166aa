"""The quantised types of llama.cpp's cache, to the byte: blocks of 32 values with a scale of 16 bits."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Conditioned, Plugin, Published, Values

Type = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
BITS = {"q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5}
WHOLE_HEAD = 65536  # a run that holds any head
LEAST_RUN = 64  # llama.cpp turns no head that runs of 64 coordinates do not fill


class GgmlStream(Conditioned):
    """A quantised type of ggml, as llama.cpp's cache holds it.

    `rotation` turns runs of so many neighbouring coordinates by the Walsh-Hadamard matrix first, the longest that
    are a power of two, fill the head and are no longer than this; 0 for none.
    """

    codec: Literal["ggml"] = "ggml"
    type: Type
    rotation: Literal[0, 64, 65536] = Field(default=0)


def _cache(type_: Type, turned: bool, k: None, v: None, more: Values) -> Values:
    run = {"k": WHOLE_HEAD, "v": LEAST_RUN} if turned else {"k": 0, "v": 0}
    return {"rotary": "after"} | {stream: GgmlStream(type=type_, rotation=run[stream], **more) for stream in ("k", "v")}


def _published(type_: Type, turned: bool) -> Published:
    turn = "K turned by Walsh-Hadamard over the head, V over runs of 64" if turned else "as it is, without a rotation"
    return Published(
        partial(_cache, type_, turned),
        "llama.cpp, October 2026: ggml's reference quantisation; its rotation of April 2026 (pull request 21038)",
        f"K after its rotary embedding and V, {turn}; {BITS[type_]:g} bits in blocks of 32",
        "llama.cpp's attention also rounds the queries to 8 bits when it multiplies them with such a K",
        in_pipeline=True,
        fixed=True,
    )


CODEC = Plugin(
    GgmlStream,
    "kvlab.codecs.ggml.codec:GgmlCodec",
    as_published=True,
    published={
        f"{type_}{'-rotated' if turned else ''}": _published(type_, turned)
        for type_ in BITS
        for turned in (False, True)
    },
)
