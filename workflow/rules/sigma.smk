rule sigma_engine:
    """Fit Sigma_q, the second moment of the queries before and behind RoPE, from one engine's capture."""
    input:
        code=code("kvlab.calibration.sigma"),
        model=model_files(),
        capture="calib/capture/{engine}.safetensors",
    output:
        sigma="calib/sigma/{engine}.safetensors",
        record="calib/sigma/{engine}.json",
        rotated="calib/sigma/{engine}-post_rope.safetensors",
        rotated_record="calib/sigma/{engine}-post_rope.json",
    log:
        "results/logs/sigma/{engine}.log",
    benchmark:
        "results/benchmarks/sigma/{engine}.tsv"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        cfg=pick("model", "calibration"),
    message:
        "sigma: covariance of the queries of {wildcards.engine}"
    shell:
        "python -m kvlab sigma"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --out {output.sigma:q}"
        " > {log:q} 2>&1"


rule sigma:
    """Sigma_q of every captured engine; cells use that of `calibration.origin` unless they name another origin."""
    input:
        expand(
            "calib/sigma/{engine}{placement}.{kind}",
            engine=CAPTURED,
            placement=["", "-post_rope"],
            kind=["safetensors", "json"],
        ),
    params:
        cfg=pick("calibration"),
    message:
        "sigma: complete"
