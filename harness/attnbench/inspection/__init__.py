"""Inspect attention on one small workload, the words of a sentence, step by step.

`oracle_diff` computes, `text` shows the results.
"""
