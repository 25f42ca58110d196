"""What the check can detect, and what others' rules can, measured: every known mistake, and honest implementations.

`python -m studies.detection` writes the tables and the picture (nox -s detection).
"""
