"""Serving from coded pages, held against what each request is told alone, and measured."""
