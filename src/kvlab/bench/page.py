"""BENCH.md and its figures out of ``bench.json``. Needs no torch, so a bench can be written up again at no cost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvlab.bench import figures
from kvlab.records import atomic, write_text
from kvlab.report import format as fmt
from kvlab.report.figures import save
from kvlab.report.findings import render

PARTS = ("metadata", "mismatch", "allocation", "granular", "shape")
STREAMS = ("k", "v")
TASKS = ("encode", "decode", "write", "read")
BUDGET_SLACK = 0.5  # bits; what others add to the nominal bits for their scales


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
                save(draw(table), temporary)
    write_text(Path(out) / "BENCH.md", render("bench.md.j2", **context(data, links)))


def context(data: dict, links: dict) -> dict:
    """Everything that the template names, as text."""
    machine = data["machine"]
    return {
        "cpu": machine["cpu"],
        "system": machine["system"],
        "cores": fmt.number(machine["cores"]),
        "threads": threads_in_words(machine["threads"]),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items())),
        "rounds": fmt.number(data["rounds"]),
        "missing": [f"{label} ({reason})" for label, reason in sorted(data["missing"].items())],
        "install": data["install"],
        "best": best_table(data),
        "best_kl": "\n".join(f"- {sentence}" for sentence in best_kl(data)),
        "glance": glance(data),
        "kl_basis": kl_basis(data),
        "published": published_table(data),
        "prototype": prototype_table(data),
        "most_threads": threads_in_words([max(machine["threads"])]),
        "sources": [source_context(source, data, links) for source in data["sources"]],
    }


def source_context(source: dict, data: dict, links: dict) -> dict:
    """One source: its limit, its tables, its figures."""
    limits = source["limits"]
    return {
        "name": source["name"],
        "about": source["about"],
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
        "refused": "\n".join(f"- {label}: {reason}" for label, reason in sorted(source["refused"].items())),
        "figures": {kind: links[kind, source["name"]] for kind in figures.FIGURES},
    }


def threads_in_words(counts: list[int]) -> str:
    """Such as ``1 and 2 threads``."""
    return " and ".join(map(str, counts)) + (" thread" if counts == [1] else " threads")


def kl_basis(data: dict) -> str:
    """What the KL was measured on."""
    rivals = {one["label"] for one in data["subjects"] if one["rival"]}
    words = []
    if rivals & data["kl"].keys():
        words.append(f"of the libraries over {data['kl_windows']} window{'s' * (data['kl_windows'] != 1)} of each text")
    if data["kl"].keys() - rivals:
        words.append("of kvlab's codecs over the windows of the ladder study")
    if not words:
        return "KL was not measured: run the ladder study and give its tables."
    return (
        "KL is in nats per token on the reference model, float32, every layer coded, under the `snapshot` protocol; "
        + ", ".join(words)
        + "."
    )


# ------------------------------------------------------------------------------------------ numbers


def mean(values: Iterable[float | None]) -> float | None:
    """Mean; None when a value is missing."""
    values = list(values)
    return sum(values) / len(values) if values and None not in values else None


def over_layers(source: dict, label: str, stream: str) -> dict | None:
    """Every number of one codec on one stream, mean over layers; None when it was refused."""
    rows = [row for row in source["scores"].get(label, ()) if row["stream"] == stream]
    keys = ("bits", "nmse_db", "above_db", "excess", *PARTS)
    return {key: mean(row[key] for row in rows) for key in keys} if rows else None


def speed(source: dict, label: str, task: str, threads: int) -> float | None:
    """Median MB/s of K and V one after the other."""
    found = source["speed"].get(label, {})
    rates = [found.get(stream, {}).get(task, {}).get(str(threads)) for stream in STREAMS]
    return len(rates) / sum(1 / rate["value"] for rate in rates) if all(rates) else None


def spread(source: dict, label: str) -> float:
    """Largest half distance of the slowest from the fastest round, over the median."""
    found = source["speed"].get(label, {})
    rates = [rate for tasks in found.values() for by in tasks.values() for rate in by.values()]
    return max(((rate["high"] - rate["low"]) / 2 / rate["value"] for rate in rates), default=0.0)


def order(data: dict) -> list[dict]:
    """Subjects by nominal bits, those without any first."""
    return sorted(data["subjects"], key=lambda one: (one["bits"] or 0, one["rival"]))


def family(label: str) -> str:
    """The codec in a label: what stands before the conditioning and the bits."""
    return label.split()[0].split("+")[0]


# ------------------------------------------------------------------------------------------- tables


def quality_table(source: dict, stream: str, data: dict) -> str:
    """Distance to the limit and its parts, by nominal bits and then by excess."""
    rows = [(one, over_layers(source, one["label"], stream)) for one in data["subjects"]]
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
    texts = sorted({text for found in data["kl"].values() for text in found}, reverse=True)
    headers = ["codec", "bits K", "bits V", "K above limit dB", "V above limit dB"]
    headers += [f"KL, {text} text" for text in texts] + ["encode MB/s", "decode MB/s"]
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
                *(fmt.number(data["kl"].get(one["label"], {}).get(text)) for text in texts),
                fmt.number(rate["encode"] if one["rival"] else rate["write"]),
                fmt.number(rate["decode"] if one["rival"] else rate["read"]),
            ]
        )
    return fmt.table(headers, rows)


# --------------------------------------------------------------------------------------- who is best


def budgets(data: dict) -> list[float]:
    """The nominal bits, and what others need for them."""
    nominal = sorted({one["bits"] for one in data["subjects"] if one["bits"]})
    return sorted({bits + slack for bits in nominal for slack in (0.0, BUDGET_SLACK)})


def contest(found: dict[str, tuple[float, float]], budget: float) -> list[tuple[str, float, float]]:
    """(label, bits, cost) within a budget, cheapest first, the best of each codec only."""
    within = [(label, bits, cost) for label, (bits, cost) in found.items() if bits <= budget + 5e-3]
    within.sort(key=lambda row: row[2])
    seen: dict[str, tuple[str, float, float]] = {}
    for row in within:
        seen.setdefault(family(row[0]), row)
    return list(seen.values())


def errors(source: dict, stream: str) -> dict[str, tuple[float, float]]:
    """Label -> bits and error in dB."""
    rows = {label: over_layers(source, label, stream) for label in source["scores"]}
    return {label: (row["bits"], row["nmse_db"]) for label, row in rows.items() if row and row["nmse_db"] is not None}


def best_table(data: dict) -> str:
    """Who has the least error within each budget, and how far behind the next codec is."""
    lines = []
    for source in data["sources"]:
        for stream in STREAMS:
            for budget in budgets(data):
                first, *rest = contest(errors(source, stream), budget) or [None]
                if first is None:
                    continue
                second = rest[0] if rest else None
                lines.append(
                    [
                        source["name"],
                        stream.upper(),
                        fmt.plain(budget),
                        first[0],
                        fmt.fixed(first[1], 2),
                        fmt.fixed(first[2], 2),
                        second[0] if second else fmt.DASH,
                        fmt.fixed(second[1], 2) if second else fmt.DASH,
                        fmt.fixed(second[2] - first[2], 2, signed=True) if second else fmt.DASH,
                    ]
                )
    return fmt.table(
        ["source", "stream", "bits up to", "best", "its bits", "error dB", "next", "its bits", "dB behind"], lines
    )


def best_kl(data: dict) -> list[str]:
    """A sentence per text and budget: the codec of least KL and the next."""
    source, sentences = data["sources"][0], []
    if source["name"] != "capture":  # the bits of another source are not those that cost this KL
        return sentences
    for text in sorted({text for found in data["kl"].values() for text in found}, reverse=True):
        for budget in budgets(data):
            found = {}
            for label, by_text in data["kl"].items():
                bits = [over_layers(source, label, stream) for stream in STREAMS]
                if text in by_text and all(bits):
                    found[label] = (mean(row["bits"] for row in bits), by_text[text])
            ranked = contest(found, budget)
            if len(ranked) < 2:
                continue
            (label, bits, kl), (other, other_bits, other_kl) = ranked[:2]
            times = f", {fmt.number(other_kl / kl, 2)} times as much" if kl > 0 else ""
            sentences.append(
                f"Up to {fmt.plain(budget)} bits on {text} text: `{label}` ({fmt.fixed(bits, 2)} bits) costs "
                f"{fmt.number(kl)} nats per token; next is `{other}` ({fmt.fixed(other_bits, 2)} bits) with "
                f"{fmt.number(other_kl)}{times}."
            )
    return sentences


# ----------------------------------------------------------------------------------- published numbers


def published_table(data: dict) -> str | None:
    """The published codec's settings run by ours, and `klt` beside the published recipe; every ratio."""
    source = next((source for source in data["sources"] if source["published"]), None)
    if source is None:
        return None
    rows = [published_row(row["label"], row) for row in source["published"] if "refused" not in row]
    for stream in STREAMS:
        theirs = next((row["theirs"] for row in source["published"] if row["stream"] == stream), None)
        for one in data["subjects"]:
            found = over_layers(source, one["label"], stream)
            if theirs and found and family(one["label"]) == "klt":
                ours = {"bits": found["bits"], "error_db": found["nmse_db"]} | rates(source, one, stream, data)
                rows.append(
                    published_row(
                        f"{one['label']} beside the first", {"stream": stream, "theirs": theirs, "ours": ours}
                    )
                )
    headers = ["settings", "stream", "bits", "published", "bytes ×", "error dB", "published", "difference dB"]
    return fmt.table([*headers, "encode MB/s", "encode ×", "decode MB/s", "decode ×"], rows)


def prototype_table(data: dict) -> str | None:
    """`klt` beside the prototype it grew from, which knew the limit of the true covariance."""
    source = next((source for source in data["sources"] if source["published"]), None)
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


def rates(source: dict, one: dict, stream: str, data: dict) -> dict:
    """MB/s with bytes of one stream, most threads."""
    by_task, most = source["speed"][one["label"]][stream], str(max(data["machine"]["threads"]))
    return {"encode": by_task["write"][most], "decode": by_task["read"][most]}


def published_row(label: str, row: dict) -> list[str]:
    """One line: ours, theirs, and the ratio of both."""
    ours, theirs = row["ours"], row["theirs"]
    return [
        label,
        row["stream"].upper(),
        fmt.fixed(ours["bits"], 2),
        fmt.fixed(theirs["bits"], 2),
        fmt.fixed(ours["bits"] / theirs["bits"], 3),
        fmt.fixed(ours["error_db"], 2),
        fmt.fixed(theirs["error_db"], 2),
        fmt.fixed(ours["error_db"] - theirs["error_db"], 2, signed=True),
        fmt.number(ours["encode"]["value"]),
        fmt.number(ours["encode"]["value"] / theirs["encode"]),
        fmt.number(ours["decode"]["value"]),
        fmt.number(ours["decode"]["value"] / theirs["decode"]),
    ]
