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
