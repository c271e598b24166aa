"""An `archive` fitted to the tiny model, and coders of it."""

from __future__ import annotations

from kvlab.calibration.archive import Archive
from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.recipes import named_recipe
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.snapshot.archive import ArchiveChunks
from kvlab.text import corpus

CHUNK = 8
QUALITY = {"quality": 700}


def fitted(engine, windows_path, context: int = 64) -> Archive:
    """From the calibration windows of the tiny corpus."""
    windows = corpus.load(windows_path, engine.info.model_hash)
    recipe, rows = named_recipe("archive", **QUALITY), windows.calib[:, :context].tolist()
    return calibrate(engine, rows, [recipe], corpus_hash=windows.corpus_hash, sample=4).archive


def coder(archive: Archive, model: PagedModel, chunk: int = CHUNK, **asked) -> ArchiveChunks:
    recipe = named_recipe("archive", **(asked or QUALITY))
    return ArchiveChunks(model.geometry(chunk), recipe, archive, model.turns(256))
