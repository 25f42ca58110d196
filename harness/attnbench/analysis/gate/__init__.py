"""The gate: two states of the code compared cell by cell, with a pass or fail.

`rulings` is the data and what may grow by how much, `certain` what has no noise, and `decision` what has, and the
whole; `outputs` shows it, `stored` keeps baselines.
"""
