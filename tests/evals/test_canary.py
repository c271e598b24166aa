"""What is scored past the codec is refused, on sides that are made up."""

from __future__ import annotations

import pytest

from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.evals.backend import CacheUse, ScoreResult, Side, Sides, WriteResult
from kvlab.evals.canary import LEAST, SHORTEST, WRITTEN, Guard, distance
from refusals import refused


class Fake(Side):
    """Answers that are off by `moved` nats a token, or by another length."""

    what, kv_cache_dtype, cache_class = "hadamard", "bfloat16", "Fake"

    def __init__(self, moved: float = 0.0, longer: int = 0, blind: tuple[str, ...] = ()):
        self.moved, self.longer, self.blind = moved, longer, blind
        self.asked: list[int] = []
        self.began = 0

    def score(self, requests):
        self.asked += [len(request.context) + len(request.continuation) for request in requests]
        return [ScoreResult([-1.0 - self.moved] * len(request.continuation), False) for request in requests]

    def write(self, requests):
        self.asked += [len(request.context) for request in requests]
        return [WriteResult("", [-1.0 - self.moved] * (request.tokens + self.longer)) for request in requests]

    def begin(self):
        self.began += 1

    def seen(self):
        return CacheUse(0, 0, 0, 0)

    def refuse_blind(self, kind):
        if kind in self.blind:
            raise CapabilityError(f"{kind} reads nothing", code="capability.reads-nothing")


def guard(variant: float = 0.01, k: float = 1.0, v: float = 1.0, **options) -> Guard:
    return Guard(Sides(Fake(), Fake(variant, **options), {"k": Fake(k), "v": Fake(v)}))


IDS = list(range(40))


@pytest.mark.parametrize("kind", ["score", "write"])
def test_a_codec_that_is_read_passes_once_for_each_kind(kind):
    found = guard()
    found.check(kind, IDS)
    found.check(kind, [])
    assert len(found.sides.plain.asked) == 1 and found.done == {kind}
    other = "write" if kind == "score" else "score"
    found.check(other, IDS)
    assert len(found.sides.plain.asked) == 2
    assert found.sides.variant.began == 1  # counting begins after the first canary, and goes on after the second


@pytest.mark.parametrize(("stream", "moved"), [("k", 0.0), ("v", 0.0), ("v", LEAST * 0.9)])
@pytest.mark.parametrize("kind", ["score", "write"])
def test_one_bit_that_moves_nothing_is_a_cache_that_nobody_reads(kind, stream, moved):
    with refused(CodecNotActive, "not-active.canary", f"on {stream.upper()} ", f"`{kind}`"):
        guard(**{stream: moved}).check(kind, IDS)


def test_a_variant_that_changes_nothing_at_all_is_none():
    with refused(CodecNotActive, "not-active.no-change", "hadamard", "`score`"):
        guard(variant=0.0).check("score", IDS)


def test_a_variant_that_writes_another_text_has_changed_something():
    guard(variant=0.0, longer=1).check("write", IDS)
    assert distance([0.0], [0.0, 0.0]) == float("inf")


def test_a_kind_that_is_blind_by_construction_is_refused_before_anything_is_asked():
    found = guard(blind=("score",))
    with refused(CapabilityError, "capability.reads-nothing", "score"):
        found.check("score", IDS)
    assert found.sides.plain.asked == []
    found.check("write", IDS)


def test_a_text_must_be_long_enough_to_show_it():
    with refused(CapabilityError, "capability.short-request", f"{SHORTEST - 1} tokens", SHORTEST):
        guard().check("score", IDS[: SHORTEST - 1])


def test_what_is_asked_is_short():
    found = guard()
    found.check("write", list(range(5000)))
    assert found.sides.plain.asked == [512] and WRITTEN < 20
