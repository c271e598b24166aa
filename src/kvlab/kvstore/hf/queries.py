"""The last token's queries of every layer, and the attention that they give to each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from kvlab.cache.hf.rope import turns_by_layer
from kvlab.core.errors import CapabilityError, LayoutMismatch
from kvlab.core.model import ModelInfo
from kvlab.engines.hf.rotary import Rotary
from kvlab.engines.hooks import attention_layers, installed, norms_heads_first


class Watched(Protocol):
    """What has to be known of a model whose queries are noted: itself, its shape and its rotary module."""

    model: nn.Module
    info: ModelInfo
    rotary: Rotary


class LastQueries:
    """Notes the last token's queries while the model runs.

    Parameters
    ----------
    model : Watched
        A `PagedModel`.
    """

    def __init__(self, model: Watched):
        self._model = model
        self._rotary = model.rotary  # asked for here, so that an unfit one is refused before it runs
        self._seen: list[Tensor | None] = [None] * model.info.n_layers
        layers = attention_layers(model.model, model.info)
        self._places = [(projection(attention), self._hook(layer)) for layer, attention in enumerate(layers)]

    def _hook(self, layer: int) -> Callable:
        info = self._model.info
        turned = norms_heads_first(info)

        def note(_module, _inputs, output: Tensor) -> None:
            output = output.transpose(1, 2) if turned else output
            self._seen[layer] = output.detach().reshape(-1, info.n_heads, info.head_dim)[-1]

        return note

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In place for the length of a ``with`` block."""
        with installed(self._places):
            yield

    def fork(self) -> LastQueries:
        """Another that has seen the same."""
        twin = LastQueries(self._model)
        twin._seen[:] = self._seen
        return twin

    def at(self, position: int) -> Tensor:
        """What was seen of the last token, which stands at this position.

        Returns
        -------
        Tensor
            float32 [layers, q_heads, head_dim] on the CPU, after the rotary embedding.

        Raises
        ------
        CapabilityError
            No forward has run yet, or it went past a layer's projection.
        """
        missing = [layer for layer, seen in enumerate(self._seen) if seen is None]
        if missing:
            raise CapabilityError(
                f"layer {missing[0]} has shown no query; nothing can be scored by it", code="capability.no-query"
            )
        queries = torch.stack(self._seen)
        own = turns_by_layer(self._rotary, torch.tensor([[position]], device=queries.device), queries)
        return torch.stack([rows[0].redo(q[:, None], 0)[:, 0] for rows, q in zip(own, queries, strict=True)]).cpu()


def projection(attention: nn.Module) -> nn.Module:
    """What returns a layer's queries before the rotary embedding."""
    return getattr(attention, "q_norm", None) or attention.q_proj


def attention_mass(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """How the softmax of one token's queries is spread over chunks.

    Parameters
    ----------
    queries : Tensor
        [layers, q_heads, head_dim], after the rotary embedding.
    keys : Tensor
        [layers, kv_heads, tokens, head_dim], K of all tokens in logical order, in the same basis.
    chunk_tokens : int
    scaling : float
        Of the scores; as a rule head_dim ** -0.5.

    Returns
    -------
    Tensor
        float64 [chunks], the mean over layers and query heads, each against its own KV head; the last chunk may be
        a part of one. They add up to 1.

    Raises
    ------
    LayoutMismatch
        When queries and keys do not fit.
    """
    layers, heads, tokens, dim = keys.shape
    if queries.shape[0] != layers or queries.shape[2] != dim or queries.shape[1] % heads or not tokens:
        raise LayoutMismatch(f"queries {list(queries.shape)} do not fit keys {list(keys.shape)}", code="layout.queries")
    grouped = queries.double().unflatten(1, (heads, -1))
    scores = grouped @ keys.double().transpose(-1, -2) * scaling
    mass = scores.softmax(-1).mean((0, 1, 2))
    whole = nn.functional.pad(mass, (0, -tokens % chunk_tokens))
    return whole.view(-1, chunk_tokens).sum(-1)
