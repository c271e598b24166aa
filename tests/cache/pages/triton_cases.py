"""The Triton kernels that serve `klt`: what they write and read is what torch says, on a GPU where there is one.

Elsewhere in Triton's interpreter, on a CPU: `test_compiled.py` runs these in a process of its own, with
``TRITON_INTERPRET=1``: Triton asks for it when a kernel is defined. On a machine with a GPU:
``python -m pytest tests/cache/pages/triton_cases.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from cache.pages.test_rows import SITE
from cache.test_gpu import tiny_llama
from cache.test_hf_cache import HEAD_DIM, generated, logits
from cache.test_served import ENDS, TEXT, Fitted, recipe
from codec import ladder_making
from codec.ladder_making import planted
from kvlab.cache.hf import codec_tables
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.hf.rope import find_rotary, turns
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.klt import KltStream, served_triton
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.klt.served_triton import CodedSpans, ServedLoops
from kvlab.codecs.registry import build
from kvlab.codecs.shared.turning import RUN
from kvlab.core.errors import CapabilityError, NonFinite
from refusals import refused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16


def layer(bits: float, heads: int, dim: int):
    """Rows of K and V, the loops of both, and the rotary embedding with a mean far larger than what is about it."""
    codec = build(KltStream(bits=bits, escape=False, block_size=64), ladder_making.calibration(heads, dim))
    k, v = (KltRows(codec, SITE, heads, dim, DEVICE) for _ in "kv")
    angle = torch.outer(torch.arange(4096), 10.0 ** -torch.linspace(0, 4, dim // 2))
    rotation = Rotation(1.3 * torch.cat([angle.cos(), angle.sin()], 1).to(DEVICE))  # as some scale attention
    return k, v, ServedLoops(k.plan, v.plan), MeanByPosition(rotation, k.plan.decoding.mean.to(DEVICE))


def pages_of(k, v, loops, rotation, x_k, x_v, faulty=False):
    """Tokens in pages whose order is not theirs: the rows, their slots and the block table."""
    tokens = x_k.shape[1]
    blocks = torch.randperm(-(-tokens // BLOCK) + 3)
    at = torch.arange(tokens)
    slots = (blocks[at // BLOCK] * BLOCK + at % BLOCK).to(DEVICE)
    rows = torch.full((len(blocks) * BLOCK, k.bytes + v.bytes), 255, dtype=torch.uint8, device=DEVICE)
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    loops.write(rotation.undo(x_k, at.to(DEVICE)), x_v, rows, slots, faults)
    assert faults.item() == faulty
    return rows, slots, blocks[None]


@pytest.mark.parametrize(("heads", "dim", "bits"), [(3, 64, 0.5), (6, 64, 4), (1, 40, 7.5), (2, 16, 2)], ids=str)
def test_rows_and_attention_are_what_torch_says(heads, dim, bits):
    k, v, loops, rotation = layer(bits, heads, dim)
    tokens, per = 300, 3
    x_k, x_v = (planted(heads, tokens, dim, seed).to(DEVICE) for seed in (1, 2))
    at = torch.arange(tokens, device=DEVICE)
    x_k = rotation.redo(x_k, at)
    rows, slots, blocks = pages_of(k, v, loops, rotation, x_k, x_v)
    due = torch.cat([k.encode(rotation.undo(x_k, at)), v.encode(x_v)], 1)
    # one rounding apart, a component between two values goes to one or the other
    assert (rows[slots] != due).float().mean() < 1e-3

    first, until = [4, 0, 9], [tokens, 130, 9]
    q = torch.randn(3, heads * per, dim, device=DEVICE) * dim**-0.5
    span = CodedSpans.of(blocks.expand(3, -1), first, until, DEVICE)
    mean, log_sum = loops.attend(rows, BLOCK, span, q, rotation.rotation.table)
    keys = rotation.redo(k.decode(rows[slots][:, : k.bytes]), at).double().repeat_interleave(per, 0)
    values = v.decode(rows[slots][:, k.bytes :]).double().repeat_interleave(per, 0)
    for number, (begin, end) in enumerate(zip(first, until, strict=True)):
        scores = torch.einsum("hd,hnd->hn", q[number].double(), keys[:, begin:end])
        torch.testing.assert_close(log_sum[number].double(), scores.logsumexp(1), rtol=0, atol=5e-3)
        if end > begin:
            answer = torch.einsum("hn,hnd->hd", scores.softmax(1), values[:, begin:end])
            scale = values.abs().amax((1, 2))[:, None]
            assert ((mean[number] - answer).abs() / scale).max() < 5e-3
    assert mean.isfinite().all()


def test_no_tile_is_of_two_runs():
    assert RUN % served_triton.TILE == served_triton.SHORTEST % served_triton.TILE == 0


def test_what_is_not_finite_is_noticed():
    k, v, loops, rotation = layer(4, 3, 64)
    x = planted(3, 5, 64, 1).to(DEVICE)
    x[1, 2, 3] = torch.nan
    pages_of(k, v, loops, rotation, planted(3, 5, 64, 2).to(DEVICE), x, faulty=True)


def test_an_answer_does_not_hang_on_who_else_is_served():
    k, v, loops, rotation = layer(2, 3, 64)
    x_k, x_v = (planted(3, 300, 64, seed).to(DEVICE) for seed in (1, 2))
    rows, _, blocks = pages_of(k, v, loops, rotation, x_k, x_v)
    q = torch.randn(2, 9, 64, device=DEVICE)
    turns = rotation.rotation.table
    both, one = CodedSpans.of(blocks.expand(2, -1), [0, 0], [300, 40], DEVICE), CodedSpans.of(blocks, [0], [40], DEVICE)
    together, alone = loops.attend(rows, BLOCK, both, q, turns), loops.attend(rows, BLOCK, one, q[1:], turns)
    for found, due in zip(together, alone, strict=True):
        # torch's products of more rows round otherwise, and with them what is float16
        torch.testing.assert_close(found[1], due[0], atol=1e-3, rtol=1e-3)


# The transformers cache around them.


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    model = tiny_llama("cpu")
    rotary = find_rotary(model, HEAD_DIM)
    return Fitted(model, Rotation(turns(rotary, 0, torch.arange(192)[None], torch.empty(0))[0].table))


def answered(cache: KVCache, model: LlamaForCausalLM, cuts: list[int]) -> torch.Tensor:
    parts = TEXT[:, : sum(cuts)].to(model.device).split(cuts, dim=1)
    found = logits(model, cache, *parts).cpu()
    cache.check()
    return found


@pytest.mark.parametrize(("ends", "cuts"), [("bare", [130, 1, 1]), ("both", [9, 1, 1, 5, 1, 1])])
def test_a_cache_answers_as_torch_alone_does_on_a_cpu(fitted, monkeypatch, ends, cuts):
    mine, model = recipe(bits=4, **ENDS[ends]), tiny_llama(DEVICE)
    cache = KVCache(model, mine, fitted)
    assert all(layer.pages.on_gpu for layer in cache.layers)
    found = answered(cache, model, cuts)
    monkeypatch.setattr(codec_tables, "by_triton", lambda device: False)
    plain = KVCache(model.cpu(), mine, fitted, compiled=False)
    due = answered(plain, model, cuts)
    # a component that rounding takes over the middle between two values moves what it is part of by a step
    assert (found - due).norm() / due.norm() < 0.03
    assert (cache.nbytes, [one.read_back for one in cache.coding()]) == (
        plain.nbytes,
        [one.read_back for one in plain.coding()],
    )


def test_a_padded_batch_generates_what_its_rows_do(fitted):
    model = tiny_llama(DEVICE)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    ids = torch.cat([TEXT[:, :20], TEXT[:, 40:60]]).masked_fill(mask == 0, 0).to(DEVICE)

    def new_tokens(ids, **more):
        cache = KVCache(model, recipe(bits=6), fitted)
        return generated(model, cache, ids, max_new_tokens=4, min_new_tokens=4, **more)[:, -4:]

    together = new_tokens(ids, attention_mask=mask.to(DEVICE))
    for row, own in enumerate((ids[:1, 7:], ids[1:])):
        assert torch.equal(together[row], new_tokens(own)[0])


def test_a_token_that_cannot_be_coded_is_refused(fitted):
    model = tiny_llama(DEVICE)
    cache = KVCache(model, recipe(), fitted)
    with torch.inference_mode():
        model(TEXT[:, :9].to(DEVICE), past_key_values=cache)
        twin = copy.deepcopy(cache)
        model.model.layers[1].self_attn.v_proj.weight.fill_(torch.inf)
        with refused(NonFinite, "non-finite.call"):
            model(TEXT[:, 9:10].to(DEVICE), past_key_values=cache)
        assert not twin.layers[0].pages.faults.item()
        cache.reset()
        assert not cache.layers[0].pages.faults.item()


@pytest.mark.parametrize(
    "changes", [{"v": HadamardStream(bits=4)}, {"k": KltStream(bits=3)}], ids=["hadamard", "escapes"]
)
def test_what_the_kernels_cannot_read_is_refused(fitted, changes):
    with refused(CapabilityError, "capability.served"):
        KVCache(tiny_llama(DEVICE), recipe().model_copy(update=changes), fitted)
