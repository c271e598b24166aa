"""Whether a row may be published: held against registries and evidence; `rules.py` lists the criteria."""
