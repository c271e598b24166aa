"""metrics.json, whether engines may be compared (`verdict.py`), FINDINGS.md, report.html; never imports torch."""
