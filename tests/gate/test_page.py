"""GATE.md and claims.json over measured rows: complete, the same every time, not to be broken by what a row says."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl
import pytest
from markdown_it import MarkdownIt

from gate.databases import confirmed
from gate.planted_records import (
    ABSENT,
    BASE,
    GOOD,
    LOSSY,
    OWN,
    WINDOW,
    WINDOWS,
    plant,
    read_back,
    record,
    recounted,
    seconds,
    table,
)
from kvlab.core.errors import UserError
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import Row, checked_row
from kvlab.gate.replay import NOT_REPLAYED
from kvlab.gate.rules import CRITERIA
from kvlab_pipeline.gate_page import samples
from kvlab_pipeline.gate_page.measured_rows import current_of, rows_of
from kvlab_pipeline.gate_page.page import REASONS, TEMPLATE, reasons_of, write
from kvlab_pipeline.gate_page.recommendation import answers
from kvlab_pipeline.gate_page.summary import judged
from kvlab_pipeline.studies.mechanisms.records import write_mechanisms
from refusals import refused

REGISTRY = registry.load()
CURRENT = {
    "reference": current_of(
        {"model_hash": "5eed", "corpus_hash": "7e47"},
        {"model_hash": "5eed", "needles_hash": "2eed1e"},
        {"model_hash": "5eed", "items_hash": "7ex7"},
        "c0de",
    )
}
CONTEXT = Context(REGISTRY, CURRENT)
NASTY = (
    "| a | b |",
    "<script>alert(1)</script>",
    "`code` *bold* _under_ ~~gone~~",
    "![x](https://example.com)",
    "</details><h1>x</h1>",
    "{{ 7 * 7 }} {% raw %}",
    "# heading",
    "naïve 漢字 😀",
)


def objects(**changed) -> list[dict]:
    given = (BASE, GOOD, LOSSY)
    made = rows_of(record("hf", given, **changed), table(*given), "supported")
    own = (BASE, GOOD, OWN)
    return made + rows_of(record("vllm", own, [ABSENT], **changed), table(*own), "supported")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return read_back(tmp_path_factory.mktemp("rows"), objects())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """What the rows were made of."""
    files = plant(tmp_path_factory.mktemp("records"))
    return samples.read([files["hf"], files["vllm"]])


@pytest.fixture(scope="module")
def written(rows, sampled, tmp_path_factory):
    """The folder of a page with everything beside it."""
    folder = tmp_path_factory.mktemp("gate")
    write(rows, CONTEXT, folder / "GATE.md", folder / "claims.json", sampled, replayer=confirmed)
    return folder


@pytest.fixture(scope="module")
def page(written):
    return (written / "GATE.md").read_text()


@pytest.fixture(scope="module")
def why(written):
    return (written / "GATE-reasons.md").read_text()


def whole(path: Path) -> str:
    """A page and its reasons."""
    return path.read_text() + reasons_of(path).read_text()


@pytest.fixture(scope="module")
def claims(written):
    return json.loads((written / "claims.json").read_text())


def html_of(text: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table of the rendered page, without tags."""
    return [
        [
            [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line, re.S)]
            for line in re.findall(r"<tr>(.*?)</tr>", found, re.S)
        ]
        for found in re.findall(r"<table>(.*?)</table>", html_of(text), re.S)
    ]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


# ------------------------------------------------------------------------------------ what it says


def test_the_answer_comes_first(page):
    answer = tables(page)[0]
    klt, fp8 = "kv_compression/klt at 4 bits", "kv_quantization/fp8_e4m3"
    assert [line[1:5] for line in answer[1:]] == [
        ["hf", "snapshot", "context", klt],
        ["vllm", "in_forward", "window", fp8],
        ["vllm", "snapshot", "context", klt],
    ]
    assert [line[5:7] for line in (answer[1], answer[3])] == [["4.25", "16.0"]] * 2
    assert [line[-1] for line in answer[1:]] == [f"yes, of {tried} tried 1 certified" for tried in (2, 1, 1)]
    assert page.split("\n\n")[1].startswith(f"**Certified:** {klt} on hf (snapshot), model reference; ")
    assert "No codec is certified" not in page and len(page.splitlines()) < 125


def test_without_a_certified_row_the_smallest_that_is_only_open_is_a_preview(tmp_path):
    made = objects()
    _, summary = judged(read_back(tmp_path, made), CONTEXT, replayer=confirmed)
    good = next(line for line in summary.rows if line.row_id == "reference/hf/klt-4")
    lossy = next(line for line in summary.rows if line.row_id == "reference/hf/int-2")
    waiting = {"earned": "reviewed_preview", "certified": False, "codes": ("quality_open",), "open": ("needle_recall",)}
    preview = good.model_copy(update=waiting)
    small = preview.model_copy(update={"row_id": "small", "bits_per_value": 1.0})
    unsure = small.model_copy(update={"open": ("kl",)})
    stale = small.model_copy(update={"codes": ("quality_open", "evidence_stale_code")})

    def first(*lines):
        return next(answers(lines))

    assert (first(good, small).row_id, first(good, small).word) == (good.row_id, "certified")
    unproven = good.model_copy(update={"certified": False, "replay": None})
    assert (first(unproven, small).row_id, first(unproven, small).word) == (good.row_id, NOT_REPLAYED)
    assert (first(unproven).certified, first(good, unproven).word) == (0, "certified")
    assert (first(preview, small, lossy).row_id, first(preview, small, lossy).word) == ("small", "preview")
    assert first(preview, unsure, stale).row_id == preview.row_id
    assert (first(lossy).row_id, first(lossy).word, first(lossy).tried) == (None, "none", 1)
    whole = small.model_copy(update={"row_id": "whole", "mechanism_variant": "archive", "bits_per_value": 0.5})
    told = [(one.row_id, one.whole) for one in answers([whole, preview])]
    assert told == [(preview.row_id, False), ("whole", True)]  # no model runs with it, so it answers another question
    other = small.model_copy(update={"stored_span": "window"})
    assert [one.row_id for one in answers([preview, other])] == [preview.row_id, "small"]  # never beside one another


def test_every_row_is_there_with_what_it_earns(page, why, rows):
    told = dict(re.findall(r"<summary>(.+?): (\w+)</summary>", section(why, "Why each row earns what it earns")))
    _, summary = judged(rows, CONTEXT)
    assert told == {line.row_id: line.earned for line in summary.rows if line.measured}
    assert len(told) == len(rows) - 1  # one was not measured
    (missing,) = tables(section(page, "What was not measured"))
    assert missing[1] == ["reference", "vllm", "kv_quantization/fp8_e5m2", "no AVX-512 | &lt;b&gt;here&lt;/b&gt;"]


def test_the_claims_stand_engine_by_engine_the_baseline_first(page):
    hf, hf_quality, vllm, vllm_quality, finished, _ = tables(section(page, "Claims"))
    assert [line[0] for line in hf[1:]] == ["baseline", "kv_compression/klt", "kv_quantization/int"]
    assert [line[9] for line in hf[1:]] == ["supported", "supported", "too_lossy"]
    assert hf[1][1:8] == ["snapshot", "context", "–", "16.0", "–", f"{BASE.throughput_tok_s:.0f}", "1.000"]
    assert hf[2][1:7] == ["snapshot", "context", "4", "4.25", "–", f"{GOOD.throughput_tok_s:.0f}"]
    assert re.fullmatch(r"0\.25\d* \[0\.2\d+,\s0\.2\d+\]", hf[2][7])
    assert hf[3][10] == "kl, delta_nll, top1_agreement, needle_recall beyond" and hf[2][10] == "–"
    assert [line[0] for line in vllm[1:]] == ["baseline", "kv_quantization/fp8_e4m3"]
    assert [line[0] for line in finished[1:]] == ["baseline", "kv_compression/klt"]
    assert [line[1:3] for line in (vllm[2], finished[2])] == [["in_forward", "window"], ["snapshot", "context"]]
    assert [line[0] for line in hf_quality[1:]] == ["baseline", "klt 4", "int 2"]
    assert [line[1] for line in hf_quality[1:]] == ["–", "snapshot", "snapshot"]
    assert hf_quality[1][2:5] == ["0", "0", "100.0"]
    assert [line[5].split(" [")[0] for line in hf_quality[1:]] == ["90.0", "90.0", "70.0"]
    assert re.fullmatch(r"0\.00\d+ \[0\.00\d+,\s0\.00\d+\]", hf_quality[2][2])
    assert len(vllm_quality) == 3


def second_codec(**changed):
    """Another certified codec on the same engine, by default as large as the first."""
    told = GOOD.model_dump() | {"label": "int 4", "mechanism": "kv_quantization", "mechanism_variant": "int"}
    told |= {"method": "int", "codec": "int", "recipe_id": "another"} | changed
    told["throughput_tok_s"] = WINDOW / median(told["seconds"])
    return type(GOOD).model_validate(told)


def answers_of(tmp_path, *given):
    """What may be claimed of some rows on one engine, and the page that says it."""
    made = {one.label: table(GOOD).with_columns(label=pl.lit(one.label)) for one in given[1:]}
    scores = pl.concat([table(BASE), *made.values()])
    write_mechanisms(tmp_path / "vllm", record("vllm", given), scores)
    found = samples.read([tmp_path / "vllm.json"])
    rows = read_back(tmp_path, rows_of(record("vllm", given), scores, "supported"))
    summary = write(rows, CONTEXT, tmp_path / "GATE.md", samples=found, replayer=confirmed)
    return summary.answers, (tmp_path / "GATE.md").read_text()


def test_the_smallest_is_named_and_never_the_fastest(tmp_path):
    fast = second_codec(seconds=seconds(0.5))
    runs = tuple(recounted(run, kv_bytes=2 * run.kv_bytes) for run in GOOD.evals)
    fast = fast.model_copy(update={"kv_bytes": 2 * GOOD.kv_bytes, "evals": runs})
    (found,), text = answers_of(tmp_path, BASE, GOOD, fast)
    assert (found.row_id, found.certified, found.tried) == ("reference/vllm/klt-4", 2, 2)
    assert "**yes**, of 2 tried 2 certified" in text


def test_a_throughput_s_interval_is_that_of_the_paired_windows(rows, sampled, claims):
    told = {one["row_id"]: one["throughput_ratio"] for one in claims["rows"]}
    own, plain = np.array(GOOD.seconds), np.array(BASE.seconds)
    found = told["reference/hf/klt-4"]
    assert found["value"] == pytest.approx(plain.mean() / own.mean()) and found["n_windows"] == WINDOWS
    assert found["low"] < found["value"] < found["high"]
    paired, doubled = samples.speed(own, 2 * own), samples.speed(own, tuple(2 * own)[::-1])
    assert paired.value == pytest.approx(2) and paired.high - paired.low < 1e-9  # equal windows: nothing is left
    assert doubled.high - doubled.low > 0.001
    assert samples.speed(own, own[:-1]) is samples.speed((1.0,), (1.0,)) is None
    assert {line.throughput_ratio for line in judged(rows, CONTEXT)[1].rows} == {None}  # without the windows' times


def test_the_baseline_s_line_is_what_its_second_run_found(tmp_path, rows, page):
    changed = table(BASE, GOOD)
    second = (pl.col("label") == "baseline") & (pl.col("metric") == "needle_recall") & (pl.col("item") < 8)
    changed = changed.with_columns(variant=pl.when(second).then(0.0).otherwise(pl.col("variant")))
    write_mechanisms(tmp_path / "hf", record("hf", (BASE, GOOD)), changed)
    summary = write(rows, CONTEXT, tmp_path / "GATE.md", samples=samples.read([tmp_path / "hf.json"]))
    line = next(line for line in summary.rows if line.row_id == "reference/hf/baseline")
    assert (line.metrics["needle_recall"].value, line.baseline["needle_recall"].value) == (0.88, 0.9)
    assert line.status == "not_required" and line.earned == "supported"


def test_without_what_rows_were_made_of_the_baseline_has_the_numbers_of_its_evidence(rows, tmp_path):
    write(rows, CONTEXT, tmp_path / "GATE.md")
    text = whole(tmp_path / "GATE.md")
    assert tables(section(text, "Claims"))[1][1][1:] == ["–", "0", "0", "100.0", "–"]


def test_two_pieces_of_evidence_on_one_metric_are_refused(tmp_path):
    made = objects()
    worse = next(one for one in made if one["row_id"] == "reference/hf/klt-4")
    worse["evidence"].append(worse["evidence"][1])
    with refused(UserError, "user.evidence-twice", "needle_recall", "klt-4"):
        judged(read_back(tmp_path, made), CONTEXT)


def test_numbers_that_no_evidence_backs_are_not_told(tmp_path):
    made = objects()
    for one in made:
        if one["row_id"] == "reference/hf/klt-4":
            one["evidence"][0]["metrics"]["kl"]["value"] = 0.0015  # by hand
            one.pop("kl")
    _, summary = judged(read_back(tmp_path, made), CONTEXT)
    line = next(line for line in summary.rows if line.row_id == "reference/hf/klt-4")
    assert line.metrics.keys() == {"needle_recall"} and line.earned == "unsupported"
    assert line.codes == ("evidence_tampered",) and "evidence_tampered" in line.why


def test_what_is_stale_is_said_in_a_word(rows):
    now = {"reference": CURRENT["reference"] | {"code": "newer"}}
    _, summary = judged(rows, Context(REGISTRY, now))
    assert {line.why for line in summary.rows if line.compresses} == {"evidence_stale_code"}
    assert not any(line.metrics for line in summary.rows)


def test_a_ratio_needs_one_baseline_of_the_same_run(tmp_path, sampled):
    made = [one for one in objects() if one["engine"] == "hf"]
    alone = judged(read_back(tmp_path, made[1:]), CONTEXT, sampled)[1]
    assert {line.throughput_ratio for line in alone.rows} == {None}
    sampled = sampled | {("other", made[0]["row_id"]): sampled[made[0]["run"], made[0]["row_id"]]}
    other_run = judged(read_back(tmp_path, [made[0] | {"run": "other"}, *made[1:]]), CONTEXT, sampled)[1]
    assert [line.throughput_ratio for line in other_run.rows if line.compresses] == [None, None]


def test_the_same_row_twice_is_refused(rows):
    with refused(UserError, "user.row-twice", 1):
        judged([*rows, rows[0]], CONTEXT)


def test_rows_that_declare_nothing_are_counted_as_not_judged(tmp_path):
    row = Row(checked_row({"row_id": "x", "model": "m", "engine": "hf", "throughput_tok_s": 1}), source="x")
    write([row], Context(REGISTRY), tmp_path / "GATE.md", tmp_path / "claims.json")
    assert "| not judged | 1 | |" in (tmp_path / "GATE.md").read_text()
    assert set(json.loads((tmp_path / "claims.json").read_text())["counts"].values()) == {0}


def test_no_rows_at_all_are_a_page_too(tmp_path):
    write([], Context(REGISTRY), tmp_path / "GATE.md", tmp_path / "claims.json")
    assert "No row that compresses was measured." in (tmp_path / "GATE.md").read_text()
    assert "What rows are judged by" in (tmp_path / "GATE-reasons.md").read_text()


# --------------------------------------------------------------------------------- the claims as JSON


def test_claims_hold_what_a_page_needs(claims):
    assert claims["schema_version"] == 7 and claims["registry"] == REGISTRY.digest
    assert list(claims["counts"]) == sorted(TIERS) and sum(claims["counts"].values()) == len(claims["rows"])
    good = next(one for one in claims["rows"] if one["row_id"] == "reference/hf/klt-4")
    assert good["earned"] == good["claimed"] == "supported" and good["stored_span"] == "context"
    assert good["metrics"].keys() == {"kl", "delta_nll", "top1_agreement", "needle_recall"}
    assert good["metrics"]["kl"].keys() == {"value", "low", "high", "n"}


def test_claims_are_small(written):
    assert (written / "claims.json").stat().st_size < 2400 * len(objects())


def test_equal_rows_in_any_order_give_equal_bytes(rows, sampled, written, tmp_path):
    write(
        rows[::-1],
        CONTEXT,
        tmp_path / "GATE.md",
        tmp_path / "claims.json",
        dict(reversed(sampled.items())),
        replayer=confirmed,
    )
    for name in ("GATE.md", "GATE-reasons.md", "claims.json"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes(), name


# ------------------------------------------------------------------------------------------ injection


def test_no_page_shows_a_character_by_its_number_where_it_is_harmless(page, why):
    """But for ``no AVX-512 | <b>here</b>``, a reason that is made to be syntax."""
    lines = [line for line in (page + why).splitlines() if "&#" in line]
    assert [line for line in lines if "AVX-512" not in line] == []
    assert all("[0.00" in text for text in (page, why))


def named(text: str, tmp_path: Path) -> str:
    """The page of rows in which every field that may hold any text holds this one."""
    made = objects(model=text, device=text)
    made.append(made[1] | {"row_id": text, "mechanism_variant": text, "evidence": []})
    for one in made:
        if one["support_status"] == "unsupported":
            one["mechanism_notes"] = text
    write(read_back(tmp_path, made), Context(REGISTRY), tmp_path / "GATE.md")
    return whole(tmp_path / "GATE.md")


@pytest.fixture(scope="module")
def benign(tmp_path_factory):
    return outline(named("benign", tmp_path_factory.mktemp("benign")))


@pytest.mark.full
@pytest.mark.parametrize("text", NASTY)
def test_what_a_row_says_does_not_change_the_shape_of_the_page(text, benign, tmp_path):
    nasty = named(text, tmp_path)
    assert outline(nasty) == benign
    shown = re.sub(r"&lt;|&gt;|&amp;|&quot;", unescape, re.sub(r"<[^>]+>", "", html_of(nasty)))
    assert plain(text) in plain(shown)


def outline(text: str) -> dict[str, int]:
    """How often each element of the rendered page begins."""
    return dict(Counter(re.findall(r"<(/?\w+)", html_of(text))))


def unescape(found: re.Match) -> str:
    return {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"'}[found[0]]


def plain(text: str) -> str:
    return "".join(text.split())


# ------------------------------------------------------------------------------------------ the page


def test_the_registry_and_every_criterion_are_named(why):
    (criteria,) = tables(section(why, "What rows are judged by"))
    assert [line[0].replace("=&gt;", "=>") for line in criteria[1:]] == [criterion.name for criterion in CRITERIA]
    assert f"Registry `{REGISTRY.digest}`" in why


@pytest.mark.parametrize("template", [TEMPLATE, REASONS])
def test_no_numeral_is_typed_into_a_template(template):
    prose = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}", "", template.read_text(), flags=re.S)
    assert not re.findall(r"\d", prose)


def test_the_links_of_the_pages_lead_from_where_they_are_written(page, why, root):
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert targets == ["GATE-reasons.md", "../../docs/gate.md", "GATE-reasons.md", "TRUST.md"]
    assert re.findall(r"\]\(([^)]+)\)", why) == ["GATE.md", "TRUST.md"]
    targets = targets[1:]
    assert (root / "results/gate" / targets[0]).resolve().relative_to(root) == Path("docs/gate.md")
