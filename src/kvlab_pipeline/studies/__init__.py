"""A folder per study: its cells, what is measured, its page; `settings.py` reads and refuses params.yaml."""
