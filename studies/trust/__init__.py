"""Test whether times can be trusted: cheats try to get a false time, contaminations affect other implementations.

`python -m studies.trust` runs all cheats and contaminations with `attnbench run`, and writes a table (nox -s cheats).
"""
