"""Which cells of a job a witness computes again, and what of its testimony stands beside their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NoReturn, Protocol, TypeVar

import polars as pl

from kvlab.core.errors import WitnessDisagrees
from kvlab.core.recipe import Cell
from kvlab.core.testimony import Testimony
from kvlab.measure.coding import STREAMS, Coder, Tally
from kvlab.measure.engines import Visit, Which, device
from kvlab.measure.scoring import WindowRun
from kvlab.measure.store import ROWS, Found
from kvlab.measure.subjects import code_of, deciding
from kvlab.measure.tensor_recorder import Overheard
from kvlab.measure.windows import Window
from kvlab.witness import reading as corpus
from kvlab.witness.plain import PlainModel
from kvlab.witness.testify import CellClaim, testify

MODULES = ("kvlab.witness.testify", __name__)
TWICE = {"cpu": 1e-9, "gpu": 0.25}
"""Relative, of a number that an engine computes twice; a GPU may add in another order, and then a codec jumps."""


@dataclass(eq=False)
class WitnessSubject:
    """A cell on one window, scored once more and computed again by a witness.

    Parameters
    ----------
    coder : Coder
        A second one of the cell, with the same memo: its tensors are those that the cell is scored with.
    on : Window
    model : callable
        The witness's own model, loaded when first asked for.
    windows_path : Path
        The file of the windows, which the witness reads for itself.
    seconds : float
        That it took; 0 where what it found was kept from before.
    """

    coder: Coder
    on: Window
    model: Callable[[], PlainModel]
    windows_path: Path
    seconds: float = 0.0

    @property
    def cell(self) -> Cell:
        """What is computed again."""
        return self.coder.cell

    @property
    def which(self) -> Which:
        """The engine that it runs on."""
        return Which.of_cell(self.cell)

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return window == self.on

    def identity(self) -> dict | None:
        """See `CellSubject.identity`."""
        measuring = code_of(self.which, self.cell.recipes, *MODULES)
        return measuring and {"kind": "witness", "code": measuring} | deciding(self.cell, self.coder.calibrated)

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`: the testimony, and the rows that it is of.

        Raises
        ------
        WitnessDisagrees
            The witness comes to something else.
        """
        began = perf_counter()
        ids = corpus.window(self.windows_path, self.on.text, self.on.number)
        found = examined(self.model(), visit.run(self.which), self.coder, ids)
        self.seconds = perf_counter() - began
        return found


def examined(model: PlainModel, run: WindowRun, coder: Coder, ids: list[int]) -> Found:
    """A cell on one window, scored once more while everything is overheard, and computed again by a witness.

    Parameters
    ----------
    coder : Coder
        Of the cell.
    ids : list of int
        The window's tokens, as the witness has them.

    Returns
    -------
    Found
        The testimony, and the rows that it is of.

    Raises
    ------
    WitnessDisagrees
        The witness comes to something else.
    """
    cell, coder.tally = coder.cell, Tally()
    heard = Overheard(run.context if cell.span == "context" else len(run.ids))
    alternative, reference = run.logits(cell, coder, heard), run.reference_of(cell)
    coder.refuse_idle(windows=1)
    rows = run.rows(cell.cell_id, alternative, reference)
    claim = CellClaim(
        cell=cell,
        ids=ids,
        number=run.number,
        context=run.context,
        reference=reference,
        alternative=alternative,
        rows=rows,
        given=heard.given,
        answered=heard.answered,
        reading=heard.reading,
        nbytes=coder.tally.coded_bytes,
        engine=run.engine.proof,
        stored=getattr(coder, "stored", b""),
    )
    testimony = testify(model, claim, coder.calibrated)
    return Found(testimony.model_dump(mode="json"), rows.select(ROWS.names()))


class Celled(Protocol):
    """What scores one cell."""

    @property
    def cell(self) -> Cell:
        """The cell."""


C = TypeVar("C", bound=Celled)


def chosen(subjects: Iterable[C]) -> list[C]:
    """Of every family the subject that codes most of the cache with fewest bits: where a fault shows most."""
    best: dict[tuple, C] = {}
    for subject in subjects:
        if name := subject.cell.family:
            best[name] = max(best.get(name, subject), subject, key=lambda one: exposure(one.cell))
    return list(best.values())


def exposure(cell: Cell) -> tuple:
    """How much of the cache a cell codes, and how coarsely."""
    bits = sum(getattr(cell.stream_recipe(stream, cell.layers[0]), "bits", None) or 16 for stream in STREAMS)
    return len(cell.layers) * len(cell.stream), -bits


def witnessed_of(seen: Found, cell: Cell, rows: pl.DataFrame) -> Testimony:
    """The testimony, if what is written of the cell on the witnessed window is what was witnessed.

    Parameters
    ----------
    seen : Found
        What a `WitnessSubject` found, of this cell or of one that differs in its study alone.
    cell : Cell
        Under whose id it is to stand.
    rows : polars.DataFrame
        The cell's rows of that window, as they are written.

    Raises
    ------
    WitnessDisagrees
        Names the first column and position that differ.
    """
    testimony = _of(seen, cell)
    for name in ROWS.names():
        found, due = rows[name].cast(pl.Float64), seen.rows[name].cast(pl.Float64)
        wrong = ((found - due).abs() > allowed() * (1 + due.abs())).arg_true()
        if len(wrong):
            row = int(wrong[0])
            refuse(testimony, f"{name} at position {rows['position'][row]}", found[row], due[row])
    return testimony


def witnessed_mean_of(seen: Found, cell: Cell, means: Mapping[str, float]) -> Testimony:
    """The same where a window's means are written: of ``kl``, ``delta_nll`` and ``top1_agreement``."""
    testimony = _of(seen, cell)
    columns = {
        "kl": pl.col("kl"),
        "delta_nll": pl.col("nll_alt") - pl.col("nll_ref"),
        "top1_agreement": (pl.col("top1_alt") == pl.col("top1_ref")).cast(pl.Float64),
    }
    due = seen.rows.select(value.mean().alias(name) for name, value in columns.items()).row(0, named=True)
    for name, expected in due.items():
        if abs(means[name] - expected) > allowed() * (1 + abs(expected)):
            refuse(testimony, name, means[name], expected)
    return testimony


def _of(seen: Found, cell: Cell) -> Testimony:
    """What was found, as a testimony of the cell."""
    return Testimony.model_validate(seen.note | {"cell_id": cell.cell_id})


def allowed() -> float:
    """How far apart two computations of one number may be here."""
    return TWICE["cpu" if device() == "cpu" else "gpu"]


def refuse(testimony: Testimony, what: str, found: float, due: float) -> NoReturn:
    """`WitnessDisagrees` with both numbers."""
    raise WitnessDisagrees(
        f"cell {testimony.cell_id}, window {testimony.window}: {what} is {found:.9g}, and {due:.9g} was witnessed",
        code="witness.other-numbers",
    )
