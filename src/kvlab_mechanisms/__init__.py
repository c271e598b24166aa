"""Mechanisms around a KV cache that stand apart from the study: decoding, serving, clusters, memory, a ledger."""
