"""Numbers to words, tables and pictures: the printing library of every page."""
