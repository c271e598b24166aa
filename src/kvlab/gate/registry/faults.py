"""What a well-formed entry of the registry may still say that cannot be: each fault with a code of its own.

A fault is (code, key of the entry, what is wrong); `kvlab.gate.registry` says which entry it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvlab.codecs.catalogue import UNSTORED
from kvlab.core.errors import suggestion
from kvlab.core.recipe import CODECS
from kvlab.gate.catalogue.columns import COMPRESSION, SPECULATIVE
from kvlab.gate.registry.entries import Eval, Mechanism, Metric

NATIVE_DTYPES = ("float32", "bfloat16", "float16")
CODED_DTYPES = (  # what vLLM and SGLang can store instead; `uint8` are pages of coded bytes
    "uint8",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
KINDS = {"baseline": "baseline"} | dict.fromkeys(COMPRESSION, "compression") | dict.fromkeys(SPECULATIVE, "speculative")
SCOPE_OF = {"kv_quantization": "kv_cache", "kv_compression": "kv_cache", "compressed_attention": "attention"}
UMBRELLA = "_class"
OWN_HARNESS = "kvlab"
SOURCE = re.compile(r"arXiv:\d{4}\.\d{4,5}|https://\S+")

# ----------------------------------------------------------------------------------- of a mechanism

Faults = Iterator[tuple[str, str, str]]


def mechanism_faults(entry: Mechanism, known_evals: Iterable[str], known_scopes: Iterable[str]) -> Faults:
    """What a well-formed entry says that cannot be, as (code, key, what is wrong)."""
    for fault in MECHANISM_CHECKS:
        yield from fault(entry)
    yield from _dangling(entry.evals, "evals", "eval", known_evals)
    yield from _dangling(entry.must_show, "must_show", "scope of an eval", known_scopes)
    yield from _sources(entry.sources)


def _kind_fits(entry: Mechanism) -> Faults:
    expected = KINDS.get(entry.mechanism)
    if expected is None:  # no row could name it: the field's vocabulary is closed
        said = f"{entry.mechanism!r} is none that a row may name; allowed: {', '.join(KINDS)}"
        yield "unknown_mechanism", "mechanism", said + suggestion(entry.mechanism, KINDS)
    elif entry.kind != expected:
        yield "kind_conflict", "kind", f"of {entry.name!r} is {entry.kind!r}; expected {expected!r}"
    elif entry.kind == "baseline" and entry.variant != "none":
        yield "kind_conflict", "variant", f"of the baseline is {entry.variant!r}; it has no variant but 'none'"


def _method_and_scope(entry: Mechanism) -> Faults:
    if entry.kind != "compression":
        if entry.method is not None or entry.scope is not None:
            yield "method_scope_conflict", "method", f"and scope of a {entry.kind} must be null: nothing is compressed"
        return
    if entry.method is None or entry.scope is None:
        yield "method_scope_conflict", "method", "and scope of a compression must both be given"
    elif SCOPE_OF.get(entry.mechanism, entry.scope) != entry.scope:
        said = f"is {entry.scope!r}; {entry.mechanism!r} acts on {SCOPE_OF[entry.mechanism]!r}"
        yield "method_scope_conflict", "scope", said


def _umbrella(entry: Mechanism) -> Faults:
    if entry.umbrella != entry.variant.endswith(UMBRELLA):
        said = f"is {entry.umbrella} of variant {entry.variant!r}; the umbrellas are those that end in {UMBRELLA!r}"
        yield "umbrella_conflict", "umbrella", said


def _draft(entry: Mechanism) -> Faults:
    if entry.needs_draft != (entry.kind == "speculative"):
        yield "draft_conflict", "needs_draft", f"is {entry.needs_draft} of a {entry.kind}; speculation alone drafts"


def _codecs(entry: Mechanism) -> Faults:
    stored = [name for name in CODECS if name not in UNSTORED]
    for name in entry.codecs:
        if name not in stored:
            said = f"{name!r} is no codec that a cache can be made of; allowed: {', '.join(stored)}"
            yield "unknown_codec", "codecs", said + suggestion(name, stored)


def _dtypes(entry: Mechanism) -> Faults:
    known = (*NATIVE_DTYPES, *CODED_DTYPES)
    if not entry.kv_cache_dtypes:
        yield "unknown_kv_cache_dtype", "kv_cache_dtypes", "is empty; name what the engine may store"
    for name in entry.kv_cache_dtypes:
        if name not in known:
            said = f"{name!r} is none that an engine is seen to store; allowed: {', '.join(known)}"
            yield "unknown_kv_cache_dtype", "kv_cache_dtypes", said + suggestion(name, known)


def _lossless(entry: Mechanism) -> Faults:
    if entry.kind == "baseline" and not entry.lossless:
        yield "lossless_conflict", "lossless", "is False of the baseline, which loses nothing to itself"
    if not entry.lossless:
        return
    lossy = [name for name in entry.kv_cache_dtypes if name in CODED_DTYPES]
    lossy += [name for name in entry.codecs if name in CODECS and name != "identity"]
    if lossy:
        yield "lossless_conflict", "lossless", f"is True, yet {', '.join(lossy)} may run or be stored, which lose"


def _patterns(entry: Mechanism) -> Faults:
    if entry.lossless and entry.patterns:
        said = f"is True, yet {', '.join(entry.patterns)} may run, which leave out some of what there is"
        yield "lossless_pattern", "lossless", said


def _must_show(entry: Mechanism) -> Faults:
    """A lossy compression that may choose what it shows could leave out what it loses."""
    if entry.kind == "compression" and not entry.lossless and not entry.must_show:
        yield (
            "shows_nothing",
            "must_show",
            "is empty of a lossy compression; name the scopes of the evals that it must show",
        )


def _dangling(names: Iterable[str], key: str, what: str, known: Iterable[str]) -> Faults:
    known = sorted(set(known))
    if not known:  # a registry that lists no eval says that nothing can be certified; no name in it is a slip
        return
    for name in names:
        if name not in known:
            yield "dangling_eval", key, f"{name!r} is no registered {what}{suggestion(name, known)}"


def _sources(sources: Iterable[str]) -> Faults:
    for source in sources:
        if not SOURCE.fullmatch(source):
            yield "bad_source", "sources", f"{source!r} is neither arXiv:NUMBER nor an https URL"


MECHANISM_CHECKS: tuple[Callable[[Mechanism], Faults], ...] = (
    _kind_fits,
    _method_and_scope,
    _umbrella,
    _draft,
    _codecs,
    _dtypes,
    _lossless,
    _patterns,
    _must_show,
)

# ---------------------------------------------------------------------------------------- of an eval


def eval_faults(entry: Eval) -> Faults:
    """What a well-formed entry says that cannot be, as (code, key, what is wrong)."""
    low, high = entry.band
    if low > high:
        yield "bad_band", "band", f"is {low} to {high}; the lowest number of context tokens comes first"
    for key, count in Counter(metric.key for metric in entry.metrics).items():
        if count > 1:
            yield "metric_duplicate", "metrics", f"{key!r} stands there {count} times"
    if (entry.harness == OWN_HARNESS) != (entry.task is None):
        said = (
            f"is {entry.task!r} with harness {entry.harness!r}; a task is named for every harness but {OWN_HARNESS!r}"
        )
        yield "task_conflict", "task", said
    for metric in entry.metrics:
        yield from _range(metric)
    unjudged = [metric.key for metric in entry.metrics if metric.floor is None]
    if not entry.baseline_required and unjudged:
        said = f"is False, yet {', '.join(unjudged)} has no floor: nothing would decide"
        yield "baseline_conflict", "baseline_required", said
    yield from _sources(entry.sources)


def _range(metric: Metric) -> Faults:
    """A metric's limits lie inside of what it can be."""
    low, high = metric.range
    if metric.rate and (metric.lowest, metric.highest) != (None, None):
        yield "bad_range", "metrics", f"of {metric.key!r} has lowest and highest beside rate, which is from 0 to 1"
    for name in ("floor", "untouched"):
        value = getattr(metric, name)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            yield "bad_range", "metrics", f"{name} of {metric.key!r} is {value:g}, outside of {low} to {high}"
    if low is not None and high is not None and low >= high:
        yield "bad_range", "metrics", f"of {metric.key!r} is {low:g} to {high:g}; the lowest value comes first"
