"""A near tie and a seam bug, made on purpose: what the verdict on them has to be is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import CapabilityError
from kvlab.kvstore.hf.model import PagedModel

APART = 1e-6  # standard deviation of what two tied rows of the output projection differ by


@contextmanager
def tied(model: PagedModel, token: int, hidden: Tensor, unused: Sequence[int]) -> Iterator[int]:
    """While it lasts, another token's row of the output projection is all but that of `token`.

    They differ by numbers of `APART`, at right angles to what the projection was given: the two logits are equal there
    but for rounding. The other token must not be read by the model, for its embedding may be the same row.

    Parameters
    ----------
    model : PagedModel
    token : int
    hidden : Tensor
        [width], what the projection is given where the two shall be tied.
    unused : sequence of int
        Tokens, the first of which is taken.

    Yields
    ------
    int
        The other token.
    """
    weight, other = model.model.get_output_embeddings().weight.data, next(one for one in unused if one != token)
    before, x = weight[other].clone(), hidden.double().cpu()
    apart = APART * torch.randn(len(x), generator=generator("tie", token, other), dtype=torch.float64)
    apart -= x * (apart @ x) / (x @ x)
    weight[other] = (weight[token].double().cpu() + apart).to(weight)
    try:
        yield other
    finally:
        weight[other] = before


@contextmanager
def hidden_states(model: PagedModel) -> Iterator[list[Tensor]]:
    """While it lasts, what the output projection was given after the last token of each forward, [width] each."""
    kept: list[Tensor] = []
    handle = model.model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: kept.append(inputs[0][0, -1].detach().clone())
    )
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def shifted(model: PagedModel, seam: int, by: int = 1) -> Iterator[None]:
    """While it lasts, positions from `seam` on are one too many: what a restore off by one would do.

    Masks stay as they are. `CapabilityError` when the model is not told its positions.
    """

    def shift(_module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        places = kwargs.get("position_ids")
        if places is None:
            raise CapabilityError("the model is not told its positions, so that none can be shifted")
        return args, kwargs | {"position_ids": places + by * (places >= seam)}

    handle = model.model.base_model.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
