"""Invariance: whether a query's output stays bitwise equal, whatever else the same call computes."""
