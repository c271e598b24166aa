"""What a change makes run again: in Snakemake by a dry run, in DVC by its status and by running it."""

from __future__ import annotations

import json
import re

import pytest
import yaml

ALL = ("results/gap/FINDINGS.md", "ladder", "planted", "kvstore", "serving", "tradeoffs")
CODED = {"codebooks_origin", "choice_layers", "measure_hf_float32"}
AGAIN = {"gate_report"}  # what it certifies it measures again
REPORTED = {"gap_metrics", "gap_verdict", "report_comparison", "report_lead"}
JUDGED = {"measure_hf_mechanisms", "gate_rows", "gate_report"}


def planned(lab):
    """The rules whose jobs Snakemake would run, the collecting ones apart."""
    said = lab.run("snakemake", "--dry-run", "--", *ALL)
    table = said.rpartition("Job stats:")[2].partition("\n\n")[0]
    assert table or "Nothing to be done" in said, said
    rules = set(re.findall(r"^(\w+) +\d+$", table, re.MULTILINE)) - {"total"}
    return rules - stages(lab).keys() - {"ladder"}


def stages(lab):
    """The stages of dvc.yaml."""
    return yaml.safe_load((lab.root / "dvc.yaml").read_text())["stages"]


def changed(lab):
    """The stages that `dvc repro` would run next, as far as it knows when the records of the code are written."""
    lab.run("dvc", "repro", "code")
    return set(json.loads(lab.run("dvc", "status", "--json")))


def depending(lab, *files):
    """The stages that name a record with one of some files in it."""
    records = {str(path.relative_to(lab.root)): path.read_text() for path in (lab.root / "results/code").iterdir()}
    having = {name for name, text in records.items() if any(f"  {file}\n" in text for file in files)}
    return {name for name, stage in stages(lab).items() if having & set(stage["deps"])}


@pytest.mark.nightly
def test_a_title_reruns_the_report_alone(lab):
    lab.change("params.yaml", "title: ", "title: Once more, ")
    assert planned(lab) == {"report_lead"}
    lab.run("dvc", "repro")
    assert [line.partition(" ")[0] for line in lab.ran()] == ["compare", "metrics", "report", "verdict"]


@pytest.mark.nightly
def test_other_bits_rerun_no_capture_and_no_sigma(lab):
    lab.change("params.yaml", "\nbits: 3", "\nbits: 4")
    assert planned(lab) == CODED | AGAIN | REPORTED
    swapped = (
        (lab.root / "params.yaml").read_text().replace("\nbits: 4", "\nbits: 2").replace("\nv_bits: 2", "\nv_bits: 3")
    )
    (lab.root / "params.yaml").write_text(swapped)
    assert planned(lab) == CODED | AGAIN | REPORTED  # 3 and 2, now 2 and 3: told apart by name


@pytest.mark.nightly
def test_a_codec_file_reruns_what_uses_it(lab):
    rung, block = "src/kvlab/codecs/kivi/codec.py", "src/kvlab/codecs/block/codec.py"
    (lab.root / rung).open("a").write("\nNEW = 1\n")
    compared = {"ladder_jobs", "ladder_facts", "restore_job", "restore_page", "tradeoffs_job", "tradeoffs_page"}
    assert planned(lab) == JUDGED | REPORTED | compared
    assert changed(lab) == depending(lab, rung) == {"studies", "gate", "kvstore", "tradeoffs"}
    (lab.root / block).open("a").write("\nNEW = 1\n")
    assert planned(lab) == CODED | REPORTED | JUDGED | compared | {"planted_report"}
    assert changed(lab) == depending(lab, rung, block)
    assert not {"data", "calibration", "report"} & changed(lab)


@pytest.mark.nightly
def test_comments_and_times_rerun_nothing(lab):
    for name in ("src/kvlab/codecs/block/codec.py", "workflow/rules/studies.smk", "params.yaml"):
        (lab.root / name).open("a").write("\n# a comment\n")
    for path in (lab.root / "models").rglob("*.safetensors"):
        path.touch()
    assert planned(lab) == set()
    lab.ran()
    said = lab.run("dvc", "repro")
    assert re.findall(r"^Running stage '(\w+)'", said, re.MULTILINE) == ["code"]  # it looks, and finds no other code
    assert lab.ran() == []


@pytest.mark.nightly
def test_a_rule_reruns_its_stage(lab):
    lab.change("workflow/rules/planted.smk", "mem_mb=4000", "mem_mb=4001")
    assert changed(lab) == {"planted"}
    lab.change("workflow/rules/measure.smk", "runtime=480", "runtime=481")
    assert changed(lab) == {"planted", "studies", "gate"}
