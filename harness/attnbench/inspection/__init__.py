"""Inspect attention on one small workload, the words of a sentence, step by step.

oracle_diff.py computes the results, and text.py shows them.
"""
