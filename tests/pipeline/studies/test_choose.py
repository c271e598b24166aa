"""The search for favoured layers, against judges whose answers are planted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.block.studied import coded_layers
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CodecNotActive
from kvlab.core.paramfile import overlay
from kvlab.core.recipe import StreamRecipe
from kvlab.core.records import read_json
from kvlab.engines.base import context_of
from kvlab.measure.coding import CleanCapture
from kvlab_pipeline.studies.mitigations import plan
from kvlab_pipeline.studies.mitigations import search as choose
from kvlab_pipeline.studies.mitigations.plan import Mitigation, Step
from kvlab_pipeline.studies.mitigations.search import (
    best_last,
    boundary,
    excess,
    hot,
    klt_boundary,
    klt_hot,
    search,
    together,
)
from kvlab_pipeline.studies.settings import Settings
from refusals import refused
from tiers import examples

UNCODED = 16


def bits(stream: StreamRecipe) -> float:
    return UNCODED if isinstance(stream, IdentityStream) else stream.bits


class Planted:
    """A judge whose KL is a sum over coded layers, K weighed by `weights`, a quarter of it per bit more.

    Bytes are the recipes' bits. It keeps what it was asked, a list per round.
    """

    def __init__(self, weights, of_v: float = 0.0, floor: float = 0.01):
        self.weights, self.of_v, self.floor, self.rounds = weights, of_v, floor, []

    def steps(self, asked):
        self.rounds.append(asked)
        return [Step(layers=layers, kl=self.kl(arm), bits_per_value=self.spent(arm)) for layers, arm in asked]

    def recipe(self, arm: Mitigation, layer: int):
        special = [one.recipe for one in arm.exceptions if layer in one.layers]
        return special[0] if special else arm.recipe

    def kl(self, arm: Mitigation) -> float:
        total = self.floor
        for layer in arm.layers:
            recipe = self.recipe(arm, layer)
            for stream, weight in ((recipe.k, self.weights[layer]), (recipe.v, self.of_v)):
                if not isinstance(stream, IdentityStream):
                    total += weight * 4.0 ** -bits(stream)
        return total

    def spent(self, arm: Mitigation) -> float:
        coded = {layer: self.recipe(arm, layer) for layer in arm.layers}
        pairs = [(bits(r.k) + bits(r.v)) / 2 for r in coded.values()]
        return (sum(pairs) + UNCODED * (len(self.weights) - len(pairs))) / len(self.weights)


def make(base: dict, n: int = 6, configured=(0,), **changes) -> Settings:
    changes = {
        "model": {"n_layers": n},
        "codec": {"boundary_layers": list(configured), "whiten_skip_layers": []},
        "mitigations": changes,
    }
    return Settings.complete(overlay(base, changes))


def run(judge: Planted, one) -> list[Step]:
    return together(judge, {"it": one})["it"]


def price(n: int, uncoded: int, coded: float = 2.5) -> float:
    """Bits per value of the studied recipe (3 and 2 bits) with some layers uncoded."""
    return (coded * (n - uncoded) + UNCODED * uncoded) / n


# ------------------------------------------------------------------------------- boundary layers


def test_the_dearest_layers_are_found_one_by_one(base_params):
    params = make(base_params, budget=price(6, 3))
    steps = run(judge := Planted([5, 1, 4, 1, 1, 3]), boundary(params, ()))
    assert [step.layers for step in steps] == [(), (0,), (0, 2), (0, 2, 5)]
    assert [step.bits_per_value for step in steps] == [price(6, n) for n in range(4)]
    assert [len(asked) for asked in judge.rounds] == [1, 6, 5, 4]  # what cannot be paid is not asked for


def test_the_budget_holds_to_the_last_bit(base_params):
    for budget, found in ((price(6, 2), 2), (np.nextafter(price(6, 2), 0), 1), (price(6, 3) - 1e-6, 2)):
        steps = run(Planted([5, 1, 4, 1, 1, 3]), boundary(make(base_params, budget=float(budget)), ()))
        assert len(steps[-1].layers) == found


def test_a_start_that_is_beyond_the_budget_stays_as_it_is(base_params):
    params = make(base_params, configured=(1, 4), budget=3.0)
    assert [step.layers for step in run(Planted([9, 1, 1, 1, 1, 1]), boundary(params, (1, 4)))] == [(1, 4)]


def test_it_stops_when_nothing_helps(base_params):
    params = make(base_params, budget=32.0)
    steps = run(Planted([5, 0, 0, 4, 0, 0]), boundary(params, ()))
    assert steps[-1].layers == (0, 3)


def test_some_layer_stays_coded(base_params):
    steps = run(Planted([6, 5, 4, 3, 2, 1]), boundary(make(base_params, budget=32.0), ()))
    assert steps[-1].layers == (0, 1, 2, 3, 4)


def test_of_equals_the_lower_layer_is_taken(base_params):
    params = make(base_params, budget=price(6, 2))
    for _ in range(2):
        assert run(Planted([1] * 6), boundary(params, ()))[-1].layers == (0, 1)


def test_layers_that_only_help_together_are_beyond_a_greedy_search(base_params):
    """It is greedy: it does not find a pair of which each alone is worth less than a third layer."""

    class Pairs(Planted):
        def kl(self, arm):
            free = set(range(6)) - set(arm.layers)
            return 1.0 - 0.2 * (3 in free) - 0.1 * (1 in free) - 0.6 * ({0, 5} <= free)

    steps = run(Pairs([1] * 6), boundary(make(base_params, budget=price(6, 2)), ()))
    assert steps[-1].layers == (1, 3)


@examples(40)
@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=8), budget=st.floats(2.5, 16))
def test_every_step_is_the_best_single_one(base_params, weights, budget):
    params, n = make(base_params, len(weights), budget=budget), len(weights)
    steps = run(Planted(weights), boundary(params, ()))
    for before, after in pairwise(steps):
        (new,) = set(after.layers) - set(before.layers)
        assert weights[new] == max(w for i, w in enumerate(weights) if i not in before.layers) > 0
        assert after.kl < before.kl and after.bits_per_value <= budget
    last = steps[-1]
    left = [w for i, w in enumerate(weights) if i not in last.layers]
    assert len(left) == 1 or max(left) == 0 or price(n, len(last.layers) + 1) > budget


# ------------------------------------------------------------------------------------ hot layers


def test_hot_layers_are_those_that_gain_most_at_equal_bytes(base_params):
    params = make(base_params, configured=())
    judge = Planted([100, 1, 90, 1, 1, 1], of_v=1.0)
    steps = run(judge, hot(params, coded_layers(params)))
    assert steps[0].layers == () and steps[-1].layers == (0, 2)
    curve = judge.steps([((), arm) for arm in plan.uniform(params)])
    gains = {step.layers: excess(step, curve) for step in steps}
    assert gains[()] == pytest.approx(0) and gains[0, 2] == min(gains.values()) < 0
    assert judge.kl(plan.hot(params, (0, 2))) == steps[-1].kl


def test_hot_layers_are_chosen_even_where_they_lose(base_params):
    """K costs nothing, so a bit more for it is wasted; the test split is to say so."""
    params = make(base_params, configured=())
    steps = run(Planted([1e-6] * 6, of_v=1.0), hot(params, coded_layers(params)))
    assert len(steps[-1].layers) == 1


def test_beyond_the_curve_nothing_is_known():
    curve = [Step(layers=(), kl=kl, bits_per_value=at) for kl, at in ((0.4, 3.0), (0.1, 5.0))]
    inside, outside = (Step(layers=(0,), kl=0.1, bits_per_value=at) for at in (4.0, 5.1))
    assert excess(inside, curve) == pytest.approx(np.log(0.1 / 0.2))  # the geometric mean of both
    assert excess(outside, curve) == np.inf


def test_what_costs_nothing_is_best_and_one_point_that_costs_nothing_leaves_the_curve_finite():
    curve = [Step(layers=(), kl=kl, bits_per_value=at) for kl, at in ((0.4, 3.0), (0.1, 5.0), (0.0, 7.0))]
    free, dear, beside = (
        Step(layers=(0,), kl=kl, bits_per_value=at) for kl, at in ((0.0, 4.0), (0.1, 4.0), (1e-6, 6.0))
    )
    assert excess(free, curve) < excess(dear, curve) == pytest.approx(np.log(0.5))
    assert np.isfinite([excess(free, curve), excess(beside, curve)]).all()
    assert excess(Step(layers=(), kl=0.0, bits_per_value=7.0), curve) == 0
    ties = [Step(layers=layers, kl=0.0, bits_per_value=4.0) for layers in ((1,), (1, 2))]
    assert best_last(ties, lambda step: excess(step, curve))[-1].layers == (1,)


def test_a_search_among_arms_that_cost_nothing_ends(base_params):
    params = make(base_params, configured=())
    steps = run(Planted([0] * 6, floor=0.0), hot(params, coded_layers(params)))
    assert [step.layers for step in steps[:1]] == [()] and len(steps[-1].layers) == 1


def test_k_that_has_all_its_bits_has_no_hot_layers(base_params):
    params = make(base_params, configured=()).model_copy(update={"bits": 8})
    assert [step.layers for step in run(Planted([9, 1, 1, 1, 1, 1]), hot(params, coded_layers(params)))] == [()]


def test_klt_gives_bits_to_the_hot_layers_and_takes_them_from_the_others(base_params):
    params = make(base_params, configured=())
    judge = Planted([100, 1, 1, 1, 90, 1])
    steps = run(judge, klt_hot(params))
    assert steps[0].layers == () and steps[-1].layers == (0, 4)
    assert [judge.spent(arm) for _, arm in judge.rounds[-1]] == pytest.approx([4.0] * 4)


def test_klt_leaves_the_one_layer_uncoded_that_is_worth_it(base_params):
    params = make(base_params, configured=(), klt_bits=6.0)
    steps = run(judge := Planted([1, 1, 1, 10**6, 1, 1]), klt_boundary(params))
    assert steps[0].layers == () and steps[-1].layers == (3,)
    assert [judge.spent(arm) for _, arm in judge.rounds[0]] == pytest.approx([6.0] * 7)


def test_what_klt_cannot_pay_is_not_asked_for(base_params):
    params = make(base_params, configured=(), klt_bits=2.5)  # one uncoded layer of 16 bits takes all but nothing
    steps = run(judge := Planted([1] * 6), klt_boundary(params))
    assert [step.layers for step in steps] == [()] and len(judge.rounds[0]) == 1


def test_arms_that_take_other_bytes_than_they_should_are_not_chosen(base_params):
    class Costly(Planted):
        def spent(self, arm):
            return super().spent(arm) * (1.006 if arm.exceptions and arm.exceptions[0].layers == (0,) else 1.0)

    params = make(base_params, configured=())
    assert run(Planted([100, 1, 1, 1, 1, 1]), klt_hot(params))[-1].layers == (0,)
    assert run(Costly([100, 1, 1, 1, 1, 1]), klt_hot(params))[-1].layers == (0, 1)


@examples(60)
@given(n=st.integers(2, 30), klt_bits=st.floats(0.5, 8), of_k=st.integers(1, 8), of_v=st.integers(1, 8), data=st.data())
def test_arms_of_klt_conserve_their_bytes(base_params, n, klt_bits, of_k, of_v, data):
    params = make(base_params, n, configured=(), klt_bits=klt_bits).model_copy(update={"bits": of_k, "v_bits": of_v})
    favoured = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))))
    judge = Planted([1] * n)
    affordable = (plan.klt_affords_boundary, plan.klt_bounded), (plan.klt_affords_hot, plan.klt_hot)
    for affords, arm in affordable:
        if affords(params, len(favoured)):
            made = arm(params, favoured)
            assert judge.spent(made) == pytest.approx(klt_bits)
            for recipe in (made.recipe, *(special.recipe for special in made.exceptions)):
                assert {0.5 - 1e-9 <= stream.bits <= 8 for stream in (recipe.k, recipe.v)} == {True}


# ---------------------------------------------------------------------------------- all together


def test_all_searches_share_their_rounds(base_params):
    params = make(base_params, configured=(0, 5), budget=price(6, 3))
    found = search(params, judge := Planted([9, 1, 8, 7, 1, 1], of_v=0.1))
    assert {name: steps[-1].layers for name, steps in found.items()} == {
        "greedy": (0, 2, 3),
        "moved": (0, 2),
        "extended": (0, 2, 5),
        "hot": (2, 3),
        "klt_boundary": (0,),
        "klt_hot": found["klt_hot"][-1].layers,
    }
    assert len(judge.rounds) == 4  # those of the longest search
    alone = {
        "greedy": boundary(params, ()),
        "extended": boundary(params, (0, 5)),
        "hot": hot(params, coded_layers(params)),
        "klt_hot": klt_hot(params),
    }
    for name, one in alone.items():
        assert run(Planted([9, 1, 8, 7, 1, 1], of_v=0.1), one) == found[name]


def test_a_short_greedy_search_moves_as_far_as_it_came(base_params):
    found = search(make(base_params, configured=(0, 5), budget=32.0), Planted([0, 0, 8, 0, 0, 0], of_v=0.0))
    assert found["moved"] == found["greedy"] and found["moved"][-1].layers == (2,)


def test_the_best_is_last_and_the_first_of_equals():
    steps = [Step(layers=(i,), kl=kl, bits_per_value=1.0) for i, kl in enumerate((3.0, 1.0, 1.0))]
    assert [step.layers for step in best_last(steps, lambda step: step.kl)] == [(0,), (2,), (1,)]
    assert best_last([], lambda step: step.kl) == []


# --------------------------------------------------------------------------------- the real judge


@pytest.fixture
def judge(tiny_params, tiny_windows, tiny_fitted):
    from kvlab.measure.engines import Which
    from kvlab_pipeline.jobs.measure import Lab

    lab = Lab.open(tiny_params, tiny_windows, {"hf": replace(tiny_fitted, rotated=None)})
    lab.engines.get(Which.of("hf", tiny_params.gap.dtype))
    return choose.Judge(lab)


def engine_of(judge):
    (engine,) = judge.lab.engines.running.values()
    return engine


@pytest.mark.engine
def test_the_judge_measures_each_arm_once(tiny_params, judge, monkeypatch):
    passes, windows, engine = [], judge.lab.windows, engine_of(judge)
    for name in ("score", "score_over"):
        scored = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *given, scored=scored: passes.append(0) or scored(*given))
    ones = [((), plan.bounded(tiny_params, "any", ())), ((0,), plan.bounded(tiny_params, "other", (0,)))]
    first = judge.steps(ones)
    probes = 3  # a floor, and canaries of K and of V, once
    clean = 2  # a pass of the model as it is, and the same over its own cache, which arms are held against
    assert len(passes) == (clean + 2) * len(windows.calib) + probes  # and two arms
    again = judge.steps([*reversed(ones), ((7,), ones[0][1])])
    judge.steps([((1,), plan.bounded(tiny_params, "third", (1,)))])
    assert len(passes) == (clean + 2 + clean + 1) * len(windows.calib) + probes
    assert [step.kl for step in again] == [first[1].kl, first[0].kl, first[0].kl]
    assert first[0].kl > first[1].kl > 0 and first[0].bits_per_value < first[1].bits_per_value
    assert [step.layers for step in again] == [(0,), (), (7,)]


@pytest.mark.engine
@pytest.mark.parametrize("dead", ["k", "v"])
def test_a_hook_that_does_not_reach_the_attention_is_refused_before_anything_is_chosen(
    tiny_params, judge, monkeypatch, dead
):
    """One stream of the cache is not read: what was coded of it is thrown away."""
    engine = engine_of(judge)
    score_over = engine.score_over

    def deaf(ids, cache, placement="pre_rope"):
        clean = CleanCapture(context_of(cache))
        engine.score(ids, clean.context, clean, placement)
        unheard = {place: x for place, x in clean.kept.items() if place[1] == dead}
        return score_over(ids, {**cache, **unheard}, placement)

    monkeypatch.setattr(engine, "score_over", deaf)
    with refused(CodecNotActive, "not-active.canary", f" {dead.upper()} "):
        judge.steps([((), plan.bounded(tiny_params, "any", ()))])
    assert judge.known == {}


def test_where_no_study_asks_nothing_is_searched(base_params, tmp_path):
    """No model is read: DVC makes the stage with the defaults too, for which no table of these codecs is fitted."""
    params = make(base_params).model_copy(update={"studies": ("noise",)})
    choose.choose(params, tmp_path / "none", {}, tmp_path / "choice.json")
    assert read_json(tmp_path / "choice.json") == {"asked": False}
