"""Every number that a file states about its rows is recomputed; a wrong one is found."""

import copy
import math

import numpy as np
import pytest
from scipy import stats

from tests.validation.published import making
from validation.published import checks
from validation.published.families import read_folder

pytestmark = pytest.mark.full


def found(folder, data):
    making.write(folder, "x.json", data)
    return read_folder(folder)[0].contents.checks


def test_every_number_of_every_family_is_reproduced(every):
    everything = [check for source in read_folder(every) for check in source.contents.checks]
    assert len(everything) > 300
    assert [check for check in everything if not (check.agrees and check.printed)] == []


@pytest.mark.parametrize("n", sorted(making.CRITICAL))
def test_half_widths_use_the_tabulated_critical_value(tmp_path, n):
    everything = found(tmp_path, making.rigorous(n=n))
    half_widths = [check for check in everything if check.number.startswith("ci95_") and "tq" in check.cell]
    assert len(half_widths) == 3 and all(check.agrees for check in half_widths)
    exact = float(stats.t.ppf(0.975, n - 1))
    assert checks.tabulated_t(n) == making.CRITICAL[n] and abs(making.CRITICAL[n] / exact - 1) < 0.05


WRONG = [
    (making.vllm, ("mean_ppl_delta_rel",)),
    (making.vllm, ("mean_top1_agreement",)),
    (making.vllm, ("per_passage", 1, "metrics", "ppl_delta_rel")),
    (making.ablation, ("cells", "codec-off", "mean_ppl_delta_rel")),
    (making.hf_summarised, ("kl_mean",)),
    (making.hf_summarised, ("ppl_delta_mean",)),
    (making.qwen3, ("mean_delta_ppl",)),
    (making.qwen3, ("mean_top1_pair",)),
    (making.engines, ("mean_sym_kl_topk",)),
    (making.engines, ("per_passage", 0, "ppl_rel_gap")),
    (making.noise, ("per_sigma", 1, "mean_abs_dlogp")),
    (making.codec_error, ("K_mse_ratio_stats", "median")),
    (making.codec_error, ("V_mse_ratio_stats", "max")),
    (making.codec_error, ("mean_K_abs_hf",)),
    (making.sigma, ("diagnostics", 2, "condition")),
    (making.rigorous, ("aggregates", 1, "mean_abs_delta_ppl")),
    (making.rigorous, ("aggregates", 1, "ci95_delta_ppl")),
    (making.rigorous, ("aggregates", 2, "std_top1_pair")),
    (making.rigorous, ("aggregates", 1, "kakeya_bytes_128k")),
]


@pytest.mark.parametrize(("make", "where"), WRONG)
@pytest.mark.parametrize("factor", [1 + 1e-9, 1.01])
def test_a_planted_wrong_number_is_reported(tmp_path, make, where, factor):
    data = copy.deepcopy(make())
    place = data
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] *= factor
    wrong = {check.number for check in found(tmp_path, data) if not check.agrees}
    assert any(str(where[-1]) in number for number in wrong)


@pytest.mark.parametrize("make", [making.vllm, making.ablation, making.engines])
def test_a_wrong_number_of_passages_is_reported(tmp_path, make):
    assert "n_passages" in {one.number for one in found(tmp_path, make() | {"n_passages": 5}) if not one.agrees}


def test_the_last_digits_that_still_print_alike_are_told_apart(tmp_path):
    data = making.vllm()
    data["mean_ppl_delta_rel"] += 1e-8
    check = next(check for check in found(tmp_path, data) if check.number == "mean_ppl_delta_rel")
    assert not check.agrees and check.printed


def test_a_wrong_verdict_is_found(tmp_path):
    wrong = [check for check in found(tmp_path, making.vllm() | {"verdict": "ACCEPT"}) if not check.agrees]
    assert [(check.number, check.stored, check.ours) for check in wrong] == [("verdict", "ACCEPT", "REJECT")]


def test_float32_harnesses_are_held_to_float32(tmp_path):
    assert all(check.agrees for check in found(tmp_path, making.hf(single=True)))
    data = making.hf(single=True)
    data["per_passage"][0]["metrics"]["ppl_delta_rel"] *= 1 + 1e-5
    assert sum(not check.agrees for check in found(tmp_path, data)) == 1


def test_equality_is_up_to_rounding_and_no_further():
    values = [0.1, 0.2, 0.3, -0.6]
    assert checks.equal(math.fsum(values) / 4, sum(values) / 4, 0.6)
    assert not checks.equal(1.0, 1.0 + 1e-14, 0.0)
    assert checks.equal(1.0, float(np.float32(1.0) + np.float32(1e-7)), 0.0, single=True)
    assert not checks.equal(1.0, 1.00001, 0.0, single=True)
