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
