"""Faults in what is made of logits: labels, formulas, counts, and the table that is written."""

from __future__ import annotations

import math
from dataclasses import replace

import polars as pl
import torch

from validation.audit.plant import Changes, Plants

PLANTS = Plants()


def columns(change):
    """What plants a change of the columns that two sets of logits make."""

    def apply(changes: Changes) -> None:
        from kvlab.stats.divergences import ReferenceLogits

        def made(compare):
            def planted(self, alternative):
                return change(self, alternative, compare(self, alternative))

            return planted

        changes.around(ReferenceLogits, "compare", made)

    return apply


def _turned(reference, alternative, found):
    p = torch.log_softmax(reference.logits.double(), -1)
    q = torch.log_softmax(alternative.double(), -1)
    return found | {"kl": (q.exp() * (q - p)).sum(-1).cpu()}


def _of_the_best(reference, alternative, found):
    p = torch.log_softmax(reference.logits.double(), -1)
    q = torch.log_softmax(alternative.double(), -1)
    some = p.topk(50, dim=-1).indices
    p, q = p.gather(1, some), q.gather(1, some)
    return found | {"kl": (p.exp() * (p - q)).sum(-1).clamp(min=0).cpu()}


FORMULAS = {
    "KL's direction turned": _turned,
    "KL over the fifty best tokens alone": _of_the_best,
    "KL in bits": lambda r, a, found: found | {"kl": found["kl"] / math.log(2)},
    "KL halved": lambda r, a, found: found | {"kl": found["kl"] / 2},
    "one token's KL times a thousand": lambda r, a, found: (
        found | {"kl": torch.where(torch.arange(len(found["kl"])) == 3, 1000 * found["kl"], found["kl"])}
    ),
    "log loss in bits": lambda r, a, found: found | {"nll_alt": found["nll_alt"] / math.log(2)},
    "log loss of the reference given to the alternative": lambda r, a, found: found | {"nll_alt": found["nll_ref"]},
    "top tokens of the reference given to the alternative": lambda r, a, found: found | {"top1_alt": found["top1_ref"]},
    "largest probability squared": lambda r, a, found: found | {"p_ref_max": found["p_ref_max"] ** 2},
    "labels one too large": lambda r, a, found: found | {"label": found["label"] + 1},
}
for name, change in FORMULAS.items():
    PLANTS.fault(name)(columns(change))


def logits(change):
    """What plants a change of a cell's logits beside the window's own."""

    def apply(changes: Changes) -> None:
        from kvlab.measure.scoring import WindowRun

        def made(score):
            def planted(self, cell, coder, *rest):
                return change(self, cell, score(self, cell, coder, *rest))

            return planted

        changes.around(WindowRun, "logits", made)

    return apply


PLANTS.fault("logits half way to the reference")(logits(lambda run, cell, x: (x + run.reference_of(cell)) / 2))
PLANTS.fault("alternative logits one place late")(logits(lambda run, cell, x: x.roll(1, dims=0)))
PLANTS.fault("reference logits written as the alternative")(logits(lambda run, cell, x: run.reference_of(cell)))


@PLANTS.fault("labels one position late")
def _late_labels(changes: Changes) -> None:
    from kvlab.measure.scoring import WindowRun

    late = property(lambda self: torch.tensor([*self.ids[self.context + 2 :], self.ids[-1]]))
    changes.put(WindowRun, "labels", late)


@PLANTS.fault("positions one too large")
def _late_positions(changes: Changes) -> None:
    from kvlab.measure.scoring import WindowRun

    changes.around(
        WindowRun, "rows", lambda rows: lambda self, *given: rows(self, *given).with_columns(pl.col("position") + 1)
    )


@PLANTS.fault("the rows of two cells exchanged")
def _exchanged(changes: Changes) -> None:
    from kvlab_pipeline.jobs import measure

    def made(table_of):
        def planted(cell_id, window, found):
            held.setdefault(window, []).append(found)
            earlier = held[window][-2] if len(held[window]) > 1 else found
            return table_of(cell_id, window, earlier)

        return planted

    held: dict = {}
    changes.around(measure, "table_of", made)


@PLANTS.fault("KL of every cell written a tenth too small")
def _smaller_table(changes: Changes) -> None:
    from kvlab_pipeline.jobs import measure

    def made(table_of):
        return lambda *given: table_of(*given).with_columns(pl.col("kl") * 0.9)

    changes.around(measure, "table_of", made)


def coded(change):
    """What plants a change of what one round trip is said to have cost."""

    def apply(changes: Changes) -> None:
        from kvlab.measure.coding import Coder

        def made(code):
            return lambda self, x, site: change(code(self, x, site))

        changes.around(Coder, "_code", made)

    return apply


PLANTS.fault("bytes counted by half")(coded(lambda found: replace(found, nbytes=found.nbytes // 2)))
PLANTS.fault("a frame's header not counted")(coded(lambda found: replace(found, nbytes=max(found.nbytes - 24, 0))))


@PLANTS.fault("bytes of K alone")
def _only_k(changes: Changes) -> None:
    from kvlab.measure.coding import Coder

    def made(count):
        def planted(self, found, x, stream):
            count(self, replace(found, nbytes=found.nbytes if stream == "k" else 0), x, stream)

        return planted

    changes.around(Coder, "_count", made)


@PLANTS.fault("a codec that never fires")
def _idle(changes: Changes) -> None:
    from kvlab.measure.coding import Coder

    changes.put(Coder, "codes", lambda self, layer, part: False)


@PLANTS.fault("NaN in one logit")
def _nan(changes: Changes) -> None:
    from kvlab.measure.scoring import WindowRun

    def made(score):
        def planted(self, *given):
            found = score(self, *given).clone()
            found[0, 0] = float("nan")
            return found

        return planted

    changes.around(WindowRun, "logits", made)


@PLANTS.fault("one row of a cell that no witness saw, a tenth too small",
              beyond="one cell of each family is computed again; of the others what is written is what was scored, by "
              "the same code, and a single number of theirs has nothing to be held against")  # fmt: skip
def _one_row(changes: Changes) -> None:
    from kvlab_pipeline.jobs import measure

    def made(table_of):
        def planted(cell_id, window, found):
            table = table_of(cell_id, window, found)
            place = (pl.col("window") == 0) & (pl.arange(pl.len()) == 3)
            return table.with_columns(pl.when(place).then(pl.col("kl") * 0.9).otherwise("kl").alias("kl"))

        return planted

    changes.around(measure, "table_of", made)
