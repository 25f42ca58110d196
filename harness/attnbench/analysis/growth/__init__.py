"""How memory grows with length: a fit over measured lengths, where a limit is reached, and calls that check it.

Nothing here knows torch: what is measured comes from a run, and what is tried is asked of a worker.
"""
