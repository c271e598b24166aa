"""The CSV beside a figure is what the figure draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from kvlab.errors import UnknownName
from kvlab.report import figures
from report.example_metrics import build

SOURCE = Path(__file__).parents[2] / "src"


def drawn(name: str, metrics: dict, folder):
    """The figure's CSV and the figure drawn from it."""
    figures.write(name, metrics, folder)
    table = pl.read_csv(folder / f"{name}.csv", infer_schema_length=None)
    return table, figures.FIGURES[name].draw(table)


def dots(axis) -> list[tuple[float, float]]:
    """Positions of all single markers."""
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axis.lines
        if line.get_marker() not in ("None", None, "") and len(line.get_xdata()) == 1
    ]


def spans(axis, coordinate: str) -> list[tuple[float, float]]:
    """Ends of all two-point lines."""
    ends = [getattr(line, f"get_{coordinate}data")() for line in axis.lines]
    return [tuple(float(end) for end in pair) for pair in ends if len(pair) == 2]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_csv_draws_the_same_picture(tmp_path, name):
    _, figure = drawn(name, build(), tmp_path)
    figures.save(figure, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / f"{name}.svg").read_bytes()


def test_gap_bars_start_where_the_last_one_ended(tmp_path):
    metrics = build()
    table, figure = drawn("gap_shapley", metrics, tmp_path)
    bars = figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx(table["value"].to_list())
    assert [bar.get_x() for bar in bars] == pytest.approx(table["start"].to_list())
    kl = metrics["gap"]["measures"]["kl"]
    assert bars[-2].get_x() + bars[-2].get_width() == pytest.approx(kl["high"]["value"])
    reach = spans(figure.axes[0], "x")
    for row in table.iter_rows(named=True):
        assert pytest.approx((row["start"] + row["low"], row["start"] + row["high"])) in reach


def test_unresolved_shares_are_hatched_and_named(tmp_path):
    table, figure = drawn("gap_shapley", build(unresolved=("protocol",)), tmp_path)
    hatched = [bool(bar.get_hatch()) for bar in figure.axes[0].patches]
    assert hatched == [name == "protocol" for name in table["name"]]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert ["not resolved" in label for label in labels] == hatched


@pytest.mark.parametrize("name", ["baseline", "cells"])
def test_row_figures_draw_every_value_and_interval(tmp_path, name):
    table, figure = drawn(name, build(), tmp_path)
    axis = figure.axes[0]
    assert sorted(x for x, _ in dots(axis)) == pytest.approx(sorted(table["value"]))
    expected = sorted(zip(table["low"], table["high"], strict=True))
    assert np.array(sorted(spans(axis, "x"))) == pytest.approx(np.array(expected))


def test_cells_holds_coded_cells_of_the_reduced_dtype_only(tmp_path):
    metrics = build()
    table, _ = drawn("cells", metrics, tmp_path)
    expected = [c for c in metrics["cells"] if c["variance_ratio"] is not None and c["dtype"] == "bfloat16"]
    assert table["cell_id"].to_list() == [cell["cell_id"] for cell in expected]
    assert table["value"].to_list() == [cell["kl_net"]["value"] for cell in expected]


@pytest.mark.parametrize("name", ["baseline", "cells", "layers", "noise"])
def test_zeros_and_negative_values_are_drawn(tmp_path, name):
    metrics = build()
    for part, key in (("baseline", "kl"), ("cells", "kl_net"), ("layers", "kl"), ("noise", "kl")):
        for row, value in zip(metrics[part], (0.0, -1e-6, 0.0), strict=False):
            row[key] |= {"value": value, "low": value - 1e-7, "high": value + 1e-7}
    _, figure = drawn(name, metrics, tmp_path)
    assert figure.axes


@pytest.mark.parametrize("name", ["baseline", "cells", "noise"])
def test_a_study_of_zeros_is_drawn(tmp_path, name):
    metrics = build()
    for part, key in (("baseline", "kl"), ("cells", "kl_net"), ("noise", "kl")):
        for row in metrics[part]:
            row[key] |= {"value": 0.0, "low": 0.0, "high": 0.0}
    assert figures.write(name, metrics, tmp_path)


def test_the_svg_holds_no_date_and_no_program(tmp_path):
    figures.write("layers", build(), tmp_path)
    text = (tmp_path / "layers.svg").read_text()
    assert "<dc:date>" not in text and "Matplotlib v" not in text
    assert "<text" not in text  # letters are paths


def test_nothing_to_draw_leaves_a_sentence(tmp_path):
    metrics = build()
    assert figures.write("noise", metrics, tmp_path)
    drawn = (tmp_path / "noise.svg").read_bytes()
    assert not figures.write("noise", metrics | {"noise": []}, tmp_path)
    assert (tmp_path / "noise.svg").read_bytes() != drawn
    assert pl.read_csv(tmp_path / "noise.csv").to_dicts() == [{"not_drawn": figures.NOT_MEASURED}]


def test_an_unknown_figure_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'layers'"):
        figures.write("layer", build(), tmp_path)


def test_neither_torch_nor_matplotlib_comes_with_the_import():
    code = (
        "import sys, kvlab.report.findings, kvlab.report.readme;"
        "sys.exit(int(bool({'torch', 'matplotlib'} & sys.modules.keys())))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    assert found.returncode == 0
