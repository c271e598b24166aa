"""Where bytes are best spent: every arm beside uniform spending of as many bytes, on the test split.

Which layers an arm favours was chosen on the calibration split (`studies.mitigations.search`); nothing is chosen here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from kvlab.core.errors import Fault, MissingResult, MixedIdentity
from kvlab.core.params import Params
from kvlab.core.records import Provenance
from kvlab.stats.bootstrap import Bootstrap, Estimate
from kvlab.stats.curve import between
from kvlab_pipeline.studies.baselines import identity_of
from kvlab_pipeline.studies.checks import describe
from kvlab_pipeline.studies.estimates import sides, windows_to_settle
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.mitigations import plan
from kvlab_pipeline.studies.mitigations.plan import ChoiceRecord, Step
from kvlab_pipeline.studies.tidy import BITS, NATS, RATIO, SHARE, WINDOWS, Compared, Estimand, Level, Several, Single

# Ways to spend bytes beside uniform spending of as many.
PANEL = {"engine": Level(), "protocol": Level(), "arm": Level()}

MITIGATIONS = Single(
    {
        # How the favoured layers were found on the calibration split.
        "choice": Single(
            {
                "engine": Level(),
                "dtype": Level(),
                "protocol": Level(),
                "search_id": Level(),
                "windows": Estimand(WINDOWS),
                "budget": Estimand(BITS, "that uncoded layers were allowed to bring the whole cache to"),
                "searches": Several(
                    {
                        "search": Level(),
                        "step": Level(),
                        "layers": Level("those that are favoured"),
                        "kl": Estimand(NATS),
                        "bits_per_value": Estimand(BITS),
                    }
                ),
            }
        ),
        "arms": Several(
            PANEL
            | {
                "cell_id": Level(),
                "layers": Level("those that are favoured"),
                "bits_per_value": Estimand(BITS),
                "kl": Estimand(NATS),
                "kl_net": Estimand(NATS),
                "delta_nll": Estimand(NATS),
            }
        ),
        "comparisons": Several(
            PANEL
            | {
                "layers": Level("those that are favoured"),
                "against": Level(),
                "beyond": Level("above or below: where the arm takes more or fewer bytes than any uniform spending"),
                "same": Level("whether both are one cell"),
                "bits_per_value": Estimand(BITS),
                "against_bits_per_value": Estimand(BITS),
                "difference": Estimand(NATS),
                "log_ratio": Estimand("logarithm"),
                "ratio": Estimand(RATIO),
                "windows_needed": Estimand(WINDOWS),
                "compared": Compared(),
            }
        ),
        # By how much an arm lowers KL on the split that chose it, and on the test split.
        "generalises": Several({"arm": Level(), "layers": Level(), "calib": Estimand(SHARE), "test": Estimand(SHARE)}),
    }
)

PARTS = {"mitigations": MITIGATIONS}

STUDIED, KLT = ("moved", "greedy", "extended", "hot"), ("klt boundary", "klt hot")
KLT_UNIFORM, CURVE = "klt uniform", "uniform curve"
SPENT = {"recipe", "layers", "exceptions"}  # what arms differ in
ENDS = ("value", "low", "high")


@dataclass(frozen=True, eq=False)
class ArmGroup:
    """The arms of one engine under one protocol, by name."""

    engine: str
    protocol: str
    arms: dict[str, Measured]

    @property
    def curve(self) -> list[Measured]:
        """The points of uniform spending on the studied codec, fewest bytes first."""
        points = [measured for name, measured in self.arms.items() if name.startswith(plan.UNIFORM)]
        return sorted(points, key=bits_of)


@dataclass(frozen=True, eq=False)
class Rival:
    """What an arm is held against: points of measured cells with weights that sum to 1.

    `beyond` is ``"above"`` or ``"below"`` where the arm takes more or fewer bytes than any point of the curve;
    the rival then is the nearest point as it is.
    """

    name: str
    cells: list[Measured]
    weights: np.ndarray
    bits_per_value: float
    beyond: str | None = None


def mitigation_entries(params: Params, results: Results, boot: Bootstrap, choice: ChoiceRecord) -> dict:
    """What was chosen, what every arm costs, how it stands to uniform spending, and how the choice carries over.

    Returns
    -------
    dict
        ``choice``: what was chosen, on what, and the steps of each search (KL on the calibration split).
        ``arms``: KL net of the identity cell's, delta_nll and bytes of every arm, by engine and protocol.
        ``comparisons``: each favouring arm against uniform spending; see `comparison`.
        ``generalises``: each chosen arm's drop in KL on the calibration split and on the test split.

    Raises
    ------
    MixedIdentity
        The choice was made on another model, corpus or calibration than the results.
    StaleResult
        The choice was made under other parameters.
    MissingResult
        An arm was not measured.
    Fault
        Arms of `klt` do not take the same bytes.
    """
    panels = panels_of(params, results, choice)
    return {
        "choice": choice_entry(choice),
        "arms": [row for panel in panels for row in arm_entries(results, boot, panel, choice)],
        "comparisons": [comparison(boot, panel, name, choice) for panel in panels for name in (*STUDIED, *KLT)],
        "generalises": generalisation(params, boot, panels, choice),
    }


# ------------------------------------------------------------------------------------- what there is


def panels_of(params: Params, results: Results, choice: ChoiceRecord) -> list[ArmGroup]:
    """Every engine and protocol with its arms, found by their cells' ids: two arms may be one cell."""
    refuse_foreign(results, choice)
    chosen = plan.current(params, choice)
    cells = {measured.record.cell_id: measured for measured in results.select("mitigations")}
    panels = []
    for engine, protocol in product(params.engines, params.mitigations.protocols):
        arms = {}
        for arm in plan.arms(params, chosen):
            cell = plan.cell_of(arm, params, engine, protocol, params.mitigations.windows)
            if cell.cell_id not in cells:
                raise MissingResult(
                    f"{describe(cell)} is missing; run `kvlab step measure --study mitigations`",
                    code="missing-result.cell",
                )
            arms[arm.name] = cells[cell.cell_id]
        comparable(arms.values(), SPENT)
        panels.append(ArmGroup(engine, protocol, arms))
    return panels


def refuse_foreign(results: Results, choice: ChoiceRecord) -> None:
    """`MixedIdentity` unless the choice was made on the results' model, corpus and calibration."""
    fields = [identity(results.provenance), identity(choice.provenance)]
    shared = {name for name in fields[1] if fields[0].get(name) != fields[1][name]}
    if shared:
        raise MixedIdentity({f"{name} of the choice": [str(found.get(name)) for found in fields] for name in shared})


def identity(provenance: Provenance) -> dict[str, str]:
    """What a choice has to share with the results."""
    calibration = {f"calibration.{origin}": sigma for origin, sigma in provenance.calibration.items()}
    return {"model_hash": provenance.model_hash, "corpus_hash": provenance.corpus_hash} | calibration


def bits_of(measured: Measured) -> float:
    """Bits per value of the whole cache."""
    return measured.record.coding.bits_per_value


# ------------------------------------------------------------------------------------- what is said


def choice_entry(choice: ChoiceRecord) -> dict:
    """What was chosen and how, all of it as the record has it."""
    return {
        "engine": choice.engine,
        "dtype": choice.dtype,
        "protocol": choice.protocol,
        "search_id": choice.search_id,
        "windows": choice.windows,
        "budget": choice.budget,
        "searches": [
            {"search": name, "step": number} | step.model_dump(mode="json")
            for name, steps in choice.searches.items()
            for number, step in enumerate(steps)
        ],
    }


def arm_entries(results: Results, boot: Bootstrap, panel: ArmGroup, choice: ChoiceRecord) -> list[dict]:
    """What each arm costs."""
    rows = []
    for name, measured in panel.arms.items():
        floor = identity_of(results, measured)
        if floor is None:
            raise MissingResult(
                f"{describe(measured.cell)} has no identity cell beside it", code="missing-result.identity"
            )
        kl = measured.column("kl")
        row = {
            "engine": panel.engine,
            "protocol": panel.protocol,
            "arm": name,
            "cell_id": measured.record.cell_id,
            "layers": list(plan.favoured(choice.choice, name)),
            "bits_per_value": bits_of(measured),
            "kl": boot.divergence(kl).to_json(),
            "kl_net": boot.difference(kl, floor.column("kl", measured.cell.windows)).to_json(),
            "delta_nll": boot.mean(measured.column("delta_nll")).to_json(),
        }
        rows.append(row)
    return rows


def rival_of(panel: ArmGroup, name: str) -> Rival:
    """Uniform spending at the bytes of an arm.

    For the studied codec it is read from the curve of uniform arms, linear in log KL over bits per value; the
    bytes fix the weights. Arms of `klt` take the bytes of its uniform arm.

    Raises
    ------
    Fault
        An arm of `klt` does not.
    """
    at, curve = bits_of(panel.arms[name]), panel.curve
    if name in KLT:
        rival = panel.arms[KLT_UNIFORM]
        refuse_unequal(panel.arms[name], rival)
        return Rival(KLT_UNIFORM, [rival], np.ones(1), bits_of(rival))
    weights = between(np.array([bits_of(point) for point in curve]), at)
    if weights is None:
        beyond, nearest = ("above", curve[-1]) if at > bits_of(curve[-1]) else ("below", curve[0])
        label = next(label for label, measured in panel.arms.items() if measured is nearest)
        return Rival(label, [nearest], np.ones(1), bits_of(nearest), beyond)
    used = np.flatnonzero(weights)
    return Rival(CURVE, [curve[i] for i in used], weights[used], at)


def refuse_unequal(arm: Measured, uniform: Measured) -> None:
    """`Fault` when two arms that are to take the same bytes do not."""
    bits = [bits_of(measured) for measured in (arm, uniform)]
    if abs(bits[0] / bits[1] - 1) > plan.EQUAL_BYTES:
        raise Fault(
            f"{describe(arm.cell)} takes {bits[0]:.4g} bits per value where uniform spending takes {bits[1]:.4g};"
            " they may only be compared at equal bytes",
            code="fault.unequal-bytes",
        )


def comparison(boot: Bootstrap, panel: ArmGroup, name: str, choice: ChoiceRecord) -> dict:
    """An arm against uniform spending; `same` says that both are one cell. See `against` for the estimates."""
    arm, rival = panel.arms[name], rival_of(panel, name)
    difference, log_ratio, ratio = against(boot, arm, rival)
    return {
        "engine": panel.engine,
        "protocol": panel.protocol,
        "arm": name,
        "layers": list(plan.favoured(choice.choice, name)),
        "against": rival.name,
        "beyond": rival.beyond,
        "same": [arm.record.cell_id] == [measured.record.cell_id for measured in rival.cells],
        "bits_per_value": bits_of(arm),
        "against_bits_per_value": rival.bits_per_value,
        "difference": difference.to_json(),
        "log_ratio": log_ratio.to_json(),
        "ratio": ratio.to_json(),
        "windows_needed": windows_to_settle(ratio.to_json(), 1.0),
        "compared": sides(arm, rival.cells),
    }


def against(boot: Bootstrap, arm: Measured, rival: Rival) -> tuple[Estimate, Estimate, Estimate]:
    """KL of an arm minus that of its rival (nats per token), the logarithm of their ratio, and their ratio.

    All over the same resamples of the windows; the ratio's interval is the exponential of its logarithm's, whose
    scatter is the more symmetric one. KL is not net of the floor here, because the logarithm of a
    difference is not defined in every resample; the floor that both share draws the ratio towards 1.
    """
    columns = [measured.column("kl") for measured in (arm, *rival.cells)]

    def terms(means: np.ndarray) -> np.ndarray:
        own, other = np.log(means[..., 0]), np.log(means[..., 1:]) @ rival.weights
        return np.stack([np.exp(own) - np.exp(other), own - other], axis=-1)

    difference, log_ratio = boot.combine_many(columns, terms)
    ends = {end: math.exp(getattr(log_ratio, end)) for end in ENDS}
    ratio = replace(log_ratio, **ends)
    return difference, log_ratio, ratio


def generalisation(params: Params, boot: Bootstrap, panels: list[ArmGroup], choice: ChoiceRecord) -> list[dict]:
    """By how much each chosen arm lowers KL on the split that chose it, and on the test split.

    The drop is 1 - KL / KL of the studied recipe (for `klt`: of its uniform arm), on the engine and under the
    protocol that the choice was made with; the bytes are not the same, but they are on both splits. There is
    no test drop where that protocol is not judged. The calibration drop has no interval: its windows chose it.
    """
    here = [p for p in panels if (p.engine, p.protocol) == (choice.engine, choice.protocol)]
    rows = []
    for name in (*STUDIED, *KLT):
        chosen, start = judged_steps(choice, name)
        row = {"arm": name, "layers": list(chosen.layers), "calib": 1 - chosen.kl / start.kl, "test": None}
        if here:
            uniform = KLT_UNIFORM if name in KLT else f"{plan.UNIFORM} {params.bits}/{params.v_bits}"
            columns = [here[0].arms[one].column("kl") for one in (name, uniform)]
            row["test"] = boot.combine(columns, lambda m: 1 - m[..., 0] / m[..., 1]).to_json()
        rows.append(row)
    return rows


def judged_steps(choice: ChoiceRecord, name: str) -> tuple[Step, Step]:
    """What a search chose, and the studied recipe or uniform `klt`, both on the calibration split."""
    search = choice.searches[name.replace(" ", "_")]
    return search[-1], (search if name in KLT else choice.searches["extended"])[0]
