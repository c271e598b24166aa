"""Which results one process measures. Torch-free.

What several engines measure in a dtype is measured together, whatever study asks for it: what they are held against,
transformers' own, is computed once for all, and vLLM, which takes long to start, starts once for each dtype. What one
engine measures alone goes on beside that, and so does what the gate judges, which not every model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.core.params import Params
from kvlab_pipeline.jobs import plan

BASELINE, MECHANISMS = "baseline", "mechanisms"
Contents = dict[str, tuple[str, ...]]
"""Study -> its jobs, which are the stems of their files: ``results/<study>/<model>/<job>.parquet`` and ``.json``."""


def units(params: Params) -> dict[str, Contents]:
    """Name -> what is measured together: ``float32``, ``bfloat16``, ``hf-float32``, ``hf-mechanisms``, ``ladder``."""
    found: dict[str, Contents] = {}
    for study, dtype, jobs in by_dtype(params):
        engines = engines_of({study: jobs})
        found.setdefault(dtype if len(engines) > 1 else f"{engines[0]}-{dtype}", {})[study] = jobs
    found |= {f"{engine}-{MECHANISMS}": {MECHANISMS: (engine,)} for engine in params.engines}
    found[plan.LADDER] = {plan.LADDER: tuple(plan.job_names(params, plan.LADDER))}
    return found


def by_dtype(params: Params) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Study, dtype and its jobs there, of everything but the mechanisms and the ladder."""
    runs = {BASELINE: list(plan.baseline_runs(params))}
    runs |= {study: plan.job_names(params, study) for study in plan.studies(params) if study != plan.LADDER}
    for study, jobs in runs.items():
        for dtype in dict.fromkeys(job.split("-")[1] for job in jobs):
            yield study, dtype, tuple(job for job in jobs if job.split("-")[1] == dtype)


def engines_of(contents: Contents) -> list[str]:
    """The engines on which a unit measures, each once; a job's name begins with its own."""
    return sorted({job.partition("-")[0] for jobs in contents.values() for job in jobs})


def origins(params: Params, contents: Contents) -> list[str]:
    """Whose captures calibrate what a unit measures, the usual one first."""
    named = [origin for study in contents if study in plan.STUDIES for origin in plan.origins(params, study)]
    return list(dict.fromkeys([params.calibration.origin, *named]))


def reads_tables(contents: Contents) -> bool:
    """Whether a unit reads Lloyd-Max tables: the baseline runs the studied recipe; ladder and mechanisms fit none."""
    return any(study in (BASELINE, *plan.STUDIES) and study != plan.LADDER for study in contents)
