rule gap_metrics:
    """Every number of the report, with its interval; refused where rows may not be compared."""
    input:
        code=code("kvlab.report.metrics", *map(plan.module, plan.STUDIES)),
        sigmas=expand("calib/sigma/{engine}.json", engine=CAPTURED),
        codebooks=[
            file
            for study in plan.STUDIES
            for file in per_origin(f"calib/codebooks/{study}-{{origin}}.json", study)
        ],
        residual=expand("results/residual/{engine}.json", engine=CAPTURED),
        residual_rows=expand("results/residual/{engine}.parquet", engine=CAPTURED),
        choice="results/mitigations/choice.json",
        baseline=run_files("json"),
        jobs=job_files("json"),
        tokens=[*run_files("parquet"), *job_files("parquet")],
    output:
        metrics="results/gap/metrics.json",
        summary="results/gap/summary.json",
    log:
        "results/logs/gap/metrics.log",
    benchmark:
        "results/benchmarks/gap/metrics.tsv"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=pick(*(REPORT_KEYS - {"report", "verdict"})),
    message:
        "gap: numbers and intervals"
    shell:
        "python -m kvlab metrics"
        " --params {params.cfg:q}"
        " --baseline {input.baseline:q}"
        " --jobs {input.jobs:q}"
        " --codebooks {input.codebooks:q}"
        " --residual {input.residual:q}"
        " --choice {input.choice:q}"
        " --sigmas {input.sigmas:q}"
        " --out {output.metrics:q}"
        " --summary {output.summary:q}"
        " > {log:q} 2>&1"


rule gap_verdict:
    """ACCEPT, MARGINAL, REJECT or INCONCLUSIVE for each cell, from the bounds of its intervals."""
    input:
        code=code("kvlab.gate.verdict"),
        metrics="results/gap/metrics.json",
    output:
        report("results/gate/verdict.json", caption="../report/verdict.rst", category="Verdict"),
    log:
        "results/logs/gap/verdict.log",
    benchmark:
        "results/benchmarks/gap/verdict.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cfg=pick(*(REPORT_KEYS - {"report"})),
    message:
        "gap: verdicts"
    shell:
        "python -m kvlab gate"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule gap:
    """The numbers and the verdicts, without the report."""
    input:
        rules.gap_metrics.output,
        rules.gap_verdict.output,
    message:
        "gap: complete"
