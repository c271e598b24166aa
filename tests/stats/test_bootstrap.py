import math
from dataclasses import replace

import numpy as np
import pytest

from kvlab.core.errors import Fault, MixedIdentity, NonFinite
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate, bca_levels, resample_counts
from kvlab.stats.power import effective_tokens
from refusals import refused

BOOT = Bootstrap(resamples=1500, confidence=0.95, seed=0)


def make(values, offset=0):
    """A Column of values [windows, tokens]."""
    windows, tokens = values.shape
    window = np.repeat(np.arange(windows), tokens)
    return Column.of(window, offset + np.tile(np.arange(tokens), windows), values.ravel())


def clustered(rng, windows, tokens=20):
    """Skewed tokens of mean 1 whose windows differ: a lognormal factor of mean 1 times gammas of mean 1."""
    factor = np.exp(0.5 * rng.standard_normal((windows, 1)) - 0.125)
    return factor * rng.gamma(1.0, 1.0, (windows, tokens))


def coverage(windows, repeats, statistic=BOOT.mean, truth=1.0):
    rng = np.random.default_rng(7)
    found = [statistic(make(clustered(rng, windows))) for _ in range(repeats)]
    return np.mean([estimate.low <= truth <= estimate.high for estimate in found])


def test_interval_covers_the_planted_mean():
    assert 0.90 <= coverage(32, 400) <= 0.99


def test_interval_covers_the_planted_ppl_ratio():
    assert 0.90 <= coverage(32, 300, BOOT.exp_mean, truth=math.e) <= 0.99


@pytest.mark.parametrize("windows", [4, 7, 8, 12])
def test_few_windows_still_cover(windows):
    assert coverage(windows, 300) >= 0.88


def test_tokens_as_if_independent_would_not_cover():
    """The reason for clusters: the same data with every token its own window is overconfident."""
    rng = np.random.default_rng(3)
    boot, hits = Bootstrap(300, 0.95, 0), []
    for _ in range(100):
        estimate = boot.mean(make(clustered(rng, 16).reshape(-1, 1)))
        hits.append(estimate.low <= 1 <= estimate.high)
    assert np.mean(hits) < 0.85


def test_wider_confidence_gives_a_wider_interval():
    column = make(clustered(np.random.default_rng(0), 32))
    low, high = (Bootstrap(2000, confidence, 0).mean(column) for confidence in (0.8, 0.99))
    assert low.resolvable < high.resolvable


def test_skewed_data_gives_a_skewed_interval():
    estimate = BOOT.mean(make(np.random.default_rng(1).lognormal(0, 1.5, (32, 1))))
    assert estimate.high - estimate.value > 1.2 * (estimate.value - estimate.low)


def test_resamples_all_on_one_side_of_the_value_still_bound_it():
    jackknife, resampled = np.linspace(-1, 1, 8), np.linspace(1, 2, 99)
    above, below = (bca_levels(0.0, side * resampled, jackknife, 1.96) for side in (1, -1))
    assert 0 < above[0] < above[1] < 0.5
    assert below == pytest.approx((1 - above[1], 1 - above[0]))


def test_the_same_windows_are_drawn_every_time():
    column = make(clustered(np.random.default_rng(0), 16))
    assert BOOT.mean(column) == BOOT.mean(column)
    assert Bootstrap(1500, 0.95, 1).mean(column) != BOOT.mean(column)
    counts = resample_counts(16, 300, 5)
    assert (counts.sum(1) == 16).all() and counts.shape == (300, 16)


def test_a_window_s_mean_keeps_its_sign():
    """Differences are columns too: what lies below zero takes from a sum."""
    window, position = np.array([1, 0, 1, 0]), np.array([0, 0, 1, 1])
    column = Column.of(window, position, np.array([-3.0, 2.0, 1.0, -6.0]))
    assert column.windows == (0, 1) and column.means.tolist() == [-2.0, -1.0]


def test_mean_weights_windows_by_their_tokens():
    window, position = np.array([0, 0, 0, 1]), np.array([1, 2, 3, 1])
    column = Column.of(window, position, np.array([1.0, 1.0, 1.0, 5.0]))
    estimate = BOOT.mean(column)
    assert estimate.value == 2.0
    assert (estimate.n_windows, estimate.n_tokens) == (2, 4)
    assert BOOT.mean(column.per_window(lambda means: means)).value == 3.0


def test_pairing_reduces_the_interval():
    rng = np.random.default_rng(0)
    base = clustered(rng, 32)
    a, b = make(base + 0.1 + 0.01 * rng.standard_normal(base.shape)), make(base)
    paired = BOOT.difference(a, b)
    assert paired.value == pytest.approx(0.1, abs=0.01)
    assert paired.low < 0.1 < paired.high
    assert paired.resolvable < 0.1 * BOOT.mean(a).resolvable


def test_unpaired_columns_are_refused():
    values = clustered(np.random.default_rng(0), 8)
    with refused(MixedIdentity, None, "scored windows and positions"):
        BOOT.difference(make(values), make(values, offset=1))
    with pytest.raises(MixedIdentity):
        BOOT.ratio(make(values), make(values[:6]))


def test_row_order_does_not_matter():
    values = clustered(np.random.default_rng(0), 8, 5)
    window, position = np.repeat(np.arange(8), 5), np.tile(np.arange(5), 8)
    order = np.random.default_rng(1).permutation(40)
    shuffled = Column.of(window[order], position[order], values.ravel()[order])
    assert BOOT.difference(make(values), shuffled).value == pytest.approx(0, abs=1e-15)


def test_ratio_and_exp_mean():
    values = clustered(np.random.default_rng(0), 16)
    ratio = BOOT.ratio(make(3 * values), make(values))
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((3, 3, 3))
    assert BOOT.exp_mean(make(values)).value == pytest.approx(math.exp(values.mean()))


def test_no_scatter_gives_a_point():
    estimate = BOOT.mean(make(np.full((9, 3), 0.25)))
    assert (estimate.value, estimate.low, estimate.high, estimate.resolvable) == (0.25, 0.25, 0.25, 0)
    assert estimate.method == "percentile"


def test_a_rate_without_an_event_is_not_certain():
    estimate = BOOT.rate(make(np.ones((10, 30))))
    assert estimate.high == 1 and estimate.method == "exact"
    assert estimate.low == pytest.approx(0.025 ** (1 / 300))  # Clopper-Pearson with n of n
    assert BOOT.rate(make(np.zeros((10, 30)))).high == pytest.approx(1 - 0.025 ** (1 / 300))


def test_few_windows_use_student():
    values = np.array([[1.0], [2.0], [3.0], [6.0]])
    estimate = BOOT.mean(make(values))
    half = 3.182446 * values.std(ddof=1) / 2
    assert estimate.method == "t"
    assert (estimate.low, estimate.high) == pytest.approx((3 - half, 3 + half), rel=1e-6)


def test_what_is_not_finite_is_refused():
    values = np.ones((8, 2))
    values[3, 1] = np.nan
    with refused(NonFinite, "non-finite.values", "1 of 16"):
        make(values)
    with refused(NonFinite, "non-finite.statistic"):
        BOOT.ratio(make(np.ones((8, 2))), make(np.zeros((8, 2))))
    with refused(Fault, "fault.too-few-windows"):
        BOOT.mean(make(np.ones((1, 4))))


def test_estimate_to_json():
    estimate = Estimate(1.0, 0.5, 2.0, 8, 80, "bca")
    assert set(estimate.to_json()) == {
        "value",
        "low",
        "high",
        "n_windows",
        "n_tokens",
        "method",
        "confidence",
        "n_documents",
    }


# ---------------------------------------------------------------------------------------- documents


def in_documents(rng, sizes, between, tokens=5):
    """Windows whose mean is 1 in the long run and shared, in part, by all windows of a document."""
    documents = np.repeat(np.arange(len(sizes)), sizes)
    shared = 1 + between * rng.standard_normal(len(sizes))
    values = shared[documents][:, None] + 0.3 * rng.standard_normal((documents.size, tokens))
    window, position = np.repeat(np.arange(documents.size), tokens), np.tile(np.arange(tokens), documents.size)
    return Column.of(window, position, values.ravel(), documents.tolist())


def test_windows_of_one_document_are_drawn_together():
    """Planted: windows of a document share half a standard deviation. By documents the interval covers, else not."""
    rng, boot = np.random.default_rng(11), Bootstrap(300, 0.95, 0)
    hits = {"documents": [], "windows": []}
    for _ in range(300):
        column = in_documents(rng, [3] * 20, 0.5)
        for name, one in (("documents", column), ("windows", replace(column, documents=None))):
            found = boot.mean(one)
            hits[name].append(found.low <= 1 <= found.high)
    assert 0.91 <= np.mean(hits["documents"]) <= 0.985
    assert np.mean(hits["windows"]) < 0.83


def test_documents_are_counted_beside_windows():
    found = BOOT.mean(in_documents(np.random.default_rng(0), [1, 4, 2, 3, 1, 1, 1, 1, 2], 0.2))
    assert (found.n_windows, found.n_documents) == (16, 9)
    assert BOOT.mean(make(clustered(np.random.default_rng(0), 16))).n_documents is None


def test_a_document_for_every_window_changes_nothing_but_the_count():
    plain = make(clustered(np.random.default_rng(0), 12))
    own = replace(plain, documents=tuple(range(12)))
    assert replace(BOOT.mean(own), n_documents=None) == BOOT.mean(plain)
    one = replace(plain, documents=(7,) * 12)  # all of one document: its windows, and that document alone
    assert replace(BOOT.mean(one), n_documents=None) == BOOT.mean(plain) and BOOT.mean(one).n_documents is None


def test_values_do_not_depend_on_documents():
    column = in_documents(np.random.default_rng(1), [3, 1, 2, 4, 1, 5], 0.5)
    apart = replace(column, documents=None)
    assert BOOT.mean(column).value == pytest.approx(BOOT.mean(apart).value)
    by_document = column.by_document()
    assert by_document.sums.sum() == pytest.approx(column.sums.sum())
    assert by_document.counts.tolist() == [5.0 * size for size in (3, 1, 2, 4, 1, 5)]
    some = column.of_windows([0, 1, 5, 15])
    assert some.documents == (0, 0, 2, 5)
    assert column.per_window(np.exp).documents == column.documents


def test_columns_of_other_documents_are_not_paired():
    column = in_documents(np.random.default_rng(1), [2, 2, 2], 0.5)
    with refused(MixedIdentity, None, "documents of the scored windows"):
        BOOT.difference(column, replace(column, documents=(0, 0, 0, 1, 1, 1)))
    with refused(Fault, "fault.no-document", "window 5", "3 windows"):
        Column.of(np.arange(6), np.zeros(6, int), np.ones(6), [0, 1, 2])


def test_effective_tokens_are_fewer_where_documents_repeat_themselves():
    column = in_documents(np.random.default_rng(2), [4] * 40, 0.5)
    squares = replace(column, sums=column.sums**2 / column.counts)  # all tokens of a window alike, nearly
    assert effective_tokens(column, squares) < 0.5 * effective_tokens(
        replace(column, documents=None), replace(squares, documents=None)
    )
