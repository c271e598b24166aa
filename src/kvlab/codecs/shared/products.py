"""A matrix product of which a row does not depend on how many others there are."""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 16  # rows below which a matrix product may take another path, which rounds otherwise


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows @ matrix``, row by row the same numbers however many rows there are, on the CPU.

    A row [..., n, a] alone would be rounded otherwise than among many, and a codec whose tokens do not
    depend on each other would seem to depend on how they were cut into calls.

    No library promises this. It is what was observed with the BLAS of torch's CPU build (MKL) in float32, for
    matrices of at least 8 columns, or a multiple of 16 where the matrix is a transposed view; narrower ones
    round some rows otherwise from 17 rows on. Where the matrix product chooses its kernel by the shape of the
    whole, as on CUDA, padding to a few rows proves nothing: there, tokens that are cut differently may decode
    to values that differ in the last bits, and a code on the edge of two cells may change.
    """
    n = rows.shape[-2]
    if n >= FEW:
        return rows @ matrix
    return (torch.nn.functional.pad(rows, (0, 0, 0, FEW - n)) @ matrix)[..., :n, :]
