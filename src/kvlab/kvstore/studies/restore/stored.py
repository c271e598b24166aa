"""K and V stored as they are against every codec: bytes, times, and what the next tokens make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab import corpus
from kvlab.calibration.load import Calibrated, needed_files
from kvlab.errors import CapabilityError
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot.payload import ChunkCoder, CodedChunks, RawChunks
from kvlab.kvstore.studies.restore.prompts import pool_of, timed_save
from kvlab.kvstore.studies.restore.record import Settings, Stored, Unstored
from kvlab.kvstore.studies.restore.speed import timed
from kvlab.kvstore.studies.table import Interval
from kvlab.ladder import has_bits, ladder_recipe
from kvlab.params import Params
from kvlab.recipe import Recipe
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.divergences import token_record

RAW = "as they are"


@dataclass
class Way:
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


@dataclass(frozen=True)
class Next:
    """What a restored run says of the tokens behind the context: teacher-forced, and by itself."""

    logits: Tensor
    tokens: tuple[int, ...]


def stored(
    params: Params,
    model: PagedModel,
    windows: corpus.TokenWindows,
    calibrated: Calibrated | None,
    settings: Settings,
    folder: Path,
) -> tuple[list[Stored], list[Unstored]]:
    """Every way over the same windows, each against the restore from K and V as they are."""
    size, context = settings.codec_chunk_tokens, windows.context
    config = pool_of(size, windows.test.shape[1] + settings.decode)
    chosen, missing = ways(params, model, calibrated, settings, windows.test.shape[1])
    whole = model.geometry(size).floor(context)
    rows = windows.test[: settings.windows].tolist()
    for number, row in enumerate(tqdm(rows, desc="coded", unit="window")):
        run = PagedRun(model, config)
        run.extend(row[:whole])
        golden = None
        for way in chosen:
            heard = heard_from(way, run, row, whole, config, folder / f"window-{number}", settings.decode)
            golden = golden or heard
            labels = torch.tensor(row[whole + 1 :])
            way.found.append(token_record(golden.logits, heard.logits, labels))
            way.greedy.append(common(golden.tokens, heard.tokens))
    bootstrap = Bootstrap(**params.stats.model_dump())
    tokens = whole * min(settings.windows, len(windows.test))
    return [summary(way, model, tokens, settings, bootstrap) for way in chosen], missing


def ways(
    params: Params, model: PagedModel, calibrated: Calibrated | None, settings: Settings, tokens: int
) -> tuple[list[Way], list[Unstored]]:
    """K and V as they are, then every codec that is asked for, and those that cannot be had here."""
    geometry, turn = model.geometry(settings.codec_chunk_tokens), model.turn(tokens)
    found, missing = [Way(RAW, RawChunks(geometry))], []
    for codec, bits in choices(settings):
        recipe, label = ladder_recipe(codec, bits, "", params), codec if bits is None else f"{codec} {bits}"
        if calibrated is None and (files := needed_files(recipe)):
            missing.append(Unstored(label=label, reason=f"it needs {' and '.join(files)} of a calibration"))
            continue
        try:
            found.append(Way(label, CodedChunks(geometry, recipe, calibrated, turn=turn)))
        except CapabilityError as error:
            missing.append(Unstored(label=label, reason=str(error)))
    return found, missing


def choices(settings: Settings) -> list[tuple[str, int | None]]:
    """Codecs with their bits; None for one that has none to choose."""
    return [(codec, bits) for codec in settings.codecs for bits in (settings.bits if has_bits(codec) else (None,))]


def heard_from(
    way: Way, run: PagedRun, row: Sequence[int], whole: int, config: PagerConfig, path: Path, decode: int
) -> Next:
    """Save a context one way, restore from it, and go on."""
    made = timed_save(run, path, coder=way.coder)
    way.save_ms.append(made.save_ms)
    way.payload_bytes += made.saved.payload_bytes
    done = restore(
        run.model, row[: whole + 1], path, config, mode="consume", coder=way.coder, unproven=True, decode=decode
    )
    way.load_ms.append(timed(done.report.load_ms))
    tokens = done.run.fork().decode(decode).tokens
    rest = done.run.score(row[whole + 1 :])
    return Next(torch.cat([done.logits[None], rest[:-1]]), tokens)


def common(golden: Sequence[int], other: Sequence[int]) -> int:
    """Tokens in front of the first different one."""
    pairs = zip(golden, other, strict=True)
    return next((number for number, (one, two) in enumerate(pairs) if one != two), len(golden))


def summary(way: Way, model: PagedModel, tokens: int, settings: Settings, bootstrap: Bootstrap) -> Stored:
    """What was found of one way, over all windows."""
    kl, same = columns(way)
    return Stored(
        label=way.label,
        recipe=way.recipe,
        lossless=way.coder.codec is None or way.coder.codec.lossless,
        payload_bytes=way.payload_bytes,
        tokens=tokens,
        values=tokens * model.info.values_per_token,
        save_ms=tuple(way.save_ms),
        load_ms=tuple(way.load_ms),
        kl=Interval.of(bootstrap.mean(kl), lowest=0.0),
        top1_agreement=Interval.of(bootstrap.rate(same), 0.0, 1.0),
        greedy=sum(way.greedy) / len(way.greedy),
        decode=settings.decode,
    )


def columns(way: Way) -> Iterator[Column]:
    """KL and agreement of the most likely token, by window."""
    count = way.found[0]["kl"].numel()
    window = np.repeat(np.arange(len(way.found)), count)
    position = np.tile(np.arange(count), len(way.found))
    kl = torch.cat([found["kl"] for found in way.found]).numpy()
    same = torch.cat([found["top1_ref"] == found["top1_alt"] for found in way.found]).double().numpy()
    return (Column.of(window, position, values) for values in (kl, same))
