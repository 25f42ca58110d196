"""Timing: the order of samples in blocks, visits and passes, on the device's clock or a simulated one."""
