"""Validation of the method: acceptance, detection power, and a simulated machine. Not part of the package."""
