rule corpus_model:
    """Cut the corpus into token windows: disjoint ones for the calibration and for the scores."""
    input:
        text=corpus_files(),
        model=model_files(),
    output:
        windows="calib/corpus/{model}/windows.safetensors",
        record="calib/corpus/{model}/windows.json",
        documents="calib/corpus/{model}/documents.parquet",
    log:
        "results/logs/corpus/{model}/windows.log",
    benchmark:
        "results/benchmarks/corpus/{model}/windows.tsv"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=Code("kvlab.text.corpus"),
        cfg=pick("model", "corpus", "windows"),
    message:
        "corpus: token windows of {wildcards.model} for calibration and scores"
    shell:
        "python -m kvlab step corpus"
        " --params {params.cfg:q}"
        " --documents {output.documents:q}"
        " --out {output.windows:q}"
        " > {log:q} 2>&1"


rule corpus:
    """The token windows of every model."""
    input:
        of_models(
            "calib/corpus/{model}/{file}", file=["windows.safetensors", "windows.json", "documents.parquet"]
        ),
    params:
        cfg=parameters("model"),
    message:
        "corpus: complete"
