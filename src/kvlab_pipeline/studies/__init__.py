"""One folder per study: which cells, what is measured, its numbers, its tables, its figures and its page."""
