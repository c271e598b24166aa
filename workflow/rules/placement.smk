rule placement_job:
    """Whether it matters in which block of the pool a chunk lies."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
    output:
        "results/kvstore/placement/{model}.json",
    log:
        "results/logs/kvstore/placement/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/placement/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.placement.measure"),
        cfg=pick("model", "kvstore", "jobs"),
    message:
        "placement: blocks in another order, {wildcards.model}"
    shell:
        "python -m kvlab step placement"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule placement_page:
    """PLACEMENT.md: the same, to be read."""
    input:
        of_models("results/kvstore/placement/{model}.json"),
    output:
        report("results/kvstore/PLACEMENT.md", caption="../report/placement.rst", category="KV store"),
    log:
        "results/logs/kvstore/placement.log",
    benchmark:
        "results/benchmarks/kvstore/placement.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.placement.record",
            "kvlab_pipeline.studies.placement.tables",
        ),
        cfg=parameters("model"),
    message:
        "placement: {output}"
    shell:
        "python -m kvlab step page {input:q}" " --study placement" " --out {output:q}" " > {log:q} 2>&1"


rule placement:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.placement_page.output,
    params:
        cfg=parameters("model"),
    message:
        "placement: complete"
