"""KV caches in chunks: a bounded pool, what is known of each chunk, snapshots, and a restore that can be trusted."""
