"""Trust in times of code by anyone: cheats and contaminations, run for real.

`python -m studies.trust` runs them through the command line and writes the tables (nox -s cheats).
"""
