"""Statistics from samples to verdicts, on plain numbers: independent of torch, files and metrics."""
