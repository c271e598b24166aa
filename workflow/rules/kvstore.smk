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
        templates=expand(
            "src/kvlab_pipeline/studies/{page}.md.j2", page=["page", "restore/templates/restore"]
        ),
        records=of_models("results/kvstore/restore/{model}.json"),
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
        "python -m kvlab step page {input.records:q}" " --study restore" " --out {output:q}" " > {log:q} 2>&1"


rule restore:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.restore_page.output,
    params:
        cfg=parameters("model"),
    message:
        "restore: complete"


rule policy_job:
    """Which chunks a bounded pool should keep: needles found and attention mass kept, by residency policy."""
    input:
        model=model_files(),
        needles="calib/needles/{model}/needles.parquet",
        needles_record="calib/needles/{model}/needles.json",
    output:
        "results/kvstore/policy/{model}.json",
    log:
        "results/logs/kvstore/policy/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/policy/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.policy.measure"),
        cfg=pick("model", "kvstore", "stats", "jobs"),
    message:
        "policy: needles in a bounded pool, {wildcards.model}"
    shell:
        "python -m kvlab step policy"
        " --params {params.cfg:q}"
        " --needles {input.needles:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule policy_page:
    """POLICY.md: the same, to be read."""
    input:
        templates=expand("src/kvlab_pipeline/studies/{page}.md.j2", page=["page", "policy/templates/policy"]),
        records=expand("results/kvstore/policy/{model}.json", model=JUDGED),
    output:
        report("results/kvstore/POLICY.md", caption="../report/policy.rst", category="KV store"),
    log:
        "results/logs/kvstore/policy.log",
    benchmark:
        "results/benchmarks/kvstore/policy.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.policy.record",
            "kvlab_pipeline.studies.policy.tables",
        ),
        cfg=parameters("model"),
    message:
        "policy: {output}"
    shell:
        "python -m kvlab step page {input.records:q}" " --study policy" " --out {output:q}" " > {log:q} 2>&1"


rule policy:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.policy_page.output,
    params:
        cfg=parameters("model"),
    message:
        "policy: complete"


rule bitplanes_job:
    """How well a few bits of each key rank what attention looks at, in every layer and head."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
    output:
        "results/kvstore/bitplanes/{model}.json",
    log:
        "results/logs/kvstore/bitplanes/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/bitplanes/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.bitplanes.measure"),
        cfg=pick("model", "kvstore", "stats", "jobs"),
    message:
        "bitplanes: keys in a few bits, {wildcards.model}"
    shell:
        "python -m kvlab step bitplanes"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule bitplanes_page:
    """BITPLANES.md: the same, to be read."""
    input:
        templates=expand(
            "src/kvlab_pipeline/studies/{page}.md.j2", page=["page", "bitplanes/templates/bitplanes"]
        ),
        records=of_models("results/kvstore/bitplanes/{model}.json"),
    output:
        report("results/kvstore/BITPLANES.md", caption="../report/bitplanes.rst", category="KV store"),
    log:
        "results/logs/kvstore/bitplanes.log",
    benchmark:
        "results/benchmarks/kvstore/bitplanes.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.bitplanes.record",
            "kvlab_pipeline.studies.bitplanes.tables",
        ),
        cfg=parameters("model"),
    message:
        "bitplanes: {output}"
    shell:
        "python -m kvlab step page {input.records:q}"
        " --study bitplanes"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule bitplanes:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.bitplanes_page.output,
    params:
        cfg=parameters("model"),
    message:
        "bitplanes: complete"


rule placement_job:
    """Whether it matters in which block of the pool a chunk lies."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
    output:
        "results/kvstore/placement/{model}.json",
    log:
        "results/logs/kvstore/placement/{model}.log",
    benchmark:
        "results/benchmarks/kvstore/placement/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code("kvlab_pipeline.studies.placement.measure"),
        cfg=pick("model", "kvstore", "jobs"),
    message:
        "placement: blocks in another order, {wildcards.model}"
    shell:
        "python -m kvlab step placement"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule placement_page:
    """PLACEMENT.md: the same, to be read."""
    input:
        templates=expand(
            "src/kvlab_pipeline/studies/{page}.md.j2", page=["page", "placement/templates/placement"]
        ),
        records=of_models("results/kvstore/placement/{model}.json"),
    output:
        report("results/kvstore/PLACEMENT.md", caption="../report/placement.rst", category="KV store"),
    log:
        "results/logs/kvstore/placement.log",
    benchmark:
        "results/benchmarks/kvstore/placement.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.placement.record",
            "kvlab_pipeline.studies.placement.tables",
        ),
        cfg=parameters("model"),
    message:
        "placement: {output}"
    shell:
        "python -m kvlab step page {input.records:q}"
        " --study placement"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule placement:
    """The page of every model; FINDINGS.md does not need it."""
    input:
        rules.placement_page.output,
    params:
        cfg=parameters("model"),
    message:
        "placement: complete"


rule kvstore:
    """The four pages on stored snapshots, of every model; FINDINGS.md needs none."""
    input:
        rules.restore.input,
        rules.policy.input,
        rules.bitplanes.input,
        rules.placement.input,
    params:
        cfg=parameters("model"),
    message:
        "kvstore: complete"
