"""A metric of each cell over stored runs, with its change points. Reads journals alone; needs no torch.

Runs of one machine belong together: a series holds the runs of one fingerprint. Journals of several machines are merged
by putting their folders side by side.
"""
