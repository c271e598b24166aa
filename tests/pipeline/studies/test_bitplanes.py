"""Bit planes: codes with known errors, rankings with known answers, and attention that is the model's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from kvlab.codecs.shared.quantizer import gaussian_table, mse
from kvlab.core.errors import CapabilityError, NonFinite, ParamsError
from kvlab.engines.registry import start
from kvlab.text import corpus
from kvlab_pipeline.studies.bitplanes import measure, planes
from kvlab_pipeline.studies.bitplanes import record as records
from kvlab_pipeline.studies.bitplanes.measure import layers, places, ranked_variants
from kvlab_pipeline.studies.bitplanes.tables import parts
from kvlab_pipeline.studies.record import read_record
from pipeline.studies.printed import rows, whole
from refusals import refused
from tiers import examples

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
GAUSS = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def arm(name: str, group: int | None = None) -> planes.PlanesVariant:
    (found,) = (one for one in [*planes.arms((32, 128)), *planes.controls()] if (one.name, one.group) == (name, group))
    return found


# Planes


@pytest.mark.parametrize("group", [32, 128])
def test_three_bits_err_as_the_table_says(group):
    error = (planes.three(GAUSS, group) - GAUSS).square().mean()
    assert float(error) == pytest.approx(mse(gaussian_table(3)), rel=0.08)  # a norm of its own trims tails


def test_every_further_bit_comes_nearer_to_the_key():
    reads = [planes.sign_and_norm, planes.top_two, planes.three]
    errors = [float((read(GAUSS, 32) - GAUSS).square().mean()) for read in reads]
    assert errors[0] == pytest.approx(1 - 2 / math.pi, rel=0.05)
    assert errors[0] > 2 * errors[1] > 6 * errors[2] > 0


def test_the_top_two_bits_are_two_of_the_three():
    three, two = planes.three(GAUSS, 128), planes.top_two(GAUSS, 128)
    scale = planes.normalised(GAUSS, 128)[1]
    code = torch.bucketize(three / scale[..., 0], (gaussian_table(3)[1:] + gaussian_table(3)[:-1]) / 2)
    for half in ([0, 1], [2, 3], [4, 5], [6, 7]):
        inside = torch.isin(code, torch.tensor(half))
        assert len((two / scale[..., 0])[inside].unique(sorted=True).round(decimals=9).unique()) == 1
    assert torch.equal(two.sign(), three.sign())


def test_the_lower_two_bits_say_nothing_of_the_sign():
    mirrored = planes.low_two(GAUSS, 128)[GAUSS > 0].mean(), planes.low_two(GAUSS, 128)[GAUSS < 0].mean()
    assert float(mirrored[0]) == pytest.approx(float(mirrored[1]), rel=0.01)
    correlation = np.corrcoef(planes.low_two(GAUSS, 128).flatten(), GAUSS.abs().flatten())[0, 1]
    assert abs(correlation) < 0.3


def test_a_table_for_wider_groups_saturates():
    right, wrong = planes.saturated(arm("3 bits", 32), GAUSS), planes.saturated(arm("3 bits, table of 128", 32), GAUSS)
    assert right == pytest.approx(2 * (1 - float(torch.special.ndtr(torch.tensor(1.748)))), abs=0.01)
    assert wrong == pytest.approx(2 * (1 - float(torch.special.ndtr(torch.tensor(1.748 / 2)))), abs=0.01)


def test_norms_are_stored_in_float16_and_counted():
    keys = GAUSS[:8] * 1.00001
    scale = planes.normalised(keys, 32)[1]
    assert scale.shape == (8, 2, 1) and torch.equal(scale, scale.half().double())
    bits = {(one.name, one.group): one.bits_per_key(64) for one in planes.arms((32, 128))}
    assert bits == {
        ("random", None): None,
        ("sign", None): 64,
        ("sign + norm", 32): 96,
        ("sign + norm", 128): 80,
        ("top 2 bits", 32): 160,
        ("top 2 bits", 128): 144,
        ("3 bits", 32): 224,
        ("3 bits", 128): 208,
        ("full", None): 1024,
    }


def test_a_group_ends_where_the_key_does():
    assert planes.width_of(128, 256) == 128 and planes.width_of(128, 64) == 64
    with refused(CapabilityError, "capability.group", 80, 32):
        planes.width_of(32, 80)


def test_a_key_of_zeros_stays_one():
    assert not planes.three(torch.zeros(1, 64), 32).any()
    assert not planes.sign_and_norm(torch.zeros(1, 64), 32).any()


def test_products_are_the_same_in_every_basis():
    a, b = GAUSS[:5], GAUSS[5:12]
    assert torch.allclose(planes.turned(a, "rotated") @ planes.turned(b, "rotated").T, a @ b.T, atol=1e-12)
    assert not torch.allclose(planes.turned(a, "rotated"), a)
    with refused(CapabilityError, "capability.no-power-of-two", 48):
        planes.turned(torch.zeros(2, 48), "rotated")


# Rankings


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=30))
@examples(60)
def test_rank_correlation_with_ties_is_scipys(pairs):
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    found = float(measure.spearman(a, b))
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_recall_of_a_known_ranking():
    mass = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    scores = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]])
    found = measure.recalled(scores, mass, (0.25, 0.5, 1.0))
    assert found.tolist() == pytest.approx(torch.tensor([[0.3, 0.5, 1.0], [0.1, 0.5, 1.0]]))
    assert measure.needed(scores, mass).tolist() == [0.75, 1.0]


@given(st.integers(1, 80), st.integers(0, 10), st.integers(0, 20), st.sampled_from(SHARES))
@examples(60)
def test_forced_tokens_are_kept_and_nothing_beyond_the_budget(n, sinks, recent, share):
    must, budget = measure.forced(n, sinks, recent), measure.budget(share, n)
    assert int(must.sum()) == min(n, sinks + recent)
    assert measure.kept_with(must, share) == max(budget, int(must.sum()))
    slipped = measure.kept_by_slip(must, share)
    assert slipped == (n if budget <= int(must.sum()) else budget)
    mass = torch.full((n,), 1 / n, dtype=torch.float64)
    found = measure.recalled(torch.arange(n).flip(0).double(), mass, (share,), must)
    assert float(found) == pytest.approx(measure.kept_with(must, share) / n)


def test_where_forced_tokens_leave_nothing_they_alone_are_kept():
    mass = torch.tensor([0.0, 0.0, 0.9, 0.1], dtype=torch.float64)
    found = measure.recalled(torch.tensor([0.0, 5, 9, 0]), mass, (0.25, 0.75), measure.forced(4, 1, 1))
    assert found.tolist() == [pytest.approx(0.1), pytest.approx(1.0)]


def test_budgets_are_rounded_up():
    assert [measure.budget(share, 100) for share in SHARES] == [1, 2, 5, 10, 20]
    assert [measure.budget(share, 7) for share in (0.01, 0.5, 1.0)] == [1, 4, 7]


def test_chunks_take_their_sum_or_their_best_token():
    x = torch.tensor([1.0, 5, 2, 2, 9])
    assert measure.by_chunk(x, 2, "sum", 0.0).tolist() == [6, 4, 9]
    assert measure.by_chunk(x, 2, "amax", -torch.inf).tolist() == [5, 2, 9]


# A model


@pytest.fixture(scope="module")
def asks(tiny_params):
    """The tiny model's parameters, with few windows."""
    few = tiny_params.kvstore.bitplanes.model_copy(
        update={"windows": 3, "queries": 4, "chunk_tokens": 8, "sinks": 1, "recent": 4, "groups": (16, 32, 128)}
    )
    return tiny_params.model_copy(update={"kvstore": tiny_params.kvstore.model_copy(update={"bitplanes": few})})


@pytest.fixture(scope="module")
def record(asks, tiny_windows, tmp_path_factory):
    out = tmp_path_factory.mktemp("bitplanes") / "tiny.json"
    measure.measure(asks, tiny_windows, out)
    return read_record(out, records.RECORD, "bitplanes")


def named(record, label: str, basis: str = "rotated"):
    (found,) = (one for one in [*record.arms, *record.controls] if (one.label, one.basis) == (label, basis))
    return found


def test_weights_are_those_of_the_models_own_attention(hf_engine, tiny_windows):
    ids = corpus.load(tiny_windows, hf_engine.info.model_hash).test[0].tolist()
    telling = start("hf", hf_engine.info, "float32", "eager", max_tokens=len(ids))  # sdpa does not give its weights
    with torch.no_grad():
        theirs = telling.model(torch.tensor([ids]), output_attentions=True).attentions
    found = list(layers(hf_engine, ids))
    assert len(found) == len(theirs) == hf_engine.info.n_layers
    for ours, own in zip(found, theirs, strict=True):
        for position in (0, 50, len(ids) - 1):
            assert torch.allclose(ours.weights(position), own[0, :, position, : position + 1].double(), atol=1e-5)


def test_every_layer_and_head_has_its_number(record, hf_engine):
    info = hf_engine.info
    for one in [*record.arms, *record.controls]:
        for measured in (one.spearman, *one.token, *one.chunk, *one.forced, one.needed):
            assert len(measured.heads) == info.n_layers and {len(layer) for layer in measured.heads} == {info.n_heads}
            assert np.mean(measured.heads) == pytest.approx(measured.overall.value, abs=1e-5)
            assert measured.overall.low <= measured.overall.value <= measured.overall.high
            assert measured.overall.n_windows == 3


def test_the_keys_themselves_rank_best_and_chance_keeps_its_share(record):
    full, chance = named(record, "full"), named(record, "random")
    assert full.spearman.overall.value == pytest.approx(1) and abs(chance.spearman.overall.value) < 0.1
    for i, share in enumerate(record.settings.kept):
        others = [one.token[i].overall.value for one in record.arms]
        assert full.token[i].overall.value == pytest.approx(max(others)) and chance.token[i].overall.value < share + 0.1
        assert record.ceiling[i].overall.value >= max(one.chunk[i].overall.value for one in record.arms) - 1e-9
    order = ["low 2 bits, 128", "sign", "sign + norm, 16", "top 2 bits, 16", "3 bits, 16", "full"]
    rho = [named(record, label).spearman.overall.value for label in order]
    assert rho == sorted(rho)


def test_groups_longer_than_a_key_are_one_group(record):
    short, long = named(record, "3 bits, 32"), named(record, "3 bits, 128")
    assert (short.width, long.width) == (32, 32) and short.spearman == long.spearman and short.token == long.token
    assert named(record, "3 bits, 16").spearman.overall.value != long.spearman.overall.value
    (none,) = (
        one for one in record.differences if (one.what, one.a) == ("token", "3 bits, 16") and one.b == "3 bits, 128"
    )
    assert none.difference.value == pytest.approx(
        named(record, "3 bits, 16").token[3].overall.value - long.token[3].overall.value
    )


def test_another_heads_keys_are_no_keys(record, hf_engine):
    wrong, right = named(record, "full, KV head 0"), named(record, "full")
    group = hf_engine.info.n_heads // hf_engine.info.n_kv_heads
    for mine, theirs in zip(wrong.spearman.heads, right.spearman.heads, strict=True):
        assert mine[:group] == theirs[:group] and max(mine[group:]) < min(theirs[group:])


def test_the_slip_of_an_empty_remainder_shows_in_the_counts(record):
    first, last = record.spent[0], record.spent[-1]
    assert first.asked < first.kept == 5 < first.slipped > 64
    assert last.asked == last.kept == last.slipped


def test_the_tables_hold_every_arm(record):
    found = parts(record)
    assert [row[0] for row in rows(found["planes"])] == [one.label for one in record.arms if one.basis == "rotated"]
    assert "128 means 32" in found["shorter"] and "means 16" not in found["shorter"]
    assert all(found.values()) and whole("bitplanes", record, found)


def test_asking_for_more_than_there_is_is_refused(asks, tiny_windows, hf_engine, tmp_path):
    windows = corpus.load(tiny_windows, hf_engine.info.model_hash)
    few = asks.kvstore.bitplanes
    with refused(ParamsError, "params.too-few-windows", 99, 4):
        places(few.model_copy(update={"windows": 99}), windows)
    with refused(ParamsError, "params.too-few-positions", 33):
        places(few.model_copy(update={"queries": 33}), windows)
    assert places(few, windows) == (64, 74, 85, 95)
    assert sum(one.control for one in ranked_variants(few)) == 3


def test_a_ranking_that_ranks_nothing_is_no_number(record):
    flat = measure.spearman(torch.zeros(1, 4, 8), torch.rand(4, 8))[..., None]
    with refused(NonFinite, "non-finite.ranking"):
        measure.stacked([[[(flat, flat, flat)]]], 0)
