"""The published study's result files, read as data: reproduced to their last digit, then given intervals.

`main.published` is the way in. A file is recognised by its fields (`families`), read by its family's reader
(`readers`) into cells of windows (`rows`), its own summary numbers are recomputed (`checks`), and what the windows
allow is estimated (`reanalyse`, `phases`, `rank`). `mismatch` compares recipes field by field. `report` writes it up.
"""
