"""AQUA-KV: layers predicted from those below, the rest in Gaussian grids (Shutova et al. 2025, arXiv 2501.19392)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvlab.core.codec_settings import Ends, Plugin, Published, Values


class AquaKvStream(Ends):
    """AQUA-KV: layers predicted from those below, what is left in a Gaussian grid of words of `dim`; whole caches.

    `bits` is a multiple of 1 / `dim`, and takes one norm of 16 bits per token beside it. The first layer, which nothing
    predicts, has `first_bits` where these are more.
    """

    codec: Literal["aquakv"] = "aquakv"
    bits: float = Field(ge=1, le=4)
    first_bits: float = Field(default=4, ge=1, le=4)
    dim: Literal[2, 4] = 2

    @model_validator(mode="after")
    def _has_a_grid(self):
        for bits, dim in ((self.bits, self.dim), (self.first_bits, 2)):
            if bits * dim != int(bits * dim) or bits * dim > 8:
                most = f"{8 / dim:g}"
                raise ValueError(
                    f"bits {bits:g} have no grid of words of {dim}; allowed: multiples of {1 / dim:g} to {most}"
                )
        return self


def _paper(k: float, v: float, more: Values) -> Values:
    ends = {"sink": 4, "recent": 128} | more
    return {"k": AquaKvStream(bits=k, **ends), "v": AquaKvStream(bits=v, **ends)}


def _sink(k: float, v: float, more: Values) -> Values:
    return _paper(k, v, {"recent": 0} | more)


CODEC = Plugin(
    AquaKvStream,
    "kvlab.codecs.aquakv.codec:AquaKvCodec",
    lambda stream, which: ("whole",),
    scope="cache",
    as_published=True,
    published={
        "aquakv-paper": Published(
            _paper,
            "Shutova et al. 2025, arXiv 2501.19392 (settings: github.com/goodevening13/aquakv: HIGGS grids of pairs)",
            "K before its rotary embedding, predicted from the layer below's decoded K; V from that V and the layer's"
            " own decoded K; what is left with HIGGS: a norm per token, Walsh-Hadamard, words of 2 in Gaussian grids;"
            " first layer 4 bits; first 4 and last 128 tokens exact; a calibration for each width",
        ),
        "aquakv-sink4": Published(
            _sink,
            "the same as aquakv-paper",
            "as aquakv-paper, but the last tokens are coded as all others",
            "no exact last tokens: for comparing where a context is short, of which 128 are a large part",
        ),
    },
)
