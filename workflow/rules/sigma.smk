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
