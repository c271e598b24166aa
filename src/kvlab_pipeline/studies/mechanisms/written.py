"""What is written after a stored context: answers to RULER's questions, and 64 tokens of greedy decoding.

The engine as it is writes first, token by token over the context's clean cache. What it wrote is then a draft that one
pass over a cache checks: over the clean one, which is what all variants are held against, and over each coded one. So
both sides of a comparison are computed in passes of one shape, and a codec that changes nothing changes no token. By
what the draft and the pass over the same clean cache differ is the engine's own rounding: the baseline's row tells it.

Greedy agreement is that of Deiseroth et al. 2024 (arXiv 2311.01544): `greedy_prefix` is their first divergent token,
the share of all tokens that stand before it; `greedy_same` is one minus their share of divergent tokens, how often the
variant would go on as the engine as it is does, after the same tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from kvlab.engines.base import ContextCache
from kvlab.measure.coding import Tally
from kvlab.measure.engines import Visit
from kvlab.measure.scoring import WindowRun
from kvlab.measure.store import Found
from kvlab.measure.windows import Window
from kvlab.text.ruler import Ruler, RulerItem, score
from kvlab_pipeline.studies.mechanisms.plan import GREEDY_TOKENS, TASKS
from kvlab_pipeline.studies.mechanisms.subjects import EvalSubject

DRAFT, CHECKED = "draft", "checked"  # what a run keeps: written token by token, and as one pass has it


class WrittenEval(Protocol):
    """What one eval makes of what is written."""

    def identity(self) -> dict:
        """What decides its scores, beside the window."""

    def due(self, window: Window) -> bool:
        """Whether it has something to ask of a window."""

    def written(self, run: WindowRun, cache: ContextCache, placement: str) -> list[int]:
        """Tokens over a cache, in a pass over the draft."""

    def draft(self, run: WindowRun) -> list[int]:
        """What the engine as it is writes, token by token."""

    def scores(self, run: WindowRun, written: list[int]) -> dict[str, float]:
        """The eval's metrics."""


@dataclass(eq=False)
class Writer(EvalSubject):
    """One variant whose engine writes over the stored context; `judge` says what, and what that is worth."""

    judge: WrittenEval | None = None

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return super().due(window) and self.judge.due(window)

    def identity(self) -> dict | None:
        """See `loop.FindingStore`."""
        known = super().identity()
        return known and known | {"judge": self.judge.identity()}

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`; the engine as it is is held against itself, token by token against one pass.

        Raises
        ------
        CodecNotActive
            The codec did not fire as often as it should have on this text.
        """
        run, note = visit.run(self.plain), {}
        checked = self._checked(run)
        written = run.kept[DRAFT]
        if self.coder:
            self.coder.tally, cell = Tally(), self.coder.cell
            written = self.judge.written(run, run.snapshot(cell, self.coder), cell.placement)
            self.coder.refuse_idle(windows=1)
            note = {"tally": self.coder.tally.to_json()}
        note |= {"variant": self.judge.scores(run, written), "baseline": self.judge.scores(run, checked)}
        return Found(note | {"storage": asdict(visit.engines.get(self.which).storage)})

    def _checked(self, run: WindowRun) -> list[int]:
        """What the engine as it is writes: once for all variants of a window."""
        if CHECKED not in run.kept:
            run.kept[DRAFT] = self.judge.draft(run)
            run.kept[CHECKED] = self.judge.written(run, run.clean["pre_rope"].kept, "pre_rope")
        return run.kept[CHECKED]


class Answers:
    """Answers to the questions of one of RULER's tasks.

    Parameters
    ----------
    name : str
        The eval.
    items : Ruler
    tokenizer : transformers.PreTrainedTokenizerBase
    """

    def __init__(self, name: str, items: Ruler, tokenizer):
        self._task, self._hash, self._tokenizer = TASKS[name], items.items_hash, tokenizer
        self._items: dict[int, RulerItem] = {item.number: item for item in items.items if item.task == self._task}

    def identity(self) -> dict:
        """See `WrittenEval`: the answers are no part of a window."""
        return {"items": self._hash}

    def due(self, window: Window) -> bool:
        """See `WrittenEval`."""
        return window.number in self._items

    def draft(self, run: WindowRun) -> list[int]:
        """See `WrittenEval`."""
        return self._write(run, run.clean["pre_rope"].kept, "pre_rope", [])

    def written(self, run: WindowRun, cache: ContextCache, placement: str) -> list[int]:
        """See `WrittenEval`."""
        return self._write(run, cache, placement, run.kept[DRAFT])

    def _write(self, run: WindowRun, cache: ContextCache, placement: str, draft: list[int]) -> list[int]:
        stop = [] if (end := self._tokenizer.eos_token_id) is None else [end]
        return run.engine.write_over(run.ids, cache, self._items[run.number].written, draft, stop, placement)

    def scores(self, run: WindowRun, written: list[int]) -> dict[str, float]:
        """See `WrittenEval`: RULER's share of the answers that are found."""
        return {self._task: score(self._tokenizer.decode(written), self._items[run.number].answers)}


class Greedy:
    """The tokens that greedy decoding writes after the first tokens of a text.

    The prompt is the context and one token more, which is computed over the stored context: the next token is the
    first that hangs on it.

    Parameters
    ----------
    windows : int
        How many windows are asked.
    """

    def __init__(self, windows: int):
        self._windows = windows

    def identity(self) -> dict:
        """See `WrittenEval`."""
        return {"tokens": GREEDY_TOKENS}

    def due(self, window: Window) -> bool:
        """See `WrittenEval`."""
        return window.number < self._windows

    def draft(self, run: WindowRun) -> list[int]:
        """See `WrittenEval`; a token that ends texts is one among others here."""
        return run.engine.write_over(prompt(run), run.clean["pre_rope"].kept, GREEDY_TOKENS)

    def written(self, run: WindowRun, cache: ContextCache, placement: str) -> list[int]:
        """See `WrittenEval`: the most likely token at each place of the draft, the draft's own tokens before it."""
        rows: torch.Tensor = run.engine.score_over([*prompt(run), *run.kept[DRAFT]], cache, placement)
        return rows.argmax(-1).tolist()

    def scores(self, run: WindowRun, written: list[int]) -> dict[str, float]:
        """See `WrittenEval`."""
        return agreement(run.kept[CHECKED], written)


def prompt(run: WindowRun) -> list[int]:
    """A window's context and the token after it."""
    return list(run.ids[: run.context + 1])


def agreement(first: list[int], second: list[int]) -> dict[str, float]:
    """Of two rows of tokens the share before the first difference, and the share of equal ones."""
    same = [a == b for a, b in zip(first, second, strict=True)]
    return {"greedy_prefix": [*same, False].index(False) / len(same), "greedy_same": sum(same) / len(same)}
