"""Codec off: how far is each engine, dtype and attention kernel from the fp32 truth?

The truth is transformers in float32 with sdpa attention, run in the process of the engine in question and
compared window by window, so that no logits are stored. In a lower dtype the other engine is held against
transformers in that same dtype too: what is then between the engines. In float32 the two engines must also agree
when both run the same codec; that is checked here, for identity and for the studied recipe. Beside it
stands what a rounding error does to the codec on the truth's own engine, since a codec's rounding is
discontinuous and carries a difference in the last bit up through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import torch

from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.codecs.base import Site
from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.codecs.shared.seeding import generator
from kvlab.core import code
from kvlab.core.errors import UnknownName
from kvlab.core.params import Params
from kvlab.core.recipe import ENGINES, IDENTITY, Cell, Recipe
from kvlab.core.records import BaselineCell, BaselineRecord, write_job
from kvlab.measure.coding import Coded, Coder, Tally
from kvlab.measure.engines import Visit, Which
from kvlab.measure.store import ROWS, Found
from kvlab.measure.subjects import Memos, code_of, deciding, table_of
from kvlab.measure.variant import CodecVariant
from kvlab.measure.windows import Window, windows_of
from kvlab_pipeline.jobs.measure import Findings, Lab, Probes, run
from kvlab_pipeline.jobs.plan import baseline_runs
from kvlab_pipeline.studies.baseline.truth import TRUTH, own_jitter, peer_of, trial_windows

REFERENCE = Which.of(*TRUTH)
JITTER = 2.0**-22  # relative; the float32 engines' captures of one model differ by about this much


def baseline(
    params: Params,
    name: str,
    windows_path: Path,
    fitted: FittedFiles | None,
    out: Path,
) -> None:
    """Measure one run of the engine baseline and write its ``.parquet`` and ``.json``.

    Another engine's run below float32 holds three models at a time: its own, the truth, and its peer.

    Raises
    ------
    UnknownName
        There is no such run under these parameters.
    """
    with Lab.open(params, windows_path, {params.calibration.origin: fitted} if fitted else {}) as lab:
        run(lab, [BaselinePart(lab, name, out)], f"baseline {name}")


@dataclass
class BaselinePart:
    """One run of the engine baseline.

    Its comparisons are with the truth, with its peer if there is one, and in another engine's float32 those of the
    same codec on both engines.
    """

    lab: Lab
    name: str
    out: Path
    cells: tuple[Cell, ...] = ()  # that are probed: none, as a codec is held against itself
    witnesses: tuple = ()  # the studied cells that it compares are witnessed in their own study

    def __post_init__(self):
        params, runs = self.lab.params, baseline_runs(self.lab.params)
        if self.name not in runs:
            raise UnknownName("baseline run", self.name, runs)
        self.run = runs[self.name]
        which, against = Which.of(*self.run), peer_of(runs, self.name)
        many = params.baseline.windows
        self.windows = windows_of(self.lab.windows, "test")[:many]
        self.subjects = [Plain(self._cell("plain"), which, REFERENCE, many)]
        if against:
            self.subjects.append(Plain(self._cell("peer", reference=against), which, Which.of(*runs[against]), many))
        if which.name != REFERENCE.name and which.dtype == REFERENCE.dtype:
            calibrated = self.lab.calibrated.get(params.calibration.origin)
            self.subjects += trials(params, which, calibrated, self.lab.memos, self._cell)

    def _cell(self, what: str, protocol: str | None = None, reference: str = "truth") -> BaselineCell:
        return BaselineCell.of(self.name, *self.run, what, protocol, reference)

    def finish(self, findings: Findings, _probes: Probes) -> None:
        """See `Part.finish`."""
        lab, (engine, dtype, attention) = self.lab, self.run
        record = BaselineRecord(
            provenance=lab.provenance([lab.params.calibration.origin]),
            run=self.name,
            engine=engine,
            dtype=dtype,
            attention=attention,
            context=lab.windows.context,
            eval=lab.windows.eval,
            cells=tuple(cell for subject in self.subjects for cell in subject.cells),
            documents=lab.windows.documents,
        )
        found = {window: [] for window in self.windows}
        for subject in self.subjects:
            for window, one in findings[id(subject)]:
                found[window] += subject.tables(window, one)
        write_job(self.out, record, pl.concat([table for tables in found.values() for table in tables]))


def _compared(window: Window, windows: int) -> bool:
    """Whether a window is among the first ones of the scored text."""
    return window.text == "test" and window.number < windows


@dataclass(eq=False)
class Plain:
    """An engine without a codec, held against another one."""

    cell: BaselineCell
    which: Which
    against: Which
    windows: int

    @property
    def cells(self) -> tuple[BaselineCell, ...]:
        """What it is recorded as."""
        return (self.cell,)

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return _compared(window, self.windows)

    def identity(self) -> dict:
        """See `loop.FindingStore`."""
        measuring = code.digest_of(*ENGINES[self.which.name].code, *ENGINES[self.against.name].code, __name__)
        return {"kind": "plain", "engine": list(self.which), "against": list(self.against), "code": measuring}

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`; an engine that is held against itself runs a second time."""
        reference = visit.run(self.against)
        ours = reference.rerun if self.which == self.against else visit.run(self.which).reference
        return Found({}, reference.rows("", ours).select(ROWS.names()))

    def tables(self, window: Window, found: Found) -> list[pl.DataFrame]:
        """The rows as `records.TOKENS`, one table for each of `cells`."""
        return [table_of(self.cell.cell_id, window, found)]


class JitteredCoder(Coder):
    """A coder whose input is first moved by `JITTER`, relative, at random; `number` says which rounding error it is.

    In float32 two engines differ by such roundings and by nothing else. What a rounding does to one engine's
    own result, through a codec that is discontinuous, is what the engines' difference is held against.
    """

    def __init__(self, cell: Cell, calibrated: Calibrated | None, number: int = 0):
        super().__init__(cell, calibrated)
        self._seed = ("jitter", *([number] if number else []))

    def _code(self, x: torch.Tensor, site: Site) -> Coded:
        noise = torch.randn(x.shape, generator=generator(*self._seed, site.window, site.layer, site.stream))
        return super()._code((x * (1 + JITTER * noise.to(x.device))).to(x.dtype), site)


@dataclass(eq=False)
class PeerTrial:
    """The same codec on the truth's engine and on another, under one protocol.

    `jittered` is that codec once more on the truth's engine, after a rounding error; None for a codec
    that rounds nothing. `again` are pairs of it on both engines after further ones, each held against its own engine.
    """

    cells: tuple[BaselineCell, ...]
    which: Which
    windows: int
    theirs: Coder
    ours: Coder
    jittered: Coder | None
    calibrated: Calibrated | None
    again: tuple[tuple[CodecVariant, CodecVariant], ...] = ()
    _identity: dict | None = field(default=None)

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return _compared(window, self.windows)

    def identity(self) -> dict | None:
        """See `loop.FindingStore`."""
        if self._identity is None:
            measuring = code_of(self.which, self.ours.cell.recipes, *ENGINES[REFERENCE.name].code, __name__)
            if measuring is None:
                return None
            named = {"ours": deciding(self.ours.cell, self.calibrated), "against": list(REFERENCE)}
            named |= {"kind": "trial", "jittered": self.jittered is not None, "code": measuring}
            named |= {"again": len(self.again)}
            self._identity = named
        return self._identity

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`; the rows of all `cells`, one after the other."""
        coders = [coder for coder in (self.theirs, self.ours, self.jittered) if coder is not None]
        for coder in coders:
            coder.tally = Tally()
        reference, ours = visit.run(REFERENCE), visit.run(self.which)
        expected = reference.shared(self.theirs.cell, self.theirs)  # the factorial has the same cells
        found = [ours.shared(self.ours.cell, self.ours)]
        if self.jittered is not None:
            found.append(reference.logits(self.jittered.cell, self.jittered))
        for coder in coders:
            coder.refuse_idle(windows=1)
        rows = [reference.rows("", logits, expected) for logits in found]
        for pair in self.again:
            for engine, variant in zip((reference, ours), pair, strict=True):
                outcome = variant.measure(engine)
                rows.append(engine.rows("", outcome.logits, outcome.reference))
        return Found({}, pl.concat(rows).select(ROWS.names()))

    def tables(self, window: Window, found: Found) -> list[pl.DataFrame]:
        """See `Plain.tables`."""
        size = len(found.rows) // len(self.cells)
        parts = (Found({}, found.rows.slice(size * number, size)) for number in range(len(self.cells)))
        return [table_of(cell.cell_id, window, part) for cell, part in zip(self.cells, parts, strict=True)]


def trials(params: Params, which: Which, calibrated: Calibrated | None, memos: Memos, record) -> list[PeerTrial]:
    """Identity and the studied recipe under every protocol; `record` makes the `BaselineCell` of one comparison."""

    def cell(what: str, protocol: str, name: str, recipe: Recipe, layers: tuple[int, ...]) -> Cell:
        shared = {"study": "factors", "dtype": "float32", "stream": "kv", "windows": many}
        shared["origin"] = params.calibration.origin
        return Cell(label=what, engine=name, protocol=protocol, layers=layers, recipe=recipe, **shared)

    found, here, there, many = [], memos.get(which), memos.get(REFERENCE), trial_windows(params)
    everything = tuple(range(params.model.n_layers))
    for protocol in params.protocols:
        hf, other = (cell("identity", protocol, name, IDENTITY, everything) for name in (REFERENCE.name, which.name))
        coders = Coder(hf, calibrated, there), Coder(other, calibrated, here), None
        found.append(PeerTrial((record("identity", protocol),), which, many, *coders, None))
        recipe, layers = studied_recipe(params), coded_layers(params)
        hf, other = (cell("kv", protocol, name, recipe, layers) for name in (REFERENCE.name, which.name))
        coders = Coder(hf, calibrated, there), Coder(other, calibrated, here), JitteredCoder(hf, calibrated)
        numbers = range(1, params.baseline.jitters + 1)
        again = [tuple(CodecVariant(JitteredCoder(one, calibrated, n)) for one in (hf, other)) for n in numbers]
        told = ["kv", "jitter", *(own_jitter(name, n) for n in numbers for name in (REFERENCE.name, which.name))]
        cells = tuple(record(what, protocol) for what in told)
        found.append(PeerTrial(cells, which, many, *coders, calibrated, tuple(again)))
    return found
