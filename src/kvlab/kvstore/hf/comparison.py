"""A cold run and a warm one side by side, until they write different tokens or long enough."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.core.counts import counted
from kvlab.core.errors import UserError
from kvlab.kvstore.hf.run import PagedRun


@dataclass(frozen=True)
class RunComparison:
    """In what a warm run differs from the cold one.

    Attributes
    ----------
    tokens_equal : bool
        Of all tokens that were decoded greedily.
    max_abs_dlogit : float
        Largest difference of two logits, over all steps up to the first divergence; 0.0 when they are bit-equal.
    first_divergence : int or None
        The first decoded token that differs, counted from 0.
    margin_at_divergence : float or None
        By how much the cold run's most likely token led the second there, in logits.
    residency_equal : bool
        Whether the same chunks were in the pool at every step.
    steps : int
        Tokens that were compared.
    """

    tokens_equal: bool
    max_abs_dlogit: float
    first_divergence: int | None
    margin_at_divergence: float | None
    residency_equal: bool
    steps: int


def compare(cold: PagedRun, warm: PagedRun, steps: int) -> RunComparison:
    """Decode both greedily and look at every step; both runs go on by that.

    Parameters
    ----------
    cold, warm : PagedRun
        After the same tokens, the last of which they prefilled.
    steps : int
        Tokens, from 1; fewer where the model has no more positions.

    Raises
    ------
    UserError
        When they are not after the same tokens, or have no logits.
    """
    counted("steps", steps, least=1)
    if cold.tokens != warm.tokens or cold.logits is None or warm.logits is None:
        raise UserError("only runs after the same prefilled tokens can be compared", code="user.other-tokens")
    steps = min(steps, 1 + cold.model.info.max_positions - len(cold.tokens))
    noise, same_pool = 0.0, True
    for step in range(steps):
        noise = max(noise, float((cold.logits - warm.logits).abs().max()))
        same_pool = same_pool and cold.pager.resident == warm.pager.resident
        if int(cold.logits.argmax()) != int(warm.logits.argmax()):
            return RunComparison(False, noise, step, margin(cold.logits), same_pool, step + 1)
        if step + 1 < steps:
            cold.decode(1)
            warm.decode(1)
    return RunComparison(True, noise, None, None, same_pool, steps)


def margin(logits: Tensor) -> float:
    """By how much the most likely token leads the second, in logits [vocab]."""
    first, second = logits.topk(2).values.tolist()
    return first - second
