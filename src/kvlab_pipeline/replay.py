"""Rows measured again, by the code that measured them, on items that nobody could foresee.

A row and its evidence are made anew of the record that the workspace holds, and have to be the same field by field.
Then items of each eval are drawn, the row's variant and the engine as it is are measured on them again, and every
score, every count and what was observed have to be what the record says. The scores are float64 of one computation in
one order, so on the machine and with the number of threads of the record they are equal to the last bit.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from kvlab.calibration.load import FittedFiles
from kvlab.core.code import digest_of
from kvlab.core.errors import KvlabError, MixedIdentity, UserError
from kvlab.core.params import Params
from kvlab.core.recipe import WHOLE, canonical
from kvlab.core.records import read_json
from kvlab.core.testimony import LEAST
from kvlab.gate.catalogue import EVIDENCE, checked_row
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.catalogue.values import shown
from kvlab.gate.evidence.faults import OTHER_TEXT
from kvlab.gate.reasons import Reason
from kvlab.gate.replay import Replay, ReplayedScore
from kvlab.measure.windows import Window
from kvlab_pipeline.gate_page.measured_rows import (
    RULER,
    items_of,
    measured_row,
    refuse_other_items,
    refuse_other_labels,
    row_identity,
    variants_of,
)
from kvlab_pipeline.jobs.measure import Findings, Lab, Probes, run
from kvlab_pipeline.studies.mechanisms.measure import MechanismsPart, longest
from kvlab_pipeline.studies.mechanisms.plan import (
    BASELINE,
    FIDELITY,
    GREEDY,
    PlannedVariant,
    modules,
    scored_items,
    variants,
)
from kvlab_pipeline.studies.mechanisms.records import (
    COUNTED,
    SCORES,
    EvalRun,
    LengthCounts,
    MechanismRow,
    MechanismsRecord,
    read_mechanisms,
)
from kvlab_pipeline.studies.mechanisms.subjects import EvalSubject, score_rows
from kvlab_pipeline.studies.mechanisms.written import Greedy

FOLDER = "results/mechanisms"
SAME = (
    *("label", "mechanism", "mechanism_variant", "method", "scope", "bits", "protocol", "span", "recipe_id"),
    *("kv_cache_dtype", "cache_class", "codec", "backend", "pool", "served", "pattern", "canary_kl"),
)
"""Of a row of the record, what is the same however many items are asked."""
ITEM = ("label", "quality_eval_id", "metric", "item")
VARYING = 1 - LEAST  # relative; bytes that hang on what the text says


@dataclass
class ReplayPart(MechanismsPart):
    """Some variants of an engine and the engine as it is, on drawn items; what was found is kept here.

    The first window of text is always among them: the canary is measured on it. The engine as it is is asked what the
    variants are.

    Parameters
    ----------
    labels : sequence of str
    number : int
        Items of each eval that are drawn.
    """

    labels: Sequence[str] = ()
    number: int = 1
    every: dict[str, list[Window]] = field(default_factory=dict)
    rows: dict[str, MechanismRow] = field(default_factory=dict)
    scores: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCORES))

    def __post_init__(self):
        super().__post_init__()
        self.witnesses = []

    def _items(self, greedy: int) -> dict[str, list[Window]]:
        self.every = super()._items(greedy)
        counted, engine = {name: len(windows) for name, windows in self.every.items()}, self.engine
        asked = [one for one in variants(self.lab.params, engine) if one.label in self.labels and one.label != BASELINE]
        due = {name for one in asked for name in scored_items(counted, engine, one.protocol(self.protocols))}
        chance = secrets.SystemRandom()
        drawn = {
            name: chance.sample(windows, min(self.number, len(windows)))
            for name, windows in self.every.items()
            if name in due or name == FIDELITY
        }
        drawn[FIDELITY] = list(dict.fromkeys([self.every[FIDELITY][0], *drawn[FIDELITY]]))
        return drawn

    def _add(self, variant: PlannedVariant) -> None:
        if variant.label in (BASELINE, *self.labels):
            super()._add(variant)

    def _subject(self, name: str, *given) -> EvalSubject:
        subject = super()._subject(name, *given)
        if name == GREEDY:  # which asks the first windows, however few were drawn
            subject.judge = Greedy(len(self.every[name]))
        return subject

    def finish(self, findings: Findings, probes: Probes) -> None:
        """Keep what was found; see `JobPart.finish`."""
        found = {key: findings[id(subject)] for key, subject in self.by_eval.items()}
        self.rows = {variant.label: self._row(variant, found, probes) for variant in self.variants}
        scored = [row for key, subject in self.by_eval.items() for row in score_rows(subject, found[key])]
        self.scores = pl.DataFrame(scored, schema=SCORES)


class RecordedJob(NamedTuple):
    """One engine's record in the workspace, its table, and how many variants the whole run tried."""

    params: Params
    record: MechanismsRecord
    scores: pl.DataFrame
    tested: int


@dataclass(frozen=True)
class Workspace:
    """What made the rows: a folder with the records, calibrations and texts of a run, and its parameters by model.

    Parameters
    ----------
    params : mapping of str to Params
        By slug of the model.
    items : int
        Of each eval, drawn for each call.
    root : Path
        Where `results` and `calib` lie.
    """

    params: Mapping[str, Params]
    items: int = 1
    root: Path = Path()

    def __call__(self, rows: Sequence[Row]) -> list[Replay]:
        """What measuring again finds of each row; see `kvlab.gate.replay.Replayer`."""
        found: dict[int, Replay] = {}
        places: dict[tuple[Any, Any], list[int]] = {}
        for number, row in enumerate(rows):
            places.setdefault((row.values.get("model"), row.values.get("engine")), []).append(number)
        for place, numbers in places.items():
            found |= zip(numbers, self._engine(*place, [rows[number] for number in numbers]), strict=True)
        return [found[number] for number in range(len(rows))]

    def _engine(self, model: str | None, engine: str | None, rows: list[Row]) -> list[Replay]:
        """The same of the rows of one engine: together, and where that fails one by one."""
        told = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            job = self._job(model, engine)
            told |= {"measured_by": job.record.code, "code": digest_of(*modules(job.params))}
            labels = [label_of(row, job.record) for row in rows]
            wrong = [list(other_row(row, label, job)) for row, label in zip(rows, labels, strict=True)]
            asked = [label for label, reasons in zip(labels, wrong, strict=True) if not reasons]
            part = self._measured(job, asked) if asked else None
            found = [
                {"differs": tuple(reasons)} if reasons else compared(label, job, part)
                for label, reasons in zip(labels, wrong, strict=True)
            ]
        except KvlabError as error:
            if len(rows) > 1:
                return [one for row in rows for one in self._engine(model, engine, [row])]
            differs = Reason(code="replay_other", field="the run", said=error.lines[0])
            found = [{"lacking": error.lines[0]} if isinstance(error, UserError) else {"differs": (differs,)}]
        return [Replay(**told | one) for one in found]

    def _job(self, model: str | None, engine: str | None) -> RecordedJob:
        """What the workspace holds of an engine.

        Raises
        ------
        UserError
            It holds nothing of it, or not all that belongs to it.
        StaleResult, WitnessDisagrees, Fault
            As `read_mechanisms`.
        """
        params = self.params.get(model)
        if params is None or engine not in params.engines:
            raise UserError(f"the workspace has no record of {model} on {engine}", code="user.no-record")
        of_windows, of_needles = (read_json(path.with_suffix(".json")) for path in self._texts(model))
        there = items_of(of_windows, of_needles, read_json(self._texts(model)[1].with_name(RULER)))
        found = {}
        for one in params.engines:
            path = self.root / FOLDER / model / f"{one}.json"
            found[one] = read_mechanisms(path)
            refuse_other_items(path, found[one][0], there)
            refuse_other_labels(*found[one])
            refuse_other_variants(params, one, found[one][0])
        return RecordedJob(params, *found[engine], sum(variants_of(record) for record, _ in found.values()))

    def _texts(self, model: str) -> tuple[Path, Path]:
        """The windows and the needles of a model."""
        calib = self.root / "calib"
        return calib / "corpus" / model / "windows.safetensors", calib / "needles" / model / "needles.parquet"

    def _fitted(self, params: Params) -> dict[str, FittedFiles]:
        """The calibration of a model's rows, as far as it is there; none where no codec needs one."""
        origin = params.calibration.origin
        named = {
            "sigma": f"sigma/{{}}/{origin}.safetensors",
            "codebooks": f"codebooks/{{}}/{origin}.json",
            "components": f"components/{{}}/{origin}.safetensors",
            "rotated": f"sigma/{{}}/{origin}-post_rope.safetensors",
            "archive": f"archive/{{}}/{origin}.safetensors",
        }
        paths = {kind: self.root / "calib" / name.format(params.model.slug) for kind, name in named.items()}
        there = {kind: path for kind, path in paths.items() if path.is_file()}
        return {origin: FittedFiles(**there)} if "sigma" in there else {}

    def _measured(self, job: RecordedJob, labels: Sequence[str]) -> ReplayPart:
        """Some rows of a record, measured again.

        Raises
        ------
        MixedIdentity
            Weights, texts or calibration are not those of the record.
        UserError
            The device or a library is another, so that nothing has to come out the same; or something is missing.
        """
        windows, needles = self._texts(job.params.model.slug)
        length = longest(job.params, needles)
        with Lab.open(job.params, windows, self._fitted(job.params), longest=length) as lab:
            part = ReplayPart(
                lab, job.record.engine, needles, job.record.code, Path(), labels=labels, number=self.items
            )
            refuse_another(job.record, part)
            run(lab, [part], "")
        return part


def refuse_other_variants(params: Params, engine: str, record: MechanismsRecord) -> None:
    """`MixedIdentity` where a record has not what its run planned: a row among fewer is certified sooner."""
    planned, there = (
        sorted(one.label for one in some) for some in (variants(params, engine), (*record.rows, *record.missing))
    )
    if planned != there:
        raise MixedIdentity({f"variants of {engine}": [", ".join(planned), ", ".join(there)]})


def refuse_another(record: MechanismsRecord, part: ReplayPart) -> None:
    """`MixedIdentity` where what is measured is not what the record is of; `UserError` where the machine is another."""
    theirs, ours = record.provenance, part.lab.provenance([part.lab.params.calibration.origin])
    both = {name: (getattr(theirs, name), getattr(ours, name)) for name in ("model_hash", "corpus_hash", "calibration")}
    both |= {"needles_hash": (record.needles_hash, part.planted.needles_hash)}
    both |= {"ruler_hash": (record.ruler_hash, part.texts.items_hash)}
    windows = part.lab.windows
    both |= {name: (getattr(record, name), getattr(windows, name)) for name in ("context", "eval")}
    both |= {"dtype": (record.dtype, part.lab.params.mechanisms.dtype)}
    both |= {"documents": tuple(tuple(one or ()) for one in (record.documents, windows.documents.get("test")))}
    if differing := {name: list(map(str, pair)) for name, pair in both.items() if pair[0] != pair[1]}:
        raise MixedIdentity(differing)
    for name in ("device", "versions"):
        if getattr(theirs, name) != getattr(ours, name):
            raise UserError(
                f"the record is of {name} {getattr(theirs, name)}, and here {name} is {getattr(ours, name)}",
                code="user.other-machine",
            )


# ---------------------------------------------------------------------------------- what is held against what


def label_of(row: Row, record: MechanismsRecord) -> str:
    """The row of a record that a row is; `UserError` where it is none of them."""
    named = {row_identity(record, one.label)["row_id"]: one.label for one in record.rows}
    row_id = row.values.get("row_id")
    if row_id not in named:
        raise UserError(f"the workspace has no record of {row_id}", code="user.no-record")
    return named[row_id]


def other_row(row: Row, label: str, job: RecordedJob) -> Iterator[Reason]:
    """Where a row or its evidence is not what its record gives, field by field."""
    recorded = next(one for one in job.record.rows if one.label == label)
    made = measured_row(job.record, recorded, job.scores, TIERS[0], job.tested)
    pieces = {canonical(piece): piece for piece in made.pop(EVIDENCE)}
    values = checked_row(made)
    for name in dict.fromkeys([*values, *row.values]):
        claimed, due = row.values.get(name), values.get(name)
        if claimed != due:
            yield Reason(code="record_other", field=name, said=f"is {shown(claimed)}; its record gives {shown(due)}")
    given = {canonical(piece): piece for piece in row.evidence}
    for content in pieces.keys() ^ given.keys():
        piece = pieces.get(content) or given[content]
        where = "gives" if content in pieces else "does not give"
        said = f"{shown(piece.get('evidence_id'))} is what its record {where}"
        yield Reason(code="record_other", field=f"evidence of {shown(piece.get('quality_eval_id'))}", said=said)


def compared(label: str, job: RecordedJob, part: ReplayPart) -> dict[str, Any]:
    """What measuring again found of one row, as fields of a `Replay`."""
    if label not in part.rows:
        why = next((one.reason for one in part.missing if one.label == label), "the parameters do not plan it")
        return {"lacking": f"{label}: {why}"}
    claimed, found = next(one for one in job.record.rows if one.label == label), part.rows[label]
    variant = next(one for one in part.variants if one.label == label)
    differs = [
        Reason(code="replay_other", field=name, said=f"is {was!r} in the record, measured again it is {now!r}")
        for name, was, now in (
            *seen(claimed, found, variant),
            *(one for run in found.evals for one in counts(claimed, run, variant, part)),
        )
    ]
    mine = part.scores.filter(label=label).join(job.scores, on=ITEM, how="left", suffix="_claimed")
    scores = []
    for one in mine.iter_rows(named=True):
        for side in ("variant", "baseline"):
            score = ReplayedScore(
                **{name: one[name] for name in ("quality_eval_id", "metric", "item")},
                of=side,
                claimed=one[f"{side}_claimed"],
                found=one[side],
            )
            scores.append(score)
            if score.claimed != score.found:
                said = f"is {score.claimed:.6g} of item {score.item} in the record, measured again {score.found:.6g}"
                differs.append(Reason(code="replay_other", field=f"{score.metric} of the {side}", said=said))
    return {"scores": tuple(scores), "differs": tuple(differs)}


def seen(claimed: MechanismRow, found: MechanismRow, variant: PlannedVariant) -> Iterator[tuple[str, Any, Any]]:
    """Fields in which what ran is not what the record says, with both values."""
    for name in SAME:
        # the canary of an engine's own dtype is its mean KL over all windows, which the scores tell
        if getattr(claimed, name) != getattr(found, name) and not (name == "canary_kl" and variant.cache_dtype):
            yield name, getattr(claimed, name), getattr(found, name)


def counts(
    claimed: MechanismRow, found: EvalRun, variant: PlannedVariant, part: ReplayPart
) -> Iterator[tuple[str, Any, Any]]:
    """Counts of one eval that are not those of the record, in each item of a length that was drawn.

    What a codec of whole caches stores and a pattern reads hangs on the text, so that items are alike within `VARYING`.
    Of lengths near them the record may say other bytes for a value, by what the gate allows two evals.
    """
    name = found.quality_eval_id
    was = next(one for one in claimed.evals if one.quality_eval_id == name)
    there = Counter(part.length(variant, window) for window in part.every[name])
    recorded, drawn = ({one.length: one for one in run.lengths} for run in (was, found))
    said = {length: one.items for length, one in recorded.items()}
    for kind, due, now in (
        *((kind, getattr(was, kind), getattr(found, kind)) for kind in ("version", "context")),
        ("lengths", said, dict(sorted(there.items()))),
    ):
        if due != now:
            yield f"{kind} of {name}", due, now
    varying = ("read_bytes", *(["kv_bytes"] if variant.variant in WHOLE else []))
    for length, one in recorded.items():
        nearest = drawn[min(drawn, key=lambda other: (other != length, abs(other.tokens - length.tokens)))]
        if abs(nearest.tokens - length.tokens) > OTHER_TEXT * length.tokens:
            continue  # what is kept by number weighs otherwise there; drawn by another call
        for count in COUNTED if length in drawn else ("kv_bytes", "read_bytes"):
            due, now = (share(each, count, length in drawn) for each in (one, nearest))
            allowed = OTHER_TEXT if length not in drawn else VARYING if count in varying else 0
            if (due is None) != (now is None) or (due is not None and abs(now - due) > allowed * due):
                yield f"{count} of {name}", due, now


def share(counted: LengthCounts, count: str, alike: bool) -> float | None:
    """A count over the items, or over the K and V elements where another length is set beside it."""
    value = getattr(counted, count)
    return None if value is None else value / (counted.items if alike else counted.kv_values)
