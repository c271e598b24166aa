rule noise_job:
    """Score Gaussian noise of known size on K or V, in place of a codec."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("noise")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
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
        cfg=pick("model", "engines", "noise", "jobs"),
    message:
        "noise: noise of known size, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study noise"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule noise:
    """All cells of the noise study."""
    input:
        job_files("parquet", "noise"),
        job_files("json", "noise"),
    params:
        cfg=pick("model", "engines", "noise", "jobs"),
    message:
        "noise: complete"
