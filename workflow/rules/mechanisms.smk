rule mechanisms_job:
    """Measure every codec, and every dtype of an engine's own cache: quality on text and needles, bytes, throughput.

    No codebooks are read: other bits of the studied recipe leave the rows as they are.
    """
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        needles="calib/needles/{model}/needles.parquet",
        needles_record="calib/needles/{model}/needles.json",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        scores="results/mechanisms/{model}/{engine}.parquet",
        record="results/mechanisms/{model}/{engine}.json",
    log:
        "results/logs/mechanisms/{model}/{engine}.log",
    benchmark:
        "results/benchmarks/mechanisms/{model}/{engine}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
        gpu=gpus(),
    params:
        code=mechanisms_code(),
        cfg=pick(*MECHANISMS_KEYS),
    message:
        "mechanisms: what the gate judges, {wildcards.model} on {wildcards.engine}"
    shell:
        "python -m kvlab mechanisms"
        " --params {params.cfg:q}"
        " --engine {wildcards.engine}"
        " --windows {input.windows:q}"
        " --needles {input.needles:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --code {params.code:q}"
        " --out {output.scores:q}"
        " > {log:q} 2>&1"


rule mechanisms:
    """The rows of every model and engine, before the gate has judged them."""
    input:
        of_models(
            "results/mechanisms/{model}/{engine}.{kind}", engine=PARAMS.engines, kind=["parquet", "json"]
        ),
    params:
        cfg=parameters(*MECHANISMS_KEYS),
    message:
        "mechanisms: complete"
