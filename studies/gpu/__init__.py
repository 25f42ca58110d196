"""All tests and measurements on a GPU, by one command and with one archive: `python -m studies.gpu --out DIR`.

The modules that start the steps (`__main__`, plan, steps) need only Python. Each step (work) imports the packages that
it needs: if a package is missing, this step is left out, and the others are run.
"""
