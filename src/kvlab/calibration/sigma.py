"""Sigma_q: the second moment of the queries that each KV head serves, and its Cholesky factor.

The attention score error of a key error e is q . e, so its mean square is e^T Sigma_q e. Coding K in
the frame K L, with L L^T = Sigma_q, makes the codec's plain squared error that quantity.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvlab.calibration.capture import Captured
from kvlab.calibration.facts import read_facts
from kvlab.codec.published import SigmaQ, read_sigma, write_sigma
from kvlab.codec.whitening import Whitener, fit
from kvlab.errors import CalibrationMismatch, StreamError
from kvlab.model import resolve
from kvlab.params import Params

SIDECAR = {"model_hash": str, "corpus_hash": str, "calibration_source": str, "num_layers": int}


def second_moment(q: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """Uncentred second moment of the queries of each KV head's group.

    Parameters
    ----------
    q : torch.Tensor, shape (windows, n_heads, tokens, head_dim)
        Pre-rotary queries; query head j belongs to KV head ``j // (n_heads / n_kv_heads)``.
    n_kv_heads : int
        Number of KV heads.

    Returns
    -------
    torch.Tensor of float64, shape (n_kv_heads, head_dim, head_dim)
        Mean over the group's heads and all tokens, symmetric.
    """
    windows, heads, tokens, dim = q.shape
    rows = q.double().reshape(windows, n_kv_heads, heads // n_kv_heads, tokens, dim)
    rows = rows.permute(1, 0, 2, 3, 4).reshape(n_kv_heads, -1, dim)
    sigma = rows.transpose(1, 2) @ rows / rows.shape[1]
    return (sigma + sigma.transpose(1, 2)) / 2


def fit_sigma(params: Params, capture_path: Path, out: Path) -> None:
    """Fit Sigma_q of every layer and KV head and write it in the published format of `codec.published`.

    The ``.json`` beside it holds the diagnostics of each head.
    """
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    moments, whiteners, diagnostics, n_tokens = {}, {}, [], 0
    for layer in range(info.n_layers):
        q = captured.layer(layer, "q")
        n_tokens = q.shape[0] * q.shape[2]
        moments[layer] = sigma = second_moment(q, info.n_kv_heads)
        whiteners[layer] = fit(sigma, params.calibration.ridge)
        diagnostics += [
            {"layer": layer, "kv_head": head} | describe(sigma[head], params.calibration.ridge)
            for head in range(info.n_kv_heads)
        ]
    identity = {name: captured.metadata[name] for name in ("model_hash", "corpus_hash", "engine")}
    sidecar = {
        "model_path": params.model.path,
        "head_dim": info.head_dim,
        "num_q_heads": info.n_heads,
        "num_kv_heads": info.n_kv_heads,
        "num_layers": info.n_layers,
        "layer_types": ["full_attention"] * info.n_layers,
        "calibration_split": "calib",
        "calibration_source": identity["engine"],
        "n_passages_used": q.shape[0],
        "ctx_len": q.shape[2],
        "n_tokens_pooled": n_tokens,
        "ridge": params.calibration.ridge,
        "model_hash": identity["model_hash"],
        "corpus_hash": identity["corpus_hash"],
        "diagnostics": diagnostics,
    }
    write_sigma(out, SigmaQ(moments, whiteners, sidecar), identity)


def describe(sigma: torch.Tensor, ridge: float) -> dict[str, float]:
    """Diagnostics of one head's Sigma_q, shape (head_dim, head_dim).

    `whitening_gain_db` is the ratio of the arithmetic to the geometric mean of the eigenvalues of the
    ridged matrix: what bit allocation over its eigenvectors could gain at most, were K white.
    """
    diagonal = sigma.diagonal()
    eigenvalues = torch.linalg.eigvalsh(sigma) + ridge * diagonal.mean()
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
        raise CalibrationMismatch(f"{path} was fitted on model {sidecar['model_hash']}, this model is {model_hash}")
    try:
        whiteners = read_sigma(path).whiteners
    except StreamError as error:
        raise CalibrationMismatch(f"{error}; run `kvlab sigma`") from None
    missing = sorted(set(range(sidecar["num_layers"])) - set(whiteners))
    if missing:
        raise CalibrationMismatch(f"{path} has no layer {missing[0]}; run `kvlab sigma`")
    return whiteners
