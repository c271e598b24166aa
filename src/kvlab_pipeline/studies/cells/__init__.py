"""Cells that change one thing in the studied recipe."""
