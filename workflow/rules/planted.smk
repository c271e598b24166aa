rule planted_report:
    """Plant values that are known, and find them with the pipeline's own code; fails where one is missed."""
    input:
        templates=sorted(map(str, Path("validation/planted/templates").glob("*"))),
        model=files_of(PARAMS.model),
        windows=f"calib/corpus/{LEAD}/windows.safetensors",
    output:
        report="results/planted/REPORT.md",
        values="results/planted/planted.json",
    log:
        "results/logs/planted/planted.log",
    benchmark:
        "results/benchmarks/planted/planted.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=30,
        device=accelerators(),
        gpu=gpus("vllm"),
    params:
        code=Code(
            "validation.planted.run",
            "kvlab_pipeline.studies.factors.plan",
            *[f"kvlab.engines.{engine}.engine" for engine in sorted({"hf", *PARAMS.engines})],
            *[
                CODECS[name].codec.partition(":")[0]
                for name in ("identity", "noise", "block", "klt", "hadamard", "int")
            ],
        ),
        cfg=lead_cfg("model", "engines", "stats", "jobs"),
        folder=subpath(output.report, parent=True),
    message:
        "planted: does the pipeline find what was planted?"
    shell:
        "python -m kvlab step planted"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --out {params.folder:q}"
        " > {log:q} 2>&1"
        # Snakemake takes the outputs of a failed job away; what was missed can be read beside the log.
        " || {{ cp {output.report:q} results/logs/planted/; exit 1; }}"


rule planted:
    """Whether what was planted is found; FINDINGS.md does not need it."""
    input:
        rules.planted_report.output,
    params:
        cfg=lead_cfg("model"),
    message:
        "planted: complete"
