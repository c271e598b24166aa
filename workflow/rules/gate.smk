rule gate_rows:
    """A model's rows with their evidence, out of the tables that were measured; and what is current now."""
    input:
        windows="calib/corpus/{model}/windows.json",
        needles="calib/needles/{model}/needles.json",
        ruler="calib/needles/{model}/ruler.json",
        records=of_model("results/mechanisms/{model}/{engine}.json", engine=PARAMS.engines),
        scores=of_model("results/mechanisms/{model}/{engine}.parquet", engine=PARAMS.engines),
    output:
        rows="results/gate/rows/{model}.json",
        current="results/gate/current/{model}.json",
    log:
        "results/logs/gate/{model}/rows.log",
    benchmark:
        "results/benchmarks/gate/{model}/rows.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code("kvlab_pipeline.gate_page.measured_rows"),
        cfg=pick("engines", "mechanisms"),
        measured_code=mechanisms_code(),
    message:
        "gate: rows and evidence of {wildcards.model}"
    shell:
        "python -m kvlab step rows {input.records:q}"
        " --windows {input.windows:q}"
        " --needles {input.needles:q}"
        " --code {params.measured_code:q}"
        " --claim {params.cfg[mechanisms][claim]:q}"
        " --out {output.rows:q}"
        " --current {output.current:q}"
        " > {log:q} 2>&1"


rule gate_report:
    """GATE.md: what may be claimed of every row of every model; beside it why.

    Rows that would be certified are measured again, on a few items; of the default run's none would be.
    """
    input:
        **replayed_inputs(),
        mechanisms="src/kvlab/gate/registry/mechanisms.yaml",
        evals="src/kvlab/gate/registry/evals.yaml",
        templates=expand("src/kvlab_pipeline/gate_page/templates/{page}.md.j2", page=["page", "reasons"]),
        rows=expand("results/gate/rows/{model}.json", model=JUDGED),
        current=expand("results/gate/current/{model}.json", model=JUDGED),
        records=expand("results/mechanisms/{model}/{engine}.json", model=JUDGED, engine=PARAMS.engines),
        scores=expand("results/mechanisms/{model}/{engine}.parquet", model=JUDGED, engine=PARAMS.engines),
    output:
        page=report("results/gate/GATE.md", caption="../report/gate.rst", category="Verdict"),
        reasons="results/gate/GATE-reasons.md",
        claims="results/gate/claims.json",
    log:
        "results/logs/gate/report.log",
    benchmark:
        "results/benchmarks/gate/report.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        code=Code("kvlab_pipeline.gate_page.page", "kvlab_pipeline.replay"),
        cfg=parameters(*REPLAYED_KEYS),
        replay=[Cfg(MODELS[slug].model_dump(mode="json", include=set(REPLAYED_KEYS))) for slug in JUDGED],
        told=DISCLOSURES,
    message:
        "gate: {output.page}"
    shell:
        "python -m kvlab gate report {input.rows:q}"
        " --current {input.current:q}"
        " --records {input.records:q}"
        " --mechanisms {input.mechanisms:q}"
        " --evals {input.evals:q}"
        " --disclosures {params.told:q}"
        " --replay {params.replay:q}"
        " --out {output.page:q}"
        " --json {output.claims:q}"
        " > {log:q} 2>&1"


rule gate_trust:
    """TRUST.md: what the gate says of planted corruptions and losses, and of this run's baselines against themselves."""
    input:
        template="validation/gate/templates/trust.md.j2",
        mechanisms="src/kvlab/gate/registry/mechanisms.yaml",
        evals="src/kvlab/gate/registry/evals.yaml",
        rows=expand("results/gate/rows/{model}.json", model=JUDGED),
        current=expand("results/gate/current/{model}.json", model=JUDGED),
        records=expand("results/mechanisms/{model}/{engine}.json", model=JUDGED, engine=PARAMS.engines),
        scores=expand("results/mechanisms/{model}/{engine}.parquet", model=JUDGED, engine=PARAMS.engines),
    output:
        page="results/gate/TRUST.md",
        detection="results/gate/detection.svg",  # in no `snakemake --report`: FINDINGS.md does not make it
        numbers="results/gate/detection.csv",
    log:
        "results/logs/gate/trust.log",
    benchmark:
        "results/benchmarks/gate/trust.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code("validation.gate.page"),
        cfg=parameters("engines"),
    message:
        "gate: {output.page}"
    shell:
        "python -m kvlab step gate_trust {input.rows:q}"
        " --current {input.current:q}"
        " --records {input.records:q}"
        " --mechanisms {input.mechanisms:q}"
        " --evals {input.evals:q}"
        " --out {output.page:q}"
        " > {log:q} 2>&1"


rule gate:
    """What may be claimed of every mechanism, and why not more."""
    input:
        rules.gate_report.output,
        rules.gate_trust.output,
    params:
        cfg=parameters("model"),
    message:
        "gate: complete"
