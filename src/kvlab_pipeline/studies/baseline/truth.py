"""What the runs of the engine baseline are held against: all the truth, some also another run."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.core.params import Params
from kvlab.core.recipe import ENGINES

TRUTH = ("hf", "float32", ENGINES["hf"].attention)


def peer_of(runs: Mapping[str, tuple[str, str, str]], run: str) -> str | None:
    """The run of the truth's engine, in the same dtype, that another engine's run is also held against.

    In float32 that run is the truth itself, so there is none.

    Parameters
    ----------
    runs : mapping of str to (engine, dtype, attention)
        `plan.baseline_runs`.
    run : str
        One of them.

    Returns
    -------
    str or None
        A name in `runs`; None for the truth's engine, in the truth's dtype, and when the truth's engine is
        not run in that dtype with the truth's attention.
    """
    engine, dtype, _ = runs[run]
    if engine == TRUTH[0] or dtype == TRUTH[1]:
        return None
    return next((name for name, made in runs.items() if made == (TRUTH[0], dtype, TRUTH[2])), None)


def trial_windows(params: Params) -> int:
    """Scored windows on which both engines run the same codec in float32: as far as the factorial has them there."""
    return min(params.baseline.windows, params.gap.windows_in("float32", params))


def own_jitter(engine: str, number: int) -> str:
    """The comparison of an engine's coded run after a rounding error with the same engine as it is."""
    return f"{engine}-jitter-{number}"
