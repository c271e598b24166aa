"""The last window of a mechanism, computed again by a forward that is written out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlab.base.errors import WitnessDisagrees
from kvlab.engines.base import ContextCache, context_of
from kvlab.lab.scoring import WindowRun
from kvlab.witness.plain import PlainModel
from kvlab.witness.scores import divergence, log_softmax
from kvlab.witness.testimony import TENSORS

AGREE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Nats per token between a mechanism and its witness: rounding, and now and then a block that is as good as another."""


def computed_again(
    model: PlainModel,
    run: WindowRun,
    held: ContextCache,
    logits: torch.Tensor,
    attend: Callable | None,
    name: str,
    rotated: bool = False,
) -> float:
    """KL from the witness's logits to those that are claimed, nats per token.

    Parameters
    ----------
    held : ContextCache
        K before its rotary embedding, and V, of the window's first tokens, as attention is said to have read them.
    logits : Tensor, shape (scored tokens, vocabulary)
        Claimed, of the tokens after them.
    attend : callable or None
        Another attention than that over everything; see `witness.reading`.
    name : str
        Of the mechanism.
    rotated : bool
        Whether K is after its rotary embedding.

    Raises
    ------
    WitnessDisagrees
        They are too far apart, or the clean cache is not that of a plain forward.
    """
    dtype, own = run.engine.dtype, model.clean(run.ids, run.context).own
    for place, x in run.clean["pre_rope"].kept.items():
        due = own[place][:, : run.context].to(x.device)
        if not float((x.float() - due).norm() / due.norm()) <= TENSORS[dtype]:
            raise WitnessDisagrees(f"{name}: K or V of {place} is not that of a plain forward")
    first = context_of(held)
    passed = model.forward(run.ids[: first + 1 + len(logits)], first, held, first, rotated, attend)
    kl = float(divergence(passed.log_p, log_softmax(logits.to("cpu", torch.float64).numpy())).mean())
    if not kl <= AGREE[dtype]:
        raise WitnessDisagrees(
            f"{name}, window {run.number}: a plain forward's logits are KL {kl:.1e} nats per token away; allowed:"
            f" {AGREE[dtype]:.0e}"
        )
    return kl
