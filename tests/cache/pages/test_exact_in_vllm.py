"""A vLLM whose pages keep recent tokens exact says what the rule says, however prompts are cut and whoever shares."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cache.pages.exact_user import LENGTH, PREFIX, REQUESTS
from cache.pages.pages_user import PROMPTS
from cache.pages.test_in_vllm import CODED, codecs, fitted, logprobs, served  # noqa: F401 (fixtures of the session)
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.codecs.base import Site
from kvlab.codecs.recipes import named_recipe
from kvlab.core.recipe import Recipe

pytestmark = pytest.mark.engine
SINK, RECENT, ALL = 2, 8, 512


def ended(sink: int, recent: int) -> Recipe:
    return Recipe(**{s: getattr(CODED, s).model_copy(update={"sink": sink, "recent": recent}) for s in "kv"})


@pytest.fixture(scope="session")
def recent(tiny_model, tiny_calibration, tmp_path_factory):
    """The one start of vLLM that codes what is 8 tokens old."""
    return served("exact_user.py", tiny_model, ended(SINK, RECENT), tiny_calibration, tmp_path_factory, "alone")


@pytest.fixture(scope="session")
def whole(tiny_model, tiny_calibration, tmp_path_factory):
    """The one start of vLLM whose requests read all that they computed exact."""
    return served("exact_user.py", tiny_model, ended(0, ALL), tiny_calibration, tmp_path_factory, "caching")


@pytest.mark.nightly
@torch.inference_mode()
def test_it_says_what_the_cache_of_the_same_recipe_says_token_by_token(recent, hf_engine, fitted):  # noqa: F811
    """Prompts come to vLLM in chunks of 24 tokens, which are longer than what is exact."""
    for ids, found in zip(PROMPTS, recent.logprobs, strict=True):
        cache, rows = KVCache(hf_engine.model, ended(SINK, RECENT), calibration=fitted, semantics="in_forward"), []
        for token in ids:
            rows.append(hf_engine.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
        said = torch.stack(rows).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(torch.tensor(found), said, atol=1e-3, rtol=1e-3)
        assert (said - logprobs(hf_engine, ids)).abs().max() > 0.01


@pytest.mark.nightly
def test_where_all_is_recent_it_is_the_plain_model(whole, hf_engine):
    for ids, found in zip(PROMPTS, whole.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(found), logprobs(hf_engine, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
def test_a_prefix_that_was_taken_over_is_coded_and_what_follows_is_exact(whole, hf_engine, codecs):  # noqa: F811
    """So it is the cell of a finished context: computed plainly, coded, and read by exact tokens."""
    (none, _), (taken, found) = whole.after
    ids, clean = PROMPTS[0][:LENGTH], {}
    assert (none, taken) == (0, PREFIX)

    def keep(layer, part, x):
        if part in "kv":
            clean[layer, part] = x[:, :PREFIX].clone()

    hf_engine.score(ids, 0, keep)
    coded = {
        (layer, part): codecs[part].decode(codecs[part].encode(x, Site(0, layer, part)))
        for (layer, part), x in clean.items()
    }
    over = hf_engine.score_over([*ids, 0], coded)[-1].log_softmax(-1)
    exact = hf_engine.score([*ids, 0], 0)[-1].log_softmax(-1)
    own = [int(token) for token in found]
    torch.testing.assert_close(torch.tensor(list(found.values())), over[own], atol=1e-3, rtol=1e-3)
    assert (over - exact)[own].abs().max() > 0.01


@pytest.mark.nightly
def test_a_preempted_request_says_what_it_says_alone(recent):
    """Many requests, cancelled and preempted, none of them with a prefix taken over: equal answers."""
    found = recent.soak
    assert found["different"] == [] and found["leaked"] == 0 and found["shared"] == 0
    assert found["equal"] + found["tied"] + found["cancelled"] == REQUESTS and found["tied"] <= 1
    assert found["preemptions"] > 0 and found["cancelled"] > 0


@pytest.mark.nightly
def test_it_says_what_it_keeps_exact_and_what_that_takes(recent, whole, hf_engine):
    info = hf_engine.info
    token = 2 * info.n_layers * info.n_kv_heads * info.head_dim * 4
    for user, sink, newest in ((recent, SINK, RECENT), (whole, 0, ALL)):
        pages = user.status["pages"]
        assert (pages["sink"], pages["recent"], pages["requests"]) == (sink, newest, 4)
        assert pages["exact_bytes"] == (sink + newest) * token and pages["canary_kl"] > 0.01


@pytest.mark.nightly
def test_a_server_compiles_nothing_more(tiny_model, tiny_calibration, tmp_path_factory, monkeypatch):
    """Its prompts, chunks and steps meet no layout that `cache.compiling` does not."""
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept := tmp_path_factory.mktemp("compiled")))
    loops = "import torch; from kvlab.cache.compiling import compile_loops; compile_loops('after', torch.float32)"
    subprocess.run([sys.executable, "-c", loops], check=True)
    compiled = set(kept.rglob("*.nbc"))
    recipe = named_recipe("klt", 3, rotary="after", sink=SINK, recent=RECENT)
    served("exact_user.py", tiny_model, recipe, tiny_calibration, tmp_path_factory, "alone")
    assert compiled and set(kept.rglob("*.nbc")) == compiled
