rule code_records:
    """Say what each module and each file of rules does, by digests: for DVC, whose stages depend on these records."""
    input:
        packages=ancient(closure.FOLDERS),
        rules=ancient(closure.RULES),
        script="workflow/scripts/closure.py",
    output:
        records=directory(closure.RECORDS),
    log:
        "results/logs/code.log",
    benchmark:
        "results/benchmarks/code.tsv"
    resources:
        mem_mb=500,
        runtime=5,
    params:
        code=Declared(all_code, every=None),
        cfg=Cfg(),
    message:
        "code: what the modules and the rules do"
    shell:
        "python {input.script:q} {output.records:q} > {log:q} 2>&1"


rule code:
    """The records of what the code does."""
    input:
        rules.code_records.output,
    params:
        cfg=Cfg(),
    message:
        "code: complete"
