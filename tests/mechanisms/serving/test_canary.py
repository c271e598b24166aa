"""The canary's gate: no variant with failing evidence is ever promoted, whatever it served."""

from __future__ import annotations

import math
import random

import pytest

from kvlab.gate import registry
from kvlab.gate.check import Claim, check
from kvlab.gate.rules import Context
from kvlab_mechanisms.serving.policies.canary import TRANSITIONS, Canary, CanaryRefused, Terms, evidence_missing
from refusals import refused
from validation.gate.corruptions import TODAY, as_row, valid_case

pytestmark = pytest.mark.full


def claim(word="pass", earned="supported", **more) -> Claim:
    status = "completed" if earned == "supported" else "pending"
    return Claim(
        source="rows", row={}, claimed="supported", earned=earned, status=status, word=word, badge="verified",
        findings=(), judgements=(), **more,
    )  # fmt: skip


GOOD = claim()
BAD = [
    None,
    claim("fail"),
    claim("waived"),
    claim("pass", "reviewed_preview"),
    claim("pass", "too_lossy"),
    claim("pass", None),
    claim("fail", None),
]


def running(canary_claim, fraction=0.5, **terms) -> Canary:
    own = Canary(fraction, Terms(**terms))
    own.register("exact", GOOD)
    own.register("klt2", canary_claim)
    own.begin("exact")
    own.stage("klt2")
    return own


def serve(own: Canary, name: str, count: int, errors: int = 0, seconds: float = 0.1) -> None:
    for number in range(count):
        own.record(name, not errors or number % (count // errors) > 0, seconds)


@pytest.mark.parametrize("bad", BAD, ids=lambda one: "none" if one is None else f"{one.word}-{one.earned}")
def test_a_canary_with_failing_evidence_is_never_promoted(bad):
    own = running(bad)
    serve(own, "exact", 1000)
    serve(own, "klt2", 1000)
    with refused(CanaryRefused, "canary.not-promoted", "klt2"):
        own.promote()
    other = Canary()
    other.register("klt2", bad)
    with pytest.raises(CanaryRefused):
        other.begin("klt2")
    own.judge("klt2", GOOD)
    assert own.promote() == "klt2"
    own.judge("exact", bad)
    with pytest.raises(CanaryRefused):
        own.rollback()


@pytest.mark.parametrize("seed", range(30))
def test_no_life_makes_a_variant_with_failing_evidence_active(seed):
    chance, own = random.Random(seed), Canary(0.3, Terms(requests=3))
    claims = {f"v{i}": chance.choice([GOOD, *BAD]) for i in range(6)}
    for name, one in claims.items():
        own.register(name, one)
    for _ in range(400):
        name = chance.choice(list(claims))
        act = chance.choice(["begin", "stage", "record", "record", "record", "promote", "rollback", "judge"])
        try:
            if act == "record":
                own.record(name, chance.random() < 0.99)
            elif act == "judge" and (own.active is None or own.active.name != name):
                claims[name] = chance.choice([GOOD, *BAD])
                own.judge(name, claims[name])
            elif act in ("begin", "stage"):
                getattr(own, act)(name)
            elif act != "judge":
                getattr(own, act)()
        except CanaryRefused:
            pass
        assert own.active is None or evidence_missing(own.active.claim) is None
        assert sum(one.state == "active" for one in own.versions.values()) <= 1
        assert sum(one.state == "canary" for one in own.versions.values()) <= 1


def test_the_gates_own_claims_are_what_counts():
    case, words = valid_case(), {}
    context = Context(registry.parse(case["mechanisms"], case["evals"]), case["current"], today=TODAY)
    for name in ("baseline", "fp8", "preview"):
        (one,) = check([as_row(case["rows"][name])], context).claims
        words[name] = evidence_missing(one)
    assert words["baseline"] is None
    assert words["fp8"] is None
    assert words["preview"] is not None


def test_errors_slowness_and_few_requests_each_keep_it_back():
    own = running(GOOD)
    serve(own, "exact", 500, 5)
    serve(own, "klt2", 49)
    with refused(CanaryRefused, "canary.not-promoted", 49, 50):
        own.promote()
    own = running(GOOD, good=0.1, bad=0.9)
    serve(own, "exact", 500, 5)
    serve(own, "klt2", 96, 8)
    with refused(CanaryRefused, "canary.not-promoted", "8.33 %", "1 %"):
        own.promote()
    own = running(GOOD, slowest=0.5)
    serve(own, "exact", 100)
    serve(own, "klt2", 100, seconds=0.6)
    with refused(CanaryRefused, "canary.not-promoted", "99th", 0.5):
        own.promote()


def test_a_canary_that_fails_always_is_taken_back_early():
    own = running(GOOD)
    serve(own, "exact", 100)
    serve(own, "klt2", 5, 5)
    assert own.canary is None
    with pytest.raises(CanaryRefused):
        own.promote()


def test_a_promotion_is_undone_by_a_rollback():
    own = running(GOOD)
    serve(own, "exact", 100)
    serve(own, "klt2", 100)
    own.promote()
    assert (own.active.name, own.versions["exact"].state) == ("klt2", "retired")
    assert own.rollback() == "exact"
    assert own.versions["klt2"].state == "retired"
    with refused(CanaryRefused, "canary.nothing-before"):
        own.rollback()


@pytest.mark.parametrize("state", list(TRANSITIONS))
def test_what_is_no_transition_is_refused(state):
    for target in TRANSITIONS.keys() - set(TRANSITIONS[state]):
        own = Canary()
        one = own.register("a", GOOD)
        one.state = state
        with refused(CanaryRefused, "canary.transition", state, target):
            own._move(one, target)


def test_the_split_is_sticky_and_grows_one_way():
    own = running(GOOD, 0.1)
    before = {key: own.route(key) for key in range(20_000)}
    share = sum(one == "klt2" for one in before.values())
    assert abs(share - 2000) < 4 * math.sqrt(20_000 * 0.1 * 0.9)
    assert all(own.route(key) == one for key, one in before.items())
    own.fraction = 0.3
    assert all(own.route(key) == "klt2" for key, one in before.items() if one == "klt2")
