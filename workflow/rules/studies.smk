rule codebooks_origin:
    """Fit the quantiser's tables of all studies on the variable that it will meet, from the sample of one capture."""
    input:
        model=model_files(),
        capture="calib/capture/{model}/{origin}.safetensors",
        sigma="calib/sigma/{model}/{origin}.safetensors",
        record="calib/sigma/{model}/{origin}.json",
        rotated="calib/sigma/{model}/{origin}-post_rope.safetensors",
        rotated_record="calib/sigma/{model}/{origin}-post_rope.json",
    output:
        record="calib/codebooks/{model}/{origin}.json",
        tables=directory("calib/codebooks/{model}/{origin}"),
    log:
        "results/logs/codebooks/{model}/{origin}.log",
    benchmark:
        "results/benchmarks/codebooks/{model}/{origin}.tsv"
    priority: 9  # float32 waits for it
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code(
            "kvlab_pipeline.jobs.codebooks",
            *map(plan.module, TOGETHER),
            *codec_modules([studied_recipe(PARAMS)]),
        ),
        cfg=pick(*STUDIES_KEYS),
    message:
        "codebooks: Lloyd-Max tables of {wildcards.model} as {wildcards.origin} captured it"
    shell:
        "python -m kvlab step codebooks"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --rotated {input.rotated:q}"
        " --out {output.record:q}"
        " > {log:q} 2>&1"


rule codebooks:
    """The tables that the report's cells read."""
    input:
        of_models("calib/codebooks/{model}/{origin}.json", origin=TABLE_ORIGINS),
    params:
        cfg=parameters(*STUDIES_KEYS),
    message:
        "codebooks: complete"


rule choice_layers:
    """Choose on the calibration split which layers to favour; the scored text is not looked at."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        codebooks=f"calib/codebooks/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        "results/choice/{model}.json",
    log:
        "results/logs/choice/{model}.log",
    benchmark:
        "results/benchmarks/choice/{model}.tsv"
    priority: 10  # what measures the mitigations waits for it
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=memory(ORIGIN),
        runtime=240,
        device=accelerators(),
        gpu=gpus(ORIGIN),
    params:
        code=Code(
            "kvlab_pipeline.studies.mitigations.search",
            f"kvlab.engines.{ORIGIN}.engine",
            *study_codecs("mitigations"),
        ),
        cfg=pick(*STUDY_KEYS["mitigations"], "studies"),
    message:
        "choice: which layers of {wildcards.model} to favour, by the calibration split"
    shell:
        "python -m kvlab step choose"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        ' --store "$KVLAB_STORE"'
        " --out {output:q}"
        " > {log:q} 2>&1"


rule choice:
    """The layers that the mitigations favour, of every model of which they are measured."""
    input:
        expand("results/choice/{model}.json", model=wanted_of(plan.CHOSEN)),
    params:
        cfg=parameters(*STUDY_KEYS["mitigations"], "studies"),
    message:
        "choice: complete"


rule residual_engine:
    """Code the sample of one engine's capture with the studied recipe: the error of the codec, not of the model."""
    input:
        model=model_files(),
        capture="calib/capture/{model}/{engine}.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        codebooks=f"calib/codebooks/{{model}}/{ORIGIN}.json",
    output:
        rows="results/residual/{model}/{engine}.parquet",
        record="results/residual/{model}/{engine}.json",
    log:
        "results/logs/residual/{model}/{engine}.log",
    benchmark:
        "results/benchmarks/residual/{model}/{engine}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code("kvlab_pipeline.studies.residual.measure", *codec_modules([studied_recipe(PARAMS)])),
        cfg=pick(*CODEC_KEYS, "gap"),
    message:
        "residual: the codec's own error on {wildcards.model} as {wildcards.engine} captured it"
    shell:
        "python -m kvlab step residual"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --out {output.rows:q}"
        " > {log:q} 2>&1"


rule residual:
    """The codec's own error on every engine's capture."""
    input:
        of_models("results/residual/{model}/{engine}.{kind}", engine=CAPTURED, kind=["parquet", "json"]),
    params:
        cfg=parameters("model", "calibration"),
    message:
        "residual: complete"


LADDER_MADE = ["facts", "further"] if FURTHER else ["facts"]


# Jobs with vLLM follow one another (`device`), which takes half of the default run on two cores; the others go beside
# them, the longest first. float32 takes the most memory and hf-mechanisms the least, so these two begin. Before these
# goes what they wait for, and what takes seconds fills the gaps (0).
LAST_FIRST = ("hf-float32", plan.LADDER, "hf-mechanisms", "bfloat16", "vllm-mechanisms", "float32")


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
    priority: LAST_FIRST.index(plan.LADDER) + 2
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=memory(PARAMS.ladder.engine),
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
        texts=rules.corpus_texts.output.texts,
        texts_record=rules.corpus_texts.output.record,
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
        mem_mb=memory(PARAMS.ladder.engine),
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
        " --texts {input.texts:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule ladder:
    """All cells of the ladder; FINDINGS.md needs them where `studies` names it."""
    input:
        measured_of(plan.LADDER, wanted_of(plan.LADDER)),
        expand(
            "results/ladder/{model}/{made}.json",
            model=wanted_of(plan.LADDER),
            made=LADDER_MADE,
        ),
    params:
        cfg=parameters(*STUDY_KEYS[plan.LADDER]),
    message:
        "ladder: complete"


rule studies:
    """What the report is made of, whole, of every model: the studies that are asked for, and what they read."""
    input:
        rules.codebooks.input,
        of_models("results/residual/{model}/{engine}.{kind}", engine=COMPARED, kind=["parquet", "json"]),
        expand("results/choice/{model}.json", model=asked_for(plan.CHOSEN)),
        [measured_of(study, asked_for(study)) for study in (BASELINE, *STUDIES)],
        expand("results/ladder/{model}/{made}.json", model=asked_for(plan.LADDER), made=LADDER_MADE),
    params:
        cfg=parameters(*sorted({key for study in (BASELINE, *plan.STUDIES) for key in KEYS_OF[study]})),
    message:
        "studies: complete"
