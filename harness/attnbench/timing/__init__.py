"""Timing: the order of samples in blocks, visits and passes. It can run on a simulated clock."""
