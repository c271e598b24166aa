rule gap_metrics:
    """Every number of a model's report, with its interval; refused where rows may not be compared."""
    input:
        model=model_files(),
        sigmas=of_model("calib/sigma/{model}/{engine}.json", engine=CAPTURED),
        codebooks=of_model("calib/codebooks/{model}/{origin}.json", origin=TABLE_ORIGINS),
        residual=of_model("results/residual/{model}/{engine}.json", engine=COMPARED),
        residual_rows=of_model("results/residual/{model}/{engine}.parquet", engine=COMPARED),
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


rule report_comparison:
    """The models beside one another, the first one first; and a dozen headline numbers of each."""
    input:
        metrics=of_models("results/gap/metrics/{model}.json"),
    output:
        rows=report(
            "results/gap/models/comparison.csv", caption="../report/comparison.rst", category="Numbers"
        ),
        comparison="results/gap/models/comparison.json",
        summary="results/gap/summary.json",
    log:
        "results/logs/report/comparison.log",
    benchmark:
        "results/benchmarks/report/comparison.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code("kvlab_pipeline.report.comparison", "kvlab_pipeline.report.summary", *CHAPTERS),
        cfg=parameters("model"),
    message:
        "report: the models beside one another"
    shell:
        "python -m kvlab step compare"
        " --metrics {input.metrics:q}"
        " --out {output.rows:q}"
        " --json {output.comparison:q}"
        " --summary {output.summary:q}"
        " > {log:q} 2>&1"


rule report_lead:
    """FINDINGS.md and report.html of the first model: the same words; the figures, and the numbers drawn in each."""
    input:
        templates=TEMPLATES,
        metrics=f"results/gap/metrics/{LEAD}.json",
        verdict=f"results/gate/verdict/{LEAD}.json",
        comparison="results/gap/models/comparison.json",
        claims="results/gate/claims.json",
    output:
        findings=report("results/gap/FINDINGS.md", caption="../report/findings.rst", category="Findings"),
        html=report("results/gap/report.html", caption="../report/html.rst", category="Findings"),
        figures=report(
            expand("results/gap/figures/{name}.svg", name=FIGURES),
            caption="../report/figures.rst",
            category="Figures",
        ),
        numbers=report(
            expand("results/gap/figures/{name}.csv", name=FIGURES),
            caption="../report/tables.rst",
            category="Numbers",
        ),
    log:
        "results/logs/report/findings.log",
    benchmark:
        "results/benchmarks/report/findings.tsv"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=Code("kvlab_pipeline.report.findings", *CHAPTERS),
        cfg=lead_cfg("report", "verdict"),
    message:
        "report: {output.findings}"
    shell:
        "python -m kvlab step report"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --verdict {input.verdict:q}"
        " --comparison {input.comparison:q}"
        " --claims {input.claims:q}"
        " --out {output.findings:q}"
        " --html {output.html:q}"
        " > {log:q} 2>&1"


rule report_model:
    """The same pages of a further model, each in a folder of its own."""
    input:
        templates=TEMPLATES,
        metrics="results/gap/metrics/{model}.json",
        verdict="results/gate/verdict/{model}.json",
        comparison="results/gap/models/comparison.json",
        claims="results/gate/claims.json",
    output:
        findings=report(
            "results/gap/models/{model}/FINDINGS.md", caption="../report/findings.rst", category="Findings"
        ),
        html=report(
            "results/gap/models/{model}/report.html", caption="../report/html.rst", category="Findings"
        ),
        figures=expand(
            "results/gap/models/{{model}}/figures/{name}.{kind}", name=FIGURES, kind=["svg", "csv"]
        ),
    log:
        "results/logs/report/{model}/findings.log",
    benchmark:
        "results/benchmarks/report/{model}/findings.tsv"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=Code("kvlab_pipeline.report.findings", *CHAPTERS),
        cfg=pick("report", "verdict"),
    message:
        "report: {output.findings}"
    shell:
        "python -m kvlab step report"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --verdict {input.verdict:q}"
        " --comparison {input.comparison:q}"
        " --claims {input.claims:q}"
        " --out {output.findings:q}"
        " --html {output.html:q}"
        " > {log:q} 2>&1"


rule report:
    """The findings of the first model, and those of every further one."""
    input:
        rules.report_comparison.output,
        rules.report_lead.output,
        expand("results/gap/models/{model}/FINDINGS.md", model=OTHERS),
    params:
        cfg=parameters("model"),
    message:
        "report: complete"
