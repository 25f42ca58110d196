"""Timing: the order of samples in blocks, visits and passes, on the clock of a device or on a simulated clock."""
