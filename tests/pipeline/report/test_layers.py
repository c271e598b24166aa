"""Per-layer attribution: planted layers are found, planted sums add up, planted compounding is told from adding up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl
import pytest
from scipy.stats import false_discovery_control

from kvlab.core.errors import MissingResult, MixedIdentity
from kvlab.stats.bootstrap import Column
from kvlab.stats.multiple import sign_flip_two_sided_p
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.report.claims import resolved, sentence
from kvlab_pipeline.studies.layers import chapter as tables_layers
from kvlab_pipeline.studies.layers.chapter import claims as layer_claims
from kvlab_pipeline.studies.layers.chapter import layers, layers_table
from kvlab_pipeline.studies.layers.numbers import additivity_entries, layer_entries, standing_out
from pipeline.report.planted_cells import BOOT, WINDOWS, plain_basis, planted_params, planted_results, rows
from pipeline.report.shipped import shipped
from refusals import refused

LAYER = {"k": (0.030, 0.004, 0.003, 0.002, 0.0015, 0.020), "v": (0.012, 0.003, 0.002, 0.001, 0.0005, 0.009)}


def adding(cell, together=1.0, cross=0.0):
    """Layers that add up, times `together` when there are several; K and V add up but for `cross`."""
    kl = sum(LAYER[stream][layer] for stream in cell.stream for layer in cell.layers)
    return kl * (together if len(cell.layers) > 1 else 1.0) + (cross if cell.stream == "kv" else 0.0)


@pytest.fixture(scope="module")
def params():
    return planted_params()


@pytest.fixture(scope="module")
def additive(params):
    return planted_results(params, "layers", adding)


def rows_of(entries, **chosen):
    return [row for row in entries if all(row[key] == value for key, value in chosen.items())]


def holds(estimate, value):
    return estimate["low"] <= value <= estimate["high"]


def test_alone_and_left_out_are_the_planted_costs(params, additive):
    entries = layer_entries(params, additive, BOOT)
    assert len(entries) == 2 * 2 * 2 * 2 * 6
    for stream, kind in (("k", "only"), ("v", "only"), ("k", "but"), ("v", "but")):
        found = rows_of(entries, engine="vllm", protocol="snapshot", stream=stream, kind=kind)
        assert [row["layer"] for row in found] == list(range(6))
        assert [row["boundary"] for row in found] == [True, False, False, False, False, True]
        assert [row["kl"]["value"] for row in found] == pytest.approx(LAYER[stream])
        assert all(row["kl"]["n_windows"] == WINDOWS for row in found)


def test_q_values_are_those_of_an_oracle_within_their_group(params, additive):
    entries = layer_entries(params, additive, BOOT)
    groups = {(row["engine"], row["protocol"], row["stream"], row["kind"]) for row in entries}
    for engine, protocol, stream, kind in groups:
        found = rows_of(entries, engine=engine, protocol=protocol, stream=stream, kind=kind)
        p_values = [row["p_value"] for row in found]
        assert [row["q_value"] for row in found] == pytest.approx(false_discovery_control(p_values))


def test_a_layer_that_does_nothing_is_not_discovered(params):
    def idle(cell):
        return sum(LAYER["k"][layer] for layer in cell.layers if layer != 2) + 1e-9

    entries = layer_entries(params, planted_results(params, "layers", idle), BOOT)
    for kind in ("only", "but"):
        found = rows_of(entries, engine="hf", protocol="in_forward", stream="k", kind=kind)
        assert [row["q_value"] <= 0.05 for row in found] == [layer != 2 for layer in range(6)], kind


def test_a_layer_whose_error_cancels_is_discovered_from_below(params):
    """Coding layer 3 too makes it better: no KL is negative, but what it costs on top of the others is."""

    def cancelling(cell):
        return 0.05 - (0.02 if 3 in cell.layers else 0.0) if len(cell.layers) > 1 else 0.01

    entries = layer_entries(params, planted_results(params, "layers", cancelling), BOOT)
    (row,) = rows_of(entries, engine="hf", protocol="in_forward", stream="v", kind="but", layer=3)
    assert row["kl"]["value"] == pytest.approx(-0.02) and row["kl"]["high"] < 0 and row["q_value"] <= 0.05


def test_identical_layers_share_their_p_values(params):
    same = planted_results(params, "layers", lambda cell: 0.01 * len(cell.layers), scatter=0.0)
    entries = layer_entries(params, same, BOOT)
    assert len({row["kl"]["value"] for row in rows_of(entries, kind="only")}) == 1
    assert len({row["q_value"] for row in rows_of(entries, kind="only")}) == 1
    (row, *_) = additivity_entries(params, same, BOOT)
    assert row["ratio"]["value"] == pytest.approx(1) and row["boundary_excess"]["value"] == pytest.approx(0, abs=1e-12)


def stand_out(entries, kind):
    return [row["q_stands_out"] <= 0.05 for row in rows_of(entries, engine="hf", protocol="snapshot", kind=kind)]


def test_layers_that_stand_out_are_told_from_the_mean_layer_and_no_others(params):
    """Above the mean, below it, and on it, of K; V's layers are alike. All of them are told from zero."""
    of_k = (0.03, 0.01, 0.01, 0.01, 0.01, -0.01 + 1e-4)  # the mean of the six is all but 0.01

    def planted(cell):
        return sum(0.02 + (of_k[layer] if stream == "k" else 0.01) for stream in cell.stream for layer in cell.layers)

    entries = layer_entries(params, planted_results(params, "layers", planted), BOOT)
    for kind in ("only", "but"):
        assert stand_out(rows_of(entries, stream="k"), kind) == [True, False, False, False, False, True]
        assert not any(stand_out(rows_of(entries, stream="v"), kind))
    assert all(row["q_value"] <= 0.05 for row in entries)


def test_standing_out_is_corrected_within_its_group_and_is_that_against_the_other_layers(params, additive):
    entries = layer_entries(params, additive, BOOT)
    for stream in ("k", "v"):
        found = additive.select("layers", "codec", engine="hf", protocol="snapshot", stream=stream)
        kl = {m.cell.layers[0]: m.column("kl").means for m in found if len(m.cell.layers) == 1}
        others = [kl[i] - np.mean([kl[j] for j in kl if j != i], axis=0) for i in range(6)]
        p_values = [sign_flip_two_sided_p(one, draws=BOOT.resamples, seed=BOOT.seed) for one in others]
        rows = rows_of(entries, engine="hf", protocol="snapshot", stream=stream, kind="only")
        assert [row["q_stands_out"] for row in rows] == pytest.approx(false_discovery_control(p_values))


def test_layers_that_are_alike_seldom_stand_out():
    """Of groups of layers that differ by chance only, about one in twenty names any; those with a dear one name it."""
    draws, named = np.random.default_rng(0), {1.0: [], 2.5: []}
    for dearer in named:
        for _ in range(150):
            kl = draws.lognormal(0, 0.5, (WINDOWS, 1)) * draws.gamma(8.0, 1 / 8, (WINDOWS, 8))
            kl[:, 3] *= dearer
            columns = [Column(one, np.ones(WINDOWS), tuple(range(WINDOWS)), "same", WINDOWS) for one in kl.T]
            named[dearer].append([q <= 0.05 for q in standing_out(BOOT, columns)])
    assert np.mean(np.any(named[1.0], axis=1)) <= 0.1
    assert np.mean(named[2.5], axis=0)[3] >= 0.9


def test_layers_that_add_up(params, additive):
    entries = additivity_entries(params, additive, BOOT)
    assert len(entries) == 2 * 2 * 3
    for row in entries:
        total = sum(sum(LAYER[stream]) for stream in row["stream"])
        assert [row[name]["value"] for name in ("sum", "joint")] == pytest.approx([total, total])
        assert holds(row["ratio"], 1) and row["ratio"]["value"] == pytest.approx(1)
        assert holds(row["interaction"], 0)
        assert row["parts"] == ("streams" if row["stream"] == "kv" else "layers")
    k, v, kv = entries[:3]
    assert k["left_out_sum"]["value"] == pytest.approx(sum(LAYER["k"]))
    assert v["boundary_excess"]["value"] == pytest.approx((0.012 + 0.009) / 2 - (0.003 + 0.002 + 0.001 + 0.0005) / 4)
    assert v["boundary_excess"]["low"] > 0
    assert kv["left_out_sum"] is None and kv["boundary_excess"] is None
    assert [resolved(claim) for claim in layer_claims(additivity_entries(params, additive, BOOT))] == [False] * len(
        entries
    )


@pytest.mark.parametrize("together", [0.8, 1.25])
def test_compounding_is_found(params, together):
    results = planted_results(params, "layers", lambda cell: adding(cell, together, cross=0.004))
    for row in additivity_entries(params, results, BOOT):
        if row["parts"] == "layers":
            assert row["ratio"]["value"] == pytest.approx(together) and not holds(row["ratio"], 1)
            assert not holds(row["interaction"], 0)
            assert np.sign(row["interaction"]["value"]) == np.sign(together - 1)
        else:
            assert row["interaction"]["value"] == pytest.approx(0.004) and row["interaction"]["low"] > 0
    claims = layer_claims(additivity_entries(params, results, BOOT))
    assert all(map(resolved, claims)) and len(claims) == 12
    verb = "raises KL to 1.2" if together > 1 else "raises KL only to 0.8"
    assert f"Coding K in all layers (`hf`, `in_forward`) {verb}" in sentence(claims[0])
    assert "raises KL beyond the sum of either alone by 0.0" in sentence(claims[2])


def test_no_ratio_of_a_sum_that_is_not_clear_of_zero(params):
    results = planted_results(params, "layers", lambda cell: 0.0, scatter=0.5)
    entries = additivity_entries(params, results, BOOT)
    ratios = [row["ratio"] for row in entries]
    assert None in ratios
    assert all(row["sum"]["low"] <= 0 for row in entries if row["ratio"] is None)
    said = [claim["subject"] for claim in layer_claims(additivity_entries(params, results, BOOT)) if claim["null"] == 1]
    assert len(said) == sum(row["ratio"] is not None for row in entries if row["parts"] == "layers")


@pytest.mark.parametrize(("n_layers", "kinds"), [(1, {"only"}), (2, {"only", "but"})])
def test_models_so_small_that_cells_coincide(n_layers, kinds):
    """Of two layers, one alone is all but the other; one layer alone is all there is."""
    params = planted_params(
        model={"n_layers": n_layers}, codec={"boundary_layers": [], "whiten_skip_layers": [0]}, cells=no_cells()
    )
    results = planted_results(params, "layers", adding)
    entries = layer_entries(params, results, BOOT)
    assert {row["kind"] for row in entries} == kinds
    found = rows_of(entries, engine="hf", protocol="in_forward", stream="k", kind="but")
    assert [row["kl"]["value"] for row in found] == pytest.approx(LAYER["k"][:n_layers] if n_layers > 1 else [])
    sums = additivity_entries(params, results, BOOT)
    assert all(row["boundary_excess"] is None for row in sums)
    text = report({"layers": entries, "additivity": sums})
    assert "Boundary layers" not in text and ("*Left out*" in text) == (n_layers > 1)
    assert {row["q_stands_out"] is None for row in entries} == {n_layers == 1}
    assert ("double dagger" in text) == ("in both directions" in text) == (n_layers > 1)


def no_cells():
    return dict.fromkeys(shipped().cells)


def test_one_stream_has_no_line_of_k_and_v():
    params = planted_params(layers={"streams": ["k"], "protocols": ["in_forward"]})
    results = planted_results(params, "layers", adding)
    assert {row["stream"] for row in additivity_entries(params, results, BOOT)} == {"k"}
    assert {claim["null"] for claim in layer_claims(additivity_entries(params, results, BOOT))} == {1.0}


def test_cells_of_other_conditions_are_refused(params, additive):
    def changed(role):
        cells = [
            replace(m, provenance=m.provenance.model_copy(update={"device": "other"})) if m.role == role else m
            for m in additive.cells[:30]
        ]
        return replace(additive, cells=tuple(cells) + additive.cells[30:])

    for role, compare in product(("identity", "codec"), (layer_entries, additivity_entries)):
        with refused(MixedIdentity, None, "device: cpu | other"):
            compare(params, changed(role), BOOT)
    bare = replace(additive, cells=tuple(m for m in additive.cells if m.role != "identity"))
    with refused(MissingResult, "missing-result.identity"):
        additivity_entries(params, bare, BOOT)


def test_k_and_v_of_a_layer_at_once():
    params = planted_params(layers={"streams": ["kv"], "engines": ["hf"], "protocols": ["snapshot"]})
    metrics = metrics_of(params, planted_results(params, "layers", adding))
    both = [k + v for k, v in zip(LAYER["k"], LAYER["v"], strict=True)]
    for kind in ("only", "but"):
        found = rows_of(metrics["layers"], kind=kind)
        assert [row["kl"]["value"] for row in found] == pytest.approx(both)
        assert {row["stream"] for row in found} == {"kv"}
    (entry,) = metrics["additivity"]
    assert (entry["stream"], entry["parts"]) == ("kv", "layers") and entry["ratio"]["value"] == pytest.approx(1)
    text = report(metrics)
    assert "Priced is K and V of each layer at once, in two ways." in text
    assert "| layer | K and V alone | K and V left out |" in text and "| the layers of K and V |" in text
    assert "Coding K and V in all layers (`hf`, `snapshot`)" in text
    assert [panel.title for panel in layers(layers_table(metrics)).panels] == ["K and V alone", "K and V left out"]


# -------------------------------------------------------------------------------------- the report


def metrics_of(params, results):
    return {
        "sizes": {"confidence": 0.95},
        "layers": layer_entries(params, results, BOOT),
        "additivity": additivity_entries(params, results, BOOT),
    }


def report(metrics):
    metrics = {"sizes": {"confidence": 0.95}} | metrics
    claims = {"layers": [sentence(claim) for claim in layer_claims(metrics.get("additivity", []))]}
    context = tables_layers.context(metrics, plain_basis)
    given = {"figures": {"layers": "figures/layers.svg"}, "alpha": "0.05", "unit": "nats per token"}
    return render("layers.md.j2", layers=context, claims=claims, **given)


def test_the_section(params, additive):
    text = report(metrics_of(params, additive))
    assert "Priced is each layer's K and each layer's V, in two ways." in text
    assert text.count("| layer | K alone | V alone | K left out | V left out |") == 4
    lines = [line for line in text.splitlines() if line.startswith("| 0, boundary |")]
    assert len(lines) == 4 and all(line.count("†") == 4 for line in lines)
    assert text.count("\n- ") == 12
    assert "Boundary layers, which the studied recipe leaves uncoded, are coded here too" in text
    assert "A double dagger (‡) marks a layer that stands out" in text and all("†" in line for line in lines)
    assert all("†  ‡" not in line and line.count("‡") >= 2 for line in lines)  # the dearest of K and of V
    assert "only that the codec did something to the logits" in text
    assert "None" not in text and "nan" not in text
    assert report({}) == "## One layer at a time\n\nThis run did not measure single layers.\n"


def test_only_discoveries_are_marked():
    row = {"engine": "hf", "protocol": "snapshot", "stream": "k", "kind": "only", "layer": 3, "boundary": False}
    row["kl"] = {"value": 0.5, "low": 0.4, "high": 0.6}
    for key, mark, other in (("q_value", "†", "q_stands_out"), ("q_stands_out", "‡", "q_value")):
        pages = [tables_layers.costs([row | {key: q, other: None}], 0.05) for q in (0.05, 0.0501, None)]
        assert [page.count(mark) for page in pages] == [1, 0, 0]
        assert [sum(map(page.count, "†‡")) for page in pages] == [1, 0, 0]


@pytest.fixture(scope="module")
def deep():
    params = planted_params(
        model={"n_layers": 36},
        codec={"boundary_layers": [0, 1, 34, 35]},
        layers={"protocols": ["in_forward"]},
    )
    costs = np.linspace(0.01, 0.001, 36)
    return metrics_of(params, planted_results(params, "layers", lambda cell: float(sum(costs[list(cell.layers)]))))


def test_a_deep_model_still_renders(deep):
    text = report(deep)
    assert text.count("| 35, boundary |") == 2 and max(map(len, text.splitlines())) < 1000
    table = layers_table(deep)
    assert len(table) == 2 * 2 * 2 * 36
    assert len(layers(table).marks) == len(table)


@pytest.mark.parametrize("of", ["additive", "deep"])
def test_the_figure_draws_every_row(request, params, of):
    metrics = (
        metrics_of(params, request.getfixturevalue("additive")) if of == "additive" else request.getfixturevalue(of)
    )
    table = layers_table(metrics)
    figure = layers(table)
    assert len(figure.panels) == 4
    at = {mark.row: (round(mark.at), mark.value, mark.look.open) for mark in figure.marks}
    expected = table.select("layer", "value", ~pl.col("clear")).rows()
    assert [at[row] for row in range(len(table))] == expected
    assert layers_table({"sizes": {"confidence": 0.95}, "layers": []}) is None


def test_planted_rows_have_the_planted_mean():
    assert rows("a", 0.25, 0.1)["kl"].mean() == pytest.approx(0.25)
    assert not rows("a", 0.25, 0.1).equals(rows("b", 0.25, 0.1)) and isinstance(rows("a", 1, 0), pl.DataFrame)
