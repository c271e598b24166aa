"""The signal chain of the KV codec, one stage per file, and what stands in for it."""
