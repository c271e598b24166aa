"""The CSV beside a figure is what the figure draws, in the file and in both widths of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from kvlab.core.errors import Fault, UnknownName
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.rendering.figure import DARK, Axis, Figure, Look, Mark, Panel
from kvlab_pipeline.rendering.svg import tick_name
from kvlab_pipeline.report import figures
from pipeline.report.drawings import assert_drawn, read
from pipeline.report.example_metrics import build
from refusals import refused

SOURCE = Path(__file__).parents[3] / "src"


def described(name: str, metrics: dict):
    """A figure's table and what is drawn of it."""
    table = figures.FIGURES[name].table(metrics)
    return table, figures.described(name, table)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_csv_draws_the_same_picture(tmp_path, monkeypatch, name):
    drawn = []
    monkeypatch.setattr(svg, "write", lambda figure, path: path.touch() or drawn.append(figure))
    figures.write(name, build(), tmp_path)
    table = pl.read_csv(tmp_path / f"{name}.csv", infer_schema_length=None)
    assert drawn == [figures.described(name, table)]


def test_a_figure_is_drawn_twice_the_same(tmp_path):
    for name in ("a.svg", "b.svg"):
        svg.write(described("mitigations", build())[1], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_number_of_the_csv_is_drawn_in_the_file_and_in_both_widths_of_the_page(tmp_path, name):
    table, figure = described(name, build(unresolved=("protocol",)))
    marks = sorted(figure.marks, key=lambda mark: mark.row)
    assert [(mark.row, mark.value, mark.low, mark.high) for mark in marks] == [
        (row, *numbers) for row, numbers in enumerate(table.select("value", "low", "high").iter_rows())
    ]
    svg.write(figure, tmp_path / "file.svg")
    assert_drawn(figure, (tmp_path / "file.svg").read_text())
    for width in (svg.WIDE, svg.NARROW):
        assert_drawn(figure, standing_alone(svg.inline(figure, name, width)))


def standing_alone(text: str) -> str:
    """An element of a page as a document of its own."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return text.replace("<svg ", f"<svg {spaces} ", 1)


def one_panel(*values: float, log: bool = False) -> Figure:
    marks = tuple(Mark(row, row, value, value, value, ("a",)) for row, value in enumerate(values))
    return Figure("t", "n", (Panel(Axis((-1, len(values))), Axis((0.1, 10), log=log), marks),))


def test_a_drawing_of_other_numbers_is_told_apart(tmp_path):
    svg.write(one_panel(1.0, 2.0, 3.0), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert_drawn(one_panel(1.0, 2.0, 3.0), text)
    for other in (one_panel(1.0, 2.0, 3.05), one_panel(1.0, 2.0), one_panel(1.0, 2.0, 3.0, 4.0)):
        with pytest.raises(AssertionError):
            assert_drawn(other, text)


def test_gap_bars_start_where_the_last_one_ended():
    metrics = build()
    table, figure = described("gap_shapley", metrics)
    bars = figure.marks
    assert [bar.start for bar in bars] == table["start"].to_list()
    for bar, following in pairwise(bars[:-1]):
        assert bar.start + bar.value == pytest.approx(following.start)
    kl = metrics["gap"]["measures"]["kl"]
    assert bars[-2].start + bars[-2].value == pytest.approx(kl["high"]["value"])


def test_unresolved_shares_are_hatched_and_named(tmp_path):
    table, figure = described("gap_shapley", build(unresolved=("protocol",)))
    assert [bar.look.hatched for bar in figure.marks] == [name == "protocol" for name in table["name"]]
    names = figure.panels[0].places.names
    assert ["not resolved" in name for name in names] == [name == "protocol" for name in table["name"]]
    svg.write(figure, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<pattern") == 1


def test_cells_holds_coded_cells_of_the_reduced_dtype_only():
    metrics = build()
    table, _ = described("cells", metrics)
    expected = [c for c in metrics["cells"] if c["variance_ratio"] is not None and c["dtype"] == "bfloat16"]
    assert table["cell_id"].to_list() == [cell["cell_id"] for cell in expected]
    assert table["value"].to_list() == [cell["kl_net"]["value"] for cell in expected]


@pytest.mark.full
@pytest.mark.parametrize("name", ["baseline", "cells", "noise", "mitigations"])
@pytest.mark.parametrize(("values", "half"), [([0.0, -1e-6, 0.0], 1e-7), ([0.0] * 1000, 0.0)], ids=["some", "all"])
def test_zeros_and_negative_values_are_drawn_at_the_end_of_their_axis(tmp_path, name, values, half):
    metrics = build()
    coded = [row for row in metrics["cells"] if row["variance_ratio"] is not None and row["dtype"] == "bfloat16"]
    drawn = {
        "baseline": [row["kl"] for row in metrics["baseline"]],
        "cells": [row["kl_net"] for row in coded],
        "noise": [row["kl"] for row in metrics["noise"]] + [row["measured"] for row in metrics["closure"]],
        "mitigations": [row["kl"] for row in metrics["mitigations"]["arms"]],
    }[name]
    for estimate, value in zip(drawn, values, strict=False):
        estimate.update(value=value, low=value - half, high=value + half)
    table, figure = described(name, metrics)
    assert set(values) <= set(table["value"])
    assert sorted(mark.row for mark in figure.marks) == list(range(len(table)))
    svg.write(figure, tmp_path / "a.svg")
    assert_drawn(figure, (tmp_path / "a.svg").read_text())


def test_the_svg_holds_no_date_and_no_program(tmp_path):
    figures.write("layers", build(), tmp_path)
    text = (tmp_path / "layers.svg").read_text()
    assert "<dc:date>" not in text and "Matplotlib v" not in text
    assert "<text" not in text  # letters are paths


def test_inside_a_page_letters_are_text_ids_are_the_figure_s_own_and_colours_are_the_theme_s():
    _, figure = described("gap_shapley", build(unresolved=("protocol",)))
    text = svg.inline(figure, "mine", svg.WIDE)
    assert "engine" in re.findall(r"<text[^>]*>([^<]*)</text>", text)
    ids = re.findall(r' id="([^"]+)"', text)
    assert ids and all(one.startswith("mine-") for one in ids) and len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) == set(ids)
    assert not re.search(r"#[0-9a-f]{6}", text)
    assert {f"#{name}" for name in re.findall(r"var\(--c-(\w+)\)", text)} <= DARK.keys()


def test_words_of_the_metrics_are_words_in_the_drawing():
    evil = "$</text><script>alert(1)</script>--> $x_\\frac$"
    panel = Panel(Axis((-1, 1), names=(evil,)), Axis((0, 2), evil), (), title=evil, across=True)
    root = ElementTree.fromstring(standing_alone(svg.inline(Figure("t", "n", (panel,)), "a", svg.WIDE)))
    assert not [one for one in root.iter() if one.tag.endswith("script")]
    assert "".join("".join(root.itertext()).split()).count("<script>alert(1)</script>") == 3


def test_a_colour_without_a_counterpart_on_the_dark_theme_is_refused():
    mark = Mark(0, 0, 1, 1, 1, ("a",), Look("#123456"))
    with refused(Fault, "fault.no-dark-colour", "#123456"):
        svg.inline(Figure("t", "n", (Panel(Axis((-1, 1)), Axis((0, 2)), (mark,)),)), "a", svg.WIDE)


@pytest.mark.parametrize("names", [(), ("one",)])
def test_a_figure_with_few_rows_or_none_has_room(tmp_path, names, recwarn):
    marks = tuple(Mark(row, row, 1, 0.5, 2, ("a",)) for row in range(len(names)))
    panel = Panel(Axis((-0.6, len(names) - 0.4), names=names), Axis((0.1, 10), log=True), marks, across=True)
    svg.write(Figure("t", "n", (panel,), height=20), tmp_path / "a.svg")
    assert len(read((tmp_path / "a.svg").read_text())) == 2 * len(names)
    assert not [warning for warning in recwarn if "constrained" in str(warning.message)]


def test_numbers_on_axes_are_short():
    assert [tick_name(x) for x in (0.0, 0.01, 0.5, 20.0, 1e-4, 2e-13, 1e6)] == [
        *("0", "0.01", "0.5", "20"),
        *("10⁻⁴", "2·10⁻¹³", "10⁶"),
    ]
    assert tick_name(0.25, "percent") == "25 %"


def test_nothing_to_draw_leaves_a_sentence(tmp_path):
    metrics = build()
    assert figures.write("noise", metrics, tmp_path)
    drawn = (tmp_path / "noise.svg").read_bytes()
    assert not figures.write("noise", metrics | {"noise": []}, tmp_path)
    assert (tmp_path / "noise.svg").read_bytes() != drawn
    assert pl.read_csv(tmp_path / "noise.csv").to_dicts() == [{"not_drawn": figures.NOT_MEASURED}]


@pytest.mark.parametrize("kept", [slice(1, None), slice(None, -1)])
def test_a_figure_that_leaves_a_number_out_is_refused(monkeypatch, kept):
    whole = figures.FIGURES["baseline"]
    short = figures.Drawn(whole.table, lambda table: whole.describe(table[kept]))
    monkeypatch.setitem(figures.FIGURES, "baseline", short)
    with refused(Fault, "fault.other-rows", "'baseline'"):
        described("baseline", build())


def test_an_unknown_figure_is_refused_with_the_nearest_name(tmp_path):
    with refused(UnknownName, None, "'layer'", "'layers'"):
        figures.write("layer", build(), tmp_path)


def test_neither_torch_nor_matplotlib_comes_with_the_import():
    code = (
        "import sys, kvlab_pipeline.report.findings, kvlab_pipeline.report.readme;"
        "sys.exit(int(bool({'torch', 'matplotlib'} & sys.modules.keys())))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    assert found.returncode == 0
