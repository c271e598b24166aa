"""What a snapshot cell costs on transformers, codec by codec, beside a bare forward of its window.

A cell codes the context's K and V and scores the tokens after it over them. All that is not the codec's own encoding
and decoding (judging its errors among it) should cost a small part of a forward over the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter

import polars as pl
import torch

from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.catalogue import LADDERED, has_bits
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Cell, Recipe, digest
from kvlab.core.records import write_text
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure.coding import Coder
from kvlab.measure.scoring import WindowRun
from kvlab.output import format as fmt

CODECS = tuple(name for name in LADDERED if name != "block")  # which has a table fitted first
BITS = 4
ALLOWED = 0.35  # of a bare forward, the codec's own time apart
WINDOWS, CALIBRATION, CONTEXT, EVAL = 6, 4, 512, 128


def snapshot_cells(info: ModelInfo, out: Path, dtype: str = "float32") -> pl.DataFrame:
    """Time every codec's cell beside a bare forward, window by window in turn, and write ``SNAPSHOT.md`` and its CSV.

    Parameters
    ----------
    info : ModelInfo
        The model.
    out : Path
        Folder of the page.
    dtype : str
        What transformers computes in.

    Returns
    -------
    polars.DataFrame
        A row for each codec: median seconds of a bare forward, of a cell, of the codec in it, and the share of the
        forward that the rest of the cell takes.
    """
    torch.set_num_threads(1)
    with closing(start("hf", info, dtype, max_tokens=CONTEXT + EVAL)) as engine:
        took = timed(engine, windows_of(info.vocab_size))
    table = pl.DataFrame([summary(codec, rows[1:]) for codec, rows in took.items()])  # the first warms up
    write_text(out / "SNAPSHOT.md", page(table, info.slug, dtype))
    write_text(out / "snapshot.csv", table.write_csv())
    return table


def timed(engine: Engine, ids: list[list[int]]) -> dict[str, list[tuple[float, ...]]]:
    """By codec, `seconds_of` each window after those that calibrate."""
    recipes = {codec: named_recipe(codec, BITS if has_bits(codec) else None) for codec in CODECS}
    found = calibrate(engine, ids[:CALIBRATION], list(recipes.values()), corpus_hash=digest({"ids": ids[:CALIBRATION]}))
    cells = {codec: cell_of(engine, recipe) for codec, recipe in recipes.items()}
    took: dict[str, list[tuple[float, ...]]] = {codec: [] for codec in CODECS}
    for number, window in enumerate(ids[CALIBRATION:]):
        run = WindowRun(engine, window, CONTEXT, number)
        _ = run.over_clean  # made once for all cells
        for codec, cell in cells.items():
            took[codec].append(seconds_of(engine, run, cell, Coder(cell, found)))
    return took


def windows_of(vocab_size: int) -> list[list[int]]:
    """Windows of random tokens: what a cell costs does not depend on what they say."""
    source = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (CALIBRATION + WINDOWS, CONTEXT + EVAL), generator=source).tolist()


def cell_of(engine: Engine, recipe: Recipe) -> Cell:
    """K and V of every layer under `snapshot`."""
    layers = tuple(range(engine.info.n_layers))
    names = {"study": "ladder", "label": "cost", "engine": "hf", "origin": "hf", "stream": "kv", "windows": 1}
    return Cell(dtype=engine.dtype, protocol="snapshot", layers=layers, recipe=recipe, **names)


def seconds_of(engine: Engine, run: WindowRun, cell: Cell, coder: Coder) -> tuple[float, ...]:
    """Seconds of a bare forward, of the cell beside it, and of encoding and decoding in the cell."""
    began = perf_counter()
    engine.score(run.ids, run.context)
    middle = perf_counter()
    run.measured(cell, coder)
    return middle - began, perf_counter() - middle, coder.tally.encode_seconds + coder.tally.decode_seconds


def summary(codec: str, rows: Sequence[tuple[float, ...]]) -> dict:
    """Medians over the windows; the share is the median of the windows' own shares."""
    forward, cell, own = (median(column) for column in zip(*rows, strict=True))
    share = median((whole - codec_own) / bare for bare, whole, codec_own in rows)
    return {"codec": codec, "forward_s": forward, "cell_s": cell, "codec_s": own, "rest_of_forward": share}


def page(table: pl.DataFrame, model: str, dtype: str) -> str:
    """The table in Markdown."""
    head = ["codec", "bare forward, s", "cell, s", "of it the codec, s", "rest, of a forward"]
    rows = [
        [f"`{row['codec']}`", *(fmt.number(row[name], 3) for name in table.columns[1:])] for row in table.to_dicts()
    ]
    worst = table["rest_of_forward"].max()
    kept = "stays" if worst <= ALLOWED else "does not stay"
    said = (
        f"Model `{model}`, transformers in {dtype}, one thread, {WINDOWS - 1} windows of {CONTEXT} + {EVAL} tokens,"
        f" medians; bits {BITS}. A cell without its codec's own time {kept} within {ALLOWED} of a bare forward of its"
        f" window (largest: {worst:.2f})."
    )
    return f"# What a snapshot cell costs\n\n{said}\n\n{fmt.table(head, rows)}\n"
