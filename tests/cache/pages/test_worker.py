"""Coded pages where the model is: what is refused before it is served, and what a step has to have done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tiny
from kvlab.cache.files.recipe import CalibrationFiles, write_recipe_file
from kvlab.cache.pages import worker
from kvlab.cache.pages import worker as canary
from kvlab.cache.pages.exact import ExactStore
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import Unturned
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError, CodecNotActive, NonFinite
from kvlab.core.recipe import PAGES_VARIABLE, Recipe
from refusals import refused, refused_in_one_line

LOSSY = Recipe(k=HadamardStream(bits=4), v=HadamardStream(bits=4))
HEADS, DIM, BLOCK = 2, 32, 4


def config(model: Path | None = None, **changes) -> SimpleNamespace:
    """What is read of a `VllmConfig` on a CPU; `changes` name leaves."""
    leaf = SimpleNamespace(
        **{
            "dtype": torch.float32,
            "enforce_eager": False,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "cache_dtype": "auto",
            "kv_offloading_size": None,
            "backend": None,
            "backend_per_kind": {},
            "device_type": "cpu",
            "model": str(model),
            "revision": None,
            "hf_config": SimpleNamespace(),
            "hf_text_config": SimpleNamespace(num_hidden_layers=3),
        }
        | changes
    )
    parts = ("model_config", "parallel_config", "cache_config", "attention_config", "device_config")
    absent = dict.fromkeys(("speculative_config", "lora_config", "kv_transfer_config"))
    runner = changes.get("use_v2_model_runner", False)
    return SimpleNamespace(**dict.fromkeys(parts, leaf), **absent, use_v2_model_runner=runner)


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """Writes a recipe and names it by the variable."""

    def write(recipe: Recipe = LOSSY, **named) -> None:
        monkeypatch.setenv(PAGES_VARIABLE, str(write_recipe_file(tmp_path / "r.json", recipe, **named)))

    return write


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"device_type": "cuda"}, "cuda"),
        ({"backend": SimpleNamespace(name="TRITON_ATTN")}, "attention backend TRITON_ATTN"),
        ({"backend_per_kind": {"full_attention": "FLEX_ATTENTION"}}, "attention backend FLEX_ATTENTION"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ],
)
def test_settings_that_coded_pages_cannot_serve_are_refused(tiny_model, recipe_file, changes, data):
    recipe_file()
    with refused_in_one_line(CapabilityError, "capability.vllm-setting", PAGES_VARIABLE, data):
        worker.prepare(config(tiny_model, **changes))


def test_plain_settings_pass_and_need_no_eager_mode(tiny_model, recipe_file):
    recipe_file()
    assert worker.prepare(config(tiny_model)).layers == (0, 1, 2)


def test_layers_left_out_are_refused(tiny_model, recipe_file):
    recipe_file(layers=[1, 2])
    with refused(CapabilityError, "capability.some-layers", "2 of 3 layers", "`layers`"):
        worker.prepare(config(tiny_model))


def test_codecs_without_bytes_for_each_token_are_refused(tiny_model, recipe_file):
    recipe_file(Recipe(k=KiviStream(bits=2, axis="channel"), v=HadamardStream(bits=4)))
    with refused(CapabilityError, "capability.tokens-together", "'kivi' of stream k"):
        worker.prepare(config(tiny_model))


def test_a_missing_or_foreign_calibration_is_refused(tiny_model, tiny_calibration, recipe_file, tmp_path):
    recipe = Recipe(k=KltStream(bits=3), v=KltStream(bits=3))
    recipe_file(recipe)
    with pytest.raises(CalibrationMismatch):
        worker.prepare(config(tiny_model))
    recipe_file(
        recipe,
        calibration=CalibrationFiles(sigma=tiny_calibration["sigma"], components=tiny_calibration["components"]),
    )
    assert worker.prepare(config(tiny_model)).calibration_hash
    with pytest.raises(CalibrationMismatch):
        worker.prepare(config(tiny.write_model(tmp_path / "other", seed=1)))


def test_a_head_size_that_vllm_gets_wrong_is_refused(recipe_file, tmp_path):
    recipe_file()
    model = tiny.write_model(tmp_path / "model", kind="qwen3", head_dim=48)
    with refused(CapabilityError, "capability.head-size", "head size 48"):
        worker.prepare(config(model))


def test_a_sliding_window_is_refused(recipe_file, tmp_path):
    recipe_file()
    model = tiny.write_model(tmp_path / "model", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with refused(CapabilityError, "capability.window", "3 of 3 layers"):
        worker.prepare(config(model))


# -- what a step has to have done


def watch(*counts: tuple[int, ...]) -> worker.PagesWatch:
    """Layers that wrote and read so many tokens, and had so many queries read exact ones too."""
    found = worker.PagesWatch(SimpleNamespace(), "float32")
    for layer, (written, read_back, *exact) in enumerate(counts):
        pages = LayerPages(layer, *[SimpleNamespace(bytes=4)] * 2, Unturned())
        pages.written, pages.read_back, pages.read_exact = written, read_back, sum(exact)
        found.layers.append(pages)
    return found


def test_a_step_whose_tokens_are_all_in_the_pages_is_counted():
    found = watch((5, 9), (5, 5))
    found.check(5)
    assert (found.steps, found.tokens) == (1, 5) and found.layers[0].written == 0


@pytest.mark.parametrize("counts", [(4, 9), (0, 0), (5, 0), (10, 9)])
def test_a_step_that_left_pages_out_does_not_return(counts):
    with refused(CodecNotActive, "not-active.pass", f"layer 1 ({counts[0]} of 5 tokens written, {counts[1]} read"):
        watch((5, 9), counts).check(5)


def test_where_tokens_are_exact_pages_may_be_read_less_and_exact_ones_have_to_be_read():
    watch((5, 2, 5)).check(5, coded=2)
    for counts in ((5, 1, 5), (5, 2, 0), (4, 2, 5)):
        with refused(CodecNotActive, "not-active.pass", f"{counts[1]} read, {counts[2]} of 5 beside exact ones"):
            watch(counts).check(5, coded=2)
    with refused(CodecNotActive, "not-active.pass", "5 of 0 beside exact ones"):
        watch((5, 9, 5)).check(5)


def test_exact_tokens_are_taken_from_vllms_memory_for_its_cache():
    store = ExactStore(4, 128, 3, 2, HEADS, DIM, torch.bfloat16)
    assert worker.left(1 << 30, None) == 1 << 30 and worker.left(1 << 30, store) == (1 << 30) - store.nbytes
    with refused(CapabilityError, "capability.no-memory-left", store.nbytes, "max_num_seqs 3", store.bytes_per_request):
        worker.left(store.nbytes, store)


# -- what is read back at the start


def runner(groups=1, blocks=3, block_size=BLOCK) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size))
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=blocks))


def served_worker(monkeypatch, shape, **kwargs) -> SimpleNamespace:
    attention = nn.Module()
    attention.attn = SimpleNamespace(kv_cache=torch.zeros(shape, dtype=torch.uint8))
    monkeypatch.setattr(worker, "attention_layers", lambda model, info: [attention])
    found = watch()
    found.served, found.layers = SimpleNamespace(info=None), [SimpleNamespace(layer=0, bytes=72)]
    return SimpleNamespace(kvlab_pages=found, model_runner=runner(**kwargs), get_model=lambda: None)


def test_several_groups_of_caches_are_refused(monkeypatch):
    with refused(CapabilityError, "capability.cache-groups", "2 groups", PAGES_VARIABLE):
        worker.confirm(served_worker(monkeypatch, (3, 1, BLOCK, 68), groups=2))


@pytest.mark.parametrize("shape", [(3, 1, BLOCK, 67), (2, 1, BLOCK, 72), (3, HEADS, BLOCK, 64)])
def test_pages_that_vllm_made_otherwise_are_not_served_from(monkeypatch, shape):
    with refused(CodecNotActive, "not-active.page-shape", "layer 0"):
        worker.confirm(served_worker(monkeypatch, shape))


@pytest.mark.parametrize(
    ("over", "zeroed", "error", "code"),
    [
        (0.0, 0.0, CodecNotActive, "not-active.canary-unread"),
        (3.0, 5.0, CodecNotActive, "not-active.canary-differs"),
        (float("nan"), 5.0, NonFinite, None),
    ],
)
def test_a_canary_that_is_not_heard_stops_the_start(monkeypatch, over, zeroed, error, code):
    logits = iter([torch.tensor([[0.0, first]]) for first in (0.0, over, zeroed)])
    monkeypatch.setattr(canary.PageTrial, "last_logits", lambda self, first: next(logits))
    attention = SimpleNamespace(layer_name="a", kv_cache=torch.zeros(3, 1, BLOCK, 8, dtype=torch.uint8))
    model = SimpleNamespace(max_model_len=64, dtype=torch.float32, get_vocab_size=lambda: 2)
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model),
        model_config=model,
        kv_cache_config=SimpleNamespace(num_blocks=3),
        input_ids=SimpleNamespace(gpu=torch.zeros(1, dtype=torch.int32)),
    )
    with refused(error, code):
        canary.canary_kl(made, [attention], BLOCK)
