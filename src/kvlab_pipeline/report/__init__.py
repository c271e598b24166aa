"""metrics.json, ACCEPT or REJECT between engines (`verdict.py`), FINDINGS.md, report.html; never imports torch."""
