"""What paging costs and what it keeps, measured on a real model; every study leaves one record and its tables."""
