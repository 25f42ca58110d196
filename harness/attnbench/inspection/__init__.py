"""Attention looked at instead of measured: one small workload over the words of a sentence, step by step.

`walkthrough` and `oracle_diff` compute, `text` and `page` show what they computed.
"""
