"""One needle, one run: the question token by token, the answer greedily, and what of the attention the pool kept."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from torch import Tensor

from kvlab.engines.hooks import installed
from kvlab.kvstore.hf.queries import LastQueries, attention_mass
from kvlab.kvstore.hf.run import PagedRun
from kvlab.text.needles import Needle
from kvlab_pipeline.studies.policy.record import NeedleResult


class WatchedRun:
    """A run whose forwards of one token are watched.

    Parameters
    ----------
    run : PagedRun
        After the context.
    reference : sequence of Tensor, optional
        The `masses` of a run that had everything in its pool, forward by forward; its own where it is that run.
    ahead : bool
        The pool is chosen by the reference's attention at the very token that is to be computed.

    Attributes
    ----------
    masses : list of Tensor
        float64 [chunks] a forward: the attention that its token would pay to each chunk were all of them there.
    shares : list of float
        How much of the reference's attention lay on chunks in the pool.
    """

    def __init__(self, run: PagedRun, reference: Sequence[Tensor] | None = None, ahead: bool = False):
        self.run, self.ahead, self.queries = run, ahead, LastQueries(run.model)
        self.masses: list[Tensor] = []
        self.reference = self.masses if reference is None else reference
        self.shares: list[float] = []
        self.resident: tuple[int, ...] = ()

    def forward(self, token: int) -> int:
        """Feed one token; the most likely one after it."""
        number, pager = len(self.shares), self.run.pager
        if self.ahead:
            pager.set_scores(self.reference[number][: pager.sealed].tolist())
            pager.reselect()
        with self.queries.watching(), installed([(self.run.model.model, self._note)], before=True):
            logits = self.run.extend([token])
        if self.reference is self.masses:
            self.masses.append(self._mass())
        self.shares.append(float(self.reference[number][list(self.resident)].sum()))
        return int(logits.argmax())

    def _note(self, *_: object) -> None:
        # the pool as attention reads it: places are made before the forward, and the pool is chosen anew after it
        self.resident = self.run.pager.resident

    def _mass(self) -> Tensor:
        run = self.run
        queries = self.queries.at(len(run.tokens) - 1)
        return attention_mass(queries, run.keys(), run.pager.geometry.chunk_tokens, run.model.scaling)


def ask(
    run: PagedRun, needle: Needle, reference: Sequence[Tensor] | None = None, ahead: bool = False
) -> tuple[NeedleResult, Sequence[Tensor]]:
    """Ask a run that stands after the context.

    The answer is found when greedy decoding writes all of its tokens. The pool is chosen anew as the run's policy and
    its `every` say; the question comes token by token, so that a policy has seen its beginning when the answer is
    computed.

    Parameters
    ----------
    run : PagedRun
    needle : Needle
    reference, ahead
        See `WatchedRun`.

    Returns
    -------
    Asked, sequence of Tensor
        And the reference's masses.
    """
    seen, before = WatchedRun(run, reference, ahead), run.pager.stats.page_ins
    written = [seen.forward(token) for token in needle.question][-1:]
    chunks = planted_chunks(needle, run.pager.geometry.chunk_tokens)
    held = len(chunks & set(seen.resident)) / len(chunks)
    while len(written) < len(needle.answer):
        written.append(seen.forward(written[-1]))
    asked = len(needle.question)
    answer = NeedleResult(
        found=written == list(needle.answer),
        question=fmean(seen.shares[:asked]),
        answer=fmean(seen.shares[asked - 1 :]),  # the question's last token computes the first of the answer
        held=held,
        page_ins=run.pager.stats.page_ins - before,
    )
    return answer, seen.reference


def planted_chunks(needle: Needle, chunk_tokens: int) -> set[int]:
    """Chunks that hold the planted key or its value; the line's end after them is left out."""
    first = round(needle.depth * len(needle.context))
    last = first + len(needle.question) + len(needle.answer) - 1
    return set(range(first // chunk_tokens, last // chunk_tokens + 1))


def columns(items: Sequence[NeedleResult]) -> dict[str, np.ndarray]:
    """Every number of the items, float64 [items]."""
    return {
        name: np.array([getattr(item, name) for item in items], dtype=np.float64)
        for name in ("found", "question", "answer", "held", "page_ins")
    }
