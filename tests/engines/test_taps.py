"""Hooks: they see every projection, change what they are told to, and leave no trace."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.core.errors import ModelError, NonFinite, UnknownName
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.engines.hooks import through
from kvlab.engines.registry import start
from kvlab.text import corpus
from refusals import refused

IDS = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(0)).tolist()


class Recorder:
    """Keeps what passes and scales the K of one layer."""

    def __init__(self, scaled_layer: int | None = None):
        self.seen, self.scaled_layer = {}, scaled_layer

    def __call__(self, layer, part, x):
        self.seen[layer, part] = x.clone()
        if (layer, part) == (self.scaled_layer, "k"):
            return x * 0.5


@pytest.fixture(scope="module", params=sorted(tiny.CLASSES))
def any_engine(request, tmp_path_factory):
    """Each supported attention layout, in transformers."""
    folder = tiny.write_model(tmp_path_factory.mktemp(request.param), request.param)
    return start("hf", resolve(Model(path=str(folder), revision=None, n_layers=3)), "float32", max_tokens=96)


def test_the_tap_sees_every_layer_and_part(any_engine):
    recorder, info = Recorder(), any_engine.info
    any_engine.score(IDS, 64, recorder)
    assert set(recorder.seen) == {(layer, part) for layer in range(3) for part in "qkv"}
    heads = {"q": info.n_heads, "k": info.n_kv_heads, "v": info.n_kv_heads}
    assert all(x.shape == (heads[part], 96, info.head_dim) for (_, part), x in recorder.seen.items())


def test_what_the_tap_sees_is_what_attention_caches(any_engine):
    """K in the cache is the tapped K after the rotary embedding, V is the tapped V as it is."""
    recorder, model = Recorder(), any_engine.model
    any_engine.score(IDS, 64, recorder)
    with torch.inference_mode():
        cache = model(torch.tensor([IDS]), use_cache=True).past_key_values
    by_kind = getattr(
        model.model.rotary_emb, "layer_types", None
    )  # Gemma has a rotary embedding for each kind of layer
    for layer in range(3):
        kind = [model.config.layer_types[layer]] if by_kind else []
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(96)[None], *kind)
        k, held = recorder.seen[layer, "k"], cache.layers[layer]
        half = k.shape[-1] // 2
        turned = k * cos + torch.cat([-k[..., half:], k[..., :half]], dim=-1) * sin
        kept = slice(-held.keys.shape[-2], None)  # a layer with a window lets go of what has left it
        torch.testing.assert_close(held.keys[0], turned[:, kept], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(held.values[0], recorder.seen[layer, "v"][:, kept], atol=1e-6, rtol=1e-5)


def test_the_tap_changes_what_it_returns_and_is_gone_afterwards(any_engine):
    before = any_engine.score(IDS, 64)
    changed = any_engine.score(IDS, 64, Recorder(scaled_layer=1))
    assert (changed - before).abs().max() > 1e-2
    assert torch.equal(any_engine.score(IDS, 64), before)


def test_the_tap_is_gone_after_a_failure_too(any_engine):
    before = any_engine.score(IDS, 64)

    def broken(layer, part, x):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        any_engine.score(IDS, 64, broken)
    assert torch.equal(any_engine.score(IDS, 64), before)


def test_layers_below_the_change_are_untouched(any_engine):
    clean, changed = Recorder(), Recorder(scaled_layer=1)
    any_engine.score(IDS, 64, clean)
    any_engine.score(IDS, 64, changed)
    for (layer, part), x in clean.seen.items():
        assert torch.equal(x, changed.seen[layer, part]) == (layer <= 1)


def test_nan_in_the_weights_names_the_weight(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refused(NonFinite, None, "layers.1.self_attn.k_proj.weight"):
        start("hf", resolve(Model(path=str(folder), revision=None, n_layers=3)), "float32", max_tokens=96)


def test_unreadable_weights_are_one_line(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError) as caught:
        start("hf", resolve(Model(path=str(folder), revision=None, n_layers=3)), "float32", max_tokens=96)
    assert "\n" not in str(caught.value)


def test_an_unknown_engine_names_the_nearest(tiny_params):
    with refused(UnknownName, None, "'vlm'", "'vllm'"):
        start("vlm", resolve(tiny_params.model), "float32", max_tokens=96)


@pytest.mark.parametrize("heads", [1, 2])
def test_what_an_engine_does_to_k_where_it_lies_leaves_the_answer_of_the_tap_alone(heads):
    answer = torch.randn(heads, 5, 8)
    placed = through(lambda *_: answer, 0, "k", torch.zeros(5, heads * 8), heads, 8)
    before = answer.clone()
    torch.testing.assert_close(placed.view(5, heads, 8).transpose(0, 1), answer, rtol=0, atol=0)
    placed.neg_()
    assert torch.equal(answer, before)


@pytest.mark.engine
def test_both_engines_see_and_say_the_same(hf_engine, vllm_engine, tiny_params, tiny_windows):
    ids = corpus.load(tiny_windows, hf_engine.info.model_hash).test[0].tolist()
    ours, theirs = Recorder(scaled_layer=1), Recorder(scaled_layer=1)
    a, b = hf_engine.score(ids, 64, ours), vllm_engine.score(ids, 64, theirs)
    assert a.shape == b.shape == (31, hf_engine.info.vocab_size)
    torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)
    for key, x in ours.seen.items():
        torch.testing.assert_close(x, theirs.seen[key].cpu(), atol=1e-4, rtol=1e-4)


@pytest.mark.engine
def test_vllm_forgets_the_tap(vllm_engine):
    before = vllm_engine.score(IDS, 64)
    assert (vllm_engine.score(IDS, 64, Recorder(scaled_layer=0)) - before).abs().max() > 1e-2
    assert torch.equal(vllm_engine.score(IDS, 64), before)
