"""Mechanisms by name, as `kvlab measure --mechanism` takes them: `block_sparse:block=32,top_k=8`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvlab.attention.layer_plan import LayerPlan, by_length
from kvlab.attention.patterns import PATTERNS, BlockSparse, ChunkSummary, Full, Pattern
from kvlab.core.errors import UnknownName, UserError


@dataclass(frozen=True)
class Sparse:
    """A pattern in every layer."""

    name: str
    pattern: Pattern

    def plan(self, layers: int, _tokens: int) -> LayerPlan:
        """For a model of so many layers."""
        return (self.pattern,) * layers


@dataclass(frozen=True)
class ByLength:
    """The threshold rule of `layer_plan.by_length`."""

    name: str
    full: int = 512
    sparse: int = 4096

    def plan(self, layers: int, tokens: int) -> LayerPlan:
        """For a model of so many layers, and a context."""
        return by_length(layers, tokens, self.full, self.sparse, (BlockSparse(), ChunkSummary()))


@dataclass(frozen=True)
class Latent:
    """K and V of a layer from `rank` numbers a token; the first `sinks` tokens are stored as they are."""

    name: str
    rank: int = 128
    sinks: int = 4

    @property
    def told(self) -> str:
        """Its name with all settings."""
        return f"latent:rank={self.rank},sinks={self.sinks}"


@dataclass(frozen=True)
class Eviction:
    """Tokens of a context leave the cache, for good; the others keep their positions.

    Parameters
    ----------
    policy : str
        What stays beside the first tokens: ``sinks``, the last ones; ``small_keys``, those whose keys have a small
        norm; ``attention``, those that the last queries look at. See `kvlab.attention.selection`.
    kept, percent : int
        How many tokens stay, or how many of a hundred; one of both is 0.
    sinks, recent : int
        First tokens that stay in any case, and last ones, whose queries score.
    """

    name: str
    policy: str
    kept: int = 0
    percent: int = 0
    sinks: int = 4
    recent: int = 32

    def budget(self, context: int) -> int:
        """Tokens of a context that stay."""
        return min(context, self.kept or max(1, context * self.percent // 100))

    @property
    def told(self) -> str:
        """Its name with all settings."""
        size = f"kept={self.kept}" if self.kept else f"percent={self.percent}"
        last = f",recent={self.recent}" if numbered(self.policy) else ""
        return f"{self.policy}:{size},sinks={self.sinks}{last}"


Mechanism = Sparse | ByLength | Latent | Eviction
EVICTIONS = ("sinks", "small_keys", "attention")
PLACE = 2  # bytes of the number of a token that is left, in each layer
KINDS = (*(kind for kind in PATTERNS if kind != Full.kind), "by_length", "latent", *EVICTIONS)


def numbered(policy: str) -> bool:
    """Whether an eviction has to store where its tokens stood: those of a window after sinks are known."""
    return policy != "sinks"


def mechanism(text: str) -> Mechanism:
    """What a name stands for.

    Raises
    ------
    UnknownName
        There is no such mechanism, or it has no such setting.
    UserError
        A setting is no whole number, or out of its range.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise UnknownName("mechanism", kind, KINDS)
    if kind in EVICTIONS:
        return _eviction(text, kind, rest)
    made = {"by_length": ByLength, "latent": Latent}.get(kind) or PATTERNS[kind]
    given = _settings(kind, rest, [one.name for one in fields(made) if one.name != "name"])
    if kind in PATTERNS:
        return Sparse(text, made(**given))
    _refuse_none(text, given)
    return made(text, **given)


def _eviction(text: str, policy: str, rest: str) -> Eviction:
    given = _settings(policy, rest, ["kept", "percent", "sinks", *(["recent"] if numbered(policy) else [])])
    _refuse_none(text, given)
    if ("kept" in given) == ("percent" in given) or given.get("percent", 1) >= 100:
        raise UserError(
            f"{text}: say how many tokens stay, by kept=96 or by percent=20, which is below 100", code="user.no-budget"
        )
    return Eviction(text, policy, **given)


def _refuse_none(text: str, given: Mapping[str, int | str]) -> None:
    if any(value < (name != "sinks") for name, value in given.items()):
        raise UserError(f"{text}: allowed are whole numbers, 1 or more")


def _settings(kind: str, rest: str, allowed: list[str]) -> Mapping[str, int | str]:
    given = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in allowed:
            raise UnknownName(f"setting of {kind}", name, allowed)
        if name != "score" and not value.isdecimal():
            raise UserError(f"{kind}: {name} is {value!r}; allowed: a whole number")
        given[name] = value if name == "score" else int(value)
    return given
