"""The fields of a row, each declared once; a new field is one new entry of `COLUMNS` and nothing else.

Configuration, environment, flags, row, JSON schemas and database columns are generated from it by
`kvlab.gate.catalogue`. The fourteen published fields come first, in their published order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["mechanism", "identity", "measured", "observed"]

COMPRESSION = ("kv_quantization", "kv_compression", "compressed_attention")
SPECULATIVE = ("speculative_decoding",)
MECHANISMS = ("baseline", *COMPRESSION, *SPECULATIVE)
SCOPES = ("kv_cache", "attention")
SPANS = ("context", "window")
STATUSES = ("pending", "completed", "failed", "not_required")
TOO_LOSSY = "too_lossy"
TIERS = ("supported", "reviewed_preview", TOO_LOSSY, "gated", "artifact_only", "unsupported")
"""What a row may claim (`support_status`), best first; `TOO_LOSSY` is not a published one: a loss that was found."""

DECLARED: tuple[Group, ...] = ("mechanism", "identity")
"""Groups that a person may state; what was measured or observed only a measuring stage writes."""

PREFIX = "KVLAB_ROW_"  # no variable by which a run of this project is steered begins so
MOST_CHARACTERS = 4096
MOST_WHOLE = 2**63 - 1  # what a database column of whole numbers holds
MOST_EXACT = 2**53  # up to here a float holds every whole number


@dataclass(frozen=True)
class RowColumn:
    """One field of a row.

    Parameters
    ----------
    name : str
        In snake_case: the name in rows and in the database.
    kind : type
        str, int, float or bool.
    group : Group
        Who states it: `mechanism` and `identity` are declared, `measured` and `observed` come from a run.
    text : str
        One line for help, schema and docs.
    unit : str
        Of a number.
    choices : tuple of str
        Its words when the vocabulary is closed.
    joined : bool
        Whether several of `choices` may be joined by ``+``, as in ``kv_quantization+speculative_decoding``.
    low, high : float or None
        Inclusive bounds of a number, which must be finite anyway.
    groupable : bool
        Whether a query may group by it.
    keyed : bool
        Whether it is part of what `row_id` is the digest of.
    judged : bool
        Whether evidence says what it has to be. False of times and memory, which hang on what else the machine did:
        they are printed as *not judged*, and nothing is chosen by them.
    """

    name: str
    kind: type
    group: Group
    text: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    joined: bool = False
    low: float | None = None
    high: float | None = None
    groupable: bool = False
    keyed: bool = False
    judged: bool = True

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


def _mechanism(name: str, kind: type, text: str, **rest) -> RowColumn:
    return RowColumn(name, kind, "mechanism", text, **rest)


def _identity(name: str, kind: type, text: str, **rest) -> RowColumn:
    return RowColumn(name, kind, "identity", text, **rest)


def _measured(name: str, kind: type, text: str, **rest) -> RowColumn:
    return RowColumn(name, kind, "measured", text, **rest)


def _observed(name: str, kind: type, text: str, **rest) -> RowColumn:
    return RowColumn(name, kind, "observed", text, **rest)


# `keyed` names a configuration. Digests of model, corpus and code are left out: when one of them changes the row is
# the same row, now stale, and a comparison of two runs shows it as changed instead of as gone and new. `run` and
# `support_status` say where a row was kept and what is claimed of it, not what was measured.
COLUMNS: tuple[RowColumn, ...] = (
    # ---------------------------------------------------- published
    _mechanism(
        "mechanism",
        str,
        "what was changed about the engine; several joined by +",
        choices=MECHANISMS,
        joined=True,
        groupable=True,
        keyed=True,
    ),
    _mechanism("mechanism_variant", str, "which of its registered variants", groupable=True, keyed=True),
    _mechanism("compression_method", str, "name of the compressing method", groupable=True),
    _mechanism("compression_scope", str, "what is compressed", choices=SCOPES, joined=True, groupable=True),
    # A factor above 2 is the inverse by mistake (4 for a quarter): nobody stores twice the original.
    _mechanism(
        "compression_ratio",
        float,
        "stored bytes over those of the uncompressed cache, everything counted; below 1 is smaller",
        low=1e-4,
        high=2,
    ),
    _mechanism(
        "compression_overhead_ms", float, "time that compressing takes per request", unit="ms", low=0, judged=False
    ),
    _mechanism(
        "decompression_overhead_ms", float, "time that decompressing takes per request", unit="ms", low=0, judged=False
    ),
    _mechanism("quality_eval_id", str, "registered evaluation that the claim rests on", groupable=True),
    _mechanism(
        "quality_eval_status",
        str,
        "what is declared of that evaluation; the gate derives its own",
        choices=STATUSES,
        groupable=True,
    ),
    _mechanism("quality_delta_summary", str, "remark on the quality; never parsed"),
    _mechanism("draft_model_id", str, "model that proposes tokens, for speculative decoding", keyed=True),
    _mechanism("speculative_acceptance_rate", float, "accepted over proposed tokens", low=0, high=1, judged=False),
    _mechanism(
        "speculative_wasted_tokens", int, "proposed tokens that were thrown away", unit="tokens", low=0, judged=False
    ),
    _mechanism("mechanism_notes", str, "remark; for a variant that is a class, its implementation"),
    # ---------------------------------------------------- identity
    _identity("row_id", str, "name of the configuration; a digest unless given"),
    _identity("model", str, "slug of the model", groupable=True, keyed=True),
    _identity("model_hash", str, "digest of the model's files"),
    _identity("engine", str, "engine that ran it", groupable=True, keyed=True),
    _identity("device", str, "device that it ran on", groupable=True, keyed=True),
    _identity("dtype", str, "dtype of the engine", groupable=True, keyed=True),
    _identity("protocol", str, "when the context is coded", groupable=True, keyed=True),
    _identity("context_tokens", int, "length of the context", unit="tokens", low=1, keyed=True),
    _identity("context_band", str, "range of context lengths that the claim is for", groupable=True, keyed=True),
    _identity("corpus_hash", str, "digest of the evaluated text"),
    _identity("recipe_id", str, "digest of everything that decides what the codec does", groupable=True, keyed=True),
    _identity("calibration", str, "digest of what the codec was fitted with; nothing where nothing was"),
    _identity("bits", int, "bits per value that the codec was asked for", unit="bits", low=1, groupable=True),
    _identity("code", str, "digest of the code that measured it"),
    _identity("support_status", str, "tier that is claimed", choices=TIERS, groupable=True),
    _identity("run", str, "run that the row belongs to", groupable=True),
    # ---------------------------------------------------- measured
    _measured("throughput_tok_s", float, "tokens that are generated, or scored", unit="tokens/s", low=0, judged=False),
    _measured("ttft_p50_ms", float, "median time to the first token", unit="ms", low=0, judged=False),
    _measured("kv_bytes", int, "bytes stored for the whole cache, everything counted", unit="bytes", low=0),
    _measured("kv_values", int, "elements of K and of V in that cache", unit="values", low=0),
    _measured("read_bytes", int, "bytes that a step reads of all contexts that kv_values counts", unit="bytes", low=0),
    _measured("bits_per_value", float, "stored bits per element of the whole cache", unit="bits", low=0),
    _measured("peak_memory_gb", float, "most memory held", unit="GB", low=0, judged=False),
    # KL of nothing changed is zero but for rounding, which may be on either side.
    _measured("kl", float, "divergence from the uncompressed model, full vocabulary", unit="nats/token", low=-1e-6),
    _measured("delta_nll", float, "loss beside the uncompressed model's", unit="nats/token"),
    _measured("top1_agreement", float, "share of tokens with the same most likely successor", low=0, high=1),
    # ---------------------------------------------------- observed
    _observed("kv_cache_dtype", str, "dtype that the engine's cache really holds", groupable=True),
    _observed("cache_class", str, "class of the engine's cache object"),
    # What the running engine's own cache is, by its own count: its pages, all layers together.
    _observed("backend", str, "class, with its module, that computed attention over the engine's own cache"),
    _observed("block_tokens", int, "tokens of a block of the engine's cache", unit="tokens", low=1),
    _observed("block_bytes", int, "bytes of a block, all layers", unit="bytes", low=1),
    _observed("block_values", int, "elements of K and of V that a block stands for", unit="values", low=1),
    _observed("cache_blocks", int, "blocks that the engine made", low=1),
    _observed("cache_memory_bytes", int, "memory that it was given for them", unit="bytes", low=1),
    _observed("capacity_tokens", int, "tokens that fit into them", unit="tokens", low=1),
    _observed(
        "exact_bytes", int, "bytes of a request's tokens that are read exact, beside blocks", unit="bytes", low=1
    ),
    _observed("exact_requests", int, "requests whose exact tokens are taken from that memory", low=1),
    _observed(
        "stored_span",
        str,
        "which tokens the mechanism stores: those of the context, or of the whole window",
        choices=SPANS,
        groupable=True,
    ),
    _observed("codec", str, "codec that really ran; nothing when none did", groupable=True),
    _observed("fires", int, "how often the codec ran", low=0),
    _observed("expected_fires", int, "how often it should have run", low=0),
    # as `kvlab measure --mechanism` names it: block_sparse:block=32,top_k=4; full where nothing was left out
    _observed("pattern", str, "what attention read by, or what of K and V was kept, with its settings", keyed=True),
    _observed("spec_decoding", str, "speculative decoding that the engine was started with", groupable=True),
)
QUANTITIES = tuple(
    column.name
    for column in COLUMNS
    if (column.judged and column.kind is not str and column.group in ("measured", "observed"))
    or column.name in ("compression_ratio", "bits", "stored_span")
)
"""What a row that has evidence may say only as its evidence says it."""
BY_NAME: dict[str, RowColumn] = {column.name: column for column in COLUMNS}
