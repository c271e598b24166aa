"""Markdown tables from the parts of ``metrics.json``: `parts` for all studies, and a file for each larger study."""
