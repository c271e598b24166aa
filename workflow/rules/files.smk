"""Which files of which models measuring reads and writes, and which a report is made of."""


def measured_inputs(contents):
    """The files that a unit reads, by name; none where it needs none of a kind."""
    studies, named = set(contents), unit_origins(PARAMS, contents)
    rotated = named if "cells" in studies else []
    fitted = {ORIGIN} if studies & {"mitigations", MECHANISMS, plan.LADDER} else set()
    fitted |= set(component_origins()) if "cells" in studies else set()
    tables = named if reads_tables(contents) else []
    kinds = ["parquet", "json"] if MECHANISMS in studies else []  # of what the gate's rows are asked
    return {
        "model": model_files(),
        "windows": "calib/corpus/{model}/windows.safetensors",
        "sigma": of_model("calib/sigma/{model}/{origin}.safetensors", origin=named),
        "record": of_model("calib/sigma/{model}/{origin}.json", origin=named),
        "codebooks": of_model("calib/codebooks/{model}/{origin}.json", origin=tables),
        "rotated": of_model("calib/sigma/{model}/{origin}-post_rope.safetensors", origin=rotated),
        "rotated_record": of_model("calib/sigma/{model}/{origin}-post_rope.json", origin=rotated),
        "components": of_model("calib/components/{model}/{origin}.safetensors", origin=sorted(fitted)),
        "components_record": of_model("calib/components/{model}/{origin}.json", origin=sorted(fitted)),
        "archive": archive_of([recipe for study in studies for recipe in study_recipes(study)]),
        "choice": ["results/choice/{model}.json"] if plan.CHOSEN in studies else [],
        "needles": of_model("calib/needles/{model}/needles.{kind}", kind=kinds[:1]),
        "needles_record": of_model("calib/needles/{model}/needles.{kind}", kind=kinds[1:]),
        "ruler": of_model("calib/needles/{model}/ruler.{kind}", kind=kinds),
    }


def replayed_inputs():
    """The files by which the gate measures rows again, of every model that has rows: `model` and all others."""
    read = measured_inputs({MECHANISMS: list(PARAMS.engines)})
    del read["model"]
    patterns = [
        path for listed in read.values() for path in ([listed] if isinstance(listed, str) else listed)
    ]
    return {
        "model": [file for slug in JUDGED for file in files_of(MODELS[slug].model)],
        "replayed": expand(patterns, model=JUDGED),
    }


def measured_outputs(contents):
    """The table and the record of every job of a unit."""
    return [
        f"results/{study}/{{model}}/{job}.{kind}"
        for study, jobs in contents.items()
        for job in jobs
        for kind in ("parquet", "json")
    ]


def measured_of(study, models):
    """The same of every job of a study, of some models."""
    jobs = [job for contents in UNITS.values() for job in contents.get(study, ())]
    table = "results/{study}/{model}/{job}.{kind}"
    return expand(table, study=study, model=models, job=jobs, kind=["parquet", "json"])


def asked_for(study):
    """The models of which a study is measured for the report."""
    if study in (BASELINE, MECHANISMS):
        return JUDGED if study == MECHANISMS else list(MODELS)
    return [slug for slug, params in MODELS.items() if study in plan.studies(params)]


def wanted_of(study):
    """The models of which a target that is typed makes a study: where no model is asked for it, of all."""
    return asked_for(study) or list(MODELS)


def if_asked(study, pattern):
    """Input function: a file of a study, of a model that is asked for it."""

    def of(slug):
        return [pattern.format(model=slug)] if study in plan.studies(MODELS[slug]) else []

    def listed(wildcards):
        return of(wildcards.model)

    return Declared(listed, [file for slug in MODELS for file in of(slug)])


def measured_keys(contents):
    """The parameters that a unit reads; which studies are asked for decides what is in it."""
    return sorted({"studies"}.union(*(KEYS_OF[study] for study in contents)))


def measured_code(unit):
    """`Code` of what measures a unit: its engines, its studies' plans, and their codecs."""
    contents = UNITS[unit]
    needed = {*engines_of(contents), *(["hf"] if BASELINE in contents else [])}  # the truth is measured by hf
    codecs = {module for study in contents if study in STUDY_KEYS for module in study_codecs(study)}
    if MECHANISMS in contents:
        codecs |= set(mechanisms_code().modules) - {f"kvlab.engines.{one}.engine" for one in PARAMS.engines}
    if BASELINE in contents:
        codecs |= set(codec_modules(study_recipes(BASELINE)))
    return Code(
        "kvlab_pipeline.studies.measuring",
        *sorted(codecs),
        *(f"kvlab.engines.{one}.engine" for one in sorted(needed)),
    )


def measured_foreign(contents):
    """The codecs of other packages that a unit runs: of another version they are measured again."""
    return foreign_codecs([recipe for study in contents for recipe in study_recipes(study)])


def job_files(kind):
    """Input function: results of a model's jobs of all studies that its report reads."""

    def listed(wildcards):
        return jobs_of(wildcards.model, kind)

    return Declared(listed, [file for slug in MODELS for file in jobs_of(slug, kind)])


def jobs_of(slug, kind):
    """Results of one model's jobs of all its studies."""
    studies = plan.studies(MODELS[slug])
    return [f"results/{study}/{slug}/{job}.{kind}" for study in studies for job in job_names(slug, study)]


@lru_cache(None)
def job_names(slug, study):
    """The jobs of one model and study."""
    return plan.job_names(MODELS[slug], study)
