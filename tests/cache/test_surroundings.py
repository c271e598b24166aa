"""A Cache in whatever surrounds it ends as the table says, and the page says the same."""

from __future__ import annotations

import copy
import gc
import importlib
import pkgutil
import threading
from itertools import cycle

import pytest
import torch
from transformers import DynamicCache

import kvlab.codecs
from cache import surroundings
from cache.surroundings import CASES, CODECS, IDS, SAME, Fitted, cached, generated
from kvlab import Cache, recipe
from kvlab.cache.hf.rope import Watch
from kvlab.codecs.aquakv.codec import spreading
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream, marginal, plain
from kvlab.codecs.klt.joining import arrays_of
from kvlab.codecs.kvquant import codec as kvquant
from kvlab.codecs.registry import bare
from kvlab.codecs.shared import rotation
from kvlab.codecs.shared.apart import disturbed
from kvlab.codecs.shared.quantizer import gaussian_table
from kvlab.codecs.shared.transform import kept_probe
from kvlab.codecs.vllm_types import codec as vllm_types
from kvlab.core.errors import CapabilityError
from refusals import refused

CPU = torch.device("cpu")
KEPT = {
    "signs": lambda: rotation.signs(0, 16),
    "sylvester": lambda: rotation.sylvester(16, CPU),
    "forward": lambda: rotation.forward(0, 16, CPU),
    "inverse": lambda: rotation.inverse(0, 16, CPU),
    "gaussian_table": lambda: gaussian_table(3),
    "turn": lambda: plain.turn(16),
    "_grid": lambda: marginal._grid().mass,
    "_places": lambda: marginal._places(64)[1],
    "_drawn_signs": lambda: vllm_types._drawn_signs(16),
    "kept_probe": lambda: kept_probe(0, 4, 16),
    "spreading": lambda: spreading(24),
    "table_of": lambda: kvquant.table_of(tuple(i / 64 for i in range(64)), 3),
}
TENSORS = ("Tensor", "Grid")  # what a kept table is annotated with
SURROUNDINGS = {
    "autocast": surroundings.autocast,
    "inference mode": torch.inference_mode,
    "a default dtype": lambda: surroundings.default_dtype(torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """What transformers says of settings that a case is about."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
    torch._dynamo.reset()
    surroundings.compiling.cache_clear()


def met() -> list:
    """Cases with `identity`, of which the table says its own, and another codec in turn; at night with all."""
    others = cycle(name for name in CODECS if name != "identity")
    some = [pytest.param(name, ["identity", next(others)], marks=pytest.mark.full) for name in CASES]
    return [*some, *(pytest.param(name, [*CODECS], marks=pytest.mark.nightly) for name in CASES)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "codecs"), met())
def test_a_case_ends_as_the_table_says(name, codecs):
    assert {codec: surroundings.ended(name, codec) for codec in codecs} == {
        codec: CASES[name].ends(codec) for codec in codecs
    }
    assert not torch.is_inference_mode_enabled() and torch.get_default_dtype() == torch.float32


def test_the_page_is_what_the_table_says():
    command = "PYTHONPATH=src:tests python tests/cache/surroundings.py"
    assert surroundings.PAGE.read_text() == surroundings.page(), f"write it again: {command}"


@pytest.mark.parametrize("name", ["beam search", "sampling", "autocast", "threads on one model, texts of one length"])
def test_the_cases_see_what_a_codec_does(name, monkeypatch):
    """Two bits give another text in each of them, so that the same text says something."""
    monkeypatch.setitem(CODECS, "coarse", cached(recipe("hadamard", bits=2)))
    assert surroundings.ended(name, "coarse") != SAME


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_that_stop_in_the_middle_of_their_forwards_see_their_own_positions():
    """Every forward waits, between the rotary module and the first layer, until the other ones are there too."""
    own, texts = surroundings.model(), [IDS, IDS.roll(3, 1), torch.cat([IDS, IDS], dim=1)]
    want = [generated(own, DynamicCache(), text) for text in texts]
    caches = [Cache(own, recipe("int", bits=8)) for _ in texts]
    barrier, found = threading.Barrier(len(texts), timeout=60), {}
    handle = own.model.layers[0].register_forward_pre_hook(lambda *_: [barrier.wait(), None][1])

    def work(number: int) -> None:
        found[number] = generated(own, caches[number], texts[number])

    started = [threading.Thread(target=work, args=(number,)) for number in range(len(texts))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    handle.remove()
    assert all(torch.equal(found[number], want[number]) for number in range(len(texts)))
    for cache, text in zip(caches, texts, strict=True):
        assert cache.positions[0].tolist() == list(range(text.shape[1] + surroundings.NEW - 1))


@pytest.mark.nightly
def test_caches_come_and_go_in_one_thread_while_another_runs_the_model():
    own = surroundings.model()
    want, ended, failed = generated(own, DynamicCache()), threading.Event(), []

    def work() -> None:
        try:
            while not ended.is_set():
                Cache(own, recipe("int", bits=8))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            assert torch.equal(generated(own, Cache(own, recipe("int", bits=8))), want)
    finally:
        ended.set()
        thread.join()
    assert not failed


def test_a_forward_that_is_given_nothing_is_not_a_cache_s_that_has_gone():
    """Its hooks may still be called by a thread that had them in hand when it went."""
    own = surroundings.model()
    cache = Cache(own, recipe("int", bits=8))
    watch, (entered, *_) = cache._watch, own.model._forward_pre_hooks.values()
    del cache
    gc.collect()
    entered(own.model, (), {"input_ids": IDS, "past_key_values": None})
    with refused(CapabilityError, "capability.other-forward"):
        watch.taken()


def test_a_hook_that_torch_calls_without_keyword_arguments_does_nothing():
    """As it does while another thread puts the hook up or takes it off."""
    own = surroundings.model()
    cache = Cache(own, recipe("int", bits=8))
    decoder, rotary = own.model, own.model.rotary_emb
    for hooks, given in (
        (decoder._forward_pre_hooks, (decoder, ())),
        (decoder._forward_hooks, (decoder, (), None)),
        (rotary._forward_hooks, (rotary, (), None)),
    ):
        assert [hook(*given) for hook in hooks.values()] == [None]
    with refused(CapabilityError, "capability.other-forward"):
        cache._watch.taken()


# --- hooks -----------------------------------------------------------------------------------------------------------


def hooks(own) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    return sum(len(getattr(module, kind)) for module in own.modules() for kind in kinds)


@pytest.mark.nightly
def test_hundreds_of_caches_leave_no_hook():
    own = surroundings.model()
    before = hooks(own)
    for _ in range(100):
        cache = Cache(own, recipe("int", bits=8))
    assert hooks(own) > before
    cache.reset()
    with_one = hooks(own)
    copy.deepcopy(cache), copy.copy(cache)
    surroundings.stopped(own, cache)
    del cache
    gc.collect()
    assert hooks(own) == before < with_one


def test_what_ended_a_forward_is_forgotten_with_it():
    """A forward that raised leaves nothing behind that a later one, with another cache, could write to."""
    own = surroundings.model()
    cache = Cache(own, recipe("int", bits=8))

    def stop(*_):
        raise surroundings.Stopped

    handle = own.model.layers[0].register_forward_pre_hook(stop)
    with pytest.raises(surroundings.Stopped):
        generated(own, cache)
    handle.remove()
    generated(own, DynamicCache())
    with refused(CapabilityError, "capability.other-forward"):
        cache._watch.taken()
    assert torch.equal(generated(own, cache), generated(own, DynamicCache()))  # no layer had anything of it


def test_the_cache_is_found_whatever_its_argument_is_called():
    """`past_key_values`, `cache` since transformers 5.24, or none at all: the argument is asked, not its name."""

    class Decoder(torch.nn.Module):
        base_model = property(lambda self: self)

        def forward(self, ids, attention_mask=None, own=None, **more):
            return watch.taken()

    class Owner:
        def get_seq_length(self):
            return 0

    decoder, owner, mask = Decoder(), Owner(), torch.ones(1, 3)
    watch = Watch(decoder, None, owner)
    for call in (
        lambda: decoder(IDS, mask, owner),
        lambda: decoder(IDS, own=owner, attention_mask=mask),
        lambda: decoder(IDS, mask, past_key_values=owner),
        lambda: decoder(IDS, mask, cache=owner),
    ):
        assert call().mask is mask
    with refused(CapabilityError, "capability.other-forward"):
        decoder(IDS, mask, cache=Owner())


# --- what codecs keep ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("name", KEPT)
def test_a_kept_table_does_not_remember_where_it_was_made(name, surrounding):
    want = KEPT[name]().clone()
    for module in tables().values():
        module.cache_clear()
    with SURROUNDINGS[surrounding]():
        KEPT[name]()
    got = KEPT[name]()
    assert got.dtype == want.dtype and torch.equal(got, want) and not got.is_inference()


def tables() -> dict:
    """Every function of the codecs that keeps what it returned."""
    found = {}
    for module in pkgutil.walk_packages(kvlab.codecs.__path__, "kvlab.codecs."):
        if module.name.endswith(("testing", "_numba", "_triton")):  # vLLM, started after numba, stumbles over llvmlite
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "cache_clear"):
                found[name] = value
    return found


def test_every_kept_table_is_among_them_or_read_from_a_file():
    made = {name for name, value in tables().items() if any(kind in str(value.__annotations__) for kind in TENSORS)}
    assert made - {"_stored"} == {*KEPT}
    assert disturbed() and not torch.no_grad()(disturbed)()


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("codec", [*(name for name in CODECS if name != "identity"), "nf4"])
def test_a_codec_alone_codes_the_same(codec, surrounding):
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    site, bits = Site(0, 1, "k"), {"e8": {"bits": 7}, "fp8": {}, "nf4": {}}.get(codec, {"bits": 8})
    stream = KltStream(bits=8) if codec == "klt" else recipe(codec, **bits).k
    fitted = Fitted().stream(stream, "k") if codec == "klt" else None

    def run():
        own = bare(stream, fitted)
        encoded = own.encode(x, site)
        return arrays_of(encoded), own.decode(encoded)

    arrays, decoded = run()
    with SURROUNDINGS[surrounding]():
        again, out = run()
    assert all(torch.equal(a, b) for a, b in zip(arrays, again, strict=True))
    assert out.dtype == torch.float32 and torch.equal(out, decoded) and not out.is_inference()


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found, code, data",
    [
        (None, "capability.no-positions", "rotary_emb"),
        (torch.zeros(3, 2, 5), "capability.positions", "[3, 2, 5] to 2 rows of 5 tokens"),
        (torch.zeros(3, 5), "capability.positions", "[3, 5] to 2 rows"),
    ],
)
def test_positions_that_turn_nothing_back_are_named(found, code, data):
    from kvlab.cache.hf import kv_cache as hf_given

    with refused(CapabilityError, code, data):
        hf_given.positions(found, 2, 5)
    assert hf_given.positions(torch.arange(5)[None], 2, 5).tolist() == [[0, 1, 2, 3, 4]] * 2
