"""Whether it matters in which block of the pool a chunk lies."""
