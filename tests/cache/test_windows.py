"""A `Cache` for layers that see a window of tokens alone: what it shows, and what it lets go of."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import tiny
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve_folder
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.registry import start
from refusals import refused

pytestmark = pytest.mark.engine
IDS = torch.randint(0, 300, (2, 61), generator=torch.Generator().manual_seed(5))
KIVI_K, KIVI_V = (KiviStream(bits=4, block_size=16, group=8, recent=8, axis=axis) for axis in ("channel", "token"))


def klt(**changes) -> Recipe:
    recipe = named_recipe("klt", 3)
    return Recipe(k=recipe.k.model_copy(update=changes), v=recipe.v.model_copy(update=changes))


RECIPES = {
    "hadamard": Recipe(k=HadamardStream(bits=4, block_size=8), v=HadamardStream(bits=4, block_size=8)),
    "kivi": Recipe(k=KIVI_K, v=KIVI_V),
    "klt": klt(block_size=8),
    "klt, its ends exact": klt(block_size=8, sink=3, recent=4),
}


@pytest.fixture(scope="module", params=sorted(tiny.SLIDES))
def engine(request, tmp_path_factory) -> HFEngine:
    folder = tiny.write_model(tmp_path_factory.mktemp(request.param), request.param, **tiny.SLIDES[request.param])
    return start("hf", resolve_folder(folder), "float32", max_tokens=128)


@pytest.fixture(scope="module")
def calibrated(engine):
    windows = torch.randint(0, 300, (6, 64), generator=torch.Generator().manual_seed(6)).tolist()
    return calibrate(engine, windows, list(RECIPES.values()), corpus_hash="")


def fed(model, cache, ids=IDS, parts=(40, 1, 1, 9, 1, 1, 8)) -> torch.Tensor:
    """Logits of a text that comes in parts, the last ones beyond the window."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(list(parts), dim=1)], dim=1)


def test_what_is_written_is_what_transformers_own_sliding_layers_give(engine):
    model = engine.model
    told = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0  # padding on the left
    own = DynamicCache(config=model.config)
    assert any(own.is_sliding)
    due = model.generate(IDS, attention_mask=mask, past_key_values=own, **told)
    cache = KVCache(model, IDENTITY)
    assert torch.equal(model.generate(IDS, attention_mask=mask, past_key_values=cache, **told), due)
    torch.testing.assert_close(
        fed(model, KVCache(model, IDENTITY)), fed(model, DynamicCache(config=model.config)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "semantics"),
    [
        pytest.param("kivi", "in_forward", marks=pytest.mark.full),
        ("klt, its ends exact", "serving"),
        pytest.param("hadamard", "serving", marks=pytest.mark.nightly),
        pytest.param("hadamard", "in_forward", marks=pytest.mark.nightly),
        pytest.param("kivi", "serving", marks=pytest.mark.nightly),
        pytest.param("klt", "in_forward", marks=pytest.mark.nightly),
        pytest.param("klt", "serving", marks=pytest.mark.nightly),
        pytest.param("klt, its ends exact", "in_forward", marks=pytest.mark.nightly),
    ],
)
def test_what_has_left_the_window_is_let_go_and_nobody_sees_it(engine, calibrated, name, semantics):
    def made() -> KVCache:
        return KVCache(engine.model, RECIPES[name], calibrated, semantics=semantics)

    cache, whole = made(), made()
    for layer in whole.layers:
        layer.window = None  # which keeps all
    assert torch.equal(fed(engine.model, cache), fed(engine.model, whole))
    for layer, window in enumerate(engine.info.windows):
        held, everything = cache.layers[layer].rows["k"][0], whole.layers[layer].rows["k"][0]
        assert held.length == everything.length == IDS.shape[1]
        assert held.held >= min((window or 99) - 1, IDS.shape[1])
        assert (held.gone > 0) == (window is not None)
        k, kept = cache.decoded(layer)[0], whole.decoded(layer)[0]
        assert torch.equal(k[:, :, held.gone :], kept[:, :, held.gone :]) and not k[:, :, : held.gone].any()


@torch.no_grad()
def test_a_cache_goes_back_as_far_as_it_has_what_the_next_token_sees(engine, calibrated):
    cache = KVCache(engine.model, RECIPES["hadamard"], calibrated, semantics="in_forward")
    first = fed(engine.model, cache, IDS[:1])
    cache.crop(-2)
    again = engine.model(IDS[:1, -2:], past_key_values=cache).logits
    torch.testing.assert_close(again, first[:, -2:], rtol=1e-4, atol=1e-4)
    with refused(CapabilityError, "capability.left-the-window", 12, tiny.WINDOW):
        cache.crop(12)
    assert not cache.is_croppable


@pytest.mark.full
def test_beams_share_what_they_hold(engine, calibrated):
    cache = KVCache(engine.model, RECIPES["hadamard"], calibrated, semantics="in_forward")
    found = engine.model.generate(IDS, past_key_values=cache, num_beams=2, max_new_tokens=12, pad_token_id=0)
    assert found.shape == (2, 73) and cache.check()


def test_a_codec_without_blocks_lets_go_too(engine):
    ids = torch.randint(0, 300, (1, 200), generator=torch.Generator().manual_seed(7))
    cache, own = KVCache(engine.model, IDENTITY), DynamicCache(config=engine.model.config)
    parts = (100, 60, 39, 1)
    torch.testing.assert_close(
        fed(engine.model, cache, ids, parts), fed(engine.model, own, ids, parts), rtol=1e-4, atol=1e-4
    )
    for layer, window in zip(cache.layers, engine.info.windows, strict=True):
        assert {row.gone for rows in layer.rows.values() for row in rows} == ({128} if window else {0})
