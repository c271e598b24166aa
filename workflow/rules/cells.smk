rule cells_job:
    """Score the cells that params.yaml lists: each changes something in the studied recipe."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("cells")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=per_origin("calib/sigma/{origin}.safetensors", "cells"),
        record=per_origin("calib/sigma/{origin}.json", "cells"),
        codebooks=per_origin("calib/codebooks/cells-{origin}.json", "cells"),
        rotated=per_origin("calib/sigma/{origin}-post_rope.safetensors", "cells"),
        rotated_record=per_origin("calib/sigma/{origin}-post_rope.json", "cells"),
        components=expand("calib/components/{origin}.safetensors", origin=component_origins()),
        components_record=expand("calib/components/{origin}.json", origin=component_origins()),
    output:
        tokens="results/cells/{engine}-{dtype}-{number}.parquet",
        record="results/cells/{engine}-{dtype}-{number}.json",
    log:
        "results/logs/cells/{engine}-{dtype}-{number}.log",
    benchmark:
        "results/benchmarks/cells/{engine}-{dtype}-{number}.tsv"
    threads: PARAMS.jobs.threads
    resources:
        mem_mb=8000,
        runtime=240,
        device=accelerators(),
    params:
        cfg=pick(*STUDY_KEYS["cells"]),
    message:
        "cells: cells that change one thing, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study cells"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --rotated {input.rotated:q}"
        " --components {input.components:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule cells:
    """All cells of params.yaml."""
    input:
        job_files("parquet", "cells"),
        job_files("json", "cells"),
    params:
        cfg=pick(*STUDY_KEYS["cells"]),
    message:
        "cells: complete"
