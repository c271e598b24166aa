"""The residual study's statistics: planted differences are found, equal engines are not told apart."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import polars as pl
import pytest

from kvlab.core.errors import Fault, MissingResult, MixedIdentity, NonFinite, StaleResult, StorageError
from kvlab.core.paramfile import overlay
from kvlab.core.records import read_json, write_json
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.rendering.basis import METHODS
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.report.claims import sentence
from kvlab_pipeline.studies.residual import chapter as tables
from kvlab_pipeline.studies.residual.chapter import claims as residual_claims
from kvlab_pipeline.studies.residual.chapter import d_eff, d_eff_table, residual, residual_table
from kvlab_pipeline.studies.residual.numbers import residual_entries
from kvlab_pipeline.studies.settings import Settings
from pipeline.report.example_metrics import Maker
from pipeline.report.example_residual import residual_part
from pipeline.report.planted_residual import RELATIVE, WHITENED, planted_provenance, planted_rows, write_residuals
from pipeline.report.shipped import shipped
from refusals import refused

BOOT = Bootstrap(600, 0.95, 0)
FIGURES = {"residual": (residual_table, residual), "d_eff": (d_eff_table, d_eff)}


@pytest.fixture(scope="module")
def params() -> Settings:
    """12 calibration windows, both engines captured, the six layers of the reference model."""
    changes = {"windows": {"context": 64, "eval": 17, "calib": 12}, "codec": {"boundary_layers": [0, 5]}}
    return shipped(changes)


def entries(params, folder, vllm=None, measured=None, **changes) -> dict:
    return residual_entries(params, write_residuals(folder, params, vllm, **changes), measured, BOOT)


def one(rows: list[dict], **wanted) -> dict:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1
    return found[0]


# ----------------------------------------------------------------------------------- what is said


def test_a_planted_ratio_is_found_in_every_layer_and_over_them(params, tmp_path):
    made = entries(params, tmp_path, planted_rows(params, factor=1.1, jitter=0.01))
    n = params.model.n_layers
    # K raw and whitened, V raw; the layers, those coded and all; at both ratios
    assert len(made["ratios"]) == 2 * 3 * (n + 2)
    for row in made["ratios"]:
        assert row["resolved"] and row["windows_needed"] is None
        assert row["ratio"]["value"] == pytest.approx(1.1, rel=0.01)
        assert (row["q_value"] is None) == (row["layer"] is None)
        assert tables.reading(row) == "larger on `vllm`"
    inside = [row["ratio"]["low"] < 1.1 < row["ratio"]["high"] for row in made["ratios"]]
    assert np.mean(inside) > 0.85  # 95 % intervals of rows that share their windows


def test_a_smaller_error_is_found_too(params, tmp_path):
    made = entries(params, tmp_path, planted_rows(params, factor=1 / 1.1, jitter=0.01))
    assert {tables.reading(row) for row in made["ratios"]} == {"larger on `hf`"}


def test_one_bad_layer_is_found_and_no_other(params, tmp_path):
    made = entries(params, tmp_path, planted_rows(params, factor=1.2, layers=(2,), jitter=0.01, seed=5))
    singles = [row for row in made["ratios"] if row["layer"] is not None]
    found = {row["layer"] for row in singles if row["resolved"]}
    assert 2 in found and all(row["resolved"] for row in singles if row["layer"] == 2)
    others = [row["resolved"] for row in singles if row["layer"] != 2]
    assert np.mean(others) < 0.1
    coded = one(made["ratios"], group="coded", variance_ratio=1.0, stream="v")
    assert coded["ratio"]["value"] == pytest.approx(1.2 ** (1 / 4), rel=0.01)  # a geometric mean over 4 layers


def test_equal_engines_are_not_told_apart(params, tmp_path):
    made = entries(params, tmp_path)
    for row in made["ratios"]:
        assert row["ratio"]["value"] == row["ratio"]["low"] == row["ratio"]["high"] == 1
        assert not row["resolved"] and row["p_value"] == 1
        assert tables.reading(row) == "not resolved, no effect to be seen"


def test_a_difference_lost_in_scatter_names_the_windows_it_needs(params, tmp_path):
    made = entries(params, tmp_path, planted_rows(params, jitter=0.3))
    open_ = [row for row in made["ratios"] if not row["resolved"]]
    assert len(open_) > 0.8 * len(made["ratios"])
    needed = [row for row in open_ if row["windows_needed"]]
    assert needed and all(row["windows_needed"] > params.windows.calib for row in needed)
    assert all("windows needed" in tables.reading(row) for row in needed)


def test_one_window_that_jumps_does_not_resolve_a_difference(params, tmp_path):
    jump = pl.when(pl.col("window") == 3).then(1.5).otherwise(1.0)
    errors = [(pl.col(name) * jump).alias(name) for name in ("raw_error_sq", "whitened_error_sq")]
    made = entries(params, tmp_path, planted_rows(params, jitter=1e-6).with_columns(errors))
    assert np.mean([row["resolved"] for row in made["ratios"]]) < 0.1


def test_a_codec_without_error_has_no_ratio(params, tmp_path):
    none = [pl.lit(0.0).alias(name) for name in ("raw_error_sq", "whitened_error_sq")]
    made = entries(params, tmp_path, planted_rows(params).with_columns(none))
    assert all(row["ratio"] is None and not row["resolved"] for row in made["ratios"])
    assert "no error on either" in tables.pooled(made)
    assert one(made["rows"], engine="vllm", layer=1, stream="k", variance_ratio=1.0)["raw_error"]["value"] == 0


def test_errors_bytes_ranks_and_outliers_are_the_planted_ones(params, tmp_path):
    made = entries(params, tmp_path)
    spread = np.exp(0.2**2 / 2)  # mean of the lognormal factor that the errors scatter by
    for stream, ratio in product(RELATIVE, (1.0, 0.95)):
        row = one(made["rows"], engine="hf", group="all", stream=stream, variance_ratio=ratio)
        assert row["raw_error"]["low"] < RELATIVE[stream] * spread < row["raw_error"]["high"]
        assert row["bits_per_value"]["value"] == 4
        assert row["frame_bytes"]["value"] == params.model.n_layers * 64 * 2 * 64 // 2
        if stream == "k":
            assert row["whitened_error"]["value"] == pytest.approx(WHITENED * row["raw_error"]["value"])
            assert row["outlier_rate"]["value"] == 0.04
        else:
            assert row["whitened_error"] is None and row["outlier_rate"] is None
        ranks = {"32": 144} if ratio == 1 else {"4": 48, "5": 48, "6": 48}
        assert row["d_eff_blocks"] == ranks
        assert row["d_eff"]["value"] == (32 if ratio == 1 else 5)
        for share in row["d_eff_shares"]:
            assert share["blocks"] == ranks[str(share["d_eff"])]
            assert share["share"]["value"] == pytest.approx(share["blocks"] / 144)
            assert 0 <= share["share"]["low"] <= share["share"]["value"] <= share["share"]["high"] <= 1


def test_a_layer_of_large_values_does_not_decide_a_group(params, tmp_path):
    loud = pl.when(pl.col("layer") == 4).then(1e6).otherwise(1.0)
    scaled = [(pl.col(n) * loud).alias(n) for n in planted_rows(params).columns if n.endswith("_sq")]
    made = entries(params, tmp_path, planted_rows(params).with_columns(scaled))
    rows = [one(made["rows"], engine=e, group="coded", stream="k", variance_ratio=1.0) for e in ("hf", "vllm")]
    assert rows[0]["raw_error"]["value"] == pytest.approx(rows[1]["raw_error"]["value"])


def test_boundary_layers_are_marked_and_left_out_of_the_coded(params, tmp_path):
    made = entries(params, tmp_path)
    marked = {row["layer"] for row in made["rows"] if row["boundary"]}
    assert marked == set(params.codec.boundary_layers)
    coded = one(made["rows"], engine="hf", group="coded", stream="v", variance_ratio=1.0)
    assert sum(coded["d_eff_blocks"].values()) == 4 * 2 * 12


def test_one_engine_has_errors_and_no_ratio(params, tmp_path):
    alone = Settings.complete(
        overlay(
            params.model_dump(mode="json"),
            {"calibration": {"engines": ["hf"]}, "gap": {"origins": ["hf"]}, "cells": {"other-calibration": None}},
        )
    )
    made = entries(alone, tmp_path)
    assert made["ratios"] == [] and {row["engine"] for row in made["rows"]} == {"hf"}
    text = page(made)
    assert "Is the codec worse" not in text and "Error, rank and bytes" in text


def test_rank_spread_by_hand():
    assert tables.rank_spread({"10": 1, "2": 2, "3": 2}) == (2, 3, 10, 5)
    assert tables.rank_spread({"7": 4}) == (7, 7, 7, 4)


# ------------------------------------------------------------------------------------ the section


def page(made: dict | None, withheld: str | None = None) -> str:
    context = tables.residual_context(made, "hf", 0.95, METHODS)
    links = dict.fromkeys(FIGURES)
    return render("residual.md.j2", residual=context, withheld=withheld, alpha="0.05", figures=links, claims={})


def test_the_section_says_what_is_resolved_and_what_is_not(params, tmp_path):
    made = entries(params, tmp_path / "a")
    equal = page(made)
    assert "not resolved, no effect to be seen" in equal
    assert all("not resolved" in sentence(claim) for claim in residual_claims(made))
    made = entries(params, tmp_path / "b", planted_rows(params, factor=1.1, jitter=0.01))
    planted = page(made)
    assert "larger on `vllm`" in planted and "calibration split" in planted
    words = [sentence(claim) for claim in residual_claims(made)]
    assert words and all(re.search(r"the squared error rises to 1\.(09|1)", word) for word in words), words
    assert all("cell `residual/vllm` against cell `residual/hf`" in word for word in words)


def test_nothing_between_engines_is_said_when_it_is_withheld(params, tmp_path):
    made = entries(params, tmp_path)
    del made["ratios"]  # as the report takes it out
    text = page(made, withheld="the engines differ")
    assert "because the engines differ" in text and "larger on" not in text


def test_a_study_that_was_not_run_is_named_as_such():
    assert "did not code the engines' captures" in page(None)


# -------------------------------------------------------------------------------------- refusals


def test_results_of_several_identities_are_refused(params, tmp_path):
    others = {
        "model_hash": {"provenance": planted_provenance(params, model_hash="6" * 16)},
        "corpus_hash": {"provenance": planted_provenance(params, corpus_hash="d" * 16)},
        "calibration.hf": {"provenance": planted_provenance(params, calibration={"hf": "b" * 16})},
        "versions": {"provenance": planted_provenance(params, versions={"kvlab": "0.2.0"})},
        "device": {"provenance": planted_provenance(params, device="cuda")},
        "versions of the captures": {"captured_with": {"kvlab": "0.2.0"}},
        "dtype of the captures": {"dtype": "bfloat16"},
    }
    for name, changes in others.items():
        with refused(MixedIdentity, None, name):
            entries(params, tmp_path, **changes)


def test_results_of_another_run_than_the_cells_are_refused(params, tmp_path):
    cells = planted_provenance(params, calibration={"hf": "a" * 16, "vllm": "e" * 16})
    assert entries(params, tmp_path, measured=cells)["rows"]
    with refused(MixedIdentity, None, "corpus_hash"):
        entries(params, tmp_path, measured=planted_provenance(params, corpus_hash="d" * 16))


@pytest.mark.parametrize(
    "changes",
    [{"origin": "vllm"}, {"recipes": ()}, {"context": 65}, {"windows": 11}, {"n_layers": 5}, {"boundary_layers": ()}],
)
def test_a_result_of_other_parameters_is_refused(params, tmp_path, changes):
    with refused(StaleResult, "stale.not-planned", next(iter(changes))):
        entries(params, tmp_path, **changes)


def test_missing_twofold_and_cut_results_are_refused(params, tmp_path):
    paths = write_residuals(tmp_path, params)
    with refused(MissingResult, "missing-result.engine", "vllm"):
        residual_entries(params, paths[:1], None, BOOT)
    with refused(StaleResult, "stale.twice", paths[0]):
        residual_entries(params, [*paths, paths[0]], None, BOOT)
    rows = planted_rows(params)
    for wrong in (rows.filter(pl.col("layer") != 3), rows.head(-1), pl.concat([rows, rows.head(1)])):
        wrong.write_parquet(paths[1].with_suffix(".parquet"))
        with refused(StaleResult, "stale.other-rows", wrong.height, rows.height):
            residual_entries(params, paths, None, BOOT)


def test_values_that_are_no_numbers_are_refused(params, tmp_path):
    paths = write_residuals(tmp_path, params)
    rows = planted_rows(params)
    rows.with_columns(raw_error_sq=pl.lit(float("nan"))).write_parquet(paths[0].with_suffix(".parquet"))
    with refused(NonFinite, None, "raw_error_sq"):
        residual_entries(params, paths, None, BOOT)
    rows.with_columns(bytes=pl.lit(None, pl.Int64)).write_parquet(paths[0].with_suffix(".parquet"))
    with refused(StorageError, "storage.empty-fields"):
        residual_entries(params, paths, None, BOOT)
    rows.drop("bytes").write_parquet(paths[0].with_suffix(".parquet"))
    with refused(StorageError, "storage.columns"):
        residual_entries(params, paths, None, BOOT)


def test_histograms_that_do_not_count_the_table_are_refused(params, tmp_path):
    paths = write_residuals(tmp_path, params)
    record = read_json(paths[0])
    wrong = [({"31": [2] * 12}, "layer 0 k"), ({"32": [2] * 11 + [3]}, "layer 0 k"), ({"32": [24]}, "12 windows")]
    for blocks, named in wrong:
        record["d_eff"][0]["blocks"] = blocks
        write_json(paths[0], record)
        with refused(StaleResult, "stale.other-histograms", named):
            residual_entries(params, paths, None, BOOT)


def test_one_window_gives_no_interval(params, tmp_path):
    single = params.model_copy(update={"windows": params.windows.model_copy(update={"calib": 1})})
    with refused(Fault, "fault.too-few-windows"):
        entries(single, tmp_path)


# --------------------------------------------------------------------------------------- figures


def test_every_error_is_drawn_once(params, tmp_path):
    table = residual_table({"residual": entries(params, tmp_path)})
    assert table.height == 2 * 2 * 2 * params.model.n_layers
    assert set(table.select("stream", "measure").unique().rows()) == {("k", "whitened"), ("v", "raw")}
    assert {mark.look.open for mark in residual(table).marks} == set(table["boundary"])


def test_every_rank_is_drawn_once(params, tmp_path):
    table = d_eff_table({"residual": entries(params, tmp_path)})
    shares = table.group_by("engine", "variance_ratio", "stream").agg(pl.sum("value"))["value"]
    assert shares.to_list() == pytest.approx([1.0] * 8)
    assert all(mark.bar and mark.start == 0 for mark in d_eff(table).marks)


@pytest.mark.parametrize("name", FIGURES)
def test_the_marks_and_words_are_the_table_s(params, tmp_path, name):
    take, draw = FIGURES[name]
    table = take({"residual": entries(params, tmp_path)})
    figure, lines = draw(table), table.to_dicts()
    assert not re.search(r"(?<![A-Za-z_\d])\d", figure.note)
    assert sorted(mark.row for mark in figure.marks) == list(range(len(lines)))
    for mark in figure.marks:
        line = lines[mark.row]
        assert (mark.value, mark.low, mark.high) == (line["value"], line["low"], line["high"])
        assert fmt.estimate(line) in " ".join(mark.words)


def test_nothing_measured_is_nothing_drawn():
    for metrics in ({}, {"residual": None}, {"residual": {"rows": []}}):
        assert residual_table(metrics) is None and d_eff_table(metrics) is None


def test_nothing_in_the_section_is_typed():
    """Rendered from other numbers, no numeral stays."""
    numeral = re.compile(r"(?<![A-Za-z_\d.])\d[\d.]*(?:e-?\d+)?")
    seen = []
    for seed in range(24):
        make = Maker(seed)
        ratios = tuple(round(make.random.uniform(0.5, 0.999), 4) for _ in range(2))
        context = tables.residual_context(residual_part(make, ratios, ("hf", "vllm")), "hf", make.confidence, METHODS)
        alpha = str(round(1 - make.confidence, 9))
        shared = {"withheld": None, "figures": dict.fromkeys(FIGURES), "claims": {}}
        text = render("residual.md.j2", residual=context, alpha=alpha, **shared)
        seen.append(set(numeral.findall(text.replace(fmt.POST_HOC, ""))))
    assert min(map(len, seen)) > 100
    assert set.intersection(*seen) == set()
