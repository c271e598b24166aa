"""The section `cells`: single changes of the studied recipe; the default ones, and what an entry may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from kvlab.codecs.catalogue import CONDITIONABLE, LADDERED, Conditioning
from kvlab.core.codec_settings import Bits, Frozen
from kvlab.core.errors import ParamsError, suggestion
from kvlab.core.paramfile import held_to
from kvlab.core.params import CodecSection, Params, captured, from_the_start, unknown_layers
from kvlab.core.recipe import Attention, DType, Engine, Placement, Protocol, Span, Stream

CELLS: dict[str, dict] = {
    "k-only": {"stream": "k"},
    "v-only": {"stream": "v"},
    "unwhitened": {"codec": {"whiten": False}},
    "post-rope": {"placement": "post_rope"},
    "post-rope-unwhitened": {"placement": "post_rope", "codec": {"whiten": False}, "against": "unwhitened"},
    "v-outliers": {"codec": {"v_outlier_threshold": 2.0}},
    "whole-window": {"span": "window", "protocols": ["in_forward"]},
    "other-calibration": {"origin": "vllm"},
    "gaussian-codebooks": {"codebooks": "gaussian"},
    "published-decoder": {
        "codec": {"whiten": False, "published_decoder": "inner_product"},
        "against": "unwhitened",
    },
    "all-layers": {"layers": "all"},
    "eager": {"engines": ["hf"], "attention": "eager"},
    "k2v2": {"bits": 2, "v_bits": 2},
    "k4v2": {"bits": 4, "v_bits": 2},
    "k2v4": {"bits": 2, "v_bits": 4},
    "k3v4": {"bits": 3, "v_bits": 4},
    "k4v4": {"bits": 4, "v_bits": 4},
    "klt": {"rung": "klt", "layers": "all", "against": "all-layers"},
}
"""The entries that are measured unless params.yaml says otherwise; one that is not possible there is left out."""

RUNGS = tuple(
    "+".join(filter(None, (codec, conditioning)))
    for codec in sorted(LADDERED)
    for conditioning in (get_args(Conditioning) if codec in CONDITIONABLE else ("",))
    if codec != "block"
)
"""What an entry may run in the studied recipe's place."""


def _rung(name: str) -> str:
    if name.partition("+")[0] == "block":
        raise ValueError(
            f"{name!r} is not allowed here: on the ladder it takes the Gaussian table;"
            " leave rung out and change bits, v_bits, codebooks or codec instead"
        )
    if name not in RUNGS:
        raise ValueError(f"{name!r} is no rung; allowed: {', '.join(RUNGS)}{suggestion(name, RUNGS)}")
    return name


def reads_components(rung: str) -> bool:
    """Whether a rung reads calibrated components: `klt`, `oscar`, and all after mean removal."""
    return rung in ("klt", "oscar") or "+center" in rung


Rung = Annotated[str, AfterValidator(_rung), Field(json_schema_extra={"enum": list(RUNGS)})]


class CellSettings(Frozen):
    """One entry of `cells`: what it changes in the studied recipe, where it is measured, and what it is held against.

    Without `engines`, `protocols` and `dtype` it is measured on every engine and under every protocol of the run,
    in ``gap.dtype``.
    """

    against: str | None = Field(default=None, description="the entry it is compared with; null: the studied cell")
    engines: tuple[Engine, ...] | None = Field(default=None, min_length=1, description="null: those of the run")
    protocols: tuple[Protocol, ...] | None = Field(default=None, min_length=1, description="null: those of the run")
    dtype: DType | None = Field(default=None, description="null: gap.dtype")
    attention: Attention = Field(default="default", description="`eager` or `sdpa`, on hf only")
    placement: Placement = Field(default="pre_rope", description="K is coded before its rotary embedding, or after it")
    span: Span = Field(default="context", description="`window`: the scored tokens are coded too (in_forward only)")
    origin: Engine | None = Field(default=None, description="whose capture calibrates it; null: calibration.origin")
    stream: Stream = Field(default="kv", description="what is coded")
    layers: Literal["coded", "all"] | tuple[int, ...] = Field(
        default="coded", description="which are coded; `coded`: all but codec.boundary_layers; -1 is the last one"
    )
    bits: Bits | None = Field(default=None, description="of K; null: the run's")
    v_bits: Bits | None = Field(default=None, description="of V; null: the run's")
    codebooks: Literal["fitted", "gaussian"] | None = Field(default=None, description="null: calibration.codebooks")
    codec: dict[str, Any] = Field(default={}, description="any leaves of `codec`")
    rung: Rung | None = Field(default=None, description="another codec, as on the ladder; null: the studied one")

    def fitted(self, params: Params) -> CellSettings:
        """The entry with layers counted from the start."""
        n = params.model.n_layers
        codec = {key: _counted(value, n) if key.endswith("_layers") else value for key, value in self.codec.items()}
        return self.model_copy(update={"codec": codec, "layers": _counted(self.layers, n)})


def _counted(layers: Any, n_layers: int) -> Any:
    """Layers counted from the start; what is no list of numbers stays as it is."""
    if isinstance(layers, list | tuple) and all(type(i) is int for i in layers):
        return type(layers)(from_the_start(tuple(layers), n_layers))
    return layers


def with_entry(params: Params, entry: CellSettings) -> Params:
    """The parameters with what a cell changes in the studied recipe."""
    changes: dict[str, Any] = {}
    if entry.codec:
        changes["codec"] = held_to(CodecSection, params.codec.model_dump() | entry.codec, ("codec",))
    if entry.codebooks:
        changes["calibration"] = params.calibration.model_copy(update={"codebooks": entry.codebooks})
    changes |= {name: getattr(entry, name) for name in ("bits", "v_bits") if getattr(entry, name) is not None}
    return params.model_copy(update=changes)


def problems(params: Params, label: str, entry: CellSettings, cells: Mapping[str, CellSettings]) -> Iterator[str]:
    """One line for each thing that an entry asks for and cannot have."""
    name = f"cells.{label}"
    yield from _impossible(name, entry)
    yield from _against(params, label, entry, cells)
    if entry.origin is not None:
        yield from captured(f"{name}.origin", entry.origin, params)
    if not isinstance(entry.layers, str):
        yield from unknown_layers(f"{name}.layers", entry.layers, params.model.n_layers)
    try:
        held_to(CodecSection, entry.codec, ("cells", label, "codec"))
    except ParamsError as error:
        yield from error.lines
        return
    leaves = [leaf for leaf in ("boundary_layers", "whiten_skip_layers") if leaf in entry.codec]
    yield from with_entry(params, entry).codec.problems(params, f"{name}.codec", leaves)


def _impossible(name: str, entry: CellSettings) -> Iterator[str]:
    """Where an entry contradicts itself."""
    if entry.rung and (entry.codec or entry.codebooks):
        yield f"{name} names a rung, so it can change neither codec nor codebooks"
    if entry.rung and entry.placement == "post_rope" and reads_components(entry.rung):
        allowed = ", ".join(rung for rung in RUNGS if not reads_components(rung))
        yield (
            f"{name}.rung is {entry.rung!r}, whose components are fitted before the rotary embedding;"
            f" allowed with placement post_rope: {allowed}, or no rung"
        )
    if entry.span == "window" and entry.protocols != ("in_forward",):
        yield f"{name}.span is 'window', but a clean cache has no scored tokens; set protocols: [in_forward]"
    if entry.attention != "default" and entry.engines != ("hf",):
        yield f"{name}.attention is {entry.attention!r}, which only hf can choose; set engines: [hf]"
    if entry.layers == ():
        yield f"{name}.layers is empty, so nothing is coded; allowed: `coded`, `all`, or a list"


def _against(params: Params, label: str, entry: CellSettings, cells: Mapping[str, CellSettings]) -> Iterator[str]:
    """The entry's counterpart is another entry, measured wherever it is."""
    if entry.against is None:
        return
    given, others = f"cells.{label}.against is {entry.against!r}", [name for name in cells if name != label]
    if entry.against not in others:
        why = "the entry itself" if entry.against == label else "no entry of cells"
        allowed = f"allowed: {', '.join(others)}, or null for the studied cell"
        yield f"{given}, {why}; {allowed}{suggestion(entry.against, others)}"
        return
    other = cells[entry.against]
    for what in ("engines", "protocols"):
        run = getattr(params, what)
        here, there = (getattr(one, what) or run for one in (entry, other))
        missing = [one for one in here if one in run and one not in there]
        if missing:
            yield f"{given}, which has no {missing[0]!r} in its {what}; allowed: an entry that has"
    here, there = (one.dtype or params.gap.dtype for one in (entry, other))
    if here != there:
        yield f"{given}, which is measured in {there!r}; allowed: an entry in {here!r}"
