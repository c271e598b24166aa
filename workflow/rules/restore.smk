from kvlab.codecs.catalogue import has_bits
from kvlab.codecs.recipes import named_recipe

# The recipes by which a snapshot's payload is stored.
STORED = [
    named_recipe(codec, bits, params=PARAMS)
    for codec in PARAMS.kvstore.restore.codecs
    for bits in (PARAMS.kvstore.restore.bits if has_bits(codec) else [None])
]


rule restore_job:
    """Cold against warm: whether a restored context says the same to the bit, what it saves, and what each codec makes of it."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
        archive=archive_of(STORED),
    output:
        "results/kvstore/restore/{model}.json",
    log:
        "results/logs/kvstore/restore/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/restore/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.restore.measure", *codec_modules(STORED)),
        cfg=pick("model", "windows", "calibration", "codec", "kvstore", "stats", "jobs"),
    message:
        "restore: cold against warm, {wildcards.model}"
    shell:
        "python -m kvlab step restore"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --archive {input.archive:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule restore_page:
    """RESTORE.md: the same, to be read."""
    input:
        of_models("results/kvstore/restore/{model}.json"),
    output:
        report("results/kvstore/RESTORE.md", caption="../report/restore.rst", category="KV store"),
    log:
        "results/logs/kvstore/restore.log",
    benchmark:
        "results/benchmarks/kvstore/restore.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.restore.record",
            "kvlab_pipeline.studies.restore.tables",
        ),
        cfg=parameters("model"),
    message:
        "restore: {output}"
    shell:
        "python -m kvlab step page {input:q}" " --study restore" " --out {output:q}" " > {log:q} 2>&1"


rule restore:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.restore_page.output,
    params:
        cfg=parameters("model"),
    message:
        "restore: complete"
