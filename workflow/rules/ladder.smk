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
    output:
        measured_outputs(UNITS[plan.LADDER]),
    log:
        "results/logs/ladder/{model}.log",
    benchmark:
        "results/benchmarks/ladder/{model}.tsv"
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
        ' --store "$KVLAB_STORE"'
        " --results results"
        " > {log:q} 2>&1"


rule ladder:
    """All cells of the ladder; FINDINGS.md does not need them."""
    input:
        measured_of(plan.LADDER),
    params:
        cfg=parameters(*STUDY_KEYS[plan.LADDER]),
    message:
        "ladder: complete"
