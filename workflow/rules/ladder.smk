rule ladder_jobs:
    """Score every codec of the ladder at the same bits, over the coded clean cache, on both texts.

    No codebooks are read: other bits of the studied recipe leave the ladder as it is.
    """
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
        archive=archive_of(study_recipes(plan.LADDER)),
    output:
        measured_outputs(UNITS[plan.LADDER]),
    log:
        "results/logs/ladder/{model}/jobs.log",
    benchmark:
        "results/benchmarks/ladder/{model}/jobs.tsv"
    priority: SHORTEST_FIRST.index(plan.LADDER) + 2
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=480,
        device=accelerators(),
        gpu=gpus(PARAMS.ladder.engine),
    params:
        code=measured_code(plan.LADDER),
        cfg=pick(*STUDY_KEYS[plan.LADDER]),
        measure=[f"{plan.LADDER}/{job}" for job in UNITS[plan.LADDER][plan.LADDER]],
    message:
        "ladder: the codecs beside one another, {wildcards.model}"
    shell:
        "python -m kvlab step jobs"
        " --params {params.cfg:q}"
        " --measure {params.measure:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --archive {input.archive:q}"
        ' --store "$KVLAB_STORE"'
        " --results results"
        " > {log:q} 2>&1"


rule ladder_facts:
    """Weigh the calibrations of the ladder's rungs as files, and measure how much a transform can gain on the model."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
        archive=archive_of(study_recipes(plan.LADDER)),
    output:
        "results/ladder/{model}/facts.json",
    log:
        "results/logs/ladder/{model}/facts.log",
    benchmark:
        "results/benchmarks/ladder/{model}/facts.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus(PARAMS.ladder.engine),
    params:
        code=Code(
            "kvlab_pipeline.studies.ladder.facts",
            f"kvlab.engines.{PARAMS.ladder.engine}.engine",
            *codec_modules(study_recipes(plan.LADDER)),
        ),
        cfg=pick(*STUDY_KEYS[plan.LADDER]),
    message:
        "ladder: calibrations as files and coding gain of {wildcards.model}"
    shell:
        "python -m kvlab step ladder"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --archive {input.archive:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule ladder_further:
    """Score codecs at longer contexts, and klt fitted on parts of the calibration; where `ladder` asks for them."""
    input:
        model=model_files(),
        corpus=corpus_files(),
        documents="calib/corpus/{model}/documents.parquet",
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        "results/ladder/{model}/further.json",
    log:
        "results/logs/ladder/{model}/further.log",
    benchmark:
        "results/benchmarks/ladder/{model}/further.tsv"
    priority: 1
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
        gpu=gpus(PARAMS.ladder.engine),
    params:
        code=Code(
            "kvlab_pipeline.studies.ladder.further",
            f"kvlab.engines.{PARAMS.ladder.engine}.engine",
            *codec_modules(study_recipes(plan.LADDER)),
        ),
        cfg=pick(*STUDY_KEYS[plan.LADDER], "corpus", "windows"),
    message:
        "ladder: longer contexts and parts of the calibration, {wildcards.model}"
    shell:
        "python -m kvlab step ladder_further"
        " --params {params.cfg:q}"
        " --documents {input.documents:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule ladder:
    """All cells of the ladder; FINDINGS.md needs them where `studies` names it."""
    input:
        measured_of(plan.LADDER),
        expand(
            "results/ladder/{model}/{made}.json",
            model=wanted_of(plan.LADDER),
            made=["facts", "further"] if FURTHER else ["facts"],
        ),
    params:
        cfg=parameters(*STUDY_KEYS[plan.LADDER]),
    message:
        "ladder: complete"
