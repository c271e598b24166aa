"""A line before a run in bfloat16 on a processor without instructions for it. The Snakefile's `onstart` calls `tell`.

torch computes it there too, a number at a time.
"""

from __future__ import annotations

import sys
from shutil import which

from progress import RUNS_MODEL, name_of

from kvlab.core.machine import lacks_bfloat16


def tell(workflow, parameters):
    """Say so if jobs of this run would compute in bfloat16 on this machine; `parameters` are by model."""
    on_cluster, touches = workflow.resource_settings.nodes is not None, workflow.touch
    if on_cluster or touches or which("nvidia-smi") or not lacks_bfloat16():
        return
    stages = {name_of(job.benchmark).partition("/")[0] for job in workflow.dag.needrun_jobs() if job.benchmark}
    if stages & {*RUNS_MODEL} and asked(params.model_dump(mode="json") for params in parameters.values()):
        print(
            "This processor has no instructions for bfloat16 (no AVX-512): this run takes several times longer here"
            " than one in float32. For that, stop it with Ctrl-C and type: make findings PRESET=float32",
            file=sys.stderr,
        )


def asked(said):
    """Whether ``dtype`` or ``dtypes`` is bfloat16 anywhere in parameters."""
    if isinstance(said, dict):
        own = [said.get("dtype"), *(said.get("dtypes") or [])]
        return "bfloat16" in own or asked(said.values())
    return not isinstance(said, str) and hasattr(said, "__iter__") and any(map(asked, said))
