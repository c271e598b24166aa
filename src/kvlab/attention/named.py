"""Mechanisms by name, as `kvlab measure --mechanism` takes them: `block_sparse:block=32,top_k=8`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvlab.attention.layer_plan import LayerPlan, by_length
from kvlab.attention.patterns import PATTERNS, BlockSparse, ChunkSummary, Full, Pattern
from kvlab.base.errors import UnknownName, UserError


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


Mechanism = Sparse | ByLength | Latent
KINDS = (*(kind for kind in PATTERNS if kind != Full.kind), "by_length", "latent")


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
    made = {"by_length": ByLength, "latent": Latent}.get(kind) or PATTERNS[kind]
    given = _settings(kind, rest, [one.name for one in fields(made) if one.name != "name"])
    if kind in PATTERNS:
        return Sparse(text, made(**given))
    if any(value < (name != "sinks") for name, value in given.items()):
        raise UserError(f"{text}: allowed are whole numbers, 1 or more")
    return made(text, **given)


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
