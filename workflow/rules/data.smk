rule corpus_texts:
    """Read the texts, of which every model's windows are cut: while the weights are made."""
    input:
        corpus_files(),
    output:
        texts="calib/corpus/texts.parquet",
        record="calib/corpus/texts.json",
    log:
        "results/logs/corpus/texts.log",
    benchmark:
        "results/benchmarks/corpus/texts.tsv"
    priority: 10  # the windows wait for it
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        code=Code("kvlab.text.corpus"),
        cfg=lead_cfg("corpus"),
    message:
        "corpus: documents of the texts"
    shell:
        "python -m kvlab step texts --params {params.cfg:q} --out {output.texts:q} > {log:q} 2>&1"


rule corpus_model:
    """Cut the corpus into token windows: disjoint ones for the calibration and for the scores."""
    input:
        texts=rules.corpus_texts.output.texts,
        texts_record=rules.corpus_texts.output.record,
        model=model_files(),
    output:
        windows="calib/corpus/{model}/windows.safetensors",
        record="calib/corpus/{model}/windows.json",
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
        " --texts {input.texts:q}"
        " --out {output.windows:q}"
        " > {log:q} 2>&1"


rule corpus:
    """The token windows of every model."""
    input:
        of_models("calib/corpus/{model}/{file}", file=["windows.safetensors", "windows.json"]),
    params:
        cfg=parameters("model"),
    message:
        "corpus: complete"


rule needles_model:
    """Plant a fact in each of some texts of the test split, and ask for it; and RULER's texts, at greater lengths."""
    input:
        texts=rules.corpus_texts.output.texts,
        texts_record=rules.corpus_texts.output.record,
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
    priority: 6  # float32 waits for none of it
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
        " --texts {input.texts:q}"
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


rule asked_model:
    """Say which codecs of whole caches are asked for of a model: capture and archive hang on no other parameter of it."""
    output:
        "calib/asked/{model}.json",
    log:
        "results/logs/asked/{model}.log",
    benchmark:
        "results/benchmarks/asked/{model}.tsv"
    resources:
        mem_mb=500,
        runtime=5,
    params:
        code=Code("kvlab.calibration.asked"),
        cfg=pick("model", "studies", "ladder", "mechanisms", "kvstore"),
        codecs=whole_codecs,
    message:
        "asked: codecs of whole caches of {wildcards.model}"
    shell:
        "python -m kvlab step asked" " --codecs {params.codecs:q}" " --out {output:q}" " > {log:q} 2>&1"


rule asked:
    """Of every model the codecs of whole caches that are asked for."""
    input:
        of_models("calib/asked/{model}.json"),
    params:
        cfg=parameters("model", "studies", "ladder", "mechanisms", "kvstore"),
    message:
        "asked: complete"


rule data:
    """What all else is measured on: token windows, retrieval items, and which codecs of whole caches are asked for."""
    input:
        rules.corpus.input,
        rules.needles.input,
        rules.asked.input,
    params:
        cfg=parameters("model", "studies", "ladder", "mechanisms", "kvstore"),
    message:
        "data: complete"
