"""A few codecs on one model and one text, without params.yaml: what `kvlab measure` and `kvlab recommend` run.

Windows, variants, coders, scores and the loop are those of the studies (`loop.walk`, `scoring.WindowRun`, `variant`,
`coding.Coder`); only the bookkeeping of a study (jobs, records, tables on disk) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import torch

from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Site
from kvlab.codecs.cast import CastStream
from kvlab.codecs.shared.seeding import generator
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import SPAN_OF, Recipe
from kvlab.core.testimony import Testimony
from kvlab.engines.base import Engine
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import STREAMS, Coded, Coder
from kvlab.measure.loop import walk
from kvlab.measure.scoring import WindowRun, cell_of_all_layers, heard_kl
from kvlab.measure.variant import CacheCost, CodecVariant, Variant
from kvlab.measure.witnessing import chosen
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.witness.plain import PlainModel

ROUNDING = "rounding to bfloat16"
BOOTSTRAP = Bootstrap(resamples=2000, confidence=0.95, seed=0)  # as params.yaml, with a fifth of the resamples
BFLOAT16_STEP = 2.0**-7  # distance of neighbouring bfloat16 numbers, in units of their power of two


@dataclass(frozen=True)
class NamedCodec:
    """A codec that is measured.

    Parameters
    ----------
    label : str
        A name for people.
    recipe : Recipe
    calibrated : Calibrated or None
        What was fitted for it; None: nothing is read.
    protocol : str
        ``snapshot`` or ``in_forward``; see `coding`.
    layers : tuple of int or None
        Those that are coded; None for all.
    """

    label: str
    recipe: Recipe
    calibrated: Calibrated | None = None
    protocol: str = "snapshot"
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scored:
    """What was found of a variant.

    Parameters
    ----------
    tokens : polars.DataFrame
        A row per scored token (`records.TOKENS`).
    cost : CacheCost
        What it stored and read.
    witnessed : Testimony, float or None
        What a second computation of the last window came to; see `Variant.compute_again`.
    seconds : tuple of float
        What storing a context and reading it back took, window by window: coding, packing, unpacking, decoding. Empty
        where nothing is coded.
    """

    variant: Variant
    tokens: pl.DataFrame
    cost: CacheCost
    witnessed: Testimony | float | None = None
    seconds: tuple[float, ...] = ()

    @property
    def columns(self) -> tuple[Column, Column]:
        """Of each token the KL, nats, and whether the most probable one stays."""
        where = self.tokens["window"].to_numpy(), self.tokens["position"].to_numpy()
        same = (self.tokens["top1_ref"] == self.tokens["top1_alt"]).to_numpy()
        return Column.of(*where, self.tokens["kl"].to_numpy()), Column.of(*where, same)

    def estimates(self, confidence: float = BOOTSTRAP.confidence) -> tuple[Estimate, Estimate]:
        """Of the KL divergence and of the top-1 agreement."""
        kl, top1 = self.columns
        bootstrap = replace(BOOTSTRAP, confidence=confidence)
        return bootstrap.divergence(kl), bootstrap.rate(top1)

    @property
    def witnessed_kl(self) -> float | None:
        """KL from the witness's logits to those of the last window, nats per token."""
        return self.witnessed.alternative_kl if isinstance(self.witnessed, Testimony) else self.witnessed


@dataclass(frozen=True)
class FirstLook:
    """A look at the first windows of a plan, which may make the others needless.

    Parameters
    ----------
    windows : int
        How many; rounding is measured on these alone.
    enough : callable
        Whether what was found on them, in the order of the codecs and mechanisms, settles it.
    """

    windows: int
    enough: Callable[[list[Scored]], bool]


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


def rounding(dtype: str, protocol: str = "snapshot") -> NamedCodec:
    """What rounding K and V to bfloat16 costs, as a subject."""
    stream = IdentityStream() if dtype == "bfloat16" else CastStream()
    return NamedCodec(ROUNDING, Recipe(k=stream, v=stream), protocol=protocol)


def score(
    engine: Engine,
    windows: np.ndarray,
    context: int,
    codecs: Sequence[NamedCodec],
    plain: Callable[[], PlainModel] | None = None,
    mechanisms: Sequence[Variant] = (),
    title: str = "measure",
    heard: dict[tuple[str, str], float] | None = None,
    look: FirstLook | None = None,
) -> list[Scored]:
    """Measure codecs, then mechanisms, on windows; each window's clean pass is made once for all of them.

    Parameters
    ----------
    engine : Engine
        Running; it is not closed.
    windows : numpy.ndarray of int, shape (windows, context + scored)
    context : int
        Tokens whose K and V are coded; the others are scored, but for the first (see `corpus.TokenWindows.labels`).
    codecs : sequence of NamedCodec
    plain : callable or None
        Gives the model by which a witness computes the last window again, of one codec of each family and of every
        mechanism; None for no witness.
    mechanisms : sequence of Variant
        See `mechanism.mechanism_variant`.
    title : str
        Of the progress bar.
    heard : dict of (protocol, placement) to float, optional
        Ways on which one bit moved this engine's logits in earlier calls, with its KL, of K or of V, whichever is less,
        in nats per token; those of this call are added.
    look : FirstLook, optional
        After which the other windows may be left out. The witness's window is then the last of that look.

    Raises
    ------
    CodecNotActive
        A one-bit codec does not move the logits, a codec fired less often than it should have, or a mechanism is not
        at work.
    Fault
        A mechanism that keeps and reads everything moves the logits.
    WitnessDisagrees
        The witness comes to something else.
    """
    coded = [codec_variant(one, engine, len(windows)) for one in codecs]
    heard = {} if heard is None else heard
    ways = sorted({(one.cell.protocol, one.cell.placement) for one in coded} - heard.keys())
    again = [*chosen(one for one in coded if one.name != ROUNDING), *mechanisms]  # rounding is the engine's own
    first = look.windows if look else len(windows)
    subjects = [
        VariantSubject(one, first - 1, plain if one in again else None, first if one.name == ROUNDING else len(windows))
        for one in (*coded, *mechanisms)
    ]

    def begun(number: int) -> WindowRun:
        return WindowRun(engine, windows[number].tolist(), context, number)

    # before anything is measured, in the window whose tokens differ most: K and V of blank lines are all alike
    varied = most_varied(windows[:first], context)
    probed = {varied: begun(varied)} if ways else {}
    for way in ways:
        heard[way] = min(heard_kl(probed[varied], *way, stream) for stream in STREAMS)

    def found() -> list[Scored]:
        return [one.scored(engine.info, context, windows.shape[1]) for one in subjects]

    def visit(number: int) -> WindowRun:
        return probed.pop(number, None) or begun(number)

    for number, _ in walk(range(len(windows)), subjects, visit, title=title):
        if look and number + 1 == first and look.enough(found()):
            break
    return found()


def most_varied(windows: np.ndarray, context: int) -> int:
    """The window whose coded tokens are of most kinds, int [windows, tokens]."""
    return int(np.argmax([np.unique(row[:context]).size for row in windows]))


@dataclass(eq=False)
class VariantSubject:
    """A variant on every window, as the measuring loop scores it (`loop.Subject`).

    Parameters
    ----------
    last : int
        The window that a witness computes again.
    plain : callable or None
        Gives the witness's model; None where nothing is computed again.
    most : int
        Of the windows, the first so many are measured.
    """

    variant: Variant
    last: int
    plain: Callable[[], PlainModel] | None
    most: int
    _tables: list[pl.DataFrame] = field(default_factory=list)
    _notes: list[dict] = field(default_factory=list)
    _witnessed: Testimony | float | None = None

    def due(self, window: int) -> bool:
        """On the first `most` windows."""
        return window < self.most

    def score(self, run: WindowRun) -> None:
        """See `loop.Subject`; what is found is kept here."""
        if run.number == 0:
            self.variant.canary(run)
        outcome = self.variant.measure(run)
        rows = run.rows(self.variant.name, outcome.logits, outcome.reference)
        self._tables.append(rows)
        self._notes.append(outcome.note)
        if self.plain and run.number == self.last:
            self._witnessed = self.variant.compute_again(self.plain(), run, outcome, rows)

    def scored(self, info: ModelInfo, context: int, tokens: int) -> Scored:
        """What was found on all windows of so many tokens."""
        tallies = [note["tally"] for note in self._notes if "tally" in note]
        seconds = tuple(one["encode_seconds"] + one["decode_seconds"] for one in tallies)
        cost = self.variant.cost(self._notes, info, context, tokens)
        return Scored(self.variant, pl.concat(self._tables), cost, self._witnessed, seconds)


def codec_variant(codec: NamedCodec, engine: Engine, windows: int = 1) -> CodecVariant:
    """A codec on a running engine, on so many windows."""
    origin = codec.calibrated.origin if codec.calibrated else engine.name
    some = {"layers": codec.layers} if codec.layers is not None else {}
    where = {"origin": origin, "windows": windows, "span": SPAN_OF[codec.protocol]}
    cell = cell_of_all_layers(codec.label, engine, codec.protocol, codec.recipe, **where, **some)
    return CodecVariant(RoundingCoder(cell, None) if codec.label == ROUNDING else coder_of(cell, codec.calibrated))
