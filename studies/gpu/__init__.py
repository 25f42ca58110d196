"""Run all tests and measurements on a GPU, and pack the results into an archive: `python -m studies.gpu --out DIR`.

The modules that start the steps (`__main__`, plan, steps) need only Python. Each step (work) imports the packages that
it needs: if one is missing, the step is left out, and the other steps still run.
"""
