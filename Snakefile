"""From parameters to findings: what the KV codec costs, on which engine, and why.

snakemake results/gap/FINDINGS.md    everything, as far as it is not there yet
snakemake capture                    one stage; a stage is a file of workflow/rules
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
include: "workflow/rules/corpus.smk"
include: "workflow/rules/asked.smk"
include: "workflow/rules/capture.smk"
include: "workflow/rules/sigma.smk"
include: "workflow/rules/codebooks.smk"
include: "workflow/rules/components.smk"
include: "workflow/rules/archive.smk"
include: "workflow/rules/choice.smk"
include: "workflow/rules/residual.smk"
include: "workflow/rules/planted.smk"
include: "workflow/rules/needles.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/ladder.smk"
include: "workflow/rules/gate.smk"
include: "workflow/rules/restore.smk"
include: "workflow/rules/policy.smk"
include: "workflow/rules/bitplanes.smk"
include: "workflow/rules/placement.smk"
include: "workflow/rules/capacity.smk"
include: "workflow/rules/service.smk"
include: "workflow/rules/ranks.smk"
include: "workflow/rules/micro.smk"
include: "workflow/rules/tradeoffs.smk"
include: "workflow/rules/gap.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/order.smk"


code.keep()


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
        rules.components.input,
        rules.archive.input,
        rules.gap.input,
        rules.report.input,
    params:
        cfg=parameters("model"),
    message:
        "all: the report is there"


onstart:
    onerun.begin()
    unedited.remember(config)
    ledgered.begin(workflow)
    progress.tell(workflow.dag, workflow.resource_settings.cores or workflow.resource_settings.nodes or 1)
    print("Jobs write to results/logs; to watch them: tail -F results/logs/*/*/*.log", file=sys.stderr)


onsuccess:
    unedited.check()
    if "DVC_STAGE" in os.environ:
        dvc_sync.make_folders(dvc_sync.declared_outs(unedited.stage()))
    ledgered.end(workflow)


onerror:
    print("", failures.told(log), "", sep="\n", file=sys.stderr)
    ledgered.end(workflow)
