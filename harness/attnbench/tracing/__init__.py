"""Traces: torch.profiler on a case, tidied files, and their folders."""
