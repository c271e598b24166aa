"""The pipeline beside the library: the studies and their report, as the Snakefile of a checkout runs them."""
