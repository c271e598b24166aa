"""Coded payloads: every codec of the ladder, exactly as the codec decodes; lossy ones say so."""

from __future__ import annotations

import random
from dataclasses import replace

import google_crc32c
import pytest
import torch

from codec import ladder_making
from codec.accidents import damaged, resealed
from kvlab.codecs.base import Site
from kvlab.codecs.catalogue import UNSTORED
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import STREAMS, FrameHeader, frame_bytes, read_frame
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import (
    CalibrationMismatch,
    CapabilityError,
    NonFinite,
    ParamsError,
    SnapshotRefused,
    StreamError,
    UserError,
)
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.payload import CodedChunks, RawChunks, coder_for
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.snapshot import coding, making
from kvstore.snapshot.coding import CHUNKS, GEOMETRY, LENGTH, payload
from kvstore.snapshot.forging import Parts
from refusals import refused

CASES = ladder_making.storing()
EVIDENCE = ("0123456789ab",)


def written(path, coder, **settings):
    context = making.source(LENGTH, GEOMETRY, payload)
    return save(path, context, coder=coder, **settings)


def parts():
    return ((layer, part, stream) for layer in range(GEOMETRY.layers) for part, stream in enumerate(STREAMS))


@pytest.mark.full
@pytest.mark.parametrize("name, condition", CASES)
def test_chunks_come_back_as_the_codec_decodes_them(tmp_path, name, condition):
    coder, recipe, turn = coding.coder(name, condition), coding.recipe(name, condition), coding.turn()
    saved = written(tmp_path / "s", coder, evidence=EVIDENCE)
    with read.open(tmp_path / "s") as snapshot:
        assert snapshot.check(making.identity(GEOMETRY, codec=coder.codec), making.tokens(LENGTH)) == []
        again = coder_for(snapshot.manifest.identity, coding.calibrated(), [turn] * GEOMETRY.layers)
        found = snapshot.load(coder=again)
    assert saved.payload_bytes < CHUNKS * GEOMETRY.chunk_bytes or name in ("identity", "block")
    codecs = {
        stream: build(getattr(recipe, stream), coding.calibrated().stream(getattr(recipe, stream), stream))
        for stream in STREAMS
    }
    for number, chunk in enumerate(found):
        for layer, part, stream in parts():
            x, turned = payload(number)[layer, part], stream == "k" and name != "identity"
            x = turn.undo(x, number * GEOMETRY.chunk_tokens) if turned else x
            wanted = codecs[stream].decode(codecs[stream].encode(x, Site(number, layer, stream)))
            wanted = turn.redo(wanted, number * GEOMETRY.chunk_tokens) if turned else wanted
            assert torch.equal(chunk[layer, part], wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_identity_recipe_gives_back_the_bits(tmp_path, dtype):
    geometry = replace(GEOMETRY, dtype=dtype)
    coder = CodedChunks(geometry, IDENTITY)
    save(tmp_path / "s", making.source(LENGTH, geometry, payload), coder=coder)
    with read.open(tmp_path / "s") as snapshot:
        assert snapshot.manifest.lossless
        assert snapshot.check(making.identity(geometry, codec=coder.codec)) == []
        assert making.same(snapshot.chunks(coder=coder), (payload(n, geometry) for n in range(CHUNKS)))


def test_layers_that_are_left_alone_keep_their_bits(tmp_path):
    coder = coding.coder("int", layers=[1])
    written(tmp_path / "s", coder)
    with read.open(tmp_path / "s") as snapshot:
        for number, chunk in enumerate(snapshot.chunks(coder=coder)):
            assert torch.equal(chunk[0], payload(number)[0])
            assert not torch.equal(chunk[1], payload(number)[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_coded_half_precision_cache_comes_back_in_its_dtype(tmp_path, dtype):
    geometry = replace(GEOMETRY, dtype=dtype)
    coder = CodedChunks(geometry, coding.recipe("hadamard"), placement="post_rope")
    save(tmp_path / "s", making.source(LENGTH, geometry, payload), coder=coder)
    with read.open(tmp_path / "s") as snapshot:
        (first, *_) = snapshot.load(coder=coder)
    assert first.dtype == geometry.torch_dtype
    assert (first.float() - payload(0)).abs().mean() < 0.2 * payload(0).abs().mean()


@pytest.mark.parametrize("upto", range(0, LENGTH + 1, 7))
def test_a_coded_prefix_is_read_alone(tmp_path, upto):
    coder = coding.coder("hadamard")
    written(tmp_path / "s", coder)
    with read.open(tmp_path / "s") as snapshot:
        whole = snapshot.load(coder=coder)
        assert making.same(snapshot.chunks(upto, coder, whole=False), whole[: upto // GEOMETRY.chunk_tokens])


def test_coding_again_what_was_coded_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        written(tmp_path / name, coding.coder("klt"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


# -- what a lossy payload carries


def test_a_lossy_payload_carries_its_recipe_and_wants_evidence(tmp_path):
    coder = coding.coder("hadamard")
    expected = making.identity(GEOMETRY, codec=coder.codec)
    written(tmp_path / "bare", coder)
    written(tmp_path / "proven", coder, evidence=EVIDENCE)
    with read.open(tmp_path / "bare") as bare, read.open(tmp_path / "proven") as proven:
        assert bare.manifest.identity.codec.recipe == coding.recipe("hadamard")
        assert bare.manifest.identity.codec.recipe_id == coding.recipe("hadamard").recipe_id
        (reason,) = bare.check(expected)
        assert reason.code == Code.UNPROVEN and coder.codec.recipe_id in reason.message
        assert bare.check(expected, unproven=True) == proven.check(expected) == []
        assert proven.manifest.evidence == EVIDENCE


def test_the_calibration_is_part_of_it_only_where_it_is_read():
    assert coding.coder("klt").codec.calibration_hash == "c" * 16
    assert coding.coder("hadamard").codec.calibration_hash is None
    assert coding.coder("hadamard", "center").codec.calibration_hash == "c" * 16


# -- the wrong coder


@pytest.mark.parametrize(
    "code, other",
    [
        (Code.CODEC, lambda: RawChunks(GEOMETRY)),
        (Code.CODEC, lambda: coding.coder("klt", bits=3)),
        (Code.CODEC, lambda: coding.coder("klt", layers=[0])),
        (Code.CALIBRATION, lambda: coding.coder("klt", calibration=coding.calibrated("d" * 16))),
    ],
)
def test_another_coder_gets_nothing(tmp_path, code, other):
    written(tmp_path / "s", coding.coder("klt"))
    with read.open(tmp_path / "s") as snapshot, pytest.raises(SnapshotRefused) as caught:
        snapshot.chunks(coder=other())
    assert caught.value.codes == (code,)


def test_a_raw_payload_is_not_decoded(tmp_path):
    written(tmp_path / "s", None)
    with read.open(tmp_path / "s") as snapshot, refused(SnapshotRefused) as caught:
        snapshot.chunks(coder=coding.coder("klt"))
    assert caught.value.codes == (Code.CODEC,)


def test_what_a_payload_needs_is_asked_for(tmp_path):
    written(tmp_path / "s", coding.coder("klt"))
    with read.open(tmp_path / "s") as snapshot:
        identity = snapshot.manifest.identity
    with refused(UserError, "user.other-calibration", "c" * 16, "d" * 16):
        coder_for(identity, coding.calibrated("d" * 16), [coding.turn()] * GEOMETRY.layers)
    with refused(ParamsError, "params.no-turn"):
        coder_for(identity, coding.calibrated())


# -- what cannot be coded


def test_k_after_its_rotary_embedding_has_no_components():
    with refused(CalibrationMismatch, "calibration.pre-rope-only", "pre_rope"):
        coding.coder("klt", placement="post_rope")
    klt_of_v = Recipe(k=IntStream(bits=4, group=8), v=KltStream(bits=4, block_size=32))
    CodedChunks(GEOMETRY, klt_of_v, coding.calibrated(), placement="post_rope")


def test_k_that_is_left_alone_needs_no_turn():
    CodedChunks(GEOMETRY, Recipe(k=IdentityStream(), v=IntStream(bits=4, group=8)))


def test_where_a_token_stands_counts(tmp_path):
    """A turn that is one token off gives other K: the coder turns every chunk at its own positions."""
    coder, whole = coding.coder("hadamard"), torch.cat([payload(n) for n in range(CHUNKS)], dim=3)
    turned, last = coding.turn(), payload(CHUNKS - 1)
    found = coder.decode(coder.encode(last, CHUNKS - 1), CHUNKS - 1)
    k, first = whole[0, 0, :, -GEOMETRY.chunk_tokens :], (CHUNKS - 1) * GEOMETRY.chunk_tokens
    codec = build(coder.codec.recipe.k)
    wanted = turned.redo(codec.decode(codec.encode(turned.undo(k, first), Site(0, 0, "k"))), first)
    assert torch.equal(found[0, 0], wanted)
    assert not torch.equal(coder.decode(coder.encode(last, CHUNKS - 1), 0)[0, 0], wanted)


@pytest.mark.parametrize("name", UNSTORED)
def test_a_control_stores_nothing(name):
    with refused(CapabilityError, "capability.no-codes", f"'{name}'", "stream k"):
        CodedChunks(GEOMETRY, Recipe(k=ladder_making.RECIPES[name](4), v=NoiseStream(sigma=0, seed=0)))


@pytest.mark.parametrize("layer", [-1, GEOMETRY.layers])
def test_a_layer_that_there_is_not(layer):
    with refused(ParamsError, "params.no-such-layer", f"layer {layer}", "0 to 1"):
        coding.coder("int", layers=[0, layer])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_coded(tmp_path, value):
    bad = payload(1)
    bad[1, 1, 0, 3, 2] = value
    context = making.source(LENGTH, GEOMETRY, payload)
    source = SnapshotSource(context.identity, [payload(0), bad, payload(2)], context.ledger, context.tokens)
    with refused(NonFinite, None, "layer 1 v", "window 1"):
        save(tmp_path / "s", source, coder=coding.coder("int"))
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "s", source)
    with read.open(tmp_path / "s") as snapshot:
        assert making.same(snapshot.load()[1:2], [bad]), "as it is, anything is stored"


# -- damage and forgery


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_accidents_never_reach_the_codec_and_forgeries_do_not_get_out_of_it(tmp_path, name):
    coder, chance = coding.coder(name), random.Random(name)
    written(tmp_path / "s", coder)
    good = Parts.of((tmp_path / "s").read_bytes())
    with read.open(tmp_path / "s") as snapshot:
        sizes = [record.nbytes for record in snapshot.records]
    for forged in (False, True) * 15:
        first = good.payload[: sizes[0]]
        bad = resealed(damaged(first, chance)) if forged else damaged(first, chance)
        whole = replace(good, payload=bad + good.payload[sizes[0] :]).indexed(0, nbytes=len(bad))
        (tmp_path / "bad").write_bytes((whole.digested() if forged else whole).sealed())
        with read.open(tmp_path / "bad") as snapshot:
            try:
                found = snapshot.load(coder=coder)
            except SnapshotRefused as error:
                assert error.codes == ((Code.CHUNK_UNDECODABLE,) if forged else (Code.CHUNK_CHECKSUM,))
            else:
                assert forged or bad == first
                assert found[0].shape == torch.Size(GEOMETRY.chunk_shape)


def test_coded_chunks_have_one_crc_and_digests_of_their_own(tmp_path):
    """A frame ends in its own CRC, and whatever does has the CRC of all that does: it tells no chunk from another."""
    coder = coding.coder("int")
    written(tmp_path / "s", coder)
    with read.open(tmp_path / "s") as snapshot:
        stored = [snapshot.stored(number) for number in range(CHUNKS)]
        digests = [record.digest for record in snapshot.records]
    assert len(set(stored)) == len(set(digests)) == CHUNKS
    assert len(set(map(google_crc32c.value, stored))) == 1


def frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        length = FrameHeader.read(memoryview(data)).length
        found.append(data[:length])
        data = data[length:]
    return found


def test_frames_of_another_layer_stream_shape_or_number():
    coder = coding.coder("int")
    own = frames(coder.encode(payload(0), 0))
    short = Geometry(layers=2, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=8)
    other = frames(
        CodedChunks(short, coder.codec.recipe, turns=[coding.turn()] * GEOMETRY.layers).encode(
            payload(0)[..., :8, :].clone(), 0
        )
    )
    for bad in (
        own[::-1],
        [own[1], own[0], *own[2:]],
        [*own[2:], *own[:2]],
        own[:-1],
        [*own, own[-1]],
        [other[0], *own[1:]],
        [],
    ):
        with pytest.raises(StreamError):
            coder.decode(b"".join(bad), 0)


def test_what_does_not_fit_the_dtype_is_refused():
    geometry = replace(GEOMETRY, dtype="float16")
    coder = CodedChunks(geometry, IDENTITY)
    own = frames(coder.encode(payload(0, geometry), 0))
    large = read_frame(own[0])
    large = replace(large, blocks=((torch.full(large.shape, 1e6),),))
    with refused(StreamError, "stream.too-large", "layer 0 k", "chunk 0", "float16"):
        coder.decode(b"".join([frame_bytes(large), *own[1:]]), 0)
