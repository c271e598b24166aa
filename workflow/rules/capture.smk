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
        mem_mb=6000,
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
