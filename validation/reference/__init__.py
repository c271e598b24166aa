"""The embedded reference model: a small Qwen2 trained on docstrings, so that no model hub is needed."""

from __future__ import annotations

import os
from pathlib import Path


def main_train(
    out: Path, tokens: int, max_minutes: float | None = None, resume: bool = False, copying_only: bool = False
) -> None:
    """Train the reference model and put it at `out` once it is complete and verified.

    Everything is written to a sibling folder and renamed at the end: a killed run leaves an earlier
    model at `out` as it was, and `resume` continues from the last checkpoint.

    Parameters
    ----------
    out : Path
        The folder of the model.
    tokens : int
        Training tokens to spend on text; what copying takes is fixed.
    max_minutes : float, optional
        Wall-clock ceiling of the training loops; the learning rate reaches its end by then.
    resume : bool
        Continue a run that was stopped.
    copying_only : bool
        Leave the training on text as it is: take the model at `out`, and train it on copying.
    """
    # A thread that waits by spinning starves the one it waits for when other programs use the cores: three
    # times slower beside one busy process. OpenMP reads this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from validation.reference.build import build  # torch is loaded only by those who train

    build(Path(out), tokens, max_minutes, resume, copying_only)
