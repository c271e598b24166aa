"""What the store keeps of a claim of the gate: what it was judged against, the tier, the status, the reasons, and how
near the loss is to too much.

A gate judges an evaluation by several metrics, each in a unit of its own. The one that is kept is the one whose loss
uses up most of its margin, counted at the upper end of the loss's interval, because that is what decides.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from kvlab.base.errors import NonFinite, UnknownName
from kvlab.gate.catalogue import TIERS
from kvlab.gate.check import Claim, Report
from kvlab.gate.evidence.quality import Judgement


@dataclass(frozen=True)
class ClaimRecord:
    """A claim as a line of the store; the fields are the columns, in order.

    Parameters
    ----------
    registry_digest : str
        Of the registry that the row was judged against.
    current_digest : str or None
        Of what was said to be current; None where nothing said it.
    earned_tier, derived_status : str or None
        As the gate said; None where it did not judge.
    loss_metric : str or None
        The metric that is nearest to its margin, or farthest beyond; None when no loss was judged.
    loss : float or None
        Its loss against the baseline, worse is positive, in the metric's unit.
    loss_share : float or None
        The upper end of that loss over the margin; within is at most 1.
    reasons : str
        JSON: every reason, in order.
    """

    registry_digest: str
    current_digest: str | None
    earned_tier: str | None
    derived_status: str | None
    loss_metric: str | None
    loss: float | None
    loss_share: float | None
    reasons: str


def recorded(claim: Claim, report: Report) -> ClaimRecord:
    """What the store keeps of a claim of a report.

    Raises
    ------
    UnknownName
        The earned tier is none.
    NonFinite
        A judged loss is NaN or infinite.
    """
    if claim.earned is not None and claim.earned not in TIERS:
        raise UnknownName("earned tier", claim.earned, TIERS)
    reasons = json.dumps([str(reason) for finding in claim.findings for reason in finding.reasons])
    said = report.registry, report.current, claim.earned, claim.status
    judged = [judgement for judgement in claim.judgements if judgement.margin and judgement.high is not None]
    if not judged:
        return ClaimRecord(*said, None, None, None, reasons)
    worst = max(judged, key=_share)
    if not (math.isfinite(_share(worst)) and math.isfinite(worst.loss)):
        raise NonFinite(f"the loss of {worst.key} of row {claim.row['row_id']!r} is {worst.loss}, up to {worst.high}")
    return ClaimRecord(*said, worst.key, worst.loss, _share(worst), reasons)


def _share(judgement: Judgement) -> float:
    """Of the margin; what is not finite counts as most, so that it is found."""
    share = judgement.high / judgement.margin
    return share if math.isfinite(share) and math.isfinite(judgement.loss) else math.inf
