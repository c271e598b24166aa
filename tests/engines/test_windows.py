"""Layers that see a window of tokens alone, in transformers: what a codec is shown of them, and what it can change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve_folder
from kvlab.engines.capability import check
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.registry import start
from kvlab.measure.scoring import CANARY, WindowRun, floor_kl, probe_kl
from kvlab.witness.plain import PlainModel
from refusals import refused

pytestmark = pytest.mark.engine
CONTEXT, IDS = 48, list(range(7, 71))
USER = Path(__file__).with_name("windows_user.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


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


@pytest.mark.nightly
def test_vllm_computes_the_same(tmp_path):
    """Below KL 1e-6 in both protocols; where some layers have a window and others none, and where all have one."""
    folders = [tiny.write_model(tmp_path / kind, kind, **tiny.SLIDES[kind]) for kind in ("gemma3", "mistral")]
    done = subprocess.run(
        [sys.executable, USER, *folders], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert max(kl for name, kl in found.items() if not name.startswith(("apart", "effect"))) < 1e-9, found
        assert max(apart for name, apart in found.items() if name.startswith("apart")) < 1e-4
        assert min(kl for name, kl in found.items() if name.startswith("effect")) > 1e-3


def test_windows_in_some_layers_of_a_qwen_are_refused_on_vllm(tmp_path):
    info = resolve_folder(tiny.write_model(tmp_path / "model", "qwen3", **tiny.SLIDES["qwen3"]))
    check("hf", "float32", "sdpa", info)
    with refused(CapabilityError, "capability.mixed-windows", "Qwen3ForCausalLM"):
        check("vllm", "float32", "default", info)
