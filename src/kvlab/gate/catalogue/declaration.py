"""How a field of a row is declared beside its type, and what everything that is generated reads of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import Field

from kvlab.gate.catalogue.kinds import Joined

Group = Literal["mechanism", "identity", "measured", "observed"]
PREFIX = "KVLAB_ROW_"  # no variable by which a run of this project is steered begins so
KINDS = {str: "a text", int: "a whole number of at most 63 bits", float: "a number"}


@dataclass(frozen=True)
class RowColumn:
    """What is declared of a field of `RowFields`, for everything that is generated.

    Parameters
    ----------
    text : str
        One line for help, schema and docs.
    low, high : float or None
        Inclusive bounds of a number.
    unit : str
        Of a number.
    groupable : bool
        Whether a query may group by it.
    keyed : bool
        Whether it is part of what `row_id` is the digest of.
    judged : bool
        Whether evidence says what it has to be. False of times and memory, which hang on what else the machine did:
        they are printed as *not judged*, and nothing is chosen by them.
    name, type, group
        Filled in from the model: in snake_case, as in rows and in the database; what stands beside None; and who states
        it, where `mechanism` and `identity` are declared, `measured` and `observed` come from a run.
    """

    text: str
    low: float | None = None
    high: float | None = None
    unit: str = ""
    groupable: bool = False
    keyed: bool = False
    judged: bool = True
    name: str = ""
    type: Any = None
    group: Group = "identity"

    def __call__(self, schema: dict[str, Any]) -> None:
        """Write the unit into the field's JSON schema, which pydantic hands over."""
        if self.unit:
            schema["description"] += f" [{self.unit}]"

    @property
    def kind(self) -> type:
        """str, int or float."""
        return str if get_origin(self.type) is Literal else next(iter(get_args(self.type)), self.type)

    @property
    def joined(self) -> bool:
        """Whether several of `choices` may be joined by ``+``, as in ``kv_quantization+speculative_decoding``."""
        return any(isinstance(one, Joined) for one in get_args(self.type))

    @property
    def choices(self) -> tuple[str, ...]:
        """Its words, where the vocabulary is closed."""
        if get_origin(self.type) is Literal:
            return get_args(self.type)
        return next((one.words for one in get_args(self.type) if isinstance(one, Joined)), ())

    @property
    def kebab(self) -> str:
        """The name in configurations and, after two dashes, as a flag."""
        return self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The name in the environment.

        The published fields keep their published names. Others carry a prefix: MODEL, RUN or DEVICE mean something
        else in many environments, and would be read without anybody having declared them.
        """
        return self.name.upper() if self.group == "mechanism" else PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """What it can hold, in words."""
        if self.choices:
            return ", ".join(self.choices) + (", or several joined by +" if self.joined else "")
        ends = (("from", self.low), ("to", self.high))
        told = [KINDS[self.kind], *(f"{word} {end}" for word, end in ends if end is not None)]
        return " ".join(told) + (f" ({self.unit})" if self.unit else "")


def column(text: str, low: float | None = None, high: float | None = None, **marks) -> Any:
    """A field that may be left out; parameters as those of `RowColumn`."""
    declared = RowColumn(text, low, high, **marks)
    return Field(default=None, description=text, ge=low, le=high, json_schema_extra=declared)
