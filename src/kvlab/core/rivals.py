"""The codecs of other people as they published them: every setting, and where it is from. Torch-free.

`kivi`, `oscar` and the others of the ladder are brought to one form (K before its rotary embedding, every token coded,
groups of 64), so that what differs is the codec; here each is at its own settings instead, exact tokens and all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlab.core.errors import ParamsError
from kvlab.core.recipe import (
    AquaKvStream,
    IntStream,
    KiviStream,
    KvQuantStream,
    KvtcStream,
    OscarStream,
    Recipe,
    TurboQuantStream,
)

WHOLE_HEAD = 65536  # a group that holds any head
CLIPPED = 4  # bits from which OSCAR's clipping, published for 2, costs more than it gains


@dataclass(frozen=True)
class Rival:
    """A codec as published.

    Parameters
    ----------
    make : callable
        (bits of K, bits of V, further settings of both streams) -> `Recipe`.
    source : str
        Where method and settings are from.
    settings : str
        The settings, for people.
    lacks : str
        What of the publication is not here; empty for nothing.
    """

    make: Callable[[float, float, dict[str, Any]], Recipe]
    source: str
    settings: str
    lacks: str = ""


def _kivi(k: int, v: int, more: dict[str, Any]) -> Recipe:
    residual = 128
    keys = {"axis": "channel", "group": 32, "block_size": residual, "ragged": "exact"}
    values = {"axis": "token", "group": 32, "recent": residual}
    return Recipe(k=KiviStream(bits=k, **(keys | more)), v=KiviStream(bits=v, **(values | more)), rotary="after")


def _turboquant(k: int, v: int, more: dict[str, Any]) -> Recipe:
    keys, values = {"norm_correction": True} | more, {name: x for name, x in more.items() if name != "norm_correction"}
    values = {"group": WHOLE_HEAD} | values
    return Recipe(k=TurboQuantStream(bits=k, **keys), v=IntStream(bits=v, **values), rotary="after")


def _oscar(k: int, v: int, more: dict[str, Any]) -> Recipe:
    ends = {"group": 128, "sink": 64, "recent": 256}
    clips = [{"clip": ratio if bits < CLIPPED else 1.0} for ratio, bits in ((0.96, k), (0.92, v))]
    keys, values = (ends | clip | more for clip in clips)
    values = {"follow": "outputs"} | values
    return Recipe(k=OscarStream(bits=k, **keys), v=OscarStream(bits=v, **values), rotary="after")


def _kvquant(k: int, v: int, more: dict[str, Any]) -> Recipe:
    ends = {"sink": 1} | more
    return Recipe(k=KvQuantStream(bits=k, axis="channel", **ends), v=KvQuantStream(bits=v, axis="token", **ends))


def _kivi_flat(k: int, v: int, more: dict[str, Any]) -> Recipe:
    group = {"group": 32} | more
    return Recipe(k=KiviStream(bits=k, axis="channel", **group), v=KiviStream(bits=v, axis="token", **group))


def _kvtc(k: float, v: float, more: dict[str, Any]) -> Recipe:
    ends = {"sink": 4, "recent": 128} | more
    return Recipe(k=KvtcStream(bits=k, **ends), v=KvtcStream(bits=v, **ends))


def _kvtc_sink(k: float, v: float, more: dict[str, Any]) -> Recipe:
    return _kvtc(k, v, {"recent": 0} | more)


def _aquakv_sink(k: float, v: float, more: dict[str, Any]) -> Recipe:
    return _aquakv(k, v, {"recent": 0} | more)


def _aquakv(k: float, v: float, more: dict[str, Any]) -> Recipe:
    ends = {"sink": 4, "recent": 128} | more
    return Recipe(k=AquaKvStream(bits=k, **ends), v=AquaKvStream(bits=v, **ends))


RIVALS: dict[str, Rival] = {
    "kivi-paper": Rival(
        _kivi,
        "Liu et al. 2024, arXiv 2402.02750 (settings: its experiments, group 32 and residual length 128)",
        "K after its rotary embedding, per channel over 32 tokens; V per token over 32 channels; the last 128 tokens"
        " of V exact, and of K those that fill no run of 128",
    ),
    "kivi-g32": Rival(
        _kivi_flat,
        "the same, without its exact tokens",
        "K before its rotary embedding, per channel over 32 tokens; V per token over 32 channels; every token coded",
        "no exact tokens: for comparing at equal bits where a context is short",
    ),
    "turboquant-vllm": Rival(
        _turboquant,
        "Zandieh et al. 2025, arXiv 2504.19874, as vLLM 0.32 sets its presets turboquant_4bit_nc, _k3v4_nc, _3bit_nc",
        "K after its rotary embedding: norm, Walsh-Hadamard without signs, Lloyd-Max, norm correction; V: even grid per"
        " token and head",
        "vLLM leaves the first two and the last two layers uncoded; a recipe codes every layer",
    ),
    "oscar-paper": Rival(
        _oscar,
        "Zhou et al. 2026, arXiv 2605.17757",
        "K after its rotary embedding; group 128; first 64 and last 256 tokens exact; clip .96 (K) and .92 (V) below 4"
        " bits; V rotated by the second moment of attention's outputs",
    ),
    "kvquant-paper": Rival(
        _kvquant,
        "Hooper et al. 2024, arXiv 2401.18079 (nuqN-1%)",
        "K before its rotary embedding, calibrated range per channel; V range per token; a table per layer; 1 %"
        " outliers apart; first token exact",
        "tables weigh every value alike, not by Fisher information",
    ),
    "kvtc-paper": Rival(
        _kvtc,
        "arXiv 2511.01815",
        "K before its rotary embedding; PCA over the heads of all layers; groups of 1 to 1024 components of 0, 2, 4 or"
        " 8 bits by dynamic programming; DEFLATE; first 4 and last 128 tokens exact",
        "8 bits are even steps and not fp8",
    ),
    "aquakv-paper": Rival(
        _aquakv,
        "Shutova et al. 2025, arXiv 2501.19392 (settings: github.com/goodevening13/aquakv: HIGGS grids of pairs)",
        "K before its rotary embedding, predicted from the layer below's decoded K; V from that V and the layer's own"
        " decoded K; what is left with HIGGS: a norm per token, Walsh-Hadamard, words of 2 in Gaussian grids; first"
        " layer 4 bits; first 4 and last 128 tokens exact; a calibration for each width",
    ),
    "kvtc-sink4": Rival(
        _kvtc_sink,
        "the same as kvtc-paper",
        "as kvtc-paper, but the last tokens are coded as all others",
        "no exact last tokens: for comparing where a context is short, of which 128 are a large part",
    ),
    "aquakv-sink4": Rival(
        _aquakv_sink,
        "the same as aquakv-paper",
        "as aquakv-paper, but the last tokens are coded as all others",
        "no exact last tokens: for comparing where a context is short, of which 128 are a large part",
    ),
}
"""By the name under which they may be asked for."""


def rival_recipe(name: str, bits: float | None, v_bits: float | None = None, **settings: Any) -> Recipe:
    """The recipe of one of `RIVALS`.

    Parameters
    ----------
    bits, v_bits : float
        Of K, and of V where they differ.
    **settings
        Settings of both streams that are to be other than published, such as ``group=64``.

    Raises
    ------
    ParamsError
        No bits are given, or settings that the codec does not have or that are out of range.
    """
    if bits is None:
        raise ParamsError(f"codec {name!r} needs bits; give for example bits=4")
    try:
        return RIVALS[name].make(bits, bits if v_bits is None else v_bits, settings)
    except ValueError as error:  # pydantic's
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "settings"
        raise ParamsError(f"codec {name!r}: {where}: {problem['msg']}") from None
