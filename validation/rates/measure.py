"""Measures codecs at several bits on windows that `kvlab step corpus` cut, calibrated on its calibration windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import polars as pl

from kvlab.calibration.calibrate import calibrate
from kvlab.calibration.needs import needs_calibration
from kvlab.cli.checked import Named, info_of
from kvlab.core.origin import told_of
from kvlab.core.records import versions
from kvlab.engines.registry import start
from kvlab.measure import quick_run
from kvlab.text import corpus
from kvlab.witness.plain import PlainModel


def measure(
    folder: Path, cut: Path, asked: Sequence[Named], protocol: str, most: int, texts: Sequence[str] = ("other", "test")
) -> dict:
    """Every codec on every text: bits, and KL and agreement of each window.

    Parameters
    ----------
    folder : Path
        Of a model.
    cut : Path
        The windows, as `kvlab step corpus` writes them for this model.
    asked : sequence of Named
        Codecs at bits.
    protocol : {"snapshot", "in_forward"}
    most : int
        Windows of each text.
    texts : sequence of str
        ``test`` is of the calibration's kind, ``other`` is not.

    Raises
    ------
    CorpusError
        The windows are of another model, or hold no such text.
    """
    info = info_of(folder)
    windows = corpus.load(cut, info.model_hash)
    scored = {text: windows.scored(text)[:most] for text in texts}
    engine = start("hf", info, "float32", max_tokens=windows.calib.shape[1])
    needy = [one.recipe for one in asked if any(needs_calibration(getattr(one.recipe, s)) for s in ("k", "v"))]
    calib = windows.calib[:, : windows.context].tolist()
    fitted = calibrate(engine, calib, needy, corpus_hash=windows.corpus_hash) if needy else None
    subjects = [
        quick_run.NamedCodec(one.label, one.recipe, fitted if one.recipe in needy else None, protocol) for one in asked
    ]
    plain = cache(partial(PlainModel, info.path))
    rows = []
    for text, own in scored.items():
        found = quick_run.score(engine, own, windows.context, subjects, plain)
        documents = windows.documents.get(text)
        rows += [_row(text, *pair, documents and list(documents[:most])) for pair in zip(asked, found, strict=True)]
    engine.close()
    return {
        "model": info.path.name,
        "disclosure": told_of(info.path),
        "protocol": protocol,
        "context": windows.context,
        "eval": windows.eval,
        "corpus_hash": windows.corpus_hash,
        "calibration_tokens": len(calib) * windows.context,
        "versions": versions(),
        "rows": rows,
    }


def _row(text: str, one: Named, found: quick_run.Scored, documents: list[int] | None) -> dict:
    """A codec on a text; sums over the tokens of each window."""
    by_window = (
        found.tokens.group_by("window", maintain_order=True)
        .agg(
            pl.col("kl").sum(),
            (pl.col("top1_ref") == pl.col("top1_alt")).sum().alias("same"),
            pl.len().alias("tokens"),
        )
        .sort("window")
    )
    return {
        "text": text,
        "codec": one.codec,
        "nominal": one.bits,
        "label": one.label,
        "recipe_id": one.recipe.recipe_id,
        "bits": found.cost.bits_per_value,
        "documents": documents,
        **{name: by_window[name].to_list() for name in ("kl", "same", "tokens")},
    }
