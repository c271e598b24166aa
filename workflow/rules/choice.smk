rule choice_layers:
    """Choose on the calibration split which layers to favour; the scored text is not looked at."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        codebooks=f"calib/codebooks/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        "results/choice/{model}.json",
    log:
        "results/logs/choice/{model}.log",
    benchmark:
        "results/benchmarks/choice/{model}.tsv"
    priority: 10  # what measures the mitigations waits for it
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
        gpu=gpus(ORIGIN),
    params:
        code=Code(
            "kvlab_pipeline.studies.mitigations.search",
            f"kvlab.engines.{ORIGIN}.engine",
            *study_codecs("mitigations"),
        ),
        cfg=pick(*STUDY_KEYS["mitigations"], "studies"),
    message:
        "choice: which layers of {wildcards.model} to favour, by the calibration split"
    shell:
        "python -m kvlab step choose"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        ' --store "$KVLAB_STORE"'
        " --out {output:q}"
        " > {log:q} 2>&1"


rule choice:
    """The layers that the mitigations favour, of every model of which they are measured."""
    input:
        expand("results/choice/{model}.json", model=wanted_of(plan.CHOSEN)),
    params:
        cfg=parameters(*STUDY_KEYS["mitigations"], "studies"),
    message:
        "choice: complete"
