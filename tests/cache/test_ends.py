"""Tokens kept at the ends of a cache, and K coded after its rotary embedding: in every place that codes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvlab.cache.files import coded as streams
from kvlab.cache.files.calibration import load_calibration, write_calibration
from kvlab.cache.files.recipe import write_recipe_file
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.vllm import worker as vllm_worker
from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.base import Site
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve
from kvlab.core.recipe import RECIPE_VARIABLE, Recipe
from kvlab.engines.registry import start
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.payload import CodedChunks
from refusals import refused

IDS = torch.randint(1, 320, (1, 40), generator=torch.Generator().manual_seed(3))
SINK, RECENT = 3, 5


def ended(rotary="after", sink=SINK, recent=RECENT) -> Recipe:
    k, v = IntStream(bits=2, group=16, sink=sink, recent=recent), HadamardStream(bits=3, sink=sink, recent=recent)
    return Recipe(k=k, v=v, rotary=rotary)


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def run(model, cache, cuts):
    for part in IDS.split(cuts, dim=1):
        model(part, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("cuts", "window_bytes"),
    [([40], None), ([1] * 40, 9000), ([2, 30, 8], 0), ([2, 30, 8], 9000), ([2, 30, 8], None), ([7, 13, 20], 0)],
    ids=str,
)
def test_a_growing_cache_holds_what_the_codec_makes_of_the_whole(model, cuts, window_bytes):
    cache = run(model, KVCache(model, ended(), window_bytes=window_bytes), cuts)
    clean = run(model, DynamicCache(), cuts)
    for stream, held in zip("kv", cache.decoded(0), strict=True):
        exact = getattr(clean.layers[0], "keys" if stream == "k" else "values")
        codec = build(getattr(ended(), stream))
        due = codec.decode(codec.encode(exact[0], Site(0, 0, stream)))
        torch.testing.assert_close(held[0], due, rtol=1e-3, atol=1e-3)
        assert torch.equal(held[0][:, :SINK], exact[0][:, :SINK])
        assert torch.equal(held[0][:, -RECENT:], exact[0][:, -RECENT:])
        assert (held[0][:, SINK:-RECENT] - exact[0][:, SINK:-RECENT]).abs().amax((0, 2)).min() > 1e-3
    assert {entry.exact_tokens for entry in cache.coding()} == {SINK + RECENT}
    assert {entry.coded_tokens for entry in cache.coding()} == {40 - SINK - RECENT}
    assert all(entry.exact_bytes == 8 * 4 * entry.values // 40 for entry in cache.coding())
    if len(cuts) > 1:  # in one call nothing that was coded is read
        cache.check()


def test_turning_back_and_not_turning_back_are_two_codecs(model):
    after, before = (run(model, KVCache(model, ended(rotary)), [40]).decoded(0)[0] for rotary in ("after", "before"))
    assert torch.equal(after[..., :SINK, :], before[..., :SINK, :]) and not torch.equal(after, before)


def test_a_crop_keeps_the_first_tokens_as_they_are(model):
    cache = run(model, KVCache(model, ended()), [40])
    before = cache.decoded(1)[0]
    assert not any(layer.is_croppable for layer in cache.layers)
    for length in (38, 20, 2):
        cache.crop(length)
        assert cache.get_seq_length() == length
        assert torch.equal(cache.decoded(1)[0], before[:, :, :length])


def test_kivi_as_published_waits_for_whole_runs_of_k(model):
    recipe = named_recipe("kivi-paper", 2, block_size=16, recent=16)
    recipe = recipe.model_copy(update={"k": recipe.k.model_copy(update={"recent": 0})})
    entries = run(model, KVCache(model, recipe), [40]).coding()
    assert {(e.stream, e.coded_tokens, e.exact_tokens) for e in entries} == {("k", 32, 8), ("v", 24, 16)}


# --- refused where a token's place is not known -------------------------------------------------------------------


def test_vllm_refuses_tokens_at_the_ends(tmp_path, monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, str(write_recipe_file(tmp_path / "r.json", ended())))
    with refused(CapabilityError, "capability.ends", "sink 3, recent 5"):
        vllm_worker.read_recipe()
    path = write_recipe_file(tmp_path / "r.json", ended(sink=0, recent=0))
    assert vllm_worker.read_recipe().recipe.rotary == "after" and path.exists()


def test_chunks_refuse_tokens_at_the_ends_and_another_place_of_k():
    geometry = Geometry(layers=1, kv_heads=2, head_dim=8, chunk_tokens=8, dtype="float32")
    with refused(CapabilityError, "capability.ends", "sink", "recent"):
        CodedChunks(geometry, ended(), placement="post_rope")
    with refused(CapabilityError, "capability.rotary", "post_rope"):
        CodedChunks(geometry, ended(sink=0, recent=0))
    CodedChunks(geometry, ended(sink=0, recent=0), placement="post_rope")


def test_a_capture_holds_no_k_after_its_rotary_embedding(tiny_params, tiny_calibration, tmp_path):
    path = write_recipe_file(tmp_path / "r.json", ended())
    with refused(CapabilityError, "capability.rotary", "rotary: before"):
        streams.encode(tiny_params.model, path, tiny_calibration["capture"], 0, tmp_path / "a.kvls")


# --- what the published ones read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["oscar-paper", "kvquant-paper"])
def test_a_calibration_file_codes_as_what_it_was_made_of(name, tiny_params, tmp_path):
    info = resolve(tiny_params.model)
    recipe = named_recipe(name, 3, sink=2, recent=4)
    windows = torch.randint(1, 320, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
    engine = start("hf", info, "float32", max_tokens=64)
    try:
        calibrated = calibrate(engine, windows, [recipe], corpus_hash="x")
    finally:
        engine.close()
    again = load_calibration(write_calibration(tmp_path / "a.kv", recipe, calibrated, info), info)
    x = torch.randn(info.n_kv_heads, 30, info.head_dim, generator=torch.Generator().manual_seed(1))
    for stream in "kv":
        own = getattr(recipe, stream)
        ours, theirs = (build(own, one.stream(own, stream, recipe.placement)) for one in (calibrated, again))
        site = Site(0, 1, stream)
        assert torch.equal(ours.decode(ours.encode(x, site)), theirs.decode(theirs.encode(x, site)))
