"""metrics.json, its verdicts, FINDINGS.md and report.html; never imports torch."""
