"""Which chunks a bounded pool should keep."""
