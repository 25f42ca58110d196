"""Traces: how a case is watched by torch.profiler, what is taken out of the file and put into it, where files lie."""
