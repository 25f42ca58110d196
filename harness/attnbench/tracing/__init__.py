"""Traces: run torch.profiler on a case, tidy the trace files, and manage their folders."""
