"""The interface that every engine implements: token ids in, full-vocabulary logits out, K and V on tap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch

from kvlab.core.errors import Fault, NonFinite, UnknownName
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Placement
from kvlab.core.records import versions
from kvlab.core.testimony import Pool, Proof

Part = Literal["q", "k", "v"]

ContextCache = Mapping[tuple[int, Part], torch.Tensor]
"""K and V of a context, all layers: (layer, ``"k"`` or ``"v"``) -> (kv_heads, tokens, head_dim), the engine's dtype."""


class Left(dict):
    """A `ContextCache` of the tokens that an eviction left, K before its rotary embedding.

    Parameters
    ----------
    context : int
        Tokens that there were.
    places : sequence of Tensor
        By layer, rising positions of those that are left, of which all layers have as many.
    """

    def __init__(self, context: int, places: Sequence[torch.Tensor]):
        super().__init__()
        self.context, self.places = context, places


class Tap(Protocol):
    """What looks at every attention layer's tensors, and may replace them.

    Called once per layer and part with a tensor of shape (heads, tokens, head_dim) in the engine's
    dtype. The tensor that it returns takes the place of the one it was given; None leaves it alone.
    A tap that keeps a tensor copies it, as an engine may write over its own.

    At the placement ``pre_rope`` it sees Q, K and V as the layer projects them, after the norm of Q and K
    where the model has one and before the rotary embedding: what it makes of K is rotated afterwards.
    At ``post_rope`` it sees K after the rotary embedding, and V, which is never rotated and therefore the
    same: what attention reads, and what an engine's own cache holds. Q is not shown there.
    """

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """Look at `x`, and return its replacement or None."""


@dataclass(frozen=True)
class Storage:
    """What an engine holds K and V in, as found in the running engine.

    `dtype` is the format's name and never ``auto``, `cache` the class or backend that holds it, `itemsize` the bytes
    that a value takes.
    """

    dtype: str
    cache: str
    itemsize: int


@dataclass
class Reading:
    """What attention used in the passes of a `Engine.reading` block, as it used it.

    Parameters
    ----------
    tensors : dict of (layer, stream) to Tensor
        K after its rotary embedding and V, [kv_heads, tokens, head_dim], of all tokens that attention saw.
    attention : str
        The function or backend that did it.
    """

    tensors: dict[tuple[int, Part], torch.Tensor] = field(default_factory=dict)
    attention: str = ""

    @property
    def dtype(self) -> str:
        """Of the tensors; ``nothing`` where none was seen."""
        found = sorted({str(x.dtype).removeprefix("torch.") for x in self.tensors.values()})
        return " and ".join(found) or "nothing"


class Engine(ABC):
    """A loaded model that scores token windows.

    Parameters
    ----------
    info : ModelInfo
        The model.
    dtype : str
        ``float32`` or ``bfloat16``; weights, activations and cache.
    """

    name: str
    attention: str

    def __init__(self, info: ModelInfo, dtype: str):
        self.info, self.dtype = info, dtype

    @property
    @abstractmethod
    def device(self) -> str:
        """The device in words: ``cpu``, or the accelerator's name."""

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """What K and V are held in while a window is scored, a tap's own storage apart."""

    @property
    @abstractmethod
    def proof(self) -> Proof:
        """What only this engine has."""

    @property
    def pool(self) -> Pool | None:
        """The engine's own paged cache; None of one without pages."""
        return None

    @abstractmethod
    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> torch.Tensor:
        """Logits of one window in a single forward pass.

        Parameters
        ----------
        ids : sequence of int
            The window's tokens.
        first : int
            First position whose logits are wanted.
        tap : Tap, optional
            Sees, and may replace, K and V of every layer, and at ``pre_rope`` Q.
        placement : {"pre_rope", "post_rope"}
            On which side of the rotary embedding the tap sits; see `Tap`.

        Returns
        -------
        torch.Tensor, shape (len(ids) - 1 - first, vocab_size)
            Row i predicts ``ids[first + i + 1]`` from everything before it.

        Raises
        ------
        UnknownName
            For a placement that there is not.
        """

    def turned(self, layer: int, k: torch.Tensor) -> torch.Tensor | None:
        """K of a layer after the rotary embedding of its positions, to the bit; None where the engine does not tell.

        Parameters
        ----------
        layer : int
        k : torch.Tensor, shape (kv_heads, tokens, head_dim)
            Of the first tokens of a window, before the rotary embedding.
        """
        return None

    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope") -> torch.Tensor:
        """Logits of a window's tokens after its context, whose K and V are given instead of computed.

        Here the context goes through the pass all the same, and a tap puts `cache` where its K and V were; an engine
        that can start from a filled cache does so, and computes the tokens after the context alone.

        Parameters
        ----------
        ids : sequence of int
            The whole window.
        cache : ContextCache
            Of the first tokens; how many they are, its tensors say.
        placement : {"pre_rope", "post_rope"}
            Whether its K is the one before the rotary embedding or the one after it.

        Returns
        -------
        torch.Tensor, shape (len(ids) - 1 - context, vocab_size)
            As `score` with ``first=context``.

        Raises
        ------
        Fault
            Tokens left the cache (`Left`), and the engine cannot do without them.
        """
        if isinstance(cache, Left):
            raise Fault(
                f"{self.name} computes all tokens of a context, and has no cache that some of them could leave",
                code="fault.no-eviction",
            )
        return self.score(ids, context_of(cache), _Put(cache), placement)

    def write_over(
        self,
        ids: Sequence[int],
        cache: ContextCache,
        tokens: int,
        draft: Sequence[int] = (),
        stop: Sequence[int] = (),
        placement: Placement = "pre_rope",
    ) -> list[int]:
        """What greedy decoding writes after a prompt, of whose context K and V are given instead of computed.

        A draft is checked in one pass, and what it has right need not be written token by token (Leviathan et al.
        2023, arXiv 2211.17192, at temperature 0): but for rounding, the answer is the same with any draft.

        Parameters
        ----------
        ids : sequence of int
            The prompt: the context, and at least one token after it.
        cache : ContextCache
            As in `score_over`.
        tokens : int
            How many are written at most.
        draft : sequence of int
            What may be written.
        stop : sequence of int
            Tokens that end the answer, in which they do not stand.
        placement : {"pre_rope", "post_rope"}
            As in `score_over`.

        Raises
        ------
        Fault
            The engine cannot write over a given cache.
        """
        raise Fault(f"{self.name} does not write over a given cache", code="fault.no-writing")

    def score_heard(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """`score`, and what went into each layer; None for that from an engine that cannot start there."""
        return self.score(ids, first, tap, placement), None

    def score_from(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        first: int,
        tap: Tap,
        placement: Placement = "pre_rope",
    ) -> torch.Tensor:
        """As `score`, to the bit, with a tap that changes nothing below `layer`: the layers there are not run again.

        Parameters
        ----------
        layer : int
            The first that is run.
        inputs : sequence of torch.Tensor
            What `score_heard` gave for the same tokens and a tap that changes nothing.
        """
        raise Fault(f"{self.name} starts at its first layer alone", code="fault.first-layer")

    def score_over_heard(
        self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope"
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """`score_over`, and what went into each layer; None for that from an engine that cannot start there."""
        return self.score_over(ids, cache, placement), None

    def score_over_from(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        cache: ContextCache,
        placement: Placement = "pre_rope",
    ) -> torch.Tensor:
        """As `score_over`, to the bit, where the cache below `layer` is the one that `inputs` were taken over.

        Parameters
        ----------
        layer : int
            The first that is run.
        inputs : sequence of torch.Tensor
            What `score_over_heard` gave for the same tokens.
        """
        raise Fault(f"{self.name} starts at its first layer alone", code="fault.first-layer")

    @contextmanager
    def reading(self) -> Iterator[Reading | None]:
        """Look at what attention itself uses while a window is scored; None from an engine that cannot be looked into.

        What is seen is neither what a tap returned nor what a cache was given, but what arrived of both.
        """
        yield None

    def close(self) -> None:  # noqa: B027 (an engine that holds nothing has nothing to give back)
        """Give the model's memory back."""


class _Put:
    """Tap that puts a given K and V in the place of those of the first tokens."""

    def __init__(self, cache: ContextCache):
        self._cache = cache

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """See `Tap`."""
        if part == "q":
            return None
        given = self._cache[layer, part]
        return torch.cat([given.to(x.dtype), x[:, given.shape[1] :]], dim=1)


def until(written: list[int], stop: Sequence[int]) -> list[int]:
    """What stands before the first token that ends an answer."""
    return written[: next((i for i, token in enumerate(written) if token in stop), len(written))]


def context_of(cache: ContextCache) -> int:
    """Tokens of the context that a cache is of; an eviction left fewer of them."""
    return cache.context if isinstance(cache, Left) else cache[0, "k"].shape[1]


def gone_from(cache: ContextCache) -> int:
    """Tokens of a context that left its cache."""
    return context_of(cache) - cache[0, "k"].shape[1]


def refuse_unknown_placement(placement: str) -> None:
    """`UnknownName` for a placement that there is not."""
    if placement not in get_args(Placement):
        raise UnknownName("placement", placement, get_args(Placement))


def proof_of(model: torch.nn.Module, attention: type, cache_blocks: int | None) -> Proof:
    """The proof of an engine by its live model."""
    library = type(model).__module__.partition(".")[0]
    installed = versions()
    return Proof(
        library=library,
        version=installed.get(library, "not installed"),
        model=_named(type(model)),
        attention=_named(attention),
        cache_blocks=cache_blocks,
    )


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_broken_weights(model: torch.nn.Module, info: ModelInfo) -> None:
    """`NonFinite` names the first weight that holds NaN or infinity."""
    for name, weight in model.named_parameters():
        ends = torch.stack(weight.aminmax()) if weight.numel() else weight  # NaN is in both; a mask would take memory
        if not torch.isfinite(ends).all():
            raise NonFinite(f"weight {name!r} of {info.path} holds NaN or infinity")
