"""An eviction in the measuring loop: tokens of the context leave the cache, and the others keep their positions.

Gaps are closed (`compaction`), and the model goes on over what is left. As for a mechanism of `lab`, keeping everything
has to leave the logits alone, keeping one token has to move them, and a witness computes the last window again with a
forward that is written out, over the whole context with the dropped tokens left out of every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import polars as pl
import torch
from torch import Tensor
from transformers import DynamicCache

from kvlab.base.errors import CodecNotActive, Fault
from kvlab.base.records import CANARY_MIN, SAME
from kvlab.engines.base import ContextCache, Part
from kvlab.engines.hf import HFEngine
from kvlab.kvstore.memory.compaction import compact
from kvlab.kvstore.memory.selection import latest, pooled_attention, select, small_keys
from kvlab.lab.mechanism import read_of
from kvlab.lab.mechanism_again import computed_again
from kvlab.lab.scoring import WindowRun
from kvlab.studies.tradeoffs.arms import PLACE, Arm, numbered
from kvlab.witness.plain import PlainModel
from kvlab.witness.reading import reader_of_kept

BYTE = 8  # bits


class LastQueries:
    """Queries of the last tokens of a context by layer, before their rotary embedding; of one window at a time."""

    def __init__(self, engine: HFEngine, last: int):
        self.engine, self.last = engine, last
        self._ids: list[int] = []
        self._found: dict[int, Tensor] = {}

    def of(self, ids: list[int], context: int) -> dict[int, Tensor]:
        """By layer, [heads, context, head_dim]; a pass of the context where the window is another one."""
        if ids != self._ids:
            self._ids, self._found = ids, {}
            self.engine.score(ids[:context], context - 2, self._tap)
        return self._found

    def _tap(self, layer: int, part: Part, x: Tensor) -> None:
        if part == "q":
            self._found[layer] = x.clone()


@dataclass(eq=False)
class Evicted:
    """An eviction on every window, as the measuring loop scores it (`walk.Subject`).

    Parameters
    ----------
    arm : Arm
        Its policy and how many tokens it keeps.
    queries : LastQueries
        Shared by the evictions of a run.
    sinks, recent : int
        See `selection.select`.
    plain : callable or None
        Gives the witness's model; None for no witness.
    last : int
        The window that is computed again.

    Attributes
    ----------
    tables, read, stored, witnessed
        See `lab.mechanism.Applied`.
    """

    arm: Arm
    engine: HFEngine
    context: int
    queries: LastQueries
    sinks: int
    recent: int
    plain: Callable[[], PlainModel] | None = None
    last: int = 0
    tables: list[pl.DataFrame] = field(default_factory=list, init=False)
    read: list[float] = field(default_factory=list, init=False)
    stored: float = field(default=0.0, init=False)
    witnessed: float | None = field(default=None, init=False)

    def due(self, _window: int) -> bool:
        """On every window."""
        return True

    def score(self, run: WindowRun) -> pl.DataFrame:
        """Its token rows.

        Raises
        ------
        CodecNotActive
            Keeping one token does not move the logits.
        Fault
            Keeping everything moves them.
        """
        clean = run.clean["pre_rope"].kept
        if run.number == 0:
            self._probe(run, clean)
        held = {place: x.to(torch.bfloat16) for place, x in clean.items()}
        places = self.places(run, held, self.arm.kept)
        logits, nbytes = over_kept(self.engine, run.ids, held, places)
        self.stored = nbytes / self.context
        if numbered(self.arm.policy):
            self.stored += len(places) * self.arm.kept * PLACE / BYTE / self.context
        self.read.append(read_of(self.stored, self.context, len(run.ids), self.engine.info.values_per_token))
        if self.plain and run.number == self.last:
            left = reader_of_kept([one.tolist() for one in places], self.context)
            self.witnessed = computed_again(self.plain(), run, held, logits, left, self.arm.name)
        rows = run.rows(self.arm.name, logits, run.over_clean)
        self.tables.append(rows)
        return rows

    def places(self, run: WindowRun, held: ContextCache, kept: int) -> list[Tensor]:
        """Tokens that stay, by layer, rising."""
        layers = range(self.engine.info.n_layers)
        if self.arm.policy == "sinks":
            return [latest(self.context, kept, self.sinks)] * len(layers)
        if self.arm.policy == "small_keys":
            scores = [small_keys(held[layer, "k"]) for layer in layers]
        else:
            asked = self.queries.of(run.ids, self.context)
            turn = self.engine.rotation(self.context)
            scores = [last_attention(turn, asked[layer], held[layer, "k"].float(), self.recent) for layer in layers]
        return [select(one, kept, self.sinks, self.recent) for one in scores]

    def _probe(self, run: WindowRun, clean: ContextCache) -> None:
        kl = []
        for kept in (self.context, 1):
            logits, _ = over_kept(self.engine, run.ids, clean, self.places(run, clean, kept))
            kl.append(float(run.rows("probe", logits, run.over_clean)["kl"].mean()))
        if not kl[0] <= SAME[self.engine.dtype]:
            raise Fault(f"{self.arm.name}: keeping every token moves the logits by KL {kl[0]:.1e} nats per token")
        if kl[1] < CANARY_MIN:
            raise CodecNotActive(f"{self.arm.name}: keeping one token moves the logits by KL {kl[1]:.1e} nats only")


@torch.inference_mode()
def over_kept(engine: HFEngine, ids: Sequence[int], held: ContextCache, places: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Logits of the tokens after a context over the tokens of it that stay, and the bytes that these take."""
    context = held[0, "k"].shape[1]
    filled, nbytes = filled_with(engine, held, places)
    given = torch.tensor([list(ids[context:])], device=engine.model.device)
    at = torch.arange(context, len(ids), device=engine.model.device)[None]
    return engine.model(given, past_key_values=filled, position_ids=at, use_cache=True).logits[0, :-1], nbytes


def filled_with(engine: HFEngine, held: ContextCache, places: Sequence[Tensor]) -> tuple[DynamicCache, int]:
    """A cache of the model's own kind that holds the tokens that stay, and the bytes of `held` that these take.

    Parameters
    ----------
    held : ContextCache
        K before its rotary embedding, and V, as they are stored.
    places : sequence of Tensor
        By layer, positions of the tokens that stay, of which all layers keep as many.
    """
    filled, nbytes = DynamicCache(), 0
    turn = engine.rotation(held[0, "k"].shape[1])
    for layer, kept in enumerate(places):
        left = compact(held[layer, "k"], held[layer, "v"], kept)
        nbytes += left.k.nbytes + left.v.nbytes
        turned = turn(held[layer, "k"][None].to(engine.model.dtype))[:, :, kept]
        filled.update(turned, left.v[None].to(engine.model.dtype), layer)
    return filled, nbytes


def last_attention(turn: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, last: int) -> Tensor:
    """What the last queries of a context give its tokens, pooled [tokens]; q and k before their rotary embedding."""
    turned_q, turned_k = turn(q[None])[0, :, -last:], turn(k[None])[0]
    turned_k = turned_k.repeat_interleave(len(q) // len(k), dim=0)
    logits = turned_q @ turned_k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(logits.shape[2] - last + 1)
    return pooled_attention(logits.masked_fill(hidden, -torch.inf).softmax(-1))
