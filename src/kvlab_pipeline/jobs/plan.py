"""Which cells each study measures, and how they are packed into jobs. Torch-free.

The workflow reads the jobs' names from here, the CLI the cells of one job; both see the same list. A study's
cells come from the ``plan.py`` of its folder, imported when that study is asked for, so that nothing of one study
hangs on the plan of another.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvlab.calibration.needs import coded_by
from kvlab.codecs.block import BlockStream
from kvlab.codecs.block.studied import studied_recipe
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import MissingResult, ParamsError, UnknownName
from kvlab.core.folders import holding
from kvlab.core.params import Params
from kvlab.core.recipe import Cell, Placement

STUDY_FOLDERS = "kvlab_pipeline.studies"
STUDIES = holding(STUDY_FOLDERS, "plan", "chapter")  # those that bring cells and a chapter of the report
LADDER, CHOSEN = "ladder", "mitigations"
ALWAYS = "factors"  # the studied cell and the floors of all others are among its corners


def studies(params: Params) -> tuple[str, ...]:
    """Those of `STUDIES` that these parameters ask for."""
    asked = params.studies
    return STUDIES if asked is None else tuple(study for study in STUDIES if study in asked or study == ALWAYS)


def targets(params: Params) -> tuple[str, ...]:
    """Those that can be measured: the ladder is a target of its own where the report does not ask for it."""
    return tuple(dict.fromkeys((*studies(params), LADDER)))


def module(study: str) -> str:
    """The module of a study's plan."""
    if study not in STUDIES:
        raise UnknownName("study", study, STUDIES)
    return f"{STUDY_FOLDERS}.{study}.plan"


def reads(study: str) -> tuple[str, ...]:
    """The keys of params.yaml that a study's cells are planned from, beside what every codec reads."""
    return import_module(module(study)).READS


def study_cells(params: Params, study: str, engine: str, choice: Frozen | None = None) -> list[Cell]:
    """The cells of one study on one engine, each once, in the plan's order.

    Parameters
    ----------
    choice : kvlab_pipeline.studies.mitigations.plan.LayerChoice, optional
        Which layers the calibration split speaks for; the mitigations cannot be planned without.

    Raises
    ------
    UnknownName
        There is no such study.
    MissingResult
        The study needs a choice.
    """
    cells: Callable = import_module(module(study)).cells
    if study == CHOSEN:
        if choice is None:
            raise MissingResult("the mitigations are planned from a choice of layers; run `kvlab step choose`")
        found = cells(params, engine, choice)
    else:
        found = cells(params, engine)
    return list({cell.cell_id: cell for cell in found}.values())


def check(params: Params) -> None:
    """Plan everything, so that what cannot be planned is refused before anything runs.

    Raises
    ------
    UserError
        The first thing that cannot be planned, in one line.
    """
    baseline_runs(params)
    for study in targets(params):
        job_names(params, study)
    mitigated_recipes(params)
    for engine in params.engines:
        import_module(f"{STUDY_FOLDERS}.mechanisms.plan").variants(params, engine)


def job_names(params: Params, study: str) -> list[str]:
    """Names of a study's jobs, for which no choice is needed: a study with a choice has one job per engine."""
    if study == CHOSEN:
        return [f"{engine}-{params.gap.dtype}-0" for engine in params.engines]
    return list(jobs(params, study))


def jobs(params: Params, study: str, choice: Frozen | None = None) -> dict[str, list[Cell]]:
    """Job name -> its cells; a job has one engine, dtype and attention, and leaves one table.

    Names read ``<engine>-<dtype>-<number>``, for example ``hf-bfloat16-0``. Which jobs are measured in one process is
    said by `studies.units`.
    """
    packed: dict[str, list[Cell]] = {}
    engines = (params.ladder.engine,) if study == LADDER else params.engines
    for engine in engines:
        cells = study_cells(params, study, engine, choice)
        for dtype in sorted({cell.dtype for cell in cells}):
            same = [cell for cell in cells if cell.dtype == dtype]
            batches = [[c for c in same if c.attention == a] for a in dict.fromkeys(cell.attention for cell in same)]
            packed |= {f"{engine}-{dtype}-{number}": batch for number, batch in enumerate(batches)}
    return packed


def job_cells(params: Params, study: str, job: str, choice: Frozen | None = None) -> list[Cell]:
    """The cells of one job; `UnknownName` lists the job names there are."""
    packed = jobs(params, study, choice)
    if job not in packed:
        raise UnknownName(f"job of study {study!r}", job, packed)
    return packed[job]


Fitting = tuple[str, Placement, BlockStream]
"""A Lloyd-Max table to be fitted: for K or V, coded at a placement, by a stream recipe."""


def fittings(params: Params, origin: str) -> list[Fitting]:
    """The tables that the studies' cells read which are calibrated on one engine's capture, each once.

    Those of the studied recipe, which the engine baseline and the drop-ins read too, come first. The ladder reads none.
    """
    recipes = [("pre_rope", studied_recipe(params))]
    for study in (study for study in studies(params) if study != LADDER):
        if study == CHOSEN:
            mitigated = mitigated_recipes(params) if origin == params.calibration.origin else []
            recipes += [("pre_rope", recipe) for recipe in mitigated]
            continue
        cells = [c for engine in params.engines for c in study_cells(params, study, engine) if c.origin == origin]
        recipes += [(cell.placement, recipe) for cell in cells for recipe in cell.recipes]
    found = {}
    for placement, recipe in recipes:
        for which, stream in (("k", recipe.k), ("v", recipe.v)):
            stream = coded_by(stream)
            if isinstance(stream, BlockStream) and stream.codebook == "fitted":
                found[which, placement if which == "k" else "pre_rope", stream] = None
    return list(found)


def mitigated_recipes(params: Params) -> list:
    """Every recipe that an arm of the mitigations may run, whatever is chosen."""
    plan = import_module(module(CHOSEN))
    arms = plan.arms(params, plan.LayerChoice.none().model_copy(update={"hot": (0,)}))
    return [recipe for arm in arms for recipe in (arm.recipe, *(special.recipe for special in arm.exceptions))]


def origins(params: Params, study: str) -> list[str]:
    """Whose captures a study's cells are calibrated on, the usual one first."""
    if study == CHOSEN:
        return [params.calibration.origin]
    engines = (params.ladder.engine,) if study == LADDER else params.engines
    cells = [cell for engine in engines for cell in study_cells(params, study, engine)]
    return list(dict.fromkeys([params.calibration.origin, *(cell.origin for cell in cells)]))


def baseline_runs(params: Params) -> dict[str, tuple[str, str, str]]:
    """Run name -> (engine, dtype, attention) of the engine baseline.

    vLLM chooses its own attention kernel, so its attention reads ``default``.
    """
    runs = {}
    for engine in params.engines:
        attentions = params.baseline.hf_attention if engine == "hf" else ("default",)
        for dtype in params.baseline.dtypes:
            for attention in attentions:
                runs[f"{engine}-{dtype}-{attention}"] = (engine, dtype, attention)
    if "float32" not in params.baseline.dtypes:
        raise ParamsError("baseline.dtypes must contain 'float32': it carries the agreement of the engines")
    return runs
