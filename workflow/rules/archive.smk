rule archive_origin:
    """Fit the codec of whole caches on one engine's capture; where it is not asked for the file holds nothing.

    Neither bits nor a recipe is read: every rate is served by the same file.
    """
    input:
        model=model_files(),
        asked="calib/asked/{model}.json",
        capture="calib/capture/{model}/{origin}.safetensors",
        sigma="calib/sigma/{model}/{origin}.safetensors",
        sigma_record="calib/sigma/{model}/{origin}.json",
    output:
        "calib/archive/{model}/{origin}.safetensors",
    log:
        "results/logs/archive/{model}/{origin}.log",
    benchmark:
        "results/benchmarks/archive/{model}/{origin}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code("kvlab.calibration.archive_file"),
        cfg=pick("model", "calibration", "jobs"),
    message:
        "archive: the codec of whole caches, {wildcards.model} as {wildcards.origin} captured it"
    shell:
        "python -m kvlab step archive"
        " --params {params.cfg:q}"
        " --asked-for {input.asked:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule archive:
    """The codec of whole caches of every model, as `calibration.origin` captured it."""
    input:
        of_models("calib/archive/{model}/{origin}.safetensors", origin=[ORIGIN]),
    params:
        cfg=parameters("model", "calibration"),
    message:
        "archive: complete"
