rule policy_job:
    """Which chunks a bounded pool should keep: needles found and attention mass kept, by residency policy."""
    input:
        model=model_files(),
        needles="calib/needles/{model}/needles.parquet",
        needles_record="calib/needles/{model}/needles.json",
    output:
        "results/kvstore/policy/{model}.json",
    log:
        "results/logs/kvstore/policy/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/policy/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.policy.measure"),
        cfg=pick("model", "kvstore", "stats", "jobs"),
    message:
        "policy: needles in a bounded pool, {wildcards.model}"
    shell:
        "python -m kvlab step policy"
        " --params {params.cfg:q}"
        " --needles {input.needles:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule policy_page:
    """POLICY.md: the same, to be read."""
    input:
        expand("results/kvstore/policy/{model}.json", model=JUDGED),
    output:
        report("results/kvstore/POLICY.md", caption="../report/policy.rst", category="KV store"),
    log:
        "results/logs/kvstore/policy.log",
    benchmark:
        "results/benchmarks/kvstore/policy.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.policy.record",
            "kvlab_pipeline.studies.policy.tables",
        ),
        cfg=parameters("model"),
    message:
        "policy: {output}"
    shell:
        "python -m kvlab step page {input:q}" " --study policy" " --out {output:q}" " > {log:q} 2>&1"


rule policy:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.policy_page.output,
    params:
        cfg=parameters("model"),
    message:
        "policy: complete"
