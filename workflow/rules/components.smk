rule components_origin:
    """Fit mean, covariance and KLT of K and V, per layer and KV head, from one engine's capture.

    Neither bits nor a recipe is read: every rate is served by the same file.
    """
    input:
        code=code("kvlab.calibration.components"),
        model=model_files(),
        capture="calib/capture/{origin}.safetensors",
        sigma="calib/sigma/{origin}.safetensors",
        sigma_record="calib/sigma/{origin}.json",
    output:
        components="calib/components/{origin}.safetensors",
        record="calib/components/{origin}.json",
    log:
        "results/logs/components/{origin}.log",
    benchmark:
        "results/benchmarks/components/{origin}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=pick("model", "calibration", "jobs"),
    message:
        "components: mean, covariance and KLT of K and V from the capture of {wildcards.origin}"
    shell:
        "python -m kvlab components"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --out {output.components:q}"
        " > {log:q} 2>&1"


rule components:
    """The components of `calibration.origin`, and of every other origin on which a listed cell needs them."""
    input:
        expand(
            "calib/components/{origin}.{kind}",
            origin=component_origins(),
            kind=["safetensors", "json"],
        ),
    params:
        cfg=pick("calibration", "cells"),
    message:
        "components: complete"
