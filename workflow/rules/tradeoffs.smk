from kvlab_pipeline.studies.tradeoffs.arms import recipes_of

# The recipes that are held against other mechanisms.
TRADED = recipes_of(PARAMS)


rule tradeoffs_job:
    """What codecs, evictions, latents, sparse reading and self-speculation cost and buy at equal bytes."""
    input:
        model=model_files(),
        windows="calib/corpus/{model}/windows.safetensors",
        texts=rules.corpus_texts.output.texts,
        texts_record=rules.corpus_texts.output.record,
        sigma=f"calib/sigma/{{model}}/{ORIGIN}.safetensors",
        record=f"calib/sigma/{{model}}/{ORIGIN}.json",
        components=f"calib/components/{{model}}/{ORIGIN}.safetensors",
        components_record=f"calib/components/{{model}}/{ORIGIN}.json",
    output:
        "results/tradeoffs/{model}.json",
    log:
        "results/logs/tradeoffs/{model}.log",
    benchmark:
        "results/benchmarks/tradeoffs/{model}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=4000,
        runtime=60,
        device=accelerators(),
        gpu=gpus("hf"),
    params:
        code=Code(
            "kvlab_pipeline.studies.tradeoffs.measure", "kvlab.engines.hf.engine", *codec_modules(TRADED)
        ),
        cfg=pick(
            "model",
            "corpus",
            "windows",
            "calibration",
            "codec",
            "mechanisms",
            "tradeoffs",
            "stats",
            "jobs",
        ),
    message:
        "tradeoffs: codecs beside other ways to a cheaper cache, {wildcards.model}"
    shell:
        "python -m kvlab step tradeoffs"
        " --params {params.cfg:q}"
        " --windows {input.windows:q}"
        " --texts {input.texts:q}"
        " --sigma {input.sigma:q}"
        " --components {input.components:q}"
        " --out {output:q}"
        " > {log:q} 2>&1"


rule tradeoffs_page:
    """REPORT.md: the same, to be read, and its figure."""
    input:
        templates=expand(
            "src/kvlab_pipeline/studies/{page}.md.j2", page=["page", "tradeoffs/templates/tradeoffs"]
        ),
        records=expand("results/tradeoffs/{model}.json", model=JUDGED),
    output:
        page=report("results/tradeoffs/REPORT.md", caption="../report/tradeoffs.rst", category="Mechanisms"),
        figures=expand("results/tradeoffs/{model}.svg", model=JUDGED),
    log:
        "results/logs/tradeoffs/page.log",
    benchmark:
        "results/benchmarks/tradeoffs/page.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        code=Code(
            "kvlab_pipeline.studies.page",
            "kvlab_pipeline.studies.tradeoffs.record",
            "kvlab_pipeline.studies.tradeoffs.tables",
        ),
        cfg=parameters("model"),
    message:
        "tradeoffs: {output.page}"
    shell:
        "python -m kvlab step page {input.records:q}"
        " --study tradeoffs"
        " --out {output.page:q}"
        " > {log:q} 2>&1"


rule tradeoffs:
    """The page of every model that the gate judges; FINDINGS.md does not need it."""
    input:
        rules.tradeoffs_page.output,
    params:
        cfg=parameters("model"),
    message:
        "tradeoffs: complete"
