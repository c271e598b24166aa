"""Which codec may be claimed, engine by engine: one row of each group of comparable rows, or that there is none.

Rows are comparable when they are of one model, engine, protocol and stored span; those of codecs of whole caches, with
which no model can run, among themselves. Of those that are certified, the one that stores least; where none is, of
those that earn support and were not measured again; where none does, of those against which nothing speaks and whose KL
is shown to be small enough, as a preview.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab.gate.replay import NOT_REPLAYED
from kvlab_pipeline.gate_page.row_summary import BEST_TIER, RowSummary
from kvlab_pipeline.gate_page.ways import order

KL = "kl"
OPEN, FAMILY = "quality_open", "quality_family"


class Recommendation(Frozen):
    """What may be claimed of one group of rows.

    Parameters
    ----------
    row_id : str or None
        None where no row can be named.
    whole : bool
        Whether its rows are of codecs of whole caches.
    word : {"certified", "not measured again", "preview", "none"}
        Whether the row is certified, only earns support, or only nothing speaks against it.
    tried, certified : int
        How many rows that compress were measured, and how many of them are certified. The best of many is better by
        luck, too.
    """

    model: str
    engine: str
    protocol: str
    stored_span: str | None
    whole: bool = False
    row_id: str | None
    word: Literal["certified", "not measured again", "preview", "none"]
    tried: int
    certified: int


def answers(lines: Iterable[RowSummary]) -> Iterator[Recommendation]:
    """One answer for each group, engine by engine: what is served first, codecs of whole caches last."""
    groups: dict[tuple, list[RowSummary]] = {}
    for line in lines:
        if line.compresses:
            groups.setdefault((*line.place, line.protocol or "", line.stored_span, line.whole), []).append(line)
    places = list(dict.fromkeys(group[:2] for group in groups))
    for group in sorted(groups, key=lambda group: (places.index(group[:2]), group[-1], order(group[2:4]))):
        (model, engine, protocol, span, whole), tried = group, groups[group]
        certified = [line for line in tried if line.certified]
        found = {
            "certified": smallest(certified),
            NOT_REPLAYED: smallest([line for line in tried if line.earned == BEST_TIER]),
            "preview": smallest([line for line in tried if is_preview(line)]),
        }
        word = next((word for word, line in found.items() if line), "none")
        best = found.get(word)
        yield Recommendation(
            model=model,
            engine=engine,
            protocol=protocol,
            stored_span=span,
            whole=whole,
            row_id=best.row_id if best else None,
            word=word,
            tried=len(tried),
            certified=len(certified),
        )


def is_preview(line: RowSummary) -> bool:
    """Whether nothing but open metrics, KL none of them, or the number of rows tested keeps a row from support."""
    return set(line.codes) in ({OPEN}, {FAMILY}) and KL in line.metrics and KL not in line.open


def smallest(lines: list[RowSummary]) -> RowSummary | None:
    """The row that stores least; of equals the one with the lower KL."""
    held = [line for line in lines if line.bits_per_value is not None]
    return min(held, key=lambda line: (line.bits_per_value, mean_kl(line), line.row_id), default=None)


def mean_kl(line: RowSummary) -> float:
    """A row's KL; infinite where no evidence shows it."""
    measure = line.metrics.get(KL)
    return measure.value if measure else float("inf")
