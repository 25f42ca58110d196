"""Trust in times, whoever wrote the code: cheats want a false time, and contaminations affect other implementations.

`python -m studies.trust` runs them through the command line and writes the tables (nox -s cheats).
"""
