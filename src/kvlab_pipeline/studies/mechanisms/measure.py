"""What each mechanism costs on one engine: quality on text and on needles, bytes and time, for the gate.

A codec runs as a tap, so it works on every engine and only its storage is simulated; an engine's own cache runs as
the engine has it. Both are held against the engine as it is, window by window and in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from statistics import median

import polars as pl
import torch

from kvlab.attention.latent_svd import LatentMoments
from kvlab.attention.named import mechanism
from kvlab.cache.hf.expected_fires import CacheCounts
from kvlab.calibration.load import FittedFiles
from kvlab.core.errors import CapabilityError, CodecNotActive, CorpusError, ModelError
from kvlab.core.model import ModelInfo, load_tokenizer, resolve
from kvlab.core.params import Params
from kvlab.core.recipe import Cell
from kvlab.core.testimony import Pool, Testimony
from kvlab.engines import capability
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import Tally
from kvlab.measure.engines import Which, device
from kvlab.measure.latent import CALIBRATING, moments_of
from kvlab.measure.loop import walk
from kvlab.measure.mechanism import ReducedCache, SparseReading, numbers_beside, refuse_needless
from kvlab.measure.store import Found
from kvlab.measure.variant import CodecVariant, Variant
from kvlab.measure.windows import Window, windows_of
from kvlab.measure.witnessing import WitnessSubject, witnessed_mean_of
from kvlab.text import needles, ruler
from kvlab_pipeline.jobs.measure import Findings, Lab, Probes, calibrated_for, run
from kvlab_pipeline.studies.mechanisms.cached import Cached, request_of
from kvlab_pipeline.studies.mechanisms.items import VERSIONS, retrievals, tasks
from kvlab_pipeline.studies.mechanisms.plan import (
    BASELINE,
    FIDELITY,
    GREEDY,
    NEEDLE,
    TASKS,
    PlannedVariant,
    protocols,
    scored_items,
    variants,
)
from kvlab_pipeline.studies.mechanisms.records import (
    COUNTED,
    SCORES,
    EvalRun,
    Length,
    LengthCounts,
    MechanismRow,
    MechanismsRecord,
    Missing,
    write_mechanisms,
)
from kvlab_pipeline.studies.mechanisms.subjects import (
    EvalSubject,
    OwnCache,
    Seconds,
    refuse_unread,
    score_rows,
    storage_of,
)
from kvlab_pipeline.studies.mechanisms.written import Answers, Greedy, Writer


def mechanisms(
    params: Params,
    engine: str,
    windows_path: Path,
    needles_path: Path,
    fitted: dict[str, FittedFiles],
    code: str,
    out: Path,
) -> None:
    """Measure every variant of one engine and write its ``.parquet`` and ``.json``; see `mechanisms.records`.

    Parameters
    ----------
    fitted : dict of str to FittedFiles
        The calibrations by origin; empty where no codec needs one.
    code : str
        Digest of the code that measures; it ends in the evidence.

    Raises
    ------
    CalibrationMismatch
        A codec needs a calibration that was not given.
    CorpusError
        The needles' contexts are not as long as the windows'.
    CodecNotActive
        A codec fired less often than it should have, a one-bit codec leaves the logits alone, or the engine's own
        cache does.
    NonFinite
        Logits or coded tensors hold NaN or infinity.
    """
    with Lab.open(params, windows_path, fitted, longest=longest(params, needles_path)) as lab:
        run(lab, [MechanismsPart(lab, engine, needles_path, code, out)], f"{engine} mechanisms")


def longest(params: Params, needles_path: Path) -> int:
    """Tokens of the longest needle with its question and answer.

    RULER's texts are longer: engines that write are those that need not be told in advance.
    """
    return max(len(window.ids) for window in retrievals(needles.load(needles_path, resolve(params.model).model_hash)))


@dataclass
class MechanismsPart:
    """Everything that the gate judges on one engine."""

    lab: Lab
    engine: str
    needles_path: Path
    code: str
    out: Path

    def __post_init__(self):
        lab, windows = self.lab, self.lab.windows
        self.planted = needles.load(self.needles_path, lab.info.model_hash)
        if self.planted.context != windows.context:
            raise CorpusError(
                f"{self.needles_path} has contexts of {self.planted.context} tokens, the windows of {windows.context};"
                " run `kvlab step needles` again",
                code="corpus.other-context",
            )
        self.protocols = protocols(lab.params, self.engine)
        for protocol in self.protocols:
            capability.check_protocol(self.engine, protocol)
        self.plain = Which.of(self.engine, lab.params.mechanisms.dtype)
        self.texts = ruler.load(self.needles_path.with_name("ruler.parquet"), lab.info.model_hash)
        self.scored = self._items(lab.params.mechanisms.greedy)
        self.windows = list(dict.fromkeys(window for listed in self.scored.values() for window in listed))
        self.missing: list[Missing] = []
        self.variants: list[PlannedVariant] = []
        self.by_eval: dict[tuple[str, str], EvalSubject] = {}
        for planned in variants(lab.params, self.engine):
            self._add(planned)
        self.subjects = list(self.by_eval.values())
        self.cells: list[Cell] = [one.cell for one in self.variants if one.tapped and one.codec]
        cells = [lab.subject(cell) for cell in self.cells]
        self.witnesses = lab.witnesses(cells, self.scored.get(FIDELITY, ()), judged=False)

    def _items(self, greedy: int) -> dict[str, list[Window]]:
        """The windows of every eval that some variant is asked on this engine."""
        test = windows_of(self.lab.windows, "test")
        there = {FIDELITY: test, NEEDLE: retrievals(self.planted), GREEDY: test[:greedy]} | tasks(self.texts)
        counts = {name: len(listed) for name, listed in there.items()}
        due = [
            scored_items(counts, self.engine, one.protocol(self.protocols))
            for one in variants(self.lab.params, self.engine)
        ]
        return {name: there[name] for name in there if any(name in one for one in due)}

    def _asked(self, planned: PlannedVariant) -> list[str]:
        """The evals that a variant is asked."""
        counts = {name: len(listed) for name, listed in self.scored.items()}
        return list(scored_items(counts, self.engine, planned.protocol(self.protocols)))

    def _subject(self, name: str, planned: PlannedVariant, which: Which, variant: Variant | None) -> EvalSubject:
        given = name, planned, self.lab, which, self.plain, variant
        if planned.cached:
            return Cached(*given, tokens=self.lab.params.mechanisms.cached_tokens)
        if name == GREEDY:
            return Writer(*given, judge=Greedy(len(self.scored[name])))
        if name in TASKS:
            return Writer(*given, judge=Answers(name, self.texts, self.tokenizer))
        return EvalSubject(*given)

    def _variant(self, planned: PlannedVariant, which: Which) -> Variant | None:
        """What is at work in a plan's place; the Cache is that of `Cached`."""
        engines = self.lab.engines
        if planned.cached:
            return None
        if planned.pattern:
            return SparseReading(mechanism(planned.pattern))
        if planned.kept:
            dtype = getattr(torch, self.lab.params.mechanisms.dtype)
            plain, moments = (lambda: engines.get(self.plain)), (lambda: self._moments)
            return ReducedCache(mechanism(planned.kept), planned.cell, plain, moments, dtype)
        if planned.tapped:
            calibrated = calibrated_for(planned.cell, self.lab.calibrated)
            return CodecVariant(coder_of(planned.cell, calibrated, self.lab.memos.get(self.plain), judged=False))
        return OwnCache(planned.label, lambda: engines.get(which), planned.paged)

    @cached_property
    def _moments(self) -> dict[int, LatentMoments]:
        """What latents are fitted to: passes over windows of the calibration's text, which nothing is scored on."""
        return moments_of(self.lab.engines.get(self.plain), self.lab.windows.calib[:CALIBRATING].tolist())

    @cached_property
    def tokenizer(self):
        """The model's."""
        return load_tokenizer(self.lab.info)

    def _add(self, planned: PlannedVariant) -> None:
        """A variant among those that run, or, where its engine cannot be had here, among those that are missing."""
        lab, cell = self.lab, planned.cell
        which = self.plain._replace(cache_dtype=planned.cache_dtype or capability.AUTO)
        if planned.paged:
            which = lab.engines.coding(which, cell.recipe, calibrated_for(cell, lab.calibrated))
        variant, subjects = self._variant(planned, which), []
        for name in self._asked(planned):
            answered = planned.label == BASELINE and name != FIDELITY  # in the clean pass
            subjects.append(self._subject(name, planned, which, None if answered else variant))
        try:
            if named := planned.pattern or planned.kept:
                protocol = planned.protocol(self.protocols)
                refuse_needless(mechanism(named), self.engine, protocol, lab.info, lab.windows.context)
            if which != self.plain:
                self._start(planned, subjects)
        except (CapabilityError, ModelError) as error:
            names = {"label": planned.label, "mechanism": planned.mechanism, "mechanism_variant": planned.variant}
            self.missing.append(Missing(**names, reason=str(error)))
            return
        self.variants.append(planned)
        self.by_eval |= {(planned.label, subject.quality_eval_id): subject for subject in subjects}

    def _start(self, planned: PlannedVariant, subjects: list[EvalSubject]) -> None:
        """Start an engine with a cache of its own now, unless all that it could say is known: it may refuse.

        One with coded pages is a process of a gigabyte: it scores all its windows now and ends, so that no two of them
        run at a time. What it found is in the store then.
        """
        if planned.cache_dtype:
            refuse_unread(device(), planned.cache_dtype)
        store, engines = self.lab.store, self.lab.engines
        wanted = [(store.key(subject), w) for subject in subjects for w in self.scored[subject.quality_eval_id]]
        if any(store.get(key, window) is None for key, window in wanted):
            engines.get(self.plain)  # first, as most of the memory is its
            _ = engines.get(which := subjects[0].which).storage
            if planned.paged:
                engines.references = {} if engines.references is None else engines.references
                for _ in walk(self.windows, subjects, self.lab.visit, store, planned.label):
                    pass
                engines.end(which)

    def finish(self, findings: Findings, probes: Probes) -> None:
        """See `Part.finish`."""
        lab = self.lab
        found = {key: findings[id(subject)] for key, subject in self.by_eval.items()}
        record = MechanismsRecord(
            provenance=lab.provenance([lab.params.calibration.origin]),
            needles_hash=self.planted.needles_hash,
            ruler_hash=self.texts.items_hash,
            code=self.code,
            engine=self.engine,
            dtype=lab.params.mechanisms.dtype,
            context=lab.windows.context,
            eval=lab.windows.eval,
            documents=lab.windows.documents.get("test"),
            rows=tuple(self._row(planned, found, probes) for planned in self.variants),
            missing=tuple(self.missing),
            witnessed=tuple(self._testimony(one, findings) for one in self.witnesses),
        )
        ordered = [(v, name) for v in self.variants for name in self._asked(v)]
        rows = [row for v, name in ordered for row in score_rows(self.by_eval[v.label, name], found[v.label, name])]
        write_mechanisms(self.out, record, pl.DataFrame(rows, schema=SCORES))

    def _testimony(self, witness: WitnessSubject, findings: Findings) -> Testimony:
        """What was witnessed of one variant, if that is what is written of it."""
        label = next(planned.label for planned in self.variants if planned.cell == witness.cell)
        ((window, seen),) = findings[id(witness)]
        means = dict(findings[id(self.by_eval[label, FIDELITY])])[window].note["variant"]
        return witnessed_mean_of(seen, witness.cell, means)

    def _row(self, planned: PlannedVariant, found: dict, probes: Probes) -> MechanismRow:
        windows, cell = self.lab.windows, planned.cell
        runs = tuple(self._eval_run(planned, name, found[planned.label, name]) for name in self._asked(planned))
        took = [] if planned.cached else seconds(found[planned.label, FIDELITY], found[BASELINE, FIDELITY])
        note, last = (found[planned.label, FIDELITY][place][1].note for place in (0, -1))
        storage, tapped = storage_of(note), planned.tapped
        return MechanismRow(
            label=planned.label,
            mechanism=planned.mechanism,
            mechanism_variant=planned.variant,
            method=planned.method,
            scope=planned.scope,
            bits=planned.bits,
            protocol=planned.protocol(self.protocols),
            span=planned.span(self.protocols),
            recipe_id=planned.recipe_id,
            kv_cache_dtype=storage.dtype,
            cache_class=storage.cache,
            codec=planned.codec,
            throughput_tok_s=windows.test.shape[1] / median(one.whole for one in took) if took else None,
            seconds=tuple(one.whole for one in took),
            compression_overhead_ms=1e3 * median(one.encode for one in took) if tapped else None,
            decompression_overhead_ms=1e3 * median(one.decode for one in took) if tapped else None,
            canary_kl=(
                probes[self.plain, cell.protocol, cell.placement].canary
                if tapped and not planned.kept
                else own_canary(planned, found)
            ),
            **{name: note.get(name) for name in ("backend", "pool", "served", "pattern")},
            witnessed_kl=last.get("witnessed"),
            **runs[0].model_dump(include=set(COUNTED)),
            evals=runs,
        )

    def _eval_run(self, planned: PlannedVariant, name: str, found: list[tuple[Window, Found]]) -> EvalRun:
        """What ran while an eval was scored; refused when a codec did not fire as often as it should have."""
        own = max(item.length for item in self.texts.items if item.task == TASKS[name]) if name in TASKS else None
        alike: dict[Length, list[tuple[Window, Found]]] = {}
        for window, one in found:
            alike.setdefault(self.length(planned, window), []).append((window, one))
        lengths = [
            LengthCounts(**length._asdict(), items=len(some), **self._counts(planned, name, length.tokens, some))
            for length, some in sorted(alike.items())
        ]
        return EvalRun.of(lengths, quality_eval_id=name, version=VERSIONS[name], context=own)

    def _counts(
        self, planned: PlannedVariant, name: str, tokens: int, found: list[tuple[Window, Found]]
    ) -> dict[str, int | None]:
        """What ran on the windows of which so many tokens are stored, as fields of `Counts`."""
        info = self.lab.info
        if planned.paged:
            return paged_counts(found, info)
        if planned.cached:
            return {key: sum(one.note[key] for _, one in found) for key in CacheCounts._fields}
        if planned.pattern:
            return read_counts(planned.pattern, found, info, storage_of(found[0][1].note).itemsize)
        if planned.cell is None:
            values = tokens * len(found) * info.values_per_token
            held = values * storage_of(found[0][1].note).itemsize
            return {"fires": 0, "expected_fires": 0, "kv_bytes": held, "kv_values": values}
        coder = self.by_eval[planned.label, name].coder
        coder.cell = planned.cell.model_copy(update={"windows": len(found)})
        coder.tally = Tally.total([one.note["tally"] for _, one in found])
        coding = coder.coding(info, tokens, self.plain.dtype)
        held = coding.coded_bytes + coding.raw_bytes
        return {
            "fires": coding.fires,
            "expected_fires": coding.expected_fires,
            "kv_bytes": held,
            "kv_values": coding.values,
            "read_bytes": held if planned.kept else None,  # a step reads all that is kept
        }

    def length(self, planned: PlannedVariant, window: Window) -> Length:
        """What a variant stores of a window; the Cache stores no more of one than is asked."""
        if planned.cached:
            calls = (window.context, *map(len, request_of(window, self.lab.params.mechanisms.cached_tokens).calls))
            return Length(sum(calls), len(calls))
        return Length(window.context if planned.span(self.protocols) == "context" else len(window.ids), 1)


def paged_counts(found: list[tuple[Window, Found]], info: ModelInfo) -> dict[str, int]:
    """What went into coded pages: each token takes what the engine's own page has for it, and a window's exact ones."""
    (pool,) = {Pool(**one.note["pool"]) for _, one in found}
    tokens = sum(len(window.ids) for window, _ in found)
    return {
        "fires": sum(one.note["fires"] for _, one in found),
        "expected_fires": 2 * info.n_layers * len(found),
        "kv_bytes": tokens * pool.block_bytes // pool.block_tokens + len(found) * pool.exact_bytes,
        "kv_values": tokens * info.values_per_token,
    }


def read_counts(pattern: str, found: list[tuple[Window, Found]], info: ModelInfo, itemsize: int) -> dict[str, int]:
    """What was stored and read of the contexts: K and V of every token, and the numbers that a pattern chooses by."""
    tokens = sum(window.context for window, _ in found)
    values, plan = tokens * info.values_per_token, mechanism(pattern).plan(info.n_layers, 0)
    return {
        "fires": 0,
        "expected_fires": 0,
        "kv_bytes": (values + ceil(tokens * numbers_beside(plan, info))) * itemsize,
        "kv_values": values,
        "read_bytes": ceil(sum(one.note["read"] for _, one in found)),
    }


def seconds(found: list[tuple[Window, Found]], plain: list[tuple[Window, Found]]) -> list[Seconds]:
    """What each window took: of a codec, the engine's own pass over that window, and encoding and decoding.

    That is what coding adds to a pass, however a cell is scored: judging its error and scoring over the coded cache
    are no part of it, and a tensor that another cell has coded counts with what that took.
    """
    own = {window: one.note["seconds"] for window, one in plain}
    took = []
    for window, one in found:
        tally = one.note.get("tally")
        if tally is None:
            took.append(Seconds(one.note["seconds"], 0.0, 0.0))
        else:
            encode, decode = tally["encode_seconds"], tally["decode_seconds"]
            took.append(Seconds(own[window] + encode + decode, encode, decode))
    return took


def own_canary(planned: PlannedVariant, found: dict[tuple[str, str], list[tuple[Window, Found]]]) -> float | None:
    """What an engine's own cache does to the logits, coded pages when they were zeroed; None of the engine as it is.

    Raises
    ------
    CodecNotActive
        It does no more than a second run of the engine as it is: the pass did not read what the cache stores.
    """
    if planned.pattern or planned.kept or planned.cached:
        return found[planned.label, FIDELITY][0][1].note["canary"]
    if planned.cache_dtype is None and not planned.paged:
        return None
    kl, least = (mean_kl(found[label, FIDELITY]) for label in (planned.label, BASELINE))
    if kl <= least:
        raise CodecNotActive(
            f"a cache of {planned.cache_dtype or planned.label} leaves every logit of the engine as it is; attention"
            " does not read what is stored",
            code="not-active.unread",
        )
    return found[planned.label, FIDELITY][0][1].note["canary"] if planned.paged else kl


def mean_kl(found: list[tuple[Window, Found]]) -> float:
    """Mean KL over windows, nats per token."""
    return sum(one.note["variant"]["kl"] for _, one in found) / len(found)
