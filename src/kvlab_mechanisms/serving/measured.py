"""What steps of an engine took, by the kind of cache, as a file that a study wrote and the simulator reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlab.core.errors import UnknownName, UserError
from kvlab.core.records import read_json
from kvlab_mechanisms.serving.predictor import STEP, fit, step_features
from kvlab_mechanisms.serving.worker import Costs

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServedVariant(BaseModel):
    """A kind of cache: what a token takes, and what its steps took.

    Parameters
    ----------
    token_bytes : float
        Of K and V of a token, all layers together, by the engine's own count: its memory / the tokens that it holds.
    page : int
        Tokens of a block.
    seconds : list of float
        A coefficient for each of `kvlab_mechanisms.serving.predictor.STEP`.
    half_width : float or None
        Of a step's interval, seconds.
    rows : int
        Steps that were measured.
    undetermined : list of str
        Coefficients that the steps do not tell from others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    token_bytes: Positive
    page: Annotated[int, Field(ge=1, le=4096)]
    seconds: Annotated[list[NotNegative], Field(min_length=len(STEP), max_length=len(STEP))]
    half_width: NotNegative | None
    rows: Annotated[int, Field(ge=1)]
    undetermined: list[str]

    @property
    def costs(self) -> Costs:
        """Seconds of a step, by what is in it."""
        step, prefill, pair, decode, byte = self.seconds
        return Costs(step, prefill, pair, decode, byte * self.token_bytes)


def arm_of(steps: list[dict], memory_bytes: float, tokens: int, page: int) -> ServedVariant:
    """Fit the steps of one kind of cache; each has `seconds`, `prefill`, `pairs`, `decodes` and `read` tokens."""
    size = memory_bytes / tokens
    found = fit(rows_of(steps, size), [one["seconds"] for one in steps])
    return ServedVariant(
        token_bytes=size,
        page=page,
        seconds=found.coefficients.tolist(),
        half_width=found.half_width if np.isfinite(found.half_width) else None,
        rows=len(steps),
        undetermined=list(found.undetermined),
    )


def rows_of(steps: list[dict], token_bytes: float) -> np.ndarray:
    """Features [n, 5] of measured steps."""
    prefill, pairs, decodes, read = (
        np.array([one[name] for one in steps], float) for name in ("prefill", "pairs", "decodes", "read")
    )
    return step_features(prefill, pairs, decodes, read * token_bytes)


def read_measured(path: Path) -> dict[str, ServedVariant]:
    """The arms of a file.

    Raises
    ------
    UserError
        It is no such file; the message names the first thing that is wrong.
    """
    data = read_json(path)
    arms = data.get("arms") if isinstance(data, dict) else None
    if not isinstance(arms, dict) or not arms:
        raise UserError(f"{path} holds no 'arms'; give what `make bench-load` wrote")
    return {name: _valid(one, f"{path}: {name}") for name, one in arms.items()}


def _valid(given: object, where: str) -> ServedVariant:
    try:
        return ServedVariant.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{where}.{place}: {first['msg']}; given {first['input']!r:.40}") from None


def arm_named(arms: dict[str, ServedVariant], name: str) -> ServedVariant:
    """One of them; `UnknownName` with the nearest where there is none."""
    if name not in arms:
        raise UnknownName("codec", name, arms)
    return arms[name]
