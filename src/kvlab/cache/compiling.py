"""The loops of coded pages called once on planted tokens, so that what numba compiles of them is on disk.

    python -m kvlab.cache.compiling        # those that README serves: K after its rotary embedding, in bfloat16

Loops are compiled for the dtypes and layouts that they meet. So these are those of a server: K, V and queries are parts
of one product, as vLLM has them.
"""

from __future__ import annotations

import numpy as np
import torch
from numba.core import event
from torch import Tensor

from kvlab.cache.pages.exact import ExactStore, attend_beside
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.cache.pages.step import FEW, ServerStep
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components

HEADS, HEAD_DIM, SINK, RECENT, BLOCK, LONGEST = 2, 64, 4, 16, 32, 192
STEPS = (LONGEST - FEW - 2, FEW, 1, 1)  # tokens of a prompt, of a further part of it, and of steps after it


def compile_loops(rotary: str, dtype: torch.dtype) -> int:
    """Serve a planted request from pages of `klt`.

    Parameters
    ----------
    rotary : {"before", "after"}
        Where K is coded.
    dtype : torch.dtype
        That the model computes in.

    Returns
    -------
    int
        How many functions were compiled; those that were on disk do not count.
    """
    seen = event.RecordingListener()
    with event.install_listener("numba:compile", seen):
        _serve(_pages(rotary, dtype), dtype)
    return sum(one.is_start for _, one in seen.buffer)


def _pages(rotary: str, dtype: torch.dtype) -> LayerPages:
    """Pages of `klt` for one layer, calibrated on noise."""
    noise = torch.randn(HEADS, 1, 512, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    fitted = StreamCalibration(components={0: components.fit(noise, None)})
    codec = build(KltStream(bits=4, block_size=BLOCK, escape=rotary == "before"), fitted)
    k, v = (rows_of(codec, Site(0, 0, stream), HEADS, HEAD_DIM) for stream in "kv")
    angles = torch.arange(LONGEST)[:, None] / 100 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = Rotation(torch.cat([angles.cos(), angles.sin()], dim=1))
    if rotary == "after":
        turn = MeanByPosition(turn, k.plan.decoding.mean)
    return LayerPages(0, k, v, turn, ExactStore(SINK, RECENT, 1, 1, HEADS, HEAD_DIM, dtype))


def _serve(pages: LayerPages, dtype: torch.dtype) -> None:
    """One request's steps, as `pages.backend.PagesImpl` takes them."""
    blocks = torch.arange(LONGEST // BLOCK)[None]
    held = torch.zeros(blocks.numel(), 1, BLOCK, pages.bytes, dtype=torch.uint8)
    length = 0
    for count in STEPS:
        length += count
        step = ServerStep.of([0, count], [length], blocks, BLOCK)
        until = np.maximum(SINK, step.positions.numpy() + 1 - RECENT)
        step = pages.exact.ring.beside(step, np.zeros(1, np.int64), np.array([SINK]), until)
        q, k, v = _projected(count, dtype)
        kept = (step.exact, pages.store) if step.single else ()
        pages.write(k, v, held, step.own_slots(), step.positions, *kept)
        coded = pages.attend(held, q, step, HEAD_DIM**-0.5, pages.store if step.single else None)
        if not step.single:
            attend_beside(coded, q, k, v, pages.store, step, HEAD_DIM**-0.5)


def _projected(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, K and V [tokens, heads, head_dim], parts of one product."""
    sizes = (2 * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEADS * HEAD_DIM)
    noise = torch.randn(tokens, sum(sizes), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    return [part.unflatten(1, (-1, HEAD_DIM)) for part in noise.split(sizes, dim=1)]


if __name__ == "__main__":
    print(f"compiled {compile_loops('after', torch.bfloat16)} functions")
