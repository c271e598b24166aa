"""Where it is open whether the engines agree: numbers stay, and no sentence lays one to the engine."""

from __future__ import annotations

import copy
import re

import pytest

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import HELD
from kvlab_pipeline.report import claims, comparison, figures, findings, readme
from kvlab_pipeline.report import metrics as made_of
from kvlab_pipeline.report.verdict import judge
from pipeline.report.example_metrics import build, verdict
from pipeline.report.synthetic import Effects, small_params, write_results

NEEDED = 43117


def opened(metrics: dict, needed: int | None = NEEDED, jitters: float = 0.1) -> dict:
    """Open metrics; a rounding error moves the codec's own result `jitters` times as far as the other engine is."""
    codec = copy.deepcopy(metrics["agreement"]["codec"])
    for one in codec.values():
        one["jitter_kl"]["value"] = jitters * one["cross_kl"]["value"]
    told = {"state": "open", "windows_needed": needed, "codec": codec}
    return metrics | {"agreement": metrics["agreement"] | told}


def rendered(folder, metrics: dict, params, judged: dict | None = None) -> str:
    findings.write(params, metrics, judged or verdict(metrics), folder / "FINDINGS.md")
    return (folder / "FINDINGS.md").read_text()


def rows(text: str, name: str) -> list[str]:
    return [
        line for line in text.splitlines() if line.startswith(f"| {name} |") and ("clear of" in line or HELD in line)
    ]


@pytest.fixture(scope="module")
def params():
    return small_params(studies=[])


def test_the_engine_s_share_is_printed_and_not_read(tmp_path, params):
    metrics = build(3)
    share = metrics["gap"]["measures"]["kl"]["parts"][0]
    assert share["factor"] == "engine" and not fmt.contains_zero(share["share"])
    agreed, text = (rendered(tmp_path, one, params) for one in (metrics, opened(metrics)))
    for name in ("`engine`", "which engine runs the model"):
        assert rows(agreed, name) and all("clear of zero" in row for row in rows(agreed, name))
        assert rows(text, name) and all(HELD in row and "clear of" not in row for row in rows(text, name))
    assert rows(text, "`variance_ratio`") == rows(agreed, "`variance_ratio`") != []
    assert "**Equivalent**" in agreed and "**Equivalent**" not in text and "**Open.**" in text
    assert text.count(f"About {NEEDED} windows would decide it ({fmt.POST_HOC}).") >= 3
    assert "Withheld" not in text


def test_no_sentence_on_the_engine_counts_as_resolved(params):
    metrics = build(3)
    agreed, told = claims.derived(metrics), claims.derived(opened(metrics))
    on_engine = [one for one in told if one["of_engine"]]
    assert {one["about"] for one in on_engine} >= {"agreement", "gap", "residual"}
    assert any(map(claims.resolved, (one for one in agreed if one["of_engine"])))
    for one in on_engine:
        words = claims.sentence(one)
        assert not claims.resolved(one) and HELD in words and "raises" not in words and "lowers" not in words
        assert one["windows_needed"] >= NEEDED
    others = [one for one in told if not one["of_engine"]]
    assert others == [one for one in agreed if not one["of_engine"]]
    assert not [one for one in others if "`engine` going" in one["subject"]]


def test_when_no_number_of_windows_decides_it_that_is_said(tmp_path, params):
    assert "No number of windows would decide it" in rendered(tmp_path, opened(build(), None), params)


def test_where_a_rounding_error_moves_as_much_windows_are_not_what_is_missing(tmp_path, params):
    text = rendered(tmp_path, opened(build(), jitters=0.9), params)
    assert text.count("`baseline.jitters` averages") >= 3
    assert "windows would decide it" not in text


def test_the_figure_hatches_the_engine_s_bar():
    drawn = figures.FIGURES["gap_shapley"]
    table = drawn.table(opened(build()))
    assert table.filter(name="engine")["kind"].to_list() == ["held"]
    (panel,) = drawn.describe(table).panels
    by_name = dict(zip(table["name"], panel.marks, strict=True))
    assert by_name["engine"].look.hatched and not by_name["variance_ratio"].look.hatched


def test_scattered_results_are_open_and_may_still_be_quoted(tmp_path, params):
    """Planted through the result files: float32 engines whose few windows scatter too much to tell."""
    there = write_results(tmp_path, params, Effects(float32_jitter=0.6))
    metrics = made_of.build(params, there.sources)
    judged = judge(params, metrics)
    assert metrics["agreement"]["state"] == "open"
    assert judged["publishable"] and judged["cross_engine_allowed"]
    (condition,) = [one for one in judged["preconditions"] if "engines" in one["name"]]
    assert condition["holds"] and "whether they agree is open" in condition["detail"]
    text = rendered(tmp_path, metrics, params, judged)
    assert rows(text, "`engine`") and all(HELD in row for row in rows(text, "`engine`"))
    assert "Both engines ran CPU kernels" in text


def test_the_headline_marks_it_and_its_numbers_say_so(tmp_path):
    metrics = opened(build())
    page = tmp_path / "README.md"
    page.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    readme.update(page, metrics, verdict(metrics))
    text = page.read_text()
    assert re.search(rf"`engine` [^;]+; {HELD}", text) and "the share of `engine` is no finding" in text
    assert readme.check(page) == []


# -------------------------------------------------------------------------------- across the models


def shared(share: dict, sign: float = 1.0, width: float = 0.1) -> None:
    """Plant a share's interval."""
    value = abs(share["value"]) * sign
    share |= {"value": value, "low": value - width * abs(value), "high": value + width * abs(value)}


@pytest.fixture(scope="module")
def models(params, tmp_path_factory):
    """Three models, planted through the result files, of one effect of `variance_ratio`."""
    found = []
    for number, slug in enumerate(("one", "two", "three")):
        there = write_results(tmp_path_factory.mktemp(slug), params, Effects(seed=number))
        metrics = made_of.build(params, there.sources)
        own = {"slug": slug, "device": "cpu", "corpus_hash": slug}  # as of models that share no tokenizer
        found.append(metrics | {"identity": metrics["identity"] | own})
    return found


def across(found: list[dict]) -> dict[str, dict]:
    return {one["factor"]: one for one in comparison.build(found)["across"]}


def part(metrics: dict, factor: str) -> dict:
    return next(p["share"] for p in metrics["gap"]["measures"]["kl"]["parts"] if p["factor"] == factor)


def test_what_holds_on_all_models_says_so(models):
    found = across(models)["variance_ratio"]
    assert found["verdict"] == "holds on all 3: raises KL"
    for one, metrics in zip(found["models"], models, strict=True):
        kl = metrics["gap"]["measures"]["kl"]
        fraction = one["of_gap"]
        assert fraction["value"] == pytest.approx(part(metrics, "variance_ratio")["value"] / kl["gap"]["value"])
        assert fraction["low"] < 0.06 / 0.067 < fraction["high"]
    sums = [sum(row["models"][i]["of_gap"]["value"] for row in across(models).values()) for i in range(3)]
    assert sums == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("signs", "widths", "verdict"),
    [
        ((1, 1, 1), (0.1, 2, 0.1), "holds on 2 of 3: raises KL there"),
        ((-1, -1, -1), (0.1, 0.1, 0.1), "holds on all 3: lowers KL"),
        ((1, -1, 1), (0.1, 0.1, 2), "models disagree: raises KL on 1, lowers it on 1"),
        ((1, 1, 1), (2, 2, 2), "open on all 3"),
    ],
)
def test_the_verdict_over_models_counts_them(models, signs, widths, verdict):
    found = copy.deepcopy(models)
    for metrics, sign, width in zip(found, signs, widths, strict=True):
        shared(part(metrics, "protocol"), sign, width)
    assert across(found)["protocol"]["verdict"] == verdict


def test_two_models_are_too_few_and_one_is_no_comparison(models):
    assert across(models[:2])["variance_ratio"]["verdict"].endswith("2 models are too few to say more")
    assert across(models[:1]) == {}
    shared_tokenizer = copy.deepcopy(models)
    shared_tokenizer[2]["identity"]["corpus_hash"] = shared_tokenizer[1]["identity"]["corpus_hash"]
    assert across(shared_tokenizer)["variance_ratio"]["verdict"].endswith(
        "3 models of 2 families are too few to say more"
    )


def test_a_model_on_which_the_engines_are_open_or_differ_does_not_count(models):
    found = [models[0], opened(models[1]), copy.deepcopy(models[2])]
    found[2]["agreement"] |= {"state": "differ"}
    found[2]["agreement_why"] = ["they drift"]
    engine = across(found)["engine"]
    assert [one["reading"] for one in engine["models"]] == ["raises", "open", "withheld"]
    assert engine["verdict"] == "holds on 1 of 3: raises KL there"
    assert engine["models"][2]["share"] is engine["models"][2]["of_gap"] is None
    (told,) = [one for one in comparison.build(found)["claims"] if "`engine`" in one["subject"]]
    assert told["held"] and not claims.resolved(told)


def test_pages_and_headline_lead_with_what_holds(models, params, tmp_path):
    compared = comparison.build(models)
    compared["models"][1]["disclosure"] = "Weights of plain wood."
    findings.write(params, models[0], judge(params, models[0]), tmp_path / "FINDINGS.md", None, compared)
    text = (tmp_path / "FINDINGS.md").read_text()
    page = tmp_path / "README.md"
    page.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    readme.update(page, models[0], judge(params, models[0]), comparison=compared)
    for written in (text, page.read_text()):
        assert "`variance_ratio`" in written and "holds on all 3: raises KL" in written
        assert "Both engines ran CPU kernels" in written and "Weights of plain wood." in written
    assert readme.check(page) == []
    front = text.partition("## What is open")[0]
    assert "Over the 3 models of this run: " in front and "`variance_ratio` holds on all 3" in front
