"""Prefill in one process, decode in another: the answer is that of one process, or of one with the same codec."""

from __future__ import annotations

import io
import os
import signal

import pytest
import torch

from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, StreamError, UnknownName, UserError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.stats.divergences import token_record
from kvlab_mechanisms.cluster import decoding
from kvlab_mechanisms.cluster.decoding import WAYS, DecodeProcess, Setup
from kvlab_mechanisms.cluster.handover import CodedWire, DecodingWorker, Exact, prefill
from kvlab_mechanisms.cluster.transport import LENGTH, PIECE, WireReader, WireWriter
from kvlab_mechanisms.memory.wire import StreamHead, pack
from refusals import refused

pytestmark = pytest.mark.full

PROMPTS = {"one": list(range(5, 45)), "two": list(range(90, 70, -1))}
TOKENS = 6


@pytest.fixture(scope="module")
def setup(tiny_model):
    return Setup(resolve(Model(path=str(tiny_model), n_layers=3)), key=b"shared")


@pytest.fixture(scope="module")
def model(setup):
    return setup.model()


@pytest.fixture(scope="module")
def other(setup, model):
    """A process that decodes, exact."""
    with DecodeProcess(setup, setup.form(model)) as process:
        yield process


def alone(model, prompt: list[int], change=None) -> tuple[list[int], torch.Tensor]:
    """Tokens of one process and the logits of each, over the clean cache or one that was changed."""
    read, decoder = prefill(model, prompt), DecodingWorker(model)
    found = dict(Exact().payloads(read.cache)) if change is None else change(read.cache)
    decoder.load("only", {place: x.clone() for place, x in found.items()}, read.first)
    steps = [decoder.step("only") for _ in range(TOKENS)]
    return [read.first, *(token for token, _ in steps)], torch.stack([logits for _, logits in steps])


def apart(model, other, name: str, way: str) -> tuple[list[int], torch.Tensor]:
    """The same with the cache handed over."""
    read = prefill(model, PROMPTS[name])
    other.hand_over(name, read, way)
    steps = [other.step(name) for _ in range(TOKENS)]
    other.unload(name)
    return [read.first, *(token for token, _ in steps)], torch.stack([logits for _, logits in steps])


@pytest.mark.parametrize("way", WAYS)
def test_an_exact_hand_over_gives_the_same_bits(model, other, way):
    for name, prompt in PROMPTS.items():
        tokens, logits = apart(model, other, name, way)
        wanted, bits = alone(model, prompt)
        assert tokens == wanted and torch.equal(logits, bits)


def test_it_is_the_answer_of_generate(model, other):
    with torch.no_grad():
        ids = torch.tensor([PROMPTS["one"]])
        whole = model.generate(ids, max_new_tokens=TOKENS + 1, do_sample=False, eos_token_id=None, pad_token_id=0)
    read = prefill(model, PROMPTS["one"])
    other.hand_over("g", read, "tcp")
    assert [read.first, *other.answer("g", TOKENS)] == whole[0, len(PROMPTS["one"]) :].tolist()
    assert other.tokens("g") == len(PROMPTS["one"]) + TOKENS, "a token a step"
    other.unload("g")


def test_two_sequences_do_not_mix_and_leave_no_memory(model, other):
    wanted = {name: alone(model, prompt)[0] for name, prompt in PROMPTS.items()}
    found = {}
    for (name, prompt), way in zip(PROMPTS.items(), WAYS, strict=False):
        read = prefill(model, prompt)
        other.hand_over(name, read, way)
        found[name] = [read.first]
    assert other.loaded() == ("one", "two")
    for _ in range(TOKENS):
        for name in PROMPTS:
            found[name].append(other.step(name)[0])
    assert found == wanted
    with refused(UserError, "user.sequence-loaded", "'one'"):
        other.hand_over("one", prefill(model, PROMPTS["one"]), "pipe")
    for name in PROMPTS:
        other.unload(name)
    assert other.loaded() == ()
    with refused(UserError, "user.sequence-not-loaded", "'one'", "none"):
        other.step("one")


class OfAnotherModel(Exact):
    """Says that it is of other weights."""

    def head(self, info, cache, sequence):
        return StreamHead(**(vars(super().head(info, cache, sequence)) | {"model": "f" * 16}))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_of_another_model_is_refused_and_the_next_goes_through(model, other, way):
    other.form = OfAnotherModel()
    try:
        with refused(CalibrationMismatch, None, "model", "'ffffffffffffffff'"):
            other.hand_over("bad", prefill(model, PROMPTS["one"]), way)
    finally:
        other.form = Exact()
    assert other.loaded() == ()
    assert apart(model, other, "one", way)[0] == alone(model, PROMPTS["one"])[0]


def test_what_a_damaged_stream_holds_is_not_read(model, other, monkeypatch):
    def damaged(out, head, payloads, key):
        data = pack(head, dict(payloads), key)
        data[len(data) // 2] ^= 1
        out.write(data)

    monkeypatch.setattr("kvlab_mechanisms.cluster.decoding.write", damaged)
    for way in ("pipe", "tcp"):
        with refused(StreamError, "stream.digest"):
            other.hand_over("bad", prefill(model, PROMPTS["one"]), way)
    assert other.loaded() == ()


def test_a_codec_that_refuses_its_input_leaves_the_way_free(model, other):
    read = prefill(model, PROMPTS["one"])
    form = CodedWire(named_recipe("int", 4), model.config, 32)
    read.cache.layers[1].keys[0, 0, 0, 0] = torch.nan
    other.form = form
    try:
        with pytest.raises(NonFinite):
            other.hand_over("bad", read, "pipe")
    finally:
        other.form = Exact()
    assert apart(model, other, "one", "pipe")[0] == alone(model, PROMPTS["one"])[0]


def test_unknown_ways_are_told(model, other):
    with refused(UnknownName, None, "way", "'mail'", "memory, pipe, tcp"):
        other.hand_over("one", prefill(model, PROMPTS["one"]), "mail")
    with refused(UserError, "user.token-count", -1):
        other.answer("one", -1)
    with refused(UserError, "user.empty-prompt"):
        prefill(model, [])


@pytest.mark.parametrize("rotary", ["before", "after"])
def test_a_coded_hand_over_is_the_codec_in_one_process(model, setup, rotary):
    """The same bytes decoded by the same codec: the same bits, hence the same KL; and it did something."""
    recipe = named_recipe("hadamard", 3).model_copy(update={"rotary": rotary})
    coded = Setup(setup.info, recipe=recipe, key=setup.key)
    form = coded.form(model)
    plain, exact = alone(model, PROMPTS["one"])
    _, inside = alone(model, PROMPTS["one"], lambda cache: form.round_trip(cache, torch.float32))
    with DecodeProcess(coded, form) as process:
        handed = [process.hand_over(way, prefill(model, PROMPTS["one"]), way).nbytes for way in WAYS]
        _, outside = apart(model, process, "one", "pipe")
    assert torch.equal(inside, outside)
    labels = torch.tensor(plain[1:])
    kl = [token_record(exact, logits, labels)["kl"].mean() for logits in (inside, outside)]
    assert kl[0] == kl[1] > 1e-6
    full = 2 * 3 * 2 * len(PROMPTS["one"]) * 32 * 4
    assert max(handed) < 0.5 * full


def test_codecs_of_whole_caches_are_told(model):
    with pytest.raises(CapabilityError) as caught:
        CodedWire(named_recipe("archive", 4), model.config, 32)
    assert "'archive'" in str(caught.value)


def test_streams_go_through_in_pieces():
    data = [b"ab", bytes(PIECE + 7), b"", b"c" * (PIECE - 1), b"end"]
    sink = io.BytesIO()
    writer = WireWriter(sink)
    for part in data:
        writer.write(part)
    writer.end()
    writer.write(b"next")
    writer.end()
    assert writer.sent == len(sink.getvalue())
    reader = WireReader(io.BytesIO(sink.getvalue()))
    reader.begin()
    assert reader.read(1) == b"a"
    reader.drain()
    assert reader.read(5) == b""
    reader.begin()
    assert reader.read(9) == b"next" and reader.read(1) == b""
    for cut in (3, LENGTH.size + 1):
        broken = WireReader(io.BytesIO(sink.getvalue()[:cut]))
        broken.begin()
        with refused(StreamError, "stream.gone"):
            broken.drain()


def test_a_process_that_has_gone_is_told_in_one_line(setup, model):
    read = prefill(model, PROMPTS["one"])
    with DecodeProcess(setup, setup.form(model)) as process:
        process._process.kill()
        process._process.join()
        for ask in (process.loaded, *(lambda way=way: process.hand_over("one", read, way) for way in WAYS)):
            with refused(StreamError, "stream.gone"):
                ask()


def test_who_answers_too_late_is_ended_and_its_answer_not_taken(setup, model, monkeypatch):
    """Else the next question would get the answer of this one."""
    with DecodeProcess(setup, setup.form(model)) as process:
        os.kill(process._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(decoding, "PATIENCE", 0.0)
        with refused(StreamError, "stream.no-answer", "0 s"):
            process.loaded()
        monkeypatch.undo()
        with refused(StreamError, "stream.gone"):
            process.tokens("one")


def test_a_stream_that_breaks_off_for_an_unknown_reason_ends_the_process(setup, model, monkeypatch):
    form = setup.form(model)
    with DecodeProcess(setup, form) as process:
        monkeypatch.setattr(form, "payloads", lambda cache: (_ for _ in [1 / 0]))
        with pytest.raises(ZeroDivisionError):
            process.hand_over("one", prefill(model, PROMPTS["one"]), "pipe")
        with refused(StreamError, "stream.gone"):
            process.loaded()
