"""Which layers to favour, by what the calibration split shows; the scored text is never looked at.

Boundary layers are found greedily: at each step the layer is left uncoded whose absence from the codec lowers
KL the most, as long as the whole cache stays inside the budget (backward elimination from all layers coded).
Hot layers are the first of the layers ordered by what coding their K alone costs, as many as serve best at
equal bytes. Of every kind of favour the best one is chosen, whether or not it looks better than none: the
test split is to judge it.

A search is a generator: it yields the arms that it wants judged next, is sent a step for each, and returns its
own steps, the chosen one last. All searches go side by side, so that what they ask for in one round shares the
clean passes and the coded tensors of a single walk over the windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol as Shape

import numpy as np

from kvlab.calibration.load import FittedFiles
from kvlab.codecs.block.studied import coded_layers
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.params import Params
from kvlab.core.recipe import Cell, Recipe
from kvlab.core.records import write_json
from kvlab.measure.subjects import probes_of
from kvlab.measure.windows import windows_of
from kvlab.stats.curve import between
from kvlab_pipeline.jobs.measure import Lab, measured
from kvlab_pipeline.jobs.plan import CHOSEN, studies
from kvlab_pipeline.studies.mitigations import plan
from kvlab_pipeline.studies.mitigations.plan import ChoiceRecord, LayerChoice, Mitigation, Step

PROTOCOL = "snapshot"  # coded tensors do not depend on the layers below, so one coding serves many arms
ROUNDING = 1e-9  # bits per value, far below a byte of any cache
LEAST_KL = 1e-12  # nats per token, far below any codec's: what counts as the logarithm's zero

Asked = tuple[tuple[int, ...], Mitigation]
"""The layers that an arm favours, and the arm."""
Search = Generator[list[Asked], list[Step], list[Step]]


def choose(
    params: Params, windows_path: Path, fitted: dict[str, FittedFiles], out: Path, folder: Path | None = None
) -> None:
    """Search on the engine of ``calibration.origin`` and write the choice with every step that led to it.

    Where no study asks for it, nothing is searched, and the file says so: DVC makes every stage, and the tables of
    the codecs that are tried are fitted for studies alone that are asked for.

    Parameters
    ----------
    folder : Path, optional
        The store of what was measured before, see `Lab.open`.

    Raises
    ------
    CodecNotActive
        A one-bit codec leaves the logits alone.
    """
    if CHOSEN not in studies(params):
        write_json(out, {"asked": False})
        return
    with Lab.open(params, windows_path, fitted, folder) as lab:
        judge = Judge(lab)
        searches = search(params, judge)
        record = ChoiceRecord(
            provenance=lab.provenance(lab.calibrated),
            engine=params.calibration.origin,
            dtype=params.gap.dtype,
            protocol=PROTOCOL,
            windows=len(lab.windows.calib),
            budget=params.mitigations.budget,
            search_id=plan.search_id(params),
            choice=LayerChoice(**{name: steps[-1].layers for name, steps in searches.items()}),
            searches={name: tuple(steps) for name, steps in searches.items()},
        )
        write_json(out, record.model_dump(mode="json"))


# ------------------------------------------------------------------------------------- judging


class Judging(Shape):
    """Whatever can say what arms cost."""

    def steps(self, asked: list[Asked]) -> list[Step]:
        """A step for each arm, in the order given."""


@dataclass
class Judge:
    """Says what arms cost on the calibration split; each arm is measured once, however often it is asked for."""

    lab: Lab
    known: dict[str, tuple[float, float]] = field(default_factory=dict)

    def steps(self, asked: list[Asked]) -> list[Step]:
        """See `Judging`: mean KL, nats per token, and bits per value of the whole cache."""
        params, count = self.lab.params, len(self.lab.windows.calib)
        cells = [
            plan.cell_of(arm, params, params.calibration.origin, PROTOCOL, count, text="calib") for _, arm in asked
        ]
        new = list({cell.cell_id: cell for cell in cells if cell.cell_id not in self.known}.values())
        if new:
            self._measure(new)
        found = [self.known[cell.cell_id] for cell in cells]
        return [
            Step(layers=layers, kl=kl, bits_per_value=bits)
            for (layers, _), (kl, bits) in zip(asked, found, strict=True)
        ]

    def _measure(self, cells: list[Cell]) -> None:
        lab, subjects = self.lab, [self.lab.subject(cell) for cell in cells]
        windows = windows_of(lab.windows, "calib")
        probes = [] if self.known else probes_of(cells, windows[0])
        findings = measured(lab, windows, [*probes, *subjects], f"{len(cells)} arms")
        for subject in subjects:
            found = [one for _, one in findings[id(subject)]]
            coding = subject.coding([one.note for one in found], lab.info, lab.windows.context)
            kl = sum(float(one.rows["kl"].mean()) for one in found) / len(found)
            self.known[subject.cell.cell_id] = kl, coding.bits_per_value


# ------------------------------------------------------------------------------------ searching


def search(params: Params, judge: Judging) -> dict[str, list[Step]]:
    """Every search's steps, by the field of `LayerChoice` that its last step fills."""
    coded = coded_layers(params)
    configured = tuple(i for i in range(params.model.n_layers) if i not in coded)
    searches = {
        "greedy": boundary(params, ()),
        "extended": boundary(params, configured),
        "hot": hot(params, coded),
        "klt_boundary": klt_boundary(params),
        "klt_hot": klt_hot(params),
    }
    found = together(judge, searches)
    return found | {"moved": found["greedy"][: len(configured) + 1]}  # a step adds one layer


def together(judge: Judging, searches: dict[str, Search]) -> dict[str, list[Step]]:
    """Run searches side by side; what they ask for in one round is judged at once."""
    answers: dict[str, list[Step]] = {}
    asked = {name: next(search) for name, search in searches.items()}
    while asked:
        found = iter(judge.steps([one for arms in asked.values() for one in arms]))
        again = {}
        for name, arms in asked.items():
            try:
                again[name] = searches[name].send(list(islice(found, len(arms))))
            except StopIteration as end:
                answers[name] = end.value
        asked = again
    return {name: answers[name] for name in searches}


def boundary(params: Params, start: tuple[int, ...]) -> Search:
    """Steps of the greedy search from the uncoded layers `start`; the last one is its answer.

    It stops when no layer fits into the budget any more, or none lowers KL. Of equals the lower layer is taken.
    """
    n, budget = params.model.n_layers, params.mitigations.budget
    steps = yield [(start, plan.bounded(params, "start", start))]
    price: dict[int, float] = {}  # bits per value that leaving a layer uncoded adds; they add up
    while len(steps[-1].layers) < n - 1:
        here, left = steps[-1], budget - steps[-1].bits_per_value
        free = [i for i in range(n) if i not in here.layers and price.get(i, 0.0) <= left + ROUNDING]
        if not free:
            break
        wider = [tuple(sorted((*here.layers, i))) for i in free]
        found = yield [(layers, plan.bounded(params, "step", layers)) for layers in wider]
        price = {i: step.bits_per_value - here.bits_per_value for i, step in zip(free, found, strict=True)}
        found = [step for step in found if step.bits_per_value <= budget and step.kl < here.kl]
        if not found:
            break
        steps.append(min(found, key=lambda step: step.kl))
    return steps


def hot(params: Params, coded: tuple[int, ...]) -> Search:
    """The hot layers of the studied codec that gain the most over uniform spending of as many bytes.

    None where K has all the bits that the codec can give it.
    """
    curve = [((), arm) for arm in plan.uniform(params)]
    first, *found = yield [((), plan.hot(params, ())), *curve, *alone(coded, plan.hot(params, ()))]
    curve, order = found[: len(curve)], by_kl(found[len(curve) :])
    choices = [tuple(sorted(order[:n])) for n in range(1, len(order) + 1) if plan.affords_hot(params)]
    found = yield [(layers, plan.hot(params, layers)) for layers in choices]
    return [first, *best_last(found, lambda step: excess(step, curve))]


def klt_boundary(params: Params) -> Search:
    """The layer that `klt` best leaves uncoded at equal bytes; the other layers pay for it."""
    choices = [(i,) for i in range(params.model.n_layers) if plan.klt_affords_boundary(params, 1)]
    first, *found = yield [(layers, plan.klt_bounded(params, layers)) for layers in [(), *choices]]
    return [first, *best_last(paid(found, first), lambda step: step.kl)]


def klt_hot(params: Params) -> Search:
    """The hot layers that serve `klt` best at equal bytes; the other layers pay for them."""
    none, n = plan.klt_hot(params, ()), params.model.n_layers
    first, *found = yield [((), none), *alone(tuple(range(n)), none)]
    order = by_kl(found)
    choices = [tuple(sorted(order[:count])) for count in range(1, n) if plan.klt_affords_hot(params, count)]
    found = yield [(layers, plan.klt_hot(params, layers)) for layers in choices]
    return [first, *best_last(paid(found, first), lambda step: step.kl)]


def alone(layers: tuple[int, ...], uniform: Mitigation) -> list[Asked]:
    """K of one layer at a time, coded as the uniform arm codes it."""
    only_k = Recipe(k=uniform.recipe.k, v=IdentityStream())
    return [((i,), Mitigation(f"only {i}", (i,), only_k)) for i in layers]


def by_kl(alone: list[Step]) -> list[int]:
    """Single layers, the dearest first; of equals the lower one."""
    return [step.layers[0] for step in sorted(alone, key=lambda step: (-step.kl, step.layers))]


def paid(found: list[Step], uniform: Step) -> list[Step]:
    """Those that take as many bytes as uniform spending."""
    return [step for step in found if abs(step.bits_per_value / uniform.bits_per_value - 1) <= plan.EQUAL_BYTES]


def excess(step: Step, curve: list[Step]) -> float:
    """log KL over that of the uniform curve at equal bytes; infinite beyond the curve, where nothing is known.

    KL below `LEAST_KL` counts as that much: an arm of 8 bits may leave the few calibration windows as they are.
    """
    weights = between(np.array([point.bits_per_value for point in curve]), step.bits_per_value)
    if weights is None:
        return math.inf
    own, *points = np.log(np.maximum([step.kl, *(point.kl for point in curve)], LEAST_KL))
    return float(own - weights @ points)


def best_last(found: list[Step], cost: Callable[[Step], float]) -> list[Step]:
    """All steps, the one of the lowest cost last; of equals the first one given."""
    if not found:
        return []
    best = min(found, key=cost)
    return [*(step for step in found if step is not best), best]
