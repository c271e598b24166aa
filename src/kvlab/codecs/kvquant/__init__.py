"""KVQuant: a table of any shape per layer, outliers apart (Hooper et al. 2024, arXiv 2401.18079)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvlab.core.codec_settings import Ends, Plugin, Published, Values


class KvQuantStream(Ends):
    """KVQuant: a table of any shape per layer, K scaled per channel and V per token, 1 % outliers stored apart."""

    codec: Literal["kvquant"] = "kvquant"
    bits: Annotated[int, Field(ge=1, le=6)]
    axis: Literal["channel", "token"]
    block_size: int = Field(default=512, ge=1, le=65536)


def _paper(k: int, v: int, more: Values) -> Values:
    ends = {"sink": 1} | more
    return {"k": KvQuantStream(bits=k, axis="channel", **ends), "v": KvQuantStream(bits=v, axis="token", **ends)}


CODEC = Plugin(
    KvQuantStream,
    "kvlab.codecs.kvquant.codec:KvQuantCodec",
    lambda stream, which: ("own",),
    as_published=True,
    published={
        "kvquant-paper": Published(
            _paper,
            "Hooper et al. 2024, arXiv 2401.18079 (nuqN-1%)",
            "K before its rotary embedding, calibrated range per channel; V range per token; a table per layer; 1 %"
            " outliers apart; first token exact",
            "tables weigh every value alike, not by Fisher information",
        ),
    },
)
