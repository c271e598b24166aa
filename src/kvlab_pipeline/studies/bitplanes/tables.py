"""The study of bit planes as a page prints it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kvlab.output.format import estimate, number, percent
from kvlab_pipeline.studies.bitplanes.record import ArmQuantity, ArmRecord, Basis, BitplanesRecord, Difference
from kvlab_pipeline.studies.table import Table, spread

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


def tables(record: BitplanesRecord) -> list[Table]:
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


def planes(record: BitplanesRecord) -> Table:
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
    rows = [
        (
            arm.label,
            number(arm.bits_per_key),
            number(None if arm.bits_per_key is None else arm.bits_per_key / record.head_dim),
            estimate(arm.spearman.overall),
            estimate(arm.needed.overall, 100),
        )
        for arm in of(record, "rotated")
    ]
    header = (
        "arm",
        "bits per key",
        "bits per number",
        "rank correlation",
        "tokens that hold 90 % of the mass, %",
    )
    return Table("What a few bits of a key say", text, header, tuple(rows))


def recalls(record: BitplanesRecord, title: str, part: Part, text: str, ceiling: Sequence[ArmQuantity] | None) -> Table:
    """Mass at every budget, per cent; `ceiling` is the best that any choice can do."""
    rows = [(arm.label, *(estimate(one.overall, 100) for one in part(arm))) for arm in of(record, "rotated")]
    if ceiling:
        rows.append(("the best chunks", *(estimate(one.overall, 100) for one in ceiling)))
    return Table(title, text, ("arm", *(percent(share, 0) for share in record.settings.kept)), tuple(rows))


def spent(record: BitplanesRecord) -> Table:
    """How many tokens that variant keeps."""
    text = (
        "Where the forced tokens are more than the budget, they alone are kept. The published code then kept every "
        "token, as a slice of the last 0 of a list is all of it, and so reported all of the mass."
    )
    rows = [(percent(row.budget, 0), number(row.asked), number(row.kept), number(row.slipped)) for row in record.spent]
    header = ("budget", "tokens asked for", "tokens kept", "tokens that the published code kept")
    return Table("What forced tokens leave of a budget", text, header, tuple(rows))


def across(record: BitplanesRecord) -> Table:
    """The worst, the median and the best head of each arm."""
    at = nearest(record)
    share = percent(record.settings.kept[at], 0)
    text = "The means of each of the heads of all layers: the worst of them, the median, and the best."
    rows = [
        (arm.label, *worst_first(arm.spearman), *worst_first(arm.token[at], 100), *worst_first(arm.chunk[at], 100))
        for arm in of(record, "rotated")
    ]
    quantities = ("rank correlation", f"% of the mass on {share} of the tokens", f"on {share} of the chunks")
    header = ("arm", *(f"{name}, {which}" for name in quantities for which in ("worst", "median", "best")))
    return Table("From head to head", text, header, tuple(rows))


def by_layer(record: BitplanesRecord) -> Table:
    """Rank correlation of every layer: the median of its heads, and the worst."""
    shown = [arm for arm in of(record, "rotated") if arm.name not in ("random", "full")]
    rows = []
    for layer in range(record.layers):
        heads = [arm.spearman.heads[layer] for arm in shown]
        rows.append((str(layer), *(f"{number(median(one))} ({number(min(one))})" for one in heads)))
    text = "Rank correlation: the median of a layer's query heads, and the worst of them in brackets."
    return Table("From layer to layer", text, ("layer", *(arm.label for arm in shown)), tuple(rows))


def compared(record: BitplanesRecord) -> Table:
    """Paired differences between arms."""
    at = percent(record.settings.kept[nearest(record)], 0)
    text = (
        f"The first arm minus the second, over the same queries; mass at a budget of {at}. An interval that holds 0 "
        "tells nothing apart."
    )
    pairs: dict[tuple, dict[str, Difference]] = {}
    for one in record.differences:
        pairs.setdefault((one.a, one.basis, one.b, one.other_basis), {})[one.what] = one
    rows = [
        (
            f"{a}{_in(basis, other)}",
            f"{b}{_in(other, basis)}",
            *(estimate(row[what].difference, 1 if what == "spearman" else 100, signed=True) for what in WHAT),
        )
        for (a, basis, b, other), row in pairs.items()
    ]
    return Table("What each step gains", text, ("arm", "against", *WHAT.values()), tuple(rows))


def bases(record: BitplanesRecord) -> Table:
    """Rotated against raw keys."""
    at = nearest(record)
    raw = {arm.label: arm for arm in of(record, "raw")}
    text = (
        "The same arms on keys as they lie in the cache, which is what the residency policy `sign_bit` keeps the signs "
        f"of. Mass at a budget of {percent(record.settings.kept[at], 0)}, per cent."
    )
    header = tuple(
        f"{what}, {basis}" for what in ("rank correlation", "tokens", "chunks") for basis in ("rotated", "raw")
    )
    rows = [
        (
            arm.label,
            *(estimate(one.spearman.overall) for one in (arm, raw[arm.label])),
            *(estimate(one.token[at].overall, 100) for one in (arm, raw[arm.label])),
            *(estimate(one.chunk[at].overall, 100) for one in (arm, raw[arm.label])),
        )
        for arm in of(record, "rotated")
        if arm.label in raw
    ]
    return Table("Rotated and raw keys", text, ("arm", *header), tuple(rows))


def mistakes(record: BitplanesRecord) -> Table:
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
    rows = [
        (
            arm.label,
            percent(arm.saturated, 1),
            estimate(arm.spearman.overall),
            estimate(arm.token[at].overall, 100),
            estimate(arm.chunk[at].overall, 100),
        )
        for arm in shown
    ]
    header = ("arm", "codes at an end of the table", "rank correlation", "mass of tokens, %", "mass of chunks, %")
    return Table("Mistakes of the published study", text, header, tuple(rows))


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


def _in(basis: Basis, other: Basis) -> str:
    return "" if basis == other else f" ({basis})"
