"""The fields of a row, each declared once, as one typed model; a new field is one new line of it and nothing else.

Configuration, environment, flags, JSON schemas and database columns are generated from `RowFields` by
`kvlab.gate.catalogue.generated`. The fourteen published fields come first, in their published order. Each class adds
what somebody else states: a person, what measured, what watched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvlab.gate.catalogue.kinds import MOST_EXACT, Joined, Text, Whole

Group = Literal["mechanism", "identity", "measured", "observed"]
COMPRESSION = ("kv_quantization", "kv_compression", "compressed_attention")
SPECULATIVE = ("speculative_decoding",)
MECHANISMS = ("baseline", *COMPRESSION, *SPECULATIVE)
SCOPES = ("kv_cache", "attention")
Status = Literal["pending", "completed", "failed", "not_required"]
STATUSES: tuple[Status, ...] = get_args(Status)
Tier = Literal["supported", "reviewed_preview", "too_lossy", "gated", "artifact_only", "unsupported"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""What a row may claim (`support_status`), best first; `TOO_LOSSY` is not a published one: a loss that was found."""
TOO_LOSSY: Tier = "too_lossy"


DECLARED: tuple[Group, ...] = ("mechanism", "identity")
"""Groups that a person may state; what was measured or observed only a measuring stage writes."""
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
    name, type
        In snake_case, as in rows and in the database, and the type that stands beside None: filled in from the model.
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

    def __call__(self, schema: dict[str, Any]) -> None:
        """Write the unit into the field's JSON schema, which pydantic hands over."""
        if self.unit:
            schema["description"] += f" [{self.unit}]"

    @property
    def group(self) -> Group:
        """Who states it: `mechanism` and `identity` are declared, `measured` and `observed` come from a run."""
        return next(group for group, fields in ADDED_BY.items() if self.name in fields.model_fields)

    @property
    def kind(self) -> type:
        """str, int or float."""
        return str if get_origin(self.type) is Literal else get_args(self.type)[0] if get_args(self.type) else self.type

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


class MechanismFields(BaseModel):
    """The published fields: what was done, and what is declared of it.

    None and the empty text say nothing and are None. A whole number is a number too; nothing else changes its kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mechanism: Annotated[str, Joined(MECHANISMS)] | None = column(
        "what was changed about the engine; several joined by +", groupable=True, keyed=True
    )
    mechanism_variant: Text | None = column("which of its registered variants", groupable=True, keyed=True)
    compression_method: Text | None = column("name of the compressing method", groupable=True)
    compression_scope: Annotated[str, Joined(SCOPES)] | None = column("what is compressed", groupable=True)
    # A factor above 2 is the inverse by mistake (4 for a quarter): nobody stores twice the original.
    compression_ratio: float | None = column(
        "stored bytes over those of the uncompressed cache, everything counted; below 1 is smaller", low=1e-4, high=2
    )
    compression_overhead_ms: float | None = column(
        "time that compressing takes per request", unit="ms", low=0, judged=False
    )
    decompression_overhead_ms: float | None = column(
        "time that decompressing takes per request", unit="ms", low=0, judged=False
    )
    quality_eval_id: Text | None = column("registered evaluation that the claim rests on", groupable=True)
    quality_eval_status: Status | None = column(
        "what is declared of that evaluation; the gate derives its own", groupable=True
    )
    quality_delta_summary: Text | None = column("remark on the quality; never parsed")
    draft_model_id: Text | None = column("model that proposes tokens, for speculative decoding", keyed=True)
    speculative_acceptance_rate: float | None = column("accepted over proposed tokens", low=0, high=1, judged=False)
    speculative_wasted_tokens: Whole | None = column(
        "proposed tokens that were thrown away", unit="tokens", low=0, judged=False
    )
    mechanism_notes: Text | None = column("remark; for a variant that is a class, its implementation")

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, field: ValidationInfo) -> Any:
        if type(value) is int and abs(value) > MOST_EXACT and BY_NAME[field.field_name].kind is float:
            raise PydanticCustomError("value_out_of_range", "a whole number that no float holds")
        return None if value == "" else value


class DeclaredFields(MechanismFields):
    """And which row it is: all that a person may state.

    `keyed` fields name a configuration. Digests of model, corpus and code are left out: when one of them changes the
    row is the same row, now stale, and a comparison of two runs shows it as changed instead of as gone and new. `run`
    and `support_status` say where a row was kept and what is claimed of it, not what was measured.
    """

    row_id: Text | None = column("name of the configuration; a digest unless given")
    model: Text | None = column("slug of the model", groupable=True, keyed=True)
    model_hash: Text | None = column("digest of the model's files")
    engine: Text | None = column("engine that ran it", groupable=True, keyed=True)
    device: Text | None = column("device that it ran on", groupable=True, keyed=True)
    dtype: Text | None = column("dtype of the engine", groupable=True, keyed=True)
    protocol: Text | None = column("when the context is coded", groupable=True, keyed=True)
    context_tokens: Whole | None = column("length of the context", unit="tokens", low=1, keyed=True)
    context_band: Text | None = column("range of context lengths that the claim is for", groupable=True, keyed=True)
    corpus_hash: Text | None = column("digest of the evaluated text")
    recipe_id: Text | None = column("digest of everything that decides what the codec does", groupable=True, keyed=True)
    calibration: Text | None = column("digest of what the codec was fitted with; nothing where nothing was")
    bits: Whole | None = column("bits per value that the codec was asked for", unit="bits", low=1, groupable=True)
    code: Text | None = column("digest of the code that measured it")
    support_status: Tier | None = column("tier that is claimed", groupable=True)
    run: Text | None = column("run that the row belongs to", groupable=True)


class MeasuredFields(DeclaredFields):
    """And what only a measuring stage writes."""

    throughput_tok_s: float | None = column(
        "tokens that are generated, or scored", unit="tokens/s", low=0, judged=False
    )
    ttft_p50_ms: float | None = column("median time to the first token", unit="ms", low=0, judged=False)
    kv_bytes: Whole | None = column("bytes stored for the whole cache, everything counted", unit="bytes", low=0)
    kv_values: Whole | None = column("elements of K and of V in that cache", unit="values", low=0)
    read_bytes: Whole | None = column(
        "bytes that a step reads of all contexts that kv_values counts", unit="bytes", low=0
    )
    bits_per_value: float | None = column("stored bits per element of the whole cache", unit="bits", low=0)
    peak_memory_gb: float | None = column("most memory held", unit="GB", low=0, judged=False)
    # KL of nothing changed is zero but for rounding, which may be on either side.
    kl: float | None = column("divergence from the uncompressed model, full vocabulary", unit="nats/token", low=-1e-6)
    delta_nll: float | None = column("loss beside the uncompressed model's", unit="nats/token")
    top1_agreement: float | None = column("share of tokens with the same most likely successor", low=0, high=1)


class RowFields(MeasuredFields):
    """And what was seen to run: all fields of a row."""

    kv_cache_dtype: Text | None = column("dtype that the engine's cache really holds", groupable=True)
    cache_class: Text | None = column("class of the engine's cache object")
    # What the running engine's own cache is, by its own count: its pages, all layers together.
    backend: Text | None = column("class, with its module, that computed attention over the engine's own cache")
    block_tokens: Whole | None = column("tokens of a block of the engine's cache", unit="tokens", low=1)
    block_bytes: Whole | None = column("bytes of a block, all layers", unit="bytes", low=1)
    block_values: Whole | None = column("elements of K and of V that a block stands for", unit="values", low=1)
    cache_blocks: Whole | None = column("blocks that the engine made", low=1)
    cache_memory_bytes: Whole | None = column("memory that it was given for them", unit="bytes", low=1)
    capacity_tokens: Whole | None = column("tokens that fit into them", unit="tokens", low=1)
    exact_bytes: Whole | None = column(
        "bytes of a request's tokens that are read exact, beside blocks", unit="bytes", low=1
    )
    exact_requests: Whole | None = column("requests whose exact tokens are taken from that memory", low=1)
    stored_span: Literal["context", "window"] | None = column(
        "which tokens the mechanism stores: those of the context, or of the whole window", groupable=True
    )
    codec: Text | None = column("codec that really ran; nothing when none did", groupable=True)
    fires: Whole | None = column("how often the codec ran", low=0)
    expected_fires: Whole | None = column("how often it should have run", low=0)
    # as `kvlab measure --mechanism` names it: block_sparse:block=32,top_k=4; full where nothing was left out
    pattern: Text | None = column("what attention read by, or what of K and V was kept, with its settings", keyed=True)
    spec_decoding: Text | None = column("speculative decoding that the engine was started with", groupable=True)


ADDED_BY: dict[Group, type[BaseModel]] = {
    "mechanism": MechanismFields,
    "identity": DeclaredFields,
    "measured": MeasuredFields,
    "observed": RowFields,
}
COLUMNS: tuple[RowColumn, ...] = tuple(
    replace(field.json_schema_extra, name=name, type=get_args(field.annotation)[0])
    for name, field in RowFields.model_fields.items()
)
BY_NAME = {column.name: column for column in COLUMNS}
QUANTITIES = tuple(
    column.name
    for column in COLUMNS
    if (column.judged and column.kind is not str and column.group in ("measured", "observed"))
    or column.name in ("compression_ratio", "bits", "stored_span")
)
"""What a row that has evidence may say only as its evidence says it."""
