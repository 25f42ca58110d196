"""Detection power of the check and of other projects' rules, on every known mistake and on right implementations.

`python -m studies.detection` writes the tables (nox -s detection).
"""
