"""Snapshots whose payload is an archive: what they give back, of which prefixes, and what is refused."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.hf.rope import turns_of
from kvlab.calibration.archive import Archive
from kvlab.calibration.load import Calibrated
from kvlab.codecs.archive.file import load
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import CalibrationMismatch, CapabilityError, SnapshotRefused, StreamError
from kvlab.kvstore.paging.geometry import same_bits
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.archive import ArchiveChunks, BeforeRotary
from kvlab.kvstore.snapshot.payload import coder_for, recipe_coder
from kvlab.kvstore.snapshot.reasons import Code
from kvstore import archiving
from kvstore.archiving import CHUNK
from kvstore.hf.prompts import run_after
from kvstore.snapshot.forging import Parts
from refusals import refused
from tiers import examples

SHARED, LENGTH = 64, 80
OLD = [7 * n % 311 for n in range(LENGTH)]
NEW = [*OLD[:SHARED], *(11 * n % 307 for n in range(9))]


@pytest.fixture(scope="module")
def archive(hf_engine, tiny_windows) -> Archive:
    return archiving.fitted(hf_engine, tiny_windows)


@pytest.fixture(scope="module")
def coder(archive, model) -> ArchiveChunks:
    return archiving.coder(archive, model)


@pytest.fixture(scope="module")
def run(model):
    from kvlab.kvstore.paging.config import PagerConfig

    return run_after(OLD, model, PagerConfig(pool_tokens=256, chunk_tokens=CHUNK))


@pytest.fixture(scope="module")
def saved(run, coder, tmp_path_factory):
    return run.save(tmp_path_factory.mktemp("archived") / "whole", coder=coder).path


@pytest.fixture(scope="module")
def due(run, archive, model) -> torch.Tensor:
    """What `Archive.decoded` gives of the same cache, K turned: [layers, 2, kv_heads, tokens, head_dim]."""
    turns, recipe = model.turns(LENGTH), named_recipe("archive", **archiving.QUALITY)
    cache = BeforeRotary(model.geometry(CHUNK), partial(run.pager.rows, chunks=LENGTH // CHUNK), turns)
    layers = archive.decoded(load(archive.encode(recipe, cache, OLD)), OLD)
    return torch.stack([torch.stack([turns[n].redo(k, 0), v]) for n, k, v in layers])


def test_a_snapshot_gives_back_what_the_archive_of_its_context_decodes_to(saved, coder, due, run):
    with read.open(saved) as snapshot:
        assert not snapshot.manifest.lossless and snapshot.length == LENGTH
        assert snapshot.verify(coder) == []
        found = torch.cat(snapshot.load(coder=coder), dim=3)
    assert same_bits(found, due)
    whole = torch.cat([run.pager.payload(n) for n in range(LENGTH // CHUNK)], dim=3)
    assert 0 < float((found - whole).square().sum() / whole.square().sum()) < 0.1


@pytest.mark.parametrize("upto", [CHUNK, 3 * CHUNK, SHARED])
def test_whole_chunks_from_the_first_on_decode_without_the_rest(saved, coder, due, upto):
    with read.open(saved) as snapshot:
        found = torch.cat(tuple(snapshot.chunks(upto, coder, whole=False)), dim=3)
    assert same_bits(found, due[:, :, :, :upto].contiguous())


def test_a_prompt_that_shares_a_prefix_goes_on_from_it(saved, coder, model, roomy, due):
    refused = restore(model, NEW, saved, roomy, coder=coder).report
    assert [code for code, _ in refused.reasons] == [Code.UNPROVEN]
    found = restore(model, NEW, saved, roomy, mode="verify", coder=coder, unproven=True).report
    assert found.prefix_len == SHARED and found.lossless is False and 0 < found.comparison.max_abs_dlogit < 0.5
    run = restore(model, NEW, saved, roomy, mode="consume", coder=coder, unproven=True).run
    held = torch.cat([run.pager.payload(n) for n in range(SHARED // CHUNK)], dim=3)
    assert same_bits(held, due[:, :, :, :SHARED].contiguous())
    assert run.exact == 0


@pytest.mark.parametrize("bits", [6, 9.5])
def test_the_payload_takes_the_bits_that_were_asked_for_and_any_bits_decode_it(
    archive, model, run, coder, roomy, tmp_path, bits
):
    made = run.save(tmp_path / "s", coder=archiving.coder(archive, model, bits=bits))
    values = LENGTH * model.info.values_per_token
    assert 8 * made.payload_bytes / values == pytest.approx(bits, rel=0.01)
    found = restore(model, NEW, made.path, roomy, mode="consume", coder=coder, unproven=True).report
    assert found.prefix_len == SHARED


def test_bits_that_cannot_be_met_leave_no_file(archive, model, run, tmp_path):
    with refused(CapabilityError, "capability.unmet-bits"):
        run.save(tmp_path / "s", coder=archiving.coder(archive, model, bits=0.01))
    assert not (tmp_path / "s").exists()


@pytest.fixture
def mixed(saved, coder, model, roomy, tmp_path):
    """The snapshot with the first chunk of another one of the same beginning, and that chunk's values."""
    other = run_after(NEW, model, roomy).save(tmp_path / "other", coder=coder).path
    with read.open(saved) as one, read.open(other) as two:
        assert one.chain[: SHARED // CHUNK] == two.chain[: SHARED // CHUNK]
        old, new = one.stored(0), two.stored(0)
        assert old != new  # the steps are those of the whole context
        (values,) = two.chunks(CHUNK, coder, whole=False)
    parts = Parts.of(saved.read_bytes())
    return replace(parts, payload=new + parts.payload[len(old) :]).indexed(0, nbytes=len(new)), values


def test_a_chunk_of_another_context_s_archive_is_refused(mixed, coder, tmp_path):
    (tmp_path / "mixed").write_bytes(mixed[0].sealed())
    with read.open(tmp_path / "mixed") as snapshot, pytest.raises(SnapshotRefused) as caught:
        snapshot.load(coder=coder)
    assert caught.value.codes == (Code.CHUNK_CHECKSUM,)


def test_chunks_of_two_archives_that_somebody_sealed_together_are_read_as_what_they_are(mixed, coder, due, tmp_path):
    """Each says its own quality and steps, so that none is read by another's."""
    (tmp_path / "mixed").write_bytes(mixed[0].digested().sealed())
    with read.open(tmp_path / "mixed") as snapshot:
        first, *others = snapshot.load(coder=coder)
    assert same_bits(first, mixed[1]) and not same_bits(first, due[:, :, :, :CHUNK].contiguous())
    assert same_bits(torch.cat(others, dim=3), due[:, :, :, CHUNK:].contiguous())


class TestRefused:
    def test_another_calibration(self, saved, archive, model, roomy, due):
        points = archive.fitted.points.clone()
        points[0, 0, 0] += 1
        other = Archive(replace(archive.fitted, points=points), archive.probes, archive.info)
        report = restore(model, NEW, saved, roomy, coder=archiving.coder(other, model), unproven=True).report
        assert [code for code, _ in report.reasons] == [Code.CALIBRATION] and not report.consumed

    def test_no_calibration(self, saved, model, roomy):
        report = restore(model, NEW, saved, roomy, unproven=True).report
        assert [code for code, _ in report.reasons] == [Code.CALIBRATION]
        with read.open(saved) as snapshot, refused(CalibrationMismatch, "calibration.missing", "kvlab calibrate"):
            coder_for(snapshot.manifest.identity, None, model.turns(LENGTH))

    def test_another_model(self, saved, coder, model, roomy, monkeypatch):
        with read.open(saved) as snapshot:
            strange = snapshot.manifest.identity.model_copy(update={"model_hash": "0123456789abcdef"})
            assert [code for code, _ in snapshot.check(strange, unproven=True)] == [Code.MODEL]

    def test_other_tokens(self, saved, coder, model, roomy):
        report = restore(model, [5, *NEW[1:]], saved, roomy, coder=coder, unproven=True).report
        assert [code for code, _ in report.reasons] == [Code.PREFIX]

    def test_another_key(self, run, coder, model, roomy, tmp_path):
        key, other = Key(b"k" * 32), Key(b"o" * 32)
        path = run.save(tmp_path / "signed", coder=coder, key=key).path
        asked = {"mode": "auto", "coder": coder, "unproven": True}
        assert restore(model, NEW, path, roomy, key=key, **asked).report.consumed
        report = restore(model, NEW, path, roomy, key=other, **asked).report
        assert [code for code, _ in report.reasons] == [Code.SIGNATURE]

    def test_some_layers_and_k_after_its_rotary_embedding(self, archive, model):
        calibrated = Calibrated({}, {}, "hf", "a", "b", "c", archive=archive)
        recipe = named_recipe("archive", bits=2)
        for changed in ({"layers": (0, 1)}, {"placement": "post_rope"}):
            with refused(CapabilityError, "capability.whole-cache", "'archive'"):
                recipe_coder(model.geometry(CHUNK), recipe, calibrated, turns=model.turns(8), **changed)

    def test_a_calibration_of_another_shape(self, archive, model):
        geometry = replace(model.geometry(CHUNK), layers=4)
        with refused(CalibrationMismatch, "calibration.other-shape", f"({geometry.layers}, "):
            ArchiveChunks(geometry, named_recipe("archive", bits=2), archive, model.turns(8))


@examples(200)
@given(data=st.data())
def test_any_changed_byte_is_refused(saved, coder, data):
    whole = bytearray(saved.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    changed = saved.parent / "changed"
    changed.write_bytes(whole)
    with pytest.raises(SnapshotRefused), read.open(changed) as snapshot:
        snapshot.load(coder=coder)


def test_forged_chunks_are_refused_or_decode_to_numbers(saved, coder):
    """With right digests: what a coder is handed then is anybody's bytes."""
    chance = random.Random(0)
    with read.open(saved) as snapshot:
        good, ids = snapshot.stored(1), snapshot.tokens[CHUNK : 2 * CHUNK]
    found_out = 0
    for _ in range(400):
        forged = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            forged[chance.randrange(len(forged))] = chance.randrange(256)
        del forged[chance.choice([len(forged)] * 3 + [chance.randrange(len(forged))]) :]
        try:
            assert bool(torch.isfinite(coder.decode(bytes(forged), 1, ids)).all())
        except StreamError:
            found_out += 1
    assert found_out > 0
    with refused(StreamError, "stream.undecodable", "chunk 1", "token 320"):
        coder.decode(good, 1, [*ids[:-1], 320])


def test_saving_asks_for_a_layer_at_a_time_and_restoring_for_a_chunk(run, model, archive, saved):
    """Never for whole payloads, and never for a third layer before the first is let go."""
    chunks, alive, most = LENGTH // CHUNK, set(), []

    def rows(layer):
        found = run.pager.rows(layer, chunks)
        alive.add(id(found))
        weakref.finalize(found, alive.discard, id(found))
        most.append(len(alive))
        return found

    coder = archiving.coder(archive, model)
    found = list(coder.encoded(map(_never, range(chunks)), OLD, rows))
    assert max(most) <= 2 and len(most) >= 2 * 2 * model.info.n_layers
    with read.open(saved) as snapshot:
        assert found == [snapshot.stored(number) for number in range(chunks)]
    assert found == list(coder.encoded(map(run.pager.payload, range(chunks)), OLD))  # as from whole payloads


def _never(number: int):
    raise AssertionError(f"chunk {number} was taken whole")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotary_embedding_of_a_configuration_is_that_of_its_model(model, halved, dtype):
    own = (model if dtype == torch.float32 else halved).turns(50)[0]
    attention = model.attention
    found = turns_of(model.model.config, model.info.head_dim, 50, dtype)[0]
    assert model.attention == attention  # the configuration is as it was
    assert torch.equal(found.cos, own.cos) and torch.equal(found.sin, own.sin)


def test_in_bfloat16_too(archive, halved, roomy, tmp_path):
    coder = archiving.coder(archive, halved)
    path = run_after(OLD, halved, roomy).save(tmp_path / "s", coder=coder).path
    found = restore(halved, NEW, path, roomy, mode="consume", coder=coder, unproven=True)
    assert found.report.prefix_len == SHARED and found.run.pager.payload(0).dtype == torch.bfloat16
