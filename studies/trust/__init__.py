"""Trust in times of code by anyone: cheats, contaminations and unusual honest forms, run for real.

`python -m studies.trust` runs them through the command line and writes the tables (nox -s cheats).
"""
