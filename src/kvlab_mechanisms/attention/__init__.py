"""Attention that is computed in blocks, in two chunks, or on latents, beside its definition."""
