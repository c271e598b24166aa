"""What a small cache buys, alone and under load, by the codecs of the gate's rows of pages, as people serve them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvlab.cache.files.calibration import write_calibration
from kvlab.calibration.fitting import CalibrationText
from kvlab.calibration.needs import needs_calibration
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.recipe import Recipe
from kvlab.engines.registry import start
from validation.serving.load import study as loads
from validation.serving.study import study

DEFAULT = ("klt",)  # where `mechanisms.pages` names none
PLAIN = (("hadamard", 4),)  # simulated as well: a codec without a calibration
CONTEXT, WINDOWS = 512, 32  # what `kvlab calibrate` takes


def capacity(params: Params, out: Path) -> None:
    """Write ``CAPACITY.md`` and ``capacity.json`` into `out`; raises as `study.study`.

    Parameters
    ----------
    params : Params
        `mechanisms` says which codecs vLLM's pages hold, at which bits, how many tokens are exact beside them, and in
        what the engine computes.
    """
    with tempfile.TemporaryDirectory() as folder:
        study(resolve(params.model).path, recipes(params, Path(folder)), out, params.mechanisms.dtype)


def service(params: Params, out: Path) -> None:
    """Write ``LOAD.md``, ``load.json`` and ``steps.json`` into `out`; see `capacity`, and `load.study` for the rest.

    No token is exact there: requests are of some hundred tokens, and would be exact whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        loads(resolve(params.model).path, recipes(params, Path(folder), PLAIN, exact=False), out)


def recipes(params: Params, folder: Path, beside: Iterable[tuple[str, float]] = (), exact: bool = True) -> list[Path]:
    """A file for each codec and width that pages may hold, and for those `beside` them, in a folder.

    They are what `kvlab calibrate` writes: with ``--rotary after`` for `klt`, and with ``--sink`` and ``--recent``
    where tokens are `exact` beside what is coded.
    """
    asked = params.mechanisms
    wanted = [(codec, bits) for codec in asked.pages or DEFAULT for bits in asked.bits]
    named = {f"{codec}{bits}": served(params, codec, bits, exact) for codec, bits in dict.fromkeys([*wanted, *beside])}
    info = resolve(params.model)
    source = CalibrationText.read(info, None, None, CONTEXT, WINDOWS)
    engine = start("hf", info, "float32", max_tokens=CONTEXT)
    try:
        read = [recipe for recipe in named.values() if any(map(needs_calibration, (recipe.k, recipe.v)))]
        calibrated = source.fit(engine, read)
    finally:
        engine.close()
    return [
        write_calibration(folder / f"{name}.kv", recipe, calibrated, info, n_tokens=source.tokens)
        for name, recipe in named.items()
    ]


def served(params: Params, codec: str, bits: float, exact: bool) -> Recipe:
    """The recipe of a codec in pages, `klt` where a step is shortest."""
    ends = {"sink": params.mechanisms.pages_sink, "recent": params.mechanisms.pages_recent} if exact else {}
    return named_recipe(codec, bits, params=params, rotary="after" if codec == "klt" else None, **ends)
