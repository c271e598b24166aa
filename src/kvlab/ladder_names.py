"""The codecs that a parameter may name where codecs are compared, and those of them that can be conditioned."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from kvlab.errors import suggestion
from kvlab.recipe import CONTROLS, STREAMS, Conditioned

LADDERED = tuple(sorted(set(STREAMS) - set(CONTROLS)))
CONDITIONABLE = tuple(name for name in LADDERED if issubclass(STREAMS[name], Conditioned))


def _one_of(allowed: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in allowed:
            raise ValueError(f"{name!r} is not allowed here; allowed: {', '.join(allowed)}{suggestion(name, allowed)}")
        return name

    return AfterValidator(check)


def suggested(allowed: tuple[str, ...]) -> Any:
    """Names that a validator allows, for the JSON schema: editors offer them."""
    return Field(json_schema_extra={"enum": list(allowed)})


Laddered = Annotated[str, _one_of(LADDERED), suggested(LADDERED)]
Conditionable = Annotated[str, _one_of(CONDITIONABLE), suggested(CONDITIONABLE)]
