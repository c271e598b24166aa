"""Shared by all stages: the checked parameters, and the files that a result depends on."""

import json
import re
import sys
from glob import glob
from pathlib import Path
from shutil import which

SRC = Path("src")
sys.path[:0] = [str(SRC.resolve()), str(Path("workflow/scripts").resolve())]

from closure import code
from kvlab.calibration.needs import needed_files
from kvlab.codec.names import CODECS
from kvlab.errors import UserError
from kvlab.experiments import plan
from kvlab.params import Params, studied_recipe
from kvlab.recipe import IDENTITY

FIGURES = ("gap_shapley", "baseline", "cells", "layers", "noise", "residual", "d_eff", "mitigations")
TEMPLATES = sorted(
    str(path) for folder in ("templates", "html/assets") for path in (SRC / "kvlab/report" / folder).glob("*")
)
# Jobs run the code beside this Snakefile, with the Python of this snakemake. An editable install would
# point to another checkout in the workspaces of `dvc exp run --temp` and `--queue`.
shell.prefix(f'export PATH=\'{Path(sys.executable).parent}\':"$PATH" PYTHONPATH="$PWD/{SRC}"; ')


class Cfg(dict):
    """Parameters of a rule. As text they are JSON, which is what `kvlab --params` takes."""

    def __str__(self):
        return json.dumps(self)


def checked(data):
    """The parameters, or one line on what is wrong with them and exit code 2."""
    try:
        params = Params.complete(data)
        plan.check(params)
        return params
    except UserError as problem:
        print(f"error: params.yaml: {problem}", file=sys.stderr)
        raise SystemExit(problem.exit_code) from None


PARAMS = checked(config)
CORPUS_RECORD = Path("models/reference/corpus.json")
ORIGIN = PARAMS.calibration.origin
CAPTURED = sorted(PARAMS.calibration.engines)
ENGINES = sorted({*PARAMS.engines, *CAPTURED})

# What the report reads: everything but the ladder, which is no part of it.
REPORT_KEYS = frozenset(Params.model_fields) - {plan.LADDER}
# What a job with a codec reads.
CODEC_KEYS = ("bits", "v_bits", "model", "calibration", "codec", "jobs")
# What the cells of a study are planned from.
STUDY_KEYS = {
    "factors": (*CODEC_KEYS, "windows", "engines", "protocols", "gap"),
    "cells": (*CODEC_KEYS, "windows", "engines", "protocols", "gap", "cells"),
    "layers": (*CODEC_KEYS, "engines", "layers"),
    "noise": (*CODEC_KEYS, "engines", "noise"),
    "mitigations": (*CODEC_KEYS, "windows", "engines", "gap", "mitigations"),
    plan.LADDER: ("model", "calibration", "codec", "ladder", "jobs"),
}


def pick(*keys):
    """Whole top-level entries of params.yaml: a rule's `cfg`, and its stage's `params` in dvc.yaml."""
    return Cfg(PARAMS.model_dump(mode="json", include=set(keys)))


def codec_modules(*recipes):
    """Modules of the codecs that recipes name; jobs load them by name, which `code` cannot see."""
    streams = [stream for recipe in recipes for stream in (recipe.k, recipe.v)]
    names = {one.codec for stream in streams for one in (stream, getattr(stream, "of", stream))}
    return sorted(CODECS[name].partition(":")[0] for name in names)


def study_codecs(study):
    """The plan of a study, and `codec_modules` of its cells and of the canary's block codec."""
    if study == plan.CHOSEN:
        recipes = plan.mitigated_recipes(PARAMS)
    else:
        cells = [cell for job in plan.jobs(PARAMS, study).values() for cell in job]
        recipes = [recipe for cell in cells for recipe in cell.recipes]
    return [plan.module(study), *codec_modules(IDENTITY, studied_recipe(PARAMS), *recipes)]


def per_origin(pattern, study):
    """A file for each engine whose capture calibrates a cell of the study."""
    return expand(pattern, origin=plan.origins(PARAMS, study))


def component_origins():
    """Whose captures components are fitted on: the usual one, and those of listed cells that read components."""
    cells = [cell for job in plan.jobs(PARAMS, "cells").values() for cell in job]
    needy = [cell.origin for cell in cells for recipe in cell.recipes if "components" in needed_files(recipe)]
    return list(dict.fromkeys([ORIGIN, *needy]))


def engine_code(*modules):
    """Input function: `code` of `modules` and of the engine that the job's name begins with.

    Its attribute `every` lists all files that it can return; dvc.yaml takes its deps from there.
    """

    def files(wildcards):
        return code(*modules, f"kvlab.engines.{wildcards.engine}")

    files.every = code(*modules, *(f"kvlab.engines.{engine}" for engine in ENGINES))
    return files


def study_code(*modules):
    """Input function: `code` of `modules` and of the plan of the study that a wildcard names."""

    def files(wildcards):
        return code(*modules, plan.module(wildcards.study))

    files.every = code(*modules, *map(plan.module, plan.STUDIES))
    return files


def study_cfg():
    """Parameter function: `pick` of what the study that a wildcard names is planned from."""

    def cfg(wildcards):
        return pick(*STUDY_KEYS[wildcards.study])

    cfg.every = pick(*{key for study in plan.STUDIES for key in STUDY_KEYS[study]})
    return cfg


def model_files():
    """Files of a model in a folder; none for a hub id, which `model.revision` pins."""
    folder = Path(PARAMS.model.path)
    if not folder.is_dir():
        return []
    return sorted(
        str(path)
        for path in folder.iterdir()
        if path.suffix in {".json", ".safetensors", ".txt", ".model", ".jinja"}
        and path.name != CORPUS_RECORD.name
    )


def corpus_files():
    """The texts that params.yaml names, as files; for `docstrings` the record that they are checked by.

    `licences` are read from the environment: their hash is in the windows' record.
    """
    record = [str(CORPUS_RECORD)] if PARAMS.corpus.source == "docstrings" else []
    named = [PARAMS.corpus.source, PARAMS.corpus.other or ""]
    paths = {path for source in named for path in glob(source, recursive=True) if Path(path).is_file()}
    return record + sorted(paths)


def accelerators():
    """1 if this machine has an NVIDIA GPU: it holds one engine at a time. On CPUs the cores are the limit."""
    return int(which("nvidia-smi") is not None)


def job_files(kind, *studies):
    """Results of the jobs of some studies, of all that the report reads if none is named."""
    return [
        f"results/{study}/{job}.{kind}"
        for study in studies or plan.STUDIES
        for job in plan.job_names(PARAMS, study)
    ]


def run_files(kind):
    """Results of the runs of the engine baseline."""
    return [f"results/baseline/{run}.{kind}" for run in plan.baseline_runs(PARAMS)]


def failures(snakemake_logs):
    """What failed and why: how each failed job ended, its log, and the log's last line."""
    text = "".join(Path(path).read_text() for path in snakemake_logs)
    failed = re.findall(r"^Error in \w+ (\w+):.*?^    log: (\S+)", text, re.M | re.S)
    lines = [f"{name} failed; {path} ends with\n    {last_line(Path(path))}" for name, path in failed]
    if re.search(r"died with <Signals|exit status (137|143)\b", text):
        lines.append(
            "A job was killed from outside; without a reason in its log that is often a lack of memory."
        )
    return "\n".join([*lines, "Mend that and type the same command again: what is done stays done."])


def last_line(path):
    """The last words of a log; a progress bar overwrites its line, so those are lines too."""
    text = path.read_text(errors="replace") if path.exists() else ""
    words = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return words[-1] if words else "nothing: it was killed at once, or a folder could not be written"
