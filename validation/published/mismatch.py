"""Whether cells that the study sets side by side were made alike, from their recipe fields and nothing else.

Cells are put into one group when nothing that they record forbids it (`reanalyse.comparable` without the windows).
Within a group the sides are (engine, protocol): what the study compares. A recipe field is then one of

    equal          both sides record one and the same value
    differs        both record values and share none: no cell of one side was made like any of the other
    overlaps       both record values, several, and share some
    not recorded   one side, or both, never record it

No field is singled out and no value is expected. What was inferred from a name counts as not recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from validation.published.rows import CellFacts, PublishedCell

# What is compared on purpose, what is the same by the grouping, and what is bookkeeping.
NOT_RECIPE = ("model", "engine", "protocol", "codec", "context", "eval", "n_layers", "inferred")
RECIPE = tuple(name for name in CellFacts.model_fields if name not in NOT_RECIPE)
EQUAL, DIFFERS, OVERLAPS, NOT_RECORDED = "equal", "differs", "overlaps", "not recorded"


@dataclass(frozen=True)
class CellGroup:
    """The cells of a group on one engine under one protocol."""

    engine: str | None
    protocol: str | None
    cells: tuple[PublishedCell, ...]


@dataclass(frozen=True)
class Field:
    """One recipe field on two sides.

    `a` and `b` map every value found to the number of cells that record it; `absent` counts the cells of each side
    that do not record it.
    """

    name: str
    verdict: str
    a: dict
    b: dict
    absent: tuple[int, int]


@dataclass(frozen=True)
class GroupComparison:
    """Two sides of one group, field by field."""

    claim: str
    a: CellGroup
    b: CellGroup
    fields: tuple[Field, ...]

    def named(self, verdict: str) -> list[Field]:
        """The fields with a verdict."""
        return [one for one in self.fields if one.verdict == verdict]


def comparisons(cells: Sequence[PublishedCell]) -> list[GroupComparison]:
    """Every two sides of every group of codec cells."""
    found = []
    for group in groups([cell for cell in cells if cell.role == "codec"]):
        for a, b in itertools.combinations(sides(group), 2):
            fields = tuple(field(name, a, b) for name in RECIPE)
            recorded = tuple(one for one in fields if one.a or one.b)
            found.append(GroupComparison(group[0].claim, a, b, recorded))
    return found


def indistinct(cells: Sequence[PublishedCell]) -> list[list[PublishedCell]]:
    """Codec cells whose recorded recipes are equal but whose numbers are not: what sets them apart is not recorded."""
    found: dict[tuple, list[PublishedCell]] = {}
    for cell in cells:
        if cell.role == "codec":
            inferred = dict.fromkeys(cell.facts.inferred)
            key = (cell.claim, cell.facts.model_copy(update={**inferred, "inferred": ()}), len(cell.windows))
            found.setdefault(key, []).append(cell)

    def numbers(cell: PublishedCell) -> tuple:
        return tuple((one.ppl_ref, one.ppl_alt) for one in cell.windows)

    return [group for group in found.values() if len({numbers(cell) for cell in group}) > 1]


def groups(cells: Sequence[PublishedCell]) -> list[list[PublishedCell]]:
    """Cells that may be one experiment: same claim and sizes; a cell that names no model or depth joins those that do.

    A cell that fits several groups is in each of them.
    """
    named = [cell for cell in cells if cell.facts.model is not None]
    keys = list(dict.fromkeys(identity(cell) for cell in named))
    found = []
    for key in keys:
        found.append([cell for cell in cells if fits(cell, key)])
    alone = [cell for cell in cells if not any(fits(cell, key) for key in keys)]
    for key in dict.fromkeys(identity(cell) for cell in alone):
        found.append([cell for cell in alone if identity(cell) == key])
    return [group for group in found if len(group) > 1]


def identity(cell: PublishedCell) -> tuple:
    """What cells of one experiment share."""
    facts = cell.facts
    return cell.claim, facts.model, facts.context, facts.eval, facts.n_layers


def fits(cell: PublishedCell, key: tuple) -> bool:
    """Whether nothing that the cell records speaks against the key."""
    claim, *rest = identity(cell)
    return claim == key[0] and all(
        one is None or two is None or one == two for one, two in zip(rest, key[1:], strict=True)
    )


def sides(group: Sequence[PublishedCell]) -> list[CellGroup]:
    """The (engine, protocol) of a group, HF first."""
    found: dict[tuple, list[PublishedCell]] = {}
    for cell in group:
        found.setdefault((cell.facts.engine, cell.facts.protocol), []).append(cell)
    ordered = sorted(found, key=lambda one: (str(one[0]), one[1] != "snapshot"))
    return [CellGroup(engine, protocol, tuple(found[engine, protocol])) for engine, protocol in ordered]


def field(name: str, a: CellGroup, b: CellGroup) -> Field:
    """One recipe field on two sides."""
    counts, absent = [], []
    for side in (a, b):
        values = [None if name in cell.facts.inferred else getattr(cell.facts, name) for cell in side.cells]
        seen = [value for value in values if value is not None]
        counts.append({value: seen.count(value) for value in dict.fromkeys(seen)})
        absent.append(len(values) - len(seen))
    return Field(name, verdict(*counts), *counts, (absent[0], absent[1]))


def verdict(a: dict, b: dict) -> str:
    """The word for the values of two sides."""
    if not a or not b:
        return NOT_RECORDED
    if not set(a) & set(b):
        return DIFFERS
    return EQUAL if set(a) == set(b) and len(a) == 1 else OVERLAPS
