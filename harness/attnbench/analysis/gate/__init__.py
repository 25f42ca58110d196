"""The gate: two runs compared cell by cell, what has no noise exactly and time by statistics, with a pass or fail.

`rulings` is the data, `thresholds` what may be asked, `cells`, `certain` and `times` the parts, `judge` the whole;
`markdown`, `junit`, `series` and `text` show it, `stored` keeps baselines. Nothing here knows torch.
"""
