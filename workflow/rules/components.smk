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
    """The components of `calibration.origin`, and of every other origin on which a listed cell needs them."""
    input:
        of_models(
            "calib/components/{model}/{origin}.{kind}",
            origin=component_origins(),
            kind=["safetensors", "json"],
        ),
    params:
        cfg=parameters("model", "calibration", "cells"),
    message:
        "components: complete"
