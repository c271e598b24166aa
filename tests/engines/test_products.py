"""Products in bfloat16 on a processor without instructions for them: the same to the rounding, in both engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kvlab.core.model import resolve_folder
from kvlab.engines import products
from kvlab.engines.hf.engine import HFEngine
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.snapshot.numerics import differing


@pytest.fixture(params=[True, False], ids=["lacks", "has"])
def lacks(request, monkeypatch):
    """Whether this processor lacks the instructions, as the engines are made to believe."""
    monkeypatch.setattr(products, "lacks_bfloat16", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return request.param


@given(
    tokens=st.integers(0, 9),
    inside=st.integers(1, 300),
    outside=st.sampled_from([1, 7, products.STRIP, products.STRIP + 1]),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_product_is_the_exact_one_rounded_once(tokens, inside, outside, bias, seed):
    made = torch.Generator().manual_seed(seed)
    x, weight, added = (
        torch.randn(shape, generator=made).bfloat16() for shape in ((2, tokens, inside), (outside, inside), (outside,))
    )
    found = products.linear(x, weight, added if bias else None)
    exact = functional.linear(x.double(), weight.double(), added.double() if bias else None)
    terms = functional.linear(x.double().abs(), weight.double().abs(), added.double().abs())
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    # half a step of bfloat16, and what sums in float32 may be off
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + terms * (inside + 1) * 2**-24 + 1e-38).all()


def test_a_gradient_goes_through_a_product():
    x, weight = torch.randn(5, 33).bfloat16().requires_grad_(), torch.randn(products.STRIP + 3, 33).bfloat16()
    back = torch.randn(5, len(weight)).bfloat16()
    (found,) = torch.autograd.grad(products.linear(x, weight), x, back)
    assert torch.allclose(found.float(), (back.float() @ weight.float()).bfloat16().float(), rtol=2**-7)


def test_float32_is_torchs_own_product():
    x, weight = torch.randn(2, 9, 33), torch.randn(5, 33)
    assert torch.equal(products.linear(x, weight), functional.linear(x, weight))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_models_take_it_where_it_is_needed(lacks, tiny_model, dtype):
    engine = HFEngine(resolve_folder(tiny_model), dtype, "sdpa", 64)
    kinds = {type(module) for module in engine.model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {products.Linear if lacks and dtype == "bfloat16" else nn.Linear}


def test_a_snapshot_says_how_products_were_computed(lacks, tiny_model):
    made = PagedModel.load(resolve_folder(tiny_model), "bfloat16").made
    named = {"products"} if lacks else set()
    assert {*differing(made, {**made, "products": "torch's"})} == named


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_that_vllm_loads_take_it_where_it_is_needed(lacks, monkeypatch, dtype):
    utils = pytest.importorskip("vllm.model_executor.layers.utils")
    own = []
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda *given: own.append(given))
    layer = SimpleNamespace(weight=torch.zeros(3, 4, dtype=dtype))
    with products.chosen_by_vllm():
        utils.dispatch_cpu_unquantized_gemm(layer, True)
    taken = lacks and dtype == torch.bfloat16
    assert (getattr(layer, "cpu_linear", None) is products.linear, own) == (taken, [] if taken else [(layer, True)])
