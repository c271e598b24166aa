"""A folder per study; `settings.py` reads and refuses params.yaml, `checks.py` refuses results that do not belong."""
