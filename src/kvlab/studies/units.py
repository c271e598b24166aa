"""Which results one process measures: all of an engine in a dtype, whatever study they belong to. Torch-free.

An engine of vLLM takes long to start, so each dtype has one process. One of transformers starts in a second: there
what the gate judges has a process of its own, so that both go side by side.
"""

from __future__ import annotations

from kvlab.base.params import Params
from kvlab.lab import plan

BASELINE, MECHANISMS = "baseline", "mechanisms"
APART = ("hf",)  # engines whose mechanisms are measured in a process of their own
Contents = dict[str, tuple[str, ...]]
"""Study -> its jobs, which are the stems of their files: ``results/<study>/<model>/<job>.parquet`` and ``.json``."""


def units(params: Params) -> dict[str, Contents]:
    """Name -> what is measured together: ``hf-float32``, ``vllm-bfloat16``, ``hf-mechanisms``, ``ladder``."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for engine, dtype in engines(params):
        unit = found.setdefault(f"{engine}-{dtype}", {})
        for study in of_engines(params):
            jobs = tuple(j for j in plan.job_names(params, study) if j.startswith(f"{engine}-{dtype}-"))
            unit |= {study: jobs} if jobs else {}
        runs = tuple(run for run, made in plan.baseline_runs(params).items() if made[:2] == (engine, dtype))
        unit |= {BASELINE: runs} if runs else {}
    for engine in params.engines:
        name = f"{engine}-{MECHANISMS}" if engine in APART else f"{engine}-{params.mechanisms.dtype}"
        found.setdefault(name, {})[MECHANISMS] = (engine,)
    found[plan.LADDER] = {plan.LADDER: tuple(plan.job_names(params, plan.LADDER))}
    return {name: unit for name, unit in found.items() if unit}


def of_engines(params: Params) -> list[str]:
    """The studies whose cells go into the process of their engine: all but the ladder, which has one of its own."""
    return [study for study in plan.studies(params) if study != plan.LADDER]


def engines(params: Params) -> list[tuple[str, str]]:
    """Every engine and dtype in which something is measured."""
    jobs = [job for study in of_engines(params) for job in plan.job_names(params, study)]
    named = [(engine, dtype) for engine, dtype, *_ in (job.split("-") for job in jobs)]
    named += [made[:2] for made in plan.baseline_runs(params).values()]
    return list(dict.fromkeys(named))


def origins(params: Params, contents: Contents) -> list[str]:
    """Whose captures calibrate what a unit measures, the usual one first."""
    named = [origin for study in contents if study in plan.STUDIES for origin in plan.origins(params, study)]
    return list(dict.fromkeys([params.calibration.origin, *named]))


def reads_tables(contents: Contents) -> bool:
    """Whether a unit reads Lloyd-Max tables: the baseline runs the studied recipe; ladder and mechanisms fit none."""
    return any(study in (BASELINE, *plan.STUDIES) and study != plan.LADDER for study in contents)
