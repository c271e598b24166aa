"""The residual study: what one coded tensor says of itself, and a whole capture coded by the cells' own codec."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl
import pytest
import torch

from kvlab.calibration import load as calibration
from kvlab.calibration.capture import Captured
from kvlab.calibration.load import FittedFiles
from kvlab.codecs.base import Site
from kvlab.codecs.identity.codec import IdentityCodec
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import resolve
from kvlab.core.paramfile import overlay
from kvlab.core.recipe import Cell
from kvlab.measure.coding import Coder
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab_pipeline.studies.residual.measure import code, histograms, residual, table
from kvlab_pipeline.studies.residual.record import RESIDUAL, read_residual, recipes
from kvlab_pipeline.studies.settings import Settings
from refusals import refused

HEADS, TOKENS, DIM = 2, 96, 8


class Disturbs(IdentityCodec):
    """A codec that is wrong by `size` times a standard normal number, in one channel or in all."""

    def __init__(self, size: float, channel: int | None = None):
        super().__init__(IdentityStream())
        self.size, self.channel = size, channel

    def encode(self, x, site):
        noise = self.size * torch.randn(x.shape, generator=torch.Generator().manual_seed(site.window))
        if self.channel is not None:
            noise[..., [i for i in range(DIM) if i != self.channel]] = 0
        encoded = super().encode(x + noise, site)
        stats = replace(encoded.stats, d_eff=(3, 5), n_outliers=7, n_coefficients=11)
        return replace(encoded, stats=stats)


def diagonal(scales: torch.Tensor) -> Whitener:
    chol = torch.diag(scales).expand(HEADS, DIM, DIM).contiguous()
    return Whitener(chol, torch.linalg.inv(chol))


def windows(count: int) -> list[torch.Tensor]:
    """Standard normal values far from zero mean."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(HEADS, TOKENS, DIM, generator=generator) + 5 for _ in range(count)]


def test_a_codec_that_changes_nothing_has_no_error():
    x = windows(1)[0]
    row = code(IdentityCodec(IdentityStream()), x, Site(0, 1, "k"), diagonal(torch.arange(1.0, 9.0)), 1.0).row
    assert row["raw_error_sq"] == row["whitened_error_sq"] == 0
    assert row["raw_signal_sq"] > 0 and row["whitened_signal_sq"] > row["raw_signal_sq"]
    assert x.numel() * 4 < row["bytes"] < x.numel() * 4 + 100  # the values and the frame around them
    assert (row["values"], row["n_blocks"], row["n_outliers"]) == (x.numel(), 0, 0)


def test_squares_by_hand():
    x = windows(1)[0]
    one = code(Disturbs(0.1), x, Site(4, 1, "v"), None, 0.95)
    noise = 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).numpy()
    values = x.numpy().astype(np.float64)
    assert one.row["raw_error_sq"] == pytest.approx((noise**2).sum(), rel=1e-5)
    assert one.row["raw_signal_sq"] == pytest.approx(((values - values.mean(1, keepdims=True)) ** 2).sum(), rel=1e-5)
    assert one.row["whitened_error_sq"] == one.row["raw_error_sq"]  # V has no metric
    place = {name: one.row[name] for name in ("variance_ratio", "layer", "stream", "window")}
    assert place == {"variance_ratio": 0.95, "layer": 1, "stream": "v", "window": 4}
    assert (one.row["d_eff_sum"], one.row["n_blocks"], one.d_eff) == (8, 2, (3, 5))


def test_the_whitened_error_is_weighed_by_the_metric():
    row = code(Disturbs(0.1, channel=2), windows(1)[0], Site(0, 1, "k"), diagonal(torch.arange(1.0, 9.0)), 1.0).row
    assert row["whitened_error_sq"] == pytest.approx(9 * row["raw_error_sq"], rel=1e-4)


def test_noise_of_known_size_lies_in_its_interval():
    codec = Disturbs(0.3)
    rows = table([code(codec, x, Site(i, 0, "k"), None, 1.0) for i, x in enumerate(windows(24))])
    assert rows.schema == RESIDUAL
    number, position = np.arange(24), np.zeros(24)
    error, signal = (Column.of(number, position, rows[f"raw_{name}_sq"].to_numpy()) for name in ("error", "signal"))
    found = Bootstrap(2000, 0.95, 0).ratio(error, signal)
    planted = 0.3**2 * TOKENS / (TOKENS - 1)  # each head's mean is taken from its own tokens
    assert found.low < planted < found.high
    assert found.resolvable < 0.05 * planted


def test_histograms_count_blocks_by_rank_and_place():
    found = [code(Disturbs(0.1), x, Site(i, i % 2, "k"), None, 1.0) for i, x in enumerate(windows(3))]
    blocks = {(ranks.layer, ranks.stream): ranks.blocks for ranks in histograms(found)}
    assert blocks == {(0, "k"): {3: (1, 0, 1), 5: (1, 0, 1)}, (1, "k"): {3: (0, 1, 0), 5: (0, 1, 0)}}


# ------------------------------------------------------------------------- a captured tiny model


@pytest.fixture(scope="module")
def fitted(tiny_calibration) -> FittedFiles:
    return FittedFiles(tiny_calibration["sigma"], tiny_calibration["codebooks"])


@pytest.fixture(scope="module")
def coded(tiny_params, tiny_calibration, fitted, tmp_path_factory):
    """Record and table of the tiny model's capture."""
    out = tmp_path_factory.mktemp("residual") / "hf.parquet"
    residual(tiny_params, tiny_calibration["capture"], fitted, out)
    return read_residual(out)


@pytest.mark.engine
def test_every_layer_stream_ratio_and_window_is_coded_once(tiny_params, coded):
    record, rows = coded
    ratios = [recipe.variance_ratio for recipe in recipes(tiny_params)]
    due = set(product(ratios, range(3), ("k", "v"), range(6)))
    assert set(rows.select("variance_ratio", "layer", "stream", "window").rows()) == due and rows.height == len(due)
    assert (record.engine, record.origin, record.windows, record.n_layers) == ("hf", "hf", 6, 3)
    assert record.boundary_layers == tiny_params.codec.boundary_layers
    assert record.provenance.model_hash == resolve(tiny_params.model).model_hash
    assert set(record.provenance.calibration) == {"hf"}
    assert (rows["raw_error_sq"] > 0).all() and (rows["raw_error_sq"] < rows["raw_signal_sq"]).all()
    v = rows.filter(pl.col("stream") == "v")
    assert (v["raw_error_sq"] == v["whitened_error_sq"]).all()
    assert sum(sum(map(sum, ranks.blocks.values())) for ranks in record.d_eff) == rows["n_blocks"].sum()


@pytest.mark.engine
def test_more_kept_energy_costs_bytes_and_leaves_less_error(coded):
    sums = coded[1].group_by("variance_ratio").agg(pl.sum("bytes", "raw_error_sq", "d_eff_sum")).sort("variance_ratio")
    low, high = sums.row(0, named=True), sums.row(-1, named=True)
    assert low["bytes"] < high["bytes"] and low["d_eff_sum"] < high["d_eff_sum"]
    assert low["raw_error_sq"] > high["raw_error_sq"]


@pytest.mark.engine
def test_it_is_the_codec_of_the_cells(tiny_params, tiny_calibration, fitted, coded):
    """What a cell's coder counts over the same tensors is what the rows add up to."""
    info = resolve(tiny_params.model)
    captured = Captured(tiny_calibration["capture"], info.model_hash)
    ratio = recipes(tiny_params)[-1]
    cell = Cell(
        study="cells",
        label="",
        engine="hf",
        dtype="float32",
        protocol="snapshot",
        origin="hf",
        stream="kv",
        layers=(0, 1, 2),
        windows=6,
        recipe=ratio.recipe,
    )
    coder = Coder(cell, calibration.load(fitted, info.model_hash))
    for layer, stream, window in product(range(3), ("k", "v"), range(6)):
        coder.round_trip(captured.window(layer, stream, window), Site(window, layer, stream))
    record, rows = coded
    rows = rows.filter(pl.col("variance_ratio") == ratio.variance_ratio)
    assert coder.tally.coded_bytes == rows["bytes"].sum()
    for stream in ("k", "v"):
        own = rows.filter(pl.col("stream") == stream)
        assert coder.tally.error_sq[stream] == pytest.approx(own["whitened_error_sq"].sum(), rel=1e-9)
        assert coder.tally.signal_sq[stream] == pytest.approx(own["whitened_signal_sq"].sum(), rel=1e-9)
        assert coder.tally.outliers[stream] == own["n_outliers"].sum()
        ranks = Counter()
        for one in record.d_eff:
            if (one.variance_ratio, one.stream) == (ratio.variance_ratio, stream):
                ranks.update({rank: sum(counts) for rank, counts in one.blocks.items()})
        assert coder.tally.d_eff[stream] == ranks


@pytest.mark.engine
def test_a_calibration_on_another_capture_is_refused(tiny_params, tiny_calibration, fitted, tmp_path):
    changes = {"calibration": {"engines": ["hf", "vllm"], "origin": "vllm"}}
    other = Settings.complete(overlay(tiny_params.model_dump(mode="json"), changes))
    with refused(CalibrationMismatch, "calibration.other-origin", "calibration.origin", "'vllm'"):
        residual(other, tiny_calibration["capture"], fitted, tmp_path / "hf.parquet")
    assert list(tmp_path.iterdir()) == []
