"""All tests and measurements on a GPU, by one command and with one archive: `python -m studies.gpu --out DIR`.

The modules that start the steps (`__main__`, plan, steps) need only Python. Each step (work) imports its own packages,
so that a missing package is the reason why one step is left out, and does not end the others.
"""
