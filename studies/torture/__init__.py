"""Trials of runs under kills, signals, damaged journals, invalid command lines, full disks and odd surroundings.

`python -m studies.torture` runs all trials and writes tables. The code that all kinds of trials share is in trial.py.
"""
