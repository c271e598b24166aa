"""Studies: a function from cells to rows."""
