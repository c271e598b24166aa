"""Intervals against scipy, ranks against the byte formula, phases against planted values."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.validation.published import making
from validation.published import phases, rank, reanalyse
from validation.published.families import read_folder
from validation.published.rows import PassageScores, SigmaSidecar

pytestmark = pytest.mark.full


def cells(folder, **files):
    for name, data in files.items():
        making.write(folder, f"{name}.json", data)
    return [cell for source in read_folder(folder) for cell in source.contents.cells]


def sources(folder, what):
    return [one for source in read_folder(folder) for one in getattr(source.contents, what)]


@pytest.mark.parametrize("n", [2, 4, 7, 8, 32])
def test_t_interval_is_scipys(tmp_path, n):
    (cell,) = cells(tmp_path, a=making.vllm(n=n))
    values = np.array([window.change for window in cell.windows])
    low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    row = reanalyse.figures(cell)
    assert (row.change_t.low, row.change_t.high) == pytest.approx((low, high))
    assert row.change == pytest.approx(values.mean()) and row.n_tokens == 64 * n


def test_below_eight_windows_the_bootstrap_is_the_percentile_one(tmp_path):
    (cell,) = cells(tmp_path, a=making.vllm(n=4))
    values = np.array([window.change for window in cell.windows])
    exact = [np.mean(one) for one in np.array(np.meshgrid(*[values] * 4)).reshape(4, -1).T]  # all 4^4 resamples
    row = reanalyse.figures(cell)
    assert row.change_bootstrap.method == "percentile"
    assert [row.change_bootstrap.low, row.change_bootstrap.high] == pytest.approx(
        np.quantile(exact, [0.025, 0.975]), abs=0.1 * np.ptp(exact)
    )
    assert row.change_bootstrap.resolvable < row.change_t.resolvable


@pytest.mark.parametrize("n", [8, 32])
def test_from_eight_windows_on_it_is_bca(tmp_path, n):
    row = reanalyse.figures(cells(tmp_path, a=making.vllm(n=n))[0])
    assert row.change_bootstrap.method == row.ratio.method == "bca"
    assert row.change_bootstrap.resolvable == pytest.approx(row.change_t.resolvable, rel=0.5)


def test_ratio_is_exp_of_the_mean_and_of_the_bounds(tmp_path):
    (cell,) = cells(tmp_path, a=making.vllm(n=4))
    values = np.array([window.delta_nll for window in cell.windows])
    low, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    ratio = reanalyse.figures(cell).ratio
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx(
        (math.exp(values.mean()), math.exp(low), math.exp(high))
    )


def test_tokens_weigh_alike():
    windows = [
        PassageScores(window=0, ppl_ref=1, ppl_alt=math.e, n_tokens=10),
        PassageScores(window=1, ppl_ref=1, ppl_alt=1, n_tokens=30),
    ]
    assert reanalyse.delta_column(windows).sums.sum() / 40 == pytest.approx(0.25)


def test_one_window_gives_values_without_intervals(tmp_path):
    row = reanalyse.figures(cells(tmp_path, a=making.vllm(n=1))[0])
    assert row.change == row.cell.windows[0].change
    assert {row.change_t, row.change_bootstrap, row.ratio, row.top1, row.abs_dlogp} == {None}
    assert row.published_verdict == "REJECT"


def test_difference_is_scipys_paired_one(tmp_path):
    a, b = cells(tmp_path, a=making.vllm(seed=0), b=making.vllm(seed=9, model_name="b_k_only"))
    (found,) = reanalyse.differences([a, b])
    first, second = ([window.change for window in cell.windows] for cell in (a, b))
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found.change.low, found.change.high) == pytest.approx((expected.low, expected.high))
    assert found.same_text and not found.crosses


def test_hf_is_subtracted_from_vllm_and_paired_by_number_only(tmp_path):
    (found,) = reanalyse.differences(cells(tmp_path, a=making.vllm(), b=making.hf()))
    assert (found.a.facts.engine, found.b.facts.engine) == ("hf", "vllm")
    assert not found.same_text and found.crosses == ("engine", "protocol")


@pytest.mark.parametrize("other", [{"n": 8}, {"model_path": "else/model"}, {"ctx_len": 1024}, {"n_eval": 128}])
def test_what_is_another_experiment_is_not_subtracted(tmp_path, other):
    assert reanalyse.differences(cells(tmp_path, a=making.vllm(), b=making.vllm(seed=9, **other))) == []


def test_a_run_under_two_names_counts_once(tmp_path):
    a, b, c = cells(tmp_path, a=making.vllm(), b=making.vllm(model_name="again"), c=making.vllm(seed=9))
    assert reanalyse.copies([a, b, c]) == [[a, b]]
    assert len(reanalyse.differences([a, b, c])) == 1


@pytest.mark.parametrize(("d", "size"), [(15, 14259), (16, 14547), (17, 19398), (64, 42060)])
def test_block_bytes_are_those_of_the_published_codec(d, size):
    assert rank.block_bytes(d, 128, 512, 3, 16, 2.0) == pytest.approx(size, abs=2)


@pytest.mark.parametrize("planted", [3, 15, 16, 17, 64])
def test_a_planted_rank_is_recovered_from_the_bytes(tmp_path, planted):
    blocks = 2112 * 2 // 512 * (making.N_LAYERS - len(making.BOUNDARY))
    size = round(blocks * rank.block_bytes(planted, 128, 512, 3, 16, 2.0))
    coded = making.vllm(model_name="toy_k_only", sizes=[size] * 4)
    found = rank.ranks(cells(tmp_path, a=coded, toy_q_calib=making.sigma()), sources(tmp_path, "sigmas"))
    assert [one.ranks for one in found] == [(planted,) * 4]


def test_no_rank_without_the_sidecar_of_the_calibration_that_the_cell_names(tmp_path):
    given = cells(tmp_path, a=making.vllm(model_name="toy_k_only"), another_q_calib=making.sigma())
    assert rank.ranks(given, sources(tmp_path, "sigmas")) == []
    toy = SigmaSidecar(file="toy_q_calib.json", n_layers=9, kv_heads=2, head_dim=128, condition=(), off_diagonal=())
    assert rank.ranks(given, [toy]) == []


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_planted_slope_of_noise_is_recovered(tmp_path, power):
    (found,) = phases.slopes(cells(tmp_path, a=making.noise(power=power, size=2.0)))
    assert found.slope.value == pytest.approx(power)


def test_saturated_noise_is_left_out_of_the_slope(tmp_path):
    (found,) = phases.slopes(cells(tmp_path, a=making.noise()))
    assert (found.low, found.high) == (0.001, 0.01)  # at 0.1 the mean change is above one nat


def test_engines_are_compared_at_equal_noise(tmp_path):
    found = phases.engine_differences(cells(tmp_path, a=making.noise("hf"), b=making.noise("vllm")))
    assert [size for size, *_ in found] == [0.001, 0.01, 0.1]
    assert all(gap.value == 0 for *_, gap in found)  # both files hold the same numbers


def test_layers_are_summed_inside_and_outside_the_boundary_of_the_whole_cell(tmp_path):
    whole = cells(tmp_path, a=making.vllm(), layers=making.single_layers())
    row = phases.layer_sums(sources(tmp_path, "layers")[0], whole)
    assert row.boundary == tuple(making.BOUNDARY) and row.boundary_file == "a.json"
    assert row.boundary_sum == pytest.approx(0.5 - 0.04 + 0.2) and row.other_sum == pytest.approx(0.03 - 0.05 + 0.01)
    assert row.interaction == pytest.approx(reanalyse.figures(whole[0]).change - row.other_sum)
    outside = [0.03, -0.05, 0.01]
    assert row.noise == pytest.approx(np.std(outside, ddof=1) * math.sqrt(3))


@pytest.mark.parametrize("change", [{"bit_width_k": 4}, {"q_calib": "other.safetensors"}, {"ctx_len": 1024}])
def test_a_cell_of_another_recipe_lends_no_boundary(tmp_path, change):
    whole = cells(tmp_path, a=making.vllm(**change), layers=making.single_layers())
    assert phases.layer_sums(sources(tmp_path, "layers")[0], whole).boundary is None


def test_variance_ratios_are_paired_with_all_else_equal(tmp_path):
    making.write(tmp_path, "grid.json", making.grid())
    found = phases.knobs(sources(tmp_path, "grids")[0])
    assert [(one.pairs, one.better, one.mean_low, one.mean_high) for one in found] == [
        (2, 2, pytest.approx(0.3), pytest.approx(0.1)),
        (1, 0, pytest.approx(0.1), pytest.approx(0.3)),
    ]
