"""K and V stored as they are against every codec: bytes, times, and what the next tokens make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import needed_files
from kvlab.codecs.catalogue import has_bits
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError
from kvlab.core.params import Params
from kvlab.core.recipe import WHOLE, Recipe
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot.payload import ChunkCoder, RawChunks, recipe_coder
from kvlab.measure.loop import walk
from kvlab.measure.windows import Window, windows_of
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.divergences import token_record
from kvlab.text import corpus
from kvlab_pipeline.studies.restore.prompts import pool_of, timed_save
from kvlab_pipeline.studies.restore.record import RestoreSettings, StorageResult, Unstored
from kvlab_pipeline.studies.restore.speed import timed

RAW = "as they are"


@dataclass
class StorageWay:
    """One way to store K and V, and what was found of it, window by window."""

    label: str
    coder: ChunkCoder
    payload_bytes: int = 0
    save_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    found: list[dict[str, Tensor]] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe | None:
        """What is done to K and V; None where nothing is."""
        return self.coder.codec.recipe if self.coder.codec else None

    def due(self, _window: Window) -> bool:
        """See `loop.Subject`: every window is stored every way."""
        return True

    def score(self, here: WindowContext) -> None:
        """See `loop.Subject`: store the context this way, go on from it, and compare with the first way's words."""
        heard = heard_from(self, here)
        here.golden = here.golden or heard
        labels = torch.tensor(here.row[here.whole + 1 :])
        self.found.append(token_record(here.golden.logits, heard.logits, labels))
        self.greedy.append(common(here.golden.tokens, heard.tokens))


@dataclass(frozen=True)
class Next:
    """What a restored run says of the tokens after the context: teacher-forced, and by itself."""

    logits: Tensor
    tokens: tuple[int, ...]


@dataclass
class WindowContext:
    """A window whose context is in a paged cache, to be stored.

    Attributes
    ----------
    row : list of int
        The window's tokens, of which the first `whole` are in the cache.
    golden : Next or None
        What the first way, K and V as they are, says next.
    """

    run: PagedRun
    row: list[int]
    whole: int
    config: PagerConfig
    path: Path
    decode: int
    golden: Next | None = None

    @classmethod
    def prefilled(
        cls, model: PagedModel, row: list[int], whole: int, config: PagerConfig, folder: Path, number: int, decode: int
    ) -> WindowContext:
        """The cache of one window's context."""
        run = PagedRun(model, config)
        run.extend(row[:whole])
        return cls(run, row, whole, config, folder / f"window-{number}", decode)


def stored(
    params: Params,
    model: PagedModel,
    windows: corpus.TokenWindows,
    calibrated: Calibrated | None,
    settings: RestoreSettings,
    folder: Path,
) -> tuple[list[StorageResult], list[Unstored]]:
    """Every way over the same windows, each against the restore from K and V as they are."""
    size, context = settings.codec_chunk_tokens, windows.context
    config = pool_of(size, windows.test.shape[1] + settings.decode)
    chosen, missing = ways(params, model, calibrated, settings, windows.test.shape[1])
    whole = model.geometry(size).floor(context)
    scored = windows_of(windows, "test")[: settings.windows]

    def visit(window: Window) -> WindowContext:
        return WindowContext.prefilled(model, list(window.ids), whole, config, folder, window.number, settings.decode)

    for _ in walk(scored, chosen, visit, title="coded"):
        pass
    bootstrap = Bootstrap(**params.stats.model_dump())
    tokens = whole * min(settings.windows, len(windows.test))
    return [summary(way, model, tokens, settings, bootstrap) for way in chosen], missing


def ways(
    params: Params, model: PagedModel, calibrated: Calibrated | None, settings: RestoreSettings, tokens: int
) -> tuple[list[StorageWay], list[Unstored]]:
    """K and V as they are, then every codec that is asked for, and those that cannot be had here."""
    geometry, turns = model.geometry(settings.codec_chunk_tokens), model.turns(tokens)
    found, missing = [StorageWay(RAW, RawChunks(geometry))], []
    for codec, bits in choices(settings):
        # As on the ladder, or by a codec of whole caches.
        recipe = named_recipe(codec, bits, params=None if codec in WHOLE else params)
        label = codec if bits is None else f"{codec} {bits}"
        if lacking := unfitted(recipe, calibrated):
            missing.append(Unstored(label=label, reason=f"it needs {' and '.join(lacking)} of a calibration"))
            continue
        try:
            found.append(StorageWay(label, recipe_coder(geometry, recipe, calibrated, turns=turns)))
        except CapabilityError as error:
            missing.append(Unstored(label=label, reason=str(error)))
    return found, missing


def unfitted(recipe: Recipe, calibrated: Calibrated | None) -> list[str]:
    """What a recipe reads that was not fitted here, by the names of its files."""
    if recipe.k.codec in WHOLE:
        return [] if calibrated and calibrated.archive else [recipe.k.codec]
    return [] if calibrated else needed_files(recipe)


def choices(settings: RestoreSettings) -> list[tuple[str, int | None]]:
    """Codecs with their bits; None for one that has none to choose."""
    return [(codec, bits) for codec in settings.codecs for bits in (settings.bits if has_bits(codec) else (None,))]


def heard_from(way: StorageWay, here: WindowContext) -> Next:
    """Save a context one way, restore from it, and go on."""
    made = timed_save(here.run, here.path, coder=way.coder)
    way.save_ms.append(made.save_ms)
    way.payload_bytes += made.saved.payload_bytes
    done = restore(
        here.run.model,
        here.row[: here.whole + 1],
        here.path,
        here.config,
        mode="consume",
        coder=way.coder,
        unproven=True,
        decode=here.decode,
    )
    way.load_ms.append(timed(done.report.load_ms))
    tokens = done.run.fork().decode(here.decode).tokens
    rest = done.run.score(here.row[here.whole + 1 :])
    return Next(torch.cat([done.logits[None], rest[:-1]]), tokens)


def common(golden: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first different one."""
    pairs = zip(golden, other, strict=True)
    return next((number for number, (one, two) in enumerate(pairs) if one != two), len(golden))


def summary(
    way: StorageWay, model: PagedModel, tokens: int, settings: RestoreSettings, bootstrap: Bootstrap
) -> StorageResult:
    """What was found of one way, over all windows."""
    kl, same = columns(way)
    return StorageResult(
        label=way.label,
        recipe=way.recipe,
        lossless=way.coder.codec is None or way.coder.codec.lossless,
        payload_bytes=way.payload_bytes,
        tokens=tokens,
        values=tokens * model.info.values_per_token,
        save_ms=tuple(way.save_ms),
        load_ms=tuple(way.load_ms),
        kl=bootstrap.divergence(kl),
        top1_agreement=bootstrap.rate(same),
        greedy=sum(way.greedy) / len(way.greedy),
        decode=settings.decode,
    )


def columns(way: StorageWay) -> Iterator[Column]:
    """KL and agreement of the most likely token, by window."""
    count = way.found[0]["kl"].numel()
    window = np.repeat(np.arange(len(way.found)), count)
    position = np.tile(np.arange(count), len(way.found))
    kl = torch.cat([found["kl"] for found in way.found]).numpy()
    same = torch.cat([found["top1_ref"] == found["top1_alt"] for found in way.found]).double().numpy()
    return (Column.of(window, position, values) for values in (kl, same))
