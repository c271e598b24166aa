"""Two runs over the same tokens that do not agree to the bit: rounding, or a bug at the seam.

Attention that sums the same numbers in another order rounds otherwise, and where two tokens are as good as tied the
other one may come out. That is no bug, and it is the excuse of every bug. What tells them apart is known beforehand:
the lead that the reference run's token had, against how far such rounding moves logits at all. The latter has to be
measured on other runs than those that are judged, for of a run's own largest difference every flip is within reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.core.errors import Fault
from kvlab_pipeline.studies.placement.record import Margins, RunVerdict

FACTOR = 4.0  # times the noise that was seen: two runs may each be off by it, and it was seen a few times only
EDGES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of leads, in logits


def judge(reference: Tensor, other: Tensor, limit: float, fixed: int) -> RunVerdict:
    """What to call the difference of two runs.

    A ``seam bug`` is a flip of a token that led by more than the limit, or a logit that is off by more than the limit
    at all; a ``near tie`` is any other flip.

    Parameters
    ----------
    reference, other : Tensor
        Logits [rows, vocab] after the same tokens.
    limit : float
        How far rounding moves logits, with a margin.
    fixed : int
        The first rows, which are after given tokens in both runs. The others were decoded: from the first flip on
        they are after other tokens, and are not compared.

    Raises
    ------
    Fault
        When the runs have not as many rows, or there are none.
    """
    if reference.shape != other.shape or not len(reference):
        raise Fault(
            f"{list(reference.shape)} logits cannot be held against {list(other.shape)}", code="fault.other-shape"
        )
    flipped = flips(reference, other)
    end = comparable(flipped, fixed)
    moved = float((reference[:end].double() - other[:end].double()).abs().max())
    where = flipped[:end].nonzero()[:, 0].tolist()
    margins = [float(lead) for lead in leads(reference[where])] if where else []
    bug = moved > limit or any(margin > limit for margin in margins)
    return RunVerdict(
        kind="seam bug" if bug else "near tie" if where else "same",
        flips=len(where),
        first=where[0] if where else None,
        margin=margins[0] if where else None,
        widest=max(margins, default=None),
        largest=moved,
    )


def flips(reference: Tensor, other: Tensor) -> Tensor:
    """bool [rows]: where the most likely token is another one."""
    return reference.argmax(-1) != other.argmax(-1)


def comparable(flipped: Tensor, fixed: int) -> int:
    """Rows after the same tokens: the fixed ones, and decoded ones up to the first flip, which is one of them."""
    free = flipped[fixed:].nonzero()[:, 0].tolist()
    return fixed + free[0] + 1 if free else len(flipped)


def leads(logits: Tensor) -> Tensor:
    """By how much the most likely token leads the next one, float64 [rows]."""
    top = logits.double().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


class Binned:
    """Compared rows and their flips, by the lead of the reference run.

    Parameters
    ----------
    edges : sequence of float
        Ascending from 0.
    """

    def __init__(self, edges: Sequence[float] = EDGES):
        self.edges = edges
        self.rows = torch.zeros(len(edges), dtype=torch.int64)
        self.flips = torch.zeros(len(edges), dtype=torch.int64)

    def add(self, reference: Tensor, other: Tensor, fixed: int) -> None:
        """Count one run."""
        flipped = flips(reference, other)
        end = comparable(flipped, fixed)
        place = torch.bucketize(leads(reference[:end]), torch.tensor(self.edges, dtype=torch.float64), right=True) - 1
        self.rows += torch.bincount(place, minlength=len(self.edges))
        self.flips += torch.bincount(place[flipped[:end]], minlength=len(self.edges))

    def margins(self) -> Iterable[Margins]:
        """All bins, the last one open."""
        for (low, high), rows, flipped in zip(
            pairwise([*self.edges, None]), self.rows.tolist(), self.flips.tolist(), strict=True
        ):
            yield Margins(low=low, high=high, rows=rows, flips=flipped)
