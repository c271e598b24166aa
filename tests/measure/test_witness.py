"""The witness: a plain forward is the engines' own, and what differs from it is refused with its name."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tiny
from kvlab.codecs.recipes import named_recipe
from kvlab.core import testimony
from kvlab.core.decoder import Decoder
from kvlab.core.errors import Fault, WitnessDisagrees
from kvlab.core.model import resolve, resolve_folder
from kvlab.core.records import TOKENS, read_job
from kvlab.engines import hooks
from kvlab.engines.hf import engine as hf
from kvlab.engines.registry import start
from kvlab.measure import quick_run, witnessing
from kvlab.measure.coding import Coder
from kvlab.measure.engines import Which, refuse_impostor
from kvlab.measure.scoring import WindowRun
from kvlab.measure.store import Found
from kvlab.measure.windows import windows_for
from kvlab.stats.divergences import token_record
from kvlab.text import corpus
from kvlab.witness import testify, weights
from kvlab.witness.plain import PlainModel, turns
from kvlab.witness.scores import scored
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.jobs.measure import CellsPart, Lab, run
from kvlab_pipeline.studies.checks import refuse_unwitnessed
from refusals import refused

pytestmark = pytest.mark.engine
IDS = list(range(7, 71))


TRAINED = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": TRAINED,
    "yarn, told everything": TRAINED | {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, untruncated": TRAINED | {"truncate": False},
    "yarn, as strong as told": TRAINED | {"attention_factor": 1.3},
    "llama3": TRAINED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope, short": {
        "short_factor": [1 + i / 20 for i in range(16)],
        "long_factor": [2 + i / 10 for i in range(16)],
    },
    "longrope, long": {"short_factor": [1.0] * 16, "long_factor": [2 + i / 10 for i in range(16)]}
    | {"original_max_position_embeddings": 48},
    "proportional": {"factor": 2.0},
}
MODELS = {
    **{kind: (kind, {}) for kind in tiny.CLASSES},
    **{f"{kind} with a window": (kind, slides) for kind, slides in tiny.SLIDES.items()},
    "gemma3 with biases": ("gemma3", {"attention_bias": True}),
    "gemma3, its full layers scaled": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "wide heads": ("llama", {"head_dim": 48, "num_key_value_heads": 4}),
    **{act: ("qwen2", {"hidden_act": act}) for act in ("gelu", "gelu_pytorch_tanh", "relu")},
    **{
        kind: ("llama", {"rope_parameters": {"rope_type": kind.partition(",")[0], "rope_theta": 5e4} | settings})
        for kind, settings in ROPES.items()
    },
}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_read_when_they_are_used_give_the_same(tied, tmp_path, monkeypatch):
    """Of a large model no tensor is held, and the head is read by blocks of rows, here of 100."""
    folder = tiny.write_model(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    held = PlainModel(folder).forward(IDS, 40)
    monkeypatch.setattr(weights, "MOST_HELD", 0)
    monkeypatch.setattr(weights, "ROWS", 100)
    read = PlainModel(folder).forward(IDS, 40)
    assert all(torch.equal(read.own[place], x) for place, x in held.own.items())
    torch.testing.assert_close(read.logits, held.logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", MODELS)
def test_the_plain_forward_is_the_model(case, tmp_path):
    kind, changes = MODELS[case]
    folder = tiny.write_model(tmp_path / kind, kind, **changes)
    plain = PlainModel(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        due = whole(torch.tensor([IDS])).logits[0, 40:-1]
    clean = plain.forward(IDS, 40)
    torch.testing.assert_close(clean.logits, due, atol=1e-5, rtol=1e-5)
    for rotated, held in ((False, clean.own), (True, clean.read)):
        context = {place: x[:, :40] for place, x in held.items()}
        torch.testing.assert_close(
            plain.forward(IDS, 40, context, begin=40, rotated=rotated).logits, due, atol=1e-5, rtol=1e-5
        )


def test_the_speeds_of_rotation_are_those_of_transformers():
    """To the last bits: an error of 1e-6 in them is one of .1 radians at 100,000 tokens."""
    shape = {name: tiny.SHAPE[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    for kind, given_here in ROPES.items():
        rope = {"rope_type": kind.partition(",")[0], "rope_theta": 5e5} | given_here
        config = LlamaConfig(**shape, rope_parameters=dict(rope), max_position_embeddings=256)
        said = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        decoder = Decoder.read(said, Path("nowhere"))
        for tokens in (40, 200):
            cos, sin = turns(decoder, decoder.layers[0].rope, tokens)
            due = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(tokens)[None])
            for found, one in zip((cos, sin), due, strict=True):
                torch.testing.assert_close(found, one[0], rtol=0, atol=2e-5, msg=f"{kind}, {tokens} tokens")


@pytest.mark.parametrize("fault", ["a bias is dropped", "a scale is dropped", "two layers change places"])
def test_a_loader_that_is_wrong_is_found_out(fault, tiny_params, tiny_windows, tiny_fitted, monkeypatch):
    """The witness reads the files itself, so what the chain's loader does to the weights is not done to its own."""
    load = hf._loaded

    def wrong(*given_here):
        model = load(*given_here)
        first, second = model.model.layers[1:3]
        with torch.no_grad():
            if fault == "a bias is dropped":
                second.self_attn.k_proj.bias.zero_()
            elif fault == "a scale is dropped":
                second.mlp.up_proj.weight.mul_(2)
            else:
                first.self_attn.v_proj.weight.copy_(second.self_attn.v_proj.weight)
        return model

    monkeypatch.setattr(hf, "_loaded", wrong)
    info = resolve(tiny_params.model)
    engine = start("hf", info, "float32", max_tokens=96)
    windows = corpus.load(tiny_windows, info.model_hash)
    subject = quick_run.NamedCodec("int 4", named_recipe("int", 4), None)
    with refused(WitnessDisagrees, "witness.other-logits"):
        quick_run.score(engine, windows.test[:2], windows.context, [subject], partial(PlainModel, info.path))


def test_the_witness_loads_nothing_by_transformers(tiny_model):
    """In a process of its own: what it needs does not even import it."""
    program = "import sys; from pathlib import Path; from kvlab.witness.plain import PlainModel;" + (
        "print(PlainModel(Path(sys.argv[1])).forward([5, 6, 7, 8], 1).logits.shape, 'transformers' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(tiny_model)], capture_output=True, text=True)
    assert found.stdout.strip() == "torch.Size([2, 320]) False", found.stderr


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 1e-1, 10.0]))
def test_both_formulas_for_kl_agree(seed, size):
    source = np.random.default_rng(seed)
    reference = 3 * source.standard_normal((20, 40))
    alternative = reference + size * source.standard_normal((20, 40))
    labels = source.integers(0, 40, 20)
    theirs = token_record(torch.from_numpy(reference), torch.from_numpy(alternative), torch.from_numpy(labels))
    ours = scored(reference, alternative, labels)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name].numpy(), values, rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def asked(tiny_params, tiny_windows, tiny_fitted, hf_engine):
    """What scores the witnesses of the study `factors` on transformers, by protocol."""
    with Lab.open(tiny_params, tiny_windows, {"hf": tiny_fitted}) as lab:
        cells = [cell for cell in plan.study_cells(tiny_params, "factors", "hf") if cell.family]
        cells = [cell.model_copy(update={"dtype": "float32"}) for cell in cells]
        lab.engines.running[Which.of("hf", "float32")] = hf_engine
        subjects = [lab.subject(cell) for cell in cells]
        found = {one.cell.protocol: one for one in lab.witnesses(subjects, windows_for(cells, lab.windows))}
        yield lambda protocol: found[protocol].score(lab.visit(found[protocol].on))
        lab.engines.running.clear()


@pytest.mark.parametrize("protocol", ["snapshot", "in_forward"])
def test_an_undisturbed_cell_is_witnessed_in_every_place(asked, protocol):
    seen = testimony.Testimony.model_validate(asked(protocol).note)
    assert seen.effects == seen.expected_effects == 4  # two coded layers, K and V
    assert max(seen.reference_kl, seen.alternative_kl) < 1e-9
    assert max(seen.tensor_error, seen.read_error) < 1e-5
    assert seen.kl > 1e-5 and seen.nbytes > 0 and seen.engine.library == "transformers"


@pytest.mark.parametrize("protocol", ["snapshot", "in_forward"])
def test_what_leaves_the_codec_is_what_the_codec_says(asked, protocol, monkeypatch):
    code = Coder._code

    def softened(self, x, site):
        found = code(self, x, site)
        return replace(found, tensor=(found.tensor + x.float()) / 2)

    monkeypatch.setattr(Coder, "_code", softened)
    with refused(WitnessDisagrees, "witness.other-codec"):
        asked(protocol)


def test_bytes_are_those_of_files(asked, monkeypatch):
    code = Coder._code
    monkeypatch.setattr(
        Coder, "_code", lambda self, *given: replace(found := code(self, *given), nbytes=found.nbytes - 1)
    )
    with refused(WitnessDisagrees, "witness.other-bytes") as caught:
        asked("snapshot")
    assert re.search(r"counts \d+ coded bytes, and the files of its codecs hold \d+", str(caught.value))


def test_attention_has_to_read_what_the_tap_returned(asked, monkeypatch):
    through = hooks.through

    def deaf(tap, layer, part, flat, *shape):
        answer = through(tap, layer, part, flat, *shape)
        return flat if (layer, part) == (2, "v") else answer

    monkeypatch.setattr(hooks, "through", deaf)
    with refused(WitnessDisagrees, "witness.other-logits"):
        asked("in_forward")


@pytest.fixture(scope="module")
def in_bfloat16(tiny_model):
    """Has a codec of four bits witnessed in bfloat16."""
    model, ids = PlainModel(tiny_model), IDS * 2
    with closing(start("hf", resolve_folder(tiny_model), "bfloat16", max_tokens=len(ids))) as engine:
        codec = quick_run.NamedCodec("int 4", named_recipe("int", 4))
        coder = quick_run.codec_variant(codec, engine).coder
        yield lambda: witnessing.examined(model, WindowRun(engine, ids, 96, 0), coder, ids)


def test_in_bfloat16_coded_tokens_are_read_to_a_hundredth(in_bfloat16, monkeypatch):
    assert testimony.Testimony.model_validate(in_bfloat16().note).effects
    filled = hf.HFEngine.filled

    def louder(self, cache, *given):
        return filled(self, {place: x * 1.03 if place == (1, "v") else x for place, x in cache.items()}, *given)

    monkeypatch.setattr(hf.HFEngine, "filled", louder)
    with refused(WitnessDisagrees, "witness.other-tensors", "layer 1 v"):
        in_bfloat16()


def test_a_broken_cache_makes_more_of_bfloat16s_rounding_up_to_a_limit():
    for moved, logits, tensors in ((0.0, 0.01, 0.05), (2.0, 0.41, 0.65), (50.0, 0.5, 0.8)):
        claim = SimpleNamespace(cell=SimpleNamespace(dtype="bfloat16"))
        witness = testify.Witness(None, claim, None)
        witness.__dict__["_moved"] = moved
        assert witness._allowed == pytest.approx((logits, tensors))


def test_two_studies_that_ask_for_the_same_are_each_witnessed_under_their_own_id(
    tiny_params, tiny_windows, tiny_fitted, hf_engine, tmp_path
):
    """One computation serves both, by way of the store, and each record names its own cell."""
    (cell, *_) = [one for one in plan.study_cells(tiny_params, "factors", "hf") if one.family]
    cells = [cell.model_copy(update={"dtype": "float32", "study": study}) for study in ("factors", "layers")]
    with Lab.open(tiny_params, tiny_windows, {"hf": tiny_fitted}, tmp_path / "store") as lab:
        lab.engines.running[Which.of("hf", "float32")] = hf_engine
        parts = [CellsPart(lab, one.study, [one], tmp_path / f"{one.study}.parquet") for one in cells]
        assert lab.store.key(parts[0].witnesses[0]) == lab.store.key(parts[1].witnesses[0])
        run(lab, parts, "")
        lab.engines.running.clear()
    for one in cells:
        record, tokens = read_job(tmp_path / f"{one.study}.parquet")
        assert [seen.cell_id for seen in record.witnessed] == [one.cell_id]
        refuse_unwitnessed(record, {one.cell_id: tokens}, tmp_path)


def test_rows_that_were_not_witnessed_are_refused(tiny_params):
    values = {
        name: [1, 2] if dtype.is_integer() else [0.5, 0.25] for name, dtype in TOKENS.items() if name != "cell_id"
    }
    rows = pl.DataFrame(values | {"cell_id": ["a", "a"]}).select(TOKENS.names()).cast(dict(TOKENS))
    proof = testimony.Proof(library="transformers", version="5", model="M", attention="A", cache_blocks=None)
    numbers = dict.fromkeys(("reference_kl", "alternative_kl", "tensor_error", "read_error", "kl"), 0.0)
    counts = dict.fromkeys(("window", "effects", "expected_effects", "nbytes"), 0)
    cell = plan.study_cells(tiny_params, "factors", "hf")[0]
    note = testimony.Testimony(cell_id="a", engine=proof, **numbers, **counts).model_dump(mode="json")
    seen = Found(note, rows)
    assert witnessing.witnessed_of(seen, cell, rows).cell_id == cell.cell_id
    with refused(WitnessDisagrees, "witness.other-numbers", "kl at position 1 is 0.5005", "0.5 was"):
        witnessing.witnessed_of(seen, cell, rows.with_columns(pl.col("kl") * 1.001))
    means = {"kl": 0.375, "delta_nll": 0.0, "top1_agreement": 1.0}
    assert witnessing.witnessed_mean_of(seen, cell, means).cell_id == cell.cell_id
    with refused(WitnessDisagrees, "witness.other-numbers", "delta_nll is 0.01", "0 was"):
        witnessing.witnessed_mean_of(seen, cell, means | {"delta_nll": 0.01})


def test_the_function_that_attends_is_seen(tiny_params, hf_engine):
    from kvlab.core.model import resolve

    other = start("hf", resolve(tiny_params.model), "bfloat16", "eager", max_tokens=96)
    for engine, function, dtype in ((hf_engine, "sdpa_attention_forward", "float32"),
                                    (other, "eager_attention_forward", "bfloat16")):  # fmt: skip
        with engine.reading() as seen:
            engine.score(IDS, 40)
        assert (seen.attention, seen.dtype) == (function, dtype)
        assert seen.tensors[2, "k"].shape == (2, len(IDS), 32)


def test_an_engine_has_to_be_what_its_name_says(hf_engine, vllm_engine):
    for name, engine in (("hf", hf_engine), ("vllm", vllm_engine)):
        refuse_impostor(name, engine.proof, {})
    assert vllm_engine.proof.cache_blocks > 0
    with refused(Fault, "fault.other-engine", "vllm", "transformers"):
        refuse_impostor("vllm", hf_engine.proof, {})
    with refused(Fault, "fault.same-engine", "hf", "twin"):
        refuse_impostor("hf", hf_engine.proof, {"twin": hf_engine.proof})


def test_vllm_is_read_where_its_kernel_reads(vllm_engine, hf_engine):
    """In a pass of its own, and over a context that was brought: K and V of all tokens, as transformers has them."""
    with hf_engine.reading() as due:
        hf_engine.score(IDS, 40)
    with vllm_engine.reading() as seen:
        vllm_engine.score(IDS, 40)
    cache = {place: x[:, :40] for place, x in due.tensors.items()}
    with vllm_engine.reading() as over:
        vllm_engine.score_over(IDS, cache, "post_rope")
    for place, x in due.tensors.items():
        torch.testing.assert_close(seen.tensors[place], x, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(over.tensors[place], x, atol=1e-4, rtol=1e-4)
