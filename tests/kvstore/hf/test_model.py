"""A paged model computes what the model computes, and models that would be paged wrongly are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import tiny
from kvlab.core.errors import CapabilityError, ModelError, NonFinite, UnknownName
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.kvstore.hf.model import PagedModel, mask
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.snapshot.identity import differences
from kvlab.kvstore.snapshot.reasons import Code
from kvstore.hf.prompts import prompt
from refusals import refused


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def folder(request, tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_those_of_the_model_without_a_pager(folder, attention):
    """In pieces of any size, over chunks that are filled in several forwards; only rounding differs."""
    info = resolve(Model(path=str(folder), n_layers=3))
    model, tokens = PagedModel.load(info, "float32", attention), prompt(75)
    run = PagedRun(model, PagerConfig(pool_tokens=160, chunk_tokens=16))
    ours = torch.cat([run.score(part) for part in (tokens[:5], tokens[5:50], tokens[50:])])
    with torch.no_grad():
        theirs = model.model(torch.tensor([tokens])).logits[0]
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 2e-4 < theirs.std()


def test_bfloat16_too(halved, roomy):
    tokens = prompt(60)
    ours = PagedRun(halved, roomy).score(tokens)
    with torch.no_grad():
        theirs = halved.model(torch.tensor([tokens])).logits[0].float()
    assert ours.dtype == torch.float32 and halved.dtype == "bfloat16"
    assert (ours - theirs).abs().mean() < 0.02 * theirs.std()


def test_a_query_reads_what_stands_at_or_before_it_in_whatever_column():
    columns = torch.tensor([4, 0, 9, 5, 3])
    found = mask(torch.tensor([4, 5]), columns, torch.bfloat16)
    assert found.shape == (1, 1, 2, 5) and found.dtype == torch.bfloat16
    assert (found[0, 0] == 0).tolist() == [[True, True, False, False, True], [True, True, False, True, True]]
    assert (found[found != 0] == torch.finfo(torch.bfloat16).min).all()


def test_positions_are_those_of_the_whole_context_not_of_the_pool(model, small, roomy):
    """What is after an evicted chunk is not moved up: its K is the one that the whole context has, in layer 0."""
    tokens = prompt(100)
    less, all_ = PagedRun(model, small), PagedRun(model, roomy)
    less.extend(tokens)
    all_.extend(tokens)
    assert less.pager.stats.page_outs > 0
    assert torch.equal(less.keys()[0], all_.keys()[0]) and not torch.equal(less.keys()[2], all_.keys()[2])


class TestRefusals:
    def test_another_model_than_the_folder_says(self, model, info):
        with refused(CapabilityError, "capability.other-model", "4 of 2 of 32"):
            PagedModel(model.model, replace(info, n_layers=4))
        with refused(CapabilityError, "capability.other-model", "LlamaForCausalLM"):
            PagedModel(model.model, replace(info, architecture="LlamaForCausalLM"))

    def test_another_window_than_the_folder_says(self, info):
        config = MistralConfig(**tiny.SHAPE, sliding_window=32)
        with refused(CapabilityError, "capability.other-window", "32", "all"):
            PagedModel(MistralForCausalLM(config).eval(), replace(info, architecture="MistralForCausalLM"))

    def test_a_rotary_embedding_that_changes_with_the_length(self, tmp_path):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        folder = tiny.write_model(tmp_path, rope_parameters=rope)
        with refused(CapabilityError, "capability.moving-rope", "'dynamic'"):
            PagedModel.load(resolve(Model(path=str(folder), n_layers=3)))

    def test_attention_that_takes_no_mask(self, info):
        loaded = AutoModelForCausalLM.from_pretrained(info.path, attn_implementation="flex_attention")
        with refused(CapabilityError, "capability.no-mask", "'flex_attention'"):
            PagedModel(loaded.eval(), info)
        with refused(UnknownName, None, "flash_attention_2"):
            PagedModel.load(info, attention="flash_attention_2")

    def test_dropout_and_an_unknown_dtype(self, info):
        loaded = AutoModelForCausalLM.from_pretrained(info.path)
        with refused(CapabilityError, "capability.training"):
            PagedModel(loaded.train(), info)
        with refused(CapabilityError, "capability.dtype", "float64"):
            PagedModel(loaded.eval().double(), info)
        with refused(UnknownName, None, "float8"):
            PagedModel.load(info, "float8")

    def test_weights_that_are_not_those_of_the_files(self, info):
        class LoraLinear(torch.nn.Module):
            """As adapters are put in: around the layer."""

            def __init__(self, base: torch.nn.Linear):
                super().__init__()
                self.base, self.lora = base, torch.nn.Linear(base.in_features, base.out_features)

            def forward(self, x):
                return self.base(x) + self.lora(x)

        loaded = AutoModelForCausalLM.from_pretrained(info.path).eval()
        layer = loaded.model.layers[1].mlp
        plain = layer.up_proj
        layer.up_proj = LoraLinear(plain)
        with refused(CapabilityError, "capability.other-layers", "layers.1.mlp.up_proj", "LoraLinear"):
            PagedModel(loaded, info)
        layer.up_proj = plain
        weight, plain.weight = plain.weight, torch.nn.Parameter(plain.weight.to(torch.int8), requires_grad=False)
        with refused(CapabilityError, "capability.other-weights", "up_proj.weight is int8"):
            PagedModel(loaded, info)
        plain.weight = weight
        PagedModel(loaded, info)
        loaded.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        with refused(CapabilityError, "capability.quantised"):
            PagedModel(loaded, info)

    def test_numbers_that_are_none(self, info, roomy):
        broken = PagedModel.load(info)
        with torch.no_grad():
            broken.model.model.norm.weight[3] = torch.nan
        run = PagedRun(broken, roomy)
        with refused(NonFinite, "non-finite.logit", "tokens 0 to 8"):
            run.extend(prompt(10))

    def test_a_folder_without_a_tokenizer_has_no_identity(self, model, info, tmp_path):
        for file in info.path.iterdir():
            if "token" not in file.name:
                (tmp_path / file.name).write_bytes(file.read_bytes())
        with refused(ModelError, "model.no-tokenizer", tmp_path):
            PagedModel(model.model, replace(info, path=tmp_path)).identity()


class TestIdentity:
    def test_of_two_dtypes_and_chunk_sizes(self, model, halved):
        assert differences(model.identity(8), model.identity(8)) == []
        assert {code for code, _ in differences(model.identity(8), halved.identity(16, salt="b"))} == {
            Code.DTYPE,
            Code.LAYOUT,
            Code.SALT,
        }

    def test_says_which_rotary_embedding_runs(self, info):
        """config.json, and with it the model's hash, is the same: the override shows all the same."""
        plain = PagedModel.load(info)
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        other = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32, rope_parameters=rope)
        found = differences(PagedModel(other.eval(), info).identity(8), plain.identity(8))
        assert [code for code, _ in found] == [Code.ROPE] and "factor" in found[0].message

    def test_geometry_is_the_models(self, halved):
        geometry = halved.geometry(8)
        assert geometry.chunk_shape == (3, 2, 2, 8, 32) and geometry.dtype == "bfloat16"
