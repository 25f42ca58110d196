"""Timing: what runs when and in which order, in blocks, visits and passes. A simulated clock can drive it."""
