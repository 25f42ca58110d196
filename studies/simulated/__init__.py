"""Simulated machines with noise of known size, on which attnbench's own code makes a whole run in seconds."""
