rule codebooks:
    """Fit the quantiser's tables on the variable that it will meet, from the origin's capture."""
    input:
        code=code("kvlab.calibration.codebooks", *codec_modules(studied_recipe(PARAMS))),
        model=model_files(),
        capture=f"calib/capture/{ORIGIN}.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        record=f"calib/sigma/{ORIGIN}.json",
    output:
        record=f"calib/codebooks/{ORIGIN}.json",
        tables=[f"calib/codebooks/{ORIGIN}/{stream}_vr{ratio:g}.f32" for ratio in RATIOS for stream in "KV"],
    log:
        f"results/logs/codebooks/{ORIGIN}.log",
    benchmark:
        f"results/benchmarks/codebooks/{ORIGIN}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=pick(*CODEC_KEYS, "gap", "jobs"),
    message:
        "codebooks: Lloyd-Max tables from the origin's capture"
    shell:
        "python -m kvlab codebooks"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --out {output.record:q}"
        " > {log:q} 2>&1"
