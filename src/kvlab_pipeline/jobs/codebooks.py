"""The Lloyd-Max tables of all studies' cells, as files; see `calibration.tables`."""

from __future__ import annotations

from pathlib import Path

import torch

from kvlab.calibration.capture import Captured
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.sigma import load_whiteners
from kvlab.calibration.tables import fit_table, residual_pool
from kvlab.codecs.block.studied import coded_layers
from kvlab.codecs.stream.published import write_centroids
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.recipe import digest
from kvlab.core.records import file_hash, write_json
from kvlab_pipeline.jobs.plan import fittings


def fit_codebooks(params: Params, capture_path: Path, sigma_path: Path, rotated_path: Path | None, out: Path) -> None:
    """Fit every table that a cell reads from this capture; write the ``.json`` and one ``.f32`` each.

    A ``.f32`` file is a table in the published format of `codecs.stream.published`. It lies in a folder named like
    the json, as ``K_<id of the stream's recipe>.f32``.

    Raises
    ------
    CalibrationMismatch
        A cell codes K after its rotary embedding and no `rotated_path` is given.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    whiteners = {"pre_rope": load_whiteners(sigma_path, info.model_hash)}
    if rotated_path is not None:
        whiteners["post_rope"] = load_whiteners(rotated_path, info.model_hash)
    angles = ErrorMetrics(info, captured.context).angles
    out = Path(out)
    tables = []
    for which, placement, recipe in fittings(params, captured.metadata["engine"]):
        if placement not in whiteners:
            raise CalibrationMismatch(f"a cell codes K {placement}; name its Sigma_q with --rotated")
        turn = angles if placement == "post_rope" else None
        name = f"{which.upper()}_{digest(recipe)}" + ("_post_rope" if turn else "")
        pool = residual_pool(recipe, which, captured, whiteners[placement], coded_layers(params), turn, name)
        table = fit_table(recipe, which, pool) | {"placement": placement, "name": name, "file": f"{name}.f32"}
        write_centroids(out.with_suffix("") / table["file"], torch.tensor(table["centroids"]))
        tables.append(table)
    write_json(
        out,
        {
            "model_hash": info.model_hash,
            "corpus_hash": captured.metadata["corpus_hash"],
            "origin": captured.metadata["engine"],
            "sigma_hash": file_hash(sigma_path),
            "rotated_hash": file_hash(rotated_path) if "post_rope" in {t["placement"] for t in tables} else None,
            **captured.sample_facts,
            "layers": list(coded_layers(params)),
            "tables": tables,
        },
    )
