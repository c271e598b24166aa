"""What `kvlab recommend` and `kvlab check` found, as values that people and programs are told of. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvlab.advice.choice import Setting
from kvlab.advice.serving import ServingEngine
from kvlab.advice.verdicts import Verdict
from kvlab.gate.catalogue.rows import ROWS
from kvlab.measure import quick_run
from kvlab.stats.bootstrap import Estimate

QUANTILES = {"median": 0.5, "99 %": 0.99, "99.9 %": 0.999}
CONFIDENCE = (0.0, 0.5, 0.9, 1.0)
"""Ends of the classes of the reference's highest probability by which a KL is divided."""


@dataclass(frozen=True)
class SettingCost:
    """What a setting cost on some windows.

    Parameters
    ----------
    kl, top1 : Estimate
        Nats per token, and the share of tokens whose most probable successor stays the same.
    quantiles : dict of str to float
        Of the KL of tokens.
    by_confidence : dict of str to float
        Mean KL of tokens by the highest probability that the model gives without a format.
    windows : int
    scored : Scored
        What all of this is of.
    """

    kl: Estimate
    top1: Estimate
    quantiles: dict[str, float]
    by_confidence: dict[str, float]
    windows: int
    scored: quick_run.Scored

    @classmethod
    def of(cls, scored: quick_run.Scored) -> SettingCost:
        """Of the scores of all tokens."""
        kl, sure = (scored.tokens[name].to_numpy() for name in ("kl", "p_ref_max"))
        split = {f"{low:g} to {high:g}": kl[(low <= sure) & (sure <= high)] for low, high in pairwise(CONFIDENCE)}
        return cls(
            *scored.estimates(),
            {name: float(np.quantile(kl, share)) for name, share in QUANTILES.items()},
            {name: float(part.mean()) for name, part in split.items() if part.size},
            scored.tokens["window"].n_unique(),
            scored,
        )

    def at(self, confidence: float) -> SettingCost:
        """The same with intervals of another confidence."""
        kl, top1 = self.scored.estimates(confidence)
        return replace(self, kl=kl, top1=top1)

    def data(self) -> dict:
        """For programs."""
        told = {name: value for name, value in vars(self).items() if name != "scored"}
        return told | {"kl": self.kl.to_json(), "top1": self.top1.to_json()}


@dataclass(frozen=True)
class SettingRow:
    """A setting of a table, on the windows that choose.

    Parameters
    ----------
    setting : Setting
    engines : tuple of str
        That have it.
    found : SettingCost
    verdict : Verdict
    bytes : float
        Of the cache of as many tokens as the memory is told of.
    """

    setting: Setting
    engines: tuple[str, ...]
    found: SettingCost
    verdict: Verdict
    bytes: float

    def data(self) -> dict:
        """For programs."""
        return {
            **self.setting.data(),
            "engines": list(self.engines),
            "bytes": self.bytes,
            **self.found.data(),
            "verdict": self.verdict.word,
            "possible": list(self.verdict.possible),
        }


@dataclass(frozen=True)
class EngineLine:
    """What to type for an engine.

    Parameters
    ----------
    engine : ServingEngine
    setting : Setting or None
        The one that is taken; None where none is what was asked for.
    confirmed : SettingCost or None
        Measured as the engine reads it, on the windows that chose nothing.
    holds : str
        Whether that is what was asked for: yes, no, or cannot tell.
    nearest : Setting or None
        Where none is taken, the one of the least loss.
    refused : dict of str to str
        Formats that cannot run there, each with the reason.
    losses : dict of str to dict of int to float
        Of formats whose layers were coded alone, the KL of each.
    tables : int
        Bytes that the codec holds beside the cache, once a process.
    """

    engine: ServingEngine
    setting: Setting | None
    confirmed: SettingCost | None
    holds: str
    nearest: Setting | None
    refused: dict[str, str]
    losses: dict[str, dict[int, float]]
    tables: int = 0

    def paste(self, facts: dict) -> str:
        """What to type, by `Advice.facts`."""
        taken = (self.setting.format, self.setting.exact) if self.setting else (None,)
        return self.engine.told(facts["model"], *taken, fitted=facts["fitted"])

    @property
    def held(self) -> str:
        """What the format was held against."""
        return (self.setting and self.setting.format.held) or self.engine.held

    @property
    def unmeasured(self) -> str:
        """What of it no measurement here has seen."""
        return (self.setting and self.setting.format.unmeasured) or self.engine.unmeasured

    def data(self, facts: dict) -> dict:
        """For programs."""
        return {
            "engine": self.engine.name,
            "version": self.engine.version,
            "chosen": self.setting and self.setting.data(),
            "paste": self.paste(facts),
            "confirmed": self.confirmed and self.confirmed.data(),
            "holds": self.holds,
            "nearest": self.nearest and self.nearest.name,
            "refused": self.refused,
            "losses": self.losses,
            "formats_held_against": self.held,
            "not_measured": self.unmeasured,
            "table_bytes": self.tables,
            "sources": list(self.engine.sources),
        }


@dataclass(frozen=True)
class Advice:
    """Everything that was found.

    Parameters
    ----------
    facts : dict
        Of what, on what, with what.
    about : tuple of str
        The same in lines for people.
    floor : SettingCost
        What rounding K and V to bfloat16 costs.
    finished : tuple of SettingRow
        Every format over a finished cache.
    served : tuple of SettingRow
        Candidates, as their engines read them.
    lines : tuple of EngineLine
    gate_rows : tuple of dict
        What was confirmed, or checked, as rows of the gate.
    """

    facts: dict
    about: tuple[str, ...]
    floor: SettingCost
    finished: tuple[SettingRow, ...]
    served: tuple[SettingRow, ...] = ()
    lines: tuple[EngineLine, ...] = ()
    gate_rows: tuple[dict, ...] = ()

    def data(self) -> dict:
        """For programs."""
        return self.facts | {
            "floor": self.floor.data(),
            "finished": [row.data() for row in self.finished],
            "served": [row.data() for row in self.served],
            "lines": [line.data(self.facts) for line in self.lines],
            ROWS: list(self.gate_rows),
        }
