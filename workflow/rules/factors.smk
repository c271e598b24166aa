rule factors_job:
    """Score the studied recipe at every combination of the factors, and what each engine differs from itself by."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("factors")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=per_origin("calib/sigma/{origin}.safetensors", "factors"),
        record=per_origin("calib/sigma/{origin}.json", "factors"),
        codebooks=per_origin("calib/codebooks/factors-{origin}.json", "factors"),
    output:
        tokens="results/factors/{engine}-{dtype}-{number}.parquet",
        record="results/factors/{engine}-{dtype}-{number}.json",
    log:
        "results/logs/factors/{engine}-{dtype}-{number}.log",
    benchmark:
        "results/benchmarks/factors/{engine}-{dtype}-{number}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*STUDY_KEYS["factors"]),
    message:
        "factors: a corner of every factor, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study factors"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule factors:
    """The full factorial behind the decomposition of the gap."""
    input:
        job_files("parquet", "factors"),
        job_files("json", "factors"),
    params:
        cfg=pick(*STUDY_KEYS["factors"]),
    message:
        "factors: complete"
