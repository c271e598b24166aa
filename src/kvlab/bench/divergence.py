"""KL on the reference model: of the ladder's rungs from its tables, of the rivals measured here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import polars as pl
import torch

from kvlab import corpus
from kvlab.bench.subjects import Subject
from kvlab.codec.base import Site
from kvlab.engines.registry import start
from kvlab.experiments.coding import Snapshot
from kvlab.experiments.scoring import WindowRun
from kvlab.model import resolve
from kvlab.params import Params
from kvlab.records import read_job

Divergences = dict[str, dict[str, float]]
"""Label -> text (`test` or `other`) -> nats per token."""


def of_ladder(folder: Path) -> Divergences:
    """Mean KL of every cell of the ladder study; empty when it was not run."""
    found: Divergences = defaultdict(dict)
    for path in sorted(Path(folder).glob("*.json")):
        record, tokens = read_job(path)
        means = dict(tokens.group_by("cell_id").agg(pl.col("kl").mean()).iter_rows())
        for measured in record.cells:
            found[measured.cell.label][measured.cell.text] = means[measured.cell_id]
    return dict(found)


class OutsideCoder:
    """What `experiments.coding.Snapshot` asks of a coder, around a codec without calibration, on every layer."""

    def __init__(self, subject: Subject, head_dim: int):
        self.coders = {stream: subject.coder(stream, head_dim, None) for stream in ("k", "v")}

    def codes(self, layer: int, part: str) -> bool:
        """K and V of every layer."""
        return part in self.coders

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """`x` there and back, coded in bfloat16 as in the bench."""
        coder = self.coders[site.stream]
        return coder.decode(coder.encode(x.bfloat16(), site)).to(x.dtype)


def of_rivals(params: Params, subjects: Iterable[Subject], path: Path | None, windows: int) -> Divergences:
    """Mean KL of codecs that need no calibration, under the protocol of the ladder study and on its texts.

    Parameters
    ----------
    params : Params
        Names the model, the engine and the texts.
    subjects : iterable of Subject
    path : Path or None
        Token windows; without them nothing is measured.
    windows : int
        Scored windows of each text.
    """
    subjects = list(subjects)
    if not subjects or path is None:
        return {}
    info = resolve(params.model)
    tokens = corpus.load(path, info.model_hash)
    engine = start(params.ladder.engine, info, "float32", max_tokens=tokens.test.shape[1])
    coders = {subject.label: OutsideCoder(subject, info.head_dim) for subject in subjects}
    found: Divergences = defaultdict(dict)
    for text in params.ladder.texts:
        tables: dict[str, list[float]] = defaultdict(list)
        for number, ids in enumerate(tokens.scored(text).tolist()[:windows]):
            run = WindowRun(engine, ids, tokens.context, number)
            for label, coder in coders.items():
                logits = engine.score(ids, tokens.context, Snapshot(coder, number, run.clean))
                tables[label].append(float(run.rows(label, logits)["kl"].mean()))
        for label, means in tables.items():
            found[label][text] = sum(means) / len(means)
    engine.close()
    return dict(found)
