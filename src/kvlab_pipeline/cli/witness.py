"""`kvlab witness`: a result of cells, computed again by other code. Heavy imports are inside."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Annotated

from kvlab.cli.commands import FromFlags
from kvlab.cli.flags import path, place, several
from kvlab.cli.given import OfParams
from kvlab.core.params import Params

CALIB = Path("calib")  # where a study's files lie, below the folder of its params.yaml
KINDS = {
    "sigma": ("sigma", "{engine}.safetensors"),
    "codebooks": ("codebooks", "{engine}.json"),
    "components": ("components", "{engine}.safetensors"),
    "rotated": ("sigma", "{engine}-post_rope.safetensors"),
    "archive": ("archive", "{engine}.safetensors"),
}
"""Folder and name of each kind of fitted file."""


def _flags() -> list[Parameter]:
    """One for each kind of fitted file."""
    return several({kind: f"fitted {kind}; else those of calib/" for kind in KINDS})


def witness_verb(
    params: OfParams,
    result: Annotated[Path, place("a job's .json or .parquet, as results/factors/MODEL/hf-float32-0.json")],
    fitted: Annotated[dict[str, list[Path]], FromFlags(dict, _flags)],
    windows: Annotated[Path | None, path("what `kvlab step corpus` wrote; else that of calib/")] = None,
) -> None:
    """Compute a result again, by other code.

    It is one window of one cell of each codec in it, by a forward that is written out. Labels, K and V that came to the
    codec, what it answered, its bytes in a file, what attention read, logits and every column are held against a second
    computation. A calibration that is not named is looked for where the study has it.
    """
    from kvlab.calibration.load import by_origin
    from kvlab_pipeline.jobs.rerun import witness

    windows = windows or CALIB / "corpus" / params.model.slug / "windows.safetensors"
    calibrated = by_origin(*(fitted[kind] or of_study(params, kind) for kind in KINDS))
    for one in witness(params, result, windows, calibrated):
        print(
            f"cell {one.cell_id}, window {one.window}: agrees. Logits KL {one.reference_kl:.1e} without and"
            f" {one.alternative_kl:.1e} with the codec (nats); K and V {one.tensor_error:.1e}, as attention read them"
            f" {one.read_error:.1e} (relative), in {one.effects} of {one.expected_effects} places; {one.nbytes} bytes;"
            f" {one.engine.model} of {one.engine.library} {one.engine.version}"
        )


def of_study(params: Params, kind: str) -> list[Path]:
    """The files of one kind that the workflow made for each captured engine, as far as they are there."""
    folder, name = KINDS[kind]
    paths = [CALIB / folder / params.model.slug / name.format(engine=engine) for engine in params.calibration.engines]
    return [file for file in paths if file.exists()]
