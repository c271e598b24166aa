"""From what was read and estimated to the report's Markdown tables; the only thing computed here is a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.core.params import VerdictSection
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.rendering.parts import reading, resolution
from kvlab_pipeline.report.verdict import decide, windows_to_settle
from validation.published import verdicts
from validation.published.families import SourceFile
from validation.published.mismatch import Field, GroupComparison
from validation.published.phases import Knob, LayerSums, Slope, layer_ratio
from validation.published.reanalyse import CellDifference, Figures
from validation.published.rows import Check, LayerErrors, PublishedCell

PRINTED = 2  # decimals of a per cent in the published tables
ACCEPT, MARGINAL = verdicts.RULES["accept"]
# The study's thresholds, held against intervals.
THRESHOLDS = VerdictSection(
    accept_ppl=ACCEPT[1], accept_top1=ACCEPT[2], marginal_ppl=MARGINAL[1], marginal_top1=MARGINAL[2]
)


class Numbers:
    """Files by their number in the report, so that a table can say where a cell comes from."""

    def __init__(self, sources: Sequence[SourceFile]):
        self.of = {source.file: index for index, source in enumerate(sources, 1)}

    def cell(self, cell: PublishedCell) -> str:
        """A cell's name with its file's number."""
        return f"{plain(cell.name)} [{self.of[cell.file]}]"


def plain(name: object) -> str:
    """A name from a file as text: it may hold no mark-up, and what it held stays readable."""
    return "".join("?" if one in "<>`[]!*" or not one.isprintable() else one for one in str(name))


def code(name: object) -> str:
    """A name from a file as code."""
    return "`" + "".join(one if one.isprintable() else "?" for one in str(name)).replace("`", "'") + "`"


def points(given: Estimate | None, scale: float = 100.0, shift: float = 0.0, signed: bool = True) -> str:
    """An estimate in per cent or points."""
    return fmt.estimate(given.to_json() if given else None, scale, shift, signed)


def printed(fraction: float | None, signed: bool = True) -> str:
    """A fraction in per cent as the study prints it."""
    return fmt.DASH if fraction is None else fmt.fixed(100 * fraction, PRINTED, signed)


def interval(given: Estimate | None, scale: float = 100.0) -> str:
    """Only the bounds of an estimate."""
    return points(given, scale).partition(" ")[2] or fmt.DASH


def files(sources: Sequence[SourceFile]) -> str:
    """Every file, what it is and what was found in it."""
    lines = []
    for index, source in enumerate(sources, 1):
        contents = source.contents
        kind = source.family or source.status
        cells = len(contents.cells) or fmt.DASH
        windows = fmt.span(len(cell.windows) for cell in contents.cells) if contents.cells else fmt.DASH
        agreeing = sum(one.agrees for one in contents.checks)
        numbers = f"{agreeing} of {len(contents.checks)}" if contents.checks else fmt.DASH
        status = source.status if source.family and source.status != "read" else ""
        remark = "; ".join(filter(None, [status, source.why, *contents.notes]))
        lines.append([str(index), code(source.file), kind, str(cells), windows, numbers, plain(remark) or fmt.DASH])
    return fmt.table(["no.", "file", "family", "cells", "windows", "numbers reproduced", "remark"], lines)


def wrong(checks: Sequence[Check], numbers: Numbers, most: int) -> str:
    """Numbers that were not reproduced."""
    lines = [
        [
            f"{plain(one.cell)} [{numbers.of[one.file]}]",
            code(one.number),
            exact(one.stored),
            exact(one.ours),
            "yes" if one.printed else "no",
        ]
        for one in checks[:most]
    ]
    return fmt.table(["cell", "number", "in the file", "from its rows", "same in the published digits"], lines)


def exact(value: float | str) -> str:
    """A number to its last digit, a word as it is."""
    return plain(value) if isinstance(value, str) else repr(value)


# -------------------------------------------------------------------------------------------- recipes


def fields(comparison: GroupComparison) -> str:
    """Every recipe field of two sides, differences first."""
    order = {name: index for index, name in enumerate(("differs", "overlaps", "not recorded", "equal"))}
    lines = [
        [
            code(one.name),
            values(one, 0, comparison),
            values(one, 1, comparison),
            f"**{one.verdict}**" if one.verdict == "differs" else one.verdict,
        ]
        for one in sorted(comparison.fields, key=lambda one: order[one.verdict])
    ]
    return fmt.table(["recipe field", side(comparison.a), side(comparison.b), "reading"], lines)


def side(given) -> str:
    """Engine and protocol of a side."""
    names = [getattr(given, name) for name in ("engine", "protocol")]
    return f"({', '.join(code(name) if name else 'not recorded' for name in names)})"


def values(one: Field, which: int, comparison: GroupComparison) -> str:
    """The values of a field on one side, and in how many cells it is recorded."""
    found = one.b if which else one.a
    cells = len((comparison.b if which else comparison.a).cells)
    if not found:
        return "not recorded"
    text = " or ".join(value(given) for given in found)
    return text if not one.absent[which] else f"{text}, recorded in {cells - one.absent[which]} of {cells} cells"


def value(given: object) -> str:
    """A recipe value in words."""
    if isinstance(given, bool):
        return "yes" if given else "no"
    if isinstance(given, tuple):
        return ", ".join(map(str, given)) or "none"
    return fmt.plain(given) if isinstance(given, int | float) else plain(given)


# ---------------------------------------------------------------------------------------------- cells


def cells(rows: Sequence[Figures], numbers: Numbers) -> str:
    """What each cell costs: the published mean, then what its windows carry."""
    lines = [
        [
            numbers.cell(row.cell),
            value(row.cell.facts.variance_ratio) if row.cell.facts.variance_ratio is not None else fmt.DASH,
            str(row.n_windows),
            printed(row.change),
            interval(row.change_t),
            interval(row.change_bootstrap),
            points(row.ratio, 100, 1),
            points(row.top1, 100, 0, signed=False) if row.top1 else one_window(row),
            row.published_verdict or fmt.DASH,
            on_intervals(row),
        ]
        for row in rows
    ]
    headers = ["cell [file]", "`variance_ratio`", "windows", "mean change, %", "t interval", "bootstrap"]
    headers += ["exp(mean `delta_nll`) - 1, %", "same top token, %", "published rule", "on intervals"]
    return fmt.table(headers, lines)


def one_window(row: Figures) -> str:
    """The agreement without an interval, where a single window leaves no scatter."""
    given = [one.top1 for one in row.cell.windows]
    return printed(given[0], signed=False) if len(given) == 1 and given[0] is not None else fmt.DASH


def on_intervals(row: Figures) -> str:
    """The verdict that the intervals earn, and the windows an open one needs."""
    if row.ratio is None or row.top1 is None:
        return fmt.DASH
    ratio, top1 = row.ratio.to_json(), row.top1.to_json()
    word = decide(THRESHOLDS, ratio, top1)
    if word != "INCONCLUSIVE":
        return word
    return f"{word}, about {fmt.whole(windows_to_settle(THRESHOLDS, ratio, top1))} windows needed ({fmt.POST_HOC})"


def channels(rows: Sequence[Figures], numbers: Numbers) -> str:
    """Channels: the study's estimator is the mean of absolute changes."""
    lines = [
        [
            numbers.cell(row.cell),
            fmt.plain(row.cell.facts.bits_k),
            fmt.plain(row.cell.facts.bits_v),
            str(row.n_windows),
            points(row.absolute, signed=False),
            printed(row.change),
            interval(row.change_bootstrap),
            points(row.ratio, 100, 1),
            points(row.top1, 100, 0, signed=False) if row.top1 else one_window(row),
            on_intervals(row),
        ]
        for row in rows
    ]
    headers = ["channel [file]", "K bits", "V bits", "windows", "mean of abs(change), %", "mean change, %"]
    headers += ["its bootstrap", "exp(mean `delta_nll`) - 1, %", "same top token, %", "on intervals"]
    return fmt.table(headers, lines)


def divergences(rows: Sequence[Figures], numbers: Numbers) -> str:
    """KL and the like, where the files have them."""
    lines = [
        [
            numbers.cell(row.cell),
            {"full": "full vocabulary, reference first", "top_k": "top tokens only, symmetric"}[row.cell.kl_kind],
            fmt.fixed(row.kl.value, 4),
            points(row.kl, 1, 0, signed=False),
        ]
        for row in rows
        if row.kl and row.cell.kl_kind
    ]
    return fmt.table(["cell [file]", "KL over", "mean", "with interval, nats per token"], lines) if lines else ""


def differences(rows: Sequence[CellDifference], numbers: Numbers) -> str:
    """What one cell costs more than another."""
    lines = [
        [
            numbers.cell(row.b),
            numbers.cell(row.a),
            " and ".join(row.crosses) or "the recipe or the stream",
            points(row.change),
            points(row.delta_nll, 1),
            points(row.top1),
            reading(resolution(row.change.to_json())),
        ]
        for row in rows
    ]
    headers = ["cell [file]", "minus", "crosses", "mean change, points", "`delta_nll`, nats per token"]
    return fmt.table([*headers, "same top token, points", "reading of the mean change"], lines)


# --------------------------------------------------------------------------------------------- phases


def engines(rows: Sequence[Figures], numbers: Numbers) -> str:
    """vLLM against HF without a codec."""
    lines = [
        [
            numbers.cell(row.cell),
            str(row.n_windows),
            printed(row.change),
            interval(row.change_t),
            points(row.ratio, 100, 1),
            points(row.top1, 100, 0, signed=False),
            points(row.abs_dlogp, 1, 0, signed=False),
        ]
        for row in rows
    ]
    headers = ["engines [file]", "windows", "mean change of perplexity, %", "t interval"]
    headers += ["exp(mean `delta_nll`) - 1, %", "same top token, %", "mean abs change of log-probability, nats"]
    return fmt.table(headers, lines)


def noise(rows: Sequence[Figures], numbers: Numbers) -> str:
    """Noise by size."""
    lines = [
        [
            numbers.cell(row.cell),
            printed(row.change),
            interval(row.change_t),
            points(row.ratio, 100, 1),
            points(row.abs_dlogp, 1, 0, signed=False),
        ]
        for row in rows
    ]
    headers = ["noise [file]", "mean change, %", "t interval", "exp(mean `delta_nll`) - 1, %"]
    return fmt.table([*headers, "mean abs change of log-probability, nats"], lines)


def slopes(rows: Sequence[Slope], numbers: Numbers) -> str:
    """How fast the text reacts to noise."""
    lines = [
        [
            f"{plain(row.engine or 'not recorded')} [{numbers.of[row.file]}]",
            f"{fmt.plain(row.low)} to {fmt.plain(row.high)}" if row.slope else fmt.DASH,
            points(row.slope, 1, 0, signed=False),
            proportional(row.slope),
        ]
        for row in rows
    ]
    return fmt.table(["engine [file]", "sizes of noise used", "slope on logarithms", "reading"], lines)


def proportional(slope: Estimate | None) -> str:
    """Whether a slope is one."""
    if slope is None:
        return "too few sizes below saturation"
    if slope.low <= 1 <= slope.high:
        return "in proportion"
    return "less than in proportion" if slope.high < 1 else "more than in proportion"


def noise_gaps(rows: Sequence[tuple], numbers: Numbers) -> str:
    """vLLM minus HF at equal noise."""
    lines = [
        [fmt.plain(size), numbers.cell(b), numbers.cell(a), points(gap, 1), reading(resolution(gap.to_json()))]
        for size, a, b, gap in rows
    ]
    return fmt.table(["size", "vllm [file]", "minus hf [file]", "`delta_nll`, nats per token", "reading"], lines)


def layer_sums(row: LayerSums) -> str:
    """Sums over single layers."""
    lines = [
        [f"sum over the boundary layers {', '.join(map(str, row.boundary))}", printed(row.boundary_sum)],
        [f"sum over the other {row.n_other} layers", printed(row.other_sum)],
        ["the same, signs dropped", printed(row.absolute_sum, signed=False)],
        ["scatter (standard deviation) over the other layers", printed(row.scatter, signed=False)],
        ["standard error of their sum, if that scatter is noise", printed(row.noise, signed=False)],
        ["half-width of its t interval", printed(row.half_width, signed=False)],
    ]
    if row.interaction is not None:
        lines.append(["all those layers together, minus their sum", printed(row.interaction)])
    return fmt.table(["quantity", "points of perplexity change"], lines)


def layer_errors(errors: LayerErrors, numbers: Numbers) -> str:
    """The codec's error on what each engine captured."""
    lines = []
    for name in sorted(errors.values):
        found = layer_ratio(errors, name)
        low, high = min(errors.values[name]), max(errors.values[name])
        lines.append([code(name), points(found, 1, 0, signed=False), fmt.number(low, 4), fmt.number(high, 4)])
    return fmt.table([f"quantity [{numbers.of[errors.file]}]", "mean over layers", "smallest", "largest"], lines)


def knobs(rows: Sequence[Knob]) -> str:
    """The variance_ratio's strength in a grid."""
    lines = [
        [
            fmt.plain(row.low),
            fmt.plain(row.high),
            ", ".join(f"{code(name)} {value(given)}" for name, given in row.settings) or "all",
            str(row.pairs),
            printed(row.mean_low),
            printed(row.mean_high),
            f"{row.better} of {row.pairs}",
            fmt.number(row.kl_low, 3),
            fmt.number(row.kl_high, 3),
        ]
        for row in rows
    ]
    headers = ["low ratio", "high ratio", "at", "pairs", "mean change at low, %", "at high, %", "high is better"]
    return fmt.table([*headers, "KL at low", "KL at high"], lines)


def listing(rows: Sequence, text: Callable[[object], str]) -> str:
    """A bulleted list."""
    return "\n".join(f"- {text(row)}" for row in rows)
