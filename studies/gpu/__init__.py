"""Everything to run on a GPU, in one command and one archive: `python -m studies.gpu --out DIR`.

The starter of the steps (`__main__`, plan, steps) needs only Python, so that a missing package is a step's reason and
not a crash; each step (work) imports its own packages.
"""
