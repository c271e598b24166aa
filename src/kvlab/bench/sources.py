"""What the bench codes: tensors with a calibration and a scored part, and the metric their errors are weighed by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.calibration.capture import Captured
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.sigma import second_moment
from kvlab.codec.seeding import generator
from kvlab.errors import StorageError, UserError
from kvlab.model import ModelInfo

LAYER_OF = re.compile(r"L(\d+)")
AUTOREGRESSION, FREEDOM = 0.9, 4.0  # of the planted factors: AR(1) coefficient, Student's degrees of freedom


@dataclass(frozen=True)
class Sample:
    """One layer's K or V, bfloat16 as a cache holds it.

    Parameters
    ----------
    layer : int
    stream : {"k", "v"}
    calib, scored : Tensor
        bfloat16 [windows, heads, tokens, head_dim]; no window is in both.
    calib_weight, weight : Tensor or None
        What squared errors are weighed by, float64 [heads, head_dim, head_dim], from the calibration and
        from the scored part; None weighs all alike.
    sigma : Tensor or None
        Sigma_q of the calibration part, by which K may be whitened; `calib_weight` where it is None.
    whole : Tensor or None
        What the numbers of others were measured on, [heads, tokens, head_dim]; None when there are none.
    """

    layer: int
    stream: Literal["k", "v"]
    calib: Tensor
    scored: Tensor
    calib_weight: Tensor | None = None
    weight: Tensor | None = None
    sigma: Tensor | None = None
    whole: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """Samples of one origin; `about` says in a sentence what they are."""

    name: str
    about: str
    samples: tuple[Sample, ...]

    def first(self, stream: str) -> Sample:
        """The first sample of a stream: what codecs are timed on."""
        return next(sample for sample in self.samples if sample.stream == stream)


def halves(windows: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of the windows to calibrate on, the rest to score."""
    if len(windows) < 2:
        raise UserError(f"{len(windows)} window cannot be split into calibration and scoring; give at least two")
    middle = len(windows) // 2
    return windows[:middle], windows[middle:]


# ---------------------------------------------------------------------------------- reference model


def captured(path: Path, info: ModelInfo) -> Source:
    """K and V of the reference model: the first half of the captured windows calibrates, the other is scored.

    Errors are weighed by what they do in the model: K by Sigma_q over the lags, V by its output projection.
    """
    capture = Captured(path, info.model_hash)
    metrics = ErrorMetrics(info, capture.context)
    samples = []
    for layer in range(capture.n_layers):
        sigma, scored_sigma = (second_moment(q, info.n_kv_heads) for q in halves(capture.layer(layer, "q")))
        outputs = metrics.v(layer)
        weights = {
            "k": {"calib_weight": metrics.k(sigma), "weight": metrics.k(scored_sigma), "sigma": sigma},
            "v": {"calib_weight": outputs, "weight": outputs},
        }
        for stream in ("k", "v"):
            x = capture.layer(layer, stream)[:, :, : capture.context].bfloat16()
            samples.append(Sample(layer, stream, *halves(x), **weights[stream]))
    return Source("capture", "K and V of the reference model on text", tuple(samples))


# ------------------------------------------------------------------------------------------ planted


def planted(heads: int = 2, tokens: int = 1024, head_dim: int = 128) -> Source:
    """Two windows of K and of V with known statistics, and a planted Sigma_q; nothing is read."""
    weight = planted_weight(heads, head_dim)
    about = "made in code: correlated heavy-tailed factors, full-rank noise and outlier channels; planted Sigma_q"
    return Source("planted", about, planted_samples({0: weight}, tokens))


def planted_with(path: Path, layers: int = 3, tokens: int = 1024) -> Source:
    """The planted K and V under the real Sigma_q of a published safetensors file, some layers of it.

    Raises
    ------
    StorageError
        When the file cannot be read or holds no ``layer_<l>_sigma``.
    """
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith("_sigma")]  # noqa: SIM118 (no mapping)
            numbers = sorted(int(name.split("_")[1]) for name in names)
            chosen = [numbers[(2 * i + 1) * len(numbers) // (2 * layers)] for i in range(layers)] if numbers else []
            weights = {layer: file.get_tensor(f"layer_{layer}_sigma").double() for layer in chosen}
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read Sigma_q {path}: {error}") from None
    if not weights:
        raise StorageError(f"{path} holds no layer_<l>_sigma; give a Sigma_q file")
    return Source("real-sigma", "the planted streams under a real model's Sigma_q", planted_samples(weights, tokens))


def planted_samples(weights: dict[int, Tensor], tokens: int) -> tuple[Sample, ...]:
    """One K and one V for every Sigma_q, of its heads and dimensions; two windows each."""
    samples = []
    for layer, weight in weights.items():
        shape = (2, weight.shape[0], tokens, weight.shape[-1])
        samples.append(Sample(layer, "k", *halves(planted_keys(shape, layer)), weight, weight))
        samples.append(Sample(layer, "v", *halves(planted_values(shape, layer))))
    return tuple(samples)


def planted_keys(shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """Mean, low-rank AR(1) Student-t factors, full-rank noise and a few outlier channels; bfloat16.

    The two windows are consecutive stretches of one series.
    """
    windows, heads, tokens, size = shape
    source = generator("planted keys", seed, *shape)
    rank = max(1, size // 8)
    innovations = student(heads, windows * tokens, rank, source)
    factors = torch.empty_like(innovations)
    state = student(heads, 1, rank, source)[:, 0]
    for t in range(windows * tokens):
        state = AUTOREGRESSION * state + (1 - AUTOREGRESSION**2) ** 0.5 * innovations[:, t]
        factors[:, t] = state
    loadings = torch.randn(heads, rank, size, generator=source) * torch.logspace(0.5, -0.5, rank)[:, None]
    noise = torch.randn(heads, windows * tokens, size, generator=source) * torch.logspace(0, -0.7, size)
    scale = torch.ones(size)
    scale[torch.randperm(size, generator=source)[: max(1, size // 32)]] = 6.0
    mean = 2 * torch.randn(heads, 1, size, generator=source)
    series = (mean + factors @ loadings / rank**0.5 + noise) * scale
    return series.unflatten(1, (windows, tokens)).transpose(0, 1).contiguous().bfloat16()


def planted_values(shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """Gaussian rows with a decaying spectrum, turned at random; bfloat16."""
    _, heads, _, size = shape
    source = generator("planted values", seed, *shape)
    turn = torch.linalg.qr(torch.randn(heads, size, size, generator=source)).Q
    return ((torch.randn(shape, generator=source) * torch.logspace(0, -1, size)) @ turn).bfloat16()


def planted_weight(heads: int, size: int) -> Tensor:
    """A badly conditioned Sigma_q, float64 [heads, size, size]."""
    source = generator("planted weight", heads, size)
    turn = torch.linalg.qr(torch.randn(heads, size, size, generator=source, dtype=torch.float64)).Q
    return (turn * torch.logspace(1, -2.5, size, dtype=torch.float64)) @ turn.mT


def student(heads: int, count: int, size: int, source: torch.Generator) -> Tensor:
    """Student-t values of unit variance [heads, count, size]."""
    normal = torch.randn(heads, count, size, generator=source)
    chi = torch.randn(heads, count, size, int(FREEDOM), generator=source).square().sum(-1)
    return normal * ((FREEDOM - 2) / chi).sqrt()


# ------------------------------------------------------------------------------------ given tensors


def given(folder: Path) -> Source:
    """``K*_L<l>.npy`` and ``V*_L<l>.npy`` [tokens, heads, head_dim] under ``sigma*_L<l>[_L<m>...].npy``.

    The first half of the tokens calibrates, the second is scored. A file of Sigma_q is [heads, n, n], or
    [layers, heads, n, n] with the layers in its name.

    Raises
    ------
    StorageError
        When the folder holds no K or V, or a K without Sigma_q.
    """
    weights = dict(pair for path in sorted(Path(folder).glob("sigma*.npy")) for pair in weights_in(path))
    samples = []
    for path in sorted(Path(folder).glob("[KV]*_L*.npy")):
        layer, stream = int(LAYER_OF.findall(path.stem)[0]), path.name[0].lower()
        if stream == "k" and layer not in weights:
            raise StorageError(f"{path.name} has no Sigma_q; put a sigma_q_L{layer:02d}.npy beside it")
        weight = weights[layer] if stream == "k" else None
        whole = torch.from_numpy(np.load(path)).transpose(0, 1).contiguous().bfloat16()
        parts = halves(torch.stack(whole.split(whole.shape[1] // 2, dim=1)[:2]).contiguous())
        samples.append(Sample(layer, stream, *parts, weight, weight, whole=whole))
    if {sample.stream for sample in samples} != {"k", "v"}:
        raise StorageError(f"{folder} holds no K_L<l>.npy and V_L<l>.npy to bench")
    return Source(
        "given", "tensors given in a folder: first half of the tokens calibrates, second is scored", tuple(samples)
    )


def weights_in(path: Path) -> Iterable[tuple[int, Tensor]]:
    """(layer, Sigma_q float64 [heads, n, n]) of one file."""
    layers, array = [int(number) for number in LAYER_OF.findall(path.stem)], torch.from_numpy(np.load(path)).double()
    return zip(layers, array if array.ndim == 4 else array[None], strict=True)
