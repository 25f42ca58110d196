"""What is asked: a workload and its axes, masks, sweeps, and counts of its work. Knows nothing of torch."""
