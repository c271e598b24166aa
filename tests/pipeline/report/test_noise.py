"""The noise study: a planted square law is recovered, planted roundings close or do not, planted structure is found."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from kvlab.core.errors import Fault, MissingResult, MixedIdentity, UnknownName
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.quadratic import QuadraticLaw
from kvlab.stats.rounding import SIGNIFICANT_BITS, relative_rounding
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.report.claims import resolved, sentence
from kvlab_pipeline.studies.columns import divides
from kvlab_pipeline.studies.noise import chapter as tables_noise
from kvlab_pipeline.studies.noise.chapter import claims as claims_of
from kvlab_pipeline.studies.noise.chapter import noise, noise_table
from kvlab_pipeline.studies.noise.numbers import (
    closure_entries,
    noise_entries,
    noise_slope_entries,
    reading,
    structure_entries,
)
from pipeline.report.planted_cells import BOOT, FLOOR, WINDOWS, plain_basis, planted_params, planted_results
from refusals import refused

SIGMA = relative_rounding("bfloat16")
C = {"k": 0.5, "v": 0.3}
SHARE = {6: 1.0, 4: 0.7, 2: 0.3}  # of the layers, by their number
SIGMAS = {"noise": {"sigmas": [0.003, 0.01, 0.03, 0.1]}}


def planted(closing=1.0, structure=1.0, saturation=1e9):
    """KL of every cell: the square law, roundings `closing` times it, a codec `structure` times its control."""

    def kl(cell):
        c = sum(C[stream] for stream in cell.stream) * SHARE[len(cell.layers)]
        codec = cell.recipe.k.codec
        if codec == "noise":
            return saturation * -math.expm1(-c * cell.recipe.k.sigma**2 / saturation)
        if codec == "cast":
            return closing * c * SIGMA**2
        return 0.02 * c * (1.0 if codec == "isotropic" else structure)

    return kl


@pytest.fixture(scope="module")
def params():
    return planted_params(**SIGMAS, codec={"boundary_layers": [0, 5]})


@pytest.fixture(scope="module")
def results(params):
    return planted_results(params, "noise", planted(), run_kl=lambda run: 4 * 0.8 * SIGMA**2)


def holds(estimate, value):
    return estimate["low"] <= value <= estimate["high"]


# ---------------------------------------------------------------------------------------- rounding


def rounded(x, dtype):
    """`x` rounded to `dtype`, by counting units in the last place."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    units = 2.0 ** SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.round(mantissa * units) / units, exponent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_size_of_a_rounding_is_that_of_normal_values(dtype):
    """Gaussian values whose scale has nothing to do with powers of two, as K and V are."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 20000)) * 2.0 ** (np.arange(64) / 64)[:, None]
    found = [np.sqrt(((rounded(row, dtype) - row) ** 2).mean() / (row**2).mean()) for row in x]
    assert math.sqrt(np.mean(np.square(found))) == pytest.approx(relative_rounding(dtype), rel=0.005)


def test_the_size_of_a_rounding_is_the_derived_one():
    m = 2.0 ** ((np.arange(200000) + 0.5) / 200000)  # log-uniform over an octave, each value's own error
    square = np.mean(2.0 ** (-2 * 8) / (3 * m**2))
    assert relative_rounding("bfloat16") == pytest.approx(math.sqrt(square), rel=1e-6)
    assert relative_rounding("bfloat16") ** 2 * 2**16 == pytest.approx(0.180, abs=5e-4)
    with refused(UnknownName, None, "'bfloat'", "'bfloat16'"):
        relative_rounding("bfloat")


def test_numpy_rounds_as_torch_does():
    torch = pytest.importorskip("torch")
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert np.array_equal(rounded(x.numpy(), "bfloat16"), x.to(torch.bfloat16).double().numpy())


# --------------------------------------------------------------------------------------------- law


def column(values):
    windows, tokens = values.shape
    return Column.of(np.repeat(np.arange(windows), tokens), np.tile(np.arange(tokens), windows), values.ravel())


def test_the_coefficient_is_the_weighted_mean_by_hand():
    rng = np.random.default_rng(0)
    sizes, scatter = np.array([0.01, 0.1]), np.array([0.5, 0.1])
    values = [0.7 * s**2 * rng.lognormal(0, w, (12, 8)) for s, w in zip(sizes, scatter, strict=True)]
    columns = [column(v) for v in values]
    law = QuadraticLaw.of(sizes, columns)
    precision = [v.mean(1).mean() ** 2 / (v.mean(1).var(ddof=1) / 12) for v in values]
    assert law.weights == pytest.approx(np.array(precision) / sum(precision)) and law.weights[1] > law.weights[0]
    logs = [math.log(v.mean()) - 2 * math.log(s) for v, s in zip(values, sizes, strict=True)]
    found = law.coefficient(Bootstrap(400, 0.95, 0))
    assert found.value == pytest.approx(math.exp(np.dot(law.weights, logs)))
    assert found.low < 0.7 * math.exp(0.01 / 2) < found.high
    flat = QuadraticLaw.of(sizes, [column(np.full((12, 8), 0.7 * s**2)) for s in sizes])
    assert flat.weights.tolist() == [0.5, 0.5]
    for wrong in ([0.0, 0.1], [0.1]):
        with pytest.raises(Fault):
            QuadraticLaw.of(np.array(wrong), columns)


# ------------------------------------------------------------------------------------------ curves


def test_a_square_law_is_recovered(params, results):
    entries = noise_entries(params, results, BOOT)
    assert len(entries) == 2 * 2 * 3 * 4
    for row in entries:
        share = {"all": 1.0, "coded": 0.7, "boundary": 0.3}[row["group"]]
        assert row["kl"]["value"] == pytest.approx(share * C[row["stream"]] * row["sigma"] ** 2)
        assert row["kl"]["n_windows"] == WINDOWS
    slopes = noise_slope_entries(params, results, BOOT)
    assert len(slopes) == 2 * 2 * 3
    for row in slopes:
        share = {"all": 1.0, "coded": 0.7, "boundary": 0.3}[row["group"]]
        assert row["slope"]["value"] == pytest.approx(2) and holds(row["slope"], 2)
        assert row["coefficient"]["value"] == pytest.approx(share * C[row["stream"]])
        assert holds(row["coefficient"], share * C[row["stream"]])
        # points within ten floors of zero do not count
        inside = [s for s in (0.003, 0.01, 0.03, 0.1) if share * C[row["stream"]] * s**2 > 10 * FLOOR]
        assert row["range"] == [inside[0], 0.1] and row["points"] == len(inside) < 4


def test_saturated_points_are_left_out():
    params = planted_params(noise={"sigmas": [0.01, 0.03, 0.1, 10.0], "groups": ["all"]})
    saturated = planted_results(params, "noise", planted(saturation=0.4))
    for row in noise_slope_entries(params, saturated, BOOT):
        assert row["range"] == [0.01, 0.1] and row["slope"]["value"] == pytest.approx(2, abs=0.02)


def test_a_curve_without_two_usable_points_has_no_law():
    params = planted_params(noise={"sigmas": [1e-6, 1e-5]})
    results = planted_results(params, "noise", planted(), run_kl=lambda run: 1e-4)
    for row in noise_slope_entries(params, results, BOOT):
        assert row["slope"] is row["range"] is row["coefficient"] is None
    assert closure_entries(params, results, BOOT) == []
    text = report(metrics_of(params, results))
    assert "closure" not in text and "None" not in text


def test_groups_of_the_same_layers_share_their_cells():
    params = planted_params(**SIGMAS, codec={"boundary_layers": []})
    entries = noise_entries(params, planted_results(params, "noise", planted()), BOOT)
    assert {row["group"] for row in entries} == {"all", "coded"}
    by_group = [[row["kl"] for row in entries if row["group"] == group] for group in ("all", "coded")]
    assert by_group[0] == by_group[1]


# ----------------------------------------------------------------------------------------- closure


def test_roundings_that_cost_what_the_curve_says_close(params, results):
    entries = [row for row in closure_entries(params, results, BOOT) if row["against"] == "cast"]
    assert [(row["engine"], row["stream"]) for row in entries] == [
        (e, s) for e in params.engines for s in ("k", "v", "kv")
    ]
    for row in entries:
        c = sum(C[stream] for stream in row["stream"])
        assert row["predicted"]["value"] == pytest.approx(c * SIGMA**2)
        assert row["measured"]["value"] == pytest.approx(c * SIGMA**2)
        assert holds(row["ratio"], 1) and row["reading"] == "closes"
        assert row["sigma"] == SIGMA and not row["in_range"]  # the smallest usable noise is 0.003
    claims = said(params, results)
    assert not any(resolved(claim) for claim in claims[:6])


@pytest.mark.parametrize(("closing", "expected"), [(2.0, "does not close"), (0.4, "does not close"), (1.2, "closes")])
def test_roundings_off_the_curve_are_told(params, closing, expected):
    off = planted_results(params, "noise", planted(closing), run_kl=lambda run: 1e-4)
    entries = [row for row in closure_entries(params, off, BOOT) if row["against"] == "cast"]
    assert len(entries) == 6
    for row in entries:
        assert row["ratio"]["value"] == pytest.approx(closing) and not holds(row["ratio"], 1)
        assert row["reading"] == expected
    words = sentence(said(params, off)[0])
    assert words.startswith(
        f"Rounding K to bfloat16 (`hf`) brings KL {'only ' if closing < 1 else ''}to {closing:.0f}"[:46]
    )
    assert "times what the noise curve predicts (12 windows" in words


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.7, 1.4), "closes"),
        ((1.1, 1.4), "closes"),
        ((0.5, 1.2), "open"),
        ((0.9, 1.6), "open"),
        ((1.4, 1.6), "open"),
        ((0.6, 0.7), "open"),
        ((1.51, 1.6), "does not close"),
        ((0.1, 0.2), "does not close"),
    ],
)
def test_readings(ends, expected):
    assert reading(Estimate(sum(ends) / 2, *ends, 12, 12, "bca")) == expected


def test_the_share_of_an_engines_own_run(params, results):
    """Planted: the bf16 runs cost four times what rounding K and V does; the run's further windows do not count."""
    runs = [row for row in closure_entries(params, results, BOOT) if row["against"] != "cast"]
    assert [row["against"] for row in runs] == ["hf-bfloat16-sdpa", "hf-bfloat16-eager", "vllm-bfloat16-default"]
    for row in runs:
        assert row["stream"] == "kv" and row["reading"] is row["ratio"] is None
        assert row["measured"]["value"] == pytest.approx(4 * 0.8 * SIGMA**2) and row["measured"]["n_windows"] == WINDOWS
        assert row["share"]["value"] == pytest.approx(0.25) and holds(row["share"], 0.25)
        assert row["cast_share"]["value"] == pytest.approx(0.25)


def test_a_run_without_kl_has_no_share(params):
    exact = planted_results(params, "noise", planted(), run_kl=lambda run: 0.0)
    runs = [row for row in closure_entries(params, exact, BOOT) if row["against"] != "cast"]
    assert runs and all(row["share"] is row["cast_share"] is None for row in runs)


def test_a_float32_baseline_alone_has_no_run_to_explain():
    params = planted_params(**SIGMAS, baseline={"dtypes": ["float32"]})
    results = planted_results(params, "noise", planted(), run_kl=lambda run: 1e-9)
    assert {row["against"] for row in closure_entries(params, results, BOOT)} == {"cast"}


def test_no_closure_without_the_curve_of_all_layers():
    params = planted_params(noise={"groups": ["coded"], "streams": ["k"]})
    results = planted_results(params, "noise", planted())
    assert closure_entries(params, results, BOOT) == []
    assert {claim["compared"][0][0]["label"] for claim in said(params, results)} == {"codec"}


# --------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize(("structure", "told"), [(1.0, False), (3.0, True), (0.3, True)])
def test_structure_is_found(params, structure, told):
    results = planted_results(params, "noise", planted(structure=structure), run_kl=lambda run: 1e-4)
    entries = structure_entries(params, results, BOOT)
    assert [row["stream"] for row in entries] == ["k", "v", "kv"] * 2
    for row in entries:
        assert row["ratio"]["value"] == pytest.approx(structure, rel=1e-3) and holds(row["ratio"], 1) != told
    claims = said(params, results)[6:]
    assert [resolved(claim) for claim in claims] == [told] * 6
    if structure > 1:
        assert "The studied codec's error on K and V (`vllm`) raises KL to 3.0" in sentence(claims[-1])


def test_no_ratio_to_a_control_that_costs_nothing(params):
    def free(cell):
        return 0.0 if cell.recipe.k.codec == "isotropic" else planted()(cell)

    results = planted_results(params, "noise", free, scatter=0.5, run_kl=lambda run: 1e-4)
    entries = structure_entries(params, results, BOOT)
    assert any(row["ratio"] is None for row in entries)
    assert all(row["isotropic"]["low"] <= 0 for row in entries if row["ratio"] is None)
    assert "no ratio: the random direction costs nothing" in report(metrics_of(params, results))


@pytest.mark.parametrize(
    ("windows", "ratio"),
    [
        ([0.01] * 11 + [1.0], True),  # one ruined window stretches the interval below zero, but none costs nothing
        ([-0.001] + [1.0 + 0.01 * i for i in range(11)], True),
        ([-0.5, 0.5] * 6, False),
    ],
)
def test_what_a_ratio_may_be_taken_to(windows, ratio):
    assert divides(BOOT, column(np.repeat(windows, 4).reshape(12, 4))) == ratio


def test_cells_of_other_conditions_are_refused(params, results):
    def changed(role):
        cells = [
            replace(m, provenance=m.provenance.model_copy(update={"device": "other"})) if m.role == role else m
            for m in results.cells
        ]
        return replace(results, cells=tuple(cells))

    for role, compare in (
        ("identity", noise_entries),
        ("cast", closure_entries),
        ("isotropic", structure_entries),
        ("noise", closure_entries),
    ):
        with refused(MixedIdentity, None, "device: cpu | other"):
            compare(params, changed(role), BOOT)
    bare = replace(results, cells=tuple(m for m in results.cells if m.role != "identity"))
    with refused(MissingResult, "missing-result.identity"):
        noise_entries(params, bare, BOOT)


# -------------------------------------------------------------------------------------- the report


def said(params, results):
    return claims_of(closure_entries(params, results, BOOT), structure_entries(params, results, BOOT))


def metrics_of(params, results):
    made = {"noise": noise_entries, "noise_slope": noise_slope_entries, "closure": closure_entries}
    made |= {"structure": structure_entries}
    return {name: make(params, results, BOOT) for name, make in made.items()}


def report(metrics):
    claims = {
        "noise": [sentence(claim) for claim in claims_of(*(metrics.get(part, []) for part in ("closure", "structure")))]
    }
    context = tables_noise.noise_context(metrics, plain_basis)
    given = {"figures": {"noise": "figures/noise.svg"}, "unit": "nats per token"}
    return render("noise.md.j2", noise=context, claims=claims, **given)


def test_the_section(params, results):
    text = report(metrics_of(params, results))
    head = "| noise | K, all layers | K, coded layers | K, boundary layers | V, all layers | V, coded layers |"
    assert text.count(head) == 2 and text.count("\n| 0.01 |") == 2
    assert text.count("\n- ") == 12
    assert "0.00166 times the root mean square" in text and "within a factor of 1.5 of one" in text
    assert text.count("| closes |") == 6
    assert "| `vllm-bfloat16-default` |" in text
    assert "None" not in text and "nan" not in text
    assert report({}) == "## Plain noise in place of a codec\n\nThis run did not measure noise.\n"


def test_the_figure_draws_every_row(params, results):
    metrics = metrics_of(params, results)
    table = noise_table(metrics)
    assert table.filter(what="cast")["sigma"].to_list() == [SIGMA] * 4 and len(table) == len(metrics["noise"]) + 4
    figure = noise(table)
    assert len(figure.panels) == 6
    at = {mark.row: (mark.at, mark.value, mark.low, mark.high) for mark in figure.marks}
    assert [at[row] for row in range(len(table))] == table.select("sigma", "value", "low", "high").rows()
    slopes = [fmt.estimate(dict(zip(("value", "low", "high"), row, strict=True))) for row in slopes_of(table)]
    said = [words for panel in figure.panels for words, _ in panel.notes]
    assert said and all(any(slope in words for slope in slopes) for words in said)
    assert noise_table({"noise": []}) is None


def slopes_of(table):
    return table.drop_nulls("slope_value").select("slope_value", "slope_low", "slope_high").rows()


def test_a_fitted_line_has_the_fitted_slope_over_the_fitted_range(params, results):
    table = noise_table(metrics_of(params, results))
    dashed = [line for panel in noise(table).panels for line in panel.lines if line.dash == "dashed"]
    found = [np.diff(np.log(line.values))[0] / np.diff(np.log(line.places))[0] for line in dashed]
    expected = {round(slope, 9) for slope, _, _ in slopes_of(table)}
    assert dashed and {round(slope, 9) for slope in found} <= expected
    fitted = table.filter("in_range").group_by("engine", "stream", "group")
    groups = fitted.agg(low=pl.min("sigma"), high=pl.max("sigma"))
    assert sorted(line.places for line in dashed) == sorted(groups.select("low", "high").rows())
