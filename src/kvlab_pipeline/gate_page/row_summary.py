"""One row as it is told: what pages and programs read of it."""

from __future__ import annotations

from kvlab.core.codec_settings import Frozen
from kvlab.core.recipe import WHOLE
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.evidence import Measure
from kvlab.gate.replay import Replay
from kvlab.stats.bootstrap import Estimate

BEST_TIER = TIERS[0]
BASELINE = "baseline"


class RowSummary(Frozen):
    """One row as it is told.

    Parameters
    ----------
    throughput_ratio : Estimate or None
        Over that of the baseline of the same run, by mean seconds over the same windows; None where there is not
        exactly one, or the windows' times are not known.
    capacity_ratio : float or None
        Tokens that fit into the engine's own cache, over those of the baseline in as much memory, by the engine's own
        count of both; None where the row is not what that cache holds.
    page_bits, exact_bits : float or None
        Of what an engine's own pages hold: bits per value of a token in them, and what the tokens that a request reads
        exact take beside them: N tokens of a request take ``page_bits + exact_bits / N`` bits per value.
    metrics, baseline : dict of str to Measure
        What evidence without a problem found, of the row and of its baseline. Of a baseline, what its second run found
        and what its first did.
    paired : dict of str to Measure
        The difference of both over the same items.
    untold : tuple of str
        The metrics of which the baseline is not shown to be better than chance.
    claimed, earned : str or None
        Tiers.
    certified : bool
        Whether it earns the best tier and came out the same when it was measured again.
    replay : Replay or None
        What measuring again found; None where nothing was measured again.
    open, beyond : tuple of str
        The metrics that keep it from its claim: those that its items do not settle, and those that lose too much.
    p, adjusted_p : float or None
        As in `kvlab.gate.check.Claim`.
    why : str
        Why it does not earn what it claims, is not certified or was not measured, in a few words; empty where nothing
        is to be said.
    """

    row_id: str
    run: str | None
    model: str | None
    engine: str | None
    device: str | None
    dtype: str | None
    protocol: str | None
    context_tokens: int | None
    stored_span: str | None
    mechanism: str | None
    mechanism_variant: str | None
    bits: int | None
    bits_per_value: float | None
    compression_ratio: float | None
    throughput_tok_s: float | None
    throughput_ratio: Estimate | None
    capacity_ratio: float | None
    page_bits: float | None = None
    exact_bits: float | None = None
    measured: bool
    metrics: dict[str, Measure]
    baseline: dict[str, Measure]
    paired: dict[str, Measure]
    claimed: str | None
    earned: str | None
    status: str | None
    badge: str
    word: str
    codes: tuple[str, ...]
    open: tuple[str, ...]
    untold: tuple[str, ...]
    beyond: tuple[str, ...]
    p: float | None = None
    adjusted_p: float | None = None
    certified: bool = False
    replay: Replay | None = None
    why: str

    @property
    def compresses(self) -> bool:
        """Whether it is measured and something else than the baseline."""
        return self.measured and self.mechanism not in (None, BASELINE)

    @property
    def whole(self) -> bool:
        """Whether it codes finished caches alone, all layers at once."""
        return self.mechanism_variant in WHOLE

    @property
    def place(self) -> tuple[str, str]:
        """Where it was measured: the group of lines that are set beside one another."""
        return self.model or "", self.engine or ""

    @property
    def name(self) -> str:
        """``mechanism/variant``, or the mechanism alone."""
        return "/".join(filter(None, (self.mechanism, self.mechanism_variant)))
