# Of two stages: studies, and the gate with what it judges.
# A rule for what is measured together (`studies.units`), as a rule all of a dtype, with one start of each engine.
# What was measured before under the same identity is in the store, so that other parameters measure what is new.
for unit, contents in UNITS.items():
    if unit == plan.LADDER:
        continue  # has a rule of its own: it can be measured where FINDINGS.md does not ask for it

    rule:
        """Score what studies want in one dtype, window by window, with one start of each engine."""
        name:
            f"measure_{unit.replace('-', '_')}"
        input:
            **measured_inputs(contents),
        output:
            measured_outputs(contents),
        log:
            f"results/logs/measure/{{model}}/{unit}.log",
        benchmark:
            f"results/benchmarks/measure/{{model}}/{unit}.tsv"
        priority: LAST_FIRST.index(unit) + 2 if unit in LAST_FIRST else 0
        threads: PARAMS.jobs.threads
        resources:
            mem_mb=memory(*engines_of(contents)),
            runtime=480,
            device=max(accelerators(), int("vllm" in engines_of(contents))),
            gpu=gpus(*engines_of(contents)),
        params:
            code=measured_code(unit),
            foreign=measured_foreign(contents),
            cfg=pick(*measured_keys(contents)),
            measure=[f"{study}/{job}" for study, jobs in contents.items() for job in jobs],
            rows_code=mechanisms_code() if MECHANISMS in contents else "none",
        message:
            f"measure: {', '.join(contents)} of {{wildcards.model}}, {unit}"
        shell:
            "python -m kvlab step jobs"
            " --params {params.cfg:q}"
            " --measure {params.measure:q}"
            " --windows {input.windows:q}"
            " --sigma {input.sigma:q}"
            " --codebooks {input.codebooks:q}"
            " --rotated {input.rotated:q}"
            " --components {input.components:q}"
            " --archive {input.archive:q}"
            " --choice {input.choice:q}"
            " --needles {input.needles:q}"
            " --code {params.rows_code:q}"
            ' --store "$KVLAB_STORE"'
            " --results results"
            " > {log:q} 2>&1"


# What one study needs, as a target: `snakemake noise`.
for study in (*TOGETHER, BASELINE, MECHANISMS):

    rule:
        """All measurements of one study, and with them what is measured in the same processes."""
        name:
            study
        input:
            measured_of(study, wanted_of(study)),
        params:
            cfg=parameters(*KEYS_OF[study]),
        message:
            f"{study}: complete"
