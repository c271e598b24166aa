"""Whether a row may be published: held against registries and evidence; `rules/` has the criteria by number."""
