rule residual_engine:
    """Code one engine's own capture with the studied recipe: the error of the codec, not of the model."""
    input:
        code=code("kvlab.experiments.residual", *codec_modules(studied_recipe(PARAMS))),
        model=model_files(),
        capture="calib/capture/{engine}.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        record=f"calib/sigma/{ORIGIN}.json",
        codebooks=f"calib/codebooks/factors-{ORIGIN}.json",
    output:
        rows="results/residual/{engine}.parquet",
        record="results/residual/{engine}.json",
    log:
        "results/logs/residual/{engine}.log",
    benchmark:
        "results/benchmarks/residual/{engine}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=pick(*CODEC_KEYS, "gap"),
    message:
        "residual: the codec's own error on the capture of {wildcards.engine}"
    shell:
        "python -m kvlab residual"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --out {output.rows:q}"
        " > {log:q} 2>&1"


rule residual:
    """The codec's own error on every engine's capture."""
    input:
        expand("results/residual/{engine}.{kind}", engine=CAPTURED, kind=["parquet", "json"]),
    params:
        cfg=pick("calibration"),
    message:
        "residual: complete"
