"""A paged cache as a file, format v2: its identity, its checksums, its payload, and whether it may be used."""
