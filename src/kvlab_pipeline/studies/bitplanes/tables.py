"""The study of bit planes as a page prints it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kvlab.output.format import DASH, estimate, number, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import Column, TitledTable
from kvlab_pipeline.studies.bitplanes.record import ArmQuantity, ArmRecord, Basis, BitplanesRecord, Difference

Part = Callable[[ArmRecord], tuple[ArmQuantity, ...]]
NEAREST = 0.1  # the budget at which heads are compared, or the one next to it
WHAT = {
    "spearman": "rank correlation",
    "token": "mass on the tokens kept, points",
    "chunk": "mass on the chunks kept, points",
}


TITLE = "What a few bits of a key say of attention"
ABOUT = """\
A bounded pool keeps the keys that attention will look at, and has to guess which those are. A cheap guess scores a
query against a few bits of each key: its signs, or the leading bits of a code of three bits. This page says how well
that ranks the tokens as attention itself does, and how much of the attention then lies on what is kept. It repeats a
published study with its mistakes mended, which are made once more on purpose in the last table."""


def tables(record: BitplanesRecord) -> list[TitledTable]:
    """Every table of the page, in order."""
    settings = record.settings
    tokens = "Per cent of a query's attention on the tokens that an arm ranks first, by the share of tokens kept."
    chunks = (
        f"The same for chunks of {settings.chunk_tokens} tokens, each ranked by its best token: what a pool "
        "that holds chunks can do for one head at a time."
    )
    forced = (
        f"The first {settings.sinks} and the last {settings.recent} tokens are kept whatever an arm "
        "says, and the rest of the budget goes to those that it ranks first."
    )
    return [
        planes(record),
        recalls(record, "Mass on the tokens that are kept", lambda arm: arm.token, tokens, None),
        recalls(record, "Mass on the chunks that are kept", lambda arm: arm.chunk, chunks, record.ceiling),
        recalls(record, "With the first and the last tokens kept", lambda arm: arm.forced, forced, None),
        spent(record),
        across(record),
        by_layer(record),
        compared(record),
        bases(record),
        mistakes(record),
    ]


def planes(record: BitplanesRecord) -> TitledTable:
    """What an arm stores, and how well it ranks all tokens."""
    shorter = [f"{arm.group} means {arm.width}" for arm in of(record, "rotated") if arm.width != arm.group]
    text = (
        f"K and Q of {record.settings.windows} windows in {record.dtype}, after the rotary embedding and a "
        f"Walsh-Hadamard rotation of both; {record.layers} layers, {record.heads} query heads, each against its own of "
        f"{record.kv_heads} KV heads of {record.head_dim} numbers; queries at positions "
        f"{', '.join(map(str, record.positions))}. A group of numbers shares one norm in float16 and ends where the "
        f"key ends, since keys come and go one by one"
        f"{': a group of ' + ' and of '.join(dict.fromkeys(shorter)) + ' here' if shorter else ''}. The bits of a key "
        f"count its norms. Intervals ({percent(record.confidence, 0)}) are over windows. Attention has a mean entropy "
        f"of {number(record.entropy)} nats and a mean largest weight of {number(record.largest)}."
    )
    columns = {
        "arm": cols.text("label"),
        "bits per key": cols.number("bits_per_key"),
        "bits per number": lambda arm: number(arm.bits_per_key and arm.bits_per_key / record.head_dim),
        "rank correlation": cols.estimate("spearman.overall"),
        "tokens that hold 90 % of the mass, %": cols.percent("needed.overall"),
    }
    return TitledTable("What a few bits of a key say", text, columns, of(record, "rotated"))


def recalls(
    record: BitplanesRecord, title: str, part: Part, text: str, ceiling: Sequence[ArmQuantity] | None
) -> TitledTable:
    """Mass at every budget, per cent; `ceiling` is the best that any choice can do."""
    rows = [(arm.label, part(arm)) for arm in of(record, "rotated")]
    rows += [("the best chunks", ceiling)] if ceiling else []
    columns: dict[str, Column] = {"arm": lambda row: row[0]}
    for at, share in enumerate(record.settings.kept):
        columns[percent(share, 0)] = lambda row, at=at: estimate(row[1][at].overall, 100)
    return TitledTable(title, text, columns, rows)


def spent(record: BitplanesRecord) -> TitledTable:
    """How many tokens that variant keeps."""
    text = (
        "Where the forced tokens are more than the budget, they alone are kept. The published code then kept every "
        "token, as a slice of the last 0 of a list is all of it, and so reported all of the mass."
    )
    columns = {
        "budget": lambda row: percent(row.budget, 0),
        "tokens asked for": cols.number("asked"),
        "tokens kept": cols.number("kept"),
        "tokens that the published code kept": cols.number("slipped"),
    }
    return TitledTable("What forced tokens leave of a budget", text, columns, record.spent)


def across(record: BitplanesRecord) -> TitledTable:
    """The worst, the median and the best head of each arm."""
    at = nearest(record)
    share = percent(record.settings.kept[at], 0)
    text = "The means of each of the heads of all layers: the worst of them, the median, and the best."
    quantities = {
        "rank correlation": lambda arm: worst_first(arm.spearman),
        f"% of the mass on {share} of the tokens": lambda arm: worst_first(arm.token[at], 100),
        f"on {share} of the chunks": lambda arm: worst_first(arm.chunk[at], 100),
    }
    columns: dict[str, Column] = {"arm": cols.text("label")}
    for name, quantity in quantities.items():
        for place, which in enumerate(("worst", "median", "best")):
            columns[f"{name}, {which}"] = lambda arm, quantity=quantity, place=place: quantity(arm)[place]
    return TitledTable("From head to head", text, columns, of(record, "rotated"))


def by_layer(record: BitplanesRecord) -> TitledTable:
    """Rank correlation of every layer: the median of its heads, and the worst."""
    shown = [arm for arm in of(record, "rotated") if arm.name not in ("random", "full")]
    columns: dict[str, Column] = {"layer": str}
    for arm in shown:
        columns[arm.label] = lambda layer, arm=arm: _layer(arm.spearman.heads[layer])
    text = "Rank correlation: the median of a layer's query heads, and the worst of them in brackets."
    return TitledTable("From layer to layer", text, columns, range(record.layers))


def _layer(heads: Sequence[float]) -> str:
    return f"{number(median(heads))} ({number(min(heads))})"


def compared(record: BitplanesRecord) -> TitledTable:
    """Paired differences between arms."""
    at = percent(record.settings.kept[nearest(record)], 0)
    text = (
        f"The first arm minus the second, over the same queries; mass at a budget of {at}. An interval that holds 0 "
        "tells nothing apart."
    )
    pairs: dict[tuple, dict[str, Difference]] = {}
    for one in record.differences:
        pairs.setdefault((one.a, one.basis, one.b, one.other_basis), {})[one.what] = one
    columns: dict[str, Column] = {
        "arm": lambda pair: f"{pair[0]}{_in(pair[1], pair[3])}",
        "against": lambda pair: f"{pair[2]}{_in(pair[3], pair[1])}",
    }
    for what, heading in WHAT.items():
        scale = 1 if what == "spearman" else 100
        columns[heading] = lambda pair, what=what, scale=scale: estimate(
            pairs[pair][what].difference, scale, signed=True
        )
    return TitledTable("What each step gains", text, columns, list(pairs))


def bases(record: BitplanesRecord) -> TitledTable:
    """Rotated against raw keys."""
    at = nearest(record)
    raw = {arm.label: arm for arm in of(record, "raw")}
    text = (
        "The same arms on keys as they lie in the cache, which is what the residency policy `sign_bit` keeps the signs "
        f"of. Mass at a budget of {percent(record.settings.kept[at], 0)}, per cent."
    )
    quantities = {
        "rank correlation": lambda arm: estimate(arm.spearman.overall),
        "tokens": lambda arm: estimate(arm.token[at].overall, 100),
        "chunks": lambda arm: estimate(arm.chunk[at].overall, 100),
    }
    columns: dict[str, Column] = {"arm": cols.text("label")}
    for what, tell in quantities.items():
        columns[f"{what}, rotated"] = tell
        columns[f"{what}, raw"] = lambda arm, tell=tell: tell(raw[arm.label])
    return TitledTable(
        "Rotated and raw keys", text, columns, [one for one in of(record, "rotated") if one.label in raw]
    )


def mistakes(record: BitplanesRecord) -> TitledTable:
    """The published study's mistakes, made on purpose, beside what is right."""
    at = nearest(record)
    text = (
        "Each mistake is made here on purpose. The lower two bits of an antisymmetric code say neither the sign nor "
        "the size of a number. Norms of 32 numbers under a table that was made for norms of 128 push codes to its "
        "ends; a table that fits its group does not. And scores against KV head 0 are not what the other query heads "
        "attend to: this is how much of their own attention such scores find. Mass at a budget of "
        f"{percent(record.settings.kept[at], 0)}."
    )
    right = {arm.label: arm for arm in of(record, "rotated")}
    shown = [*record.controls, *(right[name] for name in right if name.startswith("3 bits") or name == "full")]
    columns = {
        "arm": cols.text("label"),
        "codes at an end of the table": lambda arm: percent(arm.saturated, 1),
        "rank correlation": cols.estimate("spearman.overall"),
        "mass of tokens, %": lambda arm: estimate(arm.token[at].overall, 100),
        "mass of chunks, %": lambda arm: estimate(arm.chunk[at].overall, 100),
    }
    return TitledTable("Mistakes of the published study", text, columns, shown)


def of(record: BitplanesRecord, basis: Basis) -> list[ArmRecord]:
    """The arms of a basis."""
    return [arm for arm in record.arms if arm.basis == basis]


def nearest(record: BitplanesRecord) -> int:
    """Which of the budgets is next to `NEAREST`."""
    budgets = record.settings.kept
    return min(range(len(budgets)), key=lambda i: abs(budgets[i] - NEAREST))


def worst_first(measured: ArmQuantity, scale: float = 1.0) -> tuple[str, str, str]:
    """The least, the median and the greatest of all heads."""
    return spread([scale * head for layer in measured.heads for head in layer])


def spread(values: Sequence[float], digits: int = 3) -> tuple[str, str, str]:
    """The least, the median and the greatest of some numbers; three dashes when there are none."""
    if not values:
        return DASH, DASH, DASH
    ordered, n = sorted(values), len(values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return number(ordered[0], digits), number(middle, digits), number(ordered[-1], digits)


def _in(basis: Basis, other: Basis) -> str:
    return "" if basis == other else f" ({basis})"
