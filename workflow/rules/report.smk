rule report:
    """FINDINGS.md, the figures in it and the numbers drawn in each of them."""
    input:
        code=code("kvlab.report.findings"),
        templates=TEMPLATES,
        metrics="results/gap/metrics.json",
        verdict="results/gate/verdict.json",
    output:
        findings="results/gap/FINDINGS.md",
        figures=expand("results/gap/figures/{name}.{kind}", name=FIGURES, kind=["svg", "csv"]),
    log:
        "results/logs/report/findings.log",
    benchmark:
        "results/benchmarks/report/findings.tsv"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        cfg=pick(*REPORT_KEYS),
    message:
        "report: {output.findings}"
    shell:
        "python -m kvlab report"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --verdict {input.verdict:q}"
        " --out {output.findings:q}"
        " > {log:q} 2>&1"
