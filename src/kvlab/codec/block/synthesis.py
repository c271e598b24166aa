"""From what is stored to rows.

A row is mean + axes^T (gain * centre + norm * D H z / N), a sum of the block's vectors with the row's numbers
as weights. So a block is decoded as one product weights @ vectors, where the vectors are the rows of
(D H / N) axes and of centres axes, un-whitened beforehand: they are few, the rows are many.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlab.base.errors import StreamError
from kvlab.codec import rotation
from kvlab.codec.block import outliers
from kvlab.codec.block.outliers import Outliers
from kvlab.codec.block.stored import BlockArrays
from kvlab.codec.stream import packing
from kvlab.codec.stream.packing import LookUp, bits_for


def grouped(blocks: list[BlockArrays]) -> Iterator[list[int]]:
    """Numbers of blocks whose arrays of vectors have the same shapes."""
    found: dict[tuple, list[int]] = {}
    for number, block in enumerate(blocks):
        found.setdefault((block.scalars.shape[1], block.width, len(block.centres)), []).append(number)
    yield from found.values()


def weights(blocks: list[BlockArrays], look_up: LookUp, apply_norm: bool) -> Tensor:
    """Weights of the vectors of `vectors`, float32 [b, n, N + K], of b blocks of the same shapes.

    Raises
    ------
    StreamError
        When a segment is none of the centres, or outliers do not fit the vectors.
    """
    first = blocks[0]
    n_centres, width, count = len(first.centres), first.width, first.scalars.shape[1]
    z = look_up(torch.stack([block.codes for block in blocks]), width)
    if first.apart is not None:
        z = restored(z, blocks)
    segment = packing.unpack(torch.stack([block.segments for block in blocks]), bits_for(n_centres), count)
    if n_centres & (n_centres - 1) and int(segment.max()) >= n_centres:
        raise StreamError(f"a vector has centre {int(segment.max())} of {n_centres}")
    gain, norm = torch.stack([block.scalars for block in blocks]).float()[..., None].unbind(1)
    found = z.new_empty(*z.shape[:2], width + n_centres)
    torch.mul(z, norm if apply_norm else 1.0, out=found[..., :width])
    found[..., width:].zero_().scatter_(-1, segment[..., None], gain)
    return found


def restored(z: Tensor, blocks: list[BlockArrays]) -> Tensor:
    """z [b, n, N] with the outliers of the blocks in their places."""
    parts = ([getattr(block.apart, name) for block in blocks] for name in ("counts", "places", "values"))
    return outliers.restore(z.flatten(0, 1), Outliers(*map(torch.cat, parts))).view_as(z)


def vectors(block: BlockArrays, seed: int) -> Tensor:
    """What the rows of a block are sums of, float32 [1 + N + K, D]: the mean, rotated axes, centres."""
    frame, width = block.frame.float(), block.width
    found = frame.new_empty(1 + width + len(block.centres), frame.shape[1])
    found[0] = frame[0]
    torch.mm(rotation.inverse(seed, width, frame.device)[:, : block.d_eff], frame[1:], out=found[1 : 1 + width])
    torch.mm(block.centres.float(), frame[1:], out=found[1 + width :])
    return found
