"""The harness says pass only where everything was found right, and never gives a speed-up that it did not measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import ParamsError
from kvlab_pipeline.studies.restore.harness import (
    ARMS,
    BROKEN,
    CONSUME,
    CONTROLS,
    DAMAGED,
    FOREIGN,
    OFF,
    VERIFY,
    Doubt,
    RestoreVerdict,
    Trials,
    VariantRun,
    judge,
)
from refusals import refused

PREFIX = 64
ANSWER = (5, 6, 7)
RAN = {"model_hash": "5eed", "threads": "1"}
COLD = VariantRun(ANSWER, consumed=False, prefix_len=0, prefill_ms=40.0, setting=RAN)
WARM = VariantRun(ANSWER, consumed=True, prefix_len=PREFIX, prefill_ms=4.0, load_ms=2.0, setting=RAN)
BOTH = replace(WARM, agrees=True)


def arms(**changes) -> dict[str, Trials]:
    """Three honest arms, each with three trials; a change replaces an arm's trials."""
    trials = {OFF: (COLD,) * 3, CONSUME: (WARM,) * 3, VERIFY: (BOTH,) * 3} | changes
    return {name: found for name, found in trials.items() if found is not None}


def controls(**changes) -> dict[str, VariantRun]:
    found = {name: replace(COLD, codes=(due,)) for name, due in CONTROLS.items()} | changes
    return {name: run for name, run in found.items() if run is not None}


def verdict(of: dict | None = None, beside: dict | None = None) -> RestoreVerdict:
    return judge(of or arms(), controls() if beside is None else beside, PREFIX)


def codes(found: RestoreVerdict) -> list[Doubt]:
    return [reason.code for reason in found.reasons]


def test_honest_arms_pass_with_the_ratio_of_median_prefill_times_alone():
    noisy = tuple(replace(WARM, prefill_ms=time, load_ms=1000.0) for time in (4.0, 5.0, 500.0))
    found = verdict(arms(consume=noisy))
    assert (found.outcome, found.reasons, found.speedup) == ("pass", (), 40.0 / 5.0)


def some(trial: VariantRun, **change) -> tuple[VariantRun, ...]:
    """Three trials, of which the second is changed."""
    return trial, replace(trial, **change), trial


OTHER = (5, 9, 7)
CASES = {
    "the consuming arm is nondeterministic": (arms(consume=some(WARM, tokens=OTHER)), Doubt.NOT_REPEATABLE),
    "the verifying arm is nondeterministic": (arms(verify=some(BOTH, tokens=OTHER)), Doubt.NOT_REPEATABLE),
    "restoring is disabled": (
        arms(consume=(replace(WARM, consumed=False, prefix_len=0, load_ms=None),) * 3),
        Doubt.NOT_RESTORED,
    ),
    "one trial did not restore": (arms(consume=some(WARM, consumed=False, prefix_len=0)), Doubt.NOT_RESTORED),
    "too little was restored": (arms(consume=some(WARM, prefix_len=PREFIX - 16)), Doubt.PREFIX_SHORT),
    "a planted difference": (arms(consume=(replace(WARM, tokens=OTHER),) * 3), Doubt.TOKENS_DIFFER),
    "a shorter answer": (arms(verify=(replace(BOTH, tokens=ANSWER[:2]),) * 3), Doubt.TOKENS_DIFFER),
    "the verifying arm disagrees with itself": (arms(verify=some(BOTH, agrees=False)), Doubt.VERIFY_DISAGREES),
    "the arm without is nondeterministic": (arms(off=some(COLD, tokens=OTHER)), Doubt.OFF_NOT_REPEATABLE),
    "the arm without is warm": (arms(off=some(COLD, consumed=True, prefix_len=PREFIX)), Doubt.OFF_NOT_COLD),
    "the arm without says cold and has a prefix": (arms(off=some(COLD, prefix_len=16)), Doubt.OFF_NOT_COLD),
    "nobody knows whether the arm without was cold": (arms(off=some(COLD, consumed=None)), Doubt.MISSING),
    "nobody knows whether it was restored": (arms(consume=some(WARM, consumed=None)), Doubt.MISSING),
    "nobody knows how much was restored": (arms(consume=some(WARM, prefix_len=None)), Doubt.MISSING),
    "no tokens were kept": (arms(consume=some(WARM, tokens=None)), Doubt.MISSING),
    "a cold time is missing": (arms(off=some(COLD, prefill_ms=None)), Doubt.MISSING),
    "a warm time is missing": (arms(consume=some(WARM, prefill_ms=None)), Doubt.MISSING),
    "a load time is missing": (arms(consume=some(WARM, load_ms=None)), Doubt.MISSING),
    "an absent time dressed as zero": (arms(consume=some(WARM, prefill_ms=0.0)), Doubt.IMPOSSIBLE),
    "a time that is no number": (arms(off=some(COLD, prefill_ms=float("nan"))), Doubt.IMPOSSIBLE),
    "verify compared nothing": (arms(verify=some(BOTH, agrees=None)), Doubt.MISSING),
    "two repeats": (arms(off=(COLD,) * 2), Doubt.FEW_REPEATS),
    "no repeats": (arms(consume=()), Doubt.FEW_REPEATS),
    "an arm that did not run": (arms(verify=None), Doubt.NO_SUCH_ARM),
    "arms of different models": (
        arms(off=(replace(COLD, setting=RAN | {"model_hash": "0dd"}),) * 3),
        Doubt.SETTINGS_DIFFER,
    ),
    "one trial of an arm ran with more threads": (
        arms(consume=some(WARM, setting=RAN | {"threads": "2"})),
        Doubt.SETTINGS_DIFFER,
    ),
    "an arm that does not say what it ran": (arms(off=(replace(COLD, setting={}),) * 3), Doubt.SETTINGS_DIFFER),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_wrong_with_an_arm_is_named_and_never_passes(name):
    of, doubt = CASES[name]
    found = verdict(of)
    assert doubt in codes(found)
    assert found.outcome == ("fail" if doubt in BROKEN else "inconclusive")
    assert found.speedup is None


def control(name: str, **change) -> dict[str, VariantRun]:
    return controls(**{name: replace(COLD, codes=(CONTROLS[name],), **change) if change else COLD})


CONTROL_CASES = {
    "damage is restored from": (control(DAMAGED, consumed=True, prefix_len=PREFIX), Doubt.CONTROL_RESTORED),
    "another prompt's is restored from": (control(FOREIGN, consumed=True, prefix_len=PREFIX), Doubt.CONTROL_RESTORED),
    "what is left of damage is wrong": (control(DAMAGED, tokens=OTHER), Doubt.CONTROL_TOKENS),
    "refused for no reason": (control(DAMAGED), Doubt.CONTROL_OTHER_REASON),
    "refused for something else": (
        controls(foreign=replace(COLD, codes=("model",))),
        Doubt.CONTROL_OTHER_REASON,
    ),
    "not run": (controls(damaged=None), Doubt.CONTROL_MISSING),
    "ran something else": (control(FOREIGN, setting=RAN | {"threads": "2"}), Doubt.SETTINGS_DIFFER),
    "says nothing": (control(FOREIGN, consumed=None), Doubt.CONTROL_MISSING),
}


@pytest.mark.parametrize("name", CONTROL_CASES)
def test_a_control_has_to_be_refused_for_its_own_reason_and_answered_right(name):
    beside, doubt = CONTROL_CASES[name]
    found = verdict(beside=beside)
    assert codes(found) == [doubt]
    assert found.outcome == ("fail" if doubt in BROKEN else "inconclusive")


def test_what_is_broken_outweighs_what_is_missing():
    found = verdict(arms(off=some(COLD, prefill_ms=None), consume=(replace(WARM, tokens=OTHER),) * 3))
    assert set(codes(found)) == {Doubt.MISSING, Doubt.TOKENS_DIFFER} and found.outcome == "fail"


def test_where_the_arm_without_repeats_nothing_the_others_are_not_held_against_it():
    found = verdict(arms(off=some(COLD, tokens=OTHER), consume=(replace(WARM, tokens=(1,)),) * 3))
    assert codes(found) == [Doubt.OFF_NOT_REPEATABLE]


def test_nothing_expected_is_nothing_proven():
    with refused(ParamsError, None, "expected_prefix is 0"):
        judge(arms(), controls(), 0)


FIELDS = st.sampled_from(["tokens", "consumed", "prefix_len", "prefill_ms", "load_ms", "agrees"])


@given(st.lists(st.tuples(st.sampled_from(ARMS), st.integers(0, 2), FIELDS), min_size=1, max_size=6))
def test_taking_what_was_measured_away_never_helps(holes):
    """Only the fields that an arm has to have keep it from passing, and a lack of them is never a failure."""
    honest = {name: list(trials) for name, trials in arms().items()}
    for name, number, field in holes:
        honest[name][number] = replace(honest[name][number], **{field: None})
    found = verdict(arms(**honest))
    needed = {OFF: {"load_ms", "agrees"}, CONSUME: {"agrees"}, VERIFY: {"prefill_ms", "load_ms"}}
    matters = any(field not in needed[name] for name, _, field in holes)
    assert found.outcome == ("inconclusive" if matters else "pass")
    assert (found.speedup is None) == matters


def test_every_doubt_has_a_case():
    assert {doubt for _, doubt in (*CASES.values(), *CONTROL_CASES.values())} == set(Doubt)
