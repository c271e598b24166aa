"""Sigma_q: the second moment of the queries that each KV head serves, and its Cholesky factor.

The attention score error of a key error e is q . e, so its mean square is e^T Sigma_q e. Coding K in
the frame K L, with L L^T = Sigma_q, makes the codec's plain squared error that quantity.

There are two of it. K that is coded before its rotary embedding is weighed by the queries as they are
projected, K that is coded after it by the queries rotated at their own positions in the window.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvlab.calibration.capture import Captured, WindowStatistics
from kvlab.calibration.facts import read_facts
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.moments import PLACEMENTS, grouped
from kvlab.codecs.shared.metric import ridged, rotated
from kvlab.codecs.shared.whitening import Whitener, fit
from kvlab.codecs.stream.published import SigmaQ, read_sigma, write_sigma
from kvlab.core.errors import CalibrationMismatch, StreamError
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.recipe import Placement
from kvlab.core.records import file_hash, write_json

SIDECAR = {"model_hash": str, "corpus_hash": str, "calibration_source": str, "num_layers": int}


def second_moment(q: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """Uncentred second moment of the queries of each KV head's group, of windows that are all there.

    Parameters
    ----------
    q : torch.Tensor, shape (windows, n_heads, tokens, head_dim)
        Queries; query head j belongs to KV head ``j // (n_heads / n_kv_heads)``.
    n_kv_heads : int
        Number of KV heads.

    Returns
    -------
    torch.Tensor of float64, shape (n_kv_heads, head_dim, head_dim)
        Mean over the group's heads and all tokens, symmetric.
    """
    rows = grouped(q.transpose(0, 1).flatten(1, 2), n_kv_heads)
    sigma = rows.mT @ rows / rows.shape[1]
    return (sigma + sigma.mT) / 2


def round_trip_errors(k: torch.Tensor, whitener: Whitener) -> torch.Tensor:
    """What whitening and its inverse leave of K in float32: ||K L L^-1 - K|| / ||K|| of each head [n_kv_heads].

    `k` is float32 [windows, n_kv_heads, tokens, head_dim], at the whitener's placement.
    """
    rows = k.transpose(0, 1).flatten(1, 2).contiguous()
    error = whitener.unwhiten(whitener.whiten(rows)).double() - rows.double()
    return error.flatten(1).norm(dim=1) / rows.double().flatten(1).norm(dim=1).clamp_min(1e-30)


def fit_sigma(params: Params, capture_path: Path, out: Path) -> None:
    """Fit Sigma_q of every layer and KV head and write it in the published format of `codecs.stream.published`.

    `out` holds that of the queries before their rotary embedding, `rotated_path` of it that of the
    same queries after it. The ``.json`` beside each holds the diagnostics of each head and the `file_hash` of
    its file; that of the rotated queries names by its `sigma_hash` the Sigma_q that it was written with.
    """
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    moments = second_moments(captured, info.n_layers)
    write_fitted(params, captured, info, "pre_rope", moments["pre_rope"], Path(out))
    of_sigma = {"sigma_hash": file_hash(out)}
    write_fitted(params, captured, info, "post_rope", moments["post_rope"], rotated_path(out), of_sigma)


def rotated_path(path: Path) -> Path:
    """Where `fit_sigma` puts the Sigma_q of rotated queries: beside `path`, its stem ending in ``-post_rope``."""
    path = Path(path)
    return path.with_name(f"{path.stem}-post_rope{path.suffix}")


def second_moments(observed: WindowStatistics, n_layers: int) -> dict[Placement, dict[int, torch.Tensor]]:
    """Sigma_q by placement and layer; after the rotary embedding a query turns by its place in its window."""
    queries = {layer: observed.queries(layer) for layer in range(n_layers)}
    return {at: {layer: found.second_moment(at) for layer, found in queries.items()} for at in PLACEMENTS}


def diagnose(
    captured: Captured, info: ModelInfo, placement: Placement, moments: dict, whiteners: dict, ridge: float
) -> list[dict]:
    """`describe` of each head, with its `round_trip_error` on the sampled contexts and its `window_traces`.

    `window_traces` are the traces of the second moment of each window alone, whose mean is that of all.
    """
    angles = ErrorMetrics(info, captured.context).angles
    found = []
    for layer, sigma in moments.items():
        k = captured.layer(layer, "k")
        errors = round_trip_errors(rotated(k, *angles[layer]) if placement == "post_rope" else k, whiteners[layer])
        traces = captured.queries(layer).traces
        for head in range(info.n_kv_heads):
            own = {"round_trip_error": float(errors[head]), "window_traces": traces[:, head].tolist()}
            found.append({"layer": layer, "kv_head": head} | describe(sigma[head], ridge) | own)
    return found


def write_fitted(
    params: Params,
    captured: Captured,
    info: ModelInfo,
    placement: Placement,
    moments: dict,
    path: Path,
    named: dict[str, str] | None = None,
) -> None:
    """Whiteners of one placement's second moments, and both with their diagnostics into one file.

    `named` is what the sidecar says besides.
    """
    ridge = params.calibration.ridge
    whiteners = {layer: fit(sigma, ridge) for layer, sigma in moments.items()}
    extent, identity = captured.extent, captured.identity
    sidecar = {
        "model_path": params.model.path,
        "head_dim": info.head_dim,
        "num_q_heads": info.n_heads,
        "num_kv_heads": info.n_kv_heads,
        "num_layers": info.n_layers,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in info.windows],
        "calibration_split": "calib",
        "calibration_source": identity["engine"],
        "placement": placement,
        "n_passages_used": extent.windows,
        "ctx_len": extent.tokens,
        "n_tokens_pooled": extent.windows * extent.tokens,
        "ridge": ridge,
        "model_hash": identity["model_hash"],
        "corpus_hash": identity["corpus_hash"],
        **captured.sample_facts,
        "diagnostics": diagnose(captured, info, placement, moments, whiteners, ridge),
    } | (named or {})
    write_sigma(path, SigmaQ(moments, whiteners, sidecar), identity)
    write_json(path.with_suffix(".json"), sidecar | {"file_hash": file_hash(path)})  # known once it is written


def describe(sigma: torch.Tensor, ridge: float) -> dict[str, float]:
    """Diagnostics of one head's Sigma_q, shape (head_dim, head_dim).

    `whitening_gain_db` is the ratio of the arithmetic to the geometric mean of the eigenvalues of the
    ridged matrix: what bit allocation over its eigenvectors could gain at most, were K white.
    """
    diagonal = sigma.diagonal()
    eigenvalues = torch.linalg.eigvalsh(ridged(sigma, ridge))
    off_diagonal = sigma - torch.diag(diagonal)
    return {
        "sigma_trace": float(diagonal.sum()),
        "eig_min": float(eigenvalues[0]),
        "eig_max": float(eigenvalues[-1]),
        "condition": float(eigenvalues[-1] / eigenvalues[0].clamp_min(1e-30)),
        "diag_mean": float(diagonal.mean()),
        "off_diag_max_abs": float(off_diagonal.abs().max()),
        "whitening_gain_db": float(10 * (eigenvalues.mean().log10() - eigenvalues.clamp_min(1e-30).log10().mean())),
    }


def read_sidecar(path: Path) -> dict:
    """What lies beside a Sigma_q file and says whose it is; `CalibrationMismatch` for another JSON."""
    return read_facts(Path(path).with_suffix(".json"), SIDECAR, "sigma")


def load_whiteners(path: Path, model_hash: str) -> dict[int, Whitener]:
    """Layer -> Whitener, from what `fit_sigma` wrote.

    Raises
    ------
    CalibrationMismatch
        The file belongs to another model, cannot be read, lacks a layer, or holds a factor and an inverse
        that do not belong together.
    """
    sidecar = read_sidecar(path)
    if sidecar["model_hash"] != model_hash:
        raise CalibrationMismatch(
            f"{path} was fitted on model {sidecar['model_hash']}, this model is {model_hash}",
            code="calibration.other-model",
        )
    try:
        whiteners = read_sigma(path).whiteners
    except StreamError as error:
        raise CalibrationMismatch(f"{error}; run `kvlab step sigma`", code="calibration.damaged") from None
    missing = sorted(set(range(sidecar["num_layers"])) - set(whiteners))
    if missing:
        raise CalibrationMismatch(
            f"{path} has no layer {missing[0]}; run `kvlab step sigma`", code="calibration.incomplete"
        )
    return whiteners
