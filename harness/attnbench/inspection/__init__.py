"""Inspect attention on one small workload, the words of a sentence, step by step.

`walkthrough` and `oracle_diff` compute, `text` shows the results.
"""
