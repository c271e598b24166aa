"""What a registry's two files may hold: a mechanism, a metric, an eval.

Each is well formed by itself; what it says of the others is checked by `kvlab.gate.registry.faults`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from kvlab.core.codec_settings import Frozen

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]  # no "+": it joins combined mechanisms
Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Allowed = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # an interval of any width cannot fit into a loss of 0


class RegistryEntry(Frozen):
    """Of a registry file: types are taken as they are written, so ``"yes"`` is no truth value and ``2.0`` no count."""

    model_config = ConfigDict(strict=True)


class Mechanism(RegistryEntry):
    """Something that may be done to a KV cache, or to decoding.

    Parameters
    ----------
    mechanism, variant : str
        Its name; a variant that ends in ``_class`` is an umbrella.
    kind : str
        Whether it is the thing compared with, compresses, or speculates.
    method, scope : str or None
        What a row says in `compression_method` and `compression_scope`; None where nothing is compressed.
    lossless : bool
        No evidence of quality is asked for. True of the mechanism, which is no proof of an implementation.
    kv_cache_dtypes : tuple of str
        What the engine may be observed to store; ``auto`` is a request and therefore none of them.
    description : str
    umbrella : bool
        Unlike methods share it: it earns `supported` only for an implementation that the row names.
    codecs : tuple of str
        Names of `kvlab.core.recipe.CODECS` that may be observed to run; empty when none may.
    backends : tuple of str
        Classes of attention that have to run, where the engine's own cache holds what the codecs write; empty where a
        codec runs beside that cache, or none does.
    patterns : tuple of str
        Kinds of reading or keeping less that may be observed to run; empty where all is kept and read.
    evals : tuple of str
        Evals whose evidence may carry a claim of it; empty when any may (`Registry.carries`).
    must_show : tuple of str
        Scopes of evals, of each of which evidence has to be attached: a loss that shows in one need not show in
        another, so who may choose the eval chooses the outcome.
    needs_draft : bool
        A row has to name its draft model and acceptance rate.
    deprecated : str or None
        What to use instead; such an entry is still known, so that old rows can be read.
    sources : tuple of str
        ``arXiv:NUMBER`` or a URL.
    """

    mechanism: Name
    variant: Name
    kind: Literal["baseline", "compression", "speculative"]
    method: Name | None
    scope: Literal["kv_cache", "attention"] | None
    lossless: bool
    kv_cache_dtypes: Names
    description: Text
    umbrella: bool = False
    codecs: Names = ()
    backends: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    evals: Names = ()
    must_show: Names = ()
    patterns: Names = ()
    needs_draft: bool = False
    deprecated: Text | None = None
    sources: Annotated[tuple[Text, ...], Field(strict=False)] = ()

    @property
    def name(self) -> str:
        """``mechanism/variant``, as messages and tables show it."""
        return f"{self.mechanism}/{self.variant}"


class Metric(RegistryEntry):
    """One number of an eval and how much of it may be lost.

    Parameters
    ----------
    key : str
    direction : str
        Which way is better.
    margin : float
        Allowed loss, in `unit`: fixed, however many items are scored.
    unit : str
        Of the metric, its margin and its floor.
    why : str
        The reason for the value of the margin.
    floor : float or None
        What the variant itself must reach: from above when higher is better, from below when lower is.
    lowest, highest : float or None
        What the number can be at all; None where it has no such end.
    rate : bool
        Each item is answered, or not, or in part: its score is from 0 to 1, and the interval follows from the counts.
    untouched : float or None
        What the baseline has by definition, as a KL of 0: the metric compares with the baseline already. None where
        the baseline has a value of its own.
    """

    key: Name
    direction: Literal["higher", "lower"]
    margin: Allowed
    unit: Text
    why: Text
    floor: Finite | None = None
    lowest: Finite | None = None
    highest: Finite | None = None
    rate: bool = False
    untouched: Finite | None = None

    @property
    def range(self) -> tuple[float | None, float | None]:
        """What the number can be at all: from 0 to 1 of a rate."""
        return (0.0, 1.0) if self.rate else (self.lowest, self.highest)


class Eval(RegistryEntry):
    """A measurement of quality whose evidence may carry a claim.

    Parameters
    ----------
    quality_eval_id, version : str
        Evidence of another version does not count.
    harness : str
        What runs it; ``kvlab`` for this project's own.
    task : str or None
        The harness's name of it; None for this project's own.
    scope : str
        What it is about.
    metrics : tuple of Metric
        All of them have to lose less than their margins.
    baseline_required : bool
        False only if every metric has a floor, which then decides alone.
    band : (int, int)
        Lowest and highest number of context tokens that it speaks for.
    generates : bool
        Whether tokens are decoded over the coded cache; False when one prefill is scored.
    description : str
    own_contexts : bool
        Whether its texts have a length of their own, to which `band` belongs, whatever context a row has.
    sources : tuple of str
    """

    quality_eval_id: Name
    version: Text
    harness: Name
    task: Name | None
    scope: Name
    metrics: Annotated[tuple[Metric, ...], Field(strict=False, min_length=1)]
    baseline_required: bool
    band: Annotated[tuple[Annotated[int, Field(ge=1)], int], Field(strict=False)]
    generates: bool
    description: Text
    own_contexts: bool = False
    sources: Annotated[tuple[Text, ...], Field(strict=False)] = ()

    def covers(self, context_tokens: int) -> bool:
        """Whether it speaks for a context of that many tokens."""
        return self.band[0] <= context_tokens <= self.band[1]
