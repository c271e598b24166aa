"""Layers that see a window of tokens alone, in transformers: what a codec is shown of them, and what it can change."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.core.model import resolve_folder
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.registry import start
from kvlab.measure.scoring import CANARY, WindowRun, floor_kl, probe_kl
from kvlab.witness.plain import PlainModel

pytestmark = pytest.mark.engine
CONTEXT, IDS = 48, list(range(7, 71))


@pytest.fixture(scope="module", params=sorted(tiny.SLIDES))
def engine(request, tmp_path_factory) -> HFEngine:
    folder = tiny.write_model(tmp_path_factory.mktemp(request.param), request.param, **tiny.SLIDES[request.param])
    return start("hf", resolve_folder(folder), "float32", max_tokens=len(IDS))


@pytest.fixture(scope="module")
def window(engine) -> WindowRun:
    return WindowRun(engine, IDS, CONTEXT, 0)


@pytest.mark.parametrize("protocol", ["snapshot", "in_forward"])
@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
def test_a_codec_that_changes_nothing_moves_nothing(window, protocol, placement):
    assert floor_kl(window, protocol, placement) <= 1e-9
    assert probe_kl(window, protocol, placement, "kv", CANARY) > 1e-3


def test_k_turned_by_its_layers_own_rotary_embedding_is_what_attention_reads(engine, window):
    with engine.reading() as seen:
        engine.score(IDS, CONTEXT)
    plain = PlainModel(engine.info.path)
    for layer in range(engine.info.n_layers):
        k, read = window.clean["pre_rope"].kept[layer, "k"], seen.tensors[layer, "k"][:, :CONTEXT]
        assert torch.equal(engine.rotation(CONTEXT, layer)(k[None])[0], read)
        torch.testing.assert_close(plain.rotated(layer, k), read, atol=1e-5, rtol=1e-5)


def test_noise_in_what_the_window_has_left_changes_nothing_and_within_it_does(engine, window):
    """The first token that is scored stands at the context's end, and sees the last `window` - 1 of the context."""
    sliding = [layer for layer, size in enumerate(engine.info.windows) if size]
    assert sliding
    clean, gone = window.clean["pre_rope"].kept, CONTEXT + 1 - tiny.WINDOW
    for layer in sliding:
        for stream in "kv":
            for token, heard in ((gone - 1, False), (0, False), (gone, True), (CONTEXT - 1, True)):
                x = clean[layer, stream].clone()
                x[:, token] += torch.randn(x[:, token].shape, generator=torch.Generator().manual_seed(token))
                logits = engine.score_over(IDS, {**clean, (layer, stream): x})
                assert torch.equal(logits, window.over_clean) != heard, (layer, stream, token)


def test_a_draft_is_checked_and_taken_back_over_a_cache_with_windows(engine, window):
    cache, prompt = window.clean["pre_rope"].kept, IDS[: CONTEXT + 2]
    written = engine.write_over(prompt, cache, 12)
    assert written == engine.write_over(prompt, cache, 12, draft=[*written[:5], (written[5] + 1) % 300, 3, 4])
