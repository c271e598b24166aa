"""A KV cache in chunks: what a chunk is, the pool that holds some of them, and who stays in it."""
