rule report:
    """FINDINGS.md and report.html: the same words; the figures, and the numbers drawn in each of them."""
    input:
        code=code("kvlab.report.findings"),
        templates=TEMPLATES,
        metrics="results/gap/metrics.json",
        verdict="results/gate/verdict.json",
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
        cfg=pick(*REPORT_KEYS),
    message:
        "report: {output.findings}"
    shell:
        "python -m kvlab report"
        " --params {params.cfg:q}"
        " --metrics {input.metrics:q}"
        " --verdict {input.verdict:q}"
        " --out {output.findings:q}"
        " --html {output.html:q}"
        " > {log:q} 2>&1"
