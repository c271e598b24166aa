rule components:
    """Fit mean, covariance and KLT of K and V, per layer and KV head, from the origin's capture.

    Neither bits nor a recipe is read: every rate is served by the same file.
    """
    input:
        code=code("kvlab.calibration.components"),
        model=model_files(),
        capture=f"calib/capture/{ORIGIN}.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        sigma_record=f"calib/sigma/{ORIGIN}.json",
    output:
        components=f"calib/components/{ORIGIN}.safetensors",
        record=f"calib/components/{ORIGIN}.json",
    log:
        f"results/logs/components/{ORIGIN}.log",
    benchmark:
        f"results/benchmarks/components/{ORIGIN}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=pick("model", "calibration", "jobs"),
    message:
        "components: mean, covariance and KLT of K and V from the origin's capture"
    shell:
        "python -m kvlab components"
        " --params {params.cfg:q}"
        " --capture {input.capture:q}"
        " --sigma {input.sigma:q}"
        " --out {output.components:q}"
        " > {log:q} 2>&1"
