"""What `archive` is fitted on, folded up as it passes: K and V of neighbouring layers, and queries to probe with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvlab.codecs.archive.moments import Across
from kvlab.codecs.shared.metric import rotated
from kvlab.core.model import ModelInfo
from kvlab.engines.base import Part

PROBES = 96  # queries of each head, from the last quarters of the windows of the sample


def expected_attention(
    probes: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], scale: float, window: int | None
) -> Tensor:
    """Squared attention that each token of a context may expect from the next query, float32 [tokens].

    Parameters
    ----------
    probes : Tensor
        Queries of calibration text before their rotary embedding [n_heads, probes, head_dim]; all of them are put after
        the last token.
    k : Tensor
        Keys of the context, the same [kv_heads, tokens, head_dim].
    angles : tuple of Tensor
        cos and sin of the layer's rotary embedding at positions 0 to tokens, as `metric.rotated` takes them.
    scale : float
        What the layer's scores are multiplied by.
    window : int or None
        Last tokens that a query of the layer sees, itself among them; None for all.

    Returns
    -------
    Tensor
        The mean over the probes of the sum over heads of the squared weights; NaN of tokens that no query will see,
        as the window has left them.
    """
    tokens = k.shape[1]
    cos, sin = (part.to(k.device) for part in angles)
    queries = rotated(probes.to(k.device).float(), cos[tokens], sin[tokens]).unflatten(0, (len(k), -1))
    gone = max(0, tokens + 1 - (window or tokens + 1))  # first tokens; the query stands after the last
    keys = rotated(k.float(), cos[:tokens], sin[:tokens])[:, None, gone:]
    seen = (queries @ keys.mT * scale).softmax(-1).square().sum((0, 1)).mean(0).cpu()
    return torch.nn.functional.pad(seen, (gone, 0), value=torch.nan)


class AcrossTap:
    """Moments of every layer with the one below, and probes.

    Parameters
    ----------
    info : ModelInfo
    context : int
        First tokens of a window, that count.
    chosen : sequence of int
        The windows of the sample.

    Attributes
    ----------
    moments : list of Across
        By layer.
    probes : Tensor
        Queries before their rotary embedding, float16 [layers, n_heads, probes, head_dim]: evenly spread over the last
        quarters of the chosen windows.
    """

    def __init__(self, info: ModelInfo, context: int, chosen: tuple[int, ...]):
        self.info, self.context, self.chosen = info, context, chosen
        width, last = info.n_kv_heads * info.head_dim, max(1, context // 4)
        self._each = max(1, min(PROBES // len(chosen), last))  # probes of a window
        self._places = context - last + torch.arange(self._each) * last // self._each
        self.moments = [Across(width, layer > 0) for layer in range(info.n_layers)]
        shape = (info.n_layers, info.n_heads, self._each * len(chosen), info.head_dim)
        self.probes = torch.zeros(shape, dtype=torch.float16)
        self._held: dict[tuple[int, Part], Tensor] = {}

    def see(self, window: int, layer: int, part: Part, x: Tensor) -> None:
        """Fold in one layer's Q, K or V of a window [heads, tokens, head_dim], before the rotary embedding."""
        if part == "q":
            if window in self.chosen:
                first = self.chosen.index(window) * self._each
                self.probes[layer, :, first : first + self._each] = x[:, self._places.to(x.device)].to(
                    "cpu", torch.float16
                )
            return
        self._held[layer, part] = x[:, 1 : self.context].transpose(0, 1).flatten(1)
        if {(layer, each) for each in "kv"} <= self._held.keys():
            self._fold(layer)

    def _fold(self, layer: int) -> None:
        below = [(layer - 1, part) for part in "kv"] if layer else []
        self.moments[layer].update([self._held[place] for place in (*below, (layer, "k"), (layer, "v"))])
        for place in below:
            self._held.pop(place)
        if layer == self.info.n_layers - 1:
            self._held.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, which `StoredAcross` reads; of float64 as it was summed up."""
        found = {PROBED: self.probes}
        for layer, moments in enumerate(self.moments):
            fields = {name: torch.as_tensor(getattr(moments, name), dtype=torch.float64) for name in FIELDS}
            found |= {f"layer_{layer}_across_{name}": field for name, field in fields.items()}
        return found


FIELDS = ("count", "mean", "scatter", "largest")
PROBED, IDS = "across_probes", "across_ids"


def names(n_layers: int) -> set[str]:
    """The names that an observation of layers together has, the tokens of the sample among them."""
    return {PROBED, IDS} | {f"layer_{layer}_across_{name}" for layer in range(n_layers) for name in FIELDS}


class StoredAcross(Sequence[Across]):
    """What `AcrossTap` saw, layer by layer, from a function that gives the tensor of a name; one layer is held.

    Attributes
    ----------
    probes : Tensor
        See `AcrossTap`.
    ids : list of list of int
        The tokens of the contexts of the sample.
    """

    def __init__(self, read: Callable[[str], Tensor]):
        self._read, self._last = read, (-1, None)

    @cached_property
    def probes(self) -> Tensor:
        """See the class."""
        return self._read(PROBED)

    @cached_property
    def ids(self) -> list[list[int]]:
        """See the class."""
        return self._read(IDS).tolist()

    def __len__(self) -> int:
        return len(self.probes)

    def __getitem__(self, layer: int) -> Across:
        if self._last[0] != layer:
            fields = {name: self._read(f"layer_{layer}_across_{name}") for name in FIELDS}
            found = Across(len(fields["mean"]) // (4 if layer else 2), layer > 0)
            found.count = float(fields.pop("count"))
            vars(found).update(fields)
            self._last = (layer, found)
        return self._last[1]
