rule service_load:
    """What a smaller cache buys when many ask: steps measured on vLLM, services simulated from them.

    A timing, so it takes all cores: no other job runs beside it. It computes in one thread, whatever there is.
    """
    input:
        templates=sorted(map(str, Path("validation/serving/templates").glob("*"))),
        model=model_files(),
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        page="results/service/{model}/LOAD.md",
        data="results/service/{model}/load.json",
        steps="results/service/{model}/steps.json",
    log:
        "results/logs/service/{model}/load.log",
    benchmark:
        "results/benchmarks/service/{model}/load.tsv"
    threads: workflow.cores or PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        code=Code(
            "validation.serving.of_run",
            "validation.serving.steps",
            "kvlab.cache.vllm_plugin",
            *codec_modules(PAGED + [named_recipe("hadamard", 4, params=PARAMS)]),
        ),
        cfg=pick("model", "calibration", "codec", "mechanisms", "jobs"),
        folder=subpath(output.page, parent=True),
    message:
        "service: what a smaller cache buys under load, {wildcards.model}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step service"
        " --params {params.cfg:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --out {params.folder:q}"
        " > {log:q} 2>&1"


rule service:
    """The page of every model that the gate judges codecs on; FINDINGS.md does not need it."""
    input:
        expand("results/service/{model}/{made}", model=JUDGED, made=["LOAD.md", "load.json", "steps.json"]),
    params:
        cfg=parameters("model"),
    message:
        "service: complete"
