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
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import StorageError, UserError
from kvlab.core.model import ModelInfo

LAYER_OF = re.compile(r"L(\d+)")
AUTOREGRESSION, FREEDOM = 0.9, 4.0  # of the planted factors: AR(1) coefficient, Student's degrees of freedom


@dataclass(frozen=True)
class StreamSample:
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
    """Samples of one origin.

    Parameters
    ----------
    name : str
    about, metric : str
        What the samples are, and what their errors are weighed by: each words of a sentence.
    samples : tuple of Sample
    """

    name: str
    about: str
    metric: str
    samples: tuple[StreamSample, ...]


def halves(windows: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of the windows to calibrate on, the rest to score."""
    if len(windows) < 2:
        raise UserError(f"{len(windows)} window cannot be split into calibration and scoring; give at least two")
    middle = len(windows) // 2
    return windows[:middle], windows[middle:]


# ---------------------------------------------------------------------------------- the model


def captured(path: Path, info: ModelInfo) -> Source:
    """K and V of the model: the first half of the calibration windows calibrates, the other is scored.

    K and V are those of the windows that the capture keeps. Errors are weighed by what they do in the model: K by
    Sigma_q over the lags, of all windows of that half, V by its output projection.

    Raises
    ------
    UserError
        The capture keeps no window of one of the halves.
    """
    capture = Captured(path, info.model_hash)
    metrics = ErrorMetrics(info, capture.context)
    middle = sum(capture.extent.half(window) == 0 for window in capture.sampled)
    if not 0 < middle < len(capture.sampled):
        raise UserError(f"{path} keeps windows {list(capture.sampled)}, all of one half; raise calibration.sample")
    samples = []
    for layer in range(capture.n_layers):
        sigma, scored_sigma = (capture.queries(layer).second_moment("pre_rope", half) for half in (0, 1))
        outputs = metrics.v(layer)
        weights = {
            "k": {"calib_weight": metrics.k(layer, sigma), "weight": metrics.k(layer, scored_sigma), "sigma": sigma},
            "v": {"calib_weight": outputs, "weight": outputs},
        }
        for stream in ("k", "v"):
            x = capture.layer(layer, stream).bfloat16()
            samples.append(StreamSample(layer, stream, x[:middle], x[middle:], **weights[stream]))
    metric = (
        "errors of K are weighed by Σ_q of the scored windows turned by every lag of the context, a lag weighing "
        "1 / (1 + lag), those of V by the layer's output projection, W_oᵀ W_o"
    )
    return Source("capture", f"K and V of {info.slug} on text", metric, tuple(samples))


# ------------------------------------------------------------------------------------------ planted


def planted(heads: int = 2, tokens: int = 1024, head_dim: int = 128) -> Source:
    """Two windows of K and of V with known statistics, and a planted Sigma_q; nothing is read."""
    weight = planted_weight(heads, head_dim)
    about = "made in code: correlated heavy-tailed factors, full-rank noise and outlier channels; planted Sigma_q"
    metric = "errors of K are weighed by the planted Σ_q, those of V are plain"
    return Source("planted", about, metric, planted_samples({0: weight}, tokens))


def planted_with(path: Path, layers: int = 3, tokens: int = 1024) -> Source:
    """The planted K and V under the real Sigma_q of a published safetensors file, some layers of it."""
    weights = published_weights(path, layers)
    numbers = ", ".join(map(str, weights))
    metric = f"errors of K are weighed by the published Σ_q of layers {numbers}, those of V are plain"
    about = "the planted streams under a real model's Σ_q"
    return Source("real-sigma", about, metric, planted_samples(weights, tokens))


def published_weights(path: Path, layers: int = 3) -> dict[int, Tensor]:
    """Sigma_q of some layers of a file, float64 [heads, head_dim, head_dim] by layer.

    Raises
    ------
    StorageError
        When the file cannot be read, or holds no ``layer_<l>_sigma`` of that shape.
    """
    try:
        with safe_open(path, "pt") as file:
            found = (re.fullmatch(r"layer_(\d+)_sigma", name) for name in file.keys())  # noqa: SIM118 (no mapping)
            numbers = sorted(int(match[1]) for match in found if match)
            chosen = [numbers[(2 * i + 1) * len(numbers) // (2 * layers)] for i in range(layers)] if numbers else []
            weights = {layer: file.get_tensor(f"layer_{layer}_sigma").double() for layer in chosen}
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read Sigma_q {path}: {error}", code="storage.unreadable") from None
    if not weights:
        raise StorageError(f"{path} holds no layer_<l>_sigma; give a Sigma_q file", code="storage.no-sigma")
    for layer, weight in weights.items():
        check_sigma(weight, f"layer_{layer}_sigma of {path}")
    return weights


def planted_samples(weights: dict[int, Tensor], tokens: int) -> tuple[StreamSample, ...]:
    """One K and one V for every Sigma_q, of its heads and dimensions; two windows each."""
    samples = []
    for layer, weight in weights.items():
        shape = (2, weight.shape[0], tokens, weight.shape[-1])
        samples.append(StreamSample(layer, "k", *halves(planted_keys(shape, layer)), weight, weight))
        samples.append(StreamSample(layer, "v", *halves(planted_values(shape, layer))))
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
        When the folder holds no K or V, or a K without Sigma_q of its shape, or a file is not such an array.
    """
    weights = dict(pair for path in sorted(Path(folder).glob("sigma*.npy")) for pair in weights_in(path))
    samples: dict[tuple[str, int], StreamSample] = {}
    for path in sorted(Path(folder).glob("[KV]*_L*.npy")):
        sample = sample_in(path, weights)
        if (sample.stream, sample.layer) in samples:
            raise StorageError(
                f"{path} is layer {sample.layer} of {sample.stream.upper()} a second time; keep one",
                code="storage.layer-twice",
            )
        samples[sample.stream, sample.layer] = sample
    if {stream for stream, _ in samples} != {"k", "v"}:
        raise StorageError(f"{folder} holds no K_L<l>.npy and V_L<l>.npy to bench", code="storage.no-tensors")
    about = "tensors given in a folder: the first half of the tokens calibrates, the second is scored"
    metric = "errors of K are weighed by the given Σ_q, those of V are plain"
    return Source("given", about, metric, tuple(samples.values()))


def sample_in(path: Path, weights: dict[int, Tensor]) -> StreamSample:
    """One layer's K or V, from the file of one tensor."""
    (layer,), array = layers_in(path, 1), array_in(path)
    if array.ndim != 3 or array.shape[0] < 4 or not array.size:
        raise StorageError(
            f"{path} has shape {array.shape}; expected [tokens, heads, head_dim], four tokens or more",
            code="storage.shape",
        )
    stream = path.name[0].lower()
    if stream == "k" and layer not in weights:
        raise StorageError(
            f"{path.name} has no Sigma_q; put a sigma_q_L{layer:02d}.npy beside it", code="storage.no-sigma"
        )
    weight = weights[layer] if stream == "k" else None
    if weight is not None and weight.shape != (array.shape[1], array.shape[2], array.shape[2]):
        raise StorageError(
            f"{path} has shape {array.shape}, its Sigma_q {tuple(weight.shape)}; these do not fit",
            code="storage.sigma-misfit",
        )
    whole = torch.from_numpy(array).transpose(0, 1).contiguous().bfloat16()
    parts = halves(torch.stack(whole.split(whole.shape[1] // 2, dim=1)[:2]).contiguous())
    return StreamSample(layer, stream, *parts, weight, weight, whole=whole)


def weights_in(path: Path) -> Iterable[tuple[int, Tensor]]:
    """(layer, Sigma_q float64 [heads, n, n]) of one file."""
    array = torch.from_numpy(array_in(path)).double()
    stacked = array if array.ndim == 4 else array[None]
    for layer, weight in zip(layers_in(path, len(stacked)), stacked, strict=True):
        check_sigma(weight, f"layer {layer} of {path}")
        yield layer, weight


def layers_in(path: Path, count: int) -> list[int]:
    """The layers in a file's name, as many as it holds."""
    layers = [int(number) for number in LAYER_OF.findall(path.stem)]
    if len(layers) != count:
        raise StorageError(
            f"{path} names {len(layers)} layers and holds {count}; write _L<l> for each into its name",
            code="storage.layer-names",
        )
    return layers


def array_in(path: Path) -> np.ndarray:
    """A float array without NaN and infinity."""
    try:
        array = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise StorageError(f"cannot read {path} as .npy: {error}", code="storage.unreadable") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise StorageError(
            f"{path} holds {getattr(array, 'dtype', type(array).__name__)}; expected a float array",
            code="storage.dtype",
        )
    if not np.isfinite(array).all():
        raise StorageError(f"{path} holds NaN or infinity", code="storage.not-finite")
    return array


def check_sigma(weight: Tensor, origin: str) -> None:
    """`StorageError` unless this may be a Sigma_q: [heads, n, n], finite."""
    if weight.ndim != 3 or weight.shape[1] != weight.shape[2] or not weight.isfinite().all():
        raise StorageError(
            f"{origin} is no Sigma_q: shape {tuple(weight.shape)}, expected finite [heads, n, n]",
            code="storage.sigma-shape",
        )
