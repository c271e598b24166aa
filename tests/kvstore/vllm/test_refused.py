"""Snapshots that vLLM must not use: a cold miss that says why, and the tokens of the cold run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.codecs.hadamard import HadamardStream
from kvlab.core.recipe import Recipe
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import SnapshotHeader
from kvlab.kvstore.snapshot.payload import CodedChunks
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.vllm.conftest import CHUNK, whole

pytestmark = pytest.mark.engine


@pytest.fixture
def saved(engine, prompts):
    """A prompt, its cold answer, and the snapshot of it."""
    engine.empty()
    cold = engine.generate(prompts[11], n=16)
    (path,) = engine.files()
    return prompts[11], cold, path


def changed(path: Path, change) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data, SnapshotHeader.read(bytes(data))) or data)


def flipped(at):
    def change(data: bytearray, header: SnapshotHeader) -> None:
        data[at(header)] ^= 4

    return change


IN_THE_PAYLOAD = {
    "first chunk": (flipped(lambda header: header.payload_at + 9), "chunk_checksum"),
    "last chunk": (flipped(lambda header: header.digest_at - 3), "chunk_checksum"),
}
IN_FRONT = {
    "header": (flipped(lambda header: 17), "header_checksum"),
    "magic": (flipped(lambda header: 0), "not_a_snapshot"),
    "manifest": (flipped(lambda header: header.spans[0].start + 5), "manifest_checksum"),
    "tokens": (flipped(lambda header: header.spans[2].start), "tokens_checksum"),
    "hash": (flipped(lambda header: -1), "file_hash"),
    "cut": (lambda data, header: data[:-50], "truncated"),
    "longer": (lambda data, header: data + b"more", "trailing_bytes"),
    "empty": (lambda data, header: bytearray(1), "not_a_snapshot"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_THE_PAYLOAD)
def test_damage_that_shows_while_loading_is_computed_anew_and_mended(engine, saved, name):
    prompt, cold, path = saved
    good = path.read_bytes()
    change, code = IN_THE_PAYLOAD[name]
    changed(path, change)
    again = engine.generate(prompt, n=16)
    assert again["tokens"] == cold["tokens"]
    assert again["counts"]["tokens_loaded"] == 0 and again["counts"]["failed"] == {code: 1}
    (said,) = again["said"]
    assert said["restored"] == 0 and said["snapshot"] == path.name and [c for c, _ in said["reasons"]] == [code]
    assert said["saved"] == path.name and path.read_bytes() == good
    assert engine.generate(prompt, n=16)["counts"]["tokens_loaded"] == whole(prompt)


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_FRONT)
def test_damage_in_front_of_the_payload_is_no_match(engine, saved, name):
    prompt, cold, path = saved
    change, code = IN_FRONT[name]
    changed(path, change)
    again = engine.generate(prompt, n=16)
    (said,) = again["said"]
    assert again["tokens"] == cold["tokens"] and again["cached"] == [0] and again["counts"]["loads"] == 0
    assert [c for c, _ in said["reasons"]] == [code] and said["restored"] == 0 and said["snapshot"] is None
    assert engine.generate(prompt, n=16)["counts"]["loads"] == 1  # saved anew


FOREIGN = {
    "model": {"model_hash": "0123456789abcdef"},
    "config": {"config_hash": "0123456789ab"},
    "tokenizer": {"tokenizer_hash": "0123456789ab"},
    "rope": {"rope": {"rope_theta": 500000.0, "rope_type": "default"}},
    "salt": {"salt": "another engine"},
    "dtype": {"dtype": "bfloat16"},
    "layout": {"chunk_tokens": CHUNK // 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("code", FOREIGN)
def test_a_foreign_snapshot_is_no_match(engine, saved, code):
    prompt, cold, path = saved
    with read.open(path) as snapshot:
        identity, ledger, tokens = snapshot.manifest.identity, snapshot.ledger, snapshot.tokens
        chunks = snapshot.load()
    change = FOREIGN[code]
    if set(change) <= {"dtype", "chunk_tokens"}:
        change = {"geometry": replace(identity.geometry, **change)}
    other = identity.model_copy(update=change)
    size, dtype = other.geometry.chunk_tokens, other.geometry.torch_dtype
    chunks = [chunk[:, :, :, :size].to(dtype).contiguous() for chunk in chunks]
    save(path, SnapshotSource(other, chunks, ledger, tokens[: len(chunks) * size]))
    again = engine.generate(prompt, n=16)
    assert again["tokens"] == cold["tokens"] and again["counts"]["loads"] == 0
    assert [c for c, _ in again["said"][0]["reasons"]] == [code]


@pytest.mark.nightly
@pytest.mark.parametrize(("evidence", "codes"), [((), {"codec", "unproven"}), (("0" * 12,), {"codec"})])
def test_a_coded_snapshot_is_no_match(engine, saved, evidence, codes):
    prompt, cold, path = saved
    with read.open(path) as snapshot:
        source = SnapshotSource(snapshot.manifest.identity, snapshot.load(), snapshot.ledger, snapshot.tokens)
    recipe = Recipe(k=HadamardStream(bits=4), v=HadamardStream(bits=4))
    coder = CodedChunks(source.identity.geometry, recipe, placement="post_rope")
    save(path, source, coder=coder, evidence=evidence)
    again = engine.generate(prompt, n=16)
    assert again["tokens"] == cold["tokens"] and again["counts"]["loads"] == 0
    assert {code for code, _ in again["said"][0]["reasons"]} == codes


@pytest.mark.nightly
def test_a_file_that_is_exchanged_after_it_was_chosen_is_another(engine, saved, prompts):
    prompt, cold, path = saved
    other = engine.generate(prompts[12], n=16)
    name = other["said"][0]["saved"]
    path.write_bytes((engine.folder / name).read_bytes())  # another prompt's snapshot under this one's name
    again = engine.generate(prompt, n=16)
    assert again["tokens"] == cold["tokens"] and again["counts"]["loads"] == 0
    assert [c for c, _ in again["said"][0]["reasons"]] == ["prefix"]


@pytest.mark.nightly
def test_a_folder_that_cannot_be_written_costs_the_snapshot_and_not_the_answer(engine, prompts):
    engine.empty()
    cold = engine.cold(prompts[13])
    engine.folder.write_text("a file where the folder should be")
    try:
        again = engine.generate(prompts[13])
    finally:
        engine.folder.unlink()
    assert again["tokens"] == cold["tokens"] and again["counts"]["failed"] == {"storage": 1}
    assert again["said"][0]["saved"] is None and "storage" in [c for c, _ in again["said"][0]["reasons"]]
