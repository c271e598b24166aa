"""What is folded up of a calibration's windows for codecs that look further than one layer's K or V."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.codecs.kvtc.codec import UNSEEN
from kvlab.codecs.shared.metric import rotated
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.engines.base import Part

MOST_ROWS = 64  # windows of K and V that are kept: 4 * layers * kv_heads * head_dim * context bytes each
MOST_WIDTH = 16384  # numbers of a token's K, all layers together: their moments take a gigabyte


class JointTap:
    """Moments of K of all layers together, and of V of all layers: what `kvtc` is fitted on.

    First tokens, of which its sinks are, are left out.

    Parameters
    ----------
    info : ModelInfo
    context : int
        First tokens of a window, that count.

    Attributes
    ----------
    count : dict of str to float
    mean, scatter : dict of str to Tensor
        By stream; sums of the outer products about the mean, float32 [P, P], P = layers * kv_heads * head_dim.

    Raises
    ------
    CapabilityError
        The model's are too wide to be held.
    """

    def __init__(self, info: ModelInfo, context: int):
        width = info.n_layers * info.n_kv_heads * info.head_dim
        if width > MOST_WIDTH:
            raise CapabilityError(
                f"kvtc is fitted on moments of all layers together, here of {width} numbers of a token; allowed: at"
                f" most {MOST_WIDTH}"
            )
        self.info, self.span = info, slice(min(UNSEEN, context - 1), context)
        self.count = {stream: 0.0 for stream in "kv"}
        self.mean = {stream: torch.zeros(width) for stream in "kv"}
        self.scatter = {stream: torch.zeros(width, width) for stream in "kv"}
        self._held: dict[Part, list[Tensor]] = {"k": [], "v": []}

    def see(self, _window: int, layer: int, part: Part, x: Tensor) -> None:
        """Fold in one layer's K or V of a window [heads, tokens, head_dim], from the first layer up."""
        if part == "q":
            return
        held = self._held[part]
        held.append(x[:, self.span].transpose(0, 1).flatten(1).float().cpu())
        if layer == self.info.n_layers - 1:
            self._fold(part, torch.cat(held, dim=1))
            held.clear()

    def _fold(self, part: Part, rows: Tensor) -> None:
        """As Chan, Golub and LeVeque (1979) do."""
        mean, tokens, seen = rows.mean(0), float(len(rows)), self.count[part]
        rows, apart, total = rows - mean, mean - self.mean[part], seen + tokens
        self.scatter[part].addmm_(rows.mT, rows).addr_(apart, apart, alpha=seen * tokens / total)
        self.mean[part] += apart * (tokens / total)
        self.count[part] = total

    def covariance(self, stream: str) -> Tensor:
        """Of K or of V, float32 [P, P]."""
        return self.scatter[stream] / max(self.count[stream] - 1, 1)


class RowsTap:
    """K and V of some windows, in bfloat16: what `aquakv` is fitted on, layer after layer.

    Parameters
    ----------
    info : ModelInfo
    context : int
        First tokens of a window, that count; the very first, of which sinks are, are left out.
    windows : int
        That will come, of which `MOST_ROWS` are kept, evenly spread.
    """

    def __init__(self, info: ModelInfo, context: int, windows: int):
        number = min(windows, MOST_ROWS)
        self.info, self.span = info, slice(min(UNSEEN, context - 1), context)
        self.chosen = {windows * i // number for i in range(number)}
        self._rows: dict[tuple[int, str], list[Tensor]] = {}

    def see(self, window: int, layer: int, part: Part, x: Tensor) -> None:
        """Keep one layer's K or V of a window [heads, tokens, head_dim]."""
        if part != "q" and window in self.chosen:
            rows = x[:, self.span].transpose(0, 1).flatten(1).to("cpu", torch.bfloat16)
            self._rows.setdefault((layer, part), []).append(rows)

    def rows(self, layer: int, stream: str) -> Tensor:
        """A layer's K or V, bfloat16 [tokens, kv_heads * head_dim]."""
        return torch.cat(self._rows[layer, stream])


class OutputsTap:
    """Second moments of what attention makes of V, head by head: what `oscar` may rotate V by.

    Parameters
    ----------
    info : ModelInfo
    context : int
        First tokens of a window, that count.
    angles : sequence of tuple of Tensor
        By layer, cos and sin of the rotary embedding at the positions of a window, [tokens, pairs] each.

    Attributes
    ----------
    moments : dict of int to Tensor
        By layer, sums of the outer products of outputs, float64 [kv_heads, head_dim, head_dim].
    """

    def __init__(self, info: ModelInfo, context: int, angles: Sequence[tuple[Tensor, Tensor]]):
        self.info, self.context, self.angles = info, context, angles
        self.moments = {
            layer: torch.zeros(info.n_kv_heads, info.head_dim, info.head_dim, dtype=torch.float64)
            for layer in range(info.n_layers)
        }
        self.count = 0
        self._held: dict[Part, Tensor] = {}

    def see(self, _window: int, layer: int, part: Part, x: Tensor) -> None:
        """Fold in one layer's Q, K or V of a window, before the rotary embedding [heads, tokens, head_dim]."""
        self._held[part] = x[:, : self.context].float().cpu()
        if len(self._held) == 3:
            q, k, v = (self._held[each] for each in "qkv")
            angles = tuple(part[: self.context] for part in self.angles[layer])
            found = outputs(q, k, v, angles, self.info.score_scale, self.info.windows[layer])
            rows = found.double().flatten(1, 2)
            self.moments[layer] += rows.mT @ rows
            self.count += rows.shape[1] if layer == 0 else 0
            self._held.clear()

    def second_moments(self) -> dict[int, Tensor]:
        """The mean outer product of each KV head's outputs, by layer, float32 [kv_heads, head_dim, head_dim]."""
        return {layer: (total / max(self.count, 1)).float() for layer, total in self.moments.items()}


def outputs(q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], scale: float, window: int | None) -> Tensor:
    """Causal attention's outputs, float32 [kv_heads, query heads of one, tokens, head_dim].

    Parameters
    ----------
    q, k, v : Tensor
        Before the rotary embedding [heads, tokens, head_dim].
    angles : tuple of Tensor
        cos and sin at their positions [tokens, pairs].
    scale : float
        What scores are multiplied by.
    window : int or None
        Last tokens that a token sees, itself among them; None for all.
    """
    queries = rotated(q, *angles).unflatten(0, (len(k), -1))
    scores = queries @ rotated(k, *angles)[:, None].mT * scale
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool)
    unseen = everything.triu(1) | everything.tril(-window if window else -len(everything))
    return scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, None]
