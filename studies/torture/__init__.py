"""Survival of a run: kills, signals, damaged journals, hostile command lines, full disks and odd surroundings.

`python -m studies.torture` tries them and writes a table. Each subject has a file; trial.py has the shared code.
"""
