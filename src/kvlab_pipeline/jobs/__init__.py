"""One job of cells: what it measures, how it runs, and its result computed again by the witness."""
