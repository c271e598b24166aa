"""What `kvlab recommend` runs once its inputs are checked: measure, choose, confirm. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np

from kvlab.advice import choice
from kvlab.advice.choice import LossWish, Setting
from kvlab.advice.serving import ServingEngine
from kvlab.advice.verdicts import answer
from kvlab.cache.hf.codec_tables import resident_bytes
from kvlab.core.errors import CapabilityError, CorpusError
from kvlab.core.model import ModelInfo, resolve_folder
from kvlab.stats.bootstrap import Estimate
from kvlab.trials.advised import Advice, EngineLine, SettingCost
from kvlab.trials.bench import (
    FINISHED,
    FormatBench,
    about,
    facts_of,
    setting_of,
    setting_rows,
    text_windows,
    unable,
)
from kvlab.trials.evidence import gate_rows

FEWEST = 4  # windows: two to choose by, two that confirm


def recommended(
    args: SimpleNamespace, engines: Sequence[ServingEngine], wish: LossWish, text: str, told: Callable[[Advice], None]
) -> Advice:
    """Measure the formats of engines on one half of the windows, choose, and confirm on the other half.

    Parameters
    ----------
    args : SimpleNamespace
        What `kvlab recommend` was asked for, by the names of its parameters.
    engines : sequence of ServingEngine
    wish : LossWish
    text : str
        What is scored.
    told : callable
        Is given what is known once all formats are measured, before lines are.

    Raises
    ------
    CorpusError
        The text has fewer than four windows.
    CapabilityError
        The engines have no format for such a model on such a device.
    """
    info = resolve_folder(args.model)
    windows = _halves(args, info, text)
    shape = args.device, info.n_layers, info.head_dim
    refused = {
        engine.name: {one.name: why for one in engine.formats if (why := engine.refused(one, *shape))}
        for engine in engines
    }
    able = {engine.name: [one for one in engine.formats if one.name not in refused[engine.name]] for engine in engines}
    if not any(able.values()):
        why = next(iter(next(iter(refused.values())).values()))
        raise CapabilityError(f"no format can be taken: {why}", code="capability.no-format")
    bench = FormatBench.started(args, info, windows[0::2], windows[1::2])
    try:
        bench.control(dict.fromkeys([FINISHED, *(engine.as_read for engine in engines)]))
        bench.fit(args, chain.from_iterable(able.values()))
        for name, formats in able.items():
            refused[name] |= {one.name: why for one in formats if (why := unable(one, info, bench.fitted))}
        settings = {
            name: [setting_of(one, bench) for one in formats if one.name not in refused[name]]
            for name, formats in able.items()
        }
        every = choice.unique(chain.from_iterable(settings.values()), info.n_layers)
        floor, finished = bench.with_floor(every.values(), FINISHED)
        facts = facts_of(args, bench)
        rows = setting_rows(bench, settings, finished, floor.kl.value, facts["values"])
        advice = Advice(
            facts, about(args, bench, f"{len(bench.choosing)} choose, {len(bench.confirming)} confirm"), floor, rows
        )
        told(advice)
        lines, served = _lines(bench, engines, settings, wish, floor.kl.value, refused)
        confirmed = [(line.engine, line.setting, line.confirmed) for line in lines if line.setting]
        chosen = {line.engine.name: [*settings[line.engine.name], line.setting] for line in lines}
        return replace(
            advice,
            facts=facts | {"witnessed": bench.testimonies},
            served=setting_rows(bench, chosen, served, floor.kl.value, facts["values"]),
            lines=lines,
            gate_rows=tuple(gate_rows(bench, facts, confirmed)),
        )
    finally:
        bench.engine.close()


def _halves(args: SimpleNamespace, info: ModelInfo, text: str) -> np.ndarray:
    """The windows of the text, of which every second one confirms."""
    windows, length = text_windows(args, info, [text]), args.context + args.eval
    if len(windows) < FEWEST:
        raise CorpusError(
            f"{args.text} has {len(windows)} windows of {length} tokens; at least {FEWEST} are needed, two to choose by"
            " and two that confirm: give a longer text or smaller windows"
        )
    return windows


def _lines(
    bench: FormatBench,
    engines: Sequence[ServingEngine],
    settings: Mapping[str, Sequence[Setting]],
    wish: LossWish,
    floor: float,
    refused: Mapping[str, dict[str, str]],
) -> tuple[tuple[EngineLine, ...], dict[Setting, SettingCost]]:
    """Choose for each engine, look for layers that carry the loss, confirm; and all candidates as they are read."""
    ways, served = {engine.name: engine.as_read for engine in engines}, {}
    kl = {
        name: {one: found.kl for one, found in bench.measure(dict.fromkeys(each, FINISHED)).items()}
        for name, each in settings.items()
    }

    def as_read(open_: Mapping[str, Setting]) -> dict[str, Estimate]:
        """As their engines read them, on the windows that choose."""
        served.update(bench.measure({one: ways[name] for name, one in open_.items()}, title="as engines read them"))
        return {name: served[one].kl for name, one in open_.items()}

    taken = choice.settled(kl, as_read, wish, floor)
    losses = _layers_apart(bench, kl, taken, wish)
    if any(losses.values()):
        taken = choice.settled(kl, as_read, wish, floor)
    sure = {one: ways[name] for name, one in taken.items() if one}
    confirmed = bench.measure(sure, confirming=True, title="confirming")
    lines = []
    for engine in engines:
        one = taken[engine.name]
        found = confirmed.get(one)
        holds = "no" if found is None else "yes" if wish.bits is not None else answer(found.kl, wish.loss, floor)
        near = None if one else choice.nearest(kl[engine.name])
        fitted = bench.read_by(one) if one else None
        tables = resident_bytes(one.format.recipe, fitted, bench.engine.info) if fitted else 0
        lines.append(EngineLine(engine, one, found, holds, near, refused[engine.name], losses[engine.name], tables))
    return tuple(lines), served


def _layers_apart(
    bench: FormatBench,
    kl: Mapping[str, dict[Setting, Estimate]],
    taken: Mapping[str, Setting | None],
    wish: LossWish,
) -> dict[str, dict[str, dict[int, float]]]:
    """Losses by layer of formats that might do with a few layers in 16 bits; such settings are measured into `kl`."""
    close = {name: choice.worth_layers(kl[name], taken[name], wish, bench.layers) for name in kl}
    if not any(close.values()):
        return {name: {} for name in kl}
    losses = bench.losses([*dict.fromkeys(chain.from_iterable(close.values()))])
    for name, formats in close.items():
        sets = [setting_of(one.format, bench, exact) for one in formats for exact in choice.carriers(losses[one])]
        cheaper = [one for one in sets if taken[name] is None or one.bits < taken[name].bits]
        found = bench.measure(dict.fromkeys(cheaper, FINISHED), title="layers apart")
        kl[name].update({one: each.kl for one, each in found.items()})
    return {name: {one.name: losses[one] for one in formats} for name, formats in close.items()}
