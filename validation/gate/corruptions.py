"""What the gate says when one field of a case that passes is corrupted, and beside it the published rules.

Each corruption has a code of its own, so a rule that stops working cannot hide behind another that also fails. Codes
that belong to whole files and to days are left to the tests of what reads them.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvlab.gate import catalogue, registry
from kvlab.gate.catalogue.rows import EMBEDDED, EVIDENCE, Row
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.check import check
from kvlab.gate.evidence import EvidenceError, parse
from kvlab.gate.rules import Context
from validation.gate import published_rules
from validation.gate.passing_case import (
    FIRES,
    IMPORTED,
    ITEMS,
    MODEL,
    PATTERN,
    TESTED,
    TOKENS,
    VALUES,
    valid_case,
)

__all__ = [
    "ABSENT",
    "MUTATIONS",
    "GateOutcome",
    "Mutation",
    "Renamed",
    "as_row",
    "judged",
    "published_passes",
    "table",
    "valid_case",
]

TODAY = datetime.date(2026, 1, 1)


# ------------------------------------------------------------------------------- judging a case


@dataclass(frozen=True)
class GateOutcome:
    """What the gate says of a case: whether it passes, and the codes of everything that keeps it from passing."""

    passes: bool
    codes: frozenset[str]


def judged(case: dict[str, Any]) -> GateOutcome:
    """Read a case's configuration, environment and registry, and check its rows, as far as the registry can be used."""
    refused = _refused(catalogue.from_config, case["config"]) | _refused(catalogue.environment, case["environment"])
    files = case["mechanisms"], case["evals"]
    faulty = frozenset(reason.code for reason in registry.problems(*files))
    if faulty:
        return GateOutcome(False, refused | faulty)
    context = Context(registry.parse(*files), case["current"], today=TODAY)
    report = check(map(as_row, case["rows"].values()), context, strict=True)
    counting = (finding for claim in report.claims for finding in claim.findings if finding.counts)
    codes = frozenset(reason.code for finding in counting for reason in finding.reasons)
    return GateOutcome(report.verdict == "pass" and not refused, refused | codes)


def _refused(read, given) -> frozenset[str]:
    try:
        read(given)
    except RowError as error:
        return frozenset(reason.code for reason in error.reasons)
    return frozenset()


def as_row(entry: dict[str, Any]) -> Row:
    """A row's object as the gate takes it, not yet checked: it has to find everything by itself."""
    values = {key: value for key, value in entry.items() if key not in (EVIDENCE, EMBEDDED)}
    return Row(values, tuple(entry.get(EVIDENCE, ())), entry.get(EMBEDDED), source=str(entry.get("row_id")))


def published_passes(case: dict[str, Any]) -> bool:
    """What the published rules say of the same case, given the same registry.

    They read the fields that are declared from the environment, coerced, and look up the record of each row in the
    registry, unless the row brings one of its own, which they believe.
    """
    variants = _pairs(case["mechanisms"])
    evals = [entry.get("quality_eval_id") for entry in _entries(case["evals"], "evals")]
    return all(_published(row, variants, evals) is not False for row in _published_rows(case))


READ = (
    *("mechanism", "mechanism_variant", "support_status", "quality_eval_id", "quality_eval_status"),
    *("draft_model_id", "speculative_acceptance_rate", EMBEDDED),
)
"""Fields of a row that some published rule reads."""


def published_reads(case: dict[str, Any]) -> tuple:
    """All that the published rules read of a case: what differs in nothing of it they cannot tell apart."""
    evals = {entry.get("quality_eval_id") for entry in _entries(case["evals"], "evals")}
    rows = [{name: row.get(name) for name in READ} for row in _published_rows(case)]
    return set(_pairs(case["mechanisms"])), evals, rows


def _published_rows(case: dict[str, Any]) -> list[dict[str, Any]]:
    declared = {str(key).replace("-", "_").upper(): str(value) for key, value in case["config"].items()}
    rows = [published_rules.published_fields(declared) | {"support_status": declared.get("SUPPORT_STATUS")}]
    return [*rows, published_rules.published_fields(case["environment"]), *case["rows"].values()]


def _published(row: dict[str, Any], variants: Iterable, evals: Iterable) -> bool | None:
    record = row.get(EMBEDDED) or published_rules.published_record(row, list(variants), list(evals))
    return published_rules.published_verdict(row | {published_rules.RECORD: record})[0]


def _pairs(file: object) -> list[tuple]:
    pairs = [(entry.get("mechanism"), entry.get("variant")) for entry in _entries(file, "mechanisms")]
    return [pair for pair in pairs if all(pair)]


def _entries(file: object, key: str) -> list[dict]:
    listed = file.get(key) if isinstance(file, dict) else None
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


# ---------------------------------------------------------------------------------- corruptions


@dataclass(frozen=True)
class Renamed:
    """In place of a value: the field is kept, under another name."""

    name: str


ABSENT = Renamed("")
"""In place of a value: the field is taken out."""


@dataclass(frozen=True)
class Mutation:
    """One field of the valid case, what it becomes, and the code that has to be found.

    Parameters
    ----------
    code : str
    path : tuple
        Keys and numbers that lead to the field; a number one past the end of a list adds to it.
    value : object
        What stands there, `ABSENT`, or `Renamed`.
    sealed : bool
        Whether evidence is given a fresh id, as by somebody who knows how; otherwise it keeps the old one.
    """

    code: str
    path: tuple[str | int, ...]
    value: Any
    sealed: bool = True

    @property
    def where(self) -> str:
        """What is corrupted: config, registry, row, evidence, or current."""
        if EVIDENCE in self.path[:-1]:
            return "evidence"
        kinds = {"environment": "config", "mechanisms": "registry", "evals": "registry", "rows": "row"}
        return kinds.get(str(self.path[0]), str(self.path[0]))

    @property
    def field(self) -> str:
        """The field as a dotted path."""
        return ".".join(map(str, self.path))

    @property
    def name(self) -> str:
        """The field and what becomes of it."""
        if self.value is ABSENT:
            return f"{self.field} taken out"
        if isinstance(self.value, Renamed):
            return f"{self.field} spelt {self.value.name}"
        return f"{self.field} = {shown if len(shown := repr(self.value)) <= 40 else shown[:37] + '...'}"

    def applied(self) -> dict[str, Any]:
        """The valid case with this field corrupted."""
        case = valid_case()
        holder: Any = case
        for key in self.path[:-1]:
            holder = holder[key]
        _put(holder, self.path[-1], copy.deepcopy(self.value))
        if self.where == "evidence" and self.sealed:
            _seal(case["rows"][self.path[1]][EVIDENCE])
        return case


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    elif isinstance(value, Renamed):
        kept = holder.pop(key)
        if value != ABSENT:
            holder[value.name] = kept
    else:
        holder[key] = value


def _seal(pieces: list[dict[str, Any]]) -> None:
    """Give evidence the id of its content, where it has one."""
    for piece in pieces:
        try:
            found = parse(piece).content_id()
        except EvidenceError:
            continue
        if found:
            piece["evidence_id"] = found


def _of(*start: str | int):
    """Mutations below one place, as (code, rest of the path, value)."""

    def mutation(code: str, *rest: Any, sealed: bool = True) -> Mutation:
        *path, value = rest
        return Mutation(code, (*start, *path), value, sealed)

    return mutation


_config_field, _variable = _of("config"), _of("environment")
_mechanism, _eval = _of("mechanisms", "mechanisms"), _of("evals", "evals")
_row, _fp8, _int, _pages = _of("rows"), *(_of("rows", name, EVIDENCE, 0) for name in ("fp8", "int", "pages"))
_sparse, _evicted = (_of("rows", name, EVIDENCE, 0) for name in ("sparse", "evicted"))
BASELINE, FP8, INT, CLASS, PAGES, MTP, SPARSE, EVICTED = range(8)  # places of the registered mechanisms
NEEDLE, FIDELITY = range(2)  # and evals

MUTATIONS: tuple[Mutation, ...] = (
    # ------------------------------------------------ what a person declares
    _config_field("field_unknown", "mechanism", Renamed("mechansim")),
    _config_field("field_twice", "mechanism_variant", "fp8_e4m3"),
    _config_field("value_kind", "compression-ratio", True),
    _config_field("value_unknown_word", "support-status", "Supported"),
    _config_field("value_control_character", "mechanism-notes", "per-tensor\nscales"),
    _config_field("value_outer_space", "quality-eval-id", "needle "),
    _config_field("value_too_long", "mechanism-notes", "x" * 5000),
    _config_field("value_out_of_range", "compression-overhead-ms", -1.5),
    _variable("value_not_a_number", "SPECULATIVE_ACCEPTANCE_RATE", "70%"),
    _variable("value_not_whole", "SPECULATIVE_WASTED_TOKENS", "128.9"),
    _variable("value_not_finite", "SPECULATIVE_ACCEPTANCE_RATE", "nan"),
    # ------------------------------------------------ what a row declares
    _row("tier_missing", "fp8", "support_status", ABSENT),
    _row("variants_uneven", "fp8", "mechanism_variant", "fp8_e4m3+mtp"),
    _row("baseline_combined", "mtp", "mechanism", "baseline+speculative_decoding"),
    _row("baseline_variant", "baseline", "mechanism_variant", "fast"),
    _row("variant_unregistered", "fp8", "mechanism_variant", "fp8_e4m4"),
    _row("embedded_overstates", "recorded", "mechanism_variant", "invented"),
    _row("eval_unregistered", "preview", "quality_eval_id", "needel"),
    _row("method_other", "fp8", "compression_method", "int"),
    _row("scope_other", "fp8", "compression_scope", "attention"),
    _row("compression_undeclared", "baseline", "compression_method", "int"),
    _row("draft_undeclared", "baseline", "draft_model_id", "draft"),
    _row("draft_missing", "mtp", "draft_model_id", ABSENT),
    _row("acceptance_missing", "mtp", "speculative_acceptance_rate", ABSENT),
    _row("umbrella_unnamed", "class", "mechanism_notes", ABSENT),
    _row("status_overstated", "preview", "quality_eval_status", "completed"),
    # ------------------------------------------------ what a row says was observed
    _row("undeclared_dtype", "baseline", "kv_cache_dtype", "fp8_e4m3"),
    _row("undeclared_codec", "baseline", "codec", "int"),
    _row("undeclared_fires", "baseline", "fires", FIRES),
    _row("undeclared_cache", "baseline", "cache_class", "QuantizedCache"),
    _row("undeclared_bytes", "baseline", "kv_bytes", VALUES // 2),
    _row("undeclared_speculation", "fp8", "spec_decoding", "mtp"),
    _row("observed_dtype_other", "preview", "kv_cache_dtype", "int4_per_token_head"),
    _row("observed_codec_other", "preview", "codec", "kivi"),
    _row("codec_absent", "int", "codec", ABSENT),
    _row("codec_idle", "int", "fires", 0),
    _row("fires_other", "int", "fires", FIRES - 1),
    _row("fires_missing", "int", "fires", ABSENT),
    _row("backend_other", "pages", "backend", "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"),
    _row("page_other", "pages", "block_bytes", 2**15),
    _row("capacity_other", "pages", "capacity_tokens", 4 * 64 * 128),
    _row("pages_unobserved", "pages", "cache_blocks", ABSENT),
    _row("speculation_idle", "mtp", "spec_decoding", "none"),
    _row("speculation_other", "mtp", "spec_decoding", "eagle3"),
    _row("speculation_unobserved", "mtp", "spec_decoding", ABSENT),
    _row("observation_missing", "baseline", "kv_cache_dtype", ABSENT),
    _row("undeclared_pattern", "class", "pattern", PATTERN),
    _row("pattern_absent", "sparse", "pattern", "full"),
    _row("pattern_other", "sparse", "pattern", "window:window=256"),
    _row("pattern_unobserved", "sparse", "pattern", ABSENT),
    _row("read_missing", "sparse", "read_bytes", ABSENT),
    _row("read_as_stored", "sparse", "kv_bytes", VALUES // 4),
    _row("nothing_spared", "sparse", "read_bytes", 2 * VALUES),
    _row("pattern_absent", "evicted", "pattern", "full"),
    _row("pattern_other", "evicted", "pattern", PATTERN),
    _row("pattern_unobserved", "evicted", "pattern", ABSENT),
    _row("nothing_saved", "evicted", "kv_bytes", 2 * VALUES),
    _row("bits_other", "int", "bits_per_value", 4.2),
    _row("ratio_other", "preview", "compression_ratio", 2.0),
    _row("band_other", "preview", "context_band", "32k"),
    _row("band_other", "int", "context_band", "1-1024k"),
    _row("nothing_saved", "class", "kv_bytes", 2 * VALUES),
    # ------------------------------------------------ what a row types beside its evidence
    _row("quantity_other", "class", "compression_ratio", 0.0625),
    _row("quantity_other", "class", "kv_bytes", VALUES // 16),
    _row("quantity_other", "class", "kv_values", 8 * VALUES),
    _row("quantity_other", "class", "bits_per_value", 1.0),
    _row("quantity_other", "int", "bits", 2),
    _row("quantity_other", "int", "stored_span", "window"),
    _row("quantity_other", "int", "top1_agreement", 1.0),
    _row("quantity_other", "sparse", "read_bytes", VALUES // 8),
    _row("quantity_other", "pages", "cache_blocks", 640),
    _row("quantity_unvouched", "class", "bits", 1),
    _row("quantity_unvouched", "class", "stored_span", "context"),
    _row("quantity_unvouched", "fp8", "delta_nll", 0.0),
    _row("quantity_unvouched", "fp8", "capacity_tokens", 10**9),
    _row("baseline_recipe", "baseline", "recipe_id", "recipe-int"),
    _row("baseline_unshown", "baseline", EVIDENCE, []),
    _row("band_other", "int", "context_band", "any"),
    _row("band_other", "int", "context_band", "4k or more"),
    _row("evidence_contradicts_row", "mtp", "spec_decoding", "medusa"),
    # ------------------------------------------------ evidence, seen from the row
    _row("evidence_missing", "fp8", EVIDENCE, []),
    _row("lossless_unproven", "mtp", EVIDENCE, []),
    _row("eval_never_decodes", "mtp", "quality_eval_id", "kv_fidelity"),
    _of("rows", "fp8", EVIDENCE)("evidence_other_eval", 0, ABSENT),
    _row("evidence_other_model", "fp8", "model", "another"),
    _row("evidence_other_engine", "fp8", "engine", "hf"),
    _row("evidence_other_recipe", "fp8", "recipe_id", "recipe-int"),
    _row("evidence_other_context", "fp8", "context_tokens", TOKENS - 1),
    _row("evidence_other_dtype", "fp8", "dtype", "float16"),
    _row("evidence_other_protocol", "fp8", "protocol", "in_forward"),
    _row("evidence_other_device", "fp8", "device", "cuda"),
    _row("evidence_other_calibration", "int", "calibration", "newer fit"),
    _row("evidence_stale_model", "fp8", "model_hash", "newer weights"),
    _row("evidence_stale_corpus", "fp8", "corpus_hash", "newer text"),
    _row("evidence_stale_code", "fp8", "code", "newer commit"),
    _row("evidence_contradicts_row", "int", "kl", 0.0002),
    _of("current")("evidence_stale_unknown", MODEL, ABSENT),
    # ------------------------------------------------ evidence itself
    _fp8("evidence_tampered", "metrics", "needle_recall", "value", 0.9375, sealed=False),
    _fp8("evidence_malformed", "identity", ABSENT),
    _fp8("evidence_not_finite", "metrics", "needle_recall", "value", float("nan")),
    _fp8("evidence_unregistered_eval", "quality_eval_id", "needel"),
    _fp8("evidence_other_version", "version", "0"),
    _fp8("evidence_no_baseline", "baseline", {}),
    _fp8("evidence_other_baseline", "baseline_recipe_id", "recipe-int"),
    _fp8("evidence_metric_missing", "metrics", {}),
    _fp8("evidence_metric_unknown", "metrics", "needles_kept", {"value": 1, "low": 1, "high": 1, "se": 0, "n": ITEMS}),
    _fp8("evidence_range", "metrics", "needle_recall", "value", 3.0),
    _int("evidence_range", "metrics", "kl", "value", -1.0),
    _int("evidence_range", "paired", "top1_agreement", "value", 1.5),
    _fp8("evidence_interval", "baseline", "needle_recall", "low", 0.875),
    _fp8("evidence_interval", "metrics", "needle_recall", "n", 2 * ITEMS),
    _fp8("evidence_interval", "paired", "needle_recall", "lost", 0.5),
    _int("evidence_interval", "baseline", "kl", "n", 1),
    _fp8("evidence_unpaired", "paired", "needle_recall", "n", ITEMS // 2),
    _fp8("evidence_unpaired", "paired", "needle_recall", "gained", 0.5 * ITEMS),
    _int("evidence_ends", "paired", "kl", "highs", 12, 0.01),
    _int("evidence_ends", "paired", "top1_agreement", "n", 16),
    _int("quality_family", "family", "tested", 10 * TESTED),
    _int("evidence_other_family", "family", "tested", 1),
    _int("evidence_counts", "observed", "fires", FIRES - 1),
    _int("evidence_apart", "observed", "bits", 2),
    _int("evidence_apart", "observed", "span", "window"),
    _of("rows", "fp8", EVIDENCE, 1)("evidence_apart", "observed", "kv_bytes", VALUES // 4),
    _int("evidence_other_baseline", "baseline", "kl", "value", 0.002),
    _int("evidence_other_baseline", "baseline", "top1_agreement", "value", 0.984375),
    _int("evidence_withheld", "evals", 2, "ruler_v1"),
    _of("rows", "int", EVIDENCE)("evidence_withheld", 1, ABSENT),
    _sparse("evidence_other_pattern", "observed", "pattern", "block_sparse:block=32,top_k=64"),
    _evicted("evidence_other_pattern", "observed", "pattern", "attention:percent=90,sinks=4,recent=32"),
    _evicted("evidence_canary", "observed", "canary_kl", 0.0),
    _int("evidence_codec_idle", "observed", "fires", 0),
    _int("evidence_canary", "observed", "canary_kl", 0.0),
    _int("evidence_other_codec", "observed", "codec", "kivi"),
    _fp8("evidence_imported", "imported", IMPORTED),
    _pages("evidence_other_backend", "observed", "backend", "kvlab.cache.pages.backend.Other"),
    _pages("evidence_other_served", "observed", "served", "calibration", "another fit"),
    _pages("evidence_pages", "observed", "pool", None),
    # ------------------------------------------------ the registry, well formed
    _mechanism("mechanism_deprecated", FP8, "deprecated", "use int"),
    _mechanism("evidence_unsuited_eval", FP8, "evals", ["kv_fidelity"]),
    _of("rows", "pages", EVIDENCE)("evidence_incomplete", 1, ABSENT),
    _eval("quality_beyond", FIDELITY, "metrics", 0, "margin", 0.0005),
    _eval("quality_open", NEEDLE, "metrics", 0, "margin", 0.009),
    _eval("evidence_outside_band", NEEDLE, "band", [128, 2048]),
    # ------------------------------------------------ the registry, broken
    _of("mechanisms")("registry_shape", "mechanisms", {}),
    _of("evals")("registry_version", "schema_version", 2),
    _mechanism("unknown_registry_key", INT, "codecs", Renamed("codec")),
    _mechanism("missing_registry_key", INT, "lossless", ABSENT),
    _mechanism("bad_registry_value", INT, "lossless", "no"),
    _mechanism("unknown_mechanism", INT, "mechanism", "kv_quant"),
    _mechanism("duplicate_mechanism", INT, "variant", "fp8_e4m3"),
    _mechanism("no_baseline_entry", BASELINE, "variant", "plain"),
    _mechanism("kind_conflict", MTP, "kind", "compression"),
    _mechanism("method_scope_conflict", INT, "scope", "attention"),
    _mechanism("umbrella_conflict", CLASS, "umbrella", False),
    _mechanism("draft_conflict", MTP, "needs_draft", False),
    _mechanism("unknown_codec", INT, "codecs", ["int3"]),
    _mechanism("unknown_kv_cache_dtype", FP8, "kv_cache_dtypes", ["auto"]),
    _mechanism("lossless_conflict", FP8, "lossless", True),
    _mechanism("lossless_pattern", SPARSE, "lossless", True),
    _mechanism("lossless_pattern", EVICTED, "lossless", True),
    _mechanism("dangling_eval", INT, "evals", ["fidelity"]),
    _mechanism("dangling_eval", INT, "must_show", ["fidelity"]),
    _mechanism("shows_nothing", INT, "must_show", []),
    _mechanism("bad_source", FP8, "sources", ["somewhere"]),
    _eval("duplicate_eval", FIDELITY, "quality_eval_id", "needle"),
    _eval("eval_without_metrics", NEEDLE, "metrics", []),
    _eval("metric_duplicate", FIDELITY, "metrics", 0, "key", "top1_agreement"),
    _eval("bad_direction", NEEDLE, "metrics", 0, "direction", "up"),
    _eval("bad_margin", NEEDLE, "metrics", 0, "margin", -0.05),
    _eval("bad_range", NEEDLE, "metrics", 0, "floor", 1.5),
    _eval("bad_range", FIDELITY, "metrics", 0, "untouched", -1),
    _eval("bad_band", NEEDLE, "band", [32768, 128]),
    _eval("task_conflict", NEEDLE, "task", "ruler"),
    _eval("baseline_conflict", FIDELITY, "baseline_required", False),
)


def table(mutations: Iterable[Mutation] = MUTATIONS) -> list[dict[str, Any]]:
    """What becomes of every corruption.

    Returns
    -------
    list of dict
        ``name``, ``where`` and ``field`` say what was corrupted; ``code`` is what it has to be called; ``detected``
        whether the case then fails with that code; ``published_sees`` whether the published rules read what was
        corrupted, and ``published_would_pass`` whether they pass the case.
    """
    valid = published_reads(valid_case())
    return [_line(mutation, valid) for mutation in mutations]


def _line(mutation: Mutation, valid: Any) -> dict[str, Any]:
    """The line of one corruption; `valid` is what the published rules read of the case without it."""
    case = mutation.applied()
    found = judged(case)
    return {
        "name": mutation.name,
        "where": mutation.where,
        "field": mutation.field,
        "code": mutation.code,
        "detected": not found.passes and mutation.code in found.codes,
        "published_sees": published_reads(case) != valid,
        "published_would_pass": published_passes(case),
    }
