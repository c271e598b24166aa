rule needles_model:
    """Plant a fact in each of some texts of the test split, and ask for it; and RULER's texts, at greater lengths."""
    input:
        documents="calib/corpus/{model}/documents.parquet",
        corpus=corpus_files(),
        model=model_files(),
    output:
        needles="calib/needles/{model}/needles.parquet",
        record="calib/needles/{model}/needles.json",
        ruler="calib/needles/{model}/ruler.parquet",
        ruler_record="calib/needles/{model}/ruler.json",
    log:
        "results/logs/needles/{model}/needles.log",
    benchmark:
        "results/benchmarks/needles/{model}/needles.tsv"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=Code("kvlab.text.needles", "kvlab.text.ruler"),
        cfg=pick("model", "corpus", "windows", "mechanisms"),
    message:
        "needles: facts planted in texts for {wildcards.model}"
    shell:
        "python -m kvlab step needles"
        " --params {params.cfg:q}"
        " --documents {input.documents:q}"
        " --out {output.needles:q}"
        " > {log:q} 2>&1"


rule needles:
    """The retrieval items of every model that the gate judges codecs on."""
    input:
        expand(
            "calib/needles/{model}/{items}.{kind}",
            model=JUDGED,
            items=["needles", "ruler"],
            kind=["parquet", "json"],
        ),
    params:
        cfg=parameters("model"),
    message:
        "needles: complete"
