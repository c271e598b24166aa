"""BENCH.md and its figures out of ``bench.json``. Needs no torch, so a bench can be written up again at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kvlab.core.records import atomic, write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from kvlab_pipeline.rendering import svg
from validation.bench import contest, figures, summary
from validation.bench.summary import PARTS, STREAMS, family, mean, order, over_layers, speed, spread, texts

TEMPLATES = Path(__file__).parent / "templates"
TASKS = ("encode", "decode", "write", "read")


def write(data: dict, out: Path) -> None:
    """Write ``BENCH.md`` and ``figures/`` from what `run.bench` measured.

    Raises
    ------
    NonFinite
        When a number is NaN or infinite.
    """
    fmt.refuse_non_finite(data, "bench")
    links = {}
    for source in data["sources"]:
        for kind, draw in figures.FIGURES.items():
            name = f"{kind}_{source['name']}.svg"
            table = figures.table(data, source)
            links[kind, source["name"]] = f"figures/{name}"
            with atomic(Path(out) / "figures" / name) as temporary:
                svg.write(draw(table), temporary)
    text = environment(TEMPLATES).get_template("bench.md.j2").render(context(data, links))
    write_text(Path(out) / "BENCH.md", tidy(text))


def context(data: dict, links: dict) -> dict:
    """Everything that the template names, as text."""
    machine = data["machine"]
    return {
        "cpu": machine["cpu"],
        "system": machine["system"],
        "cores": fmt.number(machine["cores"]),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items())),
        "rounds": fmt.number(data["rounds"]),
        "disclosure": data["model"]["disclosure"],
        "missing": [f"{label} ({reason})" for label, reason in sorted(data["missing"].items())],
        "install": data["install"],
        "best_error": contest.best_error(data),
        "best_kl": contest.best_kl(data),
        "challenge": listed(contest.challenge(data)),
        "slack": fmt.plain(contest.SLACK),
        "glance": glance(data),
        "kl_basis": kl_basis(data),
        "whole": whole_table(data),
        "whole_unmeasured": listed(data["whole_unmeasured"]),
        "whole_tokens": whole_tokens(data),
        "published": published_table(data),
        "published_ratios": listed(published_ratios(data)),
        "published_refused": listed(published_refused(data)),
        "prototype": prototype_table(data),
        "most_threads": threads_in_words([max(machine["threads"])]),
        "metrics": "\n".join(f"  - `{source['name']}`: {source['metric']};" for source in data["sources"]),
        "sources": [source_context(source, data, links) for source in data["sources"]],
    }


def source_context(source: dict, data: dict, links: dict) -> dict:
    """One source: its limit, its tables, its figures."""
    limits = source["limits"]
    return {
        "name": source["name"],
        "about": source["about"],
        "metric": source["metric"],
        "shapes": ", ".join("×".join(map(str, shape)) for shape in source["shapes"]),
        "rows": fmt.span(row["rows"] for row in limits),
        "bias": fmt.number(-min(row["bias"] for row in limits), 2),
        "gains": {
            stream: fmt.number(mean(row["coding_gain"] for row in limits if row["stream"] == stream), 3)
            for stream in STREAMS
        },
        "quality": {stream: quality_table(source, stream, data) for stream in STREAMS},
        "speed": speed_table(source, data),
        "threads": threads_in_words(data["machine"]["threads"]),
        "refused": listed(f"{label}: {reason}" for label, reason in sorted(source["refused"].items())),
        "figures": {kind: links[kind, source["name"]] for kind in figures.FIGURES},
    }


def listed(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def threads_in_words(counts: list[int]) -> str:
    """Such as ``1 and 2 threads``."""
    return " and ".join(map(str, counts)) + (" thread" if counts == [1] else " threads")


def kl_basis(data: dict) -> str:
    """What the KL was measured on."""
    windows = sorted({len(found["windows"]) for by_text in data["kl"].values() for found in by_text.values()})
    if not windows:
        return "KL was not measured: run the ladder study and give its tables."
    return (
        f"KL is in nats per token on `{data['model']['slug']}`, float32, every layer coded, under the `snapshot` "
        f"protocol, over the same {' or '.join(map(str, windows))} windows of a text for every codec; `test` is "
        f"{data['model']['text']}. Another model may rank the codecs otherwise. Brackets hold "
        f"{fmt.percent(data['bootstrap']['confidence'])} intervals of a bootstrap over windows, paired in ratios."
    )


# ------------------------------------------------------------------------------------------- tables


def quality_table(source: dict, stream: str, data: dict) -> str:
    """Distance to the limit and its parts, by nominal bits and then by excess; whitening leaves V as it is."""
    named = [one for one in data["subjects"] if stream == "k" or "+whiten" not in one["label"]]
    rows = [(one, over_layers(source, one["label"], stream)) for one in named]
    rows = [(one, found) for one, found in rows if found and found["excess"] is not None]
    rows.sort(key=lambda row: (row[0]["bits"] or 0, row[1]["excess"]))
    return fmt.table(
        ["codec", "bits", "error dB", "above limit dB", "excess bits", *PARTS],
        (
            [
                one["label"],
                fmt.fixed(found["bits"], 3),
                *(fmt.fixed(found[key], 2) for key in ("nmse_db", "above_db")),
                *(fmt.fixed(found[key], 3) for key in ("excess", *PARTS)),
            ]
            for one, found in rows
        ),
    )


def speed_table(source: dict, data: dict) -> str:
    """MB/s, with every number of threads."""
    threads = data["machine"]["threads"]
    names = {"encode": "encode", "decode": "decode", "write": "encode to bytes", "read": "decode from bytes"}
    headers = ["codec", *(f"{names[task]}, {n} thr" for task in TASKS for n in threads), "spread"]
    return fmt.table(
        headers,
        (
            [
                one["label"],
                *(fmt.number(speed(source, one["label"], task, n)) for task in TASKS for n in threads),
                fmt.percent(spread(source, one["label"]), 0),
            ]
            for one in order(data)
            if one["label"] in source["speed"]
        ),
    )


def glance(data: dict) -> str:
    """Everything that a user chooses by, on the first source."""
    source, most = data["sources"][0], max(data["machine"]["threads"])
    headers = ["codec", "bits K", "bits V", "K above limit dB", "V above limit dB"]
    headers += [f"KL, {text} text" for text in texts(data)] + ["encode MB/s", "decode MB/s"]
    rows = []
    for one in order(data):
        by_stream = {stream: over_layers(source, one["label"], stream) for stream in STREAMS}
        if not all(by_stream.values()):
            continue
        above = [by_stream[stream]["above_db"] for stream in STREAMS]
        rate = {task: speed(source, one["label"], task, most) for task in TASKS}
        rows.append(
            [
                one["label"],
                *(fmt.fixed(by_stream[stream]["bits"], 2) for stream in STREAMS),
                *(fmt.DASH if value is None else fmt.fixed(value, 2) for value in above),
                *(fmt.estimate(summary.kl(data, one["label"], text)) for text in texts(data)),
                fmt.number(rate["encode"] if one["rival"] else rate["write"]),
                fmt.number(rate["decode"] if one["rival"] else rate["read"]),
            ]
        )
    return fmt.table(headers, rows)


def whole_table(data: dict) -> str | None:
    """Codecs of whole caches: bits, KL and speed; None where none was measured."""
    threads = data["machine"]["threads"]
    names = {"write": "encode to bytes", "read": "decode from bytes"}
    headers = ["codec", "bits", *(f"KL, {text} text" for text in texts(data))]
    headers += [f"{words} MB/s, {n} thr" for words in names.values() for n in threads]
    lines = [
        [
            one["label"],
            fmt.fixed(one["stored"], 3),
            *(fmt.estimate(summary.kl(data, one["label"], text)) for text in texts(data)),
            *(fmt.number(one["speed"][task][str(n)]["value"]) for task in names for n in threads),
        ]
        for one in data["whole"]
    ]
    return fmt.table(headers, lines) if lines else None


def whole_tokens(data: dict) -> str | None:
    """Tokens of the cache that they were timed on."""
    return fmt.span(one["tokens"] for one in data["whole"]) if data["whole"] else None


# ----------------------------------------------------------------------------------- published numbers


def published_source(data: dict) -> dict | None:
    """The source that the published codec was measured on, if it is among the benched ones."""
    return next((source for source in data["sources"] if source["published"]), None)


def published_rows(source: dict, data: dict) -> tuple[list[dict], list[dict]]:
    """The block codec at the published settings; `klt` beside the first of its stream."""
    block = [row for row in source["published"] if "refused" not in row]
    klt = []
    for stream in STREAMS:
        first = next((row for row in source["published"] if row["stream"] == stream), None)
        for one in data["subjects"]:
            found = over_layers(source, one["label"], stream)
            if first and found and family(one["label"]) == "klt":
                speed = source["whole_speed"][one["label"]][stream]
                ours = {"bits": found["bits"], "error_db": found["nmse_db"]} | speed
                label = f"{one['label']} (published: {first['label']})"
                klt.append({"label": label, "stream": stream, "theirs": first["theirs"], "ours": ours})
    return block, klt


def published_table(data: dict) -> str | None:
    """The published codec's settings run by ours, and `klt` beside the published recipe; every ratio."""
    source = published_source(data)
    if source is None:
        return None
    block, klt = published_rows(source, data)
    headers = ["settings", "stream", "bits", "published bits", "bytes ×", "error dB", "published dB", "difference dB"]
    headers += ["encode MB/s", "encode ×", "decode MB/s", "decode ×"]
    return fmt.table(headers, map(published_row, block + klt))


def published_ratios(data: dict) -> list[str]:
    """Sentences: the range of every ratio, for the block codec over its settings and for `klt` over its bits."""
    source, sentences = published_source(data), []
    if source is None:
        return sentences
    for rows, what in zip(published_rows(source, data), ("kvlab's block codec", "`klt`"), strict=True):
        for stream in STREAMS:
            found = [ratios(row) for row in rows if row["stream"] == stream]
            if found:
                bytes_, encode, decode = (
                    extent([row[key] for row in found], fmt.number) for key in ("bytes", "encode", "decode")
                )
                error = extent([row["error"] for row in found], lambda value: fmt.fixed(value, 2, signed=True))
                sentences.append(
                    f"On {stream.upper()} {what} takes {bytes_} times the published codec's bytes, its error differs "
                    f"by {error} dB, and it encodes {encode} and decodes {decode} times as fast."
                )
    return sentences


def published_refused(data: dict) -> list[str]:
    """Settings that were refused here, with the reason."""
    source = published_source(data)
    rows = source["published"] if source else ()
    return [f"{row['label']} ({row['stream'].upper()}): {row['refused']}" for row in rows if "refused" in row]


def extent(values: list[float], write: Callable[[float], str]) -> str:
    """Least and largest value in words."""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def prototype_table(data: dict) -> str | None:
    """`klt` beside the prototype it grew from, which knew the limit of the true covariance."""
    source = published_source(data)
    if source is None:
        return None
    lines = []
    for one in data["subjects"]:
        for stream, by_bits in source["prototype"].items():
            found = over_layers(source, one["label"], stream)
            if family(one["label"]) == "klt" and found and str(one["bits"]) in by_bits:
                bias = mean(row["bias"] for row in source["limits"] if row["stream"] == stream)
                numbers = (found["excess"], found["excess"] + bias, by_bits[str(one["bits"])])
                lines.append([one["label"], stream.upper(), *(fmt.fixed(number, 3) for number in numbers)])
    return fmt.table(["codec", "stream", "excess bits", "excess bits, corrected", "prototype"], lines)


def ratios(row: dict) -> dict[str, float]:
    """Bytes and MB/s over the published ones, and the difference of the errors in dB."""
    ours, theirs = row["ours"], row["theirs"]
    return {
        "bytes": ours["bits"] / theirs["bits"],
        "error": ours["error_db"] - theirs["error_db"],
        "encode": ours["encode"]["value"] / theirs["encode"],
        "decode": ours["decode"]["value"] / theirs["decode"],
    }


def published_row(row: dict) -> list[str]:
    """One line: ours, theirs, and the ratio of both."""
    ours, theirs, by = row["ours"], row["theirs"], ratios(row)
    return [
        row["label"],
        row["stream"].upper(),
        fmt.fixed(ours["bits"], 2),
        fmt.fixed(theirs["bits"], 2),
        fmt.fixed(by["bytes"], 3),
        fmt.fixed(ours["error_db"], 2),
        fmt.fixed(theirs["error_db"], 2),
        fmt.fixed(by["error"], 2, signed=True),
        fmt.number(ours["encode"]["value"]),
        fmt.number(by["encode"]),
        fmt.number(ours["decode"]["value"]),
        fmt.number(by["decode"]),
    ]
