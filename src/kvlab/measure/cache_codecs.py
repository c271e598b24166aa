"""A coder of codecs that see all layers of a cache at once: they code a context's clean cache, and no forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Site, Stats
from kvlab.core.errors import CalibrationMismatch, CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Cell, digest
from kvlab.core.records import Coding
from kvlab.measure.coding import STREAMS, CleanCapture, Coded, Coder, now, squares


def coder_of(cell: Cell, calibrated: Calibrated | None, memo: dict | None = None, judged: bool = True) -> Coder:
    """The coder of a cell, by what its codec looks at."""
    whole = cell.layers and cell.recipe.k.codec in WHOLE
    return (WholeCoder if whole else Coder)(cell, calibrated, memo, judged)


@dataclass(frozen=True)
class CodedCache:
    """A cache that went through a codec: its file, what that holds by layer and stream, and what it took."""

    stored: bytes
    decoded: dict[tuple[int, str], torch.Tensor]
    encode_seconds: float
    decode_seconds: float

    @property
    def held(self) -> int:
        """Bytes that it takes in memory."""
        return len(self.stored) + sum(x.nbytes for x in self.decoded.values())


class WholeCoder(Coder):
    """Codes a cache as one file, and gives out its layers.

    Attributes
    ----------
    stored : bytes
        The file of the last window.

    Raises
    ------
    CapabilityError
        The cell codes inside a forward, where the layers above are not there yet, or some layers or streams only.
    CalibrationMismatch
        The calibration does not hold the codec.
    """

    def __init__(self, cell: Cell, calibrated: Calibrated | None, memo: dict | None = None, judged: bool = True):
        super().__init__(cell, calibrated, memo, judged)
        name = cell.recipe.k.codec
        if cell.protocol != "snapshot" or cell.placement != "pre_rope":
            raise CapabilityError(
                f"codec {name!r} codes whole caches, which a forward does not have before its end; measure it with"
                " protocol snapshot",
                code="capability.snapshot-only",
            )
        if cell.stream != "kv" or cell.exceptions or cell.layers != tuple(range(len(cell.layers))):
            raise CapabilityError(
                f"codec {name!r} codes K and V of all layers, not some of them", code="capability.all-layers"
            )
        if calibrated is None:
            raise CalibrationMismatch(
                f"the calibration was not fitted for {name}: there is none; run kvlab calibrate",
                code="calibration.not-fitted",
            )
        self.codec, self.stored = calibrated.whole_of(cell.recipe), b""
        self._decoded: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`; a cache that a cell of equal recipe has coded already is looked up."""
        memo = {} if self._memo is None else self._memo
        key = ("whole", digest(self.cell.recipe), self.cell.origin, window)
        if key not in memo:
            memo[key] = self._code_cache(clean, ids)
        found = memo[key]
        self.stored, self._decoded = found.stored, found.decoded
        self.tally.encode_seconds += found.encode_seconds
        self.tally.decode_seconds += found.decode_seconds
        self.tally.coded_bytes += len(found.stored)

    def _code_cache(self, clean: CleanCapture, ids: list[int]) -> CodedCache:
        sample = clean.kept[0, "k"]
        began = now(sample)
        data = self.codec.encode(self.cell.recipe, clean.kept, ids)
        stored = now(sample)
        decoded = self.decoded(data, ids)
        return CodedCache(data, decoded, stored - began, now(sample) - stored)

    def warm_up(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`."""
        self._code_cache(clean, ids)

    def decoded(self, data: bytes, ids: list[int]) -> dict[tuple[int, str], torch.Tensor]:
        """What a file holds, by layer and stream, float32 [kv_heads, tokens, head_dim]."""
        layers = self.codec.decode(self.cell.recipe, data, ids)
        return {(layer, stream): x for layer, *kv in layers for stream, x in zip(STREAMS, kv, strict=True)}

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """See `Coder`; what `begin` coded."""
        decoded = self._decoded[site.layer, site.stream].to(x.device)
        weigh = self._whiteners[site.layer].whiten if site.stream == "k" and site.layer in self._whiteners else None
        found = squares(x, decoded, weigh) if self.judged else (0.0, 0.0)
        self._count(Coded(decoded, 0, Stats(n_coefficients=x.numel()), 0.0, 0.0, *found), x, site.stream)
        self.tally.coded_frames += 1
        self.tally.coded_values += x.numel()
        return decoded.to(x.dtype)

    def coding(self, info: ModelInfo, tokens: int, dtype: str) -> Coding:
        """See `Coder`; the bytes are those of the files, which hold everything."""
        return super().coding(info, tokens, dtype).model_copy(update={"raw_bytes": 0})
