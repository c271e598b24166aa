rule gap_metrics:
    """Every number of a model's report, with its interval; refused where rows may not be compared."""
    input:
        model=model_files(),
        sigmas=of_model("calib/sigma/{model}/{engine}.json", engine=CAPTURED),
        codebooks=of_model("calib/codebooks/{model}/{origin}.json", origin=TABLE_ORIGINS),
        residual=of_model("results/residual/{model}/{engine}.json", engine=CAPTURED),
        residual_rows=of_model("results/residual/{model}/{engine}.parquet", engine=CAPTURED),
        choice=if_asked(plan.CHOSEN, "results/choice/{model}.json"),
        ladder=if_asked(plan.LADDER, "results/ladder/{model}/facts.json"),
        further=if_asked(plan.LADDER, "results/ladder/{model}/further.json") if FURTHER else [],
        baseline=of_model("results/baseline/{model}/{run}.json", run=RUNS),
        baseline_rows=of_model("results/baseline/{model}/{run}.parquet", run=RUNS),
        jobs=job_files("json"),
        job_rows=job_files("parquet"),
    output:
        "results/gap/metrics/{model}.json",
    log:
        "results/logs/gap/{model}/metrics.log",
    benchmark:
        "results/benchmarks/gap/{model}/metrics.tsv"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code("kvlab_pipeline.report.metrics", *CHAPTERS, *map(plan.module, STUDIES)),
        cfg=pick(*METRICS_KEYS),
    message:
        "gap: numbers and intervals of {wildcards.model}"
    shell:
        "python -m kvlab step metrics"
        " --params {params.cfg:q}"
        " --baseline {input.baseline:q}"
        " --jobs {input.jobs:q}"
        " --codebooks {input.codebooks:q}"
        " --residual {input.residual:q}"
        " --choice {input.choice:q}"
        " --ladder {input.ladder:q}"
        " --further {input.further:q}"
        " --sigmas {input.sigmas:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule gap_verdict:
    """ACCEPT, MARGINAL, REJECT or INCONCLUSIVE for each cell, from the bounds of its intervals."""
    input:
        metrics="results/gap/metrics/{model}.json",
    output:
        report("results/gate/verdict/{model}.json", caption="../report/verdict.rst", category="Verdict"),
    log:
        "results/logs/gap/{model}/verdict.log",
    benchmark:
        "results/benchmarks/gap/{model}/verdict.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code("kvlab_pipeline.report.verdict"),
        cfg=pick("verdict"),
    message:
        "gap: verdicts on {wildcards.model}"
    shell:
        "python -m kvlab step verdict"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule gap:
    """The numbers and the verdicts, without the report."""
    input:
        of_models("results/gap/metrics/{model}.json", "results/gate/verdict/{model}.json"),
    params:
        cfg=parameters("model"),
    message:
        "gap: complete"
