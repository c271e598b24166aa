"""`klt` after the rotary embedding in the transformers cache: a definition in plain transformers, and what is refused.

`test_columns.py` runs these with compiled loops.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from cache.test_hf_cache import BATCH, HEAD_DIM, HEADS, IDS, LAYERS, WAYS, generated, logits, positions
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.hf.layer import STREAMS
from kvlab.cache.hf.rope import find_rotary, turns
from kvlab.cache.hf.served_call import Sequences
from kvlab.cache.pages.exact import Ring
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.registry import bare
from kvlab.codecs.shared import components
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import Recipe
from refusals import refused

TEXT = torch.randint(1, 320, (1, 160), generator=torch.Generator().manual_seed(9))


def recipe(bits=3, **ends) -> Recipe:
    stream = KltStream(bits=bits, escape=False, **ends)
    return Recipe(k=stream, v=stream, rotary="after")


ENDS = {"bare": {}, "recent": {"recent": 4}, "sink": {"sink": 2}, "both": {"sink": 3, "recent": 5}}


@pytest.fixture(scope="module")
def rotation(model) -> Rotation:
    rotary = find_rotary(model, HEAD_DIM)
    return Rotation(turns(rotary, 0, torch.arange(192)[None], torch.empty(0))[0].table)


class Fitted:
    """Components of the tiny model's V, and of its K after the rotary embedding less its mean by position."""

    def __init__(self, model, rotation):
        held = DynamicCache()
        with torch.inference_mode():
            model(TEXT, past_key_values=held)
        at = torch.arange(TEXT.shape[1])
        rows = {}
        for layer in range(LAYERS):
            k, v = held.layers[layer].keys[0], held.layers[layer].values[0]
            mean = rotation.undo(k, at).mean(1)
            rows[layer, "k"], rows[layer, "v"] = MeanByPosition(rotation, mean).undo(k, at), v
        self.streams = {
            stream: StreamCalibration(
                components={layer: components.fit(rows[layer, stream][:, None], None) for layer in range(LAYERS)}
            )
            for stream in STREAMS
        }

    def stream(self, recipe, stream, *_where):
        return None if recipe is not None and recipe.codec == "hadamard" else self.streams[stream]


@pytest.fixture(scope="module")
def fitted(model, rotation):
    return Fitted(model, rotation)


class Definition:
    """What a cache of one sequence has to answer, by a transformers cache that is filled anew for every call.

    The first `sink` tokens, and those less than `recent` before a call's first one, are exact; the others went through
    the codec's own encoder and decoder, one thread of torch.
    """

    def __init__(self, model, recipe, fitted, rotation):
        self.model, self.sink, self.recent = model, recipe.k.sink, max(1, recipe.k.recent)
        self.exact = [None] * LAYERS
        self.rows, self.turn = [], []
        codecs = {stream: bare(getattr(recipe, stream), fitted.stream(None, stream)) for stream in STREAMS}
        for layer in range(LAYERS):
            own = [KltRows(codecs[stream], Site(0, layer, stream), HEADS, HEAD_DIM) for stream in STREAMS]
            self.rows.append(own)
            self.turn.append(MeanByPosition(rotation, own[0].plan.decoding.mean))

    def past(self, layer):
        """K and V that a call finds [heads, tokens, head_dim]."""
        k, v = self.exact[layer]
        at = torch.arange(k.shape[1])
        (k_rows, v_rows), turn = self.rows[layer], self.turn[layer]
        coded = turn.redo(k_rows.decode(k_rows.encode(turn.undo(k, at))), at), v_rows.decode(v_rows.encode(v))
        as_it_was = (at < self.sink) | (at >= len(at) + 1 - self.recent)
        return [torch.where(as_it_was[:, None], own, made) for own, made in zip((k, v), coded, strict=True)]

    @torch.inference_mode()
    def told(self, ids):
        """Logits of a call's tokens [1, tokens, vocabulary]."""
        held, first = DynamicCache(), 0
        if self.exact[0] is not None:
            first = self.exact[0][0].shape[1]
            for layer in range(LAYERS):
                held.update(*(x[None] for x in self.past(layer)), layer)
        out = self.model(ids, past_key_values=held).logits
        for layer, own in enumerate(held.layers):
            new = own.keys[0, :, first:], own.values[0, :, first:]
            before = self.exact[layer]
            self.exact[layer] = new if before is None else tuple(map(lambda *x: torch.cat(x, 1), before, new))
        return out


def cut(ids, cuts):
    """A text in calls of so many tokens."""
    return ids[:, : sum(cuts)].split(cuts, dim=1)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("cuts", [[1] * 14, [9, 1, 1, 1, 5, 1, 11, 1], [130, 1, 9, 1], [2, 35, 1]], ids=str)
def test_a_cache_answers_as_its_definition(model, fitted, rotation, ends, cuts):
    mine = recipe(**ENDS[ends])
    cache, due = KVCache(model, mine, fitted), Definition(model, mine, fitted, rotation)
    for part in cut(TEXT, cuts):
        torch.testing.assert_close(logits(model, cache, part), due.told(part), atol=5e-4, rtol=1e-4)
    for layer in range(LAYERS):
        for got, want in zip(cache.decoded(layer), due.past(layer), strict=True):
            torch.testing.assert_close(got[0], want, atol=5e-4, rtol=1e-4)
    held = cache.coding()
    assert [entry.read_back for entry in held] == [cache.layers[0].pages.read_back] * 2 * LAYERS
    tokens, kept = sum(cuts), (mine.k.sink, max(1, mine.k.recent) - 1)  # of the next call's window, itself one
    assert {(entry.coded_tokens, entry.exact_tokens) for entry in held} == {(tokens, min(tokens, sum(kept)))}
    cache.check()


def test_a_padded_row_answers_as_alone_and_in_any_company(model, fitted):
    mask, ids = BATCH["attention_mask"], BATCH["input_ids"]
    cuts = [12, 1, 1, 5, 1]
    both, alone = KVCache(model, recipe(**ENDS["both"]), fitted), KVCache(model, recipe(**ENDS["both"]), fitted)
    pads, first = int((mask[0] == 0).sum()), 0
    for part in cut(ids, cuts):
        last = first + part.shape[1]
        where = {"attention_mask": mask[:, :last], "position_ids": positions(mask)[:, first:last]}
        got = logits(model, both, part, **where)
        due = logits(model, alone, ids[:1, max(first, pads) : last])
        torch.testing.assert_close(got[:1, -due.shape[1] :], due, atol=5e-4, rtol=1e-4)
        first = last
    assert both.layers[0].padding_and_held[0] == (pads, last - pads)


@pytest.mark.full
@pytest.mark.parametrize("way", ["greedy", "beams", "left padding", "beams with padding", "prompt lookup"])
def test_nearly_lossless_codes_generate_the_same(model, fitted, way):
    options = dict(WAYS[way])
    ids = options.pop("ids", IDS)
    due = generated(model, DynamicCache(), ids, **options)
    assert torch.equal(generated(model, KVCache(model, recipe(bits=8, recent=6), fitted), ids, **options), due)


def test_other_attention_is_given_tensors_that_say_the_same(model, fitted, monkeypatch):
    caches = [KVCache(model, recipe(**ENDS["both"]), fitted) for _ in range(2)]
    cuts = [20, 1, 5, 1]
    found = logits(model, caches[0], *cut(TEXT, cuts))
    monkeypatch.setattr(model.config, "_attn_implementation", "eager")
    torch.testing.assert_close(logits(model, caches[1], *cut(TEXT, cuts)), found, atol=5e-4, rtol=1e-4)


def test_a_mask_of_ones_own_is_kept_to(model, fitted):
    cache, plain = KVCache(model, recipe(bits=8, recent=4), fitted), DynamicCache()
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    mask[..., 5:14] = False
    for own in (cache, plain):
        logits(model, own, TEXT[:, :20])
    got, due = (logits(model, own, TEXT[:, 20:21], attention_mask=mask) for own in (cache, plain))
    assert (got - due).norm() < 0.03 * due.norm()
    assert not torch.equal(got, due)  # what was coded is read


@torch.inference_mode()
def test_k_and_v_of_two_dtypes_are_kept_as_one(model, fitted):
    """Under autocast K is turned in float32, and V comes in bfloat16."""
    cache, plain = KVCache(model, recipe(bits=8, recent=8), fitted), DynamicCache()
    with torch.autocast("cpu", torch.bfloat16):
        got, due = (logits(model, own, *cut(TEXT, [20, 1, 1, 5, 1])) for own in (cache, plain))
    torch.testing.assert_close(got, due, atol=0.3, rtol=0.05)


def test_calls_of_padding_alone_leave_the_rest_as_it_is(model, fitted):
    mask = torch.tensor([[0] * 6 + [1] * 14])
    cut_up, once = KVCache(model, recipe(recent=4), fitted), KVCache(model, recipe(recent=4), fitted)
    first, found = 0, []
    for part in cut(TEXT, [3, 3, 13, 1]):
        last = first + part.shape[1]
        where = {"attention_mask": mask[:, :last], "position_ids": positions(mask)[:, first:last]}
        found.append(logits(model, cut_up, part, **where))
        first = last
    due = logits(model, once, TEXT[:, 6:19], TEXT[:, 19:20])
    torch.testing.assert_close(torch.cat(found[2:], dim=1), due, atol=5e-4, rtol=1e-4)
    assert cut_up.layers[0].padding_and_held == [(6, 14)]


def test_k_and_v_may_have_codecs_of_their_own(model, fitted):
    mixed = Recipe(k=recipe(bits=8).k, v=HadamardStream(bits=8), rotary="after")
    cache = KVCache(model, mixed, fitted)
    got, due = (logits(model, own, *cut(TEXT, [20, 1, 1])) for own in (cache, DynamicCache()))
    torch.testing.assert_close(got, due, atol=0.05, rtol=0.05)
    assert {entry.stream for entry in cache.check()} == set(STREAMS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=12), st.integers(1, 5))
def test_after_crops_nothing_is_called_exact_that_is_gone(moves, recent):
    """A ring of places beside a list of what each position's last writer was."""
    sequences, ring, length = Sequences.empty(1), {}, 0
    for grows, count in moves:
        if grows:
            ring |= {at % recent: at for at in range(length, length + count)}
            sequences, length = sequences.after([0], count), length + count
        elif length:
            length = max(0, length - count)
            sequences = sequences.cropped(length, recent)
        if length:
            assert sequences.lengths == (length,) and sequences.columns == length
            ((_, until),) = sequences.coded(Ring(0, recent))
            for at in range(until, length):
                assert ring[at % recent] == at
            assert grows is False or count < recent or until == length + 1 - recent


def test_a_cropped_copy_goes_its_own_way(model, fitted):
    cache = KVCache(model, recipe(recent=4), fitted)
    logits(model, cache, TEXT[:, :20], TEXT[:, 20:21])
    twin = copy.deepcopy(cache)
    twin.crop(16)
    assert (twin.get_seq_length(), cache.get_seq_length(), twin.is_croppable) == (16, 21, False)
    fresh = KVCache(model, recipe(), fitted)
    logits(model, fresh, TEXT[:, :16])
    for layer in range(LAYERS):  # what is left of the window went, all but for the ring's own
        for got, due in zip(twin.decoded(layer), fresh.decoded(layer), strict=True):
            torch.testing.assert_close(got[:, :, :16], due, atol=5e-4, rtol=1e-4)
    got, due = (logits(model, one, TEXT[:, 30:31]) for one in (twin, fresh))
    torch.testing.assert_close(got, due, atol=5e-4, rtol=1e-4)
    twin.reset()
    assert twin.nbytes == twin.get_seq_length() == 0


def test_what_is_held_is_little_more_than_what_is_coded(model, fitted):
    cache = KVCache(model, recipe(bits=2), fitted)
    logits(model, cache, TEXT[:, :1].expand(1, 1024))
    codes = 1024 * sum(layer.pages.bytes for layer in cache.layers)
    positions_held = 4 * 1024
    assert codes < cache.nbytes - positions_held < 1.2 * codes
    assert cache.resident_bytes == cache.nbytes + cache.working_bytes + cache.tables_bytes


def test_what_is_not_served_is_refused(model, fitted):
    with refused(CapabilityError, "capability.served", "in_forward"):
        KVCache(model, recipe(), fitted, "in_forward")
    shape = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = MistralConfig(**shape, num_hidden_layers=LAYERS, vocab_size=320, intermediate_size=32, sliding_window=8)
    with refused(CapabilityError, "capability.served", "window"):
        KVCache(MistralForCausalLM(config).eval(), recipe(), fitted)
    cache = KVCache(model, recipe(), fitted, window_bytes=None)
    with refused(CapabilityError, "capability.positions"):
        logits(model, cache, TEXT[:, :4], position_ids=torch.arange(3, 7)[None])
