rule capture_engine:
    """Fold up Q, K and V before RoPE on the calibration windows, codec off, on one engine.

    The file holds moments and, in bfloat16, K and V of `calibration.sample` windows; it does not grow with the text.
    Where a codec of whole caches is asked for it holds moments of each layer with the one below, too.
    """
    input:
        model=model_files(),
        asked="calib/asked/{model}.json",
        windows="calib/corpus/{model}/windows.safetensors",
    output:
        "calib/capture/{model}/{engine}.safetensors",
    log:
        "results/logs/capture/{model}/{engine}.log",
    benchmark:
        "results/benchmarks/capture/{model}/{engine}.tsv"
    priority: 10  # all that measures waits for it
    threads: PARAMS.jobs.threads + 1  # what passes is folded up beside the engine
    resources:
        mem_mb=lambda wildcards: memory(*{"hf", wildcards.engine})(wildcards),  # gradients are transformers' alone
        runtime=60,
        device=accelerators(),
        gpu=gpus(),
    params:
        code=engine_code("kvlab.calibration.capture"),
        cfg=pick("model", "calibration", "jobs"),
    message:
        "capture: moments of Q, K and V of {wildcards.model} on {wildcards.engine}"
    shell:
        "python -m kvlab step capture"
        " --params {params.cfg:q}"
        " --engine {wildcards.engine:q}"
        " --windows {input.windows:q}"
        " --asked-for {input.asked:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule capture:
    """Captures of all engines that params.yaml lists under `calibration`."""
    input:
        of_models("calib/capture/{model}/{engine}.safetensors", engine=CAPTURED),
    params:
        cfg=parameters("model", "calibration"),
    message:
        "capture: complete"


rule sigma_engine:
    """Fit Sigma_q, the second moment of the queries before and after RoPE, from one engine's capture."""
    input:
        model=model_files(),
        capture="calib/capture/{model}/{engine}.safetensors",
    output:
        sigma="calib/sigma/{model}/{engine}.safetensors",
        record="calib/sigma/{model}/{engine}.json",
        rotated="calib/sigma/{model}/{engine}-post_rope.safetensors",
        rotated_record="calib/sigma/{model}/{engine}-post_rope.json",
    log:
        "results/logs/sigma/{model}/{engine}.log",
    benchmark:
        "results/benchmarks/sigma/{model}/{engine}.tsv"
    priority: 10  # the codebooks wait for it
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        code=Code("kvlab.calibration.sigma"),
        cfg=pick("model", "calibration"),
    message:
        "sigma: covariance of the queries of {wildcards.model} on {wildcards.engine}"
    shell:
        "python -m kvlab step sigma"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --out {output.sigma:q}"
        " > {log:q} 2>&1"


rule sigma:
    """Sigma_q of every captured engine; cells use that of `calibration.origin` unless they name another origin."""
    input:
        of_models(
            "calib/sigma/{model}/{engine}{placement}.{kind}",
            engine=CAPTURED,
            placement=["", "-post_rope"],
            kind=["safetensors", "json"],
        ),
    params:
        cfg=parameters("model", "calibration"),
    message:
        "sigma: complete"


rule components_origin:
    """Fit mean, covariance and KLT of K and V, per layer and KV head, from one engine's capture.

    Neither bits nor a recipe is read: every rate is served by the same file.
    """
    input:
        model=model_files(),
        capture="calib/capture/{model}/{origin}.safetensors",
        sigma="calib/sigma/{model}/{origin}.safetensors",
        sigma_record="calib/sigma/{model}/{origin}.json",
    output:
        components="calib/components/{model}/{origin}.safetensors",
        record="calib/components/{model}/{origin}.json",
    log:
        "results/logs/components/{model}/{origin}.log",
    benchmark:
        "results/benchmarks/components/{model}/{origin}.tsv"
    priority: 6  # float32 waits for none of it
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code("kvlab.calibration.components"),
        cfg=pick("model", "calibration", "jobs"),
    message:
        "components: mean, covariance and KLT of K and V, {wildcards.model} as {wildcards.origin} captured it"
    shell:
        "python -m kvlab step components"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --out {output.components:q}"
        " > {log:q} 2>&1"


rule components:
    """The components of every engine that is captured."""
    input:
        of_models(
            "calib/components/{model}/{origin}.{kind}",
            origin=CAPTURED,
            kind=["safetensors", "json"],
        ),
    params:
        cfg=parameters("model", "calibration"),
    message:
        "components: complete"


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
    priority: 6  # float32 waits for none of it
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


rule calibration:
    """What codecs are fitted by, of every engine that is captured. Neither bits nor a study is read."""
    input:
        rules.capture.input,
        rules.sigma.input,
        rules.archive.input,
        rules.components.input,
    params:
        cfg=parameters("model", "calibration"),
    message:
        "calibration: complete"
