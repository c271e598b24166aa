"""Which cells are held against each other: the published corners, the studied codec, the identity cell."""

from __future__ import annotations

from kvlab.errors import MissingResult
from kvlab.params import Params, studied_recipe
from kvlab.report.gather import Measured, Results, comparable

# Low level first: the corner of the published HF study, and of the published vLLM study.
LEVELS = {"engine": ("hf", "vllm"), "protocol": ("snapshot", "in_forward")}


def codec_cell(
    params: Params, results: Results, engine: str, protocol: str, dtype: str, ratio: float | None = None
) -> Measured:
    """The one cell that codes both streams with the studied recipe, at `ratio` if given."""
    found = results.select(
        "cells",
        engine=engine,
        protocol=protocol,
        dtype=dtype,
        stream="kv",
        recipe=studied_recipe(params, ratio),
    )
    if len(found) != 1:
        raise MissingResult(f"{len(found)} cells of {engine}, {dtype}, {protocol} run the studied recipe at {ratio}")
    return found[0]


def identity_of(results: Results, measured: Measured) -> Measured | None:
    """The identity cell that says what the engine does without a codec under the same conditions."""
    cell = measured.cell
    found = results.select("cells", "identity", engine=cell.engine, dtype=cell.dtype, protocol=cell.protocol)
    if not found:
        return None
    comparable([measured, found[0]], {"recipe", "layers", "stream", "windows"})
    return found[0]
