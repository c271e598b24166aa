"""GATE.md: rows of what the pipeline measured, judged, and the page that says what may be claimed."""
