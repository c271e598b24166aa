from kvlab.codecs.recipes import named_recipe

# The recipes that vLLM's own pages hold; `klt` where the gate's rows ask for none.
PAGED = [
    named_recipe(codec, bits, params=PARAMS)
    for codec in (PARAMS.mechanisms.pages or ["klt"])
    for bits in PARAMS.mechanisms.bits
]


rule capacity_load:
    """What a small cache buys in vLLM, and what it costs: plain pages and coded ones under the same loads.

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
        page="results/capacity/{model}/CAPACITY.md",
        data="results/capacity/{model}/capacity.json",
    log:
        "results/logs/capacity/{model}/load.log",
    benchmark:
        "results/benchmarks/capacity/{model}/load.tsv"
    threads: workflow.cores or PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
    params:
        code=Code(
            "validation.serving.of_run",
            "validation.serving.arm",
            "kvlab.cache.vllm_plugin",
            *codec_modules(PAGED),
        ),
        cfg=pick("model", "calibration", "codec", "mechanisms", "jobs"),
        folder=subpath(output.page, parent=True),
    message:
        "capacity: vLLM's plain pages and coded ones under load, {wildcards.model}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step capacity"
        " --params {params.cfg:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --out {params.folder:q}"
        " > {log:q} 2>&1"


rule capacity:
    """The page of every model that the gate judges codecs on; FINDINGS.md does not need it, and it takes long."""
    input:
        expand("results/capacity/{model}/{made}", model=JUDGED, made=["CAPACITY.md", "capacity.json"]),
    params:
        cfg=parameters("model"),
    message:
        "capacity: complete"
