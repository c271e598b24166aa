"""Parse the rules in the working folder and print what the tests ask about, as JSON. Run as a process:

    inspect_rules.py rules       what each rule has, what `report()` marks, which rules want conda: one parse
    inspect_rules.py affected    which stages change with each parameter: a parse for each of them

Snakemake leaves modules, signal handlers and warning filters behind, so it is kept out of pytest's process.
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "workflow" / "scripts"), str(ROOT / "src"), str(ROOT / "tests")]

import dvc_sync  # noqa: E402
from snakemake.io import is_flagged  # noqa: E402

import embedded  # noqa: E402
from kvlab.core.errors import UserError  # noqa: E402
from kvlab.core.paramfile import read_yaml  # noqa: E402
from kvlab_pipeline.jobs import plan  # noqa: E402
from kvlab_pipeline.studies.settings import by_model, resolved  # noqa: E402

OTHER_WORDS = {
    "hf": "vllm",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "fitted": "gaussian",
    "per_head": "mixed_heads",
    "randomized": "exact",
    "fp16": "fp32",
    "kv": "v",
    "in_forward": "snapshot",
    "sdpa": "eager",
}


def leaves(node, path=()):
    """(path, value) of everything in params.yaml that is not a section."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def alternatives(value):
    """Other values that might be allowed where `value` is."""
    if value is None:
        return [1.0, "main"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, value / 2, value * 1.01]
    if value == []:
        return [["hadamard"], [0.5], [64]]
    if isinstance(value, list) and isinstance(value[0], dict):
        return [[value[0] | {"revision": "main"}, *value[1:]], [*value, value[0] | {"slug": "second"}]]
    if isinstance(value, list):
        first = [[other, *value[1:]] for other in alternatives(value[0])]
        return [value[:-1], *first]
    return [OTHER_WORDS[value]] if value in OTHER_WORDS else [f"{value}_other"]


def changed(params, path):
    """`params` with another allowed value at `path`; None when that leaf allows only the one it has."""
    for value in alternatives(value_at(params, path)):
        other = copy.deepcopy(params)
        value_at(other, path[:-1])[path[-1]] = value
        try:
            found = by_model(other)
            for one in found.values():
                plan.check(one)
            if found != by_model(params):
                return other
        except UserError:
            continue
    return None


def value_at(params, path):
    """The value at a path of keys."""
    for key in path:
        params = params[key]
    return params


def signature(rule):
    """What decides whether the jobs of a rule run again, as comparable text."""
    inputs = sorted(dvc_sync.input_files(rule))
    declared = {name: rule.params.get(name, "") for name in ("code", "cfg")}  # all that a job is told
    params = {name: dvc_sync.everything(rule, name, value) for name, value in declared.items()}
    return json.dumps([inputs, sorted(map(str, rule.output)), params, rule.shellcmd])


def stage_signatures(config=None):
    """The signatures of each stage's rules."""
    stages, outs = {}, dvc_sync.outs_of(read_yaml(dvc_sync.DVC_YAML))
    for rule in dvc_sync.parse_rules(config):
        if stage := dvc_sync.stage_of(rule, outs):
            stages.setdefault(stage, {})[rule.name] = signature(rule)
    return stages


def affected_stages(params):
    """Changed leaf -> the stages whose rules change with it; leaves with one allowed value are left out."""
    before, found = stage_signatures(params), {}
    for path, _ in leaves(params):
        other = changed(params, path)
        if other is not None:
            after = stage_signatures(other)
            found[".".join(path)] = sorted(name for name in after if after[name] != before[name])
    return found


def described(rule):
    """What every rule that runs something must have, what it reads and what it writes."""
    return {
        "runs": rule.shellcmd is not None,
        "docstring": bool(rule.docstring),
        "log": list(map(str, rule.log)),
        "benchmark": str(rule.benchmark or ""),
        "mem_mb": rule.resources.get("mem_mb"),
        "runtime": rule.resources.get("runtime"),
        "inputs": {engine: job_inputs(rule, engine) for engine in ("hf", "vllm")},
        "params": sorted(rule.params.keys()),
        "input": sorted(dvc_sync.input_files(rule)),
        "output": list(map(str, rule.output)),
        "folders": [str(path) for path in rule.output if is_flagged(path, "directory")],
        "aside": [str(path) for path in (*rule.log, rule.benchmark) if path],
        "cache": bool(rule.cache.flag),
    }


def job_inputs(rule, engine):
    """The inputs of a job on `engine`, its code among them; other wildcards are left as they are written."""
    wildcards = SimpleNamespace(model="smollm2-135m", engine=engine, study="cells")
    code = rule.params.get("code")
    files = list(getattr(code(wildcards) if callable(code) else code, "files", []))
    for item in rule.input:
        files += item(wildcards) if callable(item) else [str(item)]
    return files


def every_rule():
    """What each rule has; the outputs that `report()` marks, with caption and category; the rules that want conda."""
    rules = dvc_sync.parse_rules()
    flagged = [(str(out), out.flags["report"]) for rule in rules for out in rule.output if "report" in out.flags]
    return {
        "rules": {rule.name: described(rule) for rule in rules},
        "reported": {
            out: [Path(one.caption.get_path_or_uri(secret_free=True)).name, one.category] for out, one in flagged
        },
        "conda": sorted(rule.name for rule in rules if rule.conda_env),
    }


if __name__ == "__main__":
    asked = {
        "rules": every_rule,
        "affected": lambda: affected_stages(resolved(embedded.document())),
    }
    print(json.dumps(asked[sys.argv[1]](), default=str))
