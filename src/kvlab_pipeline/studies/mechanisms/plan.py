"""What the gate is to judge, planned engine by engine. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab.attention.named import EVICTIONS
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.catalogue import KEPT_WHOLE, codec_modules, rates
from kvlab.codecs.recipes import named_recipe
from kvlab.core.params import Params
from kvlab.core.recipe import ENGINES, IDENTITY, SPAN_OF, Cell, Recipe, digest

if TYPE_CHECKING:
    from kvlab_pipeline.studies.mechanisms.params import Mechanisms

BASELINE = "baseline"
SERVED = "served"  # protocol of the rows of `kvlab.Cache`
# ids of the gate's registry of evals
FIDELITY, NEEDLE, GREEDY = "kv_fidelity", "needle", "greedy_agreement"
TASKS = {f"ruler_{task}": task for task in ("niah_single", "niah_multikey", "niah_multivalue", "vt")}
"""The evals of tasks in which an answer is written, by name of `kvlab.text.ruler.FORMS`."""
METRICS = {FIDELITY: ("kl", "delta_nll", "top1_agreement"), NEEDLE: ("needle_recall",)}
METRICS |= {GREEDY: ("greedy_prefix", "greedy_same")} | {name: (task,) for name, task in TASKS.items()}
GREEDY_TOKENS = 64  # that are written after a window's context
PASSED = (FIDELITY, NEEDLE)  # scored in passes over given tokens; in the others tokens are written
WRITING = ("hf",)  # engines that write over a given cache
CACHED = ("hf",)  # engines that take a `kvlab.Cache`
READING = {"block_sparse": "block_sparse", "window": "block_sparse", "chunk_summary": "chunk_summary"}
"""The gate's variant of each kind of pattern that is measured here."""
KEEPING = {"latent": "latent_lowrank"} | dict.fromkeys(EVICTIONS, "eviction")
"""The same of what keeps less of a finished context."""
TRANSFORMING = ("klt", "block", *KEPT_WHOLE)  # registered as kv_compression; the others as kv_quantization


class PlannedVariant(NamedTuple):
    """Something that is measured on one engine beside the engine as it is.

    Parameters
    ----------
    label : str
        Readable, and unique on an engine: ``klt 2 snapshot``, ``fp8_e4m3``, ``baseline``.
    mechanism, variant : str
        As the gate's registry names it.
    method, scope : str or None
        As the gate's registry names them.
    bits : int or None
        Of both streams.
    cell : Cell or None
        A codec of this project: what is coded, where and how.
    cache_dtype : str or None
        Of the engine's own cache.
    paged : bool
        Whether the engine's own cache holds what the codec of `cell` writes.
    cached : bool
        Whether the codec of `cell` is that of a `kvlab.Cache`; otherwise, unless `paged`, it runs beside the engine's
        own cache.
    pattern : str or None
        What attention reads by, as `kvlab.attention.named` takes it; K and V are stored as they are.
    kept : str or None
        What is kept of a finished context, as it takes that; the cell then says where, and codes nothing.
    """

    label: str
    mechanism: str
    variant: str
    method: str | None = None
    scope: str | None = None
    bits: int | None = None
    cell: Cell | None = None
    cache_dtype: str | None = None
    paged: bool = False
    cached: bool = False
    pattern: str | None = None
    kept: str | None = None

    @property
    def tapped(self) -> bool:
        """Whether a codec, or what keeps less, runs beside the engine's own cache."""
        return self.cell is not None and not self.paged and not self.cached

    @property
    def codec(self) -> str | None:
        """The codec that runs."""
        return self.cell.recipe.k.codec if self.cell and not self.kept else None

    @property
    def recipe_id(self) -> str:
        """Identity of what is done to K and V."""
        if self.cache_dtype:
            return digest({"kv_cache_dtype": self.cache_dtype})
        if self.pattern or self.kept:
            return digest({"pattern": self.pattern or self.kept})
        return (self.cell.recipe if self.cell else IDENTITY).recipe_id

    def span(self, known: Sequence[str]) -> str:
        """Which tokens are counted: those that its protocol stores, and of a pattern the contexts, which it reads."""
        return "context" if self.pattern else SPAN_OF[self.protocol(known)]

    def protocol(self, known: Sequence[str]) -> str:
        """When K and V are coded; where nothing is done to them all protocols are one: a snapshot if it is `known`.

        A pattern is what attention reads by in the whole pass. The Cache has one of its own: the context is computed
        as it is and coded when its call ends, later tokens are coded as they come.
        """
        if self.cached:
            return SERVED
        if self.cell or self.cache_dtype or self.pattern:
            return self.cell.protocol if self.cell else "in_forward"
        return "snapshot" if "snapshot" in known else "in_forward"


def variants(params: Params, engine: str) -> list[PlannedVariant]:
    """Everything that is measured on one engine, the engine as it is first."""
    found = [PlannedVariant(BASELINE, BASELINE, "none")]
    settings = params.mechanisms
    if engine in CACHED:
        for codec, bits in _each(settings.caches, settings.cached_bits, settings):
            found.append(_coded(params, engine, codec, bits, "snapshot", SERVED)._replace(cached=True))
    for protocol in (there := protocols(params, engine)):
        codecs = settings.in_forward if protocol == "in_forward" else settings.codecs
        each = _each(codecs, settings.bits, settings)
        found += [_coded(params, engine, codec, bits, protocol) for codec, bits in each]
    if engine == "vllm":
        found += [_stored(dtype) for dtype in settings.cache_dtypes]
    if ENGINES[engine].paged:
        each = _each(settings.pages, settings.bits, settings)
        found += [_paged(params, engine, codec, bits) for codec, bits in each]
    if "snapshot" in there:
        found += [_keeping(params, engine, name) for name in settings.kept]
    return found + [_patterned(name) for name in settings.patterns]


def protocols(params: Params, engine: str) -> tuple[str, ...]:
    """Those of an engine's rows.

    A finished cache is the same on any engine, and nobody serves from it: the first engine has its rows. Where the
    Cache has rows, they tell what serving costs, and codecs beside the engine's own cache would tell it a second time.
    """
    finished, cached = engine == params.engines[0], engine in CACHED and params.mechanisms.caches
    left_out = [*([] if finished else ["snapshot"]), *(["in_forward"] if cached else [])]
    return tuple(one for one in params.mechanisms.protocols if one not in left_out)


def _each(codecs: Sequence[str], bits: Sequence[int], settings: Mechanisms) -> list[tuple[str, int | None]]:
    """Codecs at each of their bits; some have none."""
    return [(codec, one) for codec in codecs for one in rates(codec, bits, settings.whole_bits)]


def _coded(params: Params, engine: str, codec: str, bits: int | None, protocol: str, word: str = "") -> PlannedVariant:
    label = " ".join(filter(None, (codec, str(bits or ""), word or protocol)))
    cell = _cell(params, engine, codec, bits, protocol, label)
    return PlannedVariant(label, _mechanism(codec), codec, method=codec, scope="kv_cache", bits=bits, cell=cell)


def _paged(params: Params, engine: str, codec: str, bits: int) -> PlannedVariant:
    asked = params.mechanisms
    label, name = f"{codec} {bits} pages", f"{codec}{'_after' * (asked.pages_rotary == 'after')}_pages"
    kept = {"sink": asked.pages_sink, "recent": asked.pages_recent}
    recipe = named_recipe(codec, bits, params=params, rotary=asked.pages_rotary, **kept)
    cell = _of_all_layers(params, engine, recipe, "in_forward", label)
    return PlannedVariant(
        label, _mechanism(codec), name, method=name, scope="kv_cache", bits=bits, cell=cell, paged=True
    )


def _mechanism(codec: str) -> str:
    return "kv_compression" if codec in TRANSFORMING else "kv_quantization"


def _cell(params: Params, engine: str, codec: str, bits: int | None, protocol: str, label: str) -> Cell:
    return _of_all_layers(params, engine, named_recipe(codec, bits, params=params), protocol, label)


def _of_all_layers(params: Params, engine: str, recipe: Recipe, protocol: str, label: str) -> Cell:
    return Cell(
        study="mechanisms",
        label=label,
        engine=engine,
        dtype=params.mechanisms.dtype,
        protocol=protocol,
        span=SPAN_OF[protocol],
        origin=params.calibration.origin,
        stream="kv",
        layers=tuple(range(params.model.n_layers)),
        windows=1,  # how many is a matter of each eval
        recipe=recipe,
    )


def _keeping(params: Params, engine: str, name: str) -> PlannedVariant:
    variant = KEEPING[name.partition(":")[0]]
    cell = _of_all_layers(params, engine, IDENTITY, "snapshot", name)
    return PlannedVariant(name, "kv_compression", variant, method=variant, scope="kv_cache", cell=cell, kept=name)


def _patterned(name: str) -> PlannedVariant:
    variant = READING[name.partition(":")[0]]
    return PlannedVariant(name, "compressed_attention", variant, method=variant, scope="attention", pattern=name)


def _stored(dtype: str) -> PlannedVariant:
    return PlannedVariant(dtype, "kv_quantization", dtype, method=dtype, scope="kv_cache", cache_dtype=dtype)


def scored_items(items: Mapping[str, int], engine: str, protocol: str) -> dict[str, int]:
    """Of the items that there are, those that a row of an engine and a protocol is asked, by eval.

    Tokens are written over a stored context, and by an engine that can begin there.
    """
    writes = engine in WRITING and protocol == "snapshot"
    return {name: items[name] for name in METRICS if items.get(name) and (writes or name in PASSED)}


def cells(params: Params, engine: str) -> list[Cell]:
    """The cells of the codecs on one engine."""
    return [variant.cell for variant in variants(params, engine) if variant.codec]


def recipes(params: Params) -> list[Recipe]:
    """What is coded by on all engines, and what runs beside it: the identity, the canary's block codec."""
    coded = [cell.recipe for engine in params.engines for cell in cells(params, engine)]
    return [IDENTITY, studied_recipe(params), *coded]


def modules(params: Params) -> list[str]:
    """The code that measures the rows of all engines, with what it loads by name; their `code` is its digest."""
    return [
        "kvlab_pipeline.studies.mechanisms.measure",
        *(["kvlab.measure.paged"] if params.mechanisms.pages else []),
        *(f"kvlab.engines.{engine}.engine" for engine in sorted(params.engines)),
        *codec_modules(recipes(params)),
    ]
