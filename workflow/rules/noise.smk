rule noise_job:
    """Score errors of known kind: noise of every size, a rounding, and a codec against its own norm."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("noise")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=per_origin("calib/sigma/{origin}.safetensors", "noise"),
        record=per_origin("calib/sigma/{origin}.json", "noise"),
        codebooks=per_origin("calib/codebooks/noise-{origin}.json", "noise"),
    output:
        tokens="results/noise/{engine}-{dtype}-{number}.parquet",
        record="results/noise/{engine}-{dtype}-{number}.json",
    log:
        "results/logs/noise/{engine}-{dtype}-{number}.log",
    benchmark:
        "results/benchmarks/noise/{engine}-{dtype}-{number}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*STUDY_KEYS["noise"]),
    message:
        "noise: errors of known kind, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study noise"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule noise:
    """All cells of the noise study."""
    input:
        job_files("parquet", "noise"),
        job_files("json", "noise"),
    params:
        cfg=pick(*STUDY_KEYS["noise"]),
    message:
        "noise: complete"
