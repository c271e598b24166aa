"""Policies: what one asked needle reports, and a run of the study on the tiny model."""

from __future__ import annotations

import pytest
import torch

from kvlab.core.errors import ParamsError, PoolTooSmall, StorageError
from kvlab.core.model import resolve
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.text import needles
from kvlab.text.needles import Needle
from kvlab_pipeline.studies.policy import measure
from kvlab_pipeline.studies.policy import record as records
from kvlab_pipeline.studies.policy.measure import WatchedRun, arms, ask, planted_chunks, thirds
from kvlab_pipeline.studies.policy.record import FORESIGHT, NeedleResult
from kvlab_pipeline.studies.policy.tables import parts
from kvlab_pipeline.studies.record import read_record
from pipeline.studies.printed import rows, whole
from refusals import refused

pytestmark = pytest.mark.nightly  # a page that FINDINGS.md does not need

POLICIES = ("lru", "qk", "oracle", "random", "sign_bit")


@pytest.fixture(scope="module")
def planted(tiny_params, tmp_path_factory):
    out = tmp_path_factory.mktemp("needles") / "needles.parquet"
    needles.build(tiny_params, out)
    return out


@pytest.fixture(scope="module")
def model(tiny_params):
    return PagedModel.load(resolve(tiny_params.model))


@pytest.fixture(scope="module")
def items(planted, model):
    return needles.load(planted, model.info.model_hash).items


@pytest.fixture(scope="module")
def asks(tiny_params):
    few = tiny_params.kvstore.policy.model_copy(
        update={"chunk_tokens": 8, "every": 1, "needles": 2, "pools": (0.75, 0.5), "policies": POLICIES}
    )
    return tiny_params.model_copy(update={"kvstore": tiny_params.kvstore.model_copy(update={"policy": few})})


@pytest.fixture(scope="module")
def record(asks, planted, tmp_path_factory):
    out = tmp_path_factory.mktemp("policy") / "tiny.json"
    measure.measure(asks, planted, out)
    return read_record(out, records.RECORD, "policy")


def run_after(model, needle: Needle, blocks: int, name: str = "lru", **how) -> PagedRun:
    run = PagedRun(model, PagerConfig(blocks * 8, 8, 1, 1), name, every=1, **how)
    run.extend(needle.context)
    return run


# One needle


def test_an_answer_is_found_when_every_token_of_it_is_written(model, items):
    needle = items[0]
    run = run_after(model, needle, 20)
    for token in needle.question:  # alone in its forward, as it is asked
        run.extend([token])
    written = list(run.decode(3).tokens)
    right, wrong = needle._replace(answer=written), needle._replace(answer=[*written[:2], (written[2] + 1) % 300])
    assert ask(run_after(model, needle, 20), right)[0].found
    assert not ask(run_after(model, needle, 20), wrong)[0].found


def test_where_everything_has_room_all_of_the_mass_is_kept(model, items):
    asked, masses = ask(run_after(model, items[0], 20), items[0])
    assert (asked.question, asked.answer, asked.held, asked.page_ins) == (pytest.approx(1), pytest.approx(1), 1, 0)
    assert len(masses) == len(items[0].question) + len(items[0].answer) - 1
    assert all(float(mass.sum()) == pytest.approx(1) for mass in masses)


def test_kept_mass_is_that_of_the_chunks_that_attention_could_read(model, items):
    seen = WatchedRun(run_after(model, items[0], 4))
    seen.forward(items[0].question[0])
    assert seen.resident[0] == 0 and seen.resident[-1] == 8 and len(seen.resident) == 4
    out = [chunk for chunk in range(9) if chunk not in seen.resident]
    assert 0 < seen.shares[0] < 1 and seen.shares[0] == pytest.approx(1 - float(seen.masses[0][out].sum()))


def test_foresight_holds_the_chunks_that_it_was_told(model, items):
    told = torch.zeros(9, dtype=torch.float64)
    told[3] = 1.0
    run = PagedRun(model, PagerConfig(32, 8, 1, 1), "oracle", every=1 << 40)
    run.extend(items[0].context)
    seen = WatchedRun(run, [told], ahead=True)
    assert 3 not in run.pager.resident
    seen.forward(items[0].question[0])
    assert 3 in seen.resident and seen.shares == [1.0]


def test_the_planted_lines_chunks():
    needle = Needle(context=[0] * 64, question=[1] * 5, answer=[2] * 2, depth=14 / 64)
    assert planted_chunks(needle, 8) == {1, 2}
    assert planted_chunks(needle._replace(depth=16 / 64), 8) == {2}
    assert planted_chunks(needle._replace(depth=17 / 64), 7) == {2, 3}


def test_pools_are_shares_of_the_context(asks):
    settings = asks.kvstore.policy
    shares = settings.model_copy(update={"pools": (0.25, 0.1, 1.0), "policies": ("lru",)})
    assert [arm.blocks for arm in arms(shares, 512, 512)[1:4]] == [16, 6, 64]
    found = arms(settings, 64, 80)
    assert [(arm.policy, arm.pool, arm.blocks, arm.prefill) for arm in found[:2]] == [
        (None, None, 10, "bounded"),
        ("lru", 0.75, 6, "bounded"),
    ]
    assert len(found) == 1 + 2 * 5 + 2 * 6 and {arm.blocks for arm in found[1:]} == {4, 6}
    with pytest.raises(PoolTooSmall):
        arms(settings.model_copy(update={"pools": (0.3,)}), 64, 80)


def test_needles_are_counted_by_the_third_that_they_stand_in():
    asked = [NeedleResult(found=hit, question=0, answer=0, held=0, page_ins=0) for hit in (True, False, True, True)]
    found = thirds(asked, [0.0, 0.3, 0.34, 0.999])
    assert [(one.items, one.found) for one in found] == [(2, 1), (1, 1), (1, 1)]


# The study


def test_every_arm_answers_every_needle(record):
    assert len(record.arms) == 1 + 2 * 5 + 2 * 6
    assert {len(arm.items) for arm in record.arms} == {2}
    for arm in record.arms:
        for one in (arm.question, arm.answer):
            assert 0 <= one.low <= one.value <= one.high <= 1
        assert arm.question.value == pytest.approx(sum(one.question for one in arm.items) / 2)
        assert sum(third.items for third in arm.thirds) == 2


def test_the_whole_context_keeps_everything_and_a_larger_pool_keeps_more(record):
    assert record.arm(None, None, "bounded").question.value == pytest.approx(1)
    for name in POLICIES:
        for prefill in ("bounded", "restored"):
            large, small = record.arm(name, 0.75, prefill), record.arm(name, 0.5, prefill)
            assert 1 > large.question.value > small.question.value


def test_nothing_keeps_more_of_the_attention_than_foresight(record):
    for pool in (0.75, 0.5):
        best = record.arm(FORESIGHT, pool, "restored").items
        for arm in (arm for arm in record.arms if arm.pool == pool):
            for foreseen, asked in zip(best, arm.items, strict=True):
                assert foreseen.question >= asked.question - 1e-9 and foreseen.answer >= asked.answer - 1e-9


def test_scoring_policies_recall_chunks_and_the_others_do_not(record):
    assert record.arm("lru", 0.5, "bounded").page_ins == record.arm("random", 0.5, "bounded").page_ins == 0
    assert record.arm("oracle", 0.5, "bounded").page_ins > 0 < record.arm("oracle", 0.5, "restored").page_ins


def test_differences_are_held_against_lru_in_the_same_pool(record):
    for arm in record.arms:
        assert (arm.against is None) == (arm.policy in (None, "lru"))
        if arm.against:
            lru = record.arm("lru", arm.pool, arm.prefill)
            assert arm.against.question.value == pytest.approx(arm.question.value - lru.question.value)


def test_the_tables_name_every_arm(record):
    found = {name: rows(table) for name, table in parts(record).items()}
    assert [len(table) for table in found.values()] == [11, 13, 8, 10, 23]
    assert whole("policy", record, parts(record)) and found["restored"][-1][2] == "foresight"
    assert found["bounded"][0][:3] == ("all", "11", "everything in the pool")
    with refused(StorageError, "storage.no-arm", "fifo"):
        record.arm("fifo", 0.5, "bounded")


def test_more_needles_than_there_are_are_refused(asks, planted, tmp_path):
    many = asks.kvstore.policy.model_copy(update={"needles": 99})
    params = asks.model_copy(update={"kvstore": asks.kvstore.model_copy(update={"policy": many})})
    with refused(ParamsError, "params.too-few-needles", 99, 4):
        measure.measure(params, planted, tmp_path / "out.json")
