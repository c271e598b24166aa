rule asked_model:
    """Say which codecs of whole caches are asked for of a model: capture and archive hang on no other parameter of it."""
    output:
        "calib/asked/{model}.json",
    log:
        "results/logs/asked/{model}.log",
    benchmark:
        "results/benchmarks/asked/{model}.tsv"
    resources:
        mem_mb=500,
        runtime=5,
    params:
        code=Code("kvlab.calibration.asked"),
        cfg=pick("model", "studies", "ladder", "mechanisms", "kvstore"),
        codecs=whole_codecs,
    message:
        "asked: codecs of whole caches of {wildcards.model}"
    shell:
        "python -m kvlab step asked" " --codecs {params.codecs:q}" " --out {output:q}" " > {log:q} 2>&1"


rule asked:
    """Of every model the codecs of whole caches that are asked for."""
    input:
        of_models("calib/asked/{model}.json"),
    params:
        cfg=parameters("model", "studies", "ladder", "mechanisms", "kvstore"),
    message:
        "asked: complete"
