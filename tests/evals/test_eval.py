"""`kvlab eval` from the command line, on local tasks and the reference model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import embedded
from command_line import examples, flags_of
from evals import local
from kvlab.cache.files.recipe import write_recipe_file
from kvlab.cli import evals as eval_verb
from kvlab.cli import gate as importing
from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import Recipe
from kvlab.evals.evidence import MEASURING
from kvlab.evals.run import started
from kvlab.gate import registry
from refusals import refused

CODED = "--codec hadamard --bits 2"


@pytest.fixture
def here(root, tmp_path, monkeypatch, line):
    """A folder with the toy tasks; a function runs a verb in it and gives exit code, stdout and stderr's last line."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # without parameters, as many threads as cores
    monkeypatch.chdir(tmp_path)
    for name in ("models", "src"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "params.yaml").write_text(embedded.text())
    local.write(tmp_path / "toy")

    def run(words: str) -> tuple[int, str, str]:
        code, out, err = line(*shlex.split(words))
        return code, out, ["", *err.strip().splitlines()][-1]

    return run


def asked(task: str, engine: str = "hf", done: str = CODED, more: str = "") -> str:
    """A line that runs a toy task."""
    toy = "--include-path toy --evals toy/evals.yaml --dtype float32 --out out"
    return f"eval --task {task} --engine {engine} {done} {toy} {more}"


def written(name: str) -> dict:
    return json.loads(Path("out", f"{name}.json").read_text())


def answers(task: str) -> list[list]:
    """What each side said, item by item."""
    return [
        [sample["filtered_resps"] for sample in written(f"lm_eval_{side}")["samples"][task]]
        for side in ("baseline", "variant")
    ]


# ------------------------------------------------------------------------------------ what is found


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "key"), [("toy_written", "exact_match"), ("toy_chosen", "acc")])
def test_both_sides_answer_the_same_items_and_the_gate_reads_what_comes_of_it(here, task, key):
    code, out, err = here(asked(task))
    assert code == 0, err
    evidence, row = written("evidence"), written("row")
    assert evidence["observed"]["fires"] == evidence["observed"]["expected_fires"] > 0
    assert evidence["observed"]["codec"] == "hadamard" and evidence["observed"]["cache_class"] == "KVCache"
    assert evidence["identity"]["protocol"] == "snapshot" and "lm_eval" in evidence["identity"]["versions"]
    assert row["bits_per_value"] == pytest.approx(2 + 0.25 + 1 / 48, abs=1e-3)  # norms, and positions of the tokens
    plain, coded = answers(task)
    assert len(plain) == len(coded) == len(local.SENTENCES) and plain != coded
    scores = [
        [sample[key] for sample in written(f"lm_eval_{side}")["samples"][task]] for side in ("variant", "baseline")
    ]
    means = [sum(listed) / len(listed) for listed in scores]
    assert [evidence[part][key]["value"] for part in ("metrics", "baseline")] == pytest.approx(means)
    assert evidence["paired"][key]["value"] == pytest.approx(means[0] - means[1])
    assert f"{task}: {key} of {len(plain)} items" in out and out.splitlines()[-1].startswith("next: kvlab gate check")
    code, out, err = here("gate check out/row.json --evidence out/evidence.json --evals toy/evals.yaml --format json")
    (claim,) = json.loads(out)["claims"]
    hard = [finding for finding in claim["findings"] if finding["hard"]]
    assert code in (0, 1) and err == "" and hard == []
    assert claim["status"] in ("completed", "pending", "failed")


@pytest.mark.nightly
def test_one_task_is_not_all_that_is_to_be_shown_and_a_recipe_file_does_as_flags_do(here):
    recipe = write_recipe_file("recipe.json", Recipe(k=IntStream(bits=8), v=IntStream(bits=8)))
    code, _, err = here(asked("toy_chosen", done=f"--recipe {recipe}", more="--limit 12"))
    assert code == 0, err
    assert written("row")["mechanism_variant"] == "int" and written("evidence")["metrics"]["acc"]["n"] == 12
    code, out, err = here("gate check out/row.json --evidence out/evidence.json --evals toy/evals.yaml --out GATE.md")
    assert (code, err) == (1, ""), out
    assert out.startswith("fail: 1 rows") and out.count("evidence_incomplete") == 2 and "quality" not in out


@pytest.mark.nightly
def test_the_same_question_asked_again_gets_the_same_evidence(here):
    here(asked("toy_chosen", more="--limit 4"))
    first = written("evidence")
    here(asked("toy_chosen", more="--limit 4"))
    assert written("evidence") == first


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("eval --task needle --engine hf --codec int --out o", ["'needle'", "humaneval", "ruler_v1"]),
        ("eval --task ruler_v1 --engine hf --codec int --out o", ["--context-tokens N"]),
        ("eval --task ruler_v1 --engine hf --codec int --context-tokens 8192 --out o", ["8192", "4096"]),
        ("eval --task humaneval --engine hf --out o", ["--recipe, --codec or --cache-dtype", "none of them"]),
        ("eval --task humaneval --engine hf --codec int --cache-dtype fp8_e4m3 --out o", ["--codec and --cache-dtype"]),
        ("eval --task humaneval --engine hf --cache-dtype fp8_e4m3 --out o", ["hf cache dtype", "auto"]),
        ("eval --task humaneval --engine vllm --cache-dtype nvfp4 --out o", ["nvfp4", "fp8_e4m3"]),
        ("eval --task humaneval --engine hf --codec klt --out o", ["sigma"]),
        ("eval --task humaneval --engine hf --codec int --limit 0 --out o", ["--limit is 0"]),
        ("eval --task humaneval --engine vllm --cache-dtype auto --bits 2 --out o", ["--bits belongs to --codec"]),
        ("eval --task humaneval --engine hf --codec int --bits 9 --out o", ["--bits 9"]),
        ("eval --task humaneval --engine hf --codec int --claim sure --out o", ["'sure'", "reviewed_preview"]),
        ("eval --task humaneval --engine hff --codec int --out o", ["'hff'", "did you mean 'hf'"]),
        ("eval --task humaneval --engine hf --codec int --include-path nowhere --out o", ["cannot read nowhere"]),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(here, typed, words):
    code, out, err = here(typed)
    assert (code, out) == (2, "") and all(word in err for word in words), err
    assert not list(Path().glob("o/*evidence*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "task", "words"),
    [
        ({"dataset_path": "nobody/nothing"}, "toy_chosen", ["is not on disk", "nobody/nothing", "bring the folder"]),
        ({"doc_to_text": "{{nothing.at.all}}"}, "toy_chosen", ["'toy_chosen' cannot be run"]),
        ({"output_type": "loglikelihood_rolling"}, "toy_written", ["loglikelihood_rolling", "allowed: generate_until"]),
        ({"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}, "toy_written", ["`generates`"]),
        ({"unsafe_code": True}, "toy_written", ["--confirm-run-unsafe-code"]),
        ({"generation_kwargs": {"do_sample": True, "temperature": 0.5}}, "toy_written", ["samples its answers"]),
        ({"metric_list": [{"metric": "bleu"}]}, "toy_written", ["no metric 'exact_match'", "allowed: bleu"]),
        ({"doc_to_text": "{{text[:1]}}"}, "toy_chosen", ["a context of one token"]),
    ],
    ids=["data", "template", "rolling", "other-kind", "unsafe", "sampled", "metric", "short"],
)
def test_a_task_that_cannot_be_run_is_one_line(here, changes, task, words):
    local.write(Path("toy"), **changes)
    code, out, err = here(asked(task))
    assert (code, out) == (2, "") and all(word in err for word in words), err


@pytest.mark.full
def test_an_engine_that_no_eval_knows_is_refused():
    with refused(CapabilityError, "capability.no-evals", "third", "hf and vllm"):
        started(SimpleNamespace(engine="third"), None, None, 0, None)


@pytest.mark.full
def test_an_unregistered_pair_of_codecs_has_no_row(here):
    recipe = write_recipe_file("recipe.json", Recipe(k=IntStream(bits=8), v=HadamardStream(bits=8)))
    code, _, err = here(asked("toy_chosen", done=f"--recipe {recipe}"))
    assert code == 2 and "K by int and V by hadamard" in err
    recipe = write_recipe_file("recipe.json", Recipe(k=IdentityStream(), v=IdentityStream()))
    code, _, err = here(asked("toy_chosen", done=f"--recipe {recipe}"))
    assert code == 2 and "one codec" in err


@pytest.mark.full
def test_a_codec_that_codes_nothing_of_so_short_a_text_is_a_fault(here):
    recipe = write_recipe_file("recipe.json", Recipe(k=Fp8Stream(), v=Fp8Stream()))
    code, out, err = here(asked("toy_chosen", done=f"--recipe {recipe}"))
    assert (code, out) == (1, "") and "nothing was coded" in err and "a block has 512" in err
    assert not Path("out/evidence.json").exists()


@pytest.mark.full
def test_what_the_model_raises_is_not_laid_to_the_task(here, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of the engine")

    monkeypatch.setattr("kvlab.evals.hf.HFSide._feed", fail)
    with pytest.raises(ZeroDivisionError, match="of the engine"):
        here(asked("toy_chosen"))


@pytest.mark.full
def test_any_supported_model_may_be_named_by_its_folder(here, tiny_model):
    code, _, err = here(asked("toy_chosen", more=f"--limit 2 --model {tiny_model}"))
    assert code == 0, err
    assert written("row")["model"] == tiny_model.name and written("evidence")["identity"]["model"] == tiny_model.name


@pytest.mark.full
def test_a_model_folder_needs_no_params_yaml(here, tiny_model):
    Path("params.yaml").unlink()
    recipe = write_recipe_file("recipe.json", Recipe(k=IntStream(bits=8), v=IntStream(bits=8)))
    named = f"--limit 2 --model {tiny_model}"
    code, _, err = here(asked("toy_chosen", done=f"--recipe {recipe}", more=named))
    assert code == 0, err
    assert written("row")["model"] == tiny_model.name and written("row")["mechanism_variant"] == "int"
    code, out, err = here(asked("toy_chosen", more=named).replace("--out out", "--out other"))
    assert code == 0, err
    k = json.loads(Path("other/recipe.json").read_text())["recipe"]["k"]
    assert (k["codec"], k["bits"]) == ("hadamard", 2)
    studied = asked("toy_chosen", done="--codec studied", more=named).replace("--out out", "--out third")
    code, out, err = here(studied)
    assert (code, out) == (2, "") and "--codec studied is described in params.yaml" in err
    assert not Path("third").exists()
    code, out, err = here(asked("toy_chosen", more=f"{named} --params nothere.yaml"))
    assert (code, out) == (2, "") and "nothere.yaml" in err


@pytest.mark.full
def test_without_the_harness_one_line_says_how_to_get_it(here, monkeypatch):
    monkeypatch.setattr("kvlab.cli.evals.find_spec", lambda name: None)
    code, _, err = here(asked("toy_chosen"))
    assert code == 2 and "pip install lm-eval==" in err


@pytest.mark.full
def test_the_digest_of_the_code_is_of_code_that_is_there(root):
    for name in MEASURING:
        assert any((root / "src/kvlab" / name).rglob("*.py")), name


# --------------------------------------------------------------------------------------- vLLM


@pytest.mark.nightly
@pytest.mark.engine
def test_vllm_answers_with_the_recipe_inside_it(here, root):
    lines = [asked(task, engine="vllm") for task in ("toy_written", "toy_chosen")]
    script = root / "tests/evals/vllm_user.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")])}
    done = subprocess.run(
        [sys.executable, script, *lines], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for evidence, task in zip(found, ("toy_written", "toy_chosen"), strict=True):
        observed = evidence["observed"]
        assert evidence["quality_eval_id"] == task and evidence["identity"]["protocol"] == "in_forward"
        assert observed["fires"] == observed["expected_fires"] > 0 and observed["codec"] == "hadamard"
        assert observed["kv_cache_dtype"] == "float32" and observed["cache_class"] == "CPUAttentionBackend"
        assert 8 * observed["kv_bytes"] / observed["kv_values"] == pytest.approx(2.25)
    plain, coded = answers("toy_chosen")
    assert plain != coded
    here(asked("toy_chosen"))
    other, _ = answers("toy_chosen")  # without a codec the two engines say the same
    for one, two in zip(plain, other, strict=True):
        assert [score for score, _ in one] == pytest.approx([score for score, _ in two], abs=1e-3)


# ------------------------------------------------------------------------------ the documentation


def masked(text: str) -> str:
    """Without numbers and digests: those are the model's."""
    return re.sub(r"[+-]?\b[0-9a-f.]*\d[0-9a-f.]*\b", "N", text)


@pytest.mark.nightly
def test_the_example_of_the_documentation_runs_as_it_stands_there(here, root):
    ran = 0
    for words, code, shown in examples(root / "docs/eval.md", pytest.fail):
        program, _, typed = words.partition("#")[0].partition(" ")
        if program != "kvlab":
            subprocess.run(["bash", "-c", words], check=True)
            continue
        found, out, _ = here(typed)
        assert (found, masked(out)) == (code, masked(shown)), words
        ran += 1
    assert ran == 3


@pytest.mark.full
def test_the_documentation_names_flags_and_evals_that_there_are(root):
    text = re.sub(r"^lm_eval .*$", "", (root / "docs/eval.md").read_text(), flags=re.MULTILINE)  # another program's
    flags = {*flags_of(eval_verb.eval_verb), *flags_of(importing.import_verb), "--evidence"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= flags
    listed = [entry for entry in registry.load().evals.values() if entry.harness == "lm-evaluation-harness"]
    assert all(f"| `{entry.quality_eval_id}` | `{entry.task}`" in text for entry in listed)
