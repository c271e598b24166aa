"""Who is best within a budget of bits, in error and in KL, and what the default recipe's KL is beside the others'."""

from __future__ import annotations

from kvlab.output import format as fmt
from validation.bench import summary

# Others add a 16-bit scale, and a 16-bit offset, to 32 or 64 values of their nominal bits: a half bit at most.
OVERHEAD = 0.5
# A frame's head, lengths and checksum take a few thousandths of a bit per value; no codec leaves a budget for those.
SLACK = 0.01
CHALLENGER = "klt 2"  # the least bits of the default codec
RIVAL_BITS = 2.5  # the codecs of two nominal bits with what they store beside them
FOUR_BITS = "hadamard 4"  # norm, Hadamard rotation and Lloyd-Max: the plain codec of twice the bits

Entry = tuple[str, float, float]  # label, bits, cost


def budgets(data: dict) -> list[float]:
    """The nominal bits, with what others need beside them."""
    return [bits + OVERHEAD for bits in sorted({one["bits"] for one in data["subjects"] if one["bits"]})]


def within(found: dict[str, tuple[float, float]], budget: float) -> list[Entry]:
    """(label, bits, cost) within a budget, cheapest first."""
    entries = [(label, bits, cost) for label, (bits, cost) in found.items() if bits <= budget + SLACK]
    return sorted(entries, key=lambda entry: entry[2])


def contest(found: dict[str, tuple[float, float]], budget: float) -> list[Entry]:
    """As `within`, the best of each codec only."""
    seen: dict[str, Entry] = {}
    for entry in within(found, budget):
        seen.setdefault(summary.family(entry[0]), entry)
    return list(seen.values())


def errors(source: dict, stream: str) -> dict[str, tuple[float, float]]:
    """Label -> bits and error in dB."""
    rows = {label: summary.over_layers(source, label, stream) for label in source["scores"]}
    return {label: (row["bits"], row["nmse_db"]) for label, row in rows.items() if row and row["nmse_db"] is not None}


def divergences(data: dict, text: str) -> dict[str, tuple[float, float]]:
    """Label -> bits and mean KL on a text; bits of the very caches that the KL was measured with."""
    # codecs of whole caches, measured or not, have a table of their own: no model runs with them
    whole = {one["label"] for one in data["whole"]} | set(data["whole_unmeasured"])
    given = {label: by_text[text] for label, by_text in data["kl"].items() if text in by_text and label not in whole}
    return {label: (found["bits"], summary.mean(found["windows"])) for label, found in given.items()}


def best_error(data: dict) -> str:
    """Who has the least error within each budget, and how far behind the next codec is."""
    lines = []
    for source in data["sources"]:
        for stream in summary.STREAMS:
            for budget in budgets(data):
                first, *rest = contest(errors(source, stream), budget) or [None]
                if first is None:
                    continue
                second = rest[0] if rest else None
                behind = fmt.fixed(second[2] - first[2], 2, signed=True) if second else fmt.DASH
                place = [source["name"], stream.upper(), fmt.plain(budget)]
                lines.append([*place, *entry(first), *(entry(second) if second else [fmt.DASH] * 3), behind])
    headers = ["source", "stream", "bits up to", "best", "its bits", "error dB"]
    return fmt.table([*headers, "next", "its bits", "error dB", "dB behind"], lines)


def entry(given: Entry) -> list[str]:
    """Label, bits and error as text."""
    return [given[0], fmt.fixed(given[1], 2), fmt.fixed(given[2], 2)]


def best_kl(data: dict) -> str | None:
    """Who has the least KL within each budget on each text, the next codec, and how many times as much it costs."""
    lines = []
    for text in summary.texts(data):
        for budget in budgets(data):
            first, second, *_ = [*contest(divergences(data, text), budget), None, None]
            if second is None or not first[2] > 0:
                continue
            shown = [
                part
                for label, bits, _ in (first, second)
                for part in (label, fmt.fixed(bits, 2), fmt.estimate(summary.kl(data, label, text)))
            ]
            times = fmt.estimate(summary.kl_ratio(data, second[0], first[0], text))
            lines.append([text, fmt.plain(budget), *shown, times])
    headers = ["text", "bits up to", "best", "its bits", "its KL", "next", "its bits", "its KL", "times the best"]
    return fmt.table(headers, lines) if lines else None


def challenge(data: dict) -> list[str]:
    """Sentences: KL of `CHALLENGER` beside the best codec of kvlab's ladder and the best library, and `FOUR_BITS`."""
    libraries = {one["label"] for one in data["subjects"] if one["rival"]}
    sentences = []
    for text in summary.texts(data):
        found = divergences(data, text)
        if CHALLENGER not in found:
            continue
        others = {label: pair for label, pair in found.items() if summary.family(label) != summary.family(CHALLENGER)}
        limit = f"up to {fmt.plain(RIVAL_BITS)} bits"
        groups = {
            f"the best other codec of the ladder at {limit}": {n: p for n, p in others.items() if n not in libraries},
            f"the best library at {limit}": {n: p for n, p in others.items() if n in libraries},
        }
        rivals = [(within(group, RIVAL_BITS)[:1], words) for words, group in groups.items()]
        rivals.append(([(FOUR_BITS, *found[FOUR_BITS])] if FOUR_BITS in found else [], "norm, Hadamard and Lloyd-Max"))
        for [(label, bits, cost)], words in (pair for pair in rivals if pair[0]):
            if cost > 0:
                ratio = fmt.estimate(summary.kl_ratio(data, CHALLENGER, label, text))
                sentences.append(
                    f"On {text} text the KL of `{CHALLENGER}` ({fmt.fixed(found[CHALLENGER][0], 2)} bits) is {ratio} "
                    f"times that of `{label}` ({fmt.fixed(bits, 2)} bits), {words}."
                )
    return sentences
