"""The limit of a whole cache: water-filling on counts, scalar cells, sources that predict each other, and its page."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cli.checked import recipes_of
from kvlab.codecs.archive.moments import Across
from validation.limit import page, sources
from validation.limit import theory as limit
from validation.limit.bound import Bound, Scalar, counts
from validation.limit.measure import measure

pytestmark = pytest.mark.nightly

LOSS = math.log2(2 * math.pi * math.e / 12) / 2  # of fine scalar steps, entropy coded


@given(st.integers(0, 10**6), st.floats(0.05, 4))
def test_the_limit_of_counts_is_that_of_all_pairs(seed, bits):
    make = np.random.default_rng(seed)
    variances, weights = np.exp(3 * make.normal(size=40)), np.exp(make.normal(size=25))
    every = torch.from_numpy(np.outer(variances, weights).ravel())
    bound, error = Bound(counts(variances, weights)), float(limit.distortion_at(every, bits))
    assert bound.rate(error) == pytest.approx(float(limit.rate_at(every, error)), abs=0.01)
    assert bound.error(bits) == pytest.approx(error, rel=0.02)
    assert bound.rate(float(every.mean()) * 1.1) == pytest.approx(0, abs=1e-6)


def test_scalar_cells_are_those_of_a_gaussian():
    scalar, make = Scalar(dead=0.1), np.random.default_rng(0)
    for log_ratio in (-1.0, 0.0, 2.0):
        x = make.normal(size=400_000) * 2**log_ratio
        index = np.sign(x) * np.floor(np.abs(x) + 0.4)
        values, number = np.unique(index, return_counts=True)
        share = number / number.sum()
        error = sum(((x[index == one] - x[index == one].mean()) ** 2).sum() for one in values) / len(x)
        bits, off = scalar.cost(np.array(log_ratio))
        assert bits == pytest.approx(-(share * np.log2(share)).sum(), abs=0.01)
        assert off == pytest.approx(error, rel=0.02)
    bits, off = scalar.cost(np.array([-30.0, 9.0]))
    assert bits[0] == pytest.approx(0, abs=1e-9) and off[0] == pytest.approx(4.0**-30)
    assert bits[1] - (9 - math.log2(off[1]) / 2) == pytest.approx(LOSS, abs=0.01)


class Planted:
    """As much of a model as the sources ask for: two layers, a metric of one, nothing known by token ids."""

    layers, by_tokens = 2, torch.tensor([False])

    def __init__(self, width):
        stream = type("Stream", (), {"forward": torch.eye(width)[None]})
        self.streams = {(layer, s): stream() for layer in range(2) for s in "kv"}


def planted(count=4000, width=3, noise=0.1):
    """Moments of two layers of which the second is the first turned, and noise."""
    make = torch.Generator().manual_seed(0)
    moments = [Across(width, layer > 0) for layer in range(2)]
    k, v = (torch.randn(count, width, generator=make) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(width, width, generator=make)).Q
    upper = [x @ turn + noise * torch.randn(count, width, generator=make) for x in (k, v)]
    moments[0].update([k, v])
    moments[1].update([k, v, *upper])
    return Planted(width), moments


def test_what_the_layer_below_says_is_no_source():
    model, moments = planted()
    plain, left = (found.variances for found in (sources.without_prediction(model, moments), predicted(model, moments)))
    for stream in "kv":
        assert plain[1, stream].mean() == pytest.approx(1.01, rel=0.1)
        assert left[1, stream].mean() == pytest.approx(0.01, rel=0.1)
        assert left[0, stream].mean() == pytest.approx(1.0, rel=0.1)


def test_noise_in_the_layer_below_is_a_source_above():
    model, moments = planted()
    noisy = predicted(model, moments, lambda layer, variances: torch.full_like(variances, 0.04)).variances
    assert noisy[1, "k"].mean() == pytest.approx(0.01 + 0.04 / 1.04, rel=0.1)  # of x from x + e, Wiener's


def predicted(model, moments, noise=None):
    return sources.predicted(model, moments, noise)


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "a.txt"
    text.write_text(" ".join(f"word {number} of the text" for number in range(3000)))
    asked = [one for codec in ("archive", "hadamard") for one in recipes_of(codec, [2, 4])]
    return measure(tiny_model, text, asked, context=96, most=2, calib_windows=4)


def test_parts_sum_to_the_excess_and_more_bits_err_less(found):
    for row in found["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["bits"] - row["limit"], abs=1e-6)
        assert row["error"] > 0 and row["limit"] < row["bits"]
    by_label = {row["label"]: row for row in found["rows"]}
    for codec in ("archive", "hadamard"):
        assert by_label[f"{codec} 4"]["error"] < by_label[f"{codec} 2"]["error"]
    assert by_label["archive 2"]["bits"] == pytest.approx(2, rel=0.05)
    assert by_label["archive 2"]["parts"]["cells"] == pytest.approx(LOSS / 2, abs=LOSS / 2 + 0.05)


def test_the_page_names_what_would_take_half_a_bit(found, tmp_path):
    page.write(found, tmp_path)
    text = (tmp_path / "LIMIT.md").read_text()
    assert text.count("\n- `hadamard") == 2 and "| archive 2 | " in text
    row = {"label": "x", "parts": {"cells": 0.3, "metadata": 0.25, "attention": 0.1, "prediction": -0.2}}
    assert page.next_half_bit(row).endswith("together 0.55 bits.")
