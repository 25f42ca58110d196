"""The processes of a run: a coordinator that needs no torch, and workers that load torch and the implementations.

The coordinator plans a run, calls workers and writes the journal (docs/adr/0001).
"""
