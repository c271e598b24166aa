"""What codecs, evictions, latent caches, sparse reading and self-speculation cost and buy at equal bytes."""
