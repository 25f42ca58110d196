"""Traces: run torch.profiler on a case, tidy the files, and manage their folders."""
