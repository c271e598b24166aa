"""The transformers cache: what attention sees, what is stored, what is refused."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

import tiny
from kvlab.cache.hf.decoded_window import GRAIN
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.hf.layer import STREAMS
from kvlab.cache.rope_turn import apply_rope, undo_rope
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.cast import CastStream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components, whitening
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError, CodecNotActive, UnknownName
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.engines.registry import start
from refusals import refused

IDS = torch.randint(1, 320, (1, 40), generator=torch.Generator().manual_seed(3))
BLOCK = 8
LAYERS, HEADS, HEAD_DIM = 3, 2, 32


def hadamard(bits=3, **changes) -> Recipe:
    return Recipe(k=HadamardStream(bits=bits, **changes), v=HadamardStream(bits=bits, **changes))


def kivi(bits=4) -> Recipe:
    """K in groups of tokens, so that it needs whole blocks; V token by token."""
    k = KiviStream(bits=bits, axis="channel", group=BLOCK, block_size=BLOCK)
    return Recipe(k=k, v=KiviStream(bits=bits, axis="token", group=HEAD_DIM, block_size=BLOCK))


PER_TOKEN = {
    "hadamard": hadamard(block_size=16),
    "int": Recipe(k=IntStream(bits=3, group=16), v=IntStream(bits=2, group=32)),
    "klt": Recipe(k=KltStream(bits=3, block_size=64), v=KltStream(bits=3, block_size=64)),
}


class Fitted:
    """Calibration of both streams."""

    def __init__(self, k: StreamCalibration | None = None, v: StreamCalibration | None = None):
        self.streams = {"k": k, "v": v}

    def stream(self, recipe, stream):
        return self.streams[stream]


def whiteners(layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM) -> StreamCalibration:
    x = torch.randn(layers, heads, 200, head_dim, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-1, 1, head_dim)
    return StreamCalibration(whiteners={i: whitening.fit(x[i].mT @ x[i] / 200, 1e-3) for i in range(layers)})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def logits(model, cache, *chunks, **inputs):
    """Logits of all tokens, given to the model in chunks."""
    return torch.cat([model(chunk, past_key_values=cache, **inputs).logits for chunk in chunks], dim=1)


def generated(model, cache, ids=IDS, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False} | options
    return model.generate(ids, past_key_values=cache, pad_token_id=0, **options)


@pytest.fixture(scope="module")
def fitted(hf_engine):
    """Components of the tiny model's K and V, from one text of random tokens."""
    rows = {}
    ids = torch.randint(1, 320, (96,), generator=torch.Generator().manual_seed(9)).tolist()
    hf_engine.score(ids, 95, lambda layer, part, x: rows.update({(layer, part): x.clone()}))
    streams = {
        stream: {layer: components.fit(rows[layer, stream][:, None], None) for layer in range(LAYERS)}
        for stream in STREAMS
    }
    return Fitted(*(StreamCalibration(components=streams[stream]) for stream in STREAMS))


# --- what attention sees -------------------------------------------------------------------------------------------


PADDED = torch.cat([torch.zeros(1, 9, dtype=torch.long), IDS[:, :31]], dim=1)
BATCH = {
    "input_ids": torch.cat([PADDED, IDS]),
    "attention_mask": torch.tensor([[0] * 9 + [1] * 31, [1] * 40]),
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 2.0},
    "left padding": {"ids": BATCH["input_ids"], "attention_mask": BATCH["attention_mask"]},
    "beams with padding": {"ids": BATCH["input_ids"], "attention_mask": BATCH["attention_mask"], "num_beams": 3},
    "beams, sampled": {"num_beams": 2, "num_return_sequences": 2, "do_sample": True, "temperature": 2.0},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize(
    ("way", "semantics"),
    [*((way, "in_forward") for way in WAYS), ("greedy", "serving"), ("beams with padding", "serving")],
)
def test_identity_generates_what_the_ordinary_cache_does(model, way, semantics):
    options = dict(WAYS[way])
    ids = options.pop("ids", IDS)
    cache = KVCache(model, IDENTITY, semantics=semantics)
    assert torch.equal(generated(model, cache, ids, **options), generated(model, DynamicCache(), ids, **options))


def test_nearly_lossless_codes_generate_the_same_after_the_turned_embedding(model):
    """The rotary embedding is undone and done again on this way, identity leaves K as it arrives."""
    fine = Recipe(k=IntStream(bits=8, group=2), v=IntStream(bits=8, group=2))
    options = dict(WAYS["beams with padding"])
    ids = options.pop("ids")
    assert torch.equal(
        generated(model, KVCache(model, fine, semantics="in_forward"), ids, **options),
        generated(model, DynamicCache(), ids, **options),
    )


def test_bfloat16(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    assert torch.equal(generated(model, KVCache(model, IDENTITY)), generated(model, DynamicCache()))
    cache = KVCache(model, kivi())
    generated(model, cache)
    held = cache.check()[0]
    assert held.exact_bytes == held.exact_tokens * HEADS * HEAD_DIM * 2 > 0
    assert cache.decoded(0)[0].dtype == torch.bfloat16


class CodingTap:
    """Codes K and V at the projections, where the experiments do."""

    def __init__(self, recipe, calibration=None):
        self.codecs = {
            stream: build(getattr(recipe, stream), calibration.stream(None, stream) if calibration else None)
            for stream in STREAMS
        }

    def __call__(self, layer, part, x):
        if part in self.codecs:
            return self.codecs[part].decode(self.codecs[part].encode(x, Site(0, layer, part)))


YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("kind, changes", [*[(kind, {}) for kind in sorted(tiny.CLASSES)], ("llama", {"yarn": YARN})])
def test_in_forward_is_the_projections_tap(kind, changes, tmp_path):
    """Two ways to the same experiment: hooks before the rotary embedding, and a cache after it."""
    changes = {"rope_parameters": changes["yarn"]} if changes else {}
    folder = tiny.write_model(tmp_path, kind, **changes)
    info = resolve(Model(path=str(folder), revision=None, n_layers=3))
    engine = start("hf", info, "float32", "eager", max_tokens=96)  # one order of sums, with a cache and without
    recipe = Recipe(k=IntStream(bits=3, group=16, whiten=True), v=HadamardStream(bits=3))
    calibration = Fitted(k=whiteners())
    want = engine.score(IDS[0].tolist(), 0, CodingTap(recipe, calibration))
    plain = engine.score(IDS[0].tolist(), 0)
    cache = KVCache(engine.model, recipe, calibration, "in_forward")
    got = logits(engine.model, cache, IDS)[0, :-1]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert (want - plain).abs().max() > 0.05


def test_one_bit_moves_the_logits_more_than_four_do(model):
    plain = logits(model, DynamicCache(), IDS)
    moved = {bits: (logits(model, KVCache(model, hadamard(bits), None, "in_forward"), IDS) - plain) for bits in (1, 4)}
    error = {bits: move.square().mean() for bits, move in moved.items()}
    assert error[1] > 3 * error[4] > 0


def test_serving_sees_the_running_call_exactly(model):
    plain = logits(model, DynamicCache(), IDS)
    cache = KVCache(model, hadamard(1), semantics="serving")
    assert torch.equal(logits(model, cache, IDS), plain)
    with refused(CodecNotActive, "not-active.not-read", "semantics='in_forward'"):
        cache.check()
    in_two = logits(model, KVCache(model, hadamard(1), semantics="serving"), IDS[:, :20], IDS[:, 20:])
    assert torch.equal(in_two[:, :20], plain[:, :20])
    assert (in_two[:, 20:] - plain[:, 20:]).abs().max() > 0.05


def test_serving_sees_older_tokens_as_decoded(model):
    """The second call's logits are those of a cache into which the decoded tokens were put by hand."""
    cache = KVCache(model, hadamard(2), semantics="serving")
    logits(model, cache, IDS[:, :20])
    planted = DynamicCache()
    for layer in range(LAYERS):
        planted.update(*cache.decoded(layer), layer)
    assert torch.equal(logits(model, cache, IDS[:, 20:]), logits(model, planted, IDS[:, 20:]))


@pytest.mark.full
@pytest.mark.parametrize("name", PER_TOKEN)
def test_in_forward_does_not_depend_on_the_chunks(model, fitted, name):
    once, chunked = (KVCache(model, PER_TOKEN[name], fitted, "in_forward") for _ in range(2))
    want = logits(model, once, IDS)
    got = logits(model, chunked, *IDS.split([1, 2, 10, 1, 26], dim=1))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert chunked.nbytes == once.nbytes
    assert [e.coded_bytes for e in chunked.coding()] == [e.coded_bytes for e in once.coding()]


def test_assisted_generation_under_a_coarse_codec_is_greedy(model):
    """Candidates are coded, seen as coded, and cropped away when they are refused."""
    caches = [KVCache(model, hadamard(2), semantics="in_forward") for _ in range(2)]
    greedy, assisted = generated(model, caches[0]), generated(model, caches[1], prompt_lookup_num_tokens=3)
    assert torch.equal(greedy, assisted)


@pytest.mark.parametrize(
    ("coded", "semantics"),
    [
        ("per token", "serving"),
        ("blocks", "in_forward"),
        pytest.param("per token", "in_forward", marks=pytest.mark.nightly),
        pytest.param("blocks", "serving", marks=pytest.mark.nightly),
    ],
)
def test_a_decoded_copy_changes_nothing_but_memory(model, coded, semantics):
    recipe = {"per token": hadamard, "blocks": kivi}[coded](2)
    slow, fast = (KVCache(model, recipe, semantics=semantics, window_bytes=own) for own in (0, None))
    options = dict(WAYS["beams with padding"])
    ids = options.pop("ids")
    assert torch.equal(generated(model, slow, ids, **options), generated(model, fast, ids, **options))
    assert (slow.nbytes, slow.working_bytes) == (fast.nbytes, 0)
    rows, tokens = 6, fast.get_seq_length()
    assert fast.working_bytes == LAYERS * 2 * rows * HEADS * -(-tokens // GRAIN) * GRAIN * HEAD_DIM * 4
    for layer in range(LAYERS):
        for a, b in zip(slow.decoded(layer), fast.decoded(layer), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# --- what is stored ------------------------------------------------------------------------------------------------


class Counting:
    """Stands for a codec and counts the tokens that are encoded."""

    def __init__(self, codec):
        self.codec, self.per_token, self.tokens = codec, codec.per_token, 0

    def encode(self, x, site):
        self.tokens += x.shape[1]
        return self.codec.encode(x, site)

    def __getattr__(self, name):
        return getattr(self.codec, name)


def counted(cache):
    """Counters for every layer and stream."""
    coders = [coder for layer in cache.layers for coder in layer.coders.values()]
    for coder in coders:
        coder.codec = Counting(coder.codec)
    return [coder.codec for coder in coders]


@pytest.mark.parametrize("recipe", [hadamard(), kivi()], ids=["per token", "blocks"])
def test_every_token_is_encoded_once(model, recipe):
    cache = KVCache(model, recipe)
    counters = counted(cache)
    generated(model, cache)
    held = cache.check()
    assert [counter.tokens for counter in counters] == [entry.coded_tokens for entry in held]
    assert all(entry.coded_tokens + entry.exact_tokens == 53 for entry in held)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_bytes_are_those_of_the_arrays(model, bits):
    cache = KVCache(model, hadamard(bits))
    generated(model, cache)
    tokens = 53
    per_stream = tokens * HEADS * (HEAD_DIM * bits // 8 + 2)  # codes, and a norm as float16
    assert {entry.nbytes for entry in cache.coding()} == {per_stream}
    assert cache.nbytes == 2 * LAYERS * per_stream + 4 * tokens  # and a position per token
    assert cache.bits_per_value == pytest.approx(bits + 16 / HEAD_DIM + 32 / (2 * LAYERS * HEADS * HEAD_DIM))
    held = [array for layer in cache.layers for rows in layer.rows.values() for row in rows for array in arrays(row)]
    assert sum(array.untyped_storage().nbytes() for array in held) == 2 * LAYERS * per_stream


def arrays(row):
    loose = [] if row.loose is None else [row.loose]
    return [array for block in row.blocks for part in block.encoded.blocks for array in part] + loose


@pytest.mark.parametrize("stream", [HadamardStream(bits=3, block_size=16), KltStream(bits=5, block_size=16)])
def test_what_grew_token_by_token_is_what_one_call_codes(model, fitted, stream):
    """The codes are joined without decoding; the codec itself would have written the same."""
    recipe = Recipe(k=stream, v=stream)
    once, grown = (KVCache(model, recipe, fitted, "in_forward") for _ in range(2))
    logits(model, once, IDS[:, :32])
    logits(model, grown, *IDS[:, :32].split(1, dim=1))
    for stream in STREAMS:  # of layer 0, whose input is the same however the text is cut
        a, b = once.layers[0].rows[stream][0], grown.layers[0].rows[stream][0]
        assert [block.tokens for block in a.blocks] == [block.tokens for block in b.blocks] == [16, 16]
        assert [x.shape for x in arrays(a)] == [x.shape for x in arrays(b)]
        different = sum((x != y).float().mean().item() for x, y in zip(arrays(a), arrays(b), strict=True))
        assert different < 0.02  # a rounding of K may tip a code


def test_tokens_of_an_unfinished_block_are_exact(model):
    cache = KVCache(model, kivi(1), semantics="in_forward")
    plain = DynamicCache()
    logits(model, cache, IDS[:, : BLOCK - 1])
    logits(model, plain, IDS[:, : BLOCK - 1])
    k = cache.layers[0].rows["k"][0]
    assert (k.coded, k.waiting) == (0, BLOCK - 1)
    assert torch.equal(cache.decoded(0)[0], plain.layers[0].keys)
    with refused(CodecNotActive, "not-active.nothing-coded", BLOCK, BLOCK - 1):
        cache.check()
    logits(model, cache, IDS[:, BLOCK - 1 : 2 * BLOCK + 3])
    k = cache.layers[0].rows["k"][0]
    assert (k.coded, k.waiting) == (2 * BLOCK, 3)


def test_codes_that_cannot_be_joined_are_kept_as_they_came(model, monkeypatch):
    """As those of a token that ends inside a byte; here made so by hand."""
    monkeypatch.setattr("kvlab.cache.hf.coder.joiner", lambda *_: None)
    loose = KVCache(model, hadamard(2), semantics="in_forward")
    monkeypatch.undo()
    joined = KVCache(model, hadamard(2), semantics="in_forward")
    assert torch.equal(generated(model, loose), generated(model, joined))
    assert loose.nbytes == joined.nbytes
    assert not loose.is_croppable and joined.is_croppable


def test_a_padded_row_is_stored_as_the_row_alone(model):
    """Also by a codec of blocks: padding takes part in no block, and takes no byte."""
    for recipe in (hadamard(2), kivi(2)):
        both, alone = (KVCache(model, recipe, semantics="serving") for _ in range(2))
        with torch.inference_mode():
            model(**BATCH, position_ids=positions(BATCH["attention_mask"]), past_key_values=both)
            model(IDS[:, :31], past_key_values=alone)
        for layer in range(LAYERS):
            for a, b in zip(both.decoded(layer), alone.decoded(layer), strict=True):
                assert a[0, :, :9].abs().max() == 0
                torch.testing.assert_close(a[:1, :, 9:], b, atol=1e-4, rtol=1e-4)
        row, single = both.layers[0].rows["k"][0], alone.layers[0].rows["k"][0]
        assert (row.pads, row.coded, row.waiting) == (9, single.coded, single.waiting)
        assert sum(e.values for e in both.coding()) == (31 + 40) * LAYERS * 2 * HEADS * HEAD_DIM
        whole = KVCache(model, recipe, semantics="serving")
        logits(model, whole, IDS)
        assert both.nbytes == alone.nbytes + whole.nbytes


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def test_padding_may_fill_whole_chunks(model):
    whole, chunked = (KVCache(model, hadamard(2), semantics="in_forward") for _ in range(2))
    mask, ids = BATCH["attention_mask"], BATCH["input_ids"]
    with torch.inference_mode():
        want = model(**BATCH, position_ids=positions(mask), past_key_values=whole).logits
        got = []
        for first, last in ((0, 4), (4, 12), (12, 40)):
            inputs = {"attention_mask": mask[:, :last], "position_ids": positions(mask)[:, first:last]}
            got.append(model(ids[:, first:last], **inputs, past_key_values=chunked).logits)
    got = torch.cat(got, dim=1)
    torch.testing.assert_close(got[0, 9:], want[0, 9:], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], want[1], atol=2e-4, rtol=1e-4)
    assert chunked.layers[0].rows["v"][0].pads == 9


# --- what generation does to a cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("semantics", ["in_forward", "serving"])
def test_after_a_crop_the_cropped_tokens_were_never_there(model, fitted, semantics, name):
    cropped, plain = (KVCache(model, PER_TOKEN[name], fitted, semantics) for _ in range(2))
    logits(model, cropped, IDS[:, :30])
    cropped.crop(-9)
    logits(model, plain, IDS[:, :21])
    assert (cropped.get_seq_length(), cropped.nbytes) == (21, plain.nbytes)
    cropped.crop(0)
    for layer in range(LAYERS):
        for a, b in zip(cropped.decoded(layer), plain.decoded(layer), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(model, cropped, IDS[:, 21:]), logits(model, plain, IDS[:, 21:]))


def test_a_crop_into_a_block_keeps_its_bytes_and_codes_nothing_again(model):
    cache = KVCache(model, kivi(2), semantics="in_forward")
    counters = counted(cache)
    logits(model, cache, IDS[:, :19])
    before, seen = cache.decoded(1)[0], counters[0].tokens
    block = cache.coding()[0].coded_bytes // 2
    cache.crop(-6)  # three waiting tokens, and three of the second block
    held = cache.coding()[0]
    assert (held.coded_tokens, held.exact_tokens, held.coded_bytes) == (13, 0, 2 * block)
    assert torch.equal(cache.decoded(1)[0], before[:, :, :13])
    assert counters[0].tokens == seen
    assert not cache.is_croppable
    logits(model, cache, IDS[:, 13:])
    assert cache.get_seq_length() == 40
    assert torch.equal(cache.decoded(1)[0][:, :, :13], before[:, :, :13])


def test_a_positive_crop_is_the_length_to_keep_and_too_long_a_crop_empties(model):
    cache = KVCache(model, hadamard())
    logits(model, cache, IDS[:, :10])
    cache.crop(20)
    assert cache.get_seq_length() == 10
    cache.crop(4)
    assert cache.get_seq_length() == 4
    cache.crop(torch.tensor(-1))  # as transformers 5.15 asks
    assert cache.get_seq_length() == 3 and isinstance(cache.get_seq_length(), int)
    cache.crop(-9)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert torch.equal(logits(model, cache, IDS), logits(model, DynamicCache(), IDS))


def test_rows_follow_a_reorder_and_share_their_blocks(model):
    for recipe in (hadamard(2), kivi(2)):
        cache = KVCache(model, recipe, semantics="in_forward", window_bytes=None)
        logits(model, cache, torch.cat([IDS, IDS.flip(1)])[:, :20])
        before, size = cache.decoded(2), cache.nbytes
        cache.reorder_cache(torch.tensor([1, 1]))
        after = cache.decoded(2)
        assert all(torch.equal(a, b[[1, 1]]) for a, b in zip(after, before, strict=True))
        assert cache.nbytes == size // 2
        logits(model, cache, torch.tensor([[5], [9]]))
        assert (cache.decoded(2)[0][0] - cache.decoded(2)[0][1]).abs().max() > 0
        assert torch.equal(cache.decoded(2)[0][:, :, :20], after[0])


def test_rows_are_repeated_and_selected(model):
    cache = KVCache(model, hadamard(2))
    logits(model, cache, torch.cat([IDS, IDS.flip(1)]))
    k, v = cache.decoded(0)
    size = cache.nbytes
    cache.batch_repeat_interleave(2)
    assert cache.nbytes == size
    assert torch.equal(cache.decoded(0)[1], v.repeat_interleave(2, dim=0))
    cache.batch_select_indices(torch.tensor([False, False, True, False]))
    assert torch.equal(cache.decoded(0)[0], k[1:])
    assert cache.batch_size == 1
    cache.batch_select_indices(torch.tensor([0, 0]))
    assert torch.equal(cache.decoded(0)[0], k[[1, 1]])


def test_reset_is_a_new_cache(model):
    cache = KVCache(model, hadamard(2), semantics="in_forward", window_bytes=None)
    first = generated(model, cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.working_bytes) == (0, 0, 0)
    assert all(entry.fires == entry.read_back == 0 for entry in cache.coding())
    ids, mask = BATCH.values()
    assert torch.equal(generated(model, cache, ids, attention_mask=mask)[1:], first)


def test_copies_go_their_own_ways(model):
    """A prompt is coded once and continued twice."""
    prompt = KVCache(model, hadamard(2), semantics="in_forward")
    logits(model, prompt, IDS[:, :20])
    fork = copy.deepcopy(prompt)
    want = logits(model, prompt, IDS[:, 20:])
    assert fork.get_seq_length() == 20
    assert torch.equal(logits(model, fork, IDS[:, 20:]), want)
    assert fork.coding() == prompt.coding()


def test_hooks_go_with_the_cache_and_other_forwards_pass_unseen(model):
    decoder, rotary = model.model, model.model.rotary_emb
    gc.collect()
    hooks = len(decoder._forward_pre_hooks), len(rotary._forward_hooks)
    caches = [KVCache(model, hadamard(2), semantics="in_forward") for _ in range(2)]
    got = [logits(model, caches[i], IDS[:, s]) for s in (slice(0, 20), slice(20, 40)) for i in (0, 1)]
    logits(model, None, IDS[:, :3])
    assert torch.equal(got[0], got[1]) and torch.equal(got[2], got[3])
    caches.clear()
    gc.collect()
    assert (len(decoder._forward_pre_hooks), len(rotary._forward_hooks)) == hooks


def test_k_may_be_coded_where_it_arrives(model):
    cache = KVCache(model, hadamard(8), semantics="in_forward", placement="post_rope")
    codec = build(HadamardStream(bits=8))
    plain = DynamicCache()
    logits(model, plain, IDS)
    logits(model, cache, IDS)
    k = plain.layers[0].keys[0]
    assert torch.equal(cache.decoded(0)[0][0], codec.decode(codec.encode(k, Site(0, 0, "k"))))
    assert cache.positions == []


def test_the_turn_is_undone_under_attention_scaling():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    angle = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    cos, sin = 1.3 * angle.cos(), 1.3 * angle.sin()
    torch.testing.assert_close(undo_rope(apply_rope(x, cos, sin), cos, sin), x)
    assert (apply_rope(x, cos, sin) - x).abs().max() > 0.1


# --- what is refused -----------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
MODELS = {
    "part of the head": (
        lambda: StableLmForCausalLM(StableLmConfig(**SMALL)),
        "capability.partial-rope",
        "8 of 32 dimensions",
    ),
    "interleaved pairs": (
        lambda: CohereForCausalLM(CohereConfig(**SMALL)),
        "capability.rope-convention",
        "CohereRotaryEmbedding",
    ),
    "changing frequencies": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=DYNAMIC)),
        "capability.moving-rope",
        "'dynamic'",
    ),
    "no rotary": (
        lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=64)),
        "capability.rotary-modules",
        "0 rotary",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_would_be_got_wrong_are_refused(name):
    make, code, data = MODELS[name]
    other = make().eval()
    with refused(CapabilityError, code, data):
        KVCache(other, hadamard())
    ids = IDS[:, :12] % 64
    cache = KVCache(other, hadamard(8), semantics="in_forward", placement="post_rope")
    moved = logits(other, cache, ids) - logits(other, DynamicCache(), ids)
    assert 0 < moved.abs().max() < 0.05
    assert torch.equal(logits(other, KVCache(other, IDENTITY), ids), logits(other, DynamicCache(), ids))


def test_a_cache_serves_the_model_that_it_was_made_for(model):
    other = LlamaForCausalLM(LlamaConfig(**SMALL | {"hidden_size": 128, "num_attention_heads": 4})).eval()
    with refused(CapabilityError, "capability.other-forward"):
        logits(other, KVCache(model, hadamard()), IDS % 64)
    other = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    with refused(CapabilityError, "capability.other-shape", [1, 3, 2, 32]):
        KVCache(model, hadamard()).update(torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 2, 32), 0)
    cache = KVCache(model, hadamard())
    logits(model, cache, IDS)
    with refused(CapabilityError, "capability.batch", "1 rows", 2):
        logits(model, cache, BATCH["input_ids"])


@pytest.mark.parametrize(
    "calibration, code, data",
    [
        (None, "calibration.missing", ["whitener", "layer 0"]),
        (Fitted(k=whiteners(layers=2)), "calibration.missing", ["whitener", "layer 2"]),
        (Fitted(k=whiteners(layers=4)), "calibration.more-layers", ["layer 3", "3 layers"]),
        (Fitted(k=whiteners(heads=4)), "calibration.other-shape", ["4 KV heads"]),
        (Fitted(k=whiteners(head_dim=16)), "calibration.other-shape", ["16 dimensions"]),
    ],
)
def test_a_calibration_of_another_model_is_refused_before_the_first_token(model, calibration, code, data):
    recipe = Recipe(k=HadamardStream(bits=2, whiten=True), v=IdentityStream())
    with refused(CalibrationMismatch, code, *data):
        KVCache(model, recipe, calibration)


def test_unknown_semantics_controls_and_training_are_refused(model):
    with refused(UnknownName, None, "inforward", "in_forward"):
        KVCache(model, IDENTITY, semantics="inforward")
    with refused(UnknownName, None, "postrope", "post_rope"):
        KVCache(model, IDENTITY, placement="postrope")
    for control in (NoiseStream(sigma=0.1, seed=0), CastStream(), IsotropicStream(of=KltStream(bits=2), seed=0)):
        with refused(CapabilityError, "capability.no-codes", f"'{control.codec}'"):
            KVCache(model, Recipe(k=control, v=IdentityStream()))
    with refused(CapabilityError, "capability.gradients"), torch.enable_grad():
        model(IDS, past_key_values=KVCache(model, hadamard()))


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(), {"full_attention": None}])
def test_masks_that_do_not_show_padding_are_refused_while_a_row_is_new(model, mask):
    with refused(CapabilityError, "capability.mask", list(mask.shape) if isinstance(mask, torch.Tensor) else "dict"):
        logits(model, KVCache(model, hadamard()), IDS, attention_mask=mask)
    cache = KVCache(model, hadamard(), semantics="in_forward")
    logits(model, cache, IDS)
    logits(model, cache, IDS[:, :1], attention_mask=torch.zeros(1, 1, 1, 41))


def test_an_empty_cache_is_reordered_and_selected_as_the_ordinary_one(model):
    cache, plain = KVCache(model, hadamard(), semantics="in_forward"), DynamicCache()
    for empty in (plain, cache):
        empty.reorder_cache(torch.tensor([1, 0]))
        empty.batch_select_indices(torch.tensor([1]))
        empty.batch_repeat_interleave(2)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    want = logits(model, KVCache(model, hadamard(), semantics="in_forward"), IDS)
    assert torch.equal(logits(model, cache, IDS), want)


def test_a_cache_that_no_token_reached_is_not_active(model):
    with refused(CodecNotActive, "not-active.nothing-coded", "layer 0 k"):
        KVCache(model, hadamard()).check()
