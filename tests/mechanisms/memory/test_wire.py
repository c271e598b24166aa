"""The stream between processes: what comes out is what went in, or nothing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core.errors import CalibrationMismatch, StreamError, UserError
from kvlab.kvstore.paging.geometry import same_bits
from kvlab_mechanisms.memory.wire import (
    ALIGN,
    DTYPES,
    MAGIC,
    VERSION,
    Received,
    StreamHead,
    digest,
    pack,
    read,
    unpack,
    write,
)
from kvlab_mechanisms.memory.wire import HEAD as HEAD_FIELDS
from refusals import refused

pytestmark = pytest.mark.full

HEAD = StreamHead(model="m" * 16, codec="", dtype="float32", layers=2, kv_heads=2, head_dim=4, tokens=3, sequence="one")


def cache(head: StreamHead, seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    torch.manual_seed(seed)
    sizes = iter(range(5, 99, 7))
    shape = head.shape() if not head.codec else None
    return {
        (layer, s): (torch.randn(shape) if shape else torch.randint(0, 256, (next(sizes),))).to(DTYPES[head.dtype])
        for layer in range(head.layers)
        for s in ("k", "v")
    }


def equal(found, wanted) -> bool:
    return found.keys() == wanted.keys() and all(same_bits(found[place], wanted[place]) for place in wanted)


@pytest.mark.parametrize("key", [b"", b"secret"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_round_trip_bit_for_bit(dtype, tokens, key):
    head = replace(HEAD, dtype=dtype, tokens=tokens, codec="klt:1234" if dtype == "uint8" else "")
    given = cache(head)
    if dtype != "uint8" and tokens:
        given[0, "k"].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    data = pack(head, given, key)
    assert equal(unpack(data, key), given)
    assert equal(unpack(bytes(data), key), given)
    assert equal(dict(read(io.BytesIO(data), key)), given)
    assert Received(data, key).head == head


def test_payloads_are_views_where_they_can_be():
    data = pack(HEAD, cache(HEAD))
    found = Received(data)[1, "v"]
    found.fill_(5)
    with refused(StreamError, "stream.digest", "layer 1 v"):  # the stream itself was written to
        Received(data)[1, "v"]


def test_a_buffer_of_any_alignment_will_do():
    given = cache(HEAD)
    moved = bytearray(b"x") + pack(HEAD, given)
    assert equal(unpack(memoryview(moved)[1:]), given)


def test_one_layer_needs_only_its_own_bytes():
    given = cache(HEAD)
    data = pack(HEAD, given)
    place = bytes(data).find(given[0, "k"].numpy().tobytes())
    data[place] ^= 1
    found = Received(data)
    assert torch.equal(found[1, "k"], given[1, "k"])
    with refused(StreamError, "stream.digest", "layer 0 k"):
        found[0, "k"]


def test_every_bit_counts():
    """A stream in which any one bit is turned is refused, by both readers."""
    head = replace(HEAD, layers=1, kv_heads=1, head_dim=1, tokens=2)
    data = pack(head, cache(head))
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        for reader in (unpack, lambda raw: dict(read(io.BytesIO(raw)))):
            with pytest.raises(StreamError):
                reader(wrong)


@settings(deadline=None, max_examples=60)
@given(end=st.floats(0, 1, exclude_max=True))
def test_a_stream_that_was_cut_is_refused(end):
    data = pack(HEAD, cache(HEAD))
    cut = data[: int(end * len(data))]
    with pytest.raises(StreamError):
        unpack(cut)
    with pytest.raises(StreamError):
        dict(read(io.BytesIO(cut)))


def test_what_follows_a_stream_in_a_pipe_is_left_there():
    given = cache(HEAD)
    pipe = io.BytesIO(bytes(pack(HEAD, given)) + b"next")
    assert equal(dict(read(pipe)), given)
    assert pipe.read() == b"next"


def swapped(data: bytearray, given, one, other) -> bytearray:
    """Two payloads exchanged, checksums and all."""
    places = [bytes(data).find(given[p].numpy().tobytes()) - ALIGN for p in (one, other)]
    size = ALIGN + given[one].nbytes
    out = bytearray(data)
    out[places[0] : places[0] + size], out[places[1] : places[1] + size] = (
        data[places[1] : places[1] + size],
        data[places[0] : places[0] + size],
    )
    return out


@pytest.mark.parametrize("other", [(0, "v"), (1, "k")])
def test_frames_do_not_pass_for_one_another(other):
    given = cache(HEAD)
    wrong = swapped(pack(HEAD, given), given, (0, "k"), other)
    for reader in (unpack, lambda raw: dict(read(io.BytesIO(raw)))):
        with pytest.raises(StreamError):
            reader(wrong)


def test_frames_of_another_stream_do_not_pass():
    """The same shapes in both: a frame is bound to the head of its own."""
    one, two = cache(HEAD), cache(HEAD, 1)
    first, second = pack(HEAD, one), pack(replace(HEAD, sequence="two"), two)
    assert len(first) == len(second)
    mixed = first[: 3 * ALIGN] + second[3 * ALIGN :]
    with pytest.raises(StreamError):
        unpack(mixed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_values_of_k_and_v_exchanged_under_their_own_frames_do_not_pass(dtype):
    """Sums, shapes and lengths are those that the frames say; only the places are others."""
    head = replace(HEAD, dtype=dtype)
    given = cache(head)
    data = pack(head, given)
    raw = {place: x.contiguous().view(torch.uint8).numpy().tobytes() for place, x in given.items()}
    for one, other in (((0, "k"), (0, "v")), ((0, "v"), (0, "k"))):
        begin = bytes(data).find(raw[one])
        wrong = bytearray(data)
        wrong[begin : begin + len(raw[other])] = raw[other]
        with refused(StreamError, "stream.digest", f"layer 0 {one[1]}"):
            unpack(wrong)
    both = bytearray(data)
    places = {place: bytes(data).find(raw[place]) for place in ((0, "k"), (0, "v"))}
    for place, other in (((0, "k"), (0, "v")), ((0, "v"), (0, "k"))):
        both[places[place] : places[place] + len(raw[other])] = raw[other]
    for reader in (unpack, lambda stream: dict(read(io.BytesIO(stream)))):
        with pytest.raises(StreamError):
            reader(both)


def test_tokens_in_another_order_are_another_payload():
    given = cache(HEAD)
    data = pack(HEAD, given)
    place = bytes(data).find(given[0, "k"].numpy().tobytes())
    turned = given[0, "k"].flip(1).contiguous().numpy().tobytes()
    data[place : place + len(turned)] = turned
    with refused(StreamError, "stream.digest", "layer 0 k"):
        unpack(data)


def test_another_model_or_codec_is_refused():
    data = pack(HEAD, cache(HEAD))
    assert unpack(data, model=HEAD.model, codec="")
    for wanted in ({"model": "other"}, {"codec": "klt:12"}):
        with pytest.raises(CalibrationMismatch):
            unpack(data, **wanted)
        with pytest.raises(CalibrationMismatch):
            next(read(io.BytesIO(data), **wanted))


def test_only_who_has_the_key_reads():
    data = pack(HEAD, cache(HEAD), b"right")
    for key in (b"wrong", b""):
        with refused(StreamError, "stream.digest"):
            unpack(data, key)


@pytest.mark.parametrize("fault", ["missing", "order", "dtype", "shape"])
def test_a_cache_that_is_not_what_the_head_says_is_not_written(fault):
    given = cache(HEAD)
    items = list(given.items())
    if fault == "missing":
        items = items[:-1]
    elif fault == "order":
        items = items[::-1]
    elif fault == "dtype":
        items[0] = items[0][0], items[0][1].half()
    else:
        items[0] = items[0][0], items[0][1][:, :-1]
    with pytest.raises(UserError):
        write(io.BytesIO(), HEAD, items)


def test_a_head_that_cannot_be_is_refused():
    for wrong in ({"layers": -1}, {"dtype": "float64"}, {"codec": "klt"}, {"rotary": "later"}):
        with pytest.raises(UserError):
            pack(replace(HEAD, **wrong), {})


@pytest.mark.parametrize("text", [b"{}", b"[]", b"\xff", b'{"model": 1}', b'{"layers": 10'])
def test_a_head_whose_digest_is_right_and_that_says_nothing_is_refused(text):
    """Without a key anybody can compute a digest."""
    start = digest(b"", HEAD_FIELDS.pack(MAGIC, VERSION, 0, len(text), 0), text)
    raw = HEAD_FIELDS.pack(MAGIC, VERSION, 0, len(text), start) + text
    forged = raw + bytes(-len(raw) % ALIGN)
    for reader in (unpack, lambda data: dict(read(io.BytesIO(data)))):
        with refused(StreamError, "stream.head-fields"):
            reader(forged)
