"""`params.yaml` as frozen models: every key is known, typed and ranged, or refused by name.

A rule hands its own keys to the CLI as JSON (`Params.partial`); keys that the rule did not name
cannot be read by the code behind it, so a stage can never depend on an undeclared parameter.
The file lists several models; `kvlab.per_model` makes one `Params` of each.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from kvlab.errors import ParamsError, suggestion
from kvlab.kvstore_params import KVStore
from kvlab.ladder_names import CONDITIONABLE, LADDERED, Conditionable, Laddered, suggested
from kvlab.layer_numbers import from_the_start
from kvlab.paramfile import explain, unknown_key
from kvlab.recipe import (
    Attention,
    BlockStream,
    DType,
    Engine,
    Frozen,
    Placement,
    Protocol,
    Recipe,
    Span,
    Stream,
)

Bits = Field(ge=1, le=8)
Ratio = Annotated[float, Field(gt=0, le=1)]
Sigma = Annotated[float, Field(ge=0)]
SLUG = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Model(Frozen):
    """A model that is measured."""

    path: str = Field(min_length=1, description="directory of a Hugging Face model, or a hub id")
    slug: Annotated[str, Field(pattern=SLUG)] | None = Field(
        default=None, description="folder name of its results; null: the last part of `path`"
    )
    revision: str | None = Field(default=None, description="hub revision (commit or tag); null for a directory")
    n_layers: int = Field(ge=1, description="number of layers; compared with the model's config")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs over which vLLM splits the model")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """The last part of the path, as far as it can be a folder's name, where no slug is given."""
        if isinstance(data, dict) and data.get("slug") is None and isinstance(data.get("path"), str):
            last = data["path"].rstrip("/").rpartition("/")[2]
            return data | {"slug": re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+", "-", last).lstrip("-") or None}
        return data

    @model_validator(mode="after")
    def _placed(self) -> Model:
        if self.slug is None:
            raise ValueError(f"path {self.path!r} gives its results no folder name; set slug")
        return self


class DatasetSplits(Frozen):
    """Which split of a `datasets:` source feeds which of ours."""

    calib: str = Field(description="split for calibration windows")
    test: str = Field(description="split for scored windows")


class Corpus(Frozen):
    """Which text is read."""

    source: str = Field(min_length=1, description="`docstrings`, a file or glob, or `datasets:ID[/config=NAME]`")
    text_column: str = Field(description="text column of a `datasets:` source")
    splits: DatasetSplits = Field(description="splits of a `datasets:` source")
    other: Annotated[str, Field(min_length=1)] | None = Field(
        description="text of another domain: `licences`, or a file or glob; null for none"
    )


class Windows(Frozen):
    """How the text is cut: a window is `context` coded tokens and `eval` scored ones."""

    context: int = Field(ge=8, description="tokens whose K and V are coded")
    eval: int = Field(ge=2, description="tokens behind the context; all but the first are scored")
    test: int = Field(ge=2, description="number of scored windows")
    calib: int = Field(ge=2, description="number of calibration windows; intervals on them need two")
    other: int = Field(ge=2, description="number of scored windows of `corpus.other`")
    seed: int = Field(ge=0, description="chooses the windows")

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.context + self.eval


class Calibration(Frozen):
    """How Sigma_q, the codebooks and the components are fitted."""

    engines: tuple[Engine, ...] = Field(min_length=1, description="engines that are captured")
    origin: Engine = Field(description="whose capture calibrates every cell that names no other origin")
    dtype: DType = Field(description="dtype of the captured model")
    ridge: float = Field(ge=0, description="added to each channel of Sigma_q, times its own second moment")
    codebooks: Literal["fitted", "gaussian"] = Field(
        description="Lloyd-Max tables: fitted on the calibration split, or those of a Gaussian variable"
    )


class Codec(Frozen):
    """The studied recipe, without its bits."""

    name: Literal["block"] = Field(description="codec of the studied recipe")
    variance_ratio: float = Field(gt=0, le=1, description="energy kept by the PCA, relative to its sketch")
    block_size: int = Field(ge=2, le=65536, description="vectors per block")
    layout: Literal["per_head", "mixed_heads"] = Field(description="which vectors share a block")
    n_centres: int = Field(ge=1, le=256, description="spherical k-means centres")
    kmeans_iterations: int = Field(ge=0, description="Lloyd rounds at most")
    pca: Literal["exact", "randomized"] = Field(description="PCA method")
    exact_rank_cap: int | None = Field(ge=1, description="largest rank of the exact PCA; null for none")
    rank_fraction: float = Field(gt=0, le=1, description="target rank of the randomised PCA, of head_dim")
    oversample: int = Field(ge=0, description="extra columns of the sketch")
    power_iterations: int = Field(ge=0, description="subspace iterations of the sketch")
    skeleton: Literal["fp16", "fp32"] = Field(description="precision of mean, basis, centres, gains and norms")
    outlier_threshold: float | None = Field(gt=0, description="K: coefficients beyond it are stored apart")
    v_outlier_threshold: float | None = Field(gt=0, description="V: the same")
    metric: Literal["mse", "inner_product", "linf"] = Field(
        description="K: what the published encoder was told; it changed its decoder only, never a choice"
    )
    share_basis: bool = Field(description="K: one PCA for all blocks of a call")
    v_share_basis: bool = Field(description="V: the same")
    whiten: bool = Field(description="whiten K by the Cholesky factor of Sigma_q")
    whiten_skip_layers: tuple[int, ...] = Field(description="layers whose K is not whitened; -1 is the last one")
    boundary_layers: tuple[int, ...] = Field(description="layers that are left uncoded; -1 is the last one")
    seed: int = Field(ge=0, description="signs of the rotation, k-means start, sketch")
    emulate_published_decoder: bool = Field(description="drop the residual's scale as the original did")


class Gap(Frozen):
    """The factors of the decomposition; each has a level of low and one of high distortion, in that order."""

    dtype: DType = Field(description="of the published corners, and of the cells")
    dtypes: tuple[DType, ...] = Field(min_length=1, max_length=2, description="levels of the factor `dtype`")
    variance_ratios: tuple[Ratio, Ratio] = Field(description="levels of the factor `variance_ratio`")
    origins: tuple[Engine, ...] = Field(
        min_length=1, max_length=2, description="levels of the factor `origin`: whose capture calibrates"
    )

    @model_validator(mode="after")
    def _listed(self) -> Gap:
        if self.dtype not in self.dtypes:
            raise ValueError(f"gap.dtype is {self.dtype!r}; it must be one of gap.dtypes: {', '.join(self.dtypes)}")
        return self


Conditioning = Literal["", "center", "center+whiten"]  # in front of a codec, calibrated
RUNGS = tuple(
    "+".join(filter(None, (codec, conditioning)))
    for codec in LADDERED
    for conditioning in (get_args(Conditioning) if codec in CONDITIONABLE else ("",))
    if codec != "block"
)
"""What an entry of `cells` may run in the studied recipe's place."""


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
    """Whether a rung reads calibrated components: `klt`, `oscar`, and all behind mean removal."""
    return rung in ("klt", "oscar") or "+center" in rung


Rung = Annotated[str, AfterValidator(_rung), suggested(RUNGS)]


class CellEntry(Frozen):
    """One entry of `cells`: what it changes in the studied recipe, where it is measured, and what it is held against.

    Without `engines`, `protocols` and `dtype` it is measured on every engine and under every protocol of the run,
    in ``gap.dtype``.
    """

    against: str | None = Field(default=None, description="the entry it is compared with; null: the studied cell")
    engines: tuple[Engine, ...] | None = Field(default=None, min_length=1, description="null: those of the run")
    protocols: tuple[Protocol, ...] | None = Field(default=None, min_length=1, description="null: those of the run")
    dtype: DType | None = Field(default=None, description="null: gap.dtype")
    attention: Attention = Field(default="default", description="`eager` or `sdpa`, on hf only")
    placement: Placement = Field(
        default="pre_rope", description="K is coded in front of its rotary embedding, or behind it"
    )
    span: Span = Field(default="context", description="`window`: the scored tokens are coded too (in_forward only)")
    origin: Engine | None = Field(default=None, description="whose capture calibrates it; null: calibration.origin")
    stream: Stream = Field(default="kv", description="what is coded")
    layers: Literal["coded", "all"] | tuple[int, ...] = Field(
        default="coded", description="which are coded; `coded`: all but codec.boundary_layers; -1 is the last one"
    )
    bits: int | None = Field(default=None, ge=1, le=8, description="of K; null: the run's")
    v_bits: int | None = Field(default=None, ge=1, le=8, description="of V; null: the run's")
    codebooks: Literal["fitted", "gaussian"] | None = Field(default=None, description="null: calibration.codebooks")
    codec: dict[str, Any] = Field(default={}, description="any leaves of `codec`")
    rung: Rung | None = Field(default=None, description="another codec, as on the ladder; null: the studied one")


class Layers(Frozen):
    """Per-layer attribution: the codec on one layer at a time, and on all layers but one."""

    dtype: DType = Field(description="what the engine computes in")
    protocols: tuple[Protocol, ...] = Field(min_length=1, description="under which they are measured")
    streams: tuple[Literal["k", "v"], ...] = Field(min_length=1, description="each is attributed apart")
    windows: int = Field(ge=2, description="scored windows, at most `windows.test`")


LayerGroup = Literal["all", "coded", "boundary"]


class Noise(Frozen):
    """Gaussian noise on K or V in place of a codec."""

    dtype: DType = Field(description="what the engine computes in")
    streams: tuple[Stream, ...] = Field(min_length=1, description="what the noise is added to")
    sigmas: tuple[Sigma, ...] = Field(min_length=2, description="times the rms of the tensor")
    groups: tuple[LayerGroup, ...] = Field(min_length=1, description="of layers; `coded`: all but the boundary layers")
    windows: int = Field(ge=2, description="scored windows, at most `windows.test`")
    seed: int = Field(ge=0, description="draws the noise")


class Mitigations(Frozen):
    """Where to spend bytes: chosen on the calibration split, judged on the test split at equal bytes."""

    protocols: tuple[Protocol, ...] = Field(min_length=1, description="under which they are judged")
    windows: int = Field(ge=2, description="scored windows, at most `windows.test`")
    budget: float = Field(gt=0, le=32, description="bits per value that boundary layers may bring the cache to")
    uniform: tuple[tuple[Annotated[int, Bits], Annotated[int, Bits]], ...] = Field(
        min_length=2, description="bits and v_bits of the studied recipe: the curve that equal bytes are read from"
    )
    klt_bits: float = Field(gt=0, le=8, description="bits per value of the klt arms, of the whole cache")


class Ladder(Frozen):
    """Every codec at the same bits, on every layer, in float32 and under `snapshot`; on two texts."""

    engine: Engine = Field(description="the one engine that it runs on")
    codecs: tuple[Laddered, ...] = Field(min_length=1, description="those that are compared")
    bits: tuple[Annotated[int, Bits], ...] = Field(min_length=1, description="bits of both streams, by recipe")
    conditioned: tuple[Conditionable, ...] = Field(
        description="those also measured behind mean removal, and behind mean removal and whitening"
    )
    texts: tuple[Literal["test", "other"], ...] = Field(
        min_length=1, description="`test`, and `other` if there is a second text"
    )
    windows: int = Field(ge=2, description="scored windows of each text")


class Mechanisms(Frozen):
    """What the gate judges: codecs and an engine's own cache dtypes, each with its quality, bytes and throughput."""

    dtype: DType = Field(description="what the engines compute in")
    protocol: Protocol = Field(description="of the codecs; an engine's own cache stores inside the forward")
    codecs: tuple[Laddered, ...] = Field(min_length=1, description="each on every engine of the run")
    bits: tuple[Annotated[int, Bits], ...] = Field(min_length=1, description="bits of both streams, by recipe")
    cache_dtypes: tuple[Literal["fp8_e4m3", "fp8_e5m2"], ...] = Field(
        description="that vLLM's own cache is told to store; none: leave them out"
    )
    needles: int = Field(ge=2, description="retrieval items, each with a text of its own")
    claim: Literal["supported", "reviewed_preview", "gated", "artifact_only", "unsupported"] = Field(
        description="tier that every row claims; the gate says which one it earns"
    )


class Baseline(Frozen):
    """Codec off: each engine, dtype and attention implementation against the fp32 truth."""

    hf_attention: tuple[Literal["eager", "sdpa"], ...] = Field(
        min_length=1, description="attention implementations of hf"
    )
    dtypes: tuple[DType, ...] = Field(min_length=1, description="what the engines compute in; float32 among them")


class Jobs(Frozen):
    """How measurements are packed into processes."""

    cells_per_job: int = Field(ge=1, description="cells that share one model load")
    threads: int = Field(ge=1, description="torch threads of a job")


class Stats(Frozen):
    """The bootstrap."""

    resamples: int = Field(ge=200, description="bootstrap resamples of the windows")
    confidence: float = Field(gt=0, lt=1, description="of every interval, two-sided")
    seed: int = Field(ge=0, description="draws the resamples")


class Verdict(Frozen):
    """Thresholds of the verdict; the published study's are the defaults."""

    accept_ppl: float = Field(gt=0, description="ACCEPT: the whole interval of abs(ppl_ratio - 1) lies below")
    accept_top1: float = Field(gt=0, lt=1, description="ACCEPT: the whole interval of the top-1 agreement lies above")
    marginal_ppl: float = Field(gt=0, description="MARGINAL: as accept_ppl; REJECT: the interval lies above")
    marginal_top1: float = Field(gt=0, lt=1, description="MARGINAL: as accept_top1; REJECT: the interval lies below")


class Report(Frozen):
    """Words of the report that are not results."""

    title: str = Field(description="title of FINDINGS.md and of report.html")


class Params(Frozen):
    """All parameters of one model's chain. A *partial* instance holds only the keys that a rule named.

    params.yaml lists `models`; `kvlab.per_model.by_model` makes one instance of each.
    """

    bits: int = Field(ge=1, le=8, description="K: bits per coefficient of `codec`, per value of the default `klt`")
    v_bits: int = Field(ge=1, le=8, description="V: the same")
    model: Model
    corpus: Corpus
    windows: Windows
    calibration: Calibration
    codec: Codec
    engines: tuple[Engine, ...] = Field(min_length=1, description="engines of the run")
    protocols: tuple[Protocol, ...] = Field(min_length=1, description="protocols of the run")
    gap: Gap
    cells: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], CellEntry]
    layers: Layers
    noise: Noise
    mitigations: Mitigations
    ladder: Ladder
    mechanisms: Mechanisms
    kvstore: KVStore
    baseline: Baseline
    jobs: Jobs
    stats: Stats
    verdict: Verdict
    report: Report

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, data: Any) -> Any:
        """Layers counted from the end, as numbers of this model's layers."""
        return from_the_start(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        scored = [(name, "test") for name in ("layers", "noise", "mitigations")]
        scored += [("ladder", text) for text in self.ladder.texts]
        for name, text in scored:
            available = getattr(self.windows, text)
            if getattr(self, name).windows > available:
                raise ValueError(f"{name}.windows is larger than windows.{text} ({available})")
        if "other" in self.ladder.texts and self.corpus.other is None:
            raise ValueError("ladder.texts names 'other' but corpus.other is null; name a text, or only 'test'")
        self._check_kvstore()
        idle = [codec for codec in self.ladder.conditioned if codec not in self.ladder.codecs]
        if idle:
            raise ValueError(f"ladder.conditioned names {idle[0]!r}, which is not in ladder.codecs")
        captured = ", ".join(self.calibration.engines)
        origins = {f"gap.origins[{i}]": origin for i, origin in enumerate(self.gap.origins)}
        for name, origin in {"calibration.origin": self.calibration.origin, **origins}.items():
            if origin not in self.calibration.engines:
                raise ValueError(f"{name} is {origin!r}; captured are only: {captured}")
        if len(set(self.engines)) > 1 and "float32" not in self.gap.dtypes:
            given = ", ".join(self.gap.dtypes)
            raise ValueError(f"gap.dtypes is {given}; engines are compared in 'float32': add it, or run one engine")
        self._check_layers("codec", self.codec)
        self._check_uniform()
        for name, entry in self.cells.items():
            self._check_entry(f"cells.{name}", entry)
            self._check_against(name, entry)
        return self

    def _check_kvstore(self) -> None:
        test, needles = self.windows.test, self.mechanisms.needles
        asked = {
            "restore.prompts": (self.kvstore.restore.prompts, "windows.test", test),
            "bitplanes.windows": (self.kvstore.bitplanes.windows, "windows.test", test),
            "placement.windows": (self.kvstore.placement.windows, "windows.test", test),
            "policy.needles": (self.kvstore.policy.needles, "mechanisms.needles", needles),
        }
        for name, (wanted, source, available) in asked.items():
            if wanted > available:
                raise ValueError(f"kvstore.{name} is {wanted}, larger than {source} ({available})")
        longest, text = max(self.kvstore.restore.lengths), test * (self.windows.context + self.windows.eval)
        if longest > text:
            raise ValueError(f"kvstore.restore.lengths names {longest}; the test split has {text} tokens")

    def _check_layers(self, name: str, codec: Codec) -> None:
        last = self.model.n_layers - 1
        for leaf in ("boundary_layers", "whiten_skip_layers"):
            wrong = [i for i in getattr(codec, leaf) if not 0 <= i <= last]
            if wrong:
                raise ValueError(
                    f"{name}.{leaf} names layer {wrong[0]}; allowed: 0..{last}, or -{last + 1}..-1 from the end"
                )
        if len(set(codec.boundary_layers)) > last:
            raise ValueError(f"{name}.boundary_layers names every layer, so none is coded; leave one of 0..{last} out")

    def _check_uniform(self) -> None:
        """The points of the curve rise one after the other."""
        points = self.mitigations.uniform
        for low, high in pairwise(points):
            if low == high or not rises(low, high):
                raise ValueError(
                    f"mitigations.uniform has {list(high)} behind {list(low)};"
                    " allowed: points that rise, bits or v_bits or both, neither falling"
                )

    def _check_entry(self, name: str, entry: CellEntry) -> None:
        if entry.origin is not None and entry.origin not in self.calibration.engines:
            captured = ", ".join(self.calibration.engines)
            raise ValueError(f"{name}.origin is {entry.origin!r}; captured are only: {captured}")
        if entry.rung and (entry.codec or entry.codebooks):
            raise ValueError(f"{name} names a rung, so it can change neither codec nor codebooks")
        if entry.rung and entry.placement == "post_rope" and reads_components(entry.rung):
            allowed = ", ".join(rung for rung in RUNGS if not reads_components(rung))
            raise ValueError(
                f"{name}.rung is {entry.rung!r}, whose components are fitted in front of the rotary embedding;"
                f" allowed with placement post_rope: {allowed}, or no rung"
            )
        if entry.span == "window" and entry.protocols != ("in_forward",):
            clean = "a clean cache has no scored tokens"
            raise ValueError(f"{name}.span is 'window', but {clean}; set protocols: [in_forward]")
        if entry.attention != "default" and entry.engines != ("hf",):
            raise ValueError(f"{name}.attention is {entry.attention!r}, which only hf can choose; set engines: [hf]")
        if not isinstance(entry.layers, str):
            last = self.model.n_layers - 1
            wrong = [i for i in entry.layers if not 0 <= i <= last]
            if wrong:
                raise ValueError(
                    f"{name}.layers names layer {wrong[0]}; allowed: 0..{last}, or -{last + 1}..-1 from the end"
                )
            if not entry.layers:
                raise ValueError(f"{name}.layers is empty, so nothing is coded; allowed: `coded`, `all`, or a list")
        try:
            self._check_layers(f"{name}.codec", self.changed(entry).codec)
        except ValidationError as error:
            raise ValueError(f"{name}.codec: {explain(error, Codec)}") from None

    def _check_against(self, label: str, entry: CellEntry) -> None:
        """The entry's counterpart is another entry, measured wherever it is."""
        if entry.against is None:
            return
        given, others = f"cells.{label}.against is {entry.against!r}", [name for name in self.cells if name != label]
        if entry.against not in others:
            why = "the entry itself" if entry.against == label else "no entry of cells"
            allowed = f"allowed: {', '.join(others)}, or null for the studied cell"
            raise ValueError(f"{given}, {why}; {allowed}{suggestion(entry.against, others)}")
        other = self.cells[entry.against]
        for what in ("engines", "protocols"):
            run = getattr(self, what)
            here, there = (getattr(one, what) or run for one in (entry, other))
            missing = [one for one in here if one in run and one not in there]
            if missing:
                raise ValueError(f"{given}, which has no {missing[0]!r} in its {what}; allowed: an entry that has")
        here, there = (one.dtype or self.gap.dtype for one in (entry, other))
        if here != there:
            raise ValueError(f"{given}, which is measured in {there!r}; allowed: an entry in {here!r}")

    def changed(self, entry: CellEntry) -> Params:
        """These parameters with what a cell changes in the studied recipe."""
        changes: dict[str, Any] = {}
        if entry.codec:
            changes["codec"] = Codec.model_validate(self.codec.model_dump() | entry.codec)
        if entry.codebooks:
            changes["calibration"] = self.calibration.model_copy(update={"codebooks": entry.codebooks})
        changes |= {name: getattr(entry, name) for name in ("bits", "v_bits") if getattr(entry, name) is not None}
        return self.model_copy(update=changes)

    @classmethod
    def complete(cls, data: dict) -> Params:
        """Check a mapping that must hold all keys; `ParamsError` in one line."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ParamsError(explain(error, cls)) from None

    @classmethod
    def partial(cls, data: dict) -> Params:
        """Check a mapping that may lack keys; reading one of those is refused."""
        unknown = [key for key in data if key not in cls.model_fields]
        if unknown:
            raise ParamsError(unknown_key(unknown[0], cls.model_fields))
        values = {}
        for key, value in data.items():
            field = cls.model_fields[key]
            annotation = field.annotation if not field.metadata else _annotated(field)
            try:
                values[key] = TypeAdapter(annotation).validate_python(value)
            except ValidationError as error:
                raise ParamsError(explain(error, cls, prefix=(key,))) from None
        return cls.model_construct(**values)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).model_fields:
            raise ParamsError(f"parameter {name!r} is read here but not named by the rule; add it to its `cfg`")
        raise AttributeError(name)


def rises(low: tuple[int, int], high: tuple[int, int]) -> bool:
    """Whether neither of two bits is smaller in `high`."""
    return low[0] <= high[0] and low[1] <= high[1]


def _annotated(field) -> Any:
    return Annotated[(field.annotation, *field.metadata)]


def studied_recipe(params: Params, variance_ratio: float | None = None) -> Recipe:
    """The recipe that params.yaml describes, at another `variance_ratio` if one is given."""
    codec = params.codec
    shared = codec.model_dump(
        include={
            *("block_size", "layout", "n_centres", "kmeans_iterations", "pca", "exact_rank_cap", "rank_fraction"),
            *("oversample", "power_iterations", "skeleton", "seed"),
        }
    )
    shared["variance_ratio"] = codec.variance_ratio if variance_ratio is None else variance_ratio
    shared["codebook"] = params.calibration.codebooks
    k = BlockStream(
        bits=params.bits,
        outlier_threshold=codec.outlier_threshold,
        metric=codec.metric,
        share_basis=codec.share_basis,
        whiten=codec.whiten,
        whiten_skip_layers=codec.whiten_skip_layers if codec.whiten else (),
        emulate_published_decoder=codec.emulate_published_decoder,  # the published V kept its scale
        **shared,
    )
    v = BlockStream(
        bits=params.v_bits,
        outlier_threshold=codec.v_outlier_threshold,
        share_basis=codec.v_share_basis,
        whiten=False,
        **shared,
    )
    return Recipe(k=k, v=v)


def coded_layers(params: Params) -> tuple[int, ...]:
    """All layers but the boundary layers."""
    return tuple(i for i in range(params.model.n_layers) if i not in params.codec.boundary_layers)
