"""Whether a codec may be claimed: rows held against registries and evidence; `rules.py` lists the criteria."""
