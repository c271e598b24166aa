"""What may be said of every row, in one place: its numbers with their intervals, what it earns and why not more.

Pages and programs read this instead of rows and reports. A metric is told only of evidence that is the row's own and
has no problem: what a row says of its own quality backs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import UserError
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.columns import BY_NAME, TIERS
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.check import Claim, GateReport, check
from kvlab.gate.evidence import Measure, measured, paired, parse, problems
from kvlab.gate.reasons import Reason
from kvlab.gate.replay import Replayer
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.gate_page.recommendation import Recommendation, answers
from kvlab_pipeline.gate_page.row_summary import BASELINE, RowSummary
from kvlab_pipeline.gate_page.samples import Sampled, Samples, speed

SCHEMA_VERSION = 7
ALIKE = ("run", "model", "engine", "device", "dtype", "context_tokens")
"""Fields in which a row and the baseline that its throughput is held against are equal."""

TOLD = (
    *("row_id", "run", "model", "engine", "device", "dtype", "protocol", "context_tokens", "stored_span"),
    *("mechanism", "mechanism_variant", "bits", "bits_per_value", "compression_ratio", "throughput_tok_s"),
)
"""Fields of a row that a line repeats."""


AGEING = ("model_hash", "corpus_hash", "code")


class Best(Frozen):
    """The smallest certified row of one engine and protocol.

    Parameters
    ----------
    row_id : str or None
        None where none is certified, or several are as small.
    tied : tuple of str
        The rows that are as small as each other; empty where there is one, or none.
    certified, tried : int
        Of how many certified rows it is the best, and of how many that were measured. The best of many is better by
        luck, too: the more, the more it is flattered.
    """

    model: str
    engine: str
    protocol: str
    row_id: str | None
    tied: tuple[str, ...]
    certified: int
    tried: int


class GateSummary(Frozen):
    """All lines in a fixed order, how many earned each tier, what may be claimed, and the best of the certified.

    `tested` rows are certified together, by p-values that are adjusted for their number and at most `alpha`.
    """

    schema_version: int = SCHEMA_VERSION
    registry: str
    current: str | None
    counts: dict[str, int]
    alpha: float
    tested: int
    answers: tuple[Recommendation, ...]
    best: tuple[Best, ...]
    rows: tuple[RowSummary, ...]

    def to_json(self) -> dict:
        """As JSON for programs: of a metric its value, interval and number of items."""
        measures = {"metrics": {"__all__": {"se", "lows", "highs", "gained", "lost"}}, "paired": True, "baseline": True}
        return self.model_dump(mode="json", exclude={"rows": {"__all__": measures}})


def judged(
    rows: Sequence[Row], context: Context, samples: Samples | None = None, replayer: Replayer | None = None
) -> tuple[GateReport, GateSummary]:
    """The gate's report on rows, and what may be said of each.

    Parameters
    ----------
    rows : sequence of Row
    context : Context
    samples : Samples, optional
        What the rows were made of; without them no throughput has an interval, and no baseline is repeated.
    replayer : Replayer, optional
        Measures items of rows again; without it no row is certified.

    Raises
    ------
    UserError
        Two rows have the same run and `row_id`, or a row two pieces of evidence on one metric: nothing could be said
        of either.
    """
    samples = samples or {}
    report = check(rows, context, replayer=replayer)
    claims = {(claim.row["run"], claim.row["row_id"]): claim for claim in report.claims}
    if len(claims) != len(rows):
        raise UserError(
            f"{len(rows) - len(claims)} rows are there twice, with the same run and row_id; give each once",
            code="user.row-twice",
        )
    lines = sorted((_line(row, claims[_place(row)], rows, context, samples) for row in rows), key=_order)
    earned = [line.earned for line in lines]
    return report, GateSummary(
        registry=report.registry,
        current=report.current,
        counts={tier: earned.count(tier) for tier in TIERS},
        alpha=report.alpha,
        tested=report.tested,
        answers=tuple(answers(lines)),
        best=tuple(_best(lines)),
        rows=tuple(lines),
    )


def _place(row: Row) -> tuple:
    return row.values.get("run"), row.values.get("row_id")


def _order(line: RowSummary) -> tuple:
    """By engine; there the baseline first, then by tier, and the smallest first in each."""
    tier = TIERS.index(line.earned) if line.earned else len(TIERS)
    held = float("inf") if line.bits_per_value is None else line.bits_per_value
    return (*line.place, line.mechanism != BASELINE, not line.measured, tier, held, line.name, line.row_id)


def _line(row: Row, claim: Claim, rows: Sequence[Row], context: Context, samples: Samples) -> RowSummary:
    metrics, baseline, differences = _measures(row, context, samples.get(_place(row)))
    was_measured = any(
        row.values.get(name) is not None for name, column in BY_NAME.items() if column.group == "measured"
    )
    return RowSummary(
        **{name: row.values.get(name) for name in TOLD},
        throughput_ratio=_ratio(row, rows, samples),
        capacity_ratio=_capacity(row, rows),
        **_in_pages(row),
        measured=was_measured,
        metrics=metrics,
        baseline=baseline,
        paired=differences,
        claimed=claim.claimed,
        earned=claim.earned,
        status=claim.status,
        badge=claim.badge,
        word=claim.word,
        codes=tuple(dict.fromkeys(reason.code for reason in _counting(claim))),
        open=_losing(claim, "quality_open"),
        untold=tuple(judgement.key for judgement in claim.judgements if judgement.untold),
        beyond=_losing(claim, "quality_beyond"),
        p=claim.p,
        adjusted_p=claim.adjusted_p,
        certified=claim.certified,
        replay=claim.replay,
        why=_why(claim) if was_measured else str(row.values.get("mechanism_notes") or "not measured"),
    )


def _measures(row: Row, context: Context, sampled: Sampled | None) -> tuple[dict[str, Measure], ...]:
    """The metrics of a row, of what it is held against, of a baseline its own first run, and of their difference."""
    sound = (p for p in row.evidence if not problems(p, row.values, context.registry, context.current))
    evidence = list(map(parse, sound))
    times = Counter(key for piece in evidence for key in piece.metrics)
    if twice := sorted(key for key, number in times.items() if number > 1):
        raise UserError(
            f"row {row.values.get('row_id')!r} has more than one piece of evidence on {', '.join(twice)}; give one",
            code="user.evidence-twice",
        )
    if row.values.get("mechanism") == BASELINE and sampled and _is_current(row, context):
        repeats = sorted(sampled.repeats, key=lambda repeat: repeat.metric)
        return (
            {repeat.metric: measured(repeat.second, repeat.rate) for repeat in repeats},
            {repeat.metric: measured(repeat.first, repeat.rate) for repeat in repeats},
            {repeat.metric: paired(repeat.second, repeat.first, repeat.rate) for repeat in repeats},
        )
    return tuple(_merged(getattr(piece, part) for piece in evidence) for part in ("metrics", "baseline", "paired"))


def _merged(parts: Iterable[Mapping[str, Measure]]) -> dict[str, Measure]:
    return {key: measure for part in parts for key, measure in sorted(part.items())}


def _is_current(row: Row, context: Context) -> bool:
    """Whether what a row without evidence was measured on is what there is now, as far as that is known."""
    if context.current is None:
        return True
    now = context.current.get(row.values.get("model"), {})
    return all(row.values.get(name) == now.get(name) for name in AGEING)


def _plain(row: Row, rows: Sequence[Row], field: str) -> list[Row]:
    """The baselines that a row's field can be held against."""
    return [
        other
        for other in rows
        if other.values.get("mechanism") == BASELINE
        and other.values.get(field)
        and all(other.values.get(name) == row.values.get(name) for name in ALIKE)
    ]


def _capacity(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens a byte of the engine's memory, over those of the baseline."""
    plain = _plain(row, rows, "capacity_tokens")
    found = [(one.values.get("capacity_tokens"), one.values.get("cache_memory_bytes")) for one in (row, *plain)]
    if len(found) != 2 or not all(tokens and memory for tokens, memory in found):
        return None
    (own, memory), (other, others) = found
    return own / memory * others / other


def _in_pages(row: Row) -> dict[str, float]:
    """What a token takes in an engine's own pages, and what a request's exact ones take beside them."""
    tokens, held, values = (row.values.get(name) for name in ("block_tokens", "block_bytes", "block_values"))
    if not (tokens and held and values):
        return {}
    return {"page_bits": 8 * held / values, "exact_bits": 8 * (row.values.get("exact_bytes") or 0) * tokens / values}


def _ratio(row: Row, rows: Sequence[Row], samples: Samples) -> Estimate | None:
    """How many times as fast as the baseline."""
    plain = _plain(row, rows, "throughput_tok_s")
    if len(plain) != 1 or not {_place(row), _place(plain[0])} <= samples.keys():
        return None
    return speed(samples[_place(row)].seconds, samples[_place(plain[0])].seconds)


def _counting(claim: Claim) -> list[Reason]:
    """The reasons that keep the row from its claim."""
    return [reason for finding in claim.findings if finding.counts for reason in finding.reasons]


def _losing(claim: Claim, code: str) -> tuple[str, ...]:
    """The metrics that keep the row from its claim for one reason."""
    return tuple(r.field.removeprefix("metrics.") for r in _counting(claim) if r.code == code)


def _why(claim: Claim) -> str:
    """Which metrics lose too much or are not settled, and for everything else the codes; why it is not certified."""
    counting = _counting(claim)
    told = []
    for code, word in (("quality_beyond", "beyond"), ("quality_open", "open")):
        keys = _losing(claim, code)
        told += [f"{', '.join(keys)} {word}"] if keys else []
    others = dict.fromkeys(r.code for r in counting if r.code not in ("quality_beyond", "quality_open"))
    return "; ".join([*told, *others, *filter(None, [claim.uncertified])])


def _best(lines: Iterable[RowSummary]) -> Iterator[Best]:
    """Of each engine and protocol the smallest certified row; speed is not judged, so nothing is the fastest."""
    groups: dict[tuple, list[RowSummary]] = {}
    for line in lines:
        if line.compresses:
            groups.setdefault((*line.place, line.protocol or ""), []).append(line)
    for (model, engine, protocol), tried in groups.items():
        certified = [line for line in tried if line.certified]
        tied = _smallest([line for line in certified if line.bits_per_value is not None])
        yield Best(
            model=model,
            engine=engine,
            protocol=protocol,
            row_id=tied[0] if len(tied) == 1 else None,
            tied=tuple(tied) if len(tied) > 1 else (),
            certified=len(certified),
            tried=len(tried),
        )


def _smallest(lines: list[RowSummary]) -> list[str]:
    """The smallest rows; bytes are counted, so two are alike or they are not."""
    least = min((line.bits_per_value for line in lines), default=None)
    return sorted(line.row_id for line in lines if line.bits_per_value == least)
