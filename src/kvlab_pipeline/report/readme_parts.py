"""The tables beside the headline: README's of codecs, and how long the run takes, from numbers that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import polars as pl

from kvlab.core.errors import StorageError
from kvlab.output import format as fmt
from kvlab_pipeline.gate_page import ways
from kvlab_pipeline.gate_page.row_summary import BASELINE
from kvlab_pipeline.rendering import parts as tables
from kvlab_pipeline.report.certified import checked
from kvlab_pipeline.report.use import above_zero, in_all, like, rung
from kvlab_pipeline.studies.ladder.chapter import TOLD, length

KEPT_STATE = ("label", "rate", "exact_tokens", "at", "even_with_bfloat16")
STUDIES = {
    "texts, capture, what is fitted": (
        "{weights,corpus,capture,sigma,codebooks,components,archive,needles,residual}/MODEL*"
    ),
    "factorial of the gap, engines without a codec; float32": "measure/MODEL/float32",
    "the same, bfloat16": "measure/MODEL/bfloat16",
    "K and V of each layer alone; noise in the finished cache": "measure/MODEL/hf-float32",
    "ladder: codecs, coding gain": "ladder/MODEL/{jobs,facts}",
    "ladder: calibration grown, longer contexts": "ladder/MODEL/further",
    "gate on hf: the Cache, finished caches, needles, tasks, greedy decoding": "measure/MODEL/hf-mechanisms",
    "gate on vLLM: coded pages, its own fp8, needles": "measure/MODEL/vllm-mechanisms",
}
"""Rows of the table of seconds, and the jobs that each of them is."""


def codecs_of(claims: dict | None, metrics: dict) -> dict | None:
    """What the table of codecs is made from: rows and answers of the page's model, and the ladder's state."""
    model = metrics["identity"].get("slug")
    claims = checked(claims)
    answers = [one for one in (claims or {}).get("answers", ()) if one["model"] == model and way(one) in SHOWN]
    if not answers:
        return None
    engines = {one["engine"] for one in answers}
    rows = [row for row in claims["rows"] if row["model"] == model and row["engine"] in engines]
    return {
        "model": model,
        "answers": answers,
        "rows": [row for row in rows if row["measured"] and (row["mechanism"] == BASELINE or way(row) in SHOWN)],
        "state": [{key: row[key] for key in KEPT_STATE} for row in metrics.get("ladder_state") or ()],
    }


SHOWN = (ways.SERVED, ways.INSIDE, ways.FINISHED)
CHOICE = (
    ("vLLM on a CPU, most tokens in the same memory", "`klt` in pages, 2 bits", ways.INSIDE, "klt_after_pages", 2),
    ("vLLM on a CPU, least loss", "`klt` in pages, 4 bits", ways.INSIDE, "klt_after_pages", 4),
    ("transformers, few bits", "`klt`, 4 bits", ways.SERVED, "klt", 4),
    ("transformers, nothing to calibrate", "`kivi`, 4 bits", ways.SERVED, "kivi", 4),
    ("a finished cache to store or send", "`archive`, 2 bits", ways.FINISHED, "archive", 2),
)
"""README's rows: who wants what, what answers it, and the row of the gate that says so."""


def way(row: Mapping) -> ways.Way:
    """How a row, or the rows of an answer, are coded."""
    return row["protocol"], row["stored_span"]


def codecs_block(found: dict) -> str:
    """The Markdown of the table of codecs."""
    state = {row["label"]: row for row in found["state"]}
    rows = {(way(row), row["mechanism_variant"], row["bits"]): row for row in found["rows"]}
    lines, scored = [], 0
    for wanted, answer, *key in CHOICE:
        coded, row = key[0], rows.get(tuple(key))
        if row is None:
            continue
        known = state.get(rung(row))
        known = known if known and like(row, known) else None
        scored = row["metrics"]["kl"]["n"]
        every = in_all(row, known, TOLD[0], coded == ways.FINISHED)
        lines.append(
            [
                wanted,
                answer,
                f"{fmt.number(row['bits_per_value'])} in short windows" if every is None else fmt.number(every),
                fmt.estimate(above_zero(row["metrics"]["kl"])),
                fmt.estimate(None if coded == ways.FINISHED else row["throughput_ratio"]),  # no model runs with it
            ]
        )
    headers = [
        "for",
        "nearest",
        f"bits per value, in all at {length(TOLD[0])}",
        f"KL, {tables.KL_UNIT}",
        "speed, of plain",
    ]
    tried, certified = (sum(one[name] for one in found["answers"]) for name in ("tried", "certified"))
    return (
        fmt.table(headers, lines)
        + f"\n\nModel `{found['model']}`, {fmt.number(scored)} windows. Of {fmt.number(tried)} settings that this run"
        f" tried {fmt.number(certified) if certified else 'none'} may be claimed as harmless"
        " ([GATE.md](docs/results/gate/GATE.md) says why).\n"
    )


def seconds_of(benchmarks: Path, model: str) -> dict[str, Any]:
    """Seconds of each study's jobs, and of all jobs of the run, from Snakemake's benchmarks.

    Raises
    ------
    StorageError
        A benchmark cannot be read, or there is none.
    """
    each = {str(path.relative_to(benchmarks).with_suffix("")): _seconds(path) for path in benchmarks.rglob("*.tsv")}
    if not each:
        raise StorageError(f"{benchmarks} holds no benchmarks; run `make findings`", code="storage.no-benchmarks")
    names = {study: list(_expanded(pattern.replace("MODEL", model))) for study, pattern in STUDIES.items()}
    jobs = {study: [job for job in each if any(fnmatch(job, one) for one in some)] for study, some in names.items()}
    return {
        "studies": [[study, sum(map(each.get, some))] for study, some in jobs.items() if some],
        "all": sum(each.values()),
        "jobs": len(each),
    }


def _seconds(path: Path) -> float:
    try:
        return float(pl.read_csv(path, separator="\t")["s"][0])
    except (OSError, pl.exceptions.PolarsError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}") from None


def _expanded(pattern: str) -> Iterator[str]:
    """Patterns of `fnmatch`, with ``{a,b}`` as two."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    some, _, after = rest.partition("}")
    yield from (before + one + after for one in some.split(","))


def seconds_block(found: dict) -> str:
    """The Markdown of the table of seconds."""
    lines = [[study, fmt.number(round(seconds), 4)] for study, seconds in found["studies"]]
    minutes = fmt.number(round(found["all"] / 60))
    return (
        fmt.table(["study", "seconds of one core"], lines)
        + f"\n\nAll {found['jobs']} jobs together take {minutes} minutes of one core; two run at a time.\n"
    )
