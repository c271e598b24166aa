"""Codes contexts of a text with several codecs, and holds bits and errors of each against the limit, in parts.

Errors count in nats, weighed by the attention that their token may expect, as far as that is trusted. The first token
of a text is like no other: it is left out of errors and limit alike, and its bits are counted. Differences of limits
are taken at the codec's own error, so that the parts of a codec's excess sum to it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.calibration.archive import Archive
from kvlab.calibration.fitting import CalibrationText
from kvlab.calibration.load import Calibrated
from kvlab.cli.checked import Named, config_of, info_of, readable_text
from kvlab.codecs.archive import ArchiveStream
from kvlab.codecs.archive.file import ArchiveHeader, load
from kvlab.codecs.archive.model import STREAMS
from kvlab.codecs.archive.moments import Across
from kvlab.codecs.archive.steps import HALF, OCTAVE, exponents, trusted
from kvlab.codecs.base import Site
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import load_tokenizer
from kvlab.core.origin import told_of
from kvlab.core.recipe import WHOLE, Cell, Recipe
from kvlab.core.records import sha256, versions
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import CleanCapture, Coder
from kvlab.text.excerpts import refuse_overlap, windows_of
from validation.limit import sources
from validation.limit.bound import CENTRES, Bound, Scalar, counts


@dataclass
class ErrorTally:
    """What a codec took and lost so far: bytes, and squared errors in nats, weighed by attention."""

    coder: Coder
    error: float = 0.0

    def code(self, archive: Archive, clean: CleanCapture, ids: list[int], number: int, weights: Tensor) -> None:
        """Code a window's cache; `weights` are those of its tokens but the first [layers, tokens - 1]."""
        self.coder.begin(clean, ids, number)
        for (layer, stream), x in clean.kept.items():
            off = self.coder.snapshot(x, Site(number, layer, stream)).float() - x.float()
            rows = off[:, 1:].transpose(0, 1).flatten(1)
            forward = archive.fitted.streams[layer, stream].forward
            nats = torch.bmm(rows.unflatten(1, (len(forward), -1)).transpose(0, 1), forward).square().sum((0, 2))
            self.error += float((nats.double() * weights[layer]).sum())


@dataclass
class ScoredText:
    """What is known of the scored text, whatever codes it.

    Parameters
    ----------
    moments : list of Across
        By layer, of all tokens but the first.
    weights : list of Tensor
        Of each window, what errors at tokens but the first count (`steps.trusted`), over the mean [layers, tokens - 1].
    exponents : list of Tensor
        Of each window, of the same tokens, as `archive` chooses them.
    """

    moments: list[Across]
    weights: list[Tensor] = field(default_factory=list)
    exponents: list[Tensor] = field(default_factory=list)

    def see(self, archive: Archive, clean: CleanCapture) -> Tensor:
        """Fold in a window; its weights."""
        layers = len(self.moments)
        rows = {place: x[:, 1:].transpose(0, 1).flatten(1) for place, x in clean.kept.items()}
        for layer, moments in enumerate(self.moments):
            below = [(layer - 1, s) for s in STREAMS] if layer else []
            moments.update([rows[place] for place in (*below, (layer, "k"), (layer, "v"))])
        expected = archive.expected({layer: clean.kept[layer, "k"] for layer in range(layers)})
        weights = torch.exp2(trusted(expected)[:, 1:])
        self.weights.append(weights / weights.mean(1, keepdim=True))
        self.exponents.append(exponents(expected)[:, 1:])
        return self.weights[-1]

    def of_layer(self, layer: int, stored: list[Tensor]) -> np.ndarray:
        """What `stored` holds of a layer, of the tokens of all windows."""
        return torch.cat([one[layer] for one in stored]).numpy()


class Limits:
    """The limits of a scored text: with and without prediction, with and without weights.

    Parameters
    ----------
    archive : Archive
        Says the metric, and the order in which layers are predicted.
    scored : Scored
    """

    def __init__(self, archive: Archive, scored: ScoredText):
        self.model, self.scored = archive.fitted, scored
        self.scalar = Scalar()
        plain = sources.without_prediction(self.model, scored.moments)
        self.left = sources.predicted(self.model, scored.moments)
        self.plain = self._bound(plain, weighed=False)
        self.weighed = self._bound(plain, weighed=True)
        self.full = self._bound(self.left, weighed=True)

    def _bound(self, found: sources.ComponentVariances, weighed: bool) -> Bound:
        total = 0
        for layer in range(self.model.layers):
            weights = self.scored.of_layer(layer, self.scored.weights) if weighed else None
            variances = np.concatenate([found.variances[layer, s].numpy() for s in STREAMS])
            total = total + counts(variances, weights)
        return Bound(total)

    # ------------------------------------------------------------------------------ the parts of an excess

    def parts_of_fixed(self, real: float, nominal: float, error: float) -> dict[str, float]:
        """Those of a codec that spends as many bits on every token, and predicts nothing."""
        plain, weighed, full = (bound.rate(error) for bound in (self.plain, self.weighed, self.full))
        return {
            "metadata": real - nominal,
            "cells and fit": nominal - plain,
            "attention": plain - weighed,
            "prediction": weighed - full,
        }

    def parts_of_archive(self, real: float, nominal: float, error: float, quality: int) -> dict[str, float]:
        """Those of `archive` at a quality; `nominal` are the bits of what its entropy coder wrote."""
        chosen = self._chosen(self.left, quality)
        noise = self._noise(quality)
        loop = self._chosen(sources.predicted(self.model, self.scored.moments, noise), quality)
        ideal = self._ideal(chosen[0])
        over_ideal, over_chosen, over_loop = (bits - self.full.rate(at) for bits, at in (ideal, chosen, loop))
        return {
            "metadata": real - nominal,
            "cells": over_ideal,
            "steps of tokens": over_chosen - over_ideal,
            "noise in the loop": over_loop - over_chosen,
            "fit and shape": nominal - self.full.rate(error) - over_loop,
        }

    def _chosen(self, found: sources.ComponentVariances, quality: int) -> tuple[float, float]:
        """Bits and weighed error of Gaussian sources in the steps that `archive` chooses."""
        bits, error, number = 0.0, 0.0, 0
        for layer in range(self.model.layers):
            chosen = self.scored.of_layer(layer, self.scored.exponents)
            weights = self.scored.of_layer(layer, self.scored.weights)
            logs = np.concatenate([0.5 * np.log2(found.variances[layer, s].numpy()) for s in STREAMS])
            for exponent in np.unique(chosen):
                log_step, own = -(quality + HALF * exponent) / OCTAVE, weights[chosen == exponent]
                cost, off = self.scalar.cost(logs - log_step)
                bits += cost.sum() * len(own)
                error += 4.0**log_step * off.sum() * own.sum()
            number += len(logs) * len(chosen)
        return bits / number, error / number

    def _ideal(self, bits: float) -> tuple[float, float]:
        """The same in steps that go with the root of the weight, at the same bits."""
        counted, low, high = self.full.counted, -60.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            cost, off = self.scalar.cost(CENTRES / 2 - middle)
            low, high = (middle, high) if (counted * cost).sum() / counted.sum() > bits else (low, middle)
        return float((counted * cost).sum() / counted.sum()), float(4.0**middle * (counted * off).sum() / counted.sum())

    def _noise(self, quality: int) -> Callable[[int, Tensor], Tensor]:
        """What decoding leaves in components of a layer, mean over its tokens; see `sources.predicted`."""

        def noise(layer: int, variances: Tensor) -> Tensor:
            chosen, number = np.unique(self.scored.of_layer(layer, self.scored.exponents), return_counts=True)
            logs, total = 0.5 * np.log2(variances.numpy()), np.zeros(len(variances))
            for exponent, count in zip(chosen, number, strict=True):
                log_step = -(quality + HALF * exponent) / OCTAVE
                total += count * 4.0**log_step * self.scalar.cost(logs - log_step)[1]
            return torch.from_numpy(total / number.sum())

        return noise


def measure(folder: Path, text: Path, asked: Sequence[Named], context: int, most: int, calib_windows: int) -> dict:
    """Every codec on contexts of a text: bits, error, the limit at that error, and the parts of the difference."""
    info = info_of(folder)
    whole = readable_text(text, context + 1, config_of(folder))
    windows = windows_of([whole], load_tokenizer(info), context + 1, most, str(text))
    engine = start("hf", info, "float32", max_tokens=context + 1)
    source = CalibrationText.read(info, None, None, context, calib_windows)
    refuse_overlap(windows, source.windows, (str(text), source.name))
    recipes = [*(one.recipe for one in asked), named_recipe("archive", 2)]  # whose metric is that of the limit
    calibrated = source.fit(engine, recipes)
    archive, heads = calibrated.archive, info.n_kv_heads
    tallies: dict[str, ErrorTally] = {}
    scored = ScoredText([Across(heads * info.head_dim, layer > 0) for layer in range(info.n_layers)])
    for number, ids in enumerate(tqdm(windows.tolist(), desc="windows", leave=False)):
        clean = CleanCapture(context)
        engine.score(ids, context, clean)
        if not tallies:
            tallies = {one.label: _tally(one, engine, len(windows), calibrated, clean, ids[:context]) for one in asked}
        weights = scored.see(archive, clean)
        for tally in tallies.values():
            tally.code(archive, clean, ids[:context], number, weights)
    engine.close()
    limits = Limits(archive, scored)
    return {
        "model": {"name": info.path.name, "disclosure": told_of(info.path)},
        "text": text.name,
        "text_hash": sha256(windows.tobytes()),
        "windows": len(windows),
        "context": context,
        "calibration": source.about(engine),
        "versions": versions(),
        "rows": [_row(one, tallies[one.label], limits, info, context, len(windows)) for one in asked],
    }


def _tally(
    one: Named, engine: Engine, windows: int, calibrated: Calibrated, clean: CleanCapture, ids: list
) -> ErrorTally:
    """A codec's. One of whole caches gets the quality that gives the first window its bits: all have the same steps."""
    cell = _cell(one.recipe, engine, windows)
    if one.recipe.k.codec in WHOLE:
        first = coder_of(cell, calibrated, judged=False)
        first.begin(clean, ids, 0)
        stream = ArchiveStream(quality=load(first.stored).header.quality, block_size=one.recipe.k.block_size)
        cell = cell.model_copy(update={"recipe": Recipe(k=stream, v=stream)})
    return ErrorTally(coder_of(cell, calibrated, judged=False))


def _cell(recipe: Recipe, engine: Engine, windows: int) -> Cell:
    return Cell(
        study="cells",
        label="limit",
        engine=engine.name,
        dtype=engine.dtype,
        protocol="snapshot",
        origin=engine.name,
        stream="kv",
        layers=tuple(range(engine.info.n_layers)),
        windows=windows,
        recipe=recipe,
    )


def _row(one: Named, tally: ErrorTally, limits: Limits, info, context: int, windows: int) -> dict:
    """A codec's numbers."""
    coding, recipe = tally.coder.coding(info, context, "float32"), tally.coder.cell.recipe
    values = windows * (context - 1) * info.values_per_token
    error, real = tally.error / values, coding.bits_per_value
    if recipe.k.codec in WHOLE:
        overhead = ArchiveHeader.overhead(info.n_layers, context, recipe.k.block_size)
        nominal = real - 8 * overhead / (context * info.values_per_token)
        parts = limits.parts_of_archive(real, nominal, error, recipe.k.quality)
    else:
        parts = limits.parts_of_fixed(real, one.bits, error)
    return {
        "codec": one.codec,
        "label": one.label,
        "bits": real,
        "error": error,
        "limit": limits.full.rate(error),
        "error_at_limit": limits.full.error(real),
        "parts": parts,
    }
