"""What a run says: comparisons, verdicts, the gate, history and growth, computed on read. Knows nothing of torch."""
