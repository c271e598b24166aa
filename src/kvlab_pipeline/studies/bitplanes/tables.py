"""The tables of BITPLANES.md. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kvlab.output.format import estimate, number, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import Column, table_if_any
from kvlab_pipeline.studies.bitplanes.record import ArmQuantity, ArmRecord, BitplanesRecord, Difference, compared_at

GAINS = {
    "spearman": "rank correlation",
    "token": "mass on the tokens kept, points",
    "chunk": "mass on the chunks kept, points",
}


def parts(record: BitplanesRecord) -> dict[str, str | None]:
    """What the template places, by name."""
    budgets, at = record.settings.kept, compared_at(record.settings.kept)
    rotated = [arm for arm in record.arms if arm.basis == "rotated"]
    shorter = dict.fromkeys(f"{arm.group} means {arm.width}" for arm in rotated if arm.width != arm.group)
    right = [arm for arm in rotated if arm.label.startswith("3 bits") or arm.label == "full"]
    return {
        "at": percent(budgets[at], 0),
        "shorter": f": a group of {' and of '.join(shorter)} here" if shorter else "",
        "planes": table_if_any(
            rotated,
            {
                "arm": cols.text("label"),
                "bits per key": cols.number("bits_per_key"),
                "bits per number": lambda arm: number(arm.bits_per_key and arm.bits_per_key / record.head_dim),
                "rank correlation": cols.estimate("spearman.overall"),
                "tokens that hold 90 % of the mass, %": cols.percent("needed.overall"),
            },
        ),
        "tokens": _recalls(budgets, {arm.label: arm.token for arm in rotated}),
        "chunks": _recalls(budgets, {arm.label: arm.chunk for arm in rotated} | {"the best chunks": record.ceiling}),
        "forced": _recalls(budgets, {arm.label: arm.forced for arm in rotated}),
        "spent": table_if_any(
            record.spent,
            {
                "budget": lambda row: percent(row.budget, 0),
                "tokens asked for": cols.number("asked"),
                "tokens kept": cols.number("kept"),
                "tokens that the published code kept": cols.number("slipped"),
            },
        ),
        "heads": _heads(rotated, at, percent(budgets[at], 0)),
        "layers": _layers([arm for arm in rotated if arm.name not in ("random", "full")], record.layers),
        "gains": _gains(record),
        "bases": _bases(rotated, {arm.label: arm for arm in record.arms if arm.basis == "raw"}, at),
        "mistakes": table_if_any(
            [*record.controls, *right],
            {
                "arm": cols.text("label"),
                "codes at an end of the table": lambda arm: percent(arm.saturated, 1),
                "rank correlation": cols.estimate("spearman.overall"),
                "mass of tokens, %": lambda arm: estimate(arm.token[at].overall, 100),
                "mass of chunks, %": lambda arm: estimate(arm.chunk[at].overall, 100),
            },
        ),
    }


def _recalls(budgets: Sequence[float], found: dict[str, Sequence[ArmQuantity]]) -> str | None:
    """Mass at every budget, per cent, by what is said to keep it."""
    columns: dict[str, Column] = {"arm": str}
    for at, share in enumerate(budgets):
        columns[percent(share, 0)] = lambda name, at=at: estimate(found[name][at].overall, 100)
    return table_if_any(found, columns)


def _heads(arms: Sequence[ArmRecord], at: int, share: str) -> str | None:
    """The worst, the median and the best head of all layers, arm by arm."""
    quantities: dict[str, tuple[Callable[[ArmRecord], ArmQuantity], int]] = {
        "rank correlation": (lambda arm: arm.spearman, 1),
        f"% of the mass on {share} of the tokens": (lambda arm: arm.token[at], 100),
        f"on {share} of the chunks": (lambda arm: arm.chunk[at], 100),
    }
    columns: dict[str, Column] = {"arm": cols.text("label")}
    for name, (quantity, scale) in quantities.items():
        for which, of in {"worst": min, "median": median, "best": max}.items():
            columns[f"{name}, {which}"] = lambda arm, quantity=quantity, scale=scale, of=of: number(
                of(scale * head for layer in quantity(arm).heads for head in layer)
            )
    return table_if_any(arms, columns)


def _layers(arms: Sequence[ArmRecord], layers: int) -> str | None:
    """The median of a layer's heads, and the worst of them."""
    columns: dict[str, Column] = {"layer": str}
    for arm in arms:
        columns[arm.label] = lambda layer, heads=arm.spearman.heads: (
            f"{number(median(heads[layer]))} ({number(min(heads[layer]))})"
        )
    return table_if_any(range(layers), columns)


def _gains(record: BitplanesRecord) -> str | None:
    """Paired differences between arms; a basis is said where two are compared."""
    pairs: dict[tuple[str, str], dict[str, Difference]] = {}
    for one in record.differences:
        a, b = one.a, one.b
        if one.basis != one.other_basis:
            a, b = f"{a} ({one.basis})", f"{b} ({one.other_basis})"
        pairs.setdefault((a, b), {})[one.what] = one
    columns: dict[str, Column] = {"arm": lambda pair: pair[0], "against": lambda pair: pair[1]}
    for what, heading in GAINS.items():
        columns[heading] = lambda pair, what=what: estimate(
            pairs[pair][what].difference, 1 if what == "spearman" else 100, signed=True
        )
    return table_if_any(pairs, columns)


def _bases(rotated: Sequence[ArmRecord], raw: dict[str, ArmRecord], at: int) -> str | None:
    """Rotated beside raw keys, where an arm has both."""
    quantities: dict[str, Column] = {
        "rank correlation": cols.estimate("spearman.overall"),
        "tokens": lambda arm: estimate(arm.token[at].overall, 100),
        "chunks": lambda arm: estimate(arm.chunk[at].overall, 100),
    }
    columns: dict[str, Column] = {"arm": cols.text("label")}
    for what, tell in quantities.items():
        columns[f"{what}, rotated"] = tell
        columns[f"{what}, raw"] = lambda arm, tell=tell: tell(raw[arm.label])
    return table_if_any([arm for arm in rotated if arm.label in raw], columns)
