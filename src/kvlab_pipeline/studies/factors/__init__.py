"""The full factorial after which the gap between two corners is divided among its factors."""
