"""All that a GPU is to show, in one command and one archive: `python -m studies.gpu --out DIR`.

What starts the steps (`__main__`, plan, ledger) needs Python alone, so that a package that is missing is a step's
reason and no crash; what a step does (work) imports what it needs.
"""
