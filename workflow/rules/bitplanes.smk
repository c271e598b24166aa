rule bitplanes_job:
    """How well a few bits of each key rank what attention looks at, in every layer and head."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
    output:
        "results/kvstore/bitplanes/{model}.json",
    log:
        "results/logs/kvstore/bitplanes/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/bitplanes/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.bitplanes.measure"),
        cfg=pick("model", "kvstore", "stats", "jobs"),
    message:
        "bitplanes: keys in a few bits, {wildcards.model}"
    shell:
        "python -m kvlab step bitplanes"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule bitplanes_page:
    """BITPLANES.md: the same, to be read."""
    input:
        of_models("results/kvstore/bitplanes/{model}.json"),
    output:
        report("results/kvstore/BITPLANES.md", caption="../report/bitplanes.rst", category="KV store"),
    log:
        "results/logs/kvstore/bitplanes.log",
    benchmark:
        "results/benchmarks/kvstore/bitplanes.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.bitplanes.record",
            "kvlab_pipeline.studies.bitplanes.tables",
        ),
        cfg=parameters("model"),
    message:
        "bitplanes: {output}"
    shell:
        "python -m kvlab step page {input:q}" " --study bitplanes" " --out {output:q}" " > {log:q} 2>&1"


rule bitplanes:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.bitplanes_page.output,
    params:
        cfg=parameters("model"),
    message:
        "bitplanes: complete"
