"""The gate: two states of the code compared cell by cell, with a pass or fail.

`rulings` is the data, `thresholds` what may grow by how much, `cells` which cell is which, `certain` what has no noise,
`times` what has, and `decision` the whole; `outputs` shows it, `stored` keeps baselines.
"""
