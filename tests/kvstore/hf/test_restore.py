"""Restoring: the longest usable prefix, every reason against a snapshot, and a cold run wherever there is one."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import tiny
from kvlab.calibration.load import load as load_calibration
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream
from kvlab.core.errors import CapabilityError, SnapshotRefused, StorageError, UnknownName, UserError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.core.recipe import Recipe
from kvlab.kvstore.hf.comparison import compare, margin
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging import chunks
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.restore import MODES, restore
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import SnapshotHeader
from kvlab.kvstore.snapshot.payload import CodedChunks
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.hf.prompts import prompt, run_after
from kvstore.snapshot.forging import flip
from refusals import refused

pytestmark = pytest.mark.full

OLD = prompt(64)  # what the snapshots of these tests hold
NEW = OLD + prompt(21, 1)


@pytest.fixture
def file(model, roomy, tmp_path):
    return run_after(OLD, model, roomy, salt="").save(tmp_path / "old.kv").path


@pytest.fixture(scope="module")
def cold(model):
    """Logits after NEW from nothing."""
    from kvlab.kvstore.paging.config import PagerConfig

    return run_after(NEW, model, PagerConfig(pool_tokens=256, chunk_tokens=8)).logits


class TestIdentity:
    """Cold and warm are one; `test_new_process` says it of another process."""

    def test_prompts_of_many_lengths(self, model, roomy, tmp_path):
        for seed in range(3):
            old = prompt(random.Random(seed).randrange(16, 100), seed)
            new = old + prompt(30, seed + 100)
            path = run_after(old, model, roomy).save(tmp_path / "s").path
            warm = restore(model, new, path, roomy, mode="consume")
            assert warm.report.prefix_len == len(old) // 8 * 8 == len(new) - warm.report.tokens_prefilled
            cold = restore(model, new, path, roomy, mode="recompute")
            assert torch.equal(cold.logits, warm.logits)
            ours, theirs = warm.run.decode(20), cold.run.decode(20)
            assert ours.tokens == theirs.tokens and torch.equal(ours.logits, theirs.logits)

    def test_in_bfloat16(self, halved, roomy, tmp_path):
        for seed in range(2):
            old = prompt(70, seed)
            path = run_after(old, halved, roomy).save(tmp_path / "s").path
            found = restore(halved, old + prompt(20, 99), path, roomy, mode="verify", decode=20).report.comparison
            assert found.tokens_equal and found.steps == 20

    @pytest.mark.parametrize("changed, reused", [(63, 56), (24, 24), (23, 16), (8, 8)])
    def test_an_edited_history_reuses_what_it_shares(self, model, roomy, file, changed, reused):
        edited = [*NEW[:changed], (NEW[changed] + 1) % 320, *NEW[changed + 1 :]]
        found = restore(model, edited, file, roomy, mode="verify").report
        assert found.prefix_len == reused and found.comparison.max_abs_dlogit == 0

    def test_a_conversation_that_grows(self, model, roomy, tmp_path):
        said, reused = prompt(20), []
        for turn in range(4):
            found = restore(model, said, tmp_path if turn else None, roomy, mode="verify" if turn else "auto")
            if turn:
                reused.append(found.report.prefix_len)
                assert found.report.comparison.max_abs_dlogit == 0 and found.report.comparison.tokens_equal
            found.run.save(tmp_path / f"turn-{turn}.kv")
            found.run.decode(13)  # not saved: the next turn prefills it, as a cold run would
            said = found.run.tokens + prompt(15, turn)
        assert reused == [16, 48, 72] and all(one < other for one, other in pairwise(reused))

    def test_a_prompt_that_ends_where_the_snapshot_does_computes_its_last_chunk(self, model, roomy, file):
        found = restore(model, OLD, file, roomy, mode="verify").report
        assert (found.prefix_len, found.comparison.max_abs_dlogit) == (56, 0)
        shorter = restore(model, OLD[:33], file, roomy, mode="verify").report
        assert (shorter.prefix_len, shorter.comparison.max_abs_dlogit) == (32, 0)


class TestChoice:
    def test_the_longest_usable_prefix(self, model, roomy, tmp_path):
        for name, tokens in {"a": OLD[:24], "b": OLD[:48], "c": OLD[:40] + prompt(40, 7), "d": prompt(64, 8)}.items():
            run_after(tokens, model, roomy).save(tmp_path / name)
        (tmp_path / ".e").write_bytes(b"being written")
        found = restore(model, NEW, tmp_path, roomy).report
        assert (found.prefix_len, found.snapshot, found.reasons) == (48, tmp_path / "b", ())
        some = [tmp_path / name for name in "dca"]
        assert restore(model, NEW, some, roomy).report.prefix_len == 40

    def test_of_equal_prefixes_the_one_nearest_to_a_cold_run(self, model, roomy, tmp_path, monkeypatch, cold):
        run, recipe = run_after(OLD, model, roomy), Recipe(k=IntStream(bits=8), v=IntStream(bits=8))
        coder = CodedChunks(model.geometry(8), recipe, placement="post_rope")
        run.save(tmp_path / "a", coder=coder, evidence=["0123456789ab"])
        assert restore(model, NEW, tmp_path, roomy).report.lossless is False
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 77)
            run.save(tmp_path / "b")
        found = restore(model, NEW, tmp_path, roomy).report
        assert (found.snapshot.name, found.lossless, found.other_numerics) == ("b", True, ("threads",))
        run.save(tmp_path / "c")
        found = restore(model, NEW, tmp_path, roomy)
        assert found.report.snapshot.name == "c" and torch.equal(found.logits, cold)

    def test_one_pool_whatever_the_candidates(self, model, roomy, tmp_path, monkeypatch):
        for name, length in {"a": 24, "b": 48, "c": 64}.items():
            run_after(OLD[:length], model, roomy).save(tmp_path / name)
        made, pool = [], chunks.BlockPool
        monkeypatch.setattr(chunks, "BlockPool", lambda *args: made.append(args) or pool(*args))
        assert restore(model, NEW, tmp_path, roomy, "qk").report.prefix_len == 64 and len(made) == 1
        flip(tmp_path / "c", -80)  # of the payload, before the seal
        assert restore(model, NEW, tmp_path, roomy, mode="verify").report.prefix_len == 48
        assert len(made) == 1 + 3  # the damaged one's, the next one's, the cold run's

    def test_a_folder_that_cannot_be_listed(self, model, roomy, tmp_path, monkeypatch):
        def fail(_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(tmp_path), "iterdir", fail)
        with refused(StorageError, "storage.cannot-read", tmp_path, "Permission denied"):
            restore(model, NEW, tmp_path, roomy)

    def test_one_that_turns_out_damaged_leaves_the_next(self, model, roomy, tmp_path, cold):
        for name, length in {"short": 24, "long": 64}.items():
            run_after(OLD[:length], model, roomy).save(tmp_path / name)
        flip(tmp_path / "long", -80)
        found = restore(model, NEW, tmp_path, roomy)
        assert found.report.prefix_len == 24 and torch.equal(found.logits, cold)

    def test_counts(self, model, roomy, file):
        found = restore(model, NEW, file, roomy, "qk").report
        assert (found.from_keys, found.from_seed, found.missing) == (8, 0, 0)
        assert (found.bytes_read, found.tokens_prefilled) == (os.path.getsize(file), 21)
        assert found.load_ms > 0 and found.prefill_ms > 0 and found.lossless and found.other_numerics == ()
        none = restore(model, NEW, None, roomy).report
        assert none.load_ms is none.bytes_read is none.from_keys is none.lossless is none.snapshot is None

    def test_recompute_never_looks(self, model, roomy, tmp_path, cold, monkeypatch):
        monkeypatch.setattr(read, "open", None)
        found = restore(model, NEW, tmp_path / "missing", roomy, mode="recompute")
        assert not found.report.consumed and found.report.reasons == () and torch.equal(found.logits, cold)

    def test_unknown_mode_and_broken_prompt(self, model, roomy, file):
        with refused(UnknownName, None, "'use'", "consume"):
            restore(model, NEW, file, roomy, mode="use")
        for bad in ([], [*NEW, 320], [*NEW, -1]):
            for mode in MODES:
                with pytest.raises(UserError):
                    restore(model, bad, file, roomy, mode=mode)


class TestRefused:
    """In `auto` a cold run with the reason, in `consume` an error with the same one."""

    def refused(self, model, path, config, *, codes: list[Code], tokens=NEW, cold=None, **settings) -> None:
        found = restore(model, tokens, path, config, **settings)
        assert [code for code, _ in found.report.reasons] == codes
        assert not found.report.consumed and found.report.prefix_len == 0
        assert found.report.tokens_prefilled == len(tokens) and found.run.pager.stats.page_ins == 0
        if cold is not None:
            assert torch.equal(found.logits, cold)
        verified = restore(model, tokens, path, config, mode="verify", **settings).report
        assert verified.comparison is None and [code for code, _ in verified.reasons] == codes
        with pytest.raises(SnapshotRefused) as refusal:
            restore(model, tokens, path, config, mode="consume", **settings)
        assert list(refusal.value.codes) == codes

    def test_of_other_tokens(self, model, roomy, file):
        self.refused(model, file, roomy, codes=[Code.PREFIX], tokens=[1, *NEW[1:]])
        self.refused(model, file, roomy, codes=[Code.PREFIX], tokens=OLD[:8])
        self.refused(model, file, roomy, codes=[Code.PREFIX], tokens=OLD[:1])

    def test_of_other_weights(self, roomy, file, tmp_path):
        folder = tiny.write_model(tmp_path / "other", seed=1)
        other = PagedModel.load(resolve(Model(path=str(folder), n_layers=3)))
        self.refused(other, file, roomy, codes=[Code.MODEL])

    def test_of_another_rotary_embedding(self, model, info, roomy, file):
        from transformers import AutoModelForCausalLM

        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        other = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32, rope_parameters=rope)
        self.refused(PagedModel(other.eval(), info), file, roomy, codes=[Code.ROPE])

    def test_of_another_dtype(self, halved, roomy, file):
        self.refused(halved, file, roomy, codes=[Code.DTYPE])

    def test_of_other_chunks(self, model, roomy, file):
        self.refused(model, file, replace(roomy, chunk_tokens=16), codes=[Code.LAYOUT, Code.PREFIX][:1])

    def test_of_another_salt(self, model, roomy, file, cold):
        self.refused(model, file, roomy, codes=[Code.SALT], salt="tenant", cold=cold)

    def test_files_that_are_none(self, model, roomy, file, tmp_path, cold):
        (tmp_path / "text").write_text("no snapshot, but longer than the header of one would be, by some bytes")
        (tmp_path / "folder").mkdir()
        self.refused(model, tmp_path / "text", roomy, codes=[Code.NOT_A_SNAPSHOT], cold=cold)
        self.refused(model, tmp_path / "gone", roomy, codes=[Code.UNREADABLE], cold=cold)
        self.refused(model, tmp_path / "folder", roomy, codes=[Code.NO_SNAPSHOT], cold=cold)
        self.refused(model, [tmp_path / "gone", tmp_path / "text"], roomy, codes=[Code.UNREADABLE, Code.NOT_A_SNAPSHOT])
        self.refused(model, None, roomy, codes=[Code.NO_SNAPSHOT], cold=cold)

    @pytest.mark.parametrize(
        "where, code",
        [
            ("first chunk", Code.CHUNK_CHECKSUM),
            ("last chunk", Code.CHUNK_CHECKSUM),
            ("digest", Code.FILE_HASH),
            ("cut", Code.TRUNCATED),
            ("longer", Code.TRAILING_BYTES),
            ("header", Code.HEADER_CHECKSUM),
        ],
    )
    def test_damaged_ones(self, model, roomy, file, cold, where, code):
        data = file.read_bytes()
        header = SnapshotHeader.read(data)
        if where == "cut":
            file.write_bytes(data[:-1])
        elif where == "longer":
            file.write_bytes(data + b"\0")
        else:
            place = {"first chunk": header.payload_at, "last chunk": header.digest_at - 1, "digest": -1, "header": 20}
            flip(file, place[where])
        self.refused(model, file, roomy, codes=[code], cold=cold)

    def test_any_bit(self, model, roomy, file):
        """Of 60 places drawn at random, the tail after the shared prefix included."""
        data, chance = file.read_bytes(), random.Random(0)
        for _ in range(60):
            file.write_bytes(data)
            flip(file, chance.randrange(len(data)), chance.randrange(8))
            with pytest.raises(SnapshotRefused):
                restore(model, OLD[:30], file, roomy, mode="consume")
        file.write_bytes(data)
        assert restore(model, OLD[:30], file, roomy, mode="consume").report.prefix_len == 24


class TestCoded:
    """Lossy payloads are used when they are asked for, and never pass for the bits of a cold run."""

    @pytest.fixture
    def recipe(self):
        return Recipe(k=IntStream(bits=8, block_size=64), v=IntStream(bits=8, block_size=64))

    @pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
    def test_with_a_codec_that_reads_no_calibration(self, model, roomy, tmp_path, recipe, placement):
        coder = CodedChunks(model.geometry(8), recipe, placement=placement, turns=model.turns(64))
        run = run_after(OLD, model, roomy)
        path = run.save(tmp_path / "coded", coder=coder).path
        refused = restore(model, NEW, path, roomy).report
        assert [code for code, _ in refused.reasons] == [Code.UNPROVEN] and recipe.recipe_id in refused.reasons[
            0
        ].message
        found = restore(model, NEW, path, roomy, mode="verify", unproven=True).report
        assert found.consumed and found.lossless is False and found.prefix_len == 64
        assert 0 < found.comparison.max_abs_dlogit < 0.2
        proven = run.save(tmp_path / "proven", coder=coder, evidence=["0123456789ab"]).path
        assert restore(model, NEW, proven, roomy, mode="consume").report.prefix_len == 64

    def test_what_was_read_from_one_is_not_saved_as_exact(self, model, roomy, tmp_path, recipe):
        coder = CodedChunks(model.geometry(8), recipe, placement="post_rope")
        path = run_after(OLD, model, roomy).save(tmp_path / "coded", coder=coder).path
        run = restore(model, NEW, path, roomy, mode="consume", unproven=True).run
        assert run.exact == 0
        for upto in (None, 64):
            with refused(UserError, "user.after-lossy", "at most 0"):
                run.save(tmp_path / "poison", upto=upto)
        assert not (tmp_path / "poison").exists()

    def test_where_k_cannot_be_turned_back_the_raw_one_is_used(self, model, roomy, tmp_path, recipe, monkeypatch, cold):
        run = run_after(OLD, model, roomy)
        coder = CodedChunks(model.geometry(8), recipe, placement="pre_rope", turns=model.turns(64))
        run.save(tmp_path / "coded", coder=coder)

        def refuse(*_):
            raise CapabilityError("the model has 2 rotary modules")

        monkeypatch.setattr(PagedModel, "turns", refuse)
        found = restore(model, NEW, tmp_path, roomy, unproven=True)
        assert [code for code, _ in found.report.reasons] == [Code.CODEC] and torch.equal(found.logits, cold)
        assert "2 rotary modules" in found.report.reasons[0].message
        codes = [code for code, _ in restore(model, NEW, tmp_path, roomy, unproven=True, salt="b").report.reasons]
        assert codes == [Code.SALT]  # whose it is comes first
        run.save(tmp_path / "raw")
        assert restore(model, NEW, tmp_path, roomy, unproven=True).report.snapshot.name == "raw"

    def test_with_one_that_reads_a_calibration(self, model, roomy, tmp_path, info, tiny_fitted):
        fitted = load_calibration(tiny_fitted, info.model_hash)
        recipe = Recipe(k=KltStream(bits=6, block_size=64), v=KltStream(bits=6, block_size=64))
        coder = CodedChunks(model.geometry(8), recipe, fitted, turns=model.turns(96))
        path = run_after(OLD, model, roomy).save(tmp_path / "coded", coder=coder).path
        refused = restore(model, NEW, path, roomy, unproven=True).report
        assert [code for code, _ in refused.reasons] == [Code.CALIBRATION]
        found = restore(model, NEW, path, roomy, mode="verify", coder=coder, unproven=True).report
        assert found.prefix_len == 64 and found.comparison.max_abs_dlogit > 0
        raw = run_after(OLD, model, roomy).save(tmp_path / "raw").path
        assert restore(model, NEW, raw, roomy, mode="verify", coder=coder).report.comparison.max_abs_dlogit == 0


class TestNumerics:
    """K and V of other numerics are used, and never pass for a cold run's."""

    def inexact(self, found, name: str, path) -> None:
        assert found.report.consumed and found.report.lossless and found.report.other_numerics == (name,)
        assert found.run.exact == 0
        found.run.extend(prompt(24, 3))
        for upto in (None, 64):
            with refused(UserError, "user.after-other-numerics", "at most 0", name):
                found.run.save(path, upto=upto)
        assert not path.exists()

    def test_other_attention(self, model, info, roomy, file, tmp_path):
        eager = PagedModel.load(info, attention="eager")
        found = restore(eager, NEW, file, roomy, mode="verify")
        assert found.report.other_numerics == ("attention",) and found.report.comparison.tokens_equal
        assert 0 < found.report.comparison.max_abs_dlogit < 1e-4
        assert found.run.exact == 80 and found.run.other_numerics == ()  # this one is the cold run
        warm = restore(eager, NEW, file, roomy)
        self.inexact(warm, "attention", tmp_path / "mixed")
        assert warm.run.made["attention"] == "sdpa, then eager"

    def test_another_number_of_threads(self, model, roomy, file, tmp_path, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        self.inexact(restore(model, NEW, file, roomy), "threads", tmp_path / "mixed")

    def test_slot_order(self, model, roomy, tmp_path):
        path = run_after(OLD, model, roomy, order="slot").save(tmp_path / "s").path
        self.inexact(restore(model, NEW, path, roomy), "order", tmp_path / "mixed")

    def test_tokens_that_were_decoded(self, model, roomy, tmp_path):
        path = run_after(OLD, model, roomy).save(tmp_path / "s", made={"computed": "prefill, decode"}).path
        self.inexact(restore(model, NEW, path, roomy), "computed", tmp_path / "mixed")

    def test_one_that_does_not_say(self, model, roomy, tmp_path):
        run = run_after(OLD, model, roomy)
        source = SnapshotSource(model.identity(8), map(run.pager.payload, range(8)), Ledger((), 0), OLD)
        found = restore(model, NEW, save(tmp_path / "s", source).path, roomy)
        assert found.report.consumed and "engine" in found.report.other_numerics and found.run.exact == 0


class TestComparison:
    """What it is to find is found."""

    def forged(self, model, roomy, tmp_path, change):
        """A run from a snapshot with right checksums and other K and V."""
        run = run_after(OLD, model, roomy)
        payloads = [run.pager.payload(chunk) for chunk in range(8)]
        change(payloads)
        source = SnapshotSource(model.identity(8), payloads, Ledger((), 0), OLD)
        return restore(model, NEW, save(tmp_path / "forged", source).path, roomy, mode="verify", decode=20)

    def test_a_planted_difference(self, model, roomy, tmp_path):
        found = self.forged(model, roomy, tmp_path, lambda chunks: chunks[3].mul_(-1))
        comparison, report = found.report.comparison, found.report
        assert report.consumed and not comparison.tokens_equal and comparison.max_abs_dlogit > 0.1
        at = comparison.first_divergence
        assert comparison.steps == at + 1 and comparison.residency_equal
        logits = found.run.logits if at == 0 else found.run.decode(at) and found.run.logits
        assert comparison.margin_at_divergence == pytest.approx(margin(logits))

    def test_one_bit_of_one_number(self, model, roomy, tmp_path):
        def change(chunks):
            chunks[3].view(torch.int32)[1, 1, 0, 5, 3] ^= 1 << 20

        comparison = self.forged(model, roomy, tmp_path, change).report.comparison
        assert (comparison.max_abs_dlogit > 0 and comparison.first_divergence is None) or not comparison.tokens_equal

    def test_another_pool(self, model, small, roomy):
        found = compare(run_after(OLD, model, roomy), run_after(OLD, model, small), 3)
        assert not found.residency_equal

    def test_only_runs_after_the_same_tokens(self, model, roomy):
        for other in (run_after(NEW, model, roomy), PagedRun(model, roomy)):
            with refused(UserError, "user.other-tokens"):
                compare(run_after(OLD, model, roomy), other, 3)

    def test_at_the_models_last_position(self, model, roomy):
        run = run_after(prompt(255), model, roomy)
        assert compare(run, run.fork(), 16).steps == 2


def test_saving_more_than_is_exact_is_refused(model, roomy, tmp_path):
    run = run_after(prompt(30), model, roomy)
    run.decode(20)
    assert run.save(tmp_path / "s").manifest.length == 24
    assert run.save(tmp_path / "s", upto=23).manifest.length == 16
    for upto in (32, 1000):
        with refused(UserError, "user.inexact", upto, "at most 24"):
            run.save(tmp_path / "t", upto=upto)
    assert not (tmp_path / "t").exists()


def test_restored_by_hand(model, halved, roomy, file):
    with read.open(file) as snapshot:
        for upto in (63, 72, 0):
            with pytest.raises(UserError):
                PagedRun.restored(model, snapshot, upto, roomy)
        with refused(SnapshotRefused, None, "dtype") as caught:
            PagedRun.restored(halved, snapshot, 64, roomy)
        assert Code.DTYPE in caught.value.codes
        run, rebuilt = PagedRun.restored(model, snapshot, 48, roomy, "sign_bit")
    assert run.tokens == OLD[:48] and rebuilt.from_keys == 6 and run.logits is None and run.exact == 48
    with refused(UserError, "user.no-logits"):
        run.decode(1)
