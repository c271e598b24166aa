"""What the study of placement leaves. Torch-free."""

from __future__ import annotations

from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab_pipeline.studies.kvstore_params import PlacementStudy
from kvlab_pipeline.studies.record import StudyRecord

Kind = Literal["same", "near tie", "seam bug"]
KINDS: tuple[Kind, ...] = ("same", "near tie", "seam bug")


class RunVerdict(Frozen):
    """One run held against another of the same tokens; see `verdict.judge`.

    Attributes
    ----------
    kind : {"same", "near tie", "seam bug"}
        ``same`` as long as every most likely token is the same one.
    flips : int
        Compared rows whose most likely token differs.
    first : int or None
        The first of them.
    margin : float or None
        By how much the reference run's most likely token led the next one there, in logits; None without a flip.
    widest : float or None
        The largest such lead of all flips.
    largest : float
        Of all compared rows, the largest difference of a logit.
    """

    kind: Kind
    flips: int
    first: int | None
    margin: float | None
    widest: float | None
    largest: float


class Margins(Frozen):
    """Compared rows with a lead in [low, high) in the reference run, and how many of them flipped."""

    low: float
    high: float | None
    rows: int
    flips: int


class Logical(Frozen):
    """Runs whose attention reads in logical order: how many there were, and how many differ in any bit."""

    runs: int
    differing: int
    largest: float


class PlantedControl(Frozen):
    """Something of which it is known what the verdict has to be, and what it was.

    `flipped` counts the runs in which a token flipped at all: without one there was nothing to judge. `lead` is the
    largest lead of a flip, None without one.
    """

    name: Literal["tie", "shift"]
    expected: Kind
    runs: int
    flipped: int
    right: int
    lead: float | None

    @property
    def passed(self) -> bool:
        """Whether something flipped, and every run in which it did was judged rightly."""
        return self.flipped > 0 and self.right == self.flipped


class PlacementRecord(StudyRecord):
    """The JSON of the study.

    `rows` are compared in each run: all rows of the context, and decoded ones up to the first that differs. `noise` is
    the largest difference of a logit over the first half of the orders; `limit` is `factor` times that, and what the
    second half is judged by.
    """

    settings: PlacementStudy
    dtype: str
    context: int
    blocks: int
    factor: float
    noise: float
    limit: float
    calibrated: int
    logical: Logical
    slot: Logical
    judged: tuple[RunVerdict, ...]
    margins: tuple[Margins, ...]
    least_margin: float
    controls: tuple[PlantedControl, ...]


RECORD = PlacementRecord
