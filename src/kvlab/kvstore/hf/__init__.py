"""Transformers models that read their K and V from a pager."""
