"""The section of FINDINGS.md on what may be claimed."""

from __future__ import annotations

import json
import math
import re

import pytest

from kvlab.core.errors import NonFinite, UserError
from kvlab.gate.catalogue.columns import TIERS
from kvlab_pipeline.gate_page.row_summary import RowSummary
from kvlab_pipeline.gate_page.summary import SCHEMA_VERSION
from kvlab_pipeline.report import findings, use
from kvlab_pipeline.report.certified import context, sentence
from pipeline.report.example_metrics import build, verdict
from pipeline.report.shipped import shipped
from refusals import refused

MEASURED = {"value": 0.00234, "low": 0.00213, "high": 0.00255, "n": 32}
NEEDLES = {"value": 0.875, "low": 0.825, "high": 0.915, "n": 200}


LOSING = {"word": "fail", "codes": ["quality_open", "quality_beyond"], "open": ["needle_recall"], "beyond": ["kl"]}


def row(row_id, model, earned, mechanism="kv_compression", variant="klt", **changed):
    told = dict.fromkeys(RowSummary.model_fields)
    told |= {"row_id": row_id, "model": model, "engine": "hf", "mechanism": mechanism, "mechanism_variant": variant}
    told |= {"bits": 4, "bits_per_value": 4.19, "throughput_tok_s": 1234.5, "measured": True}
    told |= {"throughput_ratio": {"value": 0.247, "low": 0.243, "high": 0.252, "n_windows": 32}, "protocol": "snapshot"}
    told |= {"stored_span": "context", "device": "cpu", "dtype": "bfloat16", "context_tokens": 512}
    told |= {"word": "pass", "codes": [], "open": [], "untold": [], "beyond": []}
    told |= {"metrics": {"kl": MEASURED, "needle_recall": NEEDLES}, "earned": earned, "claimed": "supported"}
    told |= {"certified": earned == "supported"}
    return told | changed


def claims(model):
    rows = [
        row("a", model, "supported", "baseline", None, bits=None, metrics={}),
        row("b", model, "supported"),
        row("c", model, "too_lossy", "kv_quantization", "int", bits_per_value=4.52, **LOSING),
        row("d", model, "unsupported", "kv_quantization", "fp8_e5m2", measured=False, metrics={}),
        row("e", "another", "supported", "kv_quantization", "kivi"),
    ]
    counts = {tier: sum(one["earned"] == tier for one in rows) for tier in TIERS}
    answer = {"engine": "hf", "protocol": "snapshot", "stored_span": "context", "tried": 2, "certified": 1}
    answers = [answer | {"model": model, "row_id": "b", "word": "certified"}]
    told = {"schema_version": SCHEMA_VERSION, "registry": "r", "current": "c", "counts": counts}
    return told | {"answers": answers, "best": [], "rows": rows}


@pytest.fixture
def metrics():
    made = build(0)
    made["identity"]["slug"] = "reference"
    return made


@pytest.fixture
def written(tmp_path, metrics):
    """Writes FINDINGS.md where the pipeline does, with these claims, and gives its text."""

    def write(given, place="results/gap", html=None):
        path = tmp_path / "results/gate/claims.json"
        out = tmp_path / place / "FINDINGS.md"
        if given is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(given))
        findings.write(
            shipped(),
            metrics,
            verdict(metrics, 0),
            out,
            html and out.with_name(html),
            claims=None if given is None else path,
        )
        return out.read_text()

    return write


def section(text):
    return text.split("## What may be claimed\n")[1].split("\n## ")[0]


def test_the_certified_rows_of_the_model_and_the_counts_are_told(written, metrics):
    found = section(written(claims(metrics["identity"]["slug"])))
    assert "| supported | 2 |" in found and "| too_lossy | 1 |" in found and "| unsupported | 1 |" in found
    assert (
        "Of 2 rows that compress, 1 is certified: it earns `supported`. Measured on cpu, bfloat16, 512 tokens" in found
    )
    lines = [line for line in found.splitlines() if line.startswith("| hf")]
    assert lines == [
        "| hf | kv_compression/klt | snapshot | context | 4 | 4.19 | 0.00234 [0.00213, 0.00255] | – "
        "| 87.5 [82.5, 91.5] |"
    ]


@pytest.mark.parametrize(
    ("place", "link"), [("results/gap", "../gate/GATE.md"), ("results/gap/models/other", "../../../gate/GATE.md")]
)
def test_the_page_of_the_gate_is_linked_from_where_the_report_is(written, metrics, tmp_path, place, link):
    text = written(claims(metrics["identity"]["slug"]), place, "report.html")
    assert re.findall(r"\[GATE\.md\]\(([^)]+)\)", text) == [link, link]
    assert f'href="{link}"' in (tmp_path / place / "report.html").read_text()


def first(text):
    return text.split("\n## Is that much?\n")[0]


def test_the_first_screen_says_what_to_use_and_at_what_price(written):
    found = first(written(claims("reference")))
    assert "\n**Use klt at 4 bits**. It stores 4.19 bits for each value of the cache" in found
    assert "a KL of 0.00234 [0.00213, 0.00255] nats per token" in found and "87.5 [82.5, 91.5] % are found" in found
    assert "Of the 2 settings tried it is the one that stores least" in found
    assert "| klt at 4 bits | 4.19 | 0.00234 [0.00213, 0.00255] | – | 87.5 [82.5, 91.5] | yes |" in found
    assert "| no, loses too much: KL |" in found and "1234" not in found


def test_the_first_screen_names_the_text_that_calibrates(written, metrics):
    assert "were calibrated on" not in first(written(claims("reference")))
    metrics["settings"] = {"corpus": {"source": "notes.txt"}}
    assert "Codecs that are calibrated were calibrated on `notes.txt`." in first(written(claims("reference")))


def test_a_preview_says_what_is_open_and_nothing_at_all_is_said_too(written):
    given = claims("reference")
    given["rows"][1] |= {"word": "fail", "codes": ["quality_open"], "open": ["delta_nll", "needle_recall"]}
    given["answers"][0] |= {"word": "preview", "certified": 0}
    found = first(written(given))
    assert "**Use klt at 4 bits**, as a preview." in found
    assert "the change of the loss and the needles found are open, which means that the tests are too small" in found
    given["rows"][1] |= {"open": ["needle_recall"], "untold": ["needle_recall"]}
    assert "not certified: of the needles found nothing can be told, as the model is not shown" in first(written(given))
    given["answers"][0] |= {"word": "none", "row_id": None}
    assert "**Nothing yet.** Of the 2 settings that this run tried none" in first(written(given))
    assert "The gate has judged no codec of this model" in first(written(None))


def test_what_is_served_stands_first_and_each_way_of_coding_by_itself(written):
    given = claims("reference")
    served = {"protocol": "served", "stored_span": "window"}
    given["rows"] += [
        row("s", "reference", "too_lossy", **served, **LOSING),
        row("p", "reference", "supported", engine="vllm", protocol="in_forward", stored_span="window"),
    ]
    answer = given["answers"][0]
    none = {"word": "none", "row_id": None, "certified": 0}
    given["answers"] += [answer | served | none | {"tried": 1}]
    given["answers"] += [answer | {"engine": "vllm", "protocol": "in_forward", "stored_span": "window", "row_id": "p"}]
    found = first(written(given)).split("## What to use\n")[1]
    titles = [line for line in found.splitlines() if line.startswith("### ")]
    assert titles == [
        "### As transformers serves: kvlab.Cache",
        "### As vLLM serves: every token coded as it comes",
        "### A finished cache, coded once and read once (transformers)",
    ]
    cached, paged, finished = found.split("### ")[1:4]
    assert "**Nothing yet.** The one setting that this run tried" in cached and cached.count("| klt at 4 bits") == 1
    assert "**Use klt at 4 bits**" in paged and paged.count("| klt at 4 bits") == 1
    assert "Nobody serves so" in finished and finished.count("| klt at 4 bits") == 1


@pytest.mark.parametrize("finished", [True, False])
def test_bits_of_whole_caches_count_exact_tokens_where_there_are_some(finished):
    """``(rate * (N - exact) + 16 * exact + artefact) / N``."""
    artefact, exact, rate, tokens = 14 * 1024 + 512, 64, 2.0, 8192
    held = (rate * (tokens - exact) + 16 * exact + artefact) / tokens
    state = {"rate": rate, "exact_tokens": exact, "at": [{"tokens": tokens, "bits_per_value": held}]}
    state["even_with_bfloat16"] = exact + artefact / (16 - rate)
    without = (rate * tokens + artefact) / tokens
    plain = {"bits_per_value": rate}
    assert use.in_all(plain, state, tokens, finished) == pytest.approx(held if finished else without)
    assert use.pays_from(plain, state, finished) == str(math.ceil(artefact / (16 - rate)) + (exact if finished else 0))
    pages, kept = 2.03125, 132  # tokens that each request reads exact, beside what pages hold of them
    row = {"bits_per_value": pages + 16 * kept / 640, "page_bits": pages, "exact_bits": 16.0 * kept}
    whole = (pages * tokens + 16 * kept + artefact) / tokens
    assert "keeps 132 tokens exact" in use.kept_exact([plain, row | {"dtype": "bfloat16"}]) and not use.kept_exact(
        [plain]
    )
    assert use.like(row, state) and not use.like({"bits_per_value": row["bits_per_value"]}, state)
    assert use.in_all(row, state, tokens, False) == pytest.approx(whole)
    even = int(use.pays_from(row, state, False))
    assert pages * even + 16 * kept + artefact <= 16 * even < pages * even + 16 * kept + artefact + 16


def test_a_name_on_the_first_screen_stays_where_it_is(written):
    given = claims("reference")
    given["rows"][1]["mechanism_variant"] = "a | b <b>[x](y)\n# h"
    found = first(written(given))
    assert "<b>" not in found and "[x]" not in found and "\n# h" not in found


def test_where_nothing_is_certified_there_is_no_table(written, metrics):
    given = claims(metrics["identity"]["slug"])
    given["rows"] = [one for one in given["rows"] if one["row_id"] in "acd"]
    found = section(written(given))
    assert "The one row that compresses is not certified." in found and "| hf |" not in found


def test_without_claims_or_rows_of_the_model_it_says_so(written):
    for given in (None, claims("yet another")):
        assert section(written(given)).strip() == "The gate has judged no row of this model."


def test_the_section_stands_after_the_verdict(written):
    titles = re.findall(r"^## (.+)$", written(None), re.M)
    assert titles[titles.index("Verdict") + 1] == "What may be claimed"


@pytest.mark.parametrize("given", [[], {}, {"schema_version": 0}, "claims"])
def test_what_is_no_claims_is_refused(given, written, tmp_path):
    with refused(UserError, "user.no-claims", "--claims"):
        written(given)
    assert not (tmp_path / "results/gap/FINDINGS.md").exists()


def test_a_number_that_is_none_is_refused(written, metrics):
    given = claims(metrics["identity"]["slug"])
    given["rows"][1]["bits_per_value"] = float("nan")
    with refused(NonFinite, None, "claims"):
        written(given)


def test_what_a_name_says_stays_in_its_cell():
    given = claims("m")
    given["rows"][1]["mechanism_variant"] = "a | b <b>[x](y)"
    table = context(given, "m", "GATE.md")["table"]
    assert "<b>" not in table and "[x]" not in table and {line.count(" | ") for line in table.splitlines()[2:]} == {8}


@pytest.mark.parametrize(
    ("certified", "coded", "said"),
    [
        (0, 0, "No row that compresses was measured."),
        (0, 1, "The one row that compresses is not certified."),
        (1, 1, "The one row that compresses is certified: it earns `supported`."),
        (0, 3, "Of 3 rows that compress, none are certified."),
        (2, 3, "Of 3 rows that compress, 2 are certified: they earn `supported`."),
    ],
)
def test_one_row_and_many_are_told_in_english(certified, coded, said):
    assert sentence(certified, coded, "") == said


def test_how_fast_a_row_was_is_no_part_of_the_findings():
    slow, fast = claims("m"), claims("m")
    fast["rows"][1]["throughput_tok_s"] = 9999.0
    assert context(slow, "m", "GATE.md") == context(fast, "m", "GATE.md")


def test_other_places_are_told():
    given = claims("m")
    given["rows"][2] |= {"device": "cuda", "context_tokens": 4096}
    found = context(given, "m", "GATE.md")
    assert found["sentence"].endswith("Measured on cpu and cuda, bfloat16, 512 and 4096 tokens of context.")
