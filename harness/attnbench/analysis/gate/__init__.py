"""The gate: compare two states of the code cell by cell, and pass or fail.

`rulings` holds the data and the limits, `certain` judges noise-free metrics, `times` judges times, `decision` combines
them, `outputs` formats the result, and `stored` keeps baselines.
"""
