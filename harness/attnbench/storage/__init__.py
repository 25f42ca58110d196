"""Stored data: records, the events of a run, its journal, and run folders. Judges nothing, and needs no torch."""
