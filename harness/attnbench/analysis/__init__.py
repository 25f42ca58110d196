"""Analysis of stored runs: comparisons, verdicts, the gate, history and growth, computed on reading, without torch."""
