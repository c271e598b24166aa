"""A measured codec in a row: what it costs and takes; and which row to take. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvlab.measure.places import CACHE, PAGES, STORE
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.kl_scale import SMALL

BFLOAT16 = 2  # bytes


@dataclass(frozen=True)
class CostRow:
    """What one codec costs.

    Parameters
    ----------
    codec, bits
        As asked for; None where it has no choice of bits.
    recipe_id : str or None
        None for what is no codec.
    bits_per_value : float
        Of the stored cache of a context, everything counted.
    kl, top1 : Estimate
        Nats per token, and the share of tokens whose most probable successor stays the same.
    words : str
        How large `kl` is, by its interval.
    stored, read : float
        Bytes that a token of the context takes, and that a scored token reads on average, in all layers.
    table_bytes : int or None
        What its codecs hold in memory beside the tokens, once a process; None of what is no codec.
    tokens_per_second : float or None
        Tokens of a context that are stored and read back (`costs.tokens_per_second`); None where it is not measured.
    places : tuple of str or None
        Where it can run (`measure.places`); None of what is no codec.
    pays_from : int or None
        Tokens from which on cache and tables take less than a cache in bfloat16; None where they never do.
    """

    codec: str
    bits: float | None
    recipe_id: str | None
    bits_per_value: float
    kl: Estimate
    top1: Estimate
    words: str
    stored: float
    read: float
    table_bytes: int | None = None
    tokens_per_second: float | None = None
    places: tuple[str, ...] | None = None
    pays_from: int | None = None


def tokens_per_second(context: int, seconds: Sequence[float]) -> float | None:
    """Tokens of a context that are coded, packed, unpacked and decoded in a second, in all layers.

    Parameters
    ----------
    seconds : sequence of float
        Of each window. The median counts; the first window, in which codecs load what they need, only where it is
        the only one.
    """
    took = median(seconds[1:] or seconds)
    return context / took if took else None


def pays_from(row: CostRow, values: int) -> int | None:
    """Tokens from which on a coded cache and its tables take less than bfloat16; None where they never do."""
    saved = BFLOAT16 * values - row.stored
    return None if row.table_bytes is None or saved <= 0 else int(row.table_bytes / saved) + 1


def pick(rows: Sequence[CostRow]) -> dict:
    """The row to take: of those with which a model can run, whose KL is small for sure, that of the fewest bits.

    Returns
    -------
    dict
        ``below``: the KL under which the upper ends of intervals have to lie; ``taken``, ``stored`` and ``nearest``:
        numbers of rows. `taken` is None where no row is small enough, and `nearest` then the one of the least upper
        end. `stored` is one of fewer bits for a cache that is put away, with which no model runs.
    """
    coded = [(number, row) for number, row in enumerate(rows) if row.places is not None]
    served = [one for one in coded if {CACHE, PAGES} & {*one[1].places}]

    def best(among: list[tuple[int, CostRow]]) -> tuple[int, CostRow] | None:
        small = [one for one in among if one[1].kl.high < SMALL.kl]
        return min(small, key=lambda one: (one[1].bits_per_value, one[1].kl.value), default=None)

    taken = best(served)
    put_away = best([one for one in coded if one[1].places == (STORE,)])
    if put_away and taken and put_away[1].bits_per_value >= taken[1].bits_per_value:
        put_away = None
    nearest = None if taken else min(served, key=lambda one: one[1].kl.high, default=None)
    return {"below": SMALL.kl} | {
        name: one and one[0] for name, one in (("taken", taken), ("stored", put_away), ("nearest", nearest))
    }
