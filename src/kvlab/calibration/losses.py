"""What errors of K and of V cost: the Fisher information of the next tokens about each head's cache.

A small error e of one cached vector changes what the model says of a later token by e^T F e / 2 nats of KL divergence,
with F the expected outer product of the gradient of the log-likelihood, labels drawn from the model itself (Kullback
1959; Amari, Natural gradient works efficiently in learning, 1998). It is measured in float arithmetic on a few
calibration windows: their first three quarters are the cache, over which the last one is scored. Only the diagonal is
kept. It is what puts K and V, layers and heads in one unit; the directions inside a head are known better than a few
windows could say (`codecs.shared.metric`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from kvlab.calibration.metrics import Angles
from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import NonFinite
from kvlab.core.model import ModelInfo
from kvlab.engines.base import Engine
from kvlab.engines.registry import start

WINDOWS = 8  # evenly spread; a head's figure is a mean over thousands of vectors even so
SCORED = 4  # one of so many parts of a context
SPARED = 4  # first tokens, whose share is large and is no vector's that a table is made for


def measured(engine: Engine, windows: Sequence[Sequence[int]], angles: Sequence[Angles]) -> dict[str, Tensor]:
    """Losses of every layer, on an engine's model as transformers runs it.

    Parameters
    ----------
    engine : Engine
        Running. Where it is not ``hf``, which alone gives gradients, the model is loaded beside it.
    windows : sequence of sequence of int
        Contexts; `WINDOWS` of them are gone through.
    angles : sequence of Angles
        By layer, of the positions of a window.

    Returns
    -------
    dict of str to Tensor
        ``layer_{l}_{k|v}_loss``, float64 [kv_heads, head_dim]: diagonal of F, before the rotary embedding, of a cached
        token for a scored one, mean over both.

    Raises
    ------
    NonFinite
        A gradient holds NaN or infinity.
    """
    if engine.name == "hf":
        return _over(engine.model, engine.info, windows, angles)
    with closing(start("hf", engine.info, engine.dtype, max_tokens=len(windows[0]))) as beside:
        return _over(beside.model, engine.info, windows, angles)


def _over(model: PreTrainedModel, info: ModelInfo, windows, angles) -> dict[str, Tensor]:
    """The same on a model of transformers."""
    number = min(len(windows), WINDOWS)
    chosen = [len(windows) * i // number for i in range(number)]
    total: dict[str, Tensor] = {}
    with _without_gradients(model):
        for window in tqdm(chosen, desc="losses", unit="window"):
            for name, found in of_window(model, info, windows[window], window, angles).items():
                total[name] = total.get(name, 0) + found / number
    for name, found in total.items():
        if not torch.isfinite(found).all():
            raise NonFinite(
                f"the gradient of {name} holds NaN or infinity; calibrate in float32", code="non-finite.gradient"
            )
    return total


@contextmanager
def _without_gradients(model: PreTrainedModel) -> Iterator[None]:
    """No gradients of weights meanwhile, for which inputs of all layers would be kept; then again as before.

    For the logits of a pass's last tokens torch copies the head in bfloat16 if it has no gradients: half a second of a
    large vocabulary, in each pass that the engine makes afterwards.
    """
    asked = [weight for weight in model.parameters() if weight.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for weight in asked:
            weight.requires_grad_(True)


def of_window(
    model: PreTrainedModel, info: ModelInfo, ids: Sequence[int], window: int, angles: Sequence[Angles]
) -> dict[str, Tensor]:
    """Losses on one window, of `number` in the calibration, which draws its labels."""
    scored = max(1, len(ids) // SCORED)
    cached, tokens = len(ids) - scored, torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode(False), torch.enable_grad():
        leaves, cache = _cache(model, info, tokens[:, :cached])
        logits = model(tokens[:, cached:], past_key_values=cache, use_cache=True).logits[0].float()
        found = torch.autograd.grad(_likelihood(logits, window), list(leaves.values()))
    spared = min(SPARED, cached - 1)
    losses = {}
    for (layer, stream), gradient in zip(leaves, found, strict=True):
        own = gradient[0].float()
        if stream == "k":
            cos, sin = (part[:cached].to(model.device) for part in angles[layer])
            own = rotated(own, cos, -sin)
        square = own[:, spared:].double().square().mean(1) / scored
        losses[f"layer_{layer}_{stream}_loss"] = square.cpu()
    return losses


def _cache(
    model: PreTrainedModel, info: ModelInfo, tokens: Tensor
) -> tuple[dict[tuple[int, str], Tensor], DynamicCache]:
    """K and V of tokens by layer and stream, as leaves of a graph, and the cache made of them."""
    clean, filled, leaves = DynamicCache(), DynamicCache(), {}
    with torch.no_grad():
        model.base_model(tokens, past_key_values=clean, use_cache=True)  # without a head, which nothing here reads
    for layer in range(info.n_layers):
        held = clean.layers[layer]
        for stream, part in (("k", held.keys), ("v", held.values)):
            leaves[layer, stream] = part.detach().clone().requires_grad_()
        filled.update(leaves[layer, "k"], leaves[layer, "v"], layer)
    return leaves, filled


def _likelihood(logits: Tensor, window: int) -> Tensor:
    """Log-likelihood of labels drawn from the logits [tokens, vocabulary] themselves."""
    odds = logits.detach().softmax(-1).cpu()
    labels = torch.multinomial(odds, 1, generator=generator("losses", window)).to(logits.device)
    return logits.log_softmax(-1).gather(1, labels).sum()
