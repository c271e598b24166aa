"""The bias of a projection as a mean: the model's own, turned as its K are, and what it mends."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

import tiny
from codec.making import SITE
from kvlab.cache.files.calibration import load_calibration, write_calibration
from kvlab.calibration.biases import of_biases, projection_biases
from kvlab.calibration.needs import reads, reads_weights_alone
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.ggml import GgmlStream
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.core.errors import CalibrationMismatch, CapabilityError, ParamsError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from refusals import refused

CONTEXT = 40


def info_of(folder):
    return resolve(Model(path=str(folder), revision=None, n_layers=3))


def test_biases_are_the_models_and_of_turned_k_their_mean_over_positions(tmp_path):
    folder = tiny.write_model(tmp_path / "qwen2")
    found = projection_biases(info_of(folder), CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(CONTEXT)[None])
    for layer, block in enumerate(model.model.layers):
        k, v = (part.bias.detach().view(2, 32) for part in (block.self_attn.k_proj, block.self_attn.v_proj))
        assert torch.equal(found["k", "pre_rope"][layer], k) and torch.equal(found["v", "pre_rope"][layer], v)
        everywhere = k[None, :, None].expand(1, 2, CONTEXT, 32)
        turned = apply_rotary_pos_emb(everywhere, everywhere, cos, sin)[1].mean(2)[0]
        torch.testing.assert_close(found["k", "post_rope"][layer], turned, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind, stream", [("llama", "K"), ("qwen3", "K")])
def test_a_model_without_biases_or_that_normalises_k_after_them_is_refused(tmp_path, kind, stream):
    with refused(CapabilityError, "capability.no-bias", stream):
        projection_biases(info_of(tiny.write_model(tmp_path / kind, kind)), CONTEXT)


def test_who_asks_for_the_bias_reads_it_alone_and_at_its_place(tmp_path):
    for name, bits in (("q4_0+bias", None), ("int+bias", 4), ("turboquant_4bit_nc+bias", None)):
        recipe = named_recipe(name, bits)
        assert recipe.k.center == recipe.v.center == "bias" and reads_weights_alone(recipe)
        assert reads(recipe.k, "k") == reads(recipe.v, "v") == ("bias",)
    assert named_recipe("q4_0+bias").rotary == "after" and named_recipe("int+bias", 4).rotary == "before"
    with refused(ParamsError, "params.not-conditionable", "q4_0+bias"):
        named_recipe("q4_0+center")
    info = info_of(tiny.write_model(tmp_path / "qwen2"))
    fitted = of_biases(info, CONTEXT, "hf")
    for name, bits in (("q4_0+bias", None), ("int+bias", 4)):
        recipe, path = named_recipe(name, bits), tmp_path / f"{name}.kv"
        write_calibration(path, recipe, fitted, info)
        read = load_calibration(path, info)
        for stream in ("k", "v"):
            ours, theirs = (
                one.stream(getattr(recipe, stream), stream, recipe.placement).biases for one in (fitted, read)
            )
            assert ours.keys() == theirs.keys() == {0, 1, 2} and all(torch.equal(ours[i], theirs[i]) for i in ours)
    assert read.stream(recipe.k, "k").biases is not fitted.biases["k", "post_rope"]


def test_the_bias_mends_what_it_makes_loud():
    """Keys are a bias with one loud channel and Gaussian numbers: less it, q4_0 loses as little as of the rest."""
    rest = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(2, 64)
    bias[:, 5] = 200
    plain, less = GgmlStream(type="q4_0"), GgmlStream(type="q4_0", center="bias")
    x, calibration = rest + bias[:, None], StreamCalibration(biases={SITE.layer: bias})
    errors = [
        (codec.decode(codec.encode(rows, SITE)) - rows).square().mean()
        for codec, rows in ((build(plain), x), (build(less, calibration), x), (build(plain), rest))
    ]
    assert errors[0] > 0.4 and errors[1] < 1.05 * errors[2] < 0.02
    with refused(CalibrationMismatch, "calibration.missing", "center: bias"):
        build(less).encode(x, SITE)
