"""A coder that keeps a context's K and V as one latent for each token and layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.attention.latent_svd import LatentMap, Moments
from kvlab.base.recipe import Cell, StreamRecipe
from kvlab.codec.base import Site, Stats
from kvlab.codec.registry import build
from kvlab.codec.stream.bitstream import frame_bytes, read_frame
from kvlab.engines.base import Engine, Part
from kvlab.lab.coding import STREAMS, CleanCapture, Coded, Coder


class LatentCoder(Coder):
    """Codes a whole cache, and gives out its layers.

    Parameters
    ----------
    maps : mapping of int to LatentMap, by layer
    sinks : int
        First tokens that are stored as they are.
    dtype : torch.dtype or None
        That latents, and the first tokens, are stored in; None leaves them as they were computed.
    stream : StreamRecipe or None
        A codec that latents are coded by, without a calibration, as one head as wide as their rank; then `dtype` is
        that of the first tokens alone.

    Attributes
    ----------
    made : dict of (layer, stream) to Tensor
        What attention reads of the last window.
    """

    def __init__(
        self,
        cell: Cell,
        maps: Mapping[int, LatentMap],
        sinks: int,
        dtype: torch.dtype | None,
        stream: StreamRecipe | None = None,
    ):
        super().__init__(cell, None)
        self.maps, self.sinks, self.dtype = maps, sinks, dtype
        self._latent_codec = build(stream, None) if stream else None
        self.made: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`."""
        for layer, one in self.maps.items():
            kv = [clean.kept[layer, stream] for stream in STREAMS]
            latents, size = self._latents(one.latents(*(x[:, self.sinks :] for x in kv)), Site(window, layer, "k"))
            kept = [self._stored(x[:, : self.sinks]) for x in kv]
            self.tally.coded_bytes += size + sum(x.nbytes for x in kept)
            for stream, x, first, made in zip(STREAMS, kv, kept, one.restored(latents), strict=True):
                self.made[layer, stream] = torch.cat([first.to(x.dtype), made.to(x.dtype)], dim=1)

    def _latents(self, latents: torch.Tensor, site: Site) -> tuple[torch.Tensor, int]:
        """Latents as they are read, and the bytes that they are stored in."""
        if self._latent_codec is None:
            stored = self._stored(latents)
            return stored, stored.nbytes
        data = frame_bytes(self._latent_codec.encode(latents[None].float(), site))
        return self._latent_codec.decode(read_frame(data).to(latents.device))[0], len(data)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    def snapshot(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        """See `Coder`; what `begin` made."""
        made = self.made[site.layer, site.stream]
        self._count(Coded(made, 0, Stats(n_coefficients=x.numel()), 0.0, 0.0, 0.0, 0.0), x, site.stream)
        return made


def moments_of(engine: Engine, windows: list[list[int]]) -> dict[int, Moments]:
    """Of every layer's Q, K and V before their rotary embedding, on calibration windows without their first token."""
    found = {layer: Moments(engine.info.n_kv_heads) for layer in range(engine.info.n_layers)}
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
