rule mitigations_choice:
    """Choose on the calibration split which layers to favour; the scored text is not looked at."""
    input:
        code=code(
            "kvlab.experiments.choose",
            f"kvlab.engines.{ORIGIN}",
            *study_codecs("mitigations"),
        ),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        record=f"calib/sigma/{ORIGIN}.json",
        codebooks=f"calib/codebooks/mitigations-{ORIGIN}.json",
        components=f"calib/components/{ORIGIN}.safetensors",
        components_record=f"calib/components/{ORIGIN}.json",
    output:
        "results/mitigations/choice.json",
    log:
        "results/logs/mitigations/choice.log",
    benchmark:
        "results/benchmarks/mitigations/choice.tsv"
    priority: 10  # the other jobs of this study wait for it
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*STUDY_KEYS["mitigations"]),
    message:
        "mitigations: which layers to favour, by the calibration split"
    shell:
        "python -m kvlab choose"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule mitigations_job:
    """Score ways to spend bytes on favoured layers, beside uniform spending."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("mitigations")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=per_origin("calib/sigma/{origin}.safetensors", "mitigations"),
        record=per_origin("calib/sigma/{origin}.json", "mitigations"),
        codebooks=per_origin("calib/codebooks/mitigations-{origin}.json", "mitigations"),
        components=f"calib/components/{ORIGIN}.safetensors",
        components_record=f"calib/components/{ORIGIN}.json",
        choice="results/mitigations/choice.json",
    output:
        tokens="results/mitigations/{engine}-{dtype}-{number}.parquet",
        record="results/mitigations/{engine}-{dtype}-{number}.json",
    log:
        "results/logs/mitigations/{engine}-{dtype}-{number}.log",
    benchmark:
        "results/benchmarks/mitigations/{engine}-{dtype}-{number}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*STUDY_KEYS["mitigations"]),
    message:
        "mitigations: where bytes are spent, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study mitigations"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        " --choice {input.choice:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule mitigations:
    """All arms of the mitigations, and the choice behind them."""
    input:
        job_files("parquet", "mitigations"),
        job_files("json", "mitigations"),
        "results/mitigations/choice.json",
    params:
        cfg=pick(*STUDY_KEYS["mitigations"]),
    message:
        "mitigations: complete"
