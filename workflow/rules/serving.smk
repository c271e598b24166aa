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
        cfg=pick("model", "codec", "mechanisms", "jobs"),
        folder=subpath(output.page, parent=True),
    message:
        "capacity: vLLM's plain pages and coded ones under load, {wildcards.model}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step capacity"
        " --params {params.cfg:q}"
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


rule service_load:
    """What a smaller cache buys when many ask: steps measured on vLLM, services simulated from them.

    A timing, so it takes all cores: no other job runs beside it. It computes in one thread, whatever there is.
    """
    input:
        templates=sorted(map(str, Path("validation/serving/templates").glob("*"))),
        model=model_files(),
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
        cfg=pick("model", "codec", "mechanisms", "jobs"),
        folder=subpath(output.page, parent=True),
    message:
        "service: what a smaller cache buys under load, {wildcards.model}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step service"
        " --params {params.cfg:q}"
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


rule ranks_page:
    """Attention over several processes, and hand-overs between two: answers held against one process, then measured.

    A timing, so it takes all cores: no other job runs beside it.
    """
    input:
        templates=sorted(map(str, Path("validation/cluster/templates").glob("*"))),
        model=model_files(),
    output:
        page="results/ranks/{model}/CLUSTER.md",
        data="results/ranks/{model}/CLUSTER.json",
    log:
        "results/logs/ranks/{model}/page.log",
    benchmark:
        "results/benchmarks/ranks/{model}/page.tsv"
    threads: workflow.cores or PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        code=Code(
            "validation.cluster.measure", "validation.cluster.page", "validation.cluster.vllm_connector"
        ),
        cfg=pick("model", "jobs"),
    message:
        "ranks: hand-overs and collectives, {wildcards.model}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step ranks --params {params.cfg:q} --out {output.page:q} > {log:q} 2>&1"


rule ranks:
    """The page of every model that the gate judges codecs on; FINDINGS.md does not need it."""
    input:
        expand("results/ranks/{model}/{made}", model=JUDGED, made=["CLUSTER.md", "CLUSTER.json"]),
    params:
        cfg=parameters("model"),
    message:
        "ranks: complete"


rule micro_rows:
    """Single operations of mechanisms beside named libraries, in one process.

    A timing, so it takes all cores: no other job runs beside it. It computes in one thread, whatever there is.
    """
    input:
        rows="src/kvlab_mechanisms/micro/seed_rows.csv",
        templates=sorted(map(str, Path("src/kvlab_mechanisms/micro/templates").glob("*"))),
    output:
        "results/micro/BENCH.md",
    log:
        "results/logs/micro/rows.log",
    benchmark:
        "results/benchmarks/micro/rows.tsv"
    threads: workflow.cores or PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        code=Code("kvlab_mechanisms.micro.rows", "kvlab_mechanisms.micro.page", "kvlab_mechanisms.micro.page"),
        cfg=parameters(),
    message:
        "micro: {output}"
    shell:
        "OMP_NUM_THREADS=1 python -m kvlab step micro --params {params.cfg:q} --out {output:q} > {log:q} 2>&1"


rule micro:
    """The page of all rows; FINDINGS.md does not need it."""
    input:
        rules.micro_rows.output,
    message:
        "micro: complete"


rule serving:
    """Timings: a small cache under load and between processes, and single operations; FINDINGS.md needs none."""
    input:
        rules.capacity.input,
        rules.service.input,
        rules.ranks.input,
        rules.micro.input,
    params:
        cfg=parameters("model"),
    message:
        "serving: complete"
