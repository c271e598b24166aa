"""How a codec gets between an engine and its K and V, under one of the two protocols.

`in_forward`: the context's K and V are coded as they appear inside the one forward, by a tap, so that every
layer sees the damage of the layers below. `snapshot`: a clean pass is made first, its cache is coded,
and the evaluation tokens alone are computed over that cache (`Engine.score_over`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter

import torch

from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Codec, Encoded, Site, Stats
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.codecs.stream.cache_file import CacheHeader
from kvlab.core.errors import CodecNotActive
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Cell, StreamRecipe, digest
from kvlab.core.records import Coding
from kvlab.engines.base import ContextCache, Part

STREAMS = ("k", "v")

UNDECIDING = {"study", "label", "text", "windows"}
"""Fields of a cell that do not decide what is found on a window: who asks, by which name, and how many windows."""


@dataclass
class Tally:
    """What a cell's codec did so far."""

    fires: int = 0
    coded_frames: int = 0
    coded_values: int = 0
    coded_bytes: int = 0
    d_eff: dict[str, Counter] = field(default_factory=lambda: {s: Counter() for s in STREAMS})
    outliers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    coefficients: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    error_sq: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    signal_sq: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    encode_seconds: float = field(default=0.0, compare=False)  # no two runs take the same
    decode_seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> dict:
        """Plain data."""
        data = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        return data | {"d_eff": {s: {str(rank): n for rank, n in counts.items()} for s, counts in self.d_eff.items()}}

    @classmethod
    def total(cls, notes: Iterable[dict]) -> Tally:
        """The sum of tallies, given as `to_json` has them, in their order."""
        found = cls()
        for note in notes:
            for name, value in note.items():
                if name == "d_eff":
                    for stream, counts in value.items():
                        found.d_eff[stream] += Counter({int(rank): n for rank, n in counts.items()})
                elif isinstance(value, dict):
                    sums = getattr(found, name)
                    for stream, amount in value.items():
                        sums[stream] += amount
                else:
                    setattr(found, name, getattr(found, name) + value)
        return found


@dataclass(frozen=True)
class Coded:
    """A round trip through a codec: the decoded tensor, what it took and what it cost.

    `nbytes` is the length of the stream that was decoded, 0 for a codec that stores nothing. The seconds go from the
    tensor to the stream, and from there to the decoded tensor. The error
    and the signal are sums of squares, K in the metric of Sigma_q where it is known, the signal about the
    mean of each head; 0 where they are not asked for.
    """

    tensor: torch.Tensor
    nbytes: int
    stats: Stats
    encode_seconds: float
    decode_seconds: float
    error_sq: float
    signal_sq: float

    @property
    def held(self) -> int:
        """Bytes that the decoded tensor takes in memory."""
        return self.tensor.nbytes


class Coder:
    """Runs the recipe of one cell and keeps its tally.

    Parameters
    ----------
    cell : Cell
        Whose recipe, layers and streams are coded.
    calibrated : Calibrated or None
        Whiteners and codebooks; None when no recipe of the cell needs them.
    memo : dict, optional
        Shared by the cells of a job and emptied at every window: the coded snapshots of clean tensors,
        which cells with equal recipes need not code again.
    judged : bool
        Whether the codec's error is measured too; where nothing reports it, it takes a tenth of the coding for nothing.
    """

    def __init__(self, cell: Cell, calibrated: Calibrated | None, memo: dict | None = None, judged: bool = True):
        self.cell, self.tally, self._memo, self.calibrated, self.judged = cell, Tally(), memo, calibrated, judged
        self._whiteners = calibrated.metric(cell.placement) if calibrated else {}
        self._codecs: dict[tuple[str, StreamRecipe], Codec] = {}
        self._recipes: dict[tuple[str, int], StreamRecipe] = {}
        for stream, layer in product(STREAMS if cell.stream == "kv" else (cell.stream,), cell.layers):
            recipe = cell.stream_recipe(stream, layer)
            self._recipes[stream, layer] = recipe
            if (stream, recipe) not in self._codecs and recipe.codec not in WHOLE:
                fitted = calibrated.stream(recipe, stream, cell.placement) if calibrated else None
                self._codecs[stream, recipe] = build(recipe, fitted)

    @property
    def places(self) -> list[tuple[int, Part]]:
        """Layer and stream of everything that this cell codes."""
        return [(layer, part) for part, layer in self._recipes]

    def codes(self, layer: int, part: Part) -> bool:
        """Whether this cell codes that layer's K or V (never Q)."""
        return (part, layer) in self._recipes

    def begin(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """Told of a context's whole clean cache before any of it is coded; what codes tensor by tensor needs it not."""

    def held(self, clean: CleanCapture, ids: list[int], window: int) -> ContextCache:
        """What is left of a context's clean cache, as attention is to read it."""
        self.begin(clean, ids, window)
        return CodedContext(self, window, clean)

    def warm_up(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """Work for nothing once: first calls load kernels and fill tables."""
        for (layer, part), x in clean.kept.items():
            if layer == self.cell.layers[-1] and self.codes(layer, part):
                self.round_trip(x, Site(window, layer, part))

    def round_trip(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """`x` encoded and decoded, in its own dtype, and counted."""
        coded = self._code(x, site)
        self._count(coded, x, site.stream)
        return coded.tensor.to(x.dtype)

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """`round_trip` of a clean tensor, looked up when an equal recipe has coded it already."""
        if self._memo is None:
            return self.round_trip(x, site)
        recipe = digest(self._recipes[site.stream, site.layer])
        key = (recipe, self.cell.origin, self.cell.placement, site, self.judged)
        if key not in self._memo:
            self._memo[key] = self._code(x, site)
        coded = self._memo[key]
        self._count(coded, x, site.stream)
        return coded.tensor.to(x.dtype)

    def _code(self, x: torch.Tensor, site: Site) -> Coded:
        codec = self._codecs[site.stream, self._recipes[site.stream, site.layer]]
        began = now(x)
        encoded = codec.encode(x, site)
        data = frame_bytes(encoded) if encoded.packed else b""
        stored = now(x)
        decoded = codec.decode(read_frame(data).to(x.device) if encoded.packed else encoded)
        took = (stored - began, now(x) - stored)
        return Coded(decoded, len(data), encoded.stats, *took, *self._squares(x, decoded, site))

    def _squares(self, x: torch.Tensor, decoded: torch.Tensor, site: Site) -> tuple[float, float]:
        """`squares` of K in the metric of Sigma_q where it is known; nothing where nobody asks."""
        if not self.judged:
            return 0.0, 0.0
        weigh = self._whiteners[site.layer].whiten if site.stream == "k" and site.layer in self._whiteners else None
        return squares(x, decoded, weigh)

    def _count(self, coded: Coded, x: torch.Tensor, stream: str) -> None:
        tally, stats = self.tally, coded.stats
        tally.fires += 1
        if coded.nbytes:
            tally.coded_frames += 1
            tally.coded_values += x.numel()
            tally.coded_bytes += coded.nbytes
        tally.d_eff[stream].update(int(rank) for rank in stats.d_eff)
        tally.outliers[stream] += stats.n_outliers
        tally.coefficients[stream] += stats.n_coefficients
        tally.encode_seconds += coded.encode_seconds
        tally.decode_seconds += coded.decode_seconds
        tally.error_sq[stream] += coded.error_sq
        tally.signal_sq[stream] += coded.signal_sq

    def expected_fires(self, windows: int | None = None) -> int:
        """Layers times streams times windows, by default those of the cell."""
        return (self.cell.windows if windows is None else windows) * len(self._recipes)

    def refuse_idle(self, windows: int | None = None) -> None:
        """`CodecNotActive` unless the codec fired on every layer, stream and window that it should have.

        Parameters
        ----------
        windows : int, optional
            That the tally is of; by default those of the cell.
        """
        tally, due = self.tally, self.expected_fires(windows)
        if tally.fires != due:
            raise CodecNotActive(
                f"cell {self.cell.label!r} ({self.cell.engine}, {self.cell.protocol}): its codec fired {tally.fires}"
                f" times where {due} were due",
                code="not-active.fires",
            )

    def fitted(self) -> dict[str, str]:
        """Digests of what was fitted and read, for the cell's record."""
        return self.calibrated.fingerprints(self.cell) if self.calibrated else {}

    def coding(self, info: ModelInfo, tokens: int, dtype: str) -> Coding:
        """The tally as a record: the bytes are those of a `cache_file` of each window's `tokens`.

        Layers that were not packed count as frames of the identity codec, in the engine's own dtype. Where no
        Sigma_q is known at the cell's placement K has no weighted error, and a plain one is not put in its place.
        """
        self.refuse_idle()
        weighed = {s: signal for s, signal in self.tally.signal_sq.items() if signal and (s == "v" or self._whiteners)}
        tally, windows = self.tally, self.cell.windows
        values = windows * tokens * info.values_per_token
        uncoded_frames = windows * 2 * info.n_layers - tally.coded_frames
        return Coding(
            fires=tally.fires,
            expected_fires=self.expected_fires(),
            values=values,
            coded_bytes=tally.coded_bytes,
            raw_bytes=uncoded_frames * uncoded_frame_size(info, tokens, dtype)
            + windows * CacheHeader.overhead(info.n_layers),
            d_eff={s: dict(sorted(tally.d_eff[s].items())) for s in STREAMS if tally.d_eff[s]},
            outlier_rate={s: tally.outliers[s] / n for s, n in tally.coefficients.items() if n},
            whitened_error={s: tally.error_sq[s] / signal for s, signal in weighed.items()},
        )


def now(x: torch.Tensor) -> float:
    """Seconds on a clock, once the device of `x` has done what it was told; differences of two mean something."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


def uncoded_frame_size(info: ModelInfo, tokens: int, dtype: str) -> int:
    """Bytes of one layer's K or V as a frame of the identity codec."""
    shape = (info.n_kv_heads, tokens, info.head_dim)
    values = torch.zeros(shape, dtype=getattr(torch, dtype))
    return len(frame_bytes(Encoded(shape, 0, "k", shared=(), blocks=((values,),))))


def squares(x: torch.Tensor, decoded: torch.Tensor, weigh: Callable | None) -> tuple[float, float]:
    """Squared error, and squared deviation of `x` from each head's mean, both after `weigh`."""
    x = x.float()
    parts = (decoded - x, x - x.mean(dim=1, keepdim=True))
    return tuple((weigh(part) if weigh else part).double().square().sum().item() for part in parts)


QUERIES = 64  # last ones of a context that are kept: what evictions score tokens by


class CleanCapture:
    """Tap that keeps the context's K and V of every layer, and its last queries, and changes nothing."""

    def __init__(self, context: int):
        self.context = context
        self.kept: dict[tuple[int, str], torch.Tensor] = {}
        self.queries: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> None:
        """See `Tap`."""
        if part in STREAMS:
            self.kept[layer, part] = x[:, : self.context].clone()
        else:
            self.queries[layer] = x[:, max(0, self.context - QUERIES) : self.context].clone()


class InForward:
    """Tap of the `in_forward` protocol: code K and V of the first `tokens` tokens where they appear.

    In the first layer that is coded they are still the clean ones, which other cells code too: with `clean` at hand
    such a tensor is looked up, as in a snapshot.
    """

    def __init__(self, coder: Coder, window: int, tokens: int, clean: CleanCapture | None = None):
        self.coder, self.window, self.tokens = coder, window, tokens
        self._clean = clean.kept if clean else {}

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """See `Tap`."""
        if not self.coder.codes(layer, part):
            return None
        site, coded = Site(self.window, layer, part), x[:, : self.tokens]
        known = self._clean.get((layer, part))
        untouched = known is not None and torch.equal(known, coded)
        coded = self.coder.snapshot(coded, site) if untouched else self.coder.round_trip(coded, site)
        return torch.cat([coded, x[:, self.tokens :]], dim=1)


class CodedContext(dict):
    """What `snapshot` scores over: a context's clean cache, coded where a coder codes; a `ContextCache`."""

    def __init__(self, coder: Coder, window: int, clean: CleanCapture):
        self.coder, self.window = coder, window
        for (layer, part), x in clean.kept.items():
            self[layer, part] = coder.snapshot(x, Site(window, layer, part)) if coder.codes(layer, part) else x
