"""The rotary embedding of a layer in vLLM: K turned back where it is written, and turned again where it is read.

vLLM's attention is handed K after the rotary embedding, a calibration knows K before it. The two are one rotation
apart, which the token's position and the layer's own table of cosines and sines say exactly, in whatever dtype the
table is.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvlab.cache.rope_turn import RopeTurn, apply_rope, refuse_lossy, undo_rope
from kvlab.codecs.shared.seeding import generator
from kvlab.codecs.shared.turning import RUN
from kvlab.core.errors import CapabilityError

BEYOND = 15  # zeros after the last position: loops read whole vectors of sixteen
PROBED = (0, 1, 7, 100)
REMEDY = "give a recipe with rotary: after, of a codec other than klt"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of the largest value of K


class Rotation:
    """Turns K of one layer by the positions of its tokens.

    Parameters
    ----------
    table : Tensor
        Cosines and then sines of each position's frequencies [positions, head_dim], as vLLM's module holds them.

    Attributes
    ----------
    columns : pair of array
        Cosines and sines of all positions of each frequency, float32 [head_dim / 2, positions and `BEYOND` more].
    rows : pair of array
        Those of a position side by side, float32 [positions, head_dim / 2].
    by_position : bool
        Whether K is coded less its mean by position (`MeanByPosition`).
    """

    by_position = False

    def __init__(self, table: Tensor):
        self._halves = tuple(part.contiguous() for part in table.float().chunk(2, dim=-1))
        self.columns = tuple(pad(part.T, (0, BEYOND)).contiguous().cpu().numpy() for part in self._halves)
        self.rows = tuple(part.cpu().numpy() for part in self._halves)

    @cached_property
    def table(self) -> Tensor:
        """Cosines and then sines of each position, float32 [positions, head_dim]."""
        return torch.cat(self._halves, dim=-1)

    def undo(self, k: Tensor, positions: Tensor) -> Tensor:
        """K [heads, n, head_dim] as attention sees it, as it was before, float32; `positions` are int64 [n]."""
        return undo_rope(k, *self.at(positions))

    def redo(self, k: Tensor, positions: Tensor) -> Tensor:
        """The way back."""
        return apply_rope(k, *self.at(positions))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, both halves, float32 [n, head_dim]."""
        return tuple(torch.cat([part[positions]] * 2, dim=-1) for part in self._halves)

    def __len__(self) -> int:
        """Positions."""
        return len(self._halves[0])


class Unturned:
    """No rotation: a recipe that codes K after its rotary embedding."""

    by_position = False
    columns = rows = np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)

    def undo(self, k: Tensor, positions: Tensor) -> Tensor:
        """`k` itself."""
        return k

    redo = undo


class MeanByPosition:
    """K is coded less its mean by position, turned by its place in a run; see `codecs.shared.turning`.

    Parameters
    ----------
    rotation : Rotation
        Of the layer, whose tables are this one's too.
    mean : Tensor
        Of K before its rotary embedding, float32 [heads, head_dim].
    """

    by_position = True

    def __init__(self, rotation: Rotation, mean: Tensor):
        self.rotation, self.mean = rotation, mean[:, None]
        self.columns, self.rows = rotation.columns, rotation.rows

    def undo(self, k: Tensor, positions: Tensor) -> Tensor:
        """K [heads, n, head_dim] as attention sees it, as it is coded, float32; `positions` are int64 [n]."""
        return self.rotation.undo(k.float() - self._turned(positions), self._begun(positions)) + self.mean

    def redo(self, k: Tensor, positions: Tensor) -> Tensor:
        """The way back."""
        return self.rotation.redo(k - self.mean, self._begun(positions)) + self._turned(positions)

    def _turned(self, positions: Tensor) -> Tensor:
        """The mean at positions, float32 [heads, n, head_dim]."""
        return self.rotation.redo(self.mean.expand(-1, len(positions), -1), positions)

    @staticmethod
    def _begun(positions: Tensor) -> Tensor:
        """Where the runs of positions begin."""
        return positions - positions % RUN


def rotation_of(attention: nn.Module, head_dim: int) -> Rotation:
    """The rotation of one `self_attn` module of a vLLM model, held against what the module does.

    Raises
    ------
    CapabilityError
        It has no rotary embedding, or one that turns a part of the head only, by neighbouring pairs, by frequencies
        that change, or so that it cannot be turned back.
    """
    rotary = getattr(attention, "rotary_emb", None)
    table = getattr(rotary, "cos_sin_cache", None)
    if table is None or table.dim() != 2 or table.shape[1] != head_dim:
        held = "none" if table is None else f"one of shape {list(table.shape)}"
        raise CapabilityError(
            f"K or its mean is turned by the rotary embedding, and {type(rotary).__name__} holds no table of cosines"
            f" and sines for {head_dim} dimensions that says how (found {held}); {REMEDY}",
            code="capability.unknown-rope",
        )
    found = Rotation(table)
    positions = torch.tensor(PROBED)
    k = torch.randn(1, len(PROBED), head_dim, generator=generator("pages", "rotary")).to(table.dtype)
    theirs = rotary(positions, k[0].clone(), k[0].clone())[1][None].float()
    ours = found.redo(k, positions)
    if not (ours - theirs).abs().max() <= TOLERANCE[table.dtype] * k.abs().max():  # NaN is refused too
        raise CapabilityError(
            f"{type(rotary).__name__} turns K in another way than by halves; {REMEDY}",
            code="capability.rope-convention",
        )
    refuse_lossy(RopeTurn(*found.at(positions)), ours)
    return found
