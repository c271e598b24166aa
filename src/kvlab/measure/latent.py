"""A coder that keeps a context's K and V as one latent for each token and layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvlab.attention.latent_svd import LatentMap, LatentMoments, attention_metric, fit
from kvlab.codecs.base import Site
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.recipe import Cell, StreamRecipe
from kvlab.engines.base import Engine, Part
from kvlab.measure.coding import STREAMS, CleanCapture, now
from kvlab.measure.eviction import KeepingCoder

CALIBRATING = 8  # windows of the calibration's text that latents are fitted to


class LatentCoder(KeepingCoder):
    """Makes latents of a whole cache, and K and V of all layers from these.

    Parameters
    ----------
    maps : callable
        Gives the map of each layer, when the first cache comes.
    sinks : int
        First tokens that are stored as they are.
    stream : StreamRecipe or None
        A codec that latents are coded by, without a calibration, as one head as wide as their rank; then `dtype` is
        that of the first tokens alone.
    """

    def __init__(
        self,
        cell: Cell,
        maps: Callable[[], Mapping[int, LatentMap]],
        sinks: int,
        dtype: torch.dtype | None,
        stream: StreamRecipe | None = None,
    ):
        super().__init__(cell, dtype)
        self.maps, self.sinks = maps, sinks
        self._latent_codec = build(stream, None) if stream else None

    def begin(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`."""
        for layer, one in self.maps().items():
            kv = [clean.kept[layer, stream] for stream in STREAMS]
            began = now(kv[0])
            latents, size = self._latents(one.latents(*(x[:, self.sinks :] for x in kv)), Site(window, layer, "k"))
            kept = [self.stored(x[:, : self.sinks]) for x in kv]
            stored = now(kv[0])
            for stream, x, first, made in zip(STREAMS, kv, kept, one.restored(latents), strict=True):
                self.made[layer, stream] = torch.cat([first.to(x.dtype), made.to(x.dtype)], dim=1)
            self.tally.coded_bytes += size + sum(x.nbytes for x in kept)
            self.tally.encode_seconds += stored - began
            self.tally.decode_seconds += now(kv[0]) - stored

    def _latents(self, latents: torch.Tensor, site: Site) -> tuple[torch.Tensor, int]:
        """Latents as they are read, and the bytes that they are stored in."""
        if self._latent_codec is None:
            kept = self.stored(latents)
            return kept, kept.nbytes
        data = frame_bytes(self._latent_codec.encode(latents[None].float(), site))
        return self._latent_codec.decode(read_frame(data).to(latents.device))[0], len(data)

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """See `Coder`; what `begin` made."""
        self.tally.fires += 1
        return self.made[site.layer, site.stream]


def fitted(moments: Mapping[int, LatentMoments], rank: int) -> dict[int, LatentMap]:
    """The maps of every layer, in the metric of its attention."""
    return {layer: fit(one, rank, attention_metric(one)) for layer, one in moments.items()}


def moments_of(engine: Engine, windows: list[list[int]]) -> dict[int, LatentMoments]:
    """Of every layer's Q, K and V before their rotary embedding, on calibration windows without their first token."""
    found = {layer: LatentMoments(engine.info.n_kv_heads) for layer in range(engine.info.n_layers)}
    held: dict[Part, torch.Tensor] = {}

    def tap(layer: int, part: Part, x: torch.Tensor) -> None:
        """See `Tap`: the three parts of a layer come one after the other."""
        held[part] = x[:, 1:].clone()
        if len(held) == 3:
            found[layer].add(held["q"], held["k"], held["v"])
            held.clear()

    for ids in windows:
        engine.score(ids, len(ids) - 2, tap)
    return found
