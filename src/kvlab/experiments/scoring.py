"""One window, one cell: run the engine with the cell's tap and compare its logits with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl
import torch

from kvlab.engines.base import Engine
from kvlab.experiments.coding import CleanCapture, Coder, tap_for
from kvlab.recipe import BlockStream, Cell, Recipe
from kvlab.records import TOKENS
from kvlab.stats.divergences import token_record

CANARY_STREAM = BlockStream(
    bits=1,
    variance_ratio=1.0,
    block_size=512,
    layout="per_head",
    n_centres=1,
    kmeans_iterations=0,
    pca="exact",
    rank_fraction=1.0,
    oversample=0,
    power_iterations=0,
    skeleton="fp32",
    share_basis=False,
    whiten=False,
    codebook="gaussian",
    seed=0,
)
CANARY = Recipe(k=CANARY_STREAM, v=CANARY_STREAM)


@dataclass
class WindowRun:
    """The clean pass of one window on one engine, from which every cell of that window starts.

    Attributes
    ----------
    reference : torch.Tensor, shape (scored tokens, vocab_size)
        Logits of the untouched model.
    clean : dict of str to CleanCapture
        The context's clean K and V by placement, which the snapshot protocol codes.
    """

    engine: Engine
    ids: list[int]
    context: int
    number: int
    reference: torch.Tensor = field(init=False)
    clean: dict[str, CleanCapture] = field(init=False)

    def __post_init__(self):
        first = CleanCapture(self.context)
        self.reference = self.engine.score(self.ids, self.context, first)
        self.clean = {"pre_rope": first}

    @property
    def labels(self) -> torch.Tensor:
        """The scored labels, shape (eval - 1,): `corpus.TokenWindows.labels` of this window."""
        return torch.tensor(self.ids[self.context + 1 :])

    def logits(self, cell: Cell, coder: Coder) -> torch.Tensor:
        """Logits of the window under a cell; a cell without layers is a plain rerun, without hooks."""
        if not cell.layers:
            return self.engine.score(self.ids, self.context)
        tap = tap_for(cell, coder, self.number, self._clean(cell.placement), len(self.ids))
        return self.engine.score(self.ids, self.context, tap, cell.placement)

    def _clean(self, placement: str) -> CleanCapture:
        """The clean K and V as a tap at `placement` sees them; another placement costs another pass."""
        if placement not in self.clean:
            self.clean[placement] = CleanCapture(self.context)
            self.engine.score(self.ids, self.context, self.clean[placement], placement)
        return self.clean[placement]

    def rows(self, cell_id: str, alternative: torch.Tensor, reference: torch.Tensor | None = None) -> pl.DataFrame:
        """Token rows of `alternative` against the clean pass (or another `reference`)."""
        reference = self.reference if reference is None else reference
        record = token_record(reference, alternative.to(reference.device), self.labels.to(reference.device))
        n = len(self.labels)
        columns = {name: values.cpu().numpy() for name, values in record.items()}
        columns |= {"cell_id": [cell_id] * n, "window": [self.number] * n}
        columns["position"] = list(range(self.context + 1, self.context + 1 + n))
        return pl.DataFrame(columns).select(pl.col(name).cast(dtype) for name, dtype in TOKENS.items())


def canary_kl(run: WindowRun, protocol: str, placement: str, stream: str) -> float:
    """Mean KL of a one-bit codec on every layer of a stream: proof that what the tap returns is used."""
    everything = tuple(range(run.engine.info.n_layers))
    cell = Cell(
        study="cells",
        label="canary",
        engine=run.engine.name,
        dtype=run.engine.dtype,
        protocol=protocol,
        placement=placement,
        origin=run.engine.name,
        stream=stream,
        layers=everything,
        windows=1,
        recipe=CANARY,
    )
    alternative = run.logits(cell, Coder(cell, None))
    return float(run.rows(cell.cell_id, alternative)["kl"].mean())
