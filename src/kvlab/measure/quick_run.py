"""A few codecs on one model and one text, without params.yaml: what `kvlab measure` runs.

Windows, cells, coders, scores and the loop are those of the studies (`walk`, `scoring.WindowRun`, `coding.Coder`); only
the bookkeeping of a study (jobs, records, tables on disk) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import torch

from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Site
from kvlab.codecs.cast import CastStream
from kvlab.codecs.shared.seeding import generator
from kvlab.core.recipe import Cell, Recipe
from kvlab.core.records import Coding
from kvlab.core.settings import IdentityStream
from kvlab.core.testimony import Testimony
from kvlab.engines.base import Engine
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import STREAMS, Coded, Coder
from kvlab.measure.loop import walk
from kvlab.measure.mechanism import Applied
from kvlab.measure.scoring import WindowRun, heard_kl
from kvlab.measure.witnessing import chosen, examined, witnessed_of
from kvlab.witness.plain import PlainModel

ROUNDING = "rounding to bfloat16"
BFLOAT16_STEP = 2.0**-7  # distance of neighbouring bfloat16 numbers, in units of their power of two


@dataclass(frozen=True)
class NamedCodec:
    """A codec that is measured: a name for people, the recipe, and what was fitted for it (None: nothing is read)."""

    label: str
    recipe: Recipe
    calibrated: Calibrated | None = None


@dataclass(frozen=True)
class ScoredCodec:
    """What was found of a subject.

    Parameters
    ----------
    tokens : polars.DataFrame
        A row per scored token (`records.TOKENS`).
    coding : Coding
        What its codec wrote.
    witnessed : Testimony or None
        What a second computation of the last window came to; None without one, and of what is no codec.
    seconds : tuple of float
        What storing a context and reading it back took, window by window: coding, packing, unpacking, decoding.
    """

    subject: NamedCodec
    tokens: pl.DataFrame
    coding: Coding
    witnessed: Testimony | None = None
    seconds: tuple[float, ...] = ()


class RoundingCoder(Coder):
    """Codes nothing, and rounds K and V to bfloat16 once more: the least that storing them in 16 bits can cost.

    A bfloat16 engine's own K and V are rounded already. They get an error of the same variance instead, that of a
    uniform rounding error (a twelfth of the squared step), at random and rounded to neighbouring numbers.
    """

    def _code(self, x: torch.Tensor, site: Site) -> Coded:
        if x.dtype != torch.bfloat16:
            return super()._code(x, site)
        noise = torch.randn(x.shape, generator=generator("rounding", site.window, site.layer, site.stream))
        step = BFLOAT16_STEP * torch.exp2(torch.frexp(x.float()).exponent.float() - 1)
        return super()._code((x.float() + noise.to(x.device) * step / 12**0.5).to(x.dtype), site)


def rounding(dtype: str) -> NamedCodec:
    """What rounding K and V to bfloat16 costs, as a subject."""
    stream = IdentityStream() if dtype == "bfloat16" else CastStream()
    return NamedCodec(ROUNDING, Recipe(k=stream, v=stream))


def score(
    engine: Engine,
    windows: np.ndarray,
    context: int,
    subjects: Sequence[NamedCodec],
    protocol: str,
    plain: Callable[[], PlainModel] | None,
    mechanisms: Sequence[Applied] = (),
) -> list[ScoredCodec]:
    """Measure subjects on windows; each window's clean pass is made once for all of them.

    Parameters
    ----------
    engine : Engine
        Running; it is not closed.
    windows : numpy.ndarray of int, shape (windows, context + scored)
    context : int
        Tokens whose K and V are coded; the others are scored, but for the first (see `corpus.TokenWindows.labels`).
    subjects : sequence of Subject
    protocol : str
        ``snapshot`` or ``in_forward``; see `coding`.
    plain : callable or None
        Gives the model by which a witness computes each codec's last window again; None for no witness.
    mechanisms : sequence of Applied
        Scored on the same windows, after the subjects; each keeps what was found of it.

    Raises
    ------
    CodecNotActive
        A one-bit codec does not move the logits, or a codec fired less often than it should have.
    WitnessDisagrees
        The witness comes to something else.
    """
    tried = [tried_on(subject, engine, len(windows), protocol) for subject in subjects]
    if plain:
        for one in chosen(one for one in tried if one.subject.label != ROUNDING):  # which is the engine's own
            one.plain = plain

    # K and V of blank lines are all alike: whether a codec is heard is asked where the tokens differ most
    varied = int(np.argmax([np.unique(row[:context]).size for row in windows]))

    def visit(number: int) -> WindowRun:
        run = WindowRun(engine, windows[number].tolist(), context, number)
        if number == varied:
            for stream in STREAMS:
                heard_kl(run, protocol, "pre_rope", stream)
        return run

    tables: list[list[pl.DataFrame]] = [[] for _ in subjects]
    for _, found in walk(range(len(windows)), [*tried, *mechanisms], visit, title="measure"):
        for rows, (_, table) in zip(tables, found, strict=False):  # those of mechanisms come last
            rows.append(table)
    return [
        ScoredCodec(
            one.subject,
            pl.concat(rows),
            one.coder.coding(engine.info, context, engine.dtype),
            one.witnessed,
            tuple(one.seconds),
        )
        for one, rows in zip(tried, tables, strict=True)
    ]


@dataclass(eq=False)
class Tried:
    """A subject's cell on every window, as the measuring loop scores it (`loop.Subject`).

    Parameters
    ----------
    last : int
        The window that a witness computes again.
    plain : callable or None
        Gives the witness's model; None where nothing is computed again.
    witnessed : Testimony or None
        What it came to.
    seconds : list of float
        As of `ScoredCodec`.
    """

    subject: NamedCodec
    coder: Coder
    last: int
    plain: Callable[[], PlainModel] | None = None
    witnessed: Testimony | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        """What its coder codes."""
        return self.coder.cell

    @property
    def _coded(self) -> float:
        """Seconds of coding and decoding up to now."""
        return self.coder.tally.encode_seconds + self.coder.tally.decode_seconds

    def due(self, _window: int) -> bool:
        """On every window."""
        return True

    def score(self, run: WindowRun) -> pl.DataFrame:
        """Its token rows."""
        before = self._coded
        rows = run.measured(self.cell, self.coder)
        self.seconds.append(self._coded - before)
        if self.plain and run.number == self.last:
            again = _coder(self.cell, self.subject)
            seen = examined(self.plain(), run, self.cell, again, self.subject.calibrated, run.ids)
            self.witnessed = witnessed_of(seen, self.cell, rows)
        return rows


def tried_on(subject: NamedCodec, engine: Engine, windows: int, protocol: str) -> Tried:
    """A subject on the first so many windows, of which the last is a witness's."""
    return Tried(subject, _coder(_cell(subject, engine, windows, protocol), subject), windows - 1)


def _cell(subject: NamedCodec, engine: Engine, windows: int, protocol: str) -> Cell:
    return Cell(
        study="cells",
        label=subject.label,
        engine=engine.name,
        dtype=engine.dtype,
        protocol=protocol,
        origin=subject.calibrated.origin if subject.calibrated else engine.name,
        stream="kv",
        layers=tuple(range(engine.info.n_layers)),
        windows=windows,
        recipe=subject.recipe,
    )


def _coder(cell: Cell, subject: NamedCodec) -> Coder:
    if subject.label == ROUNDING:
        return RoundingCoder(cell, None)
    return coder_of(cell, subject.calibrated)
