"""Which numbers may be published: rows held against registries and evidence; never imports torch."""
