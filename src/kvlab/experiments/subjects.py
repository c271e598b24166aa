"""Mechanisms at work: the engines that they run on, their codecs, and what is found of each, item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import polars as pl
import torch

from kvlab.calibration.load import Calibrated
from kvlab.codec.base import Site
from kvlab.engines.base import Engine
from kvlab.engines.capability import check_protocol
from kvlab.engines.registry import start
from kvlab.errors import CapabilityError, ModelError
from kvlab.experiments.coding import Coded, Coder, now
from kvlab.experiments.items import Item
from kvlab.experiments.plans.mechanism_records import SCORES, Missing
from kvlab.experiments.plans.mechanisms import FIDELITY, METRICS, Variant, variants
from kvlab.experiments.scoring import WindowRun
from kvlab.model import ModelInfo
from kvlab.params import Params


@dataclass
class Running:
    """The engine as it is, beside it one of each further cache dtype, and what they cannot run."""

    plain: Engine
    others: dict[str, Engine]
    variants: list[Variant]
    missing: list[Missing]

    @classmethod
    def start(cls, params: Params, engine: str, info: ModelInfo, longest: int) -> Running:
        """Load what the variants need; an engine that cannot have a cache dtype is noted, not an error."""
        check_protocol(engine, params.mechanisms.protocol)
        found = cls(start(engine, info, params.mechanisms.dtype, max_tokens=longest), {}, [], [])
        try:
            for variant in variants(params, engine):
                found._add(variant, info, longest)
        except BaseException:  # an interrupt too: whatever it is goes on, behind this
            found.close()
            raise
        return found

    def _add(self, variant: Variant, info: ModelInfo, longest: int) -> None:
        """A variant among those that run, with its engine, or among those that are missing."""
        try:
            if variant.cache_dtype:
                refuse_unread(self.plain.device, variant.cache_dtype)
                name, dtype = self.plain.name, self.plain.dtype
                other = start(name, info, dtype, max_tokens=longest, cache_dtype=variant.cache_dtype)
                self.others[variant.label] = other
                _ = other.storage  # refused now rather than when all is measured
            self.variants.append(variant)
        except (CapabilityError, ModelError) as error:
            names = {"label": variant.label, "mechanism": variant.mechanism, "mechanism_variant": variant.variant}
            self.missing.append(Missing(**names, reason=str(error)))

    def close(self) -> None:
        """Give the memory back."""
        for engine in (*self.others.values(), self.plain):
            engine.close()


def refuse_unread(device: str, cache_dtype: str) -> None:
    """`CapabilityError` on an accelerator, where the pass of a prompt may never read the cache that it fills."""
    if device != "cpu":
        raise CapabilityError(
            f"a cache of {cache_dtype} on {device} is not scored in a prompt's own pass, which may not read what it"
            " stores; measure it by decoding: kvlab eval --cache-dtype"
        )


class Seconds(NamedTuple):
    """What one window took: the pass without judging errors, and of that encoding and decoding."""

    whole: float
    encode: float
    decode: float


class TimedCoder(Coder):
    """A coder that knows what judging its errors took, which no user of a codec waits for."""

    judging_seconds = 0.0

    def _code(self, x: torch.Tensor, site: Site) -> Coded:
        began = now(x)
        coded = super()._code(x, site)
        self.judging_seconds += now(x) - began - coded.encode_seconds - coded.decode_seconds
        return coded


def coding_seconds(coder: TimedCoder | None) -> tuple[float, float, float]:
    """What encoding, decoding and judging took so far."""
    if coder is None:
        return 0.0, 0.0, 0.0
    return coder.tally.encode_seconds, coder.tally.decode_seconds, coder.judging_seconds


@dataclass
class Subject:
    """One variant at work: its engine, its coders by eval, and what was found so far."""

    variant: Variant
    engine: Engine
    calibrated: Calibrated | None
    coders: dict[str, TimedCoder]
    values: dict[str, int]  # K and V elements of the contexts, by eval
    took: list[Seconds] = field(default_factory=list)  # of each scored window
    scores: list[dict] = field(default_factory=list)

    def logits(self, quality_eval_id: str, item: Item, run: WindowRun) -> torch.Tensor:
        """Logits of one item, timed where it is a window of text."""
        coder = self.coders.get(quality_eval_id)
        before, began = coding_seconds(coder), now(run.reference)
        logits = self._logits(item, run, coder)
        whole, after = now(logits) - began, coding_seconds(coder)
        encode, decode, judging = (b - a for a, b in zip(before, after, strict=True))
        if quality_eval_id == FIDELITY:
            self.took.append(Seconds(whole - judging, encode, decode))
        return logits

    def keep(self, quality_eval_id: str, item: Item, found: dict[str, float], untouched: dict[str, float]) -> None:
        """Note what an item gave, and what the engine as it is gives on it."""
        self.values[quality_eval_id] += item.context * self.engine.info.values_per_token
        for metric in METRICS[quality_eval_id]:
            key = {"label": self.variant.label, "quality_eval_id": quality_eval_id, "metric": metric}
            self.scores.append(key | {"item": item.number, "variant": found[metric], "baseline": untouched[metric]})

    def median_of(self, what: str) -> float:
        """Median seconds of a scored window's pass, or of its encoding or decoding."""
        return median(getattr(took, what) for took in self.took)

    def warm_up(self, item: Item, run: WindowRun) -> None:
        """Score an item for nothing: first calls load kernels and fill tables, which no request pays for."""
        cell = self.variant.cell
        self._logits(item, run, Coder(cell, self.calibrated) if cell else None)

    def _logits(self, item: Item, run: WindowRun, coder: Coder | None) -> torch.Tensor:
        if coder:
            return run.logits(coder.cell, coder)
        return self.engine.score(item.ids, item.context)

    def table(self) -> pl.DataFrame:
        """What was found, as `SCORES`."""
        return pl.DataFrame(self.scores, schema=SCORES)

    def mean(self, metric: str) -> float:
        """Mean of a metric over its items."""
        listed = [score["variant"] for score in self.scores if score["metric"] == metric]
        return sum(listed) / len(listed)


def subject_of(
    variant: Variant, running: Running, calibrated: dict[str, Calibrated], items: dict[str, Sequence[Item]]
) -> Subject:
    """A variant with its engine, and a coder for each eval, which expects that eval's number of items."""
    engine, cell = running.others.get(variant.label, running.plain), variant.cell
    fitted = calibrated.get(cell.origin) if cell else None
    coders = {
        quality_eval_id: TimedCoder(cell.model_copy(update={"windows": len(listed)}), fitted)
        for quality_eval_id, listed in items.items()
        if cell
    }
    return Subject(variant, engine, fitted, coders, dict.fromkeys(items, 0))
