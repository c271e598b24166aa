"""Pre-rotary Q, K and V of the calibration windows, as an engine computes them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from kvlab import corpus
from kvlab.calibration.facts import header_facts
from kvlab.engines.base import Part
from kvlab.engines.registry import start
from kvlab.errors import CalibrationMismatch, NonFinite
from kvlab.model import resolve
from kvlab.params import Params
from kvlab.records import atomic, to_header, versions

PARTS = ("q", "k", "v")
FACTS = {"engine": str, "model_hash": str, "corpus_hash": str, "context": int}
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


def capture(params: Params, engine: str, windows_path: Path, out: Path) -> None:
    """Run the calibration windows through one engine and keep what passes the tap.

    Writes ``layer_{l}_{q,k,v}`` of shape (windows, heads, tokens, head_dim) in ``calibration.dtype``.
    The test windows are not read.

    Raises
    ------
    NonFinite
        A captured tensor holds NaN or infinity.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    running = start(engine, info, params.calibration.dtype, max_tokens=windows.calib.shape[1])
    kept: dict[str, list[torch.Tensor]] = {}
    for ids in tqdm(windows.calib.tolist(), desc=f"capture {engine}", unit="window"):
        running.score(ids, len(ids) - 2, _keep_into(kept))
    tensors = {name: torch.stack(parts) for name, parts in kept.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise NonFinite(f"captured {name} of {engine} holds NaN or infinity")
    metadata = {
        "engine": engine,
        "model_hash": info.model_hash,
        "corpus_hash": windows.corpus_hash,
        "context": windows.context,
        "device": running.device,
        "versions": versions(),
    }
    with atomic(out) as temporary:
        save_file(tensors, temporary, metadata=to_header(metadata))
    running.close()


def _keep_into(kept: dict[str, list[torch.Tensor]]):
    def tap(layer: int, part: Part, x: torch.Tensor) -> None:
        kept.setdefault(f"layer_{layer}_{part}", []).append(x.detach().to("cpu", copy=True).contiguous())

    return tap


class Captured:
    """A capture on disk, read one layer at a time.

    Parameters
    ----------
    path : Path
        What `capture` wrote.
    model_hash : str
        Hash of the model it must have been captured from.

    Raises
    ------
    CalibrationMismatch
        The file cannot be read, is no capture, or of another model.
    """

    def __init__(self, path: Path, model_hash: str):
        self.path = Path(path)
        try:
            with safe_open(self.path, "pt") as file:
                metadata, self._names = file.metadata(), set(file.keys())
        except (OSError, SafetensorError) as error:
            raise CalibrationMismatch(f"cannot read capture {path}: {error}; run `kvlab capture`") from None
        self.metadata = header_facts(metadata, self.path, FACTS, "capture")
        if not self._names or self._names != {f"layer_{n}_{part}" for n in range(self.n_layers) for part in PARTS}:
            raise CalibrationMismatch(f"{path} does not hold Q, K and V of every layer; run `kvlab capture`")
        if self.metadata["model_hash"] != model_hash:
            raise CalibrationMismatch(
                f"{path} was captured from model {self.metadata['model_hash']}, this model is {model_hash}"
            )

    @property
    def context(self) -> int:
        """Tokens of a window whose K and V a codec would see."""
        return self.metadata["context"]

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``: what the captured model ran in."""
        with safe_open(self.path, "pt") as file:
            return SAFETENSORS_DTYPES[file.get_slice("layer_0_k").get_dtype()]

    @property
    def n_layers(self) -> int:
        """Layers that were captured."""
        return sum(name.endswith("_q") for name in self._names)

    @property
    def n_windows(self) -> int:
        """Windows that were captured."""
        with safe_open(self.path, "pt") as file:
            return file.get_slice("layer_0_k").get_shape()[0]

    def window(self, layer: int, part: Part, window: int) -> torch.Tensor:
        """One window of one layer as it was captured, shape (heads, tokens, head_dim); no other is read."""
        with safe_open(self.path, "pt") as file:
            return file.get_slice(f"layer_{layer}_{part}")[window]

    def layer(self, layer: int, part: Part) -> torch.Tensor:
        """One layer's tensor, float32, shape (windows, heads, tokens, head_dim)."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(f"layer_{layer}_{part}").float()
