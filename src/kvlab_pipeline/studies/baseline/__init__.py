"""Codec off: how far each engine, dtype and attention kernel is from the float32 truth."""
