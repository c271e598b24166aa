"""`kvlab gate import`: two runs of lm-evaluation-harness that somebody made become evidence, or one line says why not.

The files are of this project's own small writer, and once of the harness itself with its dummy model.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from command_line import blocks
from evals import local
from evals.logged_runs import CODED, DATES, PLAIN, pair, run, written
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.check import check
from kvlab.gate.evidence import UNOBSERVED, parse, problems
from kvlab.gate.evidence.faults import UNWITNESSED
from kvlab.gate.reasons import REASONS
from kvlab.gate.rules import FALSEHOODS

pytestmark = pytest.mark.full  # lm-eval, which the chain does not run

FP8 = "kv_quantization/fp8_e4m3"
RESULTS = f"results_{DATES['coded']}.json"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the registry of the toy tasks; margins of .9, so that no loss of these tests is beyond."""
    monkeypatch.chdir(tmp_path)
    local.write(tmp_path / "toy")
    return tmp_path


@pytest.fixture
def importing(here, line):
    """Runs `kvlab gate import` on ``plain`` and ``coded``."""

    def of(more: str = "", task: str = "toy_chosen", differs: str = "--differs kv_cache_dtype", mechanism: str = FP8):
        words = f"gate import --plain plain --coded coded --task {task} --mechanism {mechanism} {differs}"
        words += " --context-tokens 64 --evals toy/evals.yaml --out out"
        return line(*shlex.split(f"{words} {more}"))

    return of


def evidence() -> dict:
    return json.loads(Path("out/evidence.json").read_text())


def row(**changes) -> dict:
    return json.loads(Path("out/row.json").read_text()) | changes


def claim(registered, **changes):
    """What the gate says of the row with its evidence."""
    one = row(row_id="one", **changes)
    (found,) = check([Row(one, (evidence(),))], Context(registered)).claims
    return found


# ---------------------------------------------------------------------------------------- what is made


def test_two_runs_become_evidence_that_says_that_nobody_saw_the_cache(importing, here):
    pair(here)
    code, out, err = importing()
    assert (code, err) == (0, "") and "acc of 40 items is 0.625, without 0.75; paired -0.125" in out
    made = evidence()
    assert made["paired"]["acc"]["value"] == pytest.approx(-0.125) and made["paired"]["acc"]["n"] == 40
    assert made["imported"]["differs"] == {"kv_cache_dtype": ["auto", "fp8"]} and made["imported"]["changed"] == 40
    assert set(made["imported"]["unobserved"]) >= {"recipe_id", "kv_bytes", "fires", "codec", "calibration", "protocol"}
    assert made["identity"]["engine"] == "vllm" and made["identity"]["model"] == "a/b"
    assert made["identity"]["protocol"] == made["observed"]["kv_cache_dtype"] == UNOBSERVED
    assert (made["observed"]["codec"], made["observed"]["kv_bytes"]) == (None, 0)
    assert parse(made).content_id() == made["evidence_id"]
    assert not {"kv_bytes", "codec", "fires", "bits_per_value", "kv_cache_dtype"} & row().keys()


@pytest.mark.parametrize("mechanism", [FP8, "kv_quantization/hadamard", "compressed_attention/block_sparse"])
@pytest.mark.parametrize("tier", ["supported", "reviewed_preview", "gated"])
def test_it_certifies_nothing_however_little_is_lost(importing, here, mechanism, tier):
    pair(here)
    assert importing(f"--claim {tier}", mechanism=mechanism)[0] == 0
    found = claim(registry.load(None, "toy/evals.yaml"))
    assert [one.word for one in found.judgements] == ["within"]
    assert found.earned == "gated" and "evidence_imported" in found.codes and not FALSEHOODS & found.codes
    assert found.status == "pending" and (found.word == "pass") == (tier == "gated")


def test_what_a_row_says_of_its_own_run_does_not_make_it_more(importing, here):
    """A row may say what its engine held; the import neither contradicts nor proves it. It may count nothing."""
    pair(here)
    assert importing()[0] == 0
    said = {"kv_cache_dtype": "fp8_e4m3", "cache_class": "PagedCache"}
    found = claim(registry.load(None, "toy/evals.yaml"), support_status="supported", **said)
    assert found.earned == "gated" and not FALSEHOODS & found.codes
    typed = claim(registry.load(None, "toy/evals.yaml"), support_status="supported", kv_bytes=10, kv_values=10)
    assert typed.earned == "unsupported" and "quantity_unvouched" in typed.codes


def test_a_loss_that_is_shown_is_too_lossy(importing, here):
    written(here, run("plain", PLAIN))
    written(here, run("coded", [0] * len(PLAIN)))
    evals = Path("toy/evals.yaml")
    evals.write_text(evals.read_text().replace("margin: 0.9", "margin: 0.05"))
    assert importing("--claim reviewed_preview")[0] == 0
    found = claim(registry.load(None, "toy/evals.yaml"))
    assert (found.status, found.earned, found.word) == ("failed", "too_lossy", "fail")


def test_evidence_that_hides_where_it_is_from_is_altered(importing, here):
    pair(here)
    assert importing()[0] == 0
    known = registry.load(None, "toy/evals.yaml")
    forged = {name: value for name, value in evidence().items() if name != "imported"}
    assert {reason.code for reason in problems(forged, row(), known)} == {"evidence_tampered"}


def test_a_row_that_shows_another_metric_is_contradicted(importing, here):
    pair(here)
    assert importing()[0] == 0
    known = registry.load(None, "toy/evals.yaml")
    found = {reason.code for reason in problems(evidence(), row(acc=0.9), known)}
    assert found == {"evidence_imported", "evidence_contradicts_row"}


def test_answers_that_are_written_may_all_be_the_same(importing, here):
    settings = {"task": "toy_written", "metric": "exact_match", "kind": "generate_until"}

    def same(coded):
        coded["samples"] = run("plain", PLAIN, **settings)["samples"]
        coded["results"]["results"]["toy_written"]["exact_match,none"] = sum(PLAIN) / len(PLAIN)

    pair(here, same, **settings)
    assert importing(task="toy_written")[0] == 0
    assert evidence()["imported"]["changed"] == 0 and evidence()["paired"]["exact_match"]["value"] == 0


def test_a_difference_of_the_environment_is_none_that_the_files_name(importing, here):
    def same(coded):
        coded["results"]["config"]["model_args"] = "pretrained=a/b,kv_cache_dtype=auto"
        coded["results"]["configs"]["toy_chosen"]["metadata"]["kv_cache_dtype"] = "auto"

    pair(here, same)
    assert importing(differs="")[0] == 0 and evidence()["imported"]["differs"] == {}


def test_a_file_may_be_named_in_place_of_its_folder(importing, here):
    pair(here)
    pair(here / "older")
    for side in ("plain", "coded"):
        (here / side / "older").symlink_to(here / "older" / side)
    (here / "coded/a__b/results_2025.json").write_text("{}")
    code, _, err = importing()
    assert code == 2 and "coded holds 2 results of lm_eval" in err and "name the file of one run" in err
    assert importing(f"--coded coded/a__b/{RESULTS}")[0] == 0


# ------------------------------------------------------------------------------------------- refusals


def at(*path):
    """Changes one thing of the coded run's results."""

    def change_to(value):
        def change(coded):
            here = coded["results"]
            for step in path[:-1]:
                here = here[step]
            here[path[-1]] = value

        return change

    return change_to


def items(change):
    """Changes the list of the coded run's samples."""

    def done(coded):
        change(coded["samples"]["toy_chosen"])

    return done


def rehashed(name, text):
    def change(samples):
        samples[3] |= {name: "0" * 64} | ({"arguments": {"gen_args_0": {"arg_0": text}}} if text else {})

    return items(change)


T = "toy_chosen"
REFUSED = [
    ("another version", at("versions", T)(2.0), True, ("versions of 'toy_chosen' is 1.0", "2.0")),
    ("few-shot", at("n-shot", T)(5), True, ("n-shot of 'toy_chosen' is 0", "5")),
    ("limit", at("config", "limit")(40), True, ("config.limit is None", "40")),
    ("engine", at("config", "model")("hf"), True, ("config.model is vllm", "hf")),
    ("seed", at("config", "fewshot_seed")(1), True, ("config.fewshot_seed is 1234",)),
    ("harness", at("lm_eval_version")("0.4.12"), True, ("lm_eval_version is 0.4.13", "0.4.12")),
    ("template", at("chat_template_sha")("ab"), True, ("chat_template_sha is None", "ab")),
    ("task settings", at("configs", T, "num_fewshot")(3), True, ("configs of 'toy_chosen', num_fewshot is 0", "3")),
    (
        "model",
        at("config", "model_args")({"pretrained": "c/d", "kv_cache_dtype": "fp8"}),
        True,
        ("model_args pretrained is a/b", "c/d"),
    ),
    (
        "undeclared argument",
        at("config", "model_args")({"pretrained": "a/b", "kv_cache_dtype": "fp8", "dtype": "float16"}),
        True,
        ("model_args dtype is None", "float16", "--differs dtype"),
    ),
    (
        "declared argument that is the same",
        at("config", "model_args")("pretrained=a/b,kv_cache_dtype=auto"),
        True,
        ("--differs kv_cache_dtype: model_args of both runs say kv_cache_dtype=auto",),
    ),
    ("missing item", items(lambda s: s.pop()), True, ("is of 40 items, and its samples hold 39",)),
    ("item twice", items(lambda s: s.append(s[-1])), True, ("hold item 39 twice under the filter 'none'",)),
    ("other document", rehashed("doc_hash", None), True, ("item 3", "another document", "doc_hash")),
    ("other target", rehashed("target_hash", None), True, ("item 3", "another target", "target_hash")),
    ("prompt that was edited", rehashed("doc_id", "Other:"), False, ("prompt of item", "prompt_hash")),
    ("other hashes", rehashed("doc_hash", None), False, ("the results are of other items than the samples beside",)),
    ("score that was edited", items(lambda s: s[1].update(acc=1)), True, ("acc,none of 0.625", "40 samples is 0.65")),
    ("result that was edited", at("results", T, "acc,none")(0.7), True, ("acc,none of 0.7", "40 samples is 0.625")),
    ("NaN", items(lambda s: s[1].update(acc=float("nan"))), True, ("acc of item 1 is nan", "a finite number")),
    ("a score that is a text", items(lambda s: s[1].update(acc="1")), True, ("acc of item 1 is '1'",)),
    ("no items", items(lambda s: s.clear()), True, ("is empty",)),
    ("older samples", items(lambda s: s[0].pop("prompt_hash")), False, ("line 1 has no 'prompt_hash'",)),
    ("no task", lambda c: c["results"]["configs"].clear(), True, ("has no task 'toy_chosen'",)),
    ("no results", lambda c: c["results"].pop("n-samples"), True, ("is no results file of lm_eval", "'n-samples'")),
    (
        "rolling",
        at("configs", T, "output_type")("loglikelihood_rolling"),
        True,
        ("'loglikelihood_rolling'", "multiple_choice or loglikelihood"),
    ),
]


@pytest.mark.parametrize(("change", "rehash", "words"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_what_is_not_the_other_run_or_not_of_one_run_is_one_line(importing, here, change, rehash, words):
    pair(here, change, rehash)
    code, out, err = importing()
    assert (code, out) == (2, "") and err.count("\n") == 1 and "Traceback" not in err
    assert [word for word in words if word not in err] == [], err
    assert not Path("out").exists()


def test_other_items_of_the_same_number_are_refused(importing, here):
    def shifted(coded):
        for one in coded["samples"][T]:
            one["doc_id"] += 1

    pair(here, shifted)
    code, _, err = importing()
    assert code == 2 and "of task 'toy_chosen' is in" in err and "and not in" in err


def test_log_likelihoods_that_are_all_the_same_show_that_no_cache_was_read(importing, here):
    def same(coded):
        coded["samples"] = run("plain", PLAIN)["samples"]
        coded["results"]["results"][T]["acc,none"] = sum(PLAIN) / len(PLAIN)

    pair(here, same)
    code, _, err = importing()
    assert code == 2 and "to the last digit" in err


def test_one_run_named_twice_is_refused(importing, here):
    pair(here)
    code, _, err = importing("--coded plain")
    assert code == 2 and "are the same run" in err


def test_of_several_filters_one_is_named_in_the_registry(importing, here):
    settings = {"metric": "exact_match", "kind": "generate_until", "task": "toy_written"}
    pair(here, filters=("strict-match", "flexible-extract"), **settings)
    code, _, err = importing(task="toy_written")
    assert code == 2 and "flexible-extract, strict-match" in err and "exact_match.flexible-extract" in err
    evals = Path("toy/evals.yaml")
    evals.write_text(evals.read_text().replace("key: exact_match", "key: exact_match.strict-match"))
    assert importing(task="toy_written")[0] == 0


def test_answers_that_were_drawn_are_refused(importing, here):
    settings = {"metric": "exact_match", "kind": "generate_until", "task": "toy_written"}
    pair(here, at("configs", "toy_written", "generation_kwargs")({"do_sample": True, "temperature": 0.7}), **settings)
    code, _, err = importing(task="toy_written")
    assert code == 2 and "chance would count as damage" in err


def missing(name):
    return lambda here: next(here.glob(name)).unlink()


def text(name, content):
    return lambda here: next(here.glob(name)).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (missing("results_*"), ("coded holds no results_*.json",)),
        (missing("samples_*"), ("--log_samples",)),
        (text("results_*", b""), ("is not JSON",)),
        (text("results_*", b"\xff\xfe\x00"), ("is no text in UTF-8",)),
        (text("results_*", b"[1]"), ("is no results file of lm_eval",)),
        (text("results_*", b'{"results": NaN}'), ("NaN", "no finite number")),
        (text("samples_*", b"\xff\xfe\x00"), ("cannot read", "utf-8")),
        (text("samples_*", b'{"doc_id": 0'), ("line 1 is not JSON",)),
        (text("samples_*", b"3\n"), ("line 1 has no 'doc_id'",)),
        (text("samples_*", b"\n\n"), ("is empty",)),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_one_line(importing, here, spoil, words):
    written(here, run("plain", PLAIN))
    written(here, run("coded", CODED), spoil=spoil)
    code, out, err = importing()
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--task toy_chose", ("'toy_chose' is not known", "did you mean 'toy_chosen'?")),
        ("--task needle", ("eval of lm-evaluation-harness 'needle' is not known",)),
        ("--mechanism fp8_e4m3", ("'fp8_e4m3' is not known", "kv_quantization/fp8_e4m3")),
        ("--mechanism baseline/none", ("'baseline/none' is not known",)),
        ("--differs pretrained", ("--differs pretrained would be another model",)),
        ("--differs kv_cache_dtype kv_dtype", ("model_args of neither run name it", "kv_cache_dtype")),
        ("--context-tokens 0", ("'0'", "at least 1")),
        ("--context-tokens 600", ("--context-tokens is 600", "max_length 512")),
        ("--claim certified", ("tier 'certified' is not known",)),
        ("--plain nowhere", ("cannot read nowhere: no such file",)),
        ("--plain toy", ("toy holds no results_*.json",)),
        ("--out plain/a__b/results_2026-01-02T03-04-05.000006.json", ("results_2026-01-02T03-04-05.000006.json",)),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(importing, here, more, words):
    pair(here)
    code, out, err = importing(more)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "Traceback" not in err
    assert [word for word in words if word not in err] == [], err


# ------------------------------------------------------------------------------------------------ the page


def test_the_lines_of_the_documentation_work_as_they_stand_there(here, root, line):
    found = list(blocks(root / "docs/eval.md"))
    entry = next(block["body"] for block in found if block["name"] == "entry.yaml")
    Path("evals.yaml").write_text((registry.SHIPPED / "evals.yaml").read_text() + entry)
    pair(here, task="endings")
    lines = [words for block in found if block["kind"] == "sh" for words in block["body"].splitlines()]
    typed = [words for words in lines if words.startswith("kvlab ")]
    assert [line(*shlex.split(words)[1:])[0] for words in typed] == [0, 0]


def test_what_the_documentation_says_of_it_is_a_rule(root):
    """The page's table, against the codes and tiers that there are."""
    text = (root / "docs/gate.md").read_text()
    part = text[text.index("## Evidence of another harness") : text.index("## What a digest protects against")]
    assert {"`evidence_imported`", "`too_lossy`", "`gated`"} <= set(part.replace(",", " ").split())
    assert UNWITNESSED in REASONS and UNWITNESSED not in FALSEHOODS


# ------------------------------------------------------------------------------ what the harness writes


def test_what_the_harness_itself_writes_is_read(importing, here, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.dummy import DummyLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "datasets")
    manager = TaskManager(include_path="toy", include_defaults=False)
    tasks = ["toy_chosen", "toy_written"]
    own = DummyLM.loglikelihood
    for side, dtype in (("plain", "auto"), ("coded", "fp8")):
        tracker = EvaluationTracker(output_path=side)
        asked = {"tasks": tasks, "task_manager": manager, "evaluation_tracker": tracker, "bootstrap_iters": 0}
        found = simple_evaluate(model="dummy", model_args=f"pretrained=a/b,kv_cache_dtype={dtype}", **asked)
        samples = found.pop("samples")
        tracker.save_results_aggregated(results=found, samples=samples)
        for task in tasks:
            tracker.save_results_samples(task_name=task, samples=samples[task])
        monkeypatch.setattr(DummyLM, "loglikelihood", lambda *of, **more: own(*of, **more)[::-1])
    for task in tasks:
        code, out, err = importing(task=task)
        assert code == 0 and "of 16 items" in out, err
        made = evidence()
        assert made["imported"]["differs"] == {"kv_cache_dtype": ["auto", "fp8"]}
        assert made["identity"]["versions"]["lm_eval"] and made["identity"]["engine"] == "dummy"
        assert (made["imported"]["changed"] > 0) == (task == "toy_chosen")
