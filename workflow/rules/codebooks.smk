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
