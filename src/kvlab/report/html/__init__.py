"""``report.html``: the findings as one page that opens from disk, with interactive figures.

The words and tables are those of FINDINGS.md: `markdown` turns the rendered file into HTML, `page` puts a figure
of `kvlab.report.figures` in the place of each picture, and plotly.js, the style and the script into the page.
"""
