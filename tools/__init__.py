"""Checks of this repository that no package on PyPI does; none of it is installed."""
