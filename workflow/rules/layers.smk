rule layers_job:
    """Score the studied recipe on one layer alone, on all but one, and on all layers, K and V apart."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("layers")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=per_origin("calib/sigma/{origin}.safetensors", "layers"),
        record=per_origin("calib/sigma/{origin}.json", "layers"),
        codebooks=per_origin("calib/codebooks/layers-{origin}.json", "layers"),
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
        cfg=pick(*STUDY_KEYS["layers"]),
    message:
        "layers: layers alone and left out, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study layers"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule layers:
    """All cells of the per-layer attribution."""
    input:
        job_files("parquet", "layers"),
        job_files("json", "layers"),
    params:
        cfg=pick(*STUDY_KEYS["layers"]),
    message:
        "layers: complete"
