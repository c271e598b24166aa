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
