"""Comparison of attnbench's check with other projects' rules, on every known mistake and on right implementations.

`python -m studies.detection` writes the tables (nox -s detection).
"""
