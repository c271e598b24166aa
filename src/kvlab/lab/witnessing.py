"""Which cells of a job a witness computes again, and what of its testimony stands beside their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kvlab.base.errors import WitnessDisagrees
from kvlab.base.recipe import Cell
from kvlab.base.testimony import Testimony
from kvlab.calibration.load import Calibrated
from kvlab.lab.coding import STREAMS, Coder, Tally
from kvlab.lab.engines import Visit, Which
from kvlab.lab.overheard import Overheard
from kvlab.lab.scoring import WindowRun
from kvlab.lab.store import ROWS, Found
from kvlab.lab.subjects import CellSubject, code_of, deciding, refuse_idle
from kvlab.lab.windows import Window
from kvlab.witness import corpus
from kvlab.witness.plain import PlainModel
from kvlab.witness.testimony import Claim, testify

MODULES = ("kvlab.witness.testimony", __name__)
SAME = 1e-9  # relative, of a number that one process computes twice; on a GPU an addition's order may change
ON_GPU = 0.25


@dataclass(eq=False)
class WitnessSubject:
    """A cell on one window, scored once more and computed again by a witness.

    Parameters
    ----------
    cell : Cell
    calibrated : Calibrated or None
    coder : Coder
        A second one of that cell, with the same memo: its tensors are those that the cell is scored with.
    on : Window
    model : callable
        The witness's own model, loaded when first asked for.
    windows_path : Path
        The file of the windows, which the witness reads for itself.
    """

    cell: Cell
    calibrated: Calibrated | None
    coder: Coder
    on: Window
    model: Callable[[], PlainModel]
    windows_path: Path

    @property
    def which(self) -> Which:
        """The engine that it runs on."""
        return Which.of(self.cell.engine, self.cell.dtype, self.cell.attention)

    def due(self, window: Window) -> bool:
        """See `walk.Subject`."""
        return window == self.on

    def identity(self) -> dict | None:
        """See `CellSubject.identity`."""
        measuring = code_of(self.which, self.cell.recipes, *MODULES)
        return measuring and {"kind": "witness", "code": measuring} | deciding(self.cell, self.calibrated)

    def score(self, visit: Visit) -> Found:
        """See `walk.Subject`: the testimony, and the rows that it is of.

        Raises
        ------
        WitnessDisagrees
            The witness comes to something else.
        """
        run, cell, window = visit.run(self.which), self.cell, visit.window
        self.coder.tally = Tally()
        heard = Overheard(window.context if cell.span == "context" else len(window.ids))
        alternative, reference = run.logits(cell, self.coder, heard), run.reference_of(cell)
        refuse_idle(self.coder)
        rows = run.rows(cell.cell_id, alternative, reference)
        claim = self._claim(run, heard, rows, alternative, reference)
        testimony = testify(self.model(), claim, self.calibrated)
        return Found(testimony.model_dump(mode="json"), rows.select(ROWS.names()))

    def _claim(self, run: WindowRun, heard: Overheard, rows: pl.DataFrame, alternative, reference) -> Claim:
        window = self.on
        return Claim(
            cell=self.cell,
            ids=corpus.window(self.windows_path, window.text, window.number),
            number=window.number,
            context=window.context,
            reference=reference,
            alternative=alternative,
            rows=rows,
            given=heard.given,
            answered=heard.answered,
            reading=heard.reading,
            nbytes=self.coder.tally.coded_bytes,
            engine=run.engine.proof,
        )


def chosen(subjects: Iterable[CellSubject]) -> list[CellSubject]:
    """Of every family the subject that codes most of the cache with fewest bits: where a fault shows most."""
    best: dict[tuple, CellSubject] = {}
    for subject in subjects:
        if name := subject.cell.family:
            best[name] = max(best.get(name, subject), subject, key=lambda one: exposure(one.cell))
    return list(best.values())


def exposure(cell: Cell) -> tuple:
    """How much of the cache a cell codes, and how coarsely."""
    bits = sum(getattr(cell.stream_recipe(stream, cell.layers[0]), "bits", 16) for stream in STREAMS)
    return len(cell.layers) * len(cell.stream), -bits


def refuse_other_rows(rows: pl.DataFrame, witnessed: pl.DataFrame, testimony: Testimony, on_gpu: bool) -> None:
    """What is written of a cell on the witnessed window must be what was witnessed.

    Raises
    ------
    WitnessDisagrees
        Names the first column and position that differ.
    """
    allowed = ON_GPU if on_gpu else SAME
    for name in ROWS.names():
        found, due = rows[name].cast(pl.Float64), witnessed[name].cast(pl.Float64)
        wrong = ((found - due).abs() > allowed * (1 + due.abs())).arg_true()
        if len(wrong):
            row = int(wrong[0])
            raise WitnessDisagrees(
                f"cell {testimony.cell_id}, window {testimony.window}: {name} at position {rows['position'][row]} is"
                f" {found[row]:.9g}, and {due[row]:.9g} was witnessed"
            )


def refuse_other_mean(written: dict[str, float], witnessed: pl.DataFrame, testimony: Testimony, on_gpu: bool) -> None:
    """The same of numbers that are kept as a window's means: ``kl``, ``delta_nll``, ``top1_agreement``.

    Raises
    ------
    WitnessDisagrees
        Names the first that differs.
    """
    means = {
        "kl": pl.col("kl"),
        "delta_nll": pl.col("nll_alt") - pl.col("nll_ref"),
        "top1_agreement": (pl.col("top1_alt") == pl.col("top1_ref")).cast(pl.Float64),
    }
    due = witnessed.select(value.mean().alias(name) for name, value in means.items()).row(0, named=True)
    for name, expected in due.items():
        if abs(written[name] - expected) > (ON_GPU if on_gpu else SAME) * (1 + abs(expected)):
            raise WitnessDisagrees(
                f"cell {testimony.cell_id}, window {testimony.window}: {name} is {written[name]:.9g}, and"
                f" {expected:.9g} was witnessed"
            )
