"""The report's figures once more for ``report.html``: plotly, drawn from the same tables.

A function here takes the table that the SVG is drawn from and returns a plotly figure. The page adds what
all figures have: the caption, hovering by keyboard, the table of the drawn numbers, the dark theme, and on
narrow screens one panel below the other. For that a figure follows three rules:

- every drawn row of the table is one point of one trace, made by `marks.points` (its hover text is what the
  keyboard says too); traces that only guide the eye are made by `marks.guide`;
- colours are the ones of `marks.DARK`, so that the dark theme has a counterpart for each;
- the layout comes from `marks.figure`, whose `note` says how the marks are to be read.

`rows.by_row` draws any table of values with intervals, a row each; most new figures need no more than that.
"""
