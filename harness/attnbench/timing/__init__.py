"""Timing: take samples in blocks, and choose the order and number of blocks, on a device's or a simulated clock."""
