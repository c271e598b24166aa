"""A pass that starts at the first layer that is coded, beside the whole one."""

from __future__ import annotations

import pytest
import torch

from kvlab.core.errors import Fault
from kvlab.engines import registry
from refusals import refused

IDS = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(3)).tolist()
CONTEXT = 64


class Moved:
    """Tap that moves K and V of the layers from one on."""

    def __init__(self, lowest: int):
        self.lowest = lowest

    def __call__(self, layer, part, x):
        if layer < self.lowest or part == "q":
            return None
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(layer), dtype=torch.float32)
        return x + 0.3 * noise.to(x.dtype)


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request, tiny_params, hf_engine):
    from kvlab.core.model import resolve

    if request.param == "float32":
        yield hf_engine
        return
    made = registry.start("hf", resolve(tiny_params.model), request.param, max_tokens=96)
    yield made
    made.close()


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("lowest", [1, 2])
def test_logits_are_those_of_the_whole_pass_to_the_bit(engine, lowest, placement):
    tap, (plain, inputs) = Moved(lowest), engine.score_heard(IDS, CONTEXT)
    whole = engine.score(IDS, CONTEXT, tap, placement)
    assert torch.equal(engine.score_from(lowest, inputs, IDS, CONTEXT, tap, placement), whole)
    assert torch.equal(plain, engine.score(IDS, CONTEXT))
    assert not torch.equal(whole, plain)


def test_the_layers_below_are_not_run(hf_engine):
    seen, inputs = set(), hf_engine.score_heard(IDS, CONTEXT)[1]
    hf_engine.score_from(2, inputs, IDS, CONTEXT, lambda layer, _part, _x: seen.add(layer))
    assert seen == {2}
    hf_engine.score(IDS, CONTEXT, lambda layer, _part, _x: seen.add(layer))
    assert seen == {0, 1, 2}  # and afterwards they are run again


def test_a_pass_that_fails_leaves_the_layers_as_they_were(hf_engine):
    def fail(*_given):
        raise ZeroDivisionError

    before = hf_engine.score(IDS, CONTEXT)
    with pytest.raises(ZeroDivisionError):
        hf_engine.score_from(1, hf_engine.score_heard(IDS, CONTEXT)[1], IDS, CONTEXT, fail)
    assert torch.equal(hf_engine.score(IDS, CONTEXT), before)


@pytest.mark.engine
def test_an_engine_that_cannot_start_there_says_so(vllm_engine):
    assert vllm_engine.score_heard(IDS, CONTEXT)[1] is None
    with refused(Fault, "fault.first-layer", "vllm"):
        vllm_engine.score_from(1, [], IDS, CONTEXT, Moved(1))


class Kept:
    """Tap that keeps K and V of the context."""

    def __init__(self):
        self.cache = {}

    def __call__(self, layer, part, x):
        if part != "q":
            self.cache[layer, part] = x[:, :CONTEXT].clone()


def moved(cache, lowest):
    tap = Moved(lowest)
    return {(layer, part): x if layer < lowest else tap(layer, part, x) for (layer, part), x in cache.items()}


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("lowest", [1, 2])
def test_over_a_cache_too_logits_are_those_of_the_whole_pass_to_the_bit(engine, lowest, placement):
    clean = Kept()
    engine.score(IDS, CONTEXT, clean, placement)
    (plain, inputs), coded = engine.score_over_heard(IDS, clean.cache, placement), moved(clean.cache, lowest)
    assert torch.equal(plain, engine.score_over(IDS, clean.cache, placement))
    whole = engine.score_over(IDS, coded, placement)
    assert torch.equal(engine.score_over_from(lowest, inputs, IDS, coded, placement), whole)
    assert not torch.equal(whole, plain)


@pytest.mark.engine
def test_an_engine_that_cannot_start_there_over_a_cache_says_so(vllm_engine):
    clean = Kept()
    vllm_engine.score(IDS, CONTEXT, clean)
    assert vllm_engine.score_over_heard(IDS, clean.cache)[1] is None
    with refused(Fault, "fault.first-layer", "vllm"):
        vllm_engine.score_over_from(1, [], IDS, clean.cache)
