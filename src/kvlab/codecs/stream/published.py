"""The file formats of the published study: tensors, codebooks, and Sigma_q with its sidecar.

    KKTV   u32 magic 0x4B4B5456, u32 version 1, u64 rows, u32 dim, u32 0, then float32 [rows, dim]
    .f32   2**bits ascending float32 and nothing else
    Sigma  safetensors, float32 [kv_heads, head_dim, head_dim]: layer_{l}_chol, layer_{l}_inv_chol (of the
           ridged second moment) and layer_{l}_sigma (without the ridge); a .json of the same stem beside it

All numbers are little-endian.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import StorageError, StreamError
from kvlab.core.records import atomic, forget, read_json, to_header, write_json

KKTV = struct.Struct("<IIQII")
KKTV_MAGIC, KKTV_VERSION = 0x4B4B5456, 1
INVERSE_TOLERANCE = 1e-3  # of max |L L^-1 - I| over rows of unit length; a wrong pair is off by 1


def write_kktv(path: Path, rows: Tensor) -> None:
    """Write rows [n, dim] of any float dtype as float32."""
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise StorageError(f"a KKTV file holds rows [n, dim]; given is {list(rows.shape)}")
    values = rows.detach().float().cpu().numpy().astype("<f4")
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(KKTV.pack(KKTV_MAGIC, KKTV_VERSION, *rows.shape, 0))
        values.tofile(file)


def read_kktv(path: Path) -> Tensor:
    """Rows float32 [n, dim] of a KKTV file.

    Raises
    ------
    StreamError
        When the file is not a KKTV file of version 1, or is not exactly as long as its header says.
    """
    with open(path, "rb") as file:
        head = file.read(KKTV.size)
        if len(head) < KKTV.size:
            raise StreamError(f"{path} is no KKTV file: {len(head)} bytes where its header takes {KKTV.size}")
        magic, version, rows, dim, _ = KKTV.unpack(head)
        if (magic, version) != (KKTV_MAGIC, KKTV_VERSION):
            raise StreamError(f"{path} is no KKTV file of version {KKTV_VERSION}: magic {magic:#x}, version {version}")
        expected, size = KKTV.size + 4 * rows * dim, os.fstat(file.fileno()).st_size
        if size != expected or dim == 0:
            raise StreamError(
                f"{path} has {size} bytes where {rows} rows of {dim} numbers take {expected}", code="stream.length"
            )
        return torch.from_numpy(np.fromfile(file, dtype="<f4").reshape(rows, dim))


def write_centroids(path: Path, table: Tensor) -> None:
    """Write a Lloyd-Max table of 2**bits ascending numbers."""
    values = table.detach().float().cpu().numpy().astype("<f4")
    _check_table(values, path)
    with atomic(path) as temporary:
        values.tofile(temporary)


def read_centroids(path: Path) -> Tensor:
    """A Lloyd-Max table, float32 [2**bits].

    Raises
    ------
    StreamError
        When the file is not 2, 4, ..., 256 ascending finite float32.
    """
    size = Path(path).stat().st_size
    if size % 4:
        raise StreamError(f"{path} has {size} bytes, which is no whole number of float32")
    values = np.fromfile(path, dtype="<f4")
    _check_table(values, path)
    return torch.from_numpy(values.astype(np.float32))


def _check_table(values: np.ndarray, path: Path) -> None:
    powers = [2**bits for bits in range(1, 9)]
    if values.size not in powers:
        raise StreamError(f"{path} holds {values.size} numbers; a table of 1..8 bits has {', '.join(map(str, powers))}")
    if not np.isfinite(values).all() or not (np.diff(values) >= 0).all():
        raise StreamError(f"{path}: the numbers of a table must be finite and must not descend")


@dataclass(frozen=True)
class SigmaQ:
    """Second moments of the queries by layer, and their whiteners.

    Parameters
    ----------
    sigma : dict of int to Tensor
        Without the ridge, float32 [kv_heads, head_dim, head_dim].
    whiteners : dict of int to Whitener
        Of the ridged matrix.
    sidecar : dict
        The ``.json`` beside the file; empty when there is none.
    """

    sigma: dict[int, Tensor]
    whiteners: dict[int, Whitener]
    sidecar: dict


def write_sigma(path: Path, sigma_q: SigmaQ, identity: dict) -> None:
    """Write the safetensors file, with `identity` in its header, and then its sidecar."""
    path, tensors = Path(path), {}
    for layer, whitener in sorted(sigma_q.whiteners.items()):
        tensors[f"layer_{layer}_chol"] = whitener.chol.contiguous()
        tensors[f"layer_{layer}_inv_chol"] = whitener.inv_chol.contiguous()
        tensors[f"layer_{layer}_sigma"] = sigma_q.sigma[layer].float().contiguous()
    forget(path)
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata=to_header(identity))
    write_json(path.with_suffix(".json"), sigma_q.sidecar)


def read_sigma(path: Path) -> SigmaQ:
    """Read a Sigma_q file, this project's or a published one.

    Raises
    ------
    StreamError
        When the file cannot be read, a layer is not complete, the shapes differ, or a factor and its
        inverse do not belong together.
    """
    path = Path(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StreamError(f"cannot read Sigma_q {path}: {error}") from None
    layers = sorted({int(match[1]) for name in tensors if (match := re.fullmatch(r"layer_(\d+)_\w+", name))})
    if not layers:
        raise StreamError(f"{path} holds no Sigma_q: no tensor is named layer_<l>_chol")
    sigma, whiteners = {}, {}
    for layer in layers:
        names = [f"layer_{layer}_{part}" for part in ("chol", "inv_chol", "sigma")]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise StreamError(f"{path} has no {missing[0]}", code="stream.incomplete")
        chol, inverse, sigma[layer] = (tensors[name].float() for name in names)
        _check_factor(chol, inverse, sigma[layer], f"{path}, layer {layer}")
        whiteners[layer] = Whitener(chol, inverse)
    beside = path.with_suffix(".json")
    return SigmaQ(sigma, whiteners, read_json(beside) if beside.exists() else {})


def _check_factor(chol: Tensor, inverse: Tensor, sigma: Tensor, where: str) -> None:
    if chol.ndim != 3 or chol.shape[1] != chol.shape[2] or not chol.shape == inverse.shape == sigma.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (chol, inverse, sigma))
        raise StreamError(f"{where}: chol, inv_chol and sigma have shapes {shapes}; all must be [heads, dim, dim]")
    unit = torch.eye(chol.shape[-1], dtype=torch.float64)
    # in units of the channels, whose second moments may be of very different size: L L^-1 is rounded in theirs
    scale = chol.double().norm(dim=-1)
    off = (chol.double() / scale[..., None] @ (inverse.double() * scale[..., None, :]) - unit).abs().max().item()
    if not off < INVERSE_TOLERANCE or chol.triu(1).any():
        raise StreamError(
            f"{where}: chol is not lower triangular, or inv_chol is not its inverse (off by {off:.1e})",
            code="stream.not-inverse",
        )
