rule codebooks_study:
    """Fit the quantiser's tables of one study on the variable that it will meet, from one engine's capture."""
    input:
        code=study_code("kvlab.calibration.codebooks", *codec_modules(studied_recipe(PARAMS))),
        model=model_files(),
        capture="calib/capture/{origin}.safetensors",
        sigma="calib/sigma/{origin}.safetensors",
        record="calib/sigma/{origin}.json",
        rotated="calib/sigma/{origin}-post_rope.safetensors",
        rotated_record="calib/sigma/{origin}-post_rope.json",
    output:
        record="calib/codebooks/{study}-{origin}.json",
        tables=directory("calib/codebooks/{study}-{origin}"),
    log:
        "results/logs/codebooks/{study}-{origin}.log",
    benchmark:
        "results/benchmarks/codebooks/{study}-{origin}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=study_cfg(),
    message:
        "codebooks: Lloyd-Max tables of {wildcards.study} from the capture of {wildcards.origin}"
    shell:
        "python -m kvlab codebooks"
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
            file
            for study in plan.STUDIES
            for file in per_origin(f"calib/codebooks/{study}-{{origin}}.json", study)
        ],
    params:
        cfg=study_cfg().every,
    message:
        "codebooks: complete"
