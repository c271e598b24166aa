rule codebooks_study:
    """Fit the quantiser's tables of one study on the variable that it will meet, from the sample of one capture."""
    input:
        model=model_files(),
        capture="calib/capture/{model}/{origin}.safetensors",
        sigma="calib/sigma/{model}/{origin}.safetensors",
        record="calib/sigma/{model}/{origin}.json",
        rotated="calib/sigma/{model}/{origin}-post_rope.safetensors",
        rotated_record="calib/sigma/{model}/{origin}-post_rope.json",
    output:
        record="calib/codebooks/{model}/{study}-{origin}.json",
        tables=directory("calib/codebooks/{model}/{study}-{origin}"),
    log:
        "results/logs/codebooks/{model}/{study}-{origin}.log",
    benchmark:
        "results/benchmarks/codebooks/{model}/{study}-{origin}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=study_code("kvlab.lab.codebooks", *codec_modules(studied_recipe(PARAMS))),
        cfg=study_cfg(),
    message:
        "codebooks: Lloyd-Max tables of {wildcards.study}, {wildcards.model} as {wildcards.origin} captured it"
    shell:
        "python -m kvlab step codebooks"
        " --params {params.cfg:q}"
        " --study {wildcards.study}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --rotated {input.rotated:q}"
        " --out {output.record:q}"
        " > {log:q} 2>&1"


rule codebooks:
    """The tables of every study that the report reads."""
    input:
        [
            of_models(f"calib/codebooks/{{model}}/{study}-{{origin}}.json", origin=origins(study))
            for study in plan.STUDIES
        ],
    params:
        cfg=study_cfg().every,
    message:
        "codebooks: complete"
