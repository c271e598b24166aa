"""The report's pictures: each is drawn from a small table that is saved beside it as CSV.

A figure is a pair of functions: one takes the table out of ``metrics.json``, the other draws exactly
that table, so the CSV and the picture cannot differ. The SVG holds its letters as paths (it looks the
same everywhere), no date, and fixed ids (a rerun is byte for byte the same).
"""

from kvlab.report.figures.canvas import save
from kvlab.report.figures.gap_shapley import gap_shapley_table
from kvlab.report.figures.registry import FIGURES, NOT_MEASURED, drawable, picture, write

__all__ = ["FIGURES", "NOT_MEASURED", "drawable", "gap_shapley_table", "picture", "save", "write"]
