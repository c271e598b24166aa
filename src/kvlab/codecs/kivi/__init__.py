"""KIVI: asymmetric integers, K per channel and V per token (Liu et al. 2024, arXiv 2402.02750)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Conditioned, Plugin, Published, Values


class KiviStream(Conditioned):
    """KIVI: asymmetric integers, K in groups of `group` tokens per channel, V per token."""

    codec: Literal["kivi"] = "kivi"
    bits: Bits
    axis: Literal["channel", "token"]
    group: int = Field(default=64, ge=2, le=65536)


def _own(bits: float | None, v_bits: float | None) -> tuple[Values, Values]:
    """K and V are grouped along other axes."""
    return {"axis": "channel"}, {"axis": "token"}


def _paper(k: int, v: int, more: Values) -> Values:
    residual = 128
    keys = {"axis": "channel", "group": 32, "block_size": residual, "ragged": "exact"}
    values = {"axis": "token", "group": 32, "recent": residual}
    return {"k": KiviStream(bits=k, **(keys | more)), "v": KiviStream(bits=v, **(values | more)), "rotary": "after"}


def _flat(k: int, v: int, more: Values) -> Values:
    group = {"group": 32} | more
    return {"k": KiviStream(bits=k, axis="channel", **group), "v": KiviStream(bits=v, axis="token", **group)}


CODEC = Plugin(
    KiviStream,
    "kvlab.codecs.kivi.codec:KiviCodec",
    own=_own,
    published={
        "kivi-paper": Published(
            _paper,
            "Liu et al. 2024, arXiv 2402.02750 (settings: its experiments, group 32 and residual length 128)",
            "K after its rotary embedding, per channel over 32 tokens; V per token over 32 channels; the last 128"
            " tokens of V exact, and of K those that fill no run of 128",
            in_pipeline=True,
        ),
        "kivi-g32": Published(
            _flat,
            "the same, without its exact tokens",
            "K before its rotary embedding, per channel over 32 tokens; V per token over 32 channels; every token"
            " coded",
            "no exact tokens: for comparing at equal bits where a context is short",
            in_pipeline=True,
        ),
    },
)
