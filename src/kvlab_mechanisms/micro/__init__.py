"""The micro-benchmark: single operations of mechanisms beside a library that does the same, in one process."""
