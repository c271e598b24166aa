"""Which cells are held against each other: the corners of the factorial, the studied cell, the identity cell."""

from __future__ import annotations

from kvlab.codecs.block.studied import studied_recipe
from kvlab.core.errors import MissingResult
from kvlab.core.params import Params
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results

# Low level first: the corner of the published HF study, and of the published vLLM study.
LEVELS = {"engine": ("hf", "vllm"), "protocol": ("snapshot", "in_forward")}


def corner_cell(
    params: Params,
    results: Results,
    *,
    engine: str,
    protocol: str,
    dtype: str,
    variance_ratio: float | None = None,
    origin: str | None = None,
) -> Measured:
    """The one cell of the factorial with these levels; the studied ratio and origin where none is given."""
    found = results.select(
        "factors",
        engine=engine,
        protocol=protocol,
        dtype=dtype,
        origin=origin or params.calibration.origin,
        recipe=studied_recipe(params, variance_ratio),
    )
    if len(found) != 1:
        raise MissingResult(
            f"{len(found)} cells of {engine}, {dtype}, {protocol} run the studied recipe at {variance_ratio}"
        )
    return found[0]


def identity_of(results: Results, measured: Measured) -> Measured | None:
    """The identity cell that says what the engine does without a codec under the same conditions.

    Of its own study if there is one, else of the factorial; None where neither has one.
    """
    cell = measured.cell
    same = {name: getattr(cell, name) for name in ("engine", "dtype", "attention", "protocol", "placement")}
    for study in (cell.study, "factors"):
        found = results.select(study, "identity", **same)
        if found:
            comparable([measured, found[0]], {"recipe", "layers", "stream", "windows", "origin", "span", "exceptions"})
            return found[0]
    return None
