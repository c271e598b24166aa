"""Which pattern each layer reads by: a rule of thumb by length, and the best plan for a budget. Torch-free.

The best plan divides a budget over layers as a knapsack does in which of each group one item is taken: of every layer
one pattern (Kellerer, Pferschy and Pisinger 2004, *Knapsack Problems*, chapter 11). Losses are added over layers, which
holds as far as they are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from kvlab.attention.patterns import BlockSparse, ChunkSummary, Full, Pattern
from kvlab.core.errors import UserError

LayerPlan = tuple[Pattern, ...]
"""A pattern for each layer, the lowest first."""


@lru_cache(maxsize=256)
def by_length(
    layers: int,
    tokens: int,
    full: int = 512,
    sparse: int = 4096,
    patterns: tuple[Pattern, Pattern] = (BlockSparse(), ChunkSummary()),
) -> LayerPlan:
    """The threshold rule: all layers read everything up to `full` tokens; up to `sparse` the upper half chooses blocks.

    Beyond, the upper half reads summaries and the lower half chooses blocks, but for layer 0, which reads everything.

    Parameters
    ----------
    patterns : (Pattern, Pattern)
        What chooses blocks, and what reads summaries.

    Raises
    ------
    UserError
        The thresholds are not in order.
    """
    if not 0 < full <= sparse:
        raise UserError(f"thresholds are {full} and {sparse} tokens; allowed: 0 < full <= sparse")
    chosen, summed = patterns
    half = layers // 2
    if tokens <= full:
        return (Full(),) * layers
    if tokens <= sparse:
        return (Full(),) * half + (chosen,) * (layers - half)
    lower = (Full(), *(chosen,) * (half - 1)) if half else ()
    return (*lower, *(summed,) * (layers - half))


def budgeted(losses: Sequence[Mapping[Pattern, float]], costs: Mapping[Pattern, int], budget: int) -> LayerPlan:
    """The plan of least summed loss whose summed cost is within the budget, exactly.

    Parameters
    ----------
    losses : sequence of mapping of Pattern to float
        Of each layer what a pattern in that layer alone costs in KL divergence, nats per token.
    costs : mapping of Pattern to int
        Of a pattern in one layer, such as bytes read.

    Raises
    ------
    UserError
        The cheapest plan is beyond the budget.
    """
    states: list[tuple[int, float, LayerPlan]] = [(0, 0.0, ())]
    for layer in losses:
        grown = [(cost + costs[p], loss + layer[p], (*plan, p)) for cost, loss, plan in states for p in layer]
        states = _undominated(one for one in grown if one[0] <= budget)
    if not states:
        least = sum(min(costs[pattern] for pattern in layer) for layer in losses)
        raise UserError(f"a budget of {budget} is below the cheapest plan's cost of {least}")
    return min(states, key=lambda one: (one[1], one[0]))[2]


def _undominated(states) -> list[tuple[int, float, LayerPlan]]:
    """Those of which no other costs at most as much and loses at most as much."""
    kept, best = [], float("inf")
    for one in sorted(states, key=lambda state: state[:2]):
        if one[1] < best:
            kept.append(one)
            best = one[1]
    return kept


def cost_of(plan: LayerPlan, costs: Mapping[Pattern, int]) -> int:
    """Summed over layers."""
    return sum(costs[pattern] for pattern in plan)


def saved(plan: LayerPlan, tokens: int) -> float:
    """Share of a causal pass's operations in attention that the plan spares, by the formulas."""
    expected = Full().flops(tokens, 1, 1) * len(plan)
    cost = {pattern: pattern.flops(tokens, 1, 1) for pattern in set(plan)}
    return 1 - cost_of(plan, cost) / expected
