"""Checks of this repository that no package on PyPI offers; none of them is installed."""
