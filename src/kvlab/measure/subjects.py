"""What is scored on windows: a cell with its coder, and what proves that a tap is heard and changes nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from kvlab.calibration.load import Calibrated
from kvlab.codecs.catalogue import codec_modules, foreign_codecs
from kvlab.core import code
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import IDENTITY, WHOLE, Cell, Recipe
from kvlab.core.records import Coding, fingerprint
from kvlab.measure.coding import STREAMS, UNDECIDING, Coder, Tally
from kvlab.measure.engines import Visit, Which
from kvlab.measure.scoring import CANARY, floor_kl, heard_kl
from kvlab.measure.store import ROWS, Found
from kvlab.measure.windows import Window

WHOLE_MODULE = "kvlab.measure.cache_codecs"  # what codes whole caches
MEMO_BYTES = 2**30  # of coded tensors that are kept while a window lasts


class Memo(dict):
    """Coded tensors by what they are; beyond `MEMO_BYTES` the oldest is dropped, and coded again when asked for."""

    def __init__(self):
        super().__init__()
        self._bytes = 0

    def __setitem__(self, key, coded) -> None:
        super().__setitem__(key, coded)
        self._bytes += coded.held
        while self._bytes > MEMO_BYTES and len(self) > 1:
            self._bytes -= self.pop(next(iter(self))).held

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._bytes = 0


@dataclass
class Memos:
    """A memo for each engine: tensors of two engines are never the same."""

    of: dict[Which, Memo] = field(default_factory=dict)

    def get(self, which: Which) -> Memo:
        """That of one engine."""
        return self.of.setdefault(which, Memo())

    def clear(self) -> None:
        """Forget all: a window is over."""
        for memo in self.of.values():
            memo.clear()


@dataclass(eq=False)
class CellSubject:
    """A cell that is scored on the first so many windows of its text.

    Parameters
    ----------
    cell : Cell
    coder : Coder
        Of that cell; its tally is that of the window in hand.
    calibrated : Calibrated or None
        What the coder was given.
    """

    cell: Cell
    coder: Coder
    calibrated: Calibrated | None
    _identity: dict | None = None

    @property
    def which(self) -> Which:
        """The engine that it runs on."""
        return Which.of_cell(self.cell)

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return window.text == self.cell.text and window.number < self.cell.windows

    def identity(self) -> dict | None:
        """Everything of the cell that decides what is found on a window; None where its code is not known."""
        if self._identity is None:
            measuring = code_of(self.which, self.cell.recipes, __name__)
            if measuring is None:
                return None
            self._identity = {"kind": "cell", "code": measuring} | deciding(self.cell, self.calibrated)
        return self._identity

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`.

        Raises
        ------
        CodecNotActive
            The codec did not fire as often as it should have on this window.
        """
        self.coder.tally = Tally()
        run = visit.run(self.which)
        rows = run.measured(self.cell, self.coder)
        self.coder.refuse_idle(windows=1)
        return Found(self.coder.tally.to_json(), rows.select(ROWS.names()))

    def coding(self, notes: Iterable[dict], info: ModelInfo, tokens: int) -> Coding:
        """The record of what the codec did on all windows; see `Coder.coding`."""
        self.coder.tally = Tally.total(notes)
        return self.coder.coding(info, tokens, self.cell.dtype)

    def table(self, found: Iterable[tuple[Window, Found]]) -> pl.DataFrame:
        """The rows of all windows, with the cell's id."""
        return pl.concat([table_of(self.cell.cell_id, window, one) for window, one in found])


class Probe(NamedTuple):
    """KL of a one-bit codec, and of one that changes nothing, on one way into an engine."""

    canary: float | None
    floor: float | None


@dataclass(eq=False)
class ProbeSubject:
    """One way into an engine: one bit on every layer of `stream` has to move the logits, or, where that is None, the
    codec that changes nothing has to leave them alone.
    """

    which: Which
    protocol: str
    placement: str
    stream: str | None
    on: Window

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return window == self.on

    def identity(self) -> dict | None:
        """See `CellSubject.identity`."""
        measuring = code_of(self.which, (CANARY,), __name__)
        asked = {"protocol": self.protocol, "placement": self.placement, "stream": self.stream}
        return measuring and asked | {"kind": "probe", "code": measuring, "engine": list(self.which)}

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`; refused as `scoring.heard_kl` and `scoring.floor_kl` say."""
        run, way = visit.run(self.which), (self.protocol, self.placement)
        return Found({"kl": heard_kl(run, *way, self.stream) if self.stream else floor_kl(run, *way)})


def probes_of(cells: Iterable[Cell], on: Window) -> list[ProbeSubject]:
    """For each engine, protocol and placement in use a floor, and a canary for each stream.

    K and V apart: together they would hide that one hook is dead.
    """
    used = {(Which.of_cell(c), c.protocol, c.placement) for c in cells if c.layers}
    return [ProbeSubject(*place, stream, on) for place in sorted(used) for stream in (None, *STREAMS)]


def probed(found: Iterable[tuple[ProbeSubject, Found]]) -> dict[tuple[Which, str, str], Probe]:
    """What was found at each place; of the canaries of K and of V alone whichever moves less."""
    by_place: dict[tuple[Which, str, str], dict[str | None, float]] = {}
    for probe, one in found:
        by_place.setdefault((probe.which, probe.protocol, probe.placement), {})[probe.stream] = one.note["kl"]
    return {place: Probe(min(kl[s] for s in STREAMS), kl[None]) for place, kl in by_place.items()}


# ------------------------------------------------------------------------------------------------ identities


def deciding(cell: Cell, calibrated: Calibrated | None) -> dict:
    """What a cell is and what was fitted for it, as plain data.

    The Sigma_q at the cell's placement is named even where no codec reads it: errors of K are weighed by it.
    """
    metric = calibrated.metric(cell.placement) if calibrated else {}
    return {
        "cell": cell.model_dump(mode="json", exclude=UNDECIDING),
        "fitted": calibrated.fingerprints(cell) if calibrated else {},
        "metric": {
            str(layer): fingerprint(one.chol.cpu().numpy(), one.inv_chol.cpu().numpy())
            for layer, one in sorted(metric.items())
            if layer in cell.layers and "k" in cell.stream
        },
    }


def code_of(which: Which, recipes: Iterable[Recipe], *modules: str) -> str | None:
    """Digest of the code that scores recipes on an engine; None where a codec is not of this package."""
    run = [IDENTITY, *recipes]  # the floor runs everywhere
    whole = [WHOLE_MODULE] if any(recipe.k.codec in WHOLE for recipe in run) else []
    return None if foreign_codecs(run) else code.digest_of(*which.modules, *codec_modules(run), *whole, *modules)


def table_of(cell_id: str, window: Window, found: Found) -> pl.DataFrame:
    """The scored tokens of one window as rows of a cell, as `records.TOKENS`."""
    named = [pl.lit(cell_id).alias("cell_id"), pl.lit(window.number, pl.Int32).alias("window")]
    return found.rows.select(*named, *ROWS.names())
