"""KL on the model: of the ladder from its tables, of the rivals measured here, on the same windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvlab.codecs.base import Site
from kvlab.core.errors import StaleResult, StorageError
from kvlab.core.model import ModelInfo
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell
from kvlab.core.records import read_job
from kvlab.engines.registry import start
from kvlab.measure.coding import CleanCapture, CodedContext
from kvlab.measure.loop import walk
from kvlab.measure.scoring import WindowRun
from kvlab.measure.windows import Window, windows_of
from kvlab.stats.bootstrap import documents_of
from kvlab.text.corpus import TokenWindows
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies import gather
from kvlab_pipeline.studies.ladder.plan import rungs
from kvlab_pipeline.studies.measured import Measured
from validation.bench.subjects import BenchCodec

Divergences = dict[str, dict[str, dict]]
"""Label -> text (`test` or `other`) -> ``bits`` per value, and ``windows``: nats per token of each window."""

AGAIN = "run `snakemake ladder`"


def of_ladder(params: Params, folder: Path, model_hash: str, corpus_hash: str | None, windows: int) -> Divergences:
    """KL of every cell of the ladder study.

    Parameters
    ----------
    params : Params
        Plan the cells; the folder holds those and no others.
    folder : Path
    model_hash : str
        Of the model that the params name.
    corpus_hash : str or None
        Of the windows that rivals are scored on; None when there are none.
    windows : int
        Of each text, the first so many.

    Raises
    ------
    StorageError
        The folder, or a job in it, cannot be read.
    StaleResult
        A job or a cell is not planned, or was measured on another model or other windows.
    MixedIdentity, CodecNotActive, NonFinite
        As the report refuses the cells of its studies, see `studies.gather`.
    """
    cells = read_ladder(params, Path(folder))
    gather.refuse_mixed(cells, params)
    for text in params.ladder.texts:
        gather.refuse_other_labels([measured.tokens for measured in cells if measured.cell.text == text])
    for name, expected in (("model_hash", model_hash), ("corpus_hash", corpus_hash)):
        found = getattr(cells[0].provenance, name)
        if expected is not None and found != expected:
            raise StaleResult(
                f"{folder} was measured under {name} {found}, here it is {expected}; {AGAIN}", code="stale.other-origin"
            )
    found: Divergences = defaultdict(dict)
    labels = dict(rungs(params))
    for measured in cells:
        if measured.cell.protocol != "snapshot" or measured.cell.label not in labels:
            continue  # less a part of the codec, or inside the forward
        means = measured.column("kl", windows).means.tolist()
        bits = measured.record.coding.bits_per_value
        documents = measured.column("kl", windows).documents
        found[measured.cell.label][measured.cell.text] = {"bits": bits, "windows": means, "documents": documents}
    return dict(found)


def read_ladder(params: Params, folder: Path) -> list[Measured]:
    """Every planned cell of the ladder, from exactly the planned jobs."""
    if not folder.is_dir():
        raise StorageError(f"the ladder's folder {folder} is missing; {AGAIN}", code="storage.no-ladder")
    planned = plan.jobs(params, plan.LADDER)
    known = {*planned, "facts", "further"}  # what else `snakemake ladder` leaves there
    unplanned = sorted(path.name for path in folder.glob("*.json") if path.stem not in known)
    if unplanned:
        raise StaleResult(
            f"{folder / unplanned[0]} is no job of the ladder these parameters plan; remove it, {AGAIN}",
            code="stale.unplanned-job",
        )
    missing = [job for job in planned if not (folder / f"{job}.json").is_file()]
    if missing:
        raise StorageError(
            f"{folder} lacks {', '.join(missing)} of the planned {len(planned)} jobs; {AGAIN}",
            code="storage.missing-jobs",
        )
    return [measured for job, cells in planned.items() for measured in read_cells(cells, folder / f"{job}.json")]


def read_cells(planned: list, path: Path) -> list[Measured]:
    """The cells of one job, which are the planned ones."""
    record, tokens = read_job(path)
    expected = {cell.cell_id: cell for cell in planned}
    for cell in record.cells:
        gather.refuse_stale(cell, expected, path)
    tables = gather.by_cell(tokens, [cell.cell_id for cell in record.cells], path)
    if set(tables) != set(expected):
        raise StaleResult(
            f"{path} holds {len(tables)} of the {len(expected)} cells planned for it; {AGAIN}",
            code="stale.missing-cells",
        )
    found = []
    for cell in record.cells:
        name = gather.describe(cell.cell)
        rows = gather.on_grid(tables[cell.cell_id], cell.cell.windows, record.context, record.eval, name)
        documents = record.documents.get(cell.cell.text)
        found.append(Measured(cell, record.provenance, record.context, record.eval, rows, documents))
        gather.refuse_inactive(found[-1])
    return found


@dataclass(eq=False)
class OutsideCoder:
    """What `WindowRun.logits` asks of a coder, around a codec without calibration, on every layer."""

    subject: BenchCodec
    head_dim: int
    cell: Cell
    nbytes: float = 0.0
    values: int = 0
    coders: dict = field(init=False)

    def __post_init__(self):
        self.coders = {stream: self.subject.coder(stream, self.head_dim, None) for stream in ("k", "v")}

    def due(self, window: Window) -> bool:
        """On the windows of its text."""
        return window.text == self.cell.text and window.number < self.cell.windows

    def score(self, run: WindowRun) -> float:
        """Mean KL of one window, nats per token."""
        return run.measured(self.cell, self)["kl"].mean()

    def codes(self, layer: int, part: str) -> bool:
        """K and V of every layer."""
        return part in self.coders

    def held(self, clean: CleanCapture, ids: list[int], window: int) -> CodedContext:
        """A context's clean cache, its tensors coded one by one."""
        return CodedContext(self, window, clean)

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """`x` there and back, coded in bfloat16 as in the bench; bytes are counted."""
        coder = self.coders[site.stream]
        coded = coder.encode(x.bfloat16(), site)
        self.nbytes += coder.nbytes(coded)
        self.values += x.numel()
        return coder.decode(coded).to(x.dtype)


def of_rivals(
    params: Params, info: ModelInfo, subjects: Iterable[BenchCodec], tokens: TokenWindows, windows: int
) -> Divergences:
    """KL of codecs that need no calibration, under the protocol of the ladder study and on its texts.

    Parameters
    ----------
    params : Params
        Names the engine and the texts.
    info : ModelInfo
    subjects : iterable of BenchCodec
    tokens : TokenWindows
        What the ladder scored.
    windows : int
        Scored windows of each text, the first so many.
    """
    subjects = list(subjects)
    if not subjects:
        return {}
    found: Divergences = defaultdict(dict)
    engine = start(params.ladder.engine, info, "float32", max_tokens=tokens.test.shape[1])
    try:
        coders = [
            OutsideCoder(one, info.head_dim, cell_of(params, one, text, windows))
            for text in params.ladder.texts
            for one in subjects
        ]
        scored = [window for text in params.ladder.texts for window in windows_of(tokens, text)[:windows]]
        means: dict[OutsideCoder, list[float]] = {coder: [] for coder in coders}

        def visit(window: Window) -> WindowRun:
            return WindowRun(engine, list(window.ids), window.context, window.number)

        for _, kls in walk(scored, coders, visit):
            for coder, kl in kls:
                means[coder].append(kl)
        for coder, kls in means.items():
            bits = 8 * coder.nbytes / coder.values
            documents = documents_of(range(len(kls)), tokens.documents.get(coder.cell.text))
            found[coder.subject.label][coder.cell.text] = {"bits": bits, "windows": kls, "documents": documents}
    finally:
        engine.close()
    return dict(found)


def cell_of(params: Params, subject: BenchCodec, text: str, windows: int) -> Cell:
    """Where an outside codec sits, as a cell of the ladder; its recipe stands for what the codec does itself."""
    return Cell(
        study="ladder",
        label=subject.label,
        engine=params.ladder.engine,
        dtype="float32",
        protocol="snapshot",
        origin=params.calibration.origin,
        stream="kv",
        layers=tuple(range(params.model.n_layers)),
        windows=windows,
        text=text,
        recipe=IDENTITY,
    )
