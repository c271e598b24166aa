import copy
import json

import pytest

from kvlab.core.errors import MissingResult
from kvlab.core.params import VerdictSection
from kvlab.stats.power import power_factor
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.verdict import decide, judge, reasons, windows_to_settle
from kvlab_pipeline.studies.settings import read_params
from pipeline.report.synthetic import Effects, small_params, write_results
from refusals import refused

LIMITS = VerdictSection(accept_ppl=0.01, accept_top1=0.95, marginal_ppl=0.03, marginal_top1=0.85)
EXACT = VerdictSection(accept_ppl=0.25, accept_top1=0.75, marginal_ppl=0.5, marginal_top1=0.5)  # exact in binary
GOOD = (0.96, 0.97)


def estimate(low, high, value=None, n=32):
    value = (low + high) / 2 if value is None else value
    return {"value": value, "low": low, "high": high, "n_windows": n, "n_tokens": 4064}


def word(ppl, top1=GOOD, limits=LIMITS):
    return decide(limits, estimate(*ppl), estimate(*top1))


@pytest.mark.parametrize(
    ("ppl", "top1", "expected"),
    [
        ((1.001, 1.009), GOOD, "ACCEPT"),
        ((0.992, 1.009), GOOD, "ACCEPT"),  # straddles no change
        ((0.991, 0.999), GOOD, "ACCEPT"),
        ((1.001, 1.009), (0.94, 0.97), "MARGINAL"),  # top-1 misses ACCEPT
        ((1.002, 1.02), GOOD, "MARGINAL"),
        ((0.98, 1.02), GOOD, "MARGINAL"),
        ((1.02, 1.04), GOOD, "INCONCLUSIVE"),
        ((0.96, 1.02), GOOD, "INCONCLUSIVE"),  # better perplexity is a change too
        ((0.95, 1.05), GOOD, "INCONCLUSIVE"),
        ((1.031, 1.05), GOOD, "REJECT"),
        ((0.9, 0.96), GOOD, "REJECT"),
        ((1.001, 1.009), (0.80, 0.84), "REJECT"),  # top-1 alone rejects
        ((0.95, 1.05), (0.80, 0.84), "REJECT"),
        ((1.001, 1.009), (0.80, 0.90), "INCONCLUSIVE"),
    ],
)
def test_verdict_table(ppl, top1, expected):
    assert word(ppl, top1) == expected


def test_a_bound_on_its_threshold_has_not_passed():
    inside, on = (1.0, 1.2), (1.0, 1.25)
    assert word(inside, (0.8, 0.9), EXACT) == "ACCEPT"
    assert word(on, (0.8, 0.9), EXACT) == "MARGINAL"
    assert word(inside, (0.75, 0.9), EXACT) == "MARGINAL"
    assert word((1.0, 1.5), (0.8, 0.9), EXACT) == "INCONCLUSIVE"
    assert word((1.5, 2.0), (0.8, 0.9), EXACT) == "INCONCLUSIVE"
    assert word((1.5 + 1e-9, 2.0), (0.8, 0.9), EXACT) == "REJECT"
    assert word(inside, (0.5, 0.9), EXACT) == "INCONCLUSIVE"
    assert word((1.0, 2.0), (0.4, 0.5), EXACT) == "INCONCLUSIVE"
    assert word((1.0, 2.0), (0.4, 0.5 - 1e-9), EXACT) == "REJECT"


POWERED = power_factor(0.95)


def test_windows_needed_follow_the_square_law():
    # 1 % inside the MARGINAL limit with sides of 2 %, top-1 far inside: four times the windows, for even odds
    assert windows_to_settle(LIMITS, estimate(1.0, 1.04), estimate(*GOOD)) == pytest.approx(128 * POWERED, abs=1)
    # 1 % beyond the MARGINAL limit with sides of 3 %: nine times
    assert windows_to_settle(LIMITS, estimate(1.01, 1.07), estimate(*GOOD)) == pytest.approx(288 * POWERED, abs=1)
    # top-1 5 % below its limit with sides of 10 %: four times
    needed = windows_to_settle(LIMITS, estimate(1.03, 1.05, 1.03), estimate(0.7, 0.9))
    assert needed == pytest.approx(128 * POWERED, abs=1)


def test_the_slower_of_two_conditions_counts():
    needed = windows_to_settle(LIMITS, estimate(0.98, 1.03, 1.005), estimate(0.93, 0.97, 0.955))
    # ACCEPT waits for top-1, MARGINAL for nothing but a little perplexity: it comes first
    assert needed == pytest.approx(32 * POWERED, abs=1)


def test_on_the_deciding_threshold_no_number_of_windows_is_enough():
    assert windows_to_settle(EXACT, estimate(1.25, 1.75, 1.5), estimate(0.8, 0.9)) is None


def test_windows_needed_do_settle_it():
    ppl, top1 = estimate(0.97, 1.05, 1.01), estimate(0.82, 0.94, 0.9)
    assert decide(LIMITS, ppl, top1) == "INCONCLUSIVE"
    needed = windows_to_settle(LIMITS, ppl, top1)
    assert needed > 32

    def with_windows(given, n):
        shrink = (32 / n) ** 0.5
        low, high = (given["value"] + shrink * (given[end] - given["value"]) for end in ("low", "high"))
        return estimate(low, high, given["value"], n)

    assert decide(LIMITS, with_windows(ppl, needed), with_windows(top1, needed)) == "MARGINAL"
    assert decide(LIMITS, with_windows(ppl, needed // 4), with_windows(top1, needed // 4)) == "INCONCLUSIVE"


def test_reasons_say_where_the_intervals_lie():
    words = reasons(LIMITS, estimate(0.998, 1.004), estimate(0.80, 0.90))
    assert "0 to 0.4 %: inside the ACCEPT limit" in words[0]
    assert "80 to 90 %: across the MARGINAL limit" in words[1]


# ---------------------------------------------------------------------------- on whole metrics


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gate"), small_params())


def make(folder, params, effects=None):
    paths = write_results(folder, params, effects)
    return build(params, paths.sources)


def failing(verdict):
    return [condition["name"] for condition in verdict["preconditions"] if not condition["holds"]]


@pytest.mark.full
def test_shape(whole):
    params = small_params()
    verdict = judge(params, whole)
    assert set(verdict) == {"cells", "preconditions", "publishable", "cross_engine_allowed"}
    listed = [c for c in whole["cells"] if c["role"] == "codec"]
    assert [c["cell_id"] for c in verdict["cells"]] == [c["cell_id"] for c in listed] and len(listed) > 40
    for cell in verdict["cells"]:
        assert cell["dtype"] == params.gap.dtype and (cell["variance_ratio"] is None) == (cell["label"] == "klt")
        assert (cell["windows_needed"] is None) == (cell["verdict"] != "INCONCLUSIVE")
        assert len(cell["reasons"]) == 2
    assert verdict["publishable"] and verdict["cross_engine_allowed"] and failing(verdict) == []
    json.dumps(verdict, allow_nan=False)


@pytest.mark.full
def test_only_the_thresholds_are_read(whole):
    partial = read_params(json.dumps({"verdict": LIMITS.model_dump()}))
    assert judge(partial, whole) == judge(small_params(), whole)


@pytest.mark.full
def test_planted_damage_earns_its_word(tmp_path):
    params = small_params(studies=["cells"], windows={"test": 32, "eval": 65})
    harmless = Effects(base=1e-6, engine=0, protocol=0, variance_ratio=3.0, pairs={}, nll_per_kl=1.0)
    verdict = judge(params, make(tmp_path, params, harmless))
    words = {(cell["variance_ratio"], cell["label"]): cell["verdict"] for cell in verdict["cells"]}
    assert words[1.0, "kv"] == "ACCEPT"
    assert words[0.95, "kv"] == "REJECT"


@pytest.mark.full
@pytest.mark.parametrize(
    ("effects", "name"),
    [
        (Effects(cross_identity=1e-5), "engines not shown to differ in fp32"),
        (Effects(codec_disagreement=0.1), "engines not shown to differ in fp32"),
    ],
)
def test_disagreeing_engines_withhold_cross_engine_numbers(tmp_path, effects, name):
    params = small_params(studies=[])
    verdict = judge(params, make(tmp_path, params, effects))
    assert failing(verdict) == [name]
    assert not verdict["publishable"] and not verdict["cross_engine_allowed"]


@pytest.mark.full
def test_one_engine_may_publish_but_not_compare(tmp_path):
    params = small_params(studies=[], engines=["hf"])
    verdict = judge(params, make(tmp_path, params))
    assert verdict["publishable"] and not verdict["cross_engine_allowed"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda m: m["identity"].update(calibration_corpus_hash="other"), "calibration and test disjoint"),
        (lambda m: m["identity"].update(calibration_corpus_hash=None), "calibration and test disjoint"),
        (lambda m: m["identity"].update(calibration={}), "one identity"),
        (lambda m: m["identity"]["recipes"].update({"f" * 12: {"k": 1}}), "one identity"),
        (lambda m: m["identity"]["recipes"].pop(coded(m)["recipe_id"]), "one identity"),
        (lambda m: coded(m).update(canary_kl=None), "canary moved the logits"),
        (lambda m: coded(m).update(canary_kl=0.9e-4), "canary moved the logits"),
        (lambda m: coded(m).update(fires=0), "codecs fired"),
        (lambda m: coded(m).update(fires=0, expected_fires=0), "codecs fired"),
    ],
)
def test_each_precondition_can_fail(whole, spoil, name):
    metrics = copy.deepcopy(whole)
    spoil(metrics)
    verdict = judge(small_params(), metrics)
    assert failing(verdict) == [name]
    assert not verdict["publishable"]


def coded(metrics):
    return next(c for c in metrics["cells"] if c["role"] == "codec" and c["dtype"] == metrics["gap"]["dtype"])


@pytest.mark.full
def test_nothing_to_judge_is_said(whole):
    metrics = copy.deepcopy(whole)
    metrics["cells"] = [cell for cell in metrics["cells"] if cell["role"] != "codec"]
    with refused(MissingResult, "missing-result.codec-cell"):
        judge(small_params(), metrics)
