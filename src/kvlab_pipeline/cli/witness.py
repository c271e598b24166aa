"""`kvlab witness`: a result of cells, computed again by other code. Heavy imports are inside."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.cli.flags import SETTINGS, path, place
from kvlab.core.params import Params

CALIB = Path("calib")  # where a study's files lie, below the folder of its params.yaml


def witness_verb(args: argparse.Namespace) -> None:
    """Compute one window of one cell of each codec in a result again, by a forward that is written out.

    Labels, K and V that came to the codec, what it answered, its bytes in a file, what attention read, logits and every
    column are held against a second computation. A calibration that is not named is looked for where the study has it.
    """
    from kvlab.calibration.load import by_origin
    from kvlab.cli.given import params_of
    from kvlab_pipeline.jobs.rerun import witness

    params = params_of(args)
    windows = args.windows or CALIB / "corpus" / params.model.slug / "windows.safetensors"
    fitted = by_origin(*(getattr(args, kind) or of_study(params, kind) for kind in KINDS))
    for one in witness(params, args.result, windows, fitted):
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


KINDS = {
    "sigma": ("sigma", "{engine}.safetensors"),
    "codebooks": ("codebooks", "{engine}.json"),
    "components": ("components", "{engine}.safetensors"),
    "rotated": ("sigma", "{engine}-post_rope.safetensors"),
    "archive": ("archive", "{engine}.safetensors"),
}
"""Folder and name of each kind of fitted file."""

FLAGS = [
    *SETTINGS,
    place("result", "a job's .json or .parquet, as results/factors/MODEL/hf-float32-0.json"),
    path("--windows", "what `kvlab step corpus` wrote; else that of calib/", required=False),
    *(path(f"--{kind}", f"fitted {kind}; else those of calib/", required=False, nargs="+") for kind in KINDS),
]
