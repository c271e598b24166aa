rule capture_engine:
    """Record Q, K and V before RoPE on the calibration windows, codec off, on {wildcards.engine}."""
    input:
        code=engine_code("kvlab.calibration.capture"),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
    output:
        "calib/capture/{engine}.safetensors",
    log:
        "results/logs/capture/{engine}.log",
    benchmark:
        "results/benchmarks/capture/{engine}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=6000,
        runtime=60,
        device=accelerators(),
    params:
        cfg=pick("model", "calibration", "jobs"),
    message:
        "capture: Q, K and V on {wildcards.engine}"
    shell:
        "python -m kvlab capture"
        " --params {params.cfg:q}"
        " --engine {wildcards.engine:q}"
        " --windows {input.windows:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule capture:
    """Captures of all engines that params.yaml lists under `calibration`."""
    input:
        expand("calib/capture/{engine}.safetensors", engine=CAPTURED),
    params:
        cfg=pick("calibration"),
    message:
        "capture: complete"
