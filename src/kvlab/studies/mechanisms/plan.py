"""What the gate is to judge, planned engine by engine. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from kvlab.base.params import Params
from kvlab.base.recipe import IDENTITY, Cell, digest
from kvlab.base.rungs import has_bits, ladder_recipe

BASELINE = "baseline"
FIDELITY, NEEDLE = "kv_fidelity", "needle"  # ids of the gate's registry of evals
METRICS = {FIDELITY: ("kl", "delta_nll", "top1_agreement"), NEEDLE: ("needle_recall",)}
TRANSFORMING = ("klt", "block")  # registered as kv_compression; the others as kv_quantization


class Variant(NamedTuple):
    """Something that is measured on one engine beside the engine as it is.

    Parameters
    ----------
    label : str
        Readable, and unique on an engine: ``klt 2``, ``fp8_e4m3``, ``baseline``.
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
    """

    label: str
    mechanism: str
    variant: str
    method: str | None = None
    scope: str | None = None
    bits: int | None = None
    cell: Cell | None = None
    cache_dtype: str | None = None

    @property
    def recipe_id(self) -> str:
        """Identity of what is done to K and V."""
        if self.cache_dtype:
            return digest({"kv_cache_dtype": self.cache_dtype})
        return (self.cell.recipe if self.cell else IDENTITY).recipe_id

    @property
    def span(self) -> str:
        """Which tokens are stored otherwise than the engine does."""
        return "window" if self.cache_dtype else "context"

    def protocol(self, of_codecs: str) -> str:
        """Where K and V are stored; where nothing is done to them every protocol is the same, so that `of_codecs`."""
        return "in_forward" if self.cache_dtype else of_codecs


def variants(params: Params, engine: str) -> list[Variant]:
    """Everything that is measured on one engine, the engine as it is first."""
    found = [Variant(BASELINE, BASELINE, "none")]
    found += [_coded(params, engine, codec, bits) for codec, bits in _choices(params)]
    if engine == "vllm":
        found += [_stored(dtype) for dtype in params.mechanisms.cache_dtypes]
    return found


def _choices(params: Params) -> list[tuple[str, int | None]]:
    asked = params.mechanisms
    return [(codec, bits) for codec in asked.codecs for bits in (asked.bits if has_bits(codec) else (None,))]


def _coded(params: Params, engine: str, codec: str, bits: int | None) -> Variant:
    label = codec if bits is None else f"{codec} {bits}"
    cell = Cell(
        study="mechanisms",
        label=label,
        engine=engine,
        dtype=params.mechanisms.dtype,
        protocol=params.mechanisms.protocol,
        origin=params.calibration.origin,
        stream="kv",
        layers=tuple(range(params.model.n_layers)),
        windows=1,  # how many is a matter of each eval
        recipe=ladder_recipe(codec, bits, "", params),
    )
    mechanism = "kv_compression" if codec in TRANSFORMING else "kv_quantization"
    return Variant(label, mechanism, codec, method=codec, scope="kv_cache", bits=bits, cell=cell)


def _stored(dtype: str) -> Variant:
    return Variant(dtype, "kv_quantization", dtype, method=dtype, scope="kv_cache", cache_dtype=dtype)


def cells(params: Params, engine: str) -> list[Cell]:
    """The cells of the codecs on one engine."""
    return [variant.cell for variant in variants(params, engine) if variant.cell]
