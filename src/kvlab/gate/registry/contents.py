"""What a registry holds once it is read: the entries by name, and a digest of them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.core.recipe import digest
from kvlab.gate.registry.entries import Eval, Mechanism


@dataclass(frozen=True)
class Registry:
    """All mechanisms by (mechanism, variant) and all evals by id."""

    mechanisms: Mapping[tuple[str, str], Mechanism]
    evals: Mapping[str, Eval]

    @property
    def digest(self) -> str:
        """Version of the content; the order of the entries does not matter."""
        mechanisms = [self.mechanisms[key].model_dump(mode="json") for key in sorted(self.mechanisms)]
        evals = [self.evals[key].model_dump(mode="json") for key in sorted(self.evals)]
        return digest({"mechanisms": mechanisms, "evals": evals})

    def mechanism(self, name: str, variant: str | None) -> Mechanism | None:
        """The entry of a pair, or None when it is not registered; no variant is the variant ``none``."""
        return self.mechanisms.get((name, variant or "none"))

    def eval(self, quality_eval_id: str | None) -> Eval | None:
        """The entry of an id, or None when it is not registered."""
        return self.evals.get(quality_eval_id)

    def carries(self, quality_eval_id: str, mechanism: Mechanism) -> bool:
        """Whether evidence of that eval may carry a claim of `mechanism`."""
        return quality_eval_id in self.evals and (not mechanism.evals or quality_eval_id in mechanism.evals)

    def describe(self) -> dict[str, list[dict]]:
        """Tables to print: ``mechanisms``, ``evals`` and ``metrics``, flat rows in the order of the files."""
        return {
            "mechanisms": [
                {name: _cell(value) for name, value in entry.model_dump().items()} for entry in self.mechanisms.values()
            ],
            "evals": [_eval_row(entry) for entry in self.evals.values()],
            "metrics": [
                {"quality_eval_id": entry.quality_eval_id} | metric.model_dump()
                for entry in self.evals.values()
                for metric in entry.metrics
            ],
        }


def _eval_row(entry: Eval) -> dict:
    row = {name: _cell(value) for name, value in entry.model_dump(exclude={"metrics", "band"}).items()}
    keys = ", ".join(metric.key for metric in entry.metrics)
    return row | {"band_low": entry.band[0], "band_high": entry.band[1], "metrics": keys}


def _cell(value: object) -> object:
    return ", ".join(value) if isinstance(value, tuple) else value
