"""attnbench: which attention implementation is right, which is fast, which fits in memory.

The public way in from Python is to load stored runs as tables; measuring is done by the command `attnbench`.
"""

from attnbench.analysis.table import load, samples

__all__ = ["load", "samples"]
