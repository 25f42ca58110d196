"""Workloads and their axes, masks, sweeps, and counts of their work. This package does not import torch."""
