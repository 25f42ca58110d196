"""Statistics from samples to verdicts, on plain numbers: independent of torch, of files and of what was measured."""
