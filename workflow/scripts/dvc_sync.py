"""Write `cmd`, `deps` and `params` of dvc.yaml from the rules: there is one DAG, and DVC gets a view of it.

    python workflow/scripts/dvc_sync.py           writes dvc.yaml
    python workflow/scripts/dvc_sync.py --check   says whether it would, and what

A stage is what a person would name. Its `outs`, `metrics` and `plots` are written by hand, and a rule belongs to the
stage whose outs it makes; the rule that is called like the stage is its target. Each declared out must be made by a
rule, and each file a rule makes must be declared, because DVC deletes the outs of a stage before it runs and what it
does not know would survive with old content.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from closure import record_of
from ruamel.yaml import YAML

DVC_YAML = Path("dvc.yaml")
PARAMS_YAML = Path("params.yaml")


class Mismatch(Exception):
    """The rules and dvc.yaml contradict each other in what is written by hand."""


@dataclass
class Stage:
    """What the rules of a stage make, read and depend on."""

    rules: list[str] = field(default_factory=list)
    code: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)


def widest():
    """What `-S` may ask for: a stage depends on what any study, engine or codec reads, also of those not asked for."""
    sys.path.insert(0, str(Path("src").resolve()))
    from kvlab.codecs.catalogue import KEPT_WHOLE, LADDERED
    from kvlab.core.paramfile import read_yaml

    codecs, calibration = {"codecs": [*LADDERED, *KEPT_WHOLE]}, {"engines": ["hf", "vllm"]}
    models = [entry | {"studies": None} for entry in read_yaml(Path("params.yaml"))["models"]]
    mechanisms = codecs | {"pages": ["klt", "hadamard"]}
    return {"studies": None, "models": models, "calibration": calibration, "mechanisms": mechanisms, "ladder": codecs}


def parse_rules(config=None):
    """The rules of the Snakefile here, parsed without building a DAG; `config` overrides params.yaml (`widest`)."""
    from snakemake.api import SnakemakeApi
    from snakemake.settings.enums import Quietness
    from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            ResourceSettings(cores=1),
            config_settings=ConfigSettings(config=widest() if config is None else config),
            snakefile=Path("Snakefile"),
        )
        return list(workflow._workflow.rules)


def code_records(rule):
    """The records of all modules that a rule may run."""
    return set(getattr(everything(rule, "code", rule.params.get("code")), "records", ()))


def input_files(rule):
    """All files that a rule may read, code apart; an input function lists them in its attribute `every`."""
    files = set()
    for item in rule.input:
        listed = everything(rule, "input", item)
        files |= {str(listed)} if isinstance(listed, (str, os.PathLike)) else set(listed)
    return files


def model_files(rule):
    """The files of models that a rule may read: its input `model`."""
    listed = everything(rule, "model", rule.input.get("model", []))
    return {str(listed)} if isinstance(listed, str) else set(map(str, listed))


def parameter_keys(rule):
    """All parameters that a rule may read; a parameter function lists them in its attribute `every`."""
    return set(everything(rule, "cfg", rule.params.get("cfg", {})))


def everything(rule, what, item):
    """What an item of a rule is, or may be when it is a function of wildcards."""
    if callable(item) and not hasattr(item, "every"):
        raise Mismatch(f"rule {rule.name} has a function for {what} without `every`; DVC could not see what it reads")
    return getattr(item, "every", item)


def read_stages(rules, outs):
    """The stages by name, in the order of dvc.yaml; `outs` are those that it declares, by stage."""
    stages = {name: Stage() for name in outs}
    for rule in rules:
        name = stage_of(rule, outs)
        if name is None:
            continue
        stage = stages[name]
        stage.rules.append(rule.name)
        stage.code |= code_records(rule) | {str(record_of(rule.snakefile))}
        stage.inputs |= input_files(rule) - model_files(rule)
        stage.models |= {str(Path(path).parent) for path in model_files(rule)}
        stage.outputs |= set(map(str, rule.output))
        stage.params |= parameter_keys(rule)
    sections = section_modules()
    for stage in stages.values():
        stage.code |= {str(record_of(sections[key])) for key in stage.params & sections.keys()}
    return stages


def stage_of(rule, outs):
    """The stage whose outs a rule makes; of one that only gathers files the stage of its name, or None."""
    if not rule.output:
        return rule.name if rule.name in outs else None
    found = {str(path): owner(str(path), outs) for path in rule.output}
    loose = [path for path, own in found.items() if own is None]
    if loose:
        raise Mismatch(f"rule {rule.name} makes {loose[0]}; declare it under `outs` of a stage in {DVC_YAML}")
    names = sorted({stage for stage, _ in found.values()})
    if len(names) > 1:
        raise Mismatch(
            f"rule {rule.name} makes files of the stages {', '.join(names)}; split it, or declare them in one"
        )
    return names[0]


def section_modules():
    """The module of each study's section of params.yaml: what the file leaves out, the defaults there decide."""
    sys.path.insert(0, str(Path("src").resolve()))
    from kvlab_pipeline.studies.cells.params import CellSettings
    from kvlab_pipeline.studies.settings import Settings

    kinds = {key: field.annotation for key, field in Settings.model_fields.items()} | {"cells": CellSettings}
    return {
        key: kind.__module__ for key, kind in kinds.items() if kind.__module__.startswith("kvlab_pipeline.studies.")
    }


def declared_outs(entry):
    """Paths under `outs`, `metrics` and `plots` of a stage; an entry may be a path or {path: options}."""
    items = [item for kind in ("outs", "metrics", "plots") for item in entry.get(kind, [])]
    return [next(iter(item)) if isinstance(item, dict) else item for item in items]


def outs_of(document):
    """What each stage of dvc.yaml declares."""
    return {name: declared_outs(entry) for name, entry in document["stages"].items()}


def make_folders(outs):
    """Make those folders of a stage that are not there: nothing in them was asked for, and DVC wants every out."""
    for out in outs:
        if not Path(out).suffix:
            Path(out).mkdir(parents=True, exist_ok=True)


def owner(path, outs):
    """(stage, out) of the declared out that is `path` or a folder above it; None when there is none."""
    for stage, declared in outs.items():
        for out in declared:
            if path == out or path.startswith(f"{out}/"):
                return stage, out
    return None


def check_stages(stages, outs):
    """Refuse a declared out that no rule makes, and a stage without a rule for its target."""
    for name, stage in stages.items():
        for out in outs[name]:
            if not any(owner(path, {name: [out]}) for path in stage.outputs):
                raise Mismatch(f"{DVC_YAML} declares {out} in stage {name}, but no rule makes it")
        if name not in stage.rules:
            raise Mismatch(f"there is no rule {name!r}, which would be the target of its stage")


def sources():
    """Files that git tracks, or would track: not ignored; and the folders that they are in."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    files = set(listed.stdout.splitlines())
    return files | {str(folder) for file in files for folder in Path(file).parents}


def model_names():
    """How dvc.yaml names each model of params.yaml, by its place in the list, and its folder.

    DVC fills the path in. So `-S models.0.path=...` changes the dep too, and no model is given another one's results.
    """
    paths = [str(Path(model["path"])) for model in YAML(typ="safe").load(PARAMS_YAML.read_text())["models"]]
    return {f"${{models[{number}].path}}": path for number, path in enumerate(paths)}


def dependencies(name, stage, outs, tracked, models):
    """`deps` of a stage: records of its code, the outs of other stages and the models that it reads, and sources."""
    deps = {name for name, folder in models.items() if folder in stage.models}
    for path in stage.code | (stage.inputs - stage.outputs):
        found = owner(path, outs)
        if found is not None and found[0] == name:
            continue
        if found is None and path not in tracked and not Path(path).is_absolute():
            raise Mismatch(f"stage {name} reads {path}, which no stage makes and git does not track")
        deps.add(path if found is None or path in stage.code else found[1])
    return sorted(deps)


def synced(document, stages, tracked, models):
    """`document` with the derived keys of every stage; what is written by hand stays."""
    entries, outs = document["stages"], outs_of(document)
    check_stages(stages, outs)
    for name, stage in stages.items():
        derived = {
            "cmd": f"snakemake --nolock --allowed-rules {' '.join(sorted(stage.rules))} -- {name}",
            "deps": dependencies(name, stage, outs, tracked, models),
            "params": sorted(stage.params),
        }
        for place, (key, value) in enumerate(derived.items()):
            entries[name].pop(key, None)
            entries[name].insert(place, key, value)
    return document


def differences(before, after):
    """One line for each derived key that differs."""
    lines = []
    for name, entry in after["stages"].items():
        for key in ("cmd", "deps", "params"):
            old, new = before["stages"][name].get(key), entry[key]
            if old != new and isinstance(new, list):
                added, gone = sorted(set(new) - set(old or [])), sorted(set(old or []) - set(new))
                lines.append(f"{name}.{key}: + {added} - {gone}")
            elif old != new:
                lines.append(f"{name}.{key}: {new}")
    return lines


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="change nothing; exit 1 if dvc.yaml is out of date")
    check = arguments.parse_args().check
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 400
    before = YAML(typ="safe").load(DVC_YAML.read_text())
    try:
        stages = read_stages(parse_rules(), outs_of(before))
        document = synced(yaml.load(DVC_YAML.read_text()), stages, sources(), model_names())
    except Mismatch as problem:
        sys.exit(f"error: {problem}")
    lines = differences(before, document)
    if check and lines:
        sys.exit("\n".join([*lines, "error: dvc.yaml is out of date with the rules; run make sync"]))
    if lines:
        yaml.dump(document, DVC_YAML)
    print("\n".join(lines) or "dvc.yaml agrees with the rules")


if __name__ == "__main__":
    main()
