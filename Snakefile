"""From parameters to findings: what the KV codec costs, on which engine, and why.

snakemake results/gap/FINDINGS.md    everything, as far as it is not there yet
snakemake capture                    one part of it; dvc.yaml groups them into stages
"""

from snakemake.utils import min_version

min_version("9.0")


configfile: "params.yaml"


report: "workflow/report/workflow.rst"


container: "docker://python:3.11-slim"  # for `--sdm apptainer` only


include: "workflow/rules/common.smk"
include: "workflow/rules/files.smk"
include: "workflow/rules/code.smk"
include: "workflow/rules/weights.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/calibration.smk"
include: "workflow/rules/studies.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/gate.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/planted.smk"
include: "workflow/rules/kvstore.smk"
include: "workflow/rules/serving.smk"
include: "workflow/rules/tradeoffs.smk"
include: "workflow/rules/order.smk"


code.keep()
checksums.keep()


wildcard_constraints:
    model="|".join(map(re.escape, MODELS)),
    engine="[a-z]+",
    dtype="[a-z]+[0-9]+",
    attention="[a-z]+",
    number="[0-9]+",
    origin="[a-z]+",
    study="[a-z]+",


rule all:
    """The report, and whole every stage of which it is made."""
    default_target: True
    input:
        # Whole stages, so that DVC can record all that the report is made of. These make more than the report reads.
        rules.data.input,
        rules.calibration.input,
        rules.studies.input,
        rules.gate.input,
        rules.report.input,
    params:
        cfg=parameters("model"),
    message:
        "all: the report is there"


onstart:
    onerun.begin()
    unedited.remember(config)
    ledgered.begin(workflow)
    progress.tell(
        workflow.dag, workflow.resource_settings.cores or workflow.resource_settings.nodes or 1, SIZES
    )
    print("Jobs write to results/logs; to watch them: tail -F results/logs/*/*/*.log", file=sys.stderr)


onsuccess:
    unedited.check()
    if "DVC_STAGE" in os.environ:
        dvc_sync.make_folders(dvc_sync.declared_outs(unedited.stage()))
    ledgered.end(workflow)


onerror:
    print("", failures.told(log), "", sep="\n", file=sys.stderr)
    ledgered.end(workflow)
