"""Placement: the verdict on planted differences, both controls, and a run of the study on the tiny model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import CapabilityError, Fault, ParamsError
from kvlab.core.model import resolve
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.text import corpus
from kvlab_pipeline.studies.placement import measure
from kvlab_pipeline.studies.placement import record as records
from kvlab_pipeline.studies.placement.measure import (
    Runs,
    Text,
    comparable,
    control,
    flips,
    judge,
    leads,
    margins,
    orders,
    shift,
    shifted,
    tied,
)
from kvlab_pipeline.studies.placement.record import PlantedControl, RunVerdict
from kvlab_pipeline.studies.placement.tables import parts
from kvlab_pipeline.studies.record import read_record
from pipeline.studies.printed import rows as rows_of
from pipeline.studies.printed import whole
from refusals import refused
from tiers import examples

pytestmark = pytest.mark.full  # a page that FINDINGS.md does not need

LIMIT = 1e-3


def rows(*leads_of: float) -> torch.Tensor:
    """Logits whose first token leads the second one by so much, a row each."""
    return torch.tensor([[lead, 0.0, -9.0] for lead in leads_of])


# The verdict


def test_equal_runs_are_the_same():
    found = judge(rows(1.0, 0.5), rows(1.0, 0.5), LIMIT, fixed=2)
    assert found == RunVerdict(kind="same", flips=0, first=None, margin=None, widest=None, largest=0.0)


def test_noise_without_a_flip_is_the_same():
    assert judge(rows(1.0, 0.5), rows(1.0009, 0.5), LIMIT, fixed=2).kind == "same"


def test_a_flip_of_what_was_all_but_tied_is_a_near_tie():
    found = judge(rows(1.0, 5e-4), rows(1.0, -4e-4), LIMIT, fixed=2)
    assert (found.kind, found.flips, found.first) == ("near tie", 1, 1)
    assert found.margin == pytest.approx(5e-4) == found.widest and found.largest == pytest.approx(9e-4)


def test_a_flip_of_a_token_that_led_is_a_seam_bug():
    found = judge(rows(1.0, 0.002), rows(1.0, -0.001), 0.0015, fixed=2)
    assert (found.kind, found.margin) == ("seam bug", pytest.approx(0.002))


def test_a_flip_at_a_tie_excuses_no_logit_that_is_far_off():
    assert judge(rows(1.0, 5e-4), rows(1.0, -0.5), LIMIT, fixed=2).kind == "seam bug"
    assert judge(rows(1.0, 0.5), rows(1.01, 0.5), LIMIT, fixed=2).kind == "seam bug"


def test_what_is_decoded_after_a_flip_is_not_compared():
    reference, other = rows(1.0, 5e-4, 3.0), rows(1.0, -4e-4, -3.0)
    assert judge(reference, other, LIMIT, fixed=1).kind == "near tie"
    assert judge(reference, other, LIMIT, fixed=3).kind == "seam bug"
    assert comparable(torch.tensor([True, False, True, True]), fixed=2) == 3
    assert comparable(torch.tensor([True, False]), fixed=2) == 2


@given(st.integers(0, 10_000), st.floats(1e-6, 1e-2), st.integers(0, 12))
@examples(60)
def test_rounding_within_the_limit_is_never_a_seam_bug(seed, noise, fixed):
    source = torch.Generator().manual_seed(seed)
    reference = torch.randn(12, 5, generator=source, dtype=torch.float64)
    other = reference + noise * (2 * torch.rand(12, 5, generator=source, dtype=torch.float64) - 1)
    assert judge(reference, other, 2 * noise, fixed).kind != "seam bug"
    assert judge(reference, other + 3 * noise, 2 * noise * 0.99, fixed).kind == "seam bug"


def test_runs_of_different_lengths_are_not_judged():
    with refused(Fault, "fault.other-shape"):
        judge(rows(1.0), rows(1.0, 2.0), LIMIT, fixed=1)


def test_leads_and_flips_are_counted_by_bin():
    reference, other = rows(0.05, 0.1, 2.0), rows(-0.05, 0.2, 3.0)
    binned = margins(leads(reference), flips(reference, other), (0.0, 0.1, 1.0))
    assert leads(rows(0.05, -3.0)).tolist() == pytest.approx([0.05, 3.0])
    assert [(one.low, one.high, one.rows, one.flips) for one in binned] == [
        (0.0, 0.1, 1, 1),
        (0.1, 1.0, 1, 0),
        (1.0, None, 1, 0),
    ]


def test_a_control_without_a_flip_proves_nothing():
    calm = RunVerdict(kind="same", flips=0, first=None, margin=None, widest=None, largest=0.0)
    tied_up = RunVerdict(kind="near tie", flips=1, first=0, margin=0.1, widest=0.1, largest=0.1)
    assert not control("tie", "near tie", [calm, calm]).passed
    assert control("tie", "near tie", [calm, tied_up]) == PlantedControl(
        name="tie", expected="near tie", runs=2, flipped=1, right=1, lead=0.1
    )
    assert not control("shift", "seam bug", [tied_up]).passed


# The controls on a model


@pytest.fixture(scope="module")
def model(tiny_params):
    return PagedModel.load(resolve(tiny_params.model))


@pytest.fixture(scope="module")
def ids(tiny_windows, model) -> list[int]:
    return corpus.load(tiny_windows, model.info.model_hash).test[0, :64].tolist()


def scored(model, ids, **how) -> torch.Tensor:
    return PagedRun(model, PagerConfig(128, 8), **how).score(ids)


def test_tied_rows_are_put_back(model, ids):
    weight = model.model.get_output_embeddings().weight
    before, hidden = weight.data.clone(), torch.ones(weight.shape[1])
    with pytest.raises(ZeroDivisionError), tied(model, 5, hidden, [5, 7]) as other:
        assert other == 7
        apart = (weight[7] - weight[5]).detach()
        assert 0 < float(apart.abs().max()) < 1e-5 and abs(float(apart @ hidden)) < 1e-5
        raise ZeroDivisionError
    assert torch.equal(weight, before)


def test_a_shift_begins_at_its_seam_and_ends_with_its_block(model, ids):
    plain = scored(model, ids)
    with shifted(model, 40):
        off = scored(model, ids)
    assert torch.equal(off[:40], plain[:40]) and float((off[40:] - plain[40:]).abs().max()) > 1e-3
    assert torch.equal(scored(model, ids), plain)
    with shifted(model, 40), refused(CapabilityError, "capability.no-positions"):
        model.model(torch.tensor([ids]))


def test_a_shift_of_nothing_is_judged_the_same(model, ids, tiny_params, monkeypatch):
    few = tiny_params.kvstore.placement.model_copy(update={"chunk_tokens": 8, "decode": 4})
    runs = Runs(model, few, 64)
    text = Text(ids, runs.logits(ids))
    assert shift(runs, [text], 1e-4).right == 1
    monkeypatch.setattr(
        "kvlab_pipeline.studies.placement.measure.shifted", lambda model, seam: shifted(model, seam, by=0)
    )
    assert shift(runs, [text], 1e-4) == PlantedControl(
        name="shift", expected="seam bug", runs=1, flipped=0, right=0, lead=None
    )


@pytest.mark.parametrize("policy", ["lru", "qk", "sign_bit"])
def test_blocks_change_nothing_where_chunks_go_and_come_back(model, ids, policy):
    found = [
        PagedRun(model, PagerConfig(40, 8, 1, 1), policy, every=8, block_order=order).score(ids)
        for order in (None, [4, 2, 0, 1, 3], [1, 0, 3, 4, 2])
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], scored(model, ids))


# The study


@pytest.fixture(scope="module")
def asks(tiny_params):
    few = tiny_params.kvstore.placement.model_copy(update={"chunk_tokens": 8, "windows": 2, "orders": 6, "decode": 4})
    return tiny_params.model_copy(update={"kvstore": tiny_params.kvstore.model_copy(update={"placement": few})})


@pytest.fixture(scope="module")
def record(asks, tiny_windows, tmp_path_factory):
    out = tmp_path_factory.mktemp("placement") / "tiny.json"
    measure.measure(asks, tiny_windows, out)
    return read_record(out, records.RECORD, "placement")


def test_reading_by_position_changes_no_bit_and_reading_by_block_does(record):
    assert (record.logical.runs, record.logical.differing, record.logical.largest) == (6, 0, 0)
    assert record.slot.differing > 0 < record.slot.largest < 1e-3
    assert record.noise <= record.slot.largest and record.limit == 4 * record.noise


def test_noise_and_verdicts_come_from_different_runs(record):
    assert record.calibrated + len(record.judged) == 6 == 2 * record.calibrated
    assert sum(one.rows for one in record.margins) <= 3 * (64 + 3)
    assert {one.kind for one in record.judged} <= {"same", "near tie"}


def test_a_seam_bug_is_called_one(record):
    (found,) = (one for one in record.controls if one.name == "shift")
    assert found.passed and found.runs == 2 and found.lead > record.limit


def test_a_constructed_tie_is_never_called_a_bug(record):
    (found,) = (one for one in record.controls if one.name == "tie")
    assert found.right == found.flipped > 0 and found.lead < record.limit


def test_the_tables_say_which_control_passed(record):
    found = parts(record)
    assert whole("placement", record, found) and rows_of(found["moved"])[0][2:] == ("0", "0")
    assert [row[-1] for row in rows_of(found["controls"])] == ["passed", "passed"]
    lost = record.model_copy(update={"controls": [one.model_copy(update={"flipped": 0}) for one in record.controls]})
    assert {row[-1] for row in rows_of(parts(lost)["controls"])} == {"**not passed**"}


def test_orders_are_permutations_and_always_the_same():
    assert orders(5, 7) == orders(5, 7) and all(sorted(one) == list(range(7)) for one in orders(5, 7))
    assert len({tuple(one) for one in orders(5, 7)}) > 1


def test_more_windows_than_there_are_are_refused(asks, tiny_windows, tmp_path):
    many = asks.kvstore.placement.model_copy(update={"windows": 99})
    params = asks.model_copy(update={"kvstore": asks.kvstore.model_copy(update={"placement": many})})
    with refused(ParamsError, "params.too-few-windows", 99):
        measure.measure(params, tiny_windows, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
