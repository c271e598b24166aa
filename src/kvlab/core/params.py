"""What all studies share of `params.yaml`, as frozen models: every key is known, typed and ranged, or refused by name.

Defaults live here; the file holds what a person changes. A study's own section is a model in its folder
(``studies/X/params.py`` of the pipeline), and its `studies.settings` puts all of them together. A rule hands its own
keys to the CLI as JSON (`Params.partial`); keys that the rule did not name cannot be read by the code after it, so a
stage can never depend on an undeclared parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic.fields import FieldInfo

from kvlab.core.codec_settings import Bits, BlockSettings, Frozen
from kvlab.core.errors import ParamsError
from kvlab.core.limits import no_wildcard
from kvlab.core.paramfile import held_to, unknown_key
from kvlab.core.recipe import DType, Engine, Protocol

SLUG = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


FilePath = Annotated[str, AfterValidator(no_wildcard)]
"""A path that the workflow may name among its files."""


class Undeclared(ParamsError):
    """A parameter is read that is not there: no rule named it, or what was given for it is wrong."""

    code = "params.undeclared"


class Section(Frozen):
    """A section of params.yaml. What it does not say is fitted to what the other keys in `takes` leave it."""

    key: ClassVar[str] = ""  # its name in params.yaml, of a section that a study brings
    told: ClassVar[str] = ""  # and what a new params.yaml says of it
    takes: ClassVar[tuple[str, ...]] = ()

    def fitted(self, params: Params) -> Section:
        """This section with what it does not say cut down to what there is; what it says stays.

        Of `params` only the keys in `takes` can be read.
        """
        return self

    def problems(self, params: Params) -> Iterator[str]:
        """One line for each thing that it asks of another section and cannot have."""
        return iter(())

    def unsaid(self, **values: Any) -> Section:
        """This section with those of `values` that it does not say itself."""
        return self.model_copy(update={k: v for k, v in values.items() if k not in self.model_fields_set})


def at_most(name: str, wanted: int, source: str, available: int) -> Iterator[str]:
    """A line where more is wanted than there is."""
    if wanted > available:
        yield f"{name} is {wanted}; allowed: at most {available}, which is {source}"


def running(wanted: tuple[Engine, ...], params: Params) -> tuple[Engine, ...]:
    """Those of some engines that run; where none does, the first that does."""
    return tuple(engine for engine in wanted if engine in params.engines) or params.engines[:1]


def captured(name: str, origin: str, params: Params) -> Iterator[str]:
    """A line where a calibration is asked of an engine that is not captured."""
    engines = params.calibration.engines
    if origin not in engines:
        yield f"{name} is {origin!r}; allowed: {', '.join(engines)}, which are captured (calibration.engines)"


class ModelEntry(Frozen):
    """A model that is measured, as params.yaml names it."""

    path: str = Field(min_length=1, description="directory of a Hugging Face model, or a hub id")
    slug: Annotated[str, Field(pattern=SLUG)] | None = Field(
        default=None, description="folder name of its results; null: the last part of `path`"
    )
    revision: str | None = Field(default=None, description="hub revision (commit or tag); null for a directory")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs over which vLLM splits the model")

    @model_validator(mode="after")
    def _named(self) -> ModelEntry:
        """Without a slug: the last part of the path, as far as it can be a folder's name."""
        if self.slug is None:
            last = self.path.rstrip("/").rpartition("/")[2]
            slug = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+", "-", last).lstrip("-")
            if not slug:
                raise ValueError(f"path {self.path!r} gives its results no folder name; set slug")
            self.__dict__["slug"] = slug  # frozen to everybody else
        return self


class Model(ModelEntry):
    """A model that is measured, with what its config.json says of it."""

    n_layers: int = Field(ge=1, description="number of layers, as its config.json says")


class DatasetSplits(Frozen):
    """Which split of a `datasets:` source feeds which of ours."""

    calib: str = Field(default="train", description="split for calibration windows")
    test: str = Field(default="test", description="split for scored windows")


class Corpus(Section):
    """Which text is read."""

    source: FilePath = Field(
        default="docstrings", min_length=1, description="`docstrings`, a file or glob, or `datasets:ID[/config=NAME]`"
    )
    text_column: str = Field(default="text", description="text column of a `datasets:` source")
    splits: DatasetSplits = Field(default=DatasetSplits(), description="splits of a `datasets:` source")
    other: Annotated[FilePath, Field(min_length=1)] | None = Field(
        default="licences",
        description="text of another domain: `encyclopedia`, `licences`, or a file or glob; null for none",
    )
    scored: tuple[Literal["test", "other"], ...] = Field(
        default=("other", "test"),
        min_length=1,
        description="texts that the scored windows are cut from, in turn; `test`: held out of `source`; default: both,"
        " or `test` where `other` is null",
    )

    def fitted(self, params: Params) -> Corpus:
        """The texts that there are."""
        return self if self.other is not None else self.unsaid(scored=("test",))

    def text_of(self, window: int) -> str:
        """The text that a scored window is cut from."""
        return self.scored[window % len(self.scored)]

    def problems(self, params: Params) -> Iterator[str]:
        """A text that is scored and not named, or named twice."""
        if "other" in self.scored and self.other is None:
            yield "corpus.scored names 'other', and corpus.other is null; name a text there, or leave it out"
        if len(set(self.scored)) < len(self.scored):
            yield f"corpus.scored is {', '.join(self.scored)}; allowed: each text once"


class Windows(Section):
    """How the text is cut: a window is `context` coded tokens and `eval` scored ones."""

    context: int = Field(default=512, ge=8, description="tokens whose K and V are coded")
    eval: int = Field(default=128, ge=2, description="tokens after the context; all but the first are scored")
    test: int = Field(default=32, ge=2, description="number of scored windows")
    calib: int = Field(default=16, ge=2, description="number of calibration windows; intervals on them need two")
    other: int = Field(default=32, ge=2, description="number of scored windows of `corpus.other`")
    seed: int = Field(default=0, ge=0, description="chooses the windows")
    skip: int = Field(
        default=0,
        ge=0,
        description="of each text, scored windows that this seed chooses first and this run leaves out, as an earlier"
        " one had them",
    )

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.context + self.eval


class CalibrationSection(Section):
    """How Sigma_q, the codebooks and the components are fitted."""

    takes = ("engines",)

    engines: tuple[Engine, ...] = Field(
        default=("hf", "vllm"), min_length=1, description="engines that are captured; default: those of the run"
    )
    origin: Engine = Field(default="hf", description="whose capture calibrates every cell that names no other origin")
    dtype: DType = Field(default="float32", description="dtype of the captured model")
    sample: int = Field(
        default=16, ge=2, description="calibration windows whose K and V are kept, in bfloat16; all enter the moments"
    )
    ridge: float = Field(default=0.001, ge=0, description="added to each channel of Sigma_q, times its second moment")
    codebooks: Literal["fitted", "gaussian"] = Field(
        default="fitted",
        description="Lloyd-Max tables: fitted on the calibration split, or those of a Gaussian variable",
    )

    def fitted(self, params: Params) -> CalibrationSection:
        """Captured are the engines that run; the first of them calibrates where hf is none."""
        found = self.unsaid(engines=tuple(dict.fromkeys(params.engines)))
        return found.unsaid(origin="hf" if "hf" in found.engines else found.engines[0])

    def problems(self, params: Params) -> Iterator[str]:
        """An origin that is not captured."""
        yield from captured("calibration.origin", self.origin, params)


class CodecSection(BlockSettings, Section):
    """The studied recipe, without its bits."""

    takes = ("model",)

    outlier_threshold: float | None = Field(
        default=2.0, gt=0, description="K: coefficients beyond it are stored apart; null for none"
    )
    v_outlier_threshold: float | None = Field(default=None, gt=0, description="V: the same")
    share_basis: bool = Field(default=False, description="K: one PCA for all blocks of a call")
    v_share_basis: bool = Field(default=True, description="V: the same")
    whiten: bool = Field(default=True, description="whiten K by the Cholesky factor of Sigma_q")
    whiten_skip_layers: tuple[int, ...] = Field(
        default=(0,), description="layers whose K is not whitened; -1 is the last one"
    )
    boundary_layers: tuple[int, ...] = Field(
        default=(0, -1), description="layers that are left uncoded; -1 is the last one"
    )
    published_decoder: Literal["mse", "inner_product"] | None = Field(
        default=None,
        description="drop the scale of K's residual as the published decoder did; the value is the metric that its"
        " encoder was told: after `inner_product` it did so on whitened layers too; null: decode rightly",
    )

    def fitted(self, params: Params) -> CodecSection:
        """Layers counted from the start; a model of two layers keeps its last one coded, a model of one keeps it."""
        n = params.model.n_layers
        found = self if n > 2 else self.unsaid(boundary_layers=(0,) if n == 2 else ())
        leaves = ("boundary_layers", "whiten_skip_layers")
        return found.model_copy(update={leaf: from_the_start(getattr(found, leaf), n) for leaf in leaves})

    def problems(
        self, params: Params, name: str = "codec", leaves: Collection[str] = ("boundary_layers", "whiten_skip_layers")
    ) -> Iterator[str]:
        """Layers that the model has not, and boundary layers that leave none to code."""
        n = params.model.n_layers
        for leaf in leaves:
            yield from unknown_layers(f"{name}.{leaf}", getattr(self, leaf), n)
        if "boundary_layers" in leaves and set(range(n)) <= set(self.boundary_layers):
            yield f"{name}.boundary_layers names every layer, so none is coded; leave one of 0..{n - 1} out"


def from_the_start(layers: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Layers counted from the end (-1 is the last one) as numbers from the start; what names no layer stays."""
    return tuple(i + n_layers if -n_layers <= i < 0 else i for i in layers)


def unknown_layers(name: str, layers: tuple[int, ...], n_layers: int) -> Iterator[str]:
    """A line where a layer is named that the model has not."""
    wrong = [i for i in layers if not 0 <= i < n_layers]
    if wrong:
        allowed = f"0..{n_layers - 1}, or -{n_layers}..-1 from the end"
        yield f"{name} names layer {', '.join(map(str, wrong))}; allowed: {allowed}"


class Jobs(Section):
    """How measurements are packed into processes."""

    threads: int = Field(default=1, ge=1, description="torch threads of a job; jobs run side by side on other cores")


class StatsSection(Section):
    """The bootstrap."""

    resamples: int = Field(default=10000, ge=200, description="bootstrap resamples of the windows")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="of every interval, two-sided")
    seed: int = Field(default=0, ge=0, description="draws the resamples")


class VerdictSection(Section):
    """Thresholds of the verdict, an interval must lie inside to earn the word; the published study's by default."""

    accept_ppl: float = Field(default=0.01, gt=0, description="ACCEPT: the interval of abs(ppl_ratio - 1) lies below")
    accept_top1: float = Field(
        default=0.95, gt=0, lt=1, description="ACCEPT: the interval of the top-1 agreement lies above"
    )
    marginal_ppl: float = Field(default=0.03, gt=0, description="MARGINAL: as accept_ppl; REJECT: it lies above")
    marginal_top1: float = Field(
        default=0.85, gt=0, lt=1, description="MARGINAL: as accept_top1; REJECT: the interval lies below"
    )


class Report(Section):
    """Words of the report that are not results."""

    title: str = Field(default="What the KV codec costs, and why", description="title of FINDINGS.md and report.html")


class Params(Frozen):
    """The parameters of one model's chain that all studies share; `kvlab_pipeline.studies.settings.Settings` has all.

    A *partial* instance holds only the keys that a rule named.
    """

    bits: Bits = Field(default=3, description="K: bits per coefficient of `codec`, per value of the default `klt`")
    v_bits: Bits = Field(default=2, description="V: the same")
    model: Model
    corpus: Corpus = Corpus()
    windows: Windows = Windows()
    engines: tuple[Engine, ...] = Field(default=("hf", "vllm"), min_length=1, description="engines of the run")
    protocols: tuple[Protocol, ...] = Field(
        default=("in_forward", "snapshot"), min_length=1, description="protocols of the run"
    )
    studies: tuple[str, ...] | None = None  # which of them are measured; see `kvlab_pipeline.studies.settings.Settings`
    calibration: CalibrationSection = CalibrationSection()
    codec: CodecSection = CodecSection()
    jobs: Jobs = Jobs()
    stats: StatsSection = StatsSection()
    verdict: VerdictSection = VerdictSection()
    report: Report = Report()

    @classmethod
    def complete(cls, data: dict) -> Params:
        """Check a mapping of changes to the defaults; `ParamsError` with a line for each mistake."""
        found, problems = cls.examined(data)
        if problems:
            raise ParamsError(*problems)
        return found

    @classmethod
    def examined(cls, data: dict) -> tuple[Params, list[str]]:
        """Defaults with the changes of `data`, fitted to one another, and a line for each mistake.

        A key whose value is wrong is left out, and what others ask of it is not looked at.
        """
        values, problems = cls._read(data)
        for name, field in cls.model_fields.items():
            if name not in data and field.is_required():
                problems.append(f"parameter {name!r} is missing")
            elif name not in data:
                values[name] = field.default
        found, unfit = cls._holding(values), []
        for name in (name for name in cls.model_fields if name in values):
            try:
                found = found.model_copy(update={name: found._fitted(name)})
            except Undeclared:
                unfit.append(name)
        found = cls._holding({name: value for name, value in found.__dict__.items() if name not in unfit})
        return found, problems + list(found._conflicts())

    @classmethod
    def partial(cls, data: dict) -> Params:
        """Take the resolved values that a rule hands to its job; reading a key that is not among them is refused."""
        values, problems = cls._read(data)
        if problems:
            raise ParamsError(*problems)
        return cls._holding(values)

    @classmethod
    def _read(cls, data: dict) -> tuple[dict[str, Any], list[str]]:
        """The valid ones of some keys, each by itself, and a line for each mistake in the others."""
        problems = [unknown_key(key, cls.model_fields) for key in data if key not in cls.model_fields]
        values = {}
        for key in (key for key in cls.model_fields if key in data):
            try:
                values[key] = held_to(_kind(cls.model_fields[key]), data[key], (key,))
            except ParamsError as error:
                problems += error.lines
        return values, problems

    @classmethod
    def _holding(cls, values: dict[str, Any]) -> Params:
        """An instance of nothing but these values: defaults of other keys are not there to be read."""
        return _nothing(cls).model_copy(update=values)

    def _fitted(self, name: str) -> Any:
        value, there = getattr(self, name), self.__dict__
        if not isinstance(value, Section):
            return value
        return value.fitted(self._holding({key: there[key] for key in value.takes if key in there}))

    def _conflicts(self) -> Iterator[str]:
        """What the sections ask of one another and cannot have, as far as there is something to look at."""
        for section in self.__dict__.values():
            if isinstance(section, Section):
                yield from as_far(section.problems(self))

    def __getattr__(self, name: str) -> Any:
        if name in type(self).model_fields:
            raise Undeclared(f"parameter {name!r} is read here but not named by the rule; add it to its `cfg`")
        raise AttributeError(name)


@cache
def _nothing(cls: type[Params]) -> Params:
    found = cls.model_construct()
    found.__dict__.clear()
    return found


def _kind(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def as_far(lines: Iterator[str]) -> Iterator[str]:
    """Lines until one would need a parameter that is not there."""
    try:
        yield from lines
    except Undeclared:
        return
