"""A model's tensors in float32: held where they are small, read when they are used where they are large.

A witness runs beside the engine that it vouches for, which holds the same weights. So those of a large model are read
from its files tensor by tensor, each time they are used, and the head by blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

MOST_HELD = 2**30  # bytes in float32; a larger model is read as it is used, on a CPU
ROWS = 2**14  # of a head that are read at once


class Weights:
    """Tensors by name.

    Parameters
    ----------
    files : mapping of str to Path
        The safetensors file that holds each.
    shapes : mapping of str to tuple of int
        Of each.
    device : torch.device
        Where they are used.
    """

    def __init__(self, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self._files, self._shapes, self._device = dict(files), shapes, device
        self._held: dict[str, Tensor] = {}
        if device.type != "cpu" or 4 * sum(map(prod, shapes.values())) <= MOST_HELD:
            self._held = {name: self._read(name) for name in self._files}

    def get(self, name: str) -> Tensor | None:
        """A whole tensor; None where the model has none of the name."""
        if name not in self._files:
            return None
        return self._held[name] if self._held else self._read(name)

    def rows(self, name: str, chosen: Tensor) -> Tensor:
        """Those of a table that are chosen, in this order."""
        if self._held:
            return self._held[name][chosen]
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)[chosen].to(torch.float32)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A table's rows from the first to the last, some at once."""
        if self._held:
            yield self._held[name]
            return
        for first in range(0, self._shapes[name][0], ROWS):
            with safe_open(self._files[name], "pt") as file:
                yield file.get_slice(name)[first : first + ROWS].to(torch.float32)

    def _read(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as file:  # anew each time: what is read of an open file stays in memory
            return file.get_tensor(name).to(self._device, torch.float32)
