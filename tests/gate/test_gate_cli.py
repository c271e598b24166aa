"""`kvlab gate` as it is typed: what is printed, the exit code, and that bad input is one line and leaves nothing."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import polars as pl
import pytest
import yaml
from jsonschema import Draft202012Validator

from command_line import blocks, examples, flags_of
from gate.databases import SRC, checksum, published
from gate.planted_records import plant
from gate.sentinels import sentinel
from kvlab.cli import main as cli
from kvlab.core.errors import NonFinite
from kvlab.core.paramfile import preset, read_yaml
from kvlab.gate import registry
from kvlab.gate.catalogue.columns import BY_NAME, COLUMNS
from kvlab.gate.catalogue.rows import EVIDENCE
from kvlab.gate.check import EXIT_CODES, REFERENCE
from kvlab.gate.reasons import REASONS
from kvlab.output.terminal import as_text
from kvlab_pipeline.studies.mechanisms.plan import KEEPING, READING, variants
from kvlab_pipeline.studies.settings import by_model
from refusals import refused_line
from validation.gate import corruptions
from validation.gate.corruptions import MUTATIONS, valid_case

QUALITY = "supported+compression => quality_eval_status == completed"
INJECTIONS = [
    "'; DROP TABLE rows; --",
    '" OR 1=1',
    "=HYPERLINK(1)",
    "| a | <script>",
    "{{ 7 * 7 }}",
    "naïve 漢字 😀",
    "100%",
]


LOAD = registry.load
SHIPPED = LOAD()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and an environment that declares nothing; the shipped registry is read only once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "load", lambda *files: LOAD(*files) if any(files) else SHIPPED)
    for column in COLUMNS:
        monkeypatch.delenv(column.env, raising=False)
    return tmp_path


@pytest.fixture
def gate(here, line):
    """Runs a verb on the line that a person would type."""

    def typed(words: str, *more: str):
        group = [] if words.startswith("step ") else ["gate"]
        return line(*group, *shlex.split(words), *more)

    return typed


@pytest.fixture
def case(here):
    """The case that passes, as files: rows.json, mechanisms.yaml, evals.yaml, current.json; its rows by name."""
    found = valid_case()
    for kind in ("mechanisms", "evals"):
        write(f"{kind}.yaml", found[kind])  # JSON is YAML
    write("current.json", found["current"])
    write("rows.json", list(found["rows"].values()))
    return found["rows"]


REGISTRY = "--mechanisms mechanisms.yaml --evals evals.yaml"


def write(name, content):
    with open(name, "w") as file:
        json.dump(content, file)


def files(folder):
    return sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


# ----------------------------------------------------------------------------- the group of verbs


@pytest.mark.parametrize("verb", ["", *cli.verbs()["gate"]])
def test_every_verb_has_its_help(gate, verb):
    code, out, err = gate(f"{verb} --help")
    assert (code, err) == (0, "") and out.startswith(f"Usage: kvlab gate {verb}".rstrip())


def test_how_configuration_and_environment_meet_is_in_the_help(gate):
    _, out, _ = gate("config --help")
    assert all(words in out for words in ("KVLAB_ROW_MODEL", "The configuration comes first", "explicit null"))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", ["VERB"]),
        ("chek rows.json", ["'chek'", "did you mean 'check'"]),
        ("check rows.json --strcit", ["kvlab gate check:", "'--strcit'", "did you mean '--strict'"]),
        ("check rows.json --format xml", ["--format", "'xml'", "markdown, json, junit"]),
        ("schema rwo", ["'rwo'", "did you mean 'row'"]),
        ("check", ["FILE"]),
        ("check rows.json --params x", ["'--params'"]),
        ("ingest rows.db rows.json --mechanism kv_quantisation", ["did you mean 'kv_quantization'"]),
        ("ingest rows.db rows.json --speculative-wasted-tokens 128.9", ["'128.9'", "a whole number"]),
        ("ingest rows.db rows.json --compression-ratio nan", ["'nan'"]),
        ("ingest rows.db rows.json --support-status supported", ["'--support-status' is not known"]),
        ("query rows.db 'a\nb'", ["is not known"]),
    ],
)
def test_a_line_that_is_mistyped_is_one_line(gate, typed, words):
    refused_line(gate(typed), *words)


# ------------------------------------------------------------------------------ the documentation


def masked(text):
    """Without digests: that of the registry changes with every entry."""
    return re.sub(r"\b[0-9a-f]{12}\b", "digest", text)


def test_the_example_of_the_documentation_runs_as_it_stands_there(root, here, line):
    ran = 0
    for words, code, shown in examples(root / "docs/gate.md", lambda body: exec(body, {})):
        program, *words = shlex.split(words, comments=True)
        if program != "kvlab":
            continue
        found, out, err = line(*words)
        assert (found, err, masked(out)) == (code, "", masked(shown)), words
        ran += 1
    assert ran >= 10
    assert "evidence_missing" in (here / "GATE.md").read_text()


def test_the_rows_of_the_documentation_are_of_the_protocol_that_such_rows_run_under(root):
    found = [json.loads(block["body"]) for block in blocks(root / "docs/gate.md") if block["kind"] == "json"]
    shown = {row["mechanism_variant"]: row for rows in found if isinstance(rows, list) for row in rows[1:]}
    made = {one.variant: one for one in planned(root, "full") if one.variant in shown}
    assert set(made) == set(shown) != set()
    assert {name: row["protocol"] for name, row in shown.items()} == {
        name: one.protocol(("snapshot", "in_forward")) for name, one in made.items()
    }


def test_what_the_documentation_says_has_no_row_is_all_that_the_pipeline_makes_none_of(root):
    """Of what reads or keeps less, and of what drafts from the coded cache."""
    text = " ".join((root / "docs/gate.md").read_text().split())
    of_fields = {"block_sparse", "chunk_summary", "latent_lowrank", "eviction", "self_coded_cache"}
    assert of_fields <= {entry.variant for entry in SHIPPED.mechanisms.values()}
    makeable = {*READING.values(), *KEEPING.values()}
    assert makeable & {one.variant for one in planned(root, "full")} >= {"block_sparse", "latent_lowrank", "eviction"}
    assert set(re.findall(r"\(`(\w+)`\) has no row", text)) == of_fields - makeable


def planned(root, name):
    """What a preset makes rows of."""
    params = next(iter(by_model(preset(name, read_yaml(root / "params.yaml"))).values()))
    return [one for engine in ("hf", "vllm") for one in variants(params, engine)]


def test_the_documentation_names_every_verb_and_only_words_that_there_are(root):
    page = (root / "docs/gate.md").read_text()
    text = re.sub(r"(?m)^\$ python -m .*$", "", page)  # these have words of their own
    assert set(re.findall(r"kvlab gate (\w+)", text)) == {*cli.verbs()["gate"]}
    declared = {flag for verb in cli.verbs()["gate"].values() for flag in flags_of(verb)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - declared == {"--help"}


# ------------------------------------------------------------------------------------ check


def test_rows_that_earn_what_they_claim_exit_with_0(gate, case):
    code, out, err = gate(f"check rows.json {REGISTRY} --current current.json --strict")
    assert (code, err) == (0, "") and out.startswith("# Gate\n\n**pass**: 10 rows")


def test_a_row_that_does_not_exits_with_1_and_says_why(gate, case, here):
    case["fp8"]["codec"] = "klt"
    write("rows.json", list(case.values()))
    code, out, err = gate(f"check rows.json {REGISTRY} --out deep/GATE.md")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "fail: 10 rows, of which 9 pass, 0 waived, 1 fail, 0 not applicable"
    assert "fp8: evidence_contradicts_row: codec is 'klt' in the row and None in the evidence" in lines
    assert lines[-1] == "see deep/GATE.md" and (here / "deep/GATE.md").read_text().startswith("# Gate\n\n**fail**")


@pytest.mark.parametrize("rows", [[], [{}], [{"model": "m"}, {"run": "r"}]])
def test_nothing_to_judge_exits_with_2_and_still_reports(gate, rows):
    write("rows.json", rows)
    code, out, err = gate("check rows.json")
    assert code == EXIT_CODES["cannot_judge"] == 2 and "**cannot judge**" in out
    assert err == f"kvlab gate check: none of {len(rows)} rows declares a mechanism to judge\n"


def test_every_format_says_the_same(gate, case):
    code, text, _ = gate(f"check rows.json {REGISTRY} --format json")
    report = json.loads(text)
    assert code == report["exit_code"] == 0 and report["verdict"] == "pass"
    _, schema, _ = gate("schema report")
    Draft202012Validator(json.loads(schema)).validate(report)
    _, xml, _ = gate(f"check rows.json {REGISTRY} --format junit")
    assert len(ET.fromstring(xml.encode())) == len(report["claims"]) == 10
    assert gate(f"check rows.json {REGISTRY} --format json --out r.json")[0] == 0
    with open("r.json") as file:
        assert file.read() == text


@pytest.mark.parametrize("form", ["markdown", "json", "junit"])
def test_what_is_written_is_utf_8_whatever_the_locale(gate, case, monkeypatch, form):
    write("rows.json", [case["fp8"] | {"model": "Ω漢"}])
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "latin-1")
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_: pytest.fail("written as the locale has it"))
    assert gate(f"check rows.json {REGISTRY} --format {form} --out out")[0] == 1
    with open("out", "rb") as file:
        written = file.read()
    text = written.decode("utf-8")
    assert {"markdown": "Ω漢", "json": "\\u03a9\\u6f22", "junit": "&#937;&#28450;"}[form] in text
    assert form == "markdown" or written.isascii()
    assert form != "junit" or ET.fromstring(written) is not None


def test_several_files_are_one_report_and_their_order_does_not_matter(gate, case):
    for name, row in case.items():
        write(f"{name}.json", row)
    together, apart = (
        gate(f"check {names} {REGISTRY} --format json")[1]
        for names in ("rows.json", " ".join(map("{}.json".format, case)))
    )

    def claims(text):
        return [{k: v for k, v in claim.items() if k != "source"} for claim in json.loads(text)["claims"]]

    assert claims(together) == claims(apart)


def test_a_waiver_lets_a_row_pass_unless_every_row_has_to_by_itself(gate, case):
    del case["fp8"][EVIDENCE], case["fp8"]["quality_eval_status"]
    write("rows.json", list(case.values()))
    entry = {"row_id": "fp8", "criterion": QUALITY, "owner": "Ada", "expires": "2999-01-01", "why": "next week"}
    for expires, strict, code in (("2999-01-01", "", 0), ("2999-01-01", "--strict", 1), ("2001-01-01", "", 1)):
        with open("waivers.yaml", "w") as file:
            yaml.safe_dump([entry | {"expires": expires}], file)
        assert gate(f"check rows.json {REGISTRY} --waivers waivers.yaml {strict}")[0] == code
    with open("waivers.yaml", "w") as file:
        yaml.safe_dump([entry | {"criterion": "what ran was declared"}], file)
    refused_line(gate(f"check rows.json {REGISTRY} --waivers waivers.yaml"), "waivers.yaml, waiver 1", "may be waived")


def test_evidence_in_files_counts_like_evidence_in_rows(gate, case):
    inside = gate(f"check rows.json {REGISTRY} --format json")
    names = []
    for name, row in case.items():
        for number, piece in enumerate(row.pop(EVIDENCE, [])):
            names.append(f"{name}-{number}.json")
            write(names[-1], piece)
    write("rows.json", list(case.values()))
    assert gate(f"check rows.json {REGISTRY}")[0] == 1
    beside = gate(f"check rows.json {REGISTRY} --format json --evidence {' '.join(names)}")
    assert beside == inside and len(names) == 18
    twice = gate(f"check rows.json {REGISTRY} --format json --evidence {' '.join(names + names)}")
    assert twice == inside


def test_evidence_of_no_row_is_refused_and_says_what_differs(gate, case):
    piece = case["fp8"].pop(EVIDENCE)[0]
    write("e.json", piece)
    write("rows.json", [case["baseline"], case["fp8"] | {"device": "h100"}])
    refused_line(
        gate(f"check rows.json {REGISTRY} --evidence e.json"), "e.json", "row 2: device is 'h100' there and 'cpu' here"
    )
    write("rows.json", [])
    refused_line(gate(f"check rows.json {REGISTRY} --evidence e.json"), "none of the 0 rows")


def test_altered_evidence_fails_and_evidence_that_is_none_is_refused(gate, case):
    piece = case["fp8"].pop(EVIDENCE)[0]
    write("rows.json", [case["fp8"]])
    write("e.json", piece | {"version": "2"})
    code, out, _ = gate(f"check rows.json {REGISTRY} --evidence e.json --out g.md")
    assert code == 1 and "fp8: evidence_tampered" in out
    write("e.json", piece | {"evidenceid": 1})
    refused_line(gate(f"check rows.json {REGISTRY} --evidence e.json"), "e.json", "did you mean 'evidence_id'")
    write("e.json", [piece])
    refused_line(gate(f"check rows.json {REGISTRY} --evidence e.json"), "e.json: this is no evidence")


def test_what_is_not_current_any_more_is_stale(gate, case):
    write("current.json", {"reference": {"model_hash": "weights", "corpus_hash": "text", "code": "a later one"}})
    code, out, _ = gate(f"check rows.json {REGISTRY} --current current.json --out g.md")
    assert code == 1 and "fp8: evidence_stale_code: code is 'a later one' now" in out


@pytest.mark.parametrize(
    ("current", "words"),
    [
        ([], ["an object of models"]),
        ({"m": "x"}, ["'m'", "model_hash, corpus_hash, code"]),
        ({"m": {"model_hash": "x", "corpus_hash": "y", "cod": "z"}}, ["'cod'", "did you mean 'code'"]),
        ({"m": {"model_hash": "x", "corpus_hash": "y", "code": ""}}, ["code is ''", "a digest"]),
        ({"m": {"model_hash": "x", "corpus_hash": "y", "code": 7}}, ["code is 7"]),
        ({"m": {"model_hash": "x", "corpus_hash": "y"}}, ["code is None"]),
    ],
)
def test_what_says_what_is_current_says_all_of_it(gate, case, current, words):
    write("current.json", current)
    refused_line(gate("check rows.json --current current.json"), "current.json", *words)


def test_a_reader_that_leaves_early_does_not_make_it_pass(case, here):
    case["fp8"]["codec"] = "klt"
    write("rows.json", list(case.values()) * 20)
    command = [sys.executable, "-m", "kvlab", "gate", "check", "rows.json", *REGISTRY.split()]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(SRC)}
    )
    started.stdout.close()
    assert started.stderr.read() == "" and started.wait() == 1


BAD_FILES = {
    "none": (None, "cannot read"),
    "folder": (..., "cannot read"),
    "no text": (b"\xff\xfe", "UTF-8"),
    "an unknown field": (b'[{"mechansim": "baseline"}]', "did you mean 'mechanism'"),
    "a word": (b'[{}, {"support_status": "Supported"}]', "row 2, support_status"),
}


@pytest.mark.parametrize("verb", ["check", "ingest rows.db"])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_of_rows_is_one_line_and_leaves_nothing(gate, here, kind, verb):
    content, said = BAD_FILES[kind]
    if content is ...:
        (here / "rows.json").mkdir()
    elif content is not None:
        (here / "rows.json").write_bytes(content)
    before = files(here)
    more = " --out new/GATE.md" if verb == "check" else " --run one"
    refused_line(gate(f"{verb} rows.json{more}"), "rows.json", said)
    assert files(here) == before and not (here / "new").exists()


@pytest.mark.parametrize("flag", ["--mechanisms", "--evals", "--waivers", "--evidence", "--current"])
@pytest.mark.parametrize("content", [None, "folder", b"\xff\xfe", b"[7", b'"words"'])
def test_a_bad_file_beside_the_rows_is_one_line(gate, here, flag, content):
    write("rows.json", [{"mechanism": "baseline"}])
    if content == "folder":
        (here / "bad").mkdir()
    elif content is not None:
        (here / "bad").write_bytes(content)
    refused_line(gate(f"check rows.json {flag} bad --out GATE.md"))
    assert not (here / "GATE.md").exists()


# ---------------------------------------------------------------------------- ingest and the rest


def answer(gate, line):
    code, out, err = gate(line + " --format json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def test_rows_go_in_once_with_what_the_gate_says(gate, case):
    line = f"ingest rows.db rows.json --run one {REGISTRY} --current current.json"
    assert gate(line) == (0, "rows.db: 10 rows added, 0 replaced, 0 there already\n", "")
    assert gate(line) == (0, "rows.db: 0 rows added, 0 replaced, 10 there already\n", "")
    found = {row["row_id"]: row for row in answer(gate, "query rows.db")}
    assert {name: row["earned_tier"] for name, row in found.items()} == {
        name: row["support_status"] for name, row in case.items()
    }
    assert {row["run"] for row in found.values()} == {"one"}
    best = answer(gate, "query rows.db --where earned_tier=supported --best compression_ratio")
    assert [row["row_id"] for row in best] == ["pages"]
    assert answer(gate, "query rows.db --certified") == []  # nobody measured them again


def test_another_judgement_is_refused_until_it_is_to_replace(gate, case, here):
    line = f"ingest rows.db rows.json --run one {REGISTRY}"
    assert gate(line)[0] == 0
    before = answer(gate, "query rows.db")
    assert {row["current_digest"] for row in before} == {None}
    refused_line(
        gate(f"{line} --current current.json"), "current_digest is None there and '", "; so are 9 more;", "--replace"
    )
    assert answer(gate, "query rows.db") == before
    said = "rows.db: 0 rows added, 0 replaced, 10 there already, 10 of them judged anew\n"
    assert gate(f"{line} --current current.json --replace") == (0, said, "")
    report = json.loads(gate(f"check rows.json {REGISTRY} --current current.json --format json")[1])
    kept = {(row["registry_digest"], row["current_digest"]) for row in answer(gate, "query rows.db")}
    assert kept == {(report["registry"], report["current"])}


def test_other_content_is_refused_until_it_is_to_replace(gate, case, here):
    gate(f"ingest rows.db rows.json --run one {REGISTRY}")
    write("rows.json", [case["preview"] | {"kl": 0.5}])
    before = answer(gate, "query rows.db")
    refused_line(gate(f"ingest rows.db rows.json --run one {REGISTRY}"), "'preview'", "--replace")
    assert answer(gate, "query rows.db") == before
    code, out, _ = gate(f"ingest rows.db rows.json --run one --replace {REGISTRY}")
    assert (code, out) == (0, "rows.db: 0 rows added, 1 replaced, 0 there already\n")
    assert answer(gate, "query rows.db --where row_id=preview")[0]["kl"] == 0.5


@pytest.mark.parametrize("exists", [False, True])
def test_all_files_go_in_or_none(gate, case, here, exists):
    write("more.json", [{"mechanism": "baseline", "run": "one"}])
    if exists:
        gate("ingest deep/rows.db more.json")
    before = files(here)
    refused_line(gate("ingest deep/rows.db more.json rows.json"), "rows.json row 1 names no run", "--run")
    after = files(here)
    if exists:
        assert len(answer(gate, "query deep/rows.db")) == 1
    else:
        assert after == before and not (here / "deep").exists()


def test_strict_keeps_nothing_that_does_not_earn_its_claim(gate, case, here):
    case["int"]["support_status"], case["int"]["codec"] = "supported", None
    write("rows.json", list(case.values()))
    code, out, err = gate(f"ingest rows.db rows.json --run one --strict {REGISTRY}")
    assert (code, out) == (1, "") and "int: evidence_contradicts_row" not in out
    assert err.startswith("fail: 10 rows") and err.endswith("nothing was put into rows.db\n")
    assert not (here / "rows.db").exists()


PUBLISHED_ROW = {
    "framework": "vllm",
    "hw": "h100",
    "infmax_model_prefix": "dsr1",
    "result_filename": "isb1_x",
    "support_status": "reviewed_preview",
    "mechanism": None,
    "compression_method": "",
    "kv_cache_dtype": "fp8_e4m3",
    "mechanism_eval_validation": {"mechanism_eval_registered": True, "issues": []},
}


def test_flags_fill_what_a_published_row_leaves_empty(gate):
    write("rows.json", PUBLISHED_ROW)
    code, _, err = gate("ingest rows.db rows.json --mechanism kv_quantization --mechanism-variant fp8_e4m3")
    assert (code, err) == (0, "")
    (row,) = answer(gate, "query rows.db")
    assert (row["engine"], row["mechanism"], row["mechanism_variant"]) == ("vllm", "kv_quantization", "fp8_e4m3")
    assert row["earned_tier"] == "gated"
    # the row is named by all that it says, whoever said it
    write("said.json", PUBLISHED_ROW | {"mechanism": "kv_quantization", "mechanism_variant": "fp8_e4m3"})
    assert gate("ingest rows.db said.json")[1] == "rows.db: 0 rows added, 0 replaced, 1 there already\n"


def test_a_flag_that_says_the_same_is_taken_and_one_that_contradicts_is_not(gate, here):
    write("rows.json", PUBLISHED_ROW | {"mechanism": "baseline", "compression_ratio": 1, "row_id": "mine"})
    assert gate("ingest rows.db rows.json --mechanism baseline --compression-ratio 1.0 --mechanism-notes x")[0] == 0
    assert answer(gate, "query rows.db")[0]["row_id"] == "mine"
    before = answer(gate, "query rows.db")
    line = "ingest rows.db rows.json --replace --mechanism kv_quantization --compression-ratio 0.5"
    refused_line(
        gate(line), "mechanism is 'baseline' in rows.json row 1 and 'kv_quantization' in --mechanism", "1.0", "0.5"
    )
    assert answer(gate, "query rows.db") == before


def test_an_undeclared_mechanism_stays_undeclared(gate):
    write("rows.json", {k: v for k, v in PUBLISHED_ROW.items() if k != "mechanism"})
    assert gate("ingest rows.db rows.json")[0] == 0
    assert answer(gate, "query rows.db")[0]["mechanism"] is None


def store_of_two_runs():
    """A store with awkward words, two runs of the same rows, in the folder that is worked in."""
    rows = [
        {
            "row_id": f"r{i}",
            "mechanism": "baseline",
            "support_status": "supported",
            "model": text,
            "mechanism_notes": text,
        }
        | {"throughput_tok_s": i, "kv_bytes": i}
        for i, text in enumerate(INJECTIONS)
    ]
    write("rows.json", rows)
    cli.main(shlex.split("gate ingest rows.db rows.json --run before"))
    write("rows.json", [*rows[1:], {"row_id": "new", "mechanism": "baseline", "run": "after"}])
    cli.main(shlex.split("gate ingest rows.db rows.json --run after --mechanism-variant none"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_runs")
    with contextlib.chdir(folder):
        store_of_two_runs()
    return folder


@pytest.fixture
def stored(two_runs, here):
    """`store_of_two_runs`, free to be changed."""
    shutil.copytree(two_runs, here, dirs_exist_ok=True)


@pytest.mark.parametrize("text", INJECTIONS)
def test_values_are_bound_and_come_back_as_they_were(gate, stored, text):
    found = json.loads(gate("query rows.db --format json --where", f"model={text}", "run=before")[1])
    assert [(row["model"], row["mechanism_notes"]) for row in found] == [(text, text)]
    _, out, _ = gate("query rows.db --format csv --where", f"model={text}", "run=before")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["model"], row["compression_method"]) == (text, "")
    _, out, _ = gate("query rows.db --where", f"model={text}", "run=before")
    assert len(out.splitlines()) == 2 and text in out and out.startswith("run ")


def test_a_column_given_twice_may_have_either_value_and_nothing_asks_for_nothing(gate, stored):
    found = answer(gate, "query rows.db --where run=before row_id=r1 --where row_id=r2")
    assert [row["row_id"] for row in found] == ["r1", "r2"]
    found = answer(gate, "query rows.db --where throughput_tok_s=")
    assert [row["row_id"] for row in found] == ["new"]
    found = answer(gate, "query rows.db --where earned_tier= run=after")
    assert [row["row_id"] for row in found] == ["new"]
    code, out, _ = gate("query rows.db --where row_id=nobody")
    assert (code, out) == (0, "no rows\n")


def test_groups_say_what_they_have_earned(gate, stored):
    found = answer(gate, "query rows.db --group-by run")
    assert [(row["run"], row["earned_tier"], row["rows"]) for row in found][-1] == ("before", "gated", 7)
    best = answer(gate, "query rows.db --group-by run --best kv_bytes")
    assert {row["run"]: row["row_id"] for row in best} == {"before": "r0", "after": "r1"}


def test_runs_are_compared(gate, stored):
    found = answer(gate, "diff rows.db before after")
    kinds = {(row["row_id"], row["change"]) for row in found}
    assert {("r0", "gone"), ("new", "added"), ("r1", "changed")} <= kinds
    assert answer(gate, "diff rows.db before before") == []
    assert gate("diff rows.db before before")[1] == "no rows\n"


def test_rows_are_exported_with_every_column(gate, stored, here):
    code, out, _ = gate("export rows.db deep/rows.parquet --where run=before")
    assert (code, out) == (0, "deep/rows.parquet: 7 rows\n")
    table = pl.read_parquet(here / "deep/rows.parquet")
    assert set(BY_NAME) < set(table.columns) and sorted(table["model"]) == sorted(INJECTIONS)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("query rows.db --where model", ["'model'", "COLUMN=VALUE"]),
        ("query rows.db --where =x", ["'=x'", "COLUMN=VALUE"]),
        ("query rows.db --where context_tokens=many", ["'many'", "a whole number"]),
        ("query rows.db --best throughput_tok_s", ["not judged"]),
        ("query nothing.db", ["there is no store at nothing.db", "kvlab gate ingest"]),
        ("query rows.json", ["it is no SQLite database"]),
        ("query .", ["cannot use ."]),
        ("export nothing.db out.parquet", ["there is no store"]),
        ("export rows.db rows.db", ["is the store itself"]),
        ("export rows.db rows.db-wal", ["or a part of it"]),
        ("export rows.db out.parquet --where modle=x", ["did you mean 'model'"]),
        ("diff rows.db before ''", ["run ''"]),
        ("ingest rows.json rows.json --run one", ["it is no SQLite database"]),
        ("ingest rows.db rows.json --run ' x'", ["' x'"]),
        ("ingest rows.db rows.json --run benchmark_runs", ["published study's table"]),
    ],
)
def test_a_bad_question_is_one_line_and_changes_nothing(gate, stored, here, typed, words):
    before = files(here)
    refused_line(gate(typed), *words)
    assert files(here) == before


def test_a_published_database_is_answered_from_in_place(gate, here):
    published(here / "old.db", rows=600)
    columns, *before = checksum(here / "old.db")
    code, out, err = gate("query old.db --where run=benchmark_runs")
    assert (code, err, len(out.splitlines())) == (0, "", 601)
    assert len(answer(gate, "query old.db --group-by model")) > 1
    assert checksum(here / "old.db", columns=columns)[1:] == tuple(before)


def test_a_table_holds_what_it_was_given_or_nothing():
    rows = [{"a": "x\x1b[2J\ny\u202e", "b": None, "c": 1 / 3}, {"a": "z" * 500, "b": "", "c": math.inf}]
    head, first, second = as_text(rows, ["a", "b", "c"], "table").splitlines()
    assert head.split() == ["a", "c"] and "\x1b" not in first + second and "\u202e" not in first
    assert first.split()[-1] == "0.333333" and len(second) < 150
    with pytest.raises(NonFinite):
        as_text(rows, ["a", "c"], "json")


# -------------------------------------------------------------------------- config, and what there is


def test_environment_comes_second_and_contradicts_nothing(gate, monkeypatch):
    with open("c.yaml", "w") as file:
        file.write("mechanism: kv_quantization\nmechanism_notes: null\n")
    monkeypatch.setenv("MECHANISM", "kv_quantization")
    monkeypatch.setenv("KVLAB_ROW_MODEL", "m")
    monkeypatch.setenv("MODEL", "another program's")
    monkeypatch.setenv("QUALITY_EVAL_ID", "")
    code, out, _ = gate("config c.yaml")
    assert (code, json.loads(out)) == (0, {"mechanism": "kv_quantization", "mechanism_notes": None, "model": "m"})
    monkeypatch.setenv("MECHANISM", "baseline")
    monkeypatch.setenv("MECHANISM_NOTES", "x")
    refused_line(
        gate("config c.yaml"),
        "mechanism is 'kv_quantization' in c.yaml and 'baseline' in MECHANISM",
        "null in c.yaml and 'x' in MECHANISM_NOTES",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mechansim: baseline", ["c.yaml", "did you mean 'mechanism'"]),
        ("mechanism: [", ["is not YAML"]),
    ],
)
def test_a_bad_configuration_is_one_line(gate, text, words):
    with open("c.yaml", "w") as file:
        file.write(text)
    refused_line(gate("config c.yaml"), *words)


def test_a_bad_environment_is_one_line(gate, monkeypatch):
    with open("c.yaml", "w") as file:
        file.write("mechanism: baseline")
    monkeypatch.setenv("SPECULATIVE_WASTED_TOKENS", "128.9")
    refused_line(gate("config c.yaml"), "SPECULATIVE_WASTED_TOKENS", "'128.9'")


def test_what_there_is_is_printed_for_people_and_for_programs(gate, case):
    code, out, _ = gate("registry")
    assert code == 0 and {"mechanisms", "evals", "metrics"} <= set(out.splitlines())
    assert re.search(r"^kv_quantization +fp8_e4m3 ", out, re.MULTILINE)
    own = json.loads(gate(f"registry {REGISTRY} --format json")[1])
    variants = [row["variant"] for row in own["mechanisms"]]
    assert variants == ["none", "fp8_e4m3", "int", "turboquant_class", "klt_pages", "mtp", "block_sparse", "eviction"]
    assert own["digest"] in gate(f"registry {REGISTRY}")[1].splitlines()[0]
    with open("mechanisms.yaml", "w") as file:
        yaml.safe_dump({"schema_version": 2, "mechanism": []}, file)
    refused_line(gate(f"registry {REGISTRY}"), "unknown_registry_key", "did you mean 'mechanisms'")


def test_a_registry_that_is_given_empty_is_empty(gate):
    for name in ("mechanisms.yaml", "evals.yaml"):
        with open(name, "w") as file:
            file.write("{}")
    code, out, _ = gate(f"registry {REGISTRY}")
    assert code == 0 and out.count("no rows") == 3
    write("rows.json", [{"mechanism": "baseline", "support_status": "supported"}])
    assert gate(f"check rows.json {REGISTRY}")[0] == 1


def test_every_reason_has_its_meaning(gate):
    found = json.loads(gate("reasons --format json")[1])
    assert {row["code"]: row["meaning"] for row in found} == REASONS
    _, out, _ = gate("reasons")
    assert all(meaning in out for meaning in REASONS.values())


def test_the_schemas_take_what_the_gate_takes(gate, case):
    def valid(what, value):
        return Draft202012Validator(json.loads(gate(f"schema {what}")[1])).is_valid(value)

    row = case["fp8"]
    assert row[EVIDENCE] and all(valid("row", entry) for entry in case.values())
    assert not valid("row", row | {"mechansim": 1}) and not valid("row", row | {EVIDENCE: {}})
    assert valid("config", valid_case()["config"]) and not valid("config", {"compression-ratio": "half"})
    piece = case["fp8"][EVIDENCE][0]
    assert valid("evidence", piece) and not valid("evidence", piece | {"version": 1})
    assert not valid("report", {})


# ------------------------------------------------------------------------------------- end to end


def test_every_field_of_a_configuration_arrives_everywhere_unchanged(gate, here):
    declared = {column: sentinel(column) for column in COLUMNS if column.group in ("mechanism", "identity")}
    seen = {column.name: sentinel(column) for column in COLUMNS if column not in declared}
    with open("c.yaml", "w") as file:
        yaml.safe_dump({column.kebab: value for column, value in declared.items()}, file)
    config = json.loads(gate("config c.yaml")[1])
    row = config | seen
    write("rows.json", [row])
    wanted = {column.name: sentinel(column) for column in COLUMNS}
    assert row == wanted

    assert gate("ingest rows.db rows.json")[0] == 0
    assert [{name: found[name] for name in wanted} for found in answer(gate, "query rows.db")] == [wanted]
    (line,) = csv.DictReader(io.StringIO(gate("query rows.db --format csv")[1]))
    assert {name: line[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
    gate("export rows.db rows.parquet")
    assert pl.read_parquet("rows.parquet").select(list(wanted)).rows(named=True) == [wanted]
    for name, value in wanted.items():
        found = json.loads(gate("query rows.db --format json --where", f"{name}={value}")[1])
        assert [one["row_id"] for one in found] == [wanted["row_id"]], name

    report = json.loads(gate("check rows.json --format json")[1])
    told = {name: value for name, value in config.items() if name in REFERENCE}
    assert told.keys() == set(REFERENCE) and report["claims"][0]["row"] == told
    assert config.keys() - told.keys() == {column.name for column in COLUMNS if not column.judged} & config.keys()


# ------------------------------------------------------------------------- from records to the page


ROWS = "--windows windows.json --needles needles.json --claim supported --out rows.json --current now.json"


@pytest.fixture
def planted(here):
    """What two engines left behind, in files of this folder."""
    return plant(here)


def test_records_become_rows_that_every_verb_takes(gate, planted, here):
    assert gate(f"step rows hf.json vllm.json {ROWS} --code c0de") == (0, "rows.json: 7 rows\n", "")
    code, out, err = gate("check rows.json --current now.json --out check.md")
    assert (code, err) == (1, "") and "7 rows, of which 6 pass, 0 waived, 1 fail" in out
    assert gate("ingest rows.db rows.json --current now.json")[0] == 0
    assert answer(gate, "query rows.db --certified") == []
    best = answer(gate, "query rows.db --best bits_per_value --where engine=vllm earned_tier=supported")
    assert [row["row_id"] for row in best] == ["reference/vllm/klt-4"]
    kept = {row["row_id"]: row for row in answer(gate, "query rows.db")}
    for row in json.loads((here / "rows.json").read_text()):
        named = {name: value for name, value in row.items() if name != EVIDENCE}
        assert named.items() <= kept[row["row_id"]].items()


def test_the_page_exits_with_0_whatever_rows_earn(gate, planted, here, monkeypatch):
    few = corruptions.table(MUTATIONS[:3])
    monkeypatch.setattr(corruptions, "table", lambda: few)
    gate(f"step rows hf.json vllm.json {ROWS} --code c0de")
    line = "report rows.json --current now.json --records hf.json vllm.json --out GATE.md --json claims.json"
    told = "GATE.md: 7 rows, of which 5 supported, 1 too_lossy, 1 unsupported\n"
    assert gate(line) == (0, told, "")
    first = {path.name: path.read_bytes() for path in here.iterdir()}
    assert {"GATE.md", "GATE-reasons.md", "claims.json"} <= first.keys()
    assert gate(line)[0] == 0 and {path.name: path.read_bytes() for path in here.iterdir()} == first
    gate(f"step rows hf.json vllm.json {ROWS} --code 0ther")
    made = gate("step gate_trust rows.json --current now.json --records hf.json vllm.json --out TRUST.md")
    assert made == (0, "", "")
    assert {"TRUST.md", "detection.svg", "detection.csv"} <= {path.name for path in here.iterdir()}
    code, out, err = gate("report rows.json --current now.json --out GATE.md")
    assert (code, err) == (0, "") and "2 supported, 4 gated" in out
    assert "evidence_stale_code" in (here / "GATE.md").read_text()


def test_the_page_of_rows_that_declare_nothing(gate, here):
    write("rows.json", [{"row_id": "x", "run": "r"}])
    assert gate("report rows.json --out GATE.md") == (0, "GATE.md: 1 rows, of which none was judged\n", "")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (f"step rows hf.json {ROWS}", ["--code"]),
        (
            f"step rows hf.json {ROWS} --code c0de".replace("supported", "suported"),
            ["'suported'", "did you mean 'supported'"],
        ),
        (f"step rows gone.json {ROWS} --code c0de", ["gone.json"]),
        (f"step rows windows.json {ROWS} --code c0de", ["windows.json", "no record"]),
        (f"step rows hf.json {ROWS} --code c0de".replace("--needles needles", "--needles windows"), ["needles_hash"]),
        ("report rows.json --out GATE.md", ["rows.json"]),
        ("report now.json --out GATE.md", ["now.json"]),
        ("report now.json --records gone.json --out GATE.md", ["gone.json"]),
    ],
)
def test_records_that_are_wrong_are_one_line_and_leave_nothing(gate, planted, here, typed, words):
    before = files(here)
    refused_line(gate(typed), *words)
    assert files(here) == before


def test_several_files_may_say_what_is_current(gate, case, here):
    write("other.json", {"another": {"model_hash": "a", "corpus_hash": "b", "code": "c"}})
    assert gate(f"check rows.json {REGISTRY} --current current.json other.json --strict")[0] == 0
    known = json.loads((here / "current.json").read_text())
    model, now = next(iter(known.items()))
    write("other.json", {model: now | {"code": "newer"}})
    refused_line(gate(f"check rows.json {REGISTRY} --current current.json other.json"), model, "in another file")


def test_paths_in_any_field_lead_nowhere(gate, here):
    """Every text of a row is a path out of the folder; nothing is written but what the commands name."""
    names = [column.name for column in COLUMNS if column.kind is str and not column.choices]
    write("rows.json", [dict.fromkeys(names, "../outside-of-the-gate/x") | {"mechanism": "baseline"}])
    assert gate("ingest rows.db rows.json")[0] == gate("export rows.db rows.parquet")[0] == 0
    gate("check rows.json --out page.md")
    gate("report rows.json --out GATE.md --json claims.json")
    made = {"rows.json", "rows.db", "rows.parquet", "page.md", "GATE.md", "claims.json"}
    made |= {"GATE-reasons.md"}
    assert {str(path.relative_to(here)) for path in here.rglob("*")} == made
    assert not (here.parent / "outside-of-the-gate").exists()
