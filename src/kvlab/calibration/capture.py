"""What an engine computes on the calibration windows: moments of pre-rotary Q, K and V, a sample of K and V, losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from kvlab.calibration import across as layers_together
from kvlab.calibration import losses
from kvlab.calibration import moments as kept
from kvlab.calibration.across import AcrossTap, StoredAcross
from kvlab.calibration.asked import read_asked
from kvlab.calibration.facts import header_facts
from kvlab.calibration.joint import JointTap, OutputsTap, RowsTap
from kvlab.calibration.metrics import Angles, ErrorMetrics
from kvlab.calibration.moments import STREAMS, Extent, ModelMoments, QueryMoments
from kvlab.codecs.shared.moments import Moments
from kvlab.core import memory
from kvlab.core.errors import CalibrationMismatch, UserError
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.records import atomic, to_header, versions
from kvlab.engines.base import Engine, Part
from kvlab.engines.registry import start
from kvlab.text import corpus

Beside = AcrossTap | JointTap | RowsTap | OutputsTap
SAMPLE_DTYPE = "bfloat16"
FACTS = {
    "engine": str,
    "model_hash": str,
    "corpus_hash": str,
    "context": int,
    "windows": int,
    "tokens": int,
    "dtype": str,
    "sample": list,
    "sample_dtype": str,
    "sample_bytes": int,
    "across": bool,
}


class WindowStatistics:
    """What is left of the calibration windows: the moments of all, K and V of a sample of them, losses on a few.

    Parameters
    ----------
    metadata : dict
        `FACTS`, and what else there is to say: ``sample`` numbers the windows that were kept, ``across`` says whether
        layers were looked at together.
    read : callable
        Gives the tensor of a name: those of `ModelMoments.tensors` and of `losses.measured`, and ``layer_{l}_{k|v}``,
        bfloat16 [sampled windows, kv_heads, context, head_dim]; and, of layers together, those of `across.names`.

    Attributes
    ----------
    joint : JointTap or None
        What was seen of all layers together; a file holds none of it.
    rows : RowsTap or None
        K and V of more windows than those of the sample.
    outputs : OutputsTap or None
        The same of what attention makes of V.
    """

    joint: JointTap | None = None
    rows: RowsTap | None = None
    outputs: OutputsTap | None = None

    def __init__(self, metadata: dict, read: Callable[[str], Tensor]):
        self.metadata, self._read = metadata, read

    @property
    def extent(self) -> Extent:
        """How much text was seen."""
        return Extent(self.metadata["windows"], self.metadata["tokens"], self.metadata["context"])

    @property
    def context(self) -> int:
        """Tokens of a window whose K and V a codec would see."""
        return self.metadata["context"]

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``: what the captured model ran in. The sample is `SAMPLE_DTYPE` in any case."""
        return self.metadata["dtype"]

    @property
    def n_windows(self) -> int:
        """Windows that were seen."""
        return self.metadata["windows"]

    @property
    def sampled(self) -> tuple[int, ...]:
        """Numbers of the windows that were kept, ascending."""
        return tuple(self.metadata["sample"])

    @property
    def identity(self) -> dict[str, str]:
        """Of which model, windows and engine it is."""
        return {name: self.metadata[name] for name in ("model_hash", "corpus_hash", "engine")}

    @property
    def sample_facts(self) -> dict:
        """The sample as records of the calibration name it."""
        return {name: self.metadata[name] for name in ("sample", "sample_dtype", "sample_bytes")}

    def queries(self, layer: int) -> QueryMoments:
        """Second moments of a layer's queries, and their traces by window."""
        return kept.stored_queries(self._read, layer, self.extent)

    def moments(self, layer: int, stream: str) -> Moments:
        """Moments of a layer's K or V over the contexts of all windows but for their first tokens, heads joined."""
        return kept.stored_rows(self._read, layer, stream, self.extent)

    def first(self, layer: int, stream: str) -> Tensor:
        """Mean of a layer's K or V at the first token of the windows, float64 [kv_heads, head_dim]."""
        return kept.stored_first(self._read, layer, stream)

    def loss(self, layer: int, stream: str) -> Tensor:
        """What errors of a layer's K or V cost (`losses`), float64 [kv_heads, head_dim]."""
        return self._read(f"layer_{layer}_{stream}_loss")

    @property
    def across(self) -> StoredAcross | None:
        """What was seen of layers together, where that was asked for."""
        return StoredAcross(self._read) if self.metadata["across"] else None

    def layer(self, layer: int, stream: str) -> Tensor:
        """The sampled contexts of a layer's K or V as float32, [sampled windows, kv_heads, context, head_dim]."""
        return self._read(f"layer_{layer}_{stream}").float()


class InMemory(WindowStatistics):
    """What is left of the windows, not yet in a file; `tensors` is all that a file would hold, by name.

    `beside` is what was seen besides and no file holds: attributes of `WindowStatistics`.
    """

    def __init__(self, metadata: dict, tensors: dict[str, Tensor], beside: Mapping[str, Beside] | None = None):
        super().__init__(metadata, tensors.__getitem__)
        self.tensors = tensors
        for name, seen in (beside or {}).items():
            setattr(self, name, seen)


def sample_of(windows: int, most: int) -> tuple[int, ...]:
    """At most `most` of so many windows, evenly spread: one and the same choice for every engine."""
    number = min(windows, most)
    return tuple(windows * i // number for i in range(number))


def observe(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    context: int,
    corpus_hash: str,
    sample: int,
    beside: Collection[str] = (),
) -> InMemory:
    """Run windows through an engine, one after the other, and keep moments and a sample.

    Parameters
    ----------
    engine : Engine
        Running.
    windows : sequence of sequence of int
        Token ids, all windows of one length.
    context : int
        First tokens of a window, whose K and V count.
    corpus_hash : str
        Of the windows' file.
    sample : int
        Windows to keep K and V of, in bfloat16: 4 * layers * kv_heads * head_dim * context bytes each.
    beside : collection of str
        What is looked at too: ``across``, on which `archive` is fitted and which takes (4 * kv_heads * head_dim)**2
        float64 numbers a layer, however many windows there are; and the attributes of `WindowStatistics`.

    Raises
    ------
    UserError
        There is no window, they are of several lengths, or the context is longer.
    NonFinite
        Q, K or V holds NaN or infinity.
    """
    lengths = sorted({len(ids) for ids in windows})
    if len(lengths) != 1 or not 0 < context <= lengths[0] or sample < 1:
        raise UserError(
            f"cannot calibrate on {len(windows)} windows of {' or '.join(map(str, lengths)) or 'no'} tokens, a context"
            f" of {context} and a sample of {sample}; give windows of one length, a context within it, and a sample",
            code="user.calibration-windows",
        )
    info, extent = engine.info, Extent(len(windows), lengths[0], context)
    chosen = sample_of(extent.windows, sample)
    angles = ErrorMetrics(info, extent.tokens).angles
    seen = _looking(beside, info, chosen, extent, angles)
    tap = _Tap(ModelMoments(info, extent, angles), chosen, tuple(seen.values()))
    for number, ids in enumerate(tqdm(windows, desc=f"capture {engine.name}", unit="window")):
        tap.window = number
        engine.score(ids, len(ids) - 2, tap)
        tap.finish_window()
    found = losses.measured(engine, [ids[:context] for ids in windows], angles)
    tensors = tap.moments.tensors() | tap.sample | found
    if across := seen.pop("across", None):
        tensors |= across.tensors() | {layers_together.IDS: torch.tensor([list(windows[i][:context]) for i in chosen])}
    metadata = {
        "engine": engine.name,
        "model_hash": info.model_hash,
        "corpus_hash": corpus_hash,
        "context": context,
        "windows": extent.windows,
        "tokens": extent.tokens,
        "dtype": engine.dtype,
        "sample": list(chosen),
        "sample_dtype": SAMPLE_DTYPE,
        "sample_bytes": sum(tensor.nbytes for tensor in tap.sample.values()),
        "across": across is not None,
        "device": engine.device,
        "versions": versions(),
    }
    return InMemory(metadata, tensors, seen)


def _looking(
    beside: Collection[str], info: ModelInfo, chosen: tuple[int, ...], extent: Extent, angles: Sequence[Angles]
) -> dict[str, Beside]:
    """What looks at the windows beside the moments, by name."""
    makers = {
        "across": lambda: AcrossTap(info, extent.context, chosen),
        "joint": lambda: JointTap(info, extent.context),
        "rows": lambda: RowsTap(info, extent.context, extent.windows),
        "outputs": lambda: OutputsTap(info, extent.context, angles),
    }
    return {name: makers[name]() for name in beside}


class _Tap:
    """Folds what passes into moments, and keeps K and V of the windows of the sample, in the order in which it passed.

    Where torch has one thread, that is done meanwhile in a second one; else after each window, as both together would
    only wait for one another. A fault is told once a window is done, not from inside its forward.
    """

    def __init__(self, moments: ModelMoments, chosen: Sequence[int], beside: Sequence[Beside]):
        self.moments, self.chosen, self.beside = moments, chosen, beside
        self.sample: dict[str, Tensor] = {}
        self.window = 0
        self._thread = ThreadPoolExecutor(1, "capture") if torch.get_num_threads() == 1 else None
        self._due: deque[Callable[[], None]] = deque()

    def __call__(self, layer: int, part: Part, x: Tensor) -> None:
        """See `Tap`."""
        own = x.detach().clone()  # an engine may turn its own by the rotary embedding where it lies
        fold = partial(self._fold, self.window, layer, part, own)
        self._due.append(self._thread.submit(fold).result if self._thread else fold)

    def finish_window(self) -> None:
        """Fold up all that passed; `NonFinite` when any of it was."""
        try:
            while self._due:
                self._due.popleft()()  # what is folded up is gone from memory
        finally:
            self._due.clear()

    @torch.no_grad()
    def _fold(self, window: int, layer: int, part: Part, x: Tensor) -> None:
        self.moments.update(window, layer, part, x)
        for other in self.beside:
            other.see(window, layer, part, x)
        if part in STREAMS and window in self.chosen:
            self._keep(f"layer_{layer}_{part}", x[:, : self.moments.extent.context], self.chosen.index(window))

    def _keep(self, name: str, x: Tensor, place: int) -> None:
        if name not in self.sample:
            self.sample[name] = torch.zeros(len(self.chosen), *x.shape, dtype=getattr(torch, SAMPLE_DTYPE))
        self.sample[name][place] = x.to("cpu", getattr(torch, SAMPLE_DTYPE))


def capture(params: Params, engine: str, windows_path: Path, out: Path, asked: Path | None = None) -> None:
    """Run the calibration windows through one engine and keep what `observe` does; the test windows are not read.

    Of each window as many tokens are run as a codec will see of a scored one.

    Parameters
    ----------
    asked : Path, optional
        What `kvlab step asked` wrote: where it names a codec of whole caches, and this is the engine whose capture
        calibrates, layers are looked at together too.

    Raises
    ------
    NonFinite
        A captured tensor holds NaN or infinity.
    """
    torch.set_num_threads(params.jobs.threads)
    memory.keep_freed()
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    calib = windows.calib[:, : windows.context].tolist()
    beside = ("across",) if engine == params.calibration.origin and asks(asked) else ()
    with closing(start(engine, info, params.calibration.dtype, max_tokens=windows.context)) as running:
        found = observe(running, calib, windows.context, windows.corpus_hash, params.calibration.sample, beside)
    with atomic(out) as temporary:
        save_file(found.tensors, temporary, metadata=to_header(found.metadata))


def asks(asked: Path | None) -> bool:
    """Whether a codec of whole caches is asked for."""
    return asked is not None and bool(read_asked(asked))


class Captured(WindowStatistics):
    """The same on disk, read one tensor at a time.

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
                metadata, found = file.metadata(), set(file.keys())
        except (OSError, SafetensorError) as error:
            raise CalibrationMismatch(
                f"cannot read capture {path}: {error}; run `kvlab step capture`", code="calibration.unreadable"
            ) from None
        super().__init__(header_facts(metadata, self.path, FACTS, "capture"), self._tensor)
        self._names = found
        places = [f"layer_{n}_{stream}" for n in range(self.n_layers) for stream in STREAMS]
        due = kept.names(self.n_layers) | {*places, *(f"{place}_loss" for place in places)}
        due |= layers_together.names(self.n_layers) if self.metadata["across"] else set()
        if not found or found != due:
            raise CalibrationMismatch(
                f"{path} does not hold the moments of Q, K and V of every layer, a sample and losses;"
                " run `kvlab step capture`",
                code="calibration.incomplete",
            )
        if self.metadata["model_hash"] != model_hash:
            raise CalibrationMismatch(
                f"{path} was captured from model {self.metadata['model_hash']}, this model is {model_hash}",
                code="calibration.other-model",
            )

    @cached_property
    def n_layers(self) -> int:
        """Layers that were captured."""
        return sum(name.endswith("_q_count") for name in self._names)

    def window(self, layer: int, stream: str, place: int) -> Tensor:
        """K or V of one sampled context, bfloat16 [kv_heads, context, head_dim]; no other is read.

        `place` counts the windows of the sample from 0.
        """
        with safe_open(self.path, "pt") as file:
            return file.get_slice(f"layer_{layer}_{stream}")[place]

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name)
