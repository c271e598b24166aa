rule corpus:
    """Cut the corpus into token windows: disjoint ones for the calibration and for the scores."""
    input:
        code=code("kvlab.corpus"),
        text=corpus_files(),
        model=model_files(),
    output:
        windows="calib/corpus/windows.safetensors",
        record="calib/corpus/windows.json",
    log:
        "results/logs/corpus/windows.log",
    benchmark:
        "results/benchmarks/corpus/windows.tsv"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        cfg=pick("model", "corpus", "windows"),
    message:
        "corpus: token windows for calibration and scores"
    shell:
        "python -m kvlab corpus" " --params {params.cfg:q}" " --out {output.windows:q}" " > {log:q} 2>&1"
