"""Planted truth: cells whose answer is known, through the same code as every other cell."""
