"""Detection power of the check and of other projects' rules: every known mistake, and honest implementations.

`python -m studies.detection` writes the tables and the picture (nox -s detection).
"""
