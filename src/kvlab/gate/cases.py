"""A row as the rules look at it: its well-formed fields, its registered mechanisms, what its evidence amounts to."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvlab.gate.catalogue.columns import RowFields
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.catalogue.values import Value, taken
from kvlab.gate.evidence import Derived, Evidence, status, well_formed
from kvlab.gate.multiple_testing import Standing
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import Mechanism, Registry
from kvlab.gate.replay import Replay
from kvlab.gate.waivers import Waiver

BASELINE = "baseline"
NONE = (None, "", "none")  # how a variant, a codec or a way of speculating says that there is none
DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class Context:
    """What rows are judged against.

    Parameters
    ----------
    registry : Registry
    current : mapping of str to mapping, optional
        By model what is current now (``model_hash``, ``corpus_hash``, ``code``); see `kvlab.gate.evidence.status`.
    waivers : tuple of Waiver
    today : date, optional
        The day that waivers are held against. Without it every waiver has expired: nothing is read from a clock.
    """

    registry: Registry
    current: Mapping[str, Mapping[str, str]] | None = None
    waivers: tuple[Waiver, ...] = ()
    today: datetime.date = field(default=datetime.date.max)


@dataclass(frozen=True)
class CombinedPart:
    """One of the mechanisms that a row combines; `mechanism` is None when the pair is not registered."""

    name: str
    variant: str
    mechanism: Mechanism | None

    def is_of(self, kind: str) -> bool:
        """Whether it is registered, as a mechanism of this kind."""
        return self.mechanism is not None and self.mechanism.kind == kind


@dataclass(frozen=True)
class Case:
    """One row in its context.

    `standing` is that among the rows that it is judged with, None where it is judged alone; `replay` what measuring
    again found of it, None where nothing was; `others` what the rows beside it say otherwise.
    """

    row: Row
    context: Context
    standing: Standing | None = None
    replay: Replay | None = None
    others: tuple[Reason, ...] = ()

    @cached_property
    def _taken(self) -> tuple[RowFields, list[Reason]]:
        return taken(self.row.values)

    @property
    def fields(self) -> RowFields:
        """The fields that hold what the catalogue allows; None where the row says nothing of one."""
        return self._taken[0]

    @cached_property
    def values(self) -> dict[str, Value]:
        """The same by name."""
        return self.fields.model_dump()

    @property
    def malformed(self) -> list[Reason]:
        """What the catalogue does not allow."""
        return self._taken[1]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The combined mechanisms, as in ``kv_quantization+speculative_decoding``; empty when none is declared."""
        mechanism = self.fields.mechanism
        return () if mechanism is None else tuple(mechanism.split("+"))

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Their variants, as in ``fp8_e4m3+mtp``."""
        return tuple((self.fields.mechanism_variant or "none").split("+"))

    @cached_property
    def parts(self) -> tuple[CombinedPart, ...]:
        """Each mechanism with its variant; empty when their numbers differ or none is declared."""
        if len(self.names) != len(self.variants):
            return ()
        pairs = zip(self.names, self.variants, strict=True)
        return tuple(
            CombinedPart(name, variant, self.context.registry.mechanism(name, variant)) for name, variant in pairs
        )

    @property
    def registered(self) -> bool:
        """Whether every mechanism is declared as one that the registry knows."""
        return bool(self.parts) and all(part.mechanism for part in self.parts)

    @property
    def lossy(self) -> bool:
        """Whether some registered mechanism may change what the model says."""
        return any(part.mechanism and not part.mechanism.lossless for part in self.parts)

    def of_kind(self, kind: str) -> tuple[Mechanism, ...]:
        """Its registered mechanisms of a kind."""
        return tuple(part.mechanism for part in self.parts if part.mechanism and part.is_of(kind))

    @property
    def compresses(self) -> bool:
        """Whether it declares a compression."""
        return bool(self.of_kind("compression"))

    @property
    def patterned(self) -> tuple[Mechanism, ...]:
        """Its registered mechanisms that read or keep less by a pattern."""
        return tuple(one for one in self.of_kind("compression") if one.patterns)

    @property
    def stores_all(self) -> bool:
        """Whether all that it declares acts on reading: its cache is as large as ever."""
        kinds = self.of_kind("compression")
        return bool(kinds) and all(one.patterns and one.scope == "attention" for one in kinds)

    @property
    def speculates(self) -> bool:
        """Whether it declares speculative decoding."""
        return bool(self.of_kind("speculative"))

    @property
    def native_bits(self) -> int | None:
        """Bits of an element of the uncompressed cache; None when the dtype is not known."""
        return DTYPE_BITS.get(self.fields.dtype or "")

    @property
    def held_bits(self) -> float | None:
        """Bits per element of the cache, from the bytes that were counted; None when they were not."""
        held, elements = self.fields.kv_bytes, self.fields.kv_values
        return None if held is None or not elements else 8 * held / elements

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """Its evidence, as far as it is well formed, whatever else may be wrong with it."""
        return well_formed(self.row.evidence)

    @property
    def cited(self) -> Evidence | None:
        """The evidence of the eval that the row names, which its own counts are of; of none, the first."""
        named = self.fields.quality_eval_id
        return next((one for one in self.evidence if one.quality_eval_id == named), next(iter(self.evidence), None))

    @cached_property
    def own(self) -> Derived:
        """The status that its evidence earns by itself, the judgements, and what is wrong with the evidence."""
        return status(self.values, self.row.evidence, self.context.registry, self.context.current)

    @property
    def tested(self) -> bool:
        """Whether luck could certify it: it has evidence, and is something else than the baseline."""
        return bool(self.row.evidence and self.names) and set(self.names) != {BASELINE}

    @property
    def derived(self) -> Derived:
        """As `own`, but that nothing is shown of a row whose evidence does not hold among all that were tested."""
        own, standing = self.own, self.standing
        if standing is None or standing.certifies or any(j.word != "within" for j in own.judgements) or own.reasons:
            return own
        status = "pending" if own.status == "completed" else own.status
        return own._replace(status=status, reasons=(standing.reason(),))
