"""The four rules of the published quality gate as they really behave, for comparison only; nothing is certified here.

The gate that this one answers to is `mechanism_compression_quality` of SemiAnalysisAI/InferenceX pull request 1052
(the same files at OCWC22/InferenceX 5c6b82f3). Its gaps are kept on purpose: it trusts the record that a row
carries about itself, takes ``completed`` from a variable, and asks for no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

RECORD = "mechanism_eval_validation"
COMPRESSION = ("kv_quantization", "kv_compression", "compressed_attention")
SPECULATIVE = ("speculative_decoding",)
STATUSES = ("pending", "completed", "failed", "not_required")
VARIANTS = (
    ("baseline", "none"),
    ("kv_quantization", "fp8_e4m3"),
    ("kv_quantization", "turboquant_class"),
    ("kv_compression", "kvtc_class"),
    ("compressed_attention", "triattention_class"),
    ("speculative_decoding", "mtp"),
    ("speculative_decoding", "eagle3"),
    ("speculative_decoding", "medusa"),
    ("speculative_decoding", "dflash"),
)
EVALS = ("ruler_v1", "longbench_v2", "humaneval", "math_500")
TEXTS = (
    "mechanism",
    "mechanism_variant",
    "compression_method",
    "compression_scope",
    "quality_eval_id",
    "quality_eval_status",
    "quality_delta_summary",
    "draft_model_id",
    "mechanism_notes",
)
FLOATS = ("compression_ratio", "compression_overhead_ms", "decompression_overhead_ms", "speculative_acceptance_rate")
INTS = ("speculative_wasted_tokens",)


# ------------------------------------------------------------------------- how a row came about


def published_fields(environment: Mapping[str, str]) -> dict:
    """The 14 fields of a row as its producer read them from the environment.

    Parameters
    ----------
    environment : mapping of str to str
        Variables; a field's is its name in capitals. Others are not looked at, so a misspelt one is lost.

    Returns
    -------
    dict
        Every field; unset and empty are None, a number that cannot be parsed is None too, ``128.9`` is the
        integer 128, NaN and infinity stay, and an unset mechanism is ``baseline``.
    """
    fields: dict = {name: environment.get(name.upper()) or None for name in TEXTS}
    fields |= {name: _number(environment.get(name.upper()), float) for name in FLOATS}
    fields |= {name: _number(environment.get(name.upper()), lambda text: math.trunc(float(text))) for name in INTS}
    return fields | {"mechanism": fields["mechanism"] or "baseline"}


def _number(text: str | None, read: Callable[[str], float]) -> float | None:
    try:
        return read(text) if text else None
    except (ValueError, OverflowError):
        return None


def published_record(
    row: Mapping, variants: Collection[tuple[str, str]] = VARIANTS, evals: Collection[str] = EVALS
) -> dict:
    """What the producer attached to a row as ``mechanism_eval_validation``.

    Parameters
    ----------
    row : mapping
        The row's fields.
    variants : collection of (str, str)
        Registered pairs of mechanism and variant. Empty stands for the shipped ones, as it did there.
    evals : collection of str
        Registered evaluations, likewise.

    Returns
    -------
    dict
        Three flags and `issues`, a list of str that no rule reads.
    """
    variants, evals = variants or VARIANTS, evals or EVALS
    mechanism, variant = row.get("mechanism"), row.get("mechanism_variant") or "none"
    eval_id, status = row.get("quality_eval_id"), row.get("quality_eval_status")
    registered = (mechanism, variant) in variants
    eval_registered = eval_id in evals if eval_id else None
    known = status is None or status in STATUSES
    issues = []
    if not registered and mechanism != "baseline":
        issues.append(f"not registered: {mechanism}/{variant}")
    if eval_registered is False:
        issues.append(f"quality eval not registered: {eval_id}")
    if not known:
        issues.append(f"status {status!r} is none of {', '.join(sorted(STATUSES))}")
    if mechanism in SPECULATIVE and not row.get("draft_model_id"):
        issues.append("speculative decoding without draft_model_id")
    return {
        "mechanism_eval_registered": registered,
        "quality_eval_registered": eval_registered,
        "quality_eval_status_known": known,
        "issues": issues,
    }


# ------------------------------------------------------------------------------------- the rules


def requires_completed_quality_eval(mechanism: str | None, support_status: str | None) -> bool:
    """Whether the third rule speaks: a compression mechanism, spelt exactly so, at ``supported``, spelt exactly so."""
    return support_status == "supported" and mechanism in COMPRESSION


def _registered(row: Mapping, record: Mapping) -> bool:
    return row["mechanism"] == "baseline" or record.get("mechanism_eval_registered") is True


def _status_accepted(row: Mapping, record: Mapping) -> bool:
    return row.get("quality_eval_status") in (None, *STATUSES)


def _completed(row: Mapping, record: Mapping) -> bool:
    if not requires_completed_quality_eval(row["mechanism"], row.get("support_status")):
        return True
    return row.get("quality_eval_status") == "completed" and record.get("quality_eval_registered") is True


def _draft_fields(row: Mapping, record: Mapping) -> bool:
    if row["mechanism"] not in SPECULATIVE:
        return True
    return bool(row.get("draft_model_id")) and row.get("speculative_acceptance_rate") is not None


RULES: dict[str, Callable[[Mapping, Mapping], bool]] = {
    "mechanism_variant registered": _registered,
    "quality_eval_status in accepted set": _status_accepted,
    "supported+compression => quality_eval_status == completed": _completed,
    "speculative_decoding requires draft fields": _draft_fields,
}


def published_verdict(row: Mapping) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the published rules pass a row, and the rules that it fails.

    Parameters
    ----------
    row : mapping
        A row's fields and, under ``mechanism_eval_validation``, the record that it carries about itself.

    Returns
    -------
    passes : bool or None
        None when the row has no mechanism: such rows were never looked at.
    failed : tuple of str
        Names of the rules, in their order.
    """
    if row.get("mechanism") is None:
        return None, ()
    record = row.get(RECORD) or {}
    failed = tuple(name for name, holds in RULES.items() if not holds(row, record))
    return not failed, failed
