"""Whether bits are better spent on K or on V, at equal bytes."""
