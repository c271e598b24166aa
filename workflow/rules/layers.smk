rule layers_job:
    """Score the studied recipe on one layer at a time, and on all layers together."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("layers")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        record=f"calib/sigma/{ORIGIN}.json",
        codebooks=f"calib/codebooks/{ORIGIN}.json",
        components=f"calib/components/{ORIGIN}.safetensors",
    output:
        tokens="results/layers/{engine}-{dtype}-{number}.parquet",
        record="results/layers/{engine}-{dtype}-{number}.json",
    log:
        "results/logs/layers/{engine}-{dtype}-{number}.log",
    benchmark:
        "results/benchmarks/layers/{engine}-{dtype}-{number}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*CODEC_KEYS, "engines", "layers", "jobs"),
    message:
        "layers: one coded layer at a time, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study layers"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule layers:
    """All cells of the layer study."""
    input:
        job_files("parquet", "layers"),
        job_files("json", "layers"),
    params:
        cfg=pick(*CODEC_KEYS, "engines", "layers", "jobs"),
    message:
        "layers: complete"
