rule cells_job:
    """Score the studied recipe and the identity, by protocol, stream and variance ratio."""
    input:
        code=engine_code("kvlab.experiments.measure", *study_codecs("cells")),
        model=model_files(),
        windows="calib/corpus/windows.safetensors",
        sigma=f"calib/sigma/{ORIGIN}.safetensors",
        record=f"calib/sigma/{ORIGIN}.json",
        codebooks=f"calib/codebooks/{ORIGIN}.json",
        components=f"calib/components/{ORIGIN}.safetensors",
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
        cfg=pick(*CODEC_KEYS, "windows", "engines", "protocols", "gap", "jobs"),
    message:
        "cells: the gap between the engines, {wildcards.engine} {wildcards.dtype}, job {wildcards.number}"
    shell:
        "python -m kvlab measure"
        " --params {params.cfg:q}"
        " --study cells"
        " --job {wildcards.engine}-{wildcards.dtype}-{wildcards.number}"
        " --windows {input.windows:q}"
        " --sigma {input.sigma:q}"
        " --codebooks {input.codebooks:q}"
        " --components {input.components:q}"
        " --out {output.tokens:q}"
        " > {log:q} 2>&1"


rule cells:
    """All cells of the study of the gap."""
    input:
        job_files("parquet", "cells"),
        job_files("json", "cells"),
    params:
        cfg=pick(*CODEC_KEYS, "windows", "engines", "protocols", "gap", "jobs"),
    message:
        "cells: complete"
