"""Files with one row per (passage, channel): the rigorous evaluations of n = 32 and their forerunners.

A channel is a codec at a setting on a stream. The summary beside the rows, where there is one, names its numbers
``mean_``, ``std_``, ``ci95_`` (half-width) and ``abs_`` of a field, and every such number is recomputed.
"""

from __future__ import annotations

import re
import statistics

from validation.published import checks
from validation.published.readers.cells import counted
from validation.published.reading import FileRefused, count, items, layers, optional, perplexity, required, text
from validation.published.rows import CellFacts, Check, Contents, PassageScores, PublishedCell

PROTOCOLS = {"inforward": "in_forward", "snapshot": "snapshot"}
STREAMS = {"k": "k", "v": "v", "kv": "kv", "k+v": "kv"}
SUMMARY = re.compile(r"(mean|std|ci95)_(abs_)?(\w+)")


def channels(data: dict, file: str) -> Contents:
    """All channels of a file; rows that the harness marked as failed are left out and counted."""
    rows = items(data, "per_passage")
    failed = [row for row in rows if "fatal" in row]
    by_channel: dict[str, list[dict]] = {}
    for index, row in enumerate(rows):
        if "fatal" in row:
            continue
        if not isinstance(row.get("channel"), str):
            raise FileRefused(f"per_passage[{index}].channel is missing")
        by_channel.setdefault(row["channel"], []).append(row)
    if not by_channel:
        raise FileRefused("per_passage holds no row that was measured")
    cells, found = [], []
    for channel, own in by_channel.items():
        cell = channel_cell(data, file, channel, own)
        cells.append(cell)
        found += change_checks(cell, own)
        found += summary_checks(data, cell, channel, own)
    notes = (f"{len(failed)} rows that the harness marked as failed",) if failed else ()
    return Contents(cells=tuple(cells), checks=tuple(found), notes=notes)


def channel_cell(data: dict, file: str, channel: str, rows: list[dict]) -> PublishedCell:
    """One channel as a cell."""
    seen = [count(row, "passage", channel) for row in rows]
    if None in seen or len(set(seen)) != len(seen):
        raise FileRefused(f"channel {channel} does not name each passage once")
    windows = [
        PassageScores(
            window=passage,
            ppl_ref=perplexity(row, "ppl_ref", f"{channel}, passage {passage}"),
            ppl_alt=perplexity(row, "ppl_alt", f"{channel}, passage {passage}"),
            top1=optional(row, "top1_pair", f"{channel}, passage {passage}"),
        )
        for passage, row in sorted(zip(seen, rows, strict=True), key=lambda pair: pair[0])
    ]
    kind = text(rows[0], "kind") or ("bf16" if channel.startswith("bf16") else None)
    return PublishedCell(
        file=file,
        name=f"{text(data, 'model_name') or text(data, 'model') or file}: {channel}",
        role="identity" if kind == "bf16" else "codec",
        facts=channel_facts(data, channel, kind, rows[0]),
        windows=counted(windows, count(data, "n_eval")),
        claim=f"channel {channel}",
    )


def channel_facts(data: dict, channel: str, kind: str | None, row: dict) -> CellFacts:
    """The recipe fields of a channel; bits are per vector in the file and per coordinate here."""
    head = count(data, "head_dim")
    stream = STREAMS.get((text(row, "kv_mode") or channel.rsplit("_", 1)[-1]).lower())
    sizes = {}
    for name in ("k", "v"):
        given = optional(row, f"{name}_bits", channel) or optional(row, f"{name}_bits_per_tok_per_head", channel)
        sizes[name] = given / head if given and head else None
    return CellFacts(
        model=text(data, "model"),
        engine="vllm",
        protocol=PROTOCOLS.get(text(data, "mode") or ""),
        stream=stream,
        codec=kind or channel,
        bits_k=sizes["k"],
        bits_v=sizes["v"],
        boundary_layers=layers(data, "boundary_skip_layers"),
        context=count(data, "ctx_len"),
        eval=count(data, "n_eval"),
        n_layers=count(data, "num_layers"),
        inferred=("engine",) if text(row, "kv_mode") or not stream else ("engine", "stream"),
    )


def change_checks(cell: PublishedCell, rows: list[dict]) -> list[Check]:
    """The relative change of every passage, from its two perplexities."""
    found, by_passage = [], {int(row["passage"]): row for row in rows}
    for one in cell.windows:
        stored = optional(by_passage[one.window], "delta_ppl", f"passage {one.window}")
        if stored is not None:
            name = f"passage {one.window}: delta_ppl"
            found.append(checks.number(cell.file, cell.name, name, stored, one.change, 1.0))
    return found


def summary_of(data: dict, channel: str) -> dict | None:
    """The channel's summary: a list of objects, or an object of objects."""
    given = data.get("aggregates", data.get("aggregate", data.get("summary")))
    if isinstance(given, list):
        return next((one for one in given if isinstance(one, dict) and one.get("channel") == channel), None)
    one = given.get(channel) if isinstance(given, dict) else None
    return one if isinstance(one, dict) else None


def summary_checks(data: dict, cell: PublishedCell, channel: str, rows: list[dict]) -> list[Check]:
    """Every mean, deviation and half-width of the summary that is about a field of the rows, and its bytes."""
    summary = summary_of(data, channel)
    if summary is None:
        return []
    found = []
    for key in summary:
        match = SUMMARY.fullmatch(key)
        values = match and column(rows, match[3], bool(match[2]))
        if values:
            stored, ours = required(summary, key, channel), statistic(match[1], values)
            scale = max(map(abs, values)) if match[1] == "mean" else abs(ours)
            found.append(checks.number(cell.file, cell.name, key, stored, ours, scale))
    if (n := count(summary, "n", channel)) is not None:
        found.append(checks.number(cell.file, cell.name, "n", n, len(rows), 0.0))
    return found + byte_checks(data, cell, summary)


def column(rows: list[dict], field: str, absolute: bool) -> list[float] | None:
    """A field of all rows as numbers; None when it is not in all of them."""
    for name in (field, f"{field}_mean"):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return [abs(value) for value in values] if absolute else values
    return None


def statistic(kind: str, values: list[float]) -> float:
    """Mean, sample deviation, or the study's half-width."""
    if kind == "mean":
        return statistics.fmean(values)
    if kind == "std":
        return statistics.stdev(values) if len(values) > 1 else 0.0
    return checks.published_half_width(values)


def byte_checks(data: dict, cell: PublishedCell, summary: dict) -> list[Check]:
    """The bytes that the file claims for a long context, from bits, layers and heads.

    Only for models whose layers are all alike: others would need their shapes by layer.
    """
    names = ("num_layers", "num_kv_heads", "raw_bits_per_token_per_head", "report_ctx_tokens")
    sizes = [count(data, name) for name in names]
    bits = [count(summary, name) for name in ("k_bits", "v_bits")]
    alike = len(data.get("distinct_head_dims") or [0]) == 1 and not data.get("uncaptured_layers")
    if None in (*sizes, *bits) or not alike or "kakeya_bytes_128k" not in summary:
        return []
    n_layers, heads, raw, tokens = sizes
    kept = min(len(cell.facts.boundary_layers or ()), n_layers)
    whole = heads * 2 * (raw // 8)
    coded = heads * sum(one // 8 for one in bits)
    ours = {
        "baseline_bytes_128k": tokens * n_layers * whole,
        "kakeya_bytes_128k": tokens * (kept * whole + (n_layers - kept) * coded),
    }
    if cell.role == "identity":
        ours["kakeya_bytes_128k"] = ours["baseline_bytes_128k"]
    ours["total_ratio_128k"] = ours["baseline_bytes_128k"] / ours["kakeya_bytes_128k"]
    return [
        checks.number(cell.file, cell.name, name, required(summary, name, cell.name), value, 0.0)
        for name, value in ours.items()
        if name in summary
    ]
