"""A matrix product of which a row does not depend on how many others there are."""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 16  # rows below which a matrix product may take another path, which rounds otherwise


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows @ matrix``, row by row the same numbers however many rows there are.

    A row [..., n, a] alone would be rounded otherwise than among many, and a codec whose tokens do not
    depend on each other would seem to depend on how they were cut into calls.
    """
    n = rows.shape[-2]
    if n >= FEW:
        return rows @ matrix
    return (torch.nn.functional.pad(rows, (0, 0, 0, FEW - n)) @ matrix)[..., :n, :]
