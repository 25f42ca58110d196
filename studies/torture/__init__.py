"""What a run survives: kills, signals, damaged journals, hostile command lines, full disks and odd surroundings.

`python -m studies.torture` tries it for real and writes a table. One file for each subject; trial.py has what they
share.
"""
